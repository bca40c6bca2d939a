"""What makes and measures Paceline, and serves nobody: training, benchmarks, simulation, fake models. Not in the
wheel."""
