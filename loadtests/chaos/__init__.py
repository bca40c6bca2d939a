"""Chaos: a deployment of its own under load, whose processes are killed at random, and clients who know each token."""
