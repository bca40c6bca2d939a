"""Targets on the machines of a Ray cluster.

Ray schedules, starts and watches processes. It computes nothing and carries no step: the processes and their
connections are the same as without Ray.
"""
