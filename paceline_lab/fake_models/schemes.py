"""Parsers of fake models' names. The models import torch, and are imported only to load one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.model_names import ModelNotFoundError
from paceline_lab.fake_models.timed_config import TIMED_PREFIX, TimedModelConfig

if TYPE_CHECKING:
    from paceline.model.model import Model


class TableScheme:
    """`table:SIZE[:DISAGREEMENT]`, a model without compute: see `paceline_lab.fake_models.table_model`."""

    def vocabulary(self, name: str) -> tuple[int, str]:
        size = name.split(":")[1]
        if not size.isascii() or not size.isdigit() or int(size) < 2:
            raise ModelNotFoundError(f"{name!r} names no table model: write table: and a vocabulary size of 2 or more")
        return int(size), f"table:{size}"

    def load(self, name: str, config: EngineConfig) -> Model:
        from paceline_lab.fake_models.table_model import TableModel

        return TableModel.parse(name, slots=config.slot_count, max_model_len=config.max_model_len)

    def check_served_name(self, served_name: str) -> None:
        """Any name is valid: a table's text is numbers."""


class TimedScheme:
    """`timed:KEY=VALUE,...`, a simulated accelerator: see `paceline_lab.fake_models.timed_config`."""

    def vocabulary(self, name: str) -> tuple[int, str]:
        try:
            spec = TimedModelConfig.parse(name)
        except ValueError as error:
            raise ModelNotFoundError(str(error)) from error
        return spec.vocabulary, spec.fingerprint

    def load(self, name: str, config: EngineConfig) -> Model:
        from paceline_lab.fake_models.table_model import MAX_POSITIONS
        from paceline_lab.fake_models.timed_model import TimedModel

        spec = TimedModelConfig.parse(name)
        return TimedModel(name, spec, slots=config.slot_count, max_model_len=config.max_model_len or MAX_POSITIONS)

    def check_served_name(self, served_name: str) -> None:
        if not served_name.startswith(TIMED_PREFIX):
            raise ValueError(
                f"a timed model is served by a name that begins with {TIMED_PREFIX!r}, not as {served_name!r}"
            )
