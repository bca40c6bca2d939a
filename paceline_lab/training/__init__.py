"""Trains the model family that ships with the package: `python -m paceline_lab.training.train_family --help`."""
