"""Transformers models over rows: loading, attention, slots, probes."""

from paceline.model.load import limit_torch_threads, load
from paceline.model.model import Model, ModelOutput
from paceline.model.rows import Row, SlotTable

__all__ = ["Model", "ModelOutput", "Row", "SlotTable", "limit_torch_threads", "load"]
