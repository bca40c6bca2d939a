"""Heads that the package `speculators` writes guess what its own models guess, which is recorded here."""
