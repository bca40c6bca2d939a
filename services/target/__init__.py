"""The target worker: decodes, and verifies draft tokens."""
