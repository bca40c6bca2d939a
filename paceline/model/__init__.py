"""A transformers model run over rows: loading, attention, slots, probes."""

from paceline.model.loading import load, settle_threads
from paceline.model.model import Model, Output
from paceline.model.rows import Lane, Row

__all__ = ["Lane", "Model", "Output", "Row", "load", "settle_threads"]
