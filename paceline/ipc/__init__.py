"""A service's compute, in a process of its own.

What computes holds the interpreter almost all the time, and an event loop beside it in the same process answers late.
So the process that speaks gRPC computes nothing: it starts another one, and the two talk over a pipe.
"""
