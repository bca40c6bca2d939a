"""The idea, without a model: token tree, sampling, verification, policy, and the messages of gateway and engine."""
