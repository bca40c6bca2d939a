"""The HTTP API: bodies, responses, middleware."""
