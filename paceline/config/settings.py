"""The base class of all settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings: immutable; an unknown key is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
