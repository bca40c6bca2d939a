"""The file of a gateway's API keys: name, hash and limits of each, never the key itself.

A key is 256 random bits. They cannot be found from a SHA-256 by trying, which slow hashes with salts prevent for
secrets that people choose. So one fast hash is enough, and it takes a request no time.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from pathlib import Path

from pydantic import Field, ValidationError, field_validator, model_validator

from paceline.config.settings import Settings
from paceline.config.validation_messages import first_error
from paceline.launcher import StartError
from paceline.target_features import parse_labels

PREFIX = "pl-"
"""By which scanners recognise a key that leaked into a repository."""


class KeyFileError(StartError):
    """The file has no usable keys; the message says why, and quotes nothing of the file."""


class ApiKey(Settings):
    """One key. Limits are per gateway; None: no limit. `max_concurrent`: requests in flight."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="in logs and metrics")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, description="prompt and output")
    max_concurrent: int | None = Field(None, ge=1)
    target_labels: str = Field("", description="labels that targets of its requests must have: KEY=VALUE,KEY=VALUE")

    @field_validator("target_labels")
    @classmethod
    def _labels(cls, text: str) -> str:
        return ",".join(sorted(parse_labels(text)))


class KeyFile(Settings):
    keys: tuple[ApiKey, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> KeyFile:
        for field in ("name", "sha256"):
            if len({getattr(key, field) for key in self.keys}) < len(self.keys):
                raise ValueError(f"two keys have the same {field}")
        return self


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read(path: Path) -> KeyFile:
    """The keys in a file. Raises `KeyFileError`."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise KeyFileError(f"{path} holds no API keys: {first_error(error, quote=False)}") from None


def write(path: Path, keys: KeyFile) -> None:
    """Replace the file atomically: a reader sees the old or the new one. Only its owner may read it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as new:  # mode 0600
        new.write(keys.model_dump_json(indent=2, exclude_none=True) + "\n")
    Path(new.name).replace(path)
