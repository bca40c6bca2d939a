"""Load tests: users over HTTP and gRPC, load shapes, expected tokens, checks of every stream, figures.

`python -m loadtests` runs them, `python -m loadtests.chaos` runs them while processes die; see README.md.
"""
