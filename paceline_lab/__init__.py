"""Training, benchmarks, simulation and fake models. Not in the wheel, and no service imports it."""
