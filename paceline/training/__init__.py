"""Trains the model family that ships with the package: `python -m paceline.training.family --help`."""
