"""Metrics for Prometheus and log lines.

Import the module you need; `step_stats` needs nothing but this package and `paceline.messages`.
"""
