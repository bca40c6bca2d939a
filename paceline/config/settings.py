"""What all settings have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings: immutable, and a key nobody knows is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
