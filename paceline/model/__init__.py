"""Transformers models over rows: loading, attention, slots, probes."""

from paceline.model.model import Model, ModelOutput
from paceline.model.model_loader import limit_torch_threads, load
from paceline.model.rows import Row, SlotTable

__all__ = ["Model", "ModelOutput", "Row", "SlotTable", "limit_torch_threads", "load"]
