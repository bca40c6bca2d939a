"""How vLLM is told about the draft pool: `--additional-config '{"paceline": {...}}'` or environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator, model_validator

from paceline.config import LookupMethod
from paceline.config.settings import Settings

DRAFTS_VARIABLE = "PACELINE_DRAFTS"
"""Environment variable: addresses of draft workers, separated by commas."""
REDIS_URL_VARIABLE = "PACELINE_REDIS_URL"
"""Environment variable: the Redis in which draft workers register."""


class RemoteDraftsSettings(Settings):
    """The object `paceline` in vLLM's `additional_config`."""

    drafts: tuple[str, ...] = Field((), description="addresses of draft workers, host:port")
    redis_url: str | None = Field(None, description="where draft workers register; adds those to `drafts`")
    lookups: tuple[LookupMethod, ...] = Field((), description="methods without weights that draft beside them")
    lookup_settings: dict[str, Any] = Field(
        default_factory=dict, description="their settings: keys of --speculative-config, such as prompt_lookup_min"
    )
    hidden_state_layers: tuple[int, ...] = Field(
        (), description="layers whose hidden states draft workers read, ascending; for CoupledWorker only"
    )
    row_budget: bool = Field(
        True, description="false: draft always and verify all of it, whatever it costs; for comparisons"
    )
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @model_validator(mode="after")
    def _all_or_none(self) -> RemoteDraftsSettings:
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if any(files.values()) and not all(files.values()):
            raise ValueError(f"{' and '.join(name for name, file in files.items() if not file)} must be given, too")
        return self

    @field_validator("hidden_state_layers")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted({each for each in value if each >= 0}):
            raise ValueError("must be layer numbers in ascending order, as vLLM returns them")
        return value

    @property
    def tls_files(self) -> tuple[str, str, str] | None:
        """Certificate, key and authority, if all are given."""
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        return files if all(files) else None  # type: ignore[return-value]

    @field_validator("drafts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @classmethod
    def read(cls, additional_config: object) -> RemoteDraftsSettings:
        """`additional_config`: vLLM's. Raises ValueError."""
        given = additional_config.get("paceline", {}) if isinstance(additional_config, Mapping) else {}
        defaults = {"drafts": os.environ.get(DRAFTS_VARIABLE), "redis_url": os.environ.get(REDIS_URL_VARIABLE)}
        settings = cls.model_validate({key: value for key, value in defaults.items() if value} | dict(given))
        if not (settings.drafts or settings.redis_url or settings.lookups):
            raise ValueError(
                f"no draft workers: set {DRAFTS_VARIABLE}=HOST:PORT,... or {REDIS_URL_VARIABLE}, "
                'or pass --additional-config \'{"paceline": {"drafts": ["HOST:PORT"]}}\''
            )
        return settings


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What the process of the links needs: the first message to it."""

    addresses: Sequence[str]
    redis_url: str | None
    fingerprint: str
    tls_files: tuple[str, str, str] | None
    """Certificate, key, authority."""
    hidden_state_layers: Sequence[int] = ()
    """Layers whose hidden states are sent."""
