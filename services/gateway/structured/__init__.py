"""Structured output: what a request asks for, as a grammar."""
