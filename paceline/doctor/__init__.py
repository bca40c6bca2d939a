"""Measures which speculator suits a user's prompts, and diagnoses low acceptance. Nothing here prints."""
