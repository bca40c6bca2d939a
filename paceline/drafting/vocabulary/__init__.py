"""The tokenizers of a target and a draft that differ: which tokens mean the same, and text between them."""
