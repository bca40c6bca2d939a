"""Golden traces: what some 200 requests answered when they were recorded, and whether they still answer it.

They hold the behaviour of the library and of the HTTP API still while the code behind them is rebuilt. So they use
nothing but these two. `python -m tests.golden` records them again, which is right only where an answer is meant to
change.
"""
