"""What the head methods share: checkpoints, networks, the draft loop."""
