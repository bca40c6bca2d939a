"""States of linear attention, Mamba and convolutions: one per request at its root, and a few vectors per guess."""
