"""The steps of `paceline bench gpu`: modules whose `measure` yields figures as soon as it has them.

On a CPU they run with tiny shapes, to show that they work; their figures mean nothing there.
"""
