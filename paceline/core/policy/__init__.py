"""Speculation policy, without torch: which nodes get a row, and how long a step waits for draft tokens."""
