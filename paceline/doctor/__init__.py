"""Which way to draft suits somebody's prompts, and what is wrong with those that do not. Nothing here prints."""
