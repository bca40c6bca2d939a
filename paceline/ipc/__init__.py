"""A service's model process, and the pipe to it.

Model code holds the interpreter almost all the time and would delay an event loop in the same process. So the process
that serves gRPC computes nothing: it starts a second process for the model and exchanges messages with it over a pipe.
"""
