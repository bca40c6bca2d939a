"""What a running service says about itself: metrics for Prometheus, log lines for people.

Import the module you need; `step` needs nothing but this package and `paceline.core.messages`.
"""
