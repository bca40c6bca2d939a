"""Targets on the machines of a Ray cluster.

Ray places processes, starts them and tells when they end. It computes nothing and carries no step: those processes are
the ones that run without Ray, and talk as they do then.
"""
