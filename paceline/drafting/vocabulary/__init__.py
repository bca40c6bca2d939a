"""Draft models whose tokenizer is not the target's."""
