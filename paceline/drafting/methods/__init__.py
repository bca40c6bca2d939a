"""One file per way to draft."""
