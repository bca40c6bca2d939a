"""Chaos: a deployment under load whose processes are killed at random, with clients that check every token."""
