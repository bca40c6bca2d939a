"""Model names: what a user may write where a model is asked for, and the place it stands for.

A name is a folder in the layout that transformers writes, a member of the family that ships with the package, or one
of two models without weights, to measure everything else with: `table:SIZE[:DISAGREEMENT]` computes nothing, and
`timed:KEY=VALUE,...` takes its time (`paceline.timed`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline import family, timed

TABLE_PREFIX = "table:"
WEIGHTLESS = (TABLE_PREFIX, timed.PREFIX)


class ModelNotFoundError(Exception):
    """There is no such model; the text says what to do."""


def resolve_model(name: str) -> str:
    """The absolute folder of a model, or the name itself for one without weights. Raises `ModelNotFoundError`."""
    if is_weightless(name):
        numbers(name)
        return name
    folder = family.path(name) if name in family.SHIPPED else Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"no model at {folder}: a model is a folder with config.json, weights and tokenizer.json "
            f"(download one with `hf download NAME --local-dir FOLDER`), or one of {', '.join(family.SHIPPED)}"
        )
    return str(folder)


def configuration(place: str) -> dict[str, Any]:
    """What config.json says in the folder of a model. Raises `ModelNotFoundError` if it says nothing."""
    try:
        content = json.loads((Path(place) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"config.json in {place} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"config.json in {place} holds no JSON object: download the model again")
    return content


def is_weightless(name: str) -> bool:
    """Whether this names a model that has no weights, and therefore computes nothing."""
    return name.startswith(WEIGHTLESS)


def numbers(name: str) -> tuple[int, str] | None:
    """Size and fingerprint of the vocabulary of a model without weights: its tokens are numbers. None for others.

    Raises `ModelNotFoundError` if the name is not complete.
    """
    if name.startswith(TABLE_PREFIX):
        size = name.removeprefix(TABLE_PREFIX).partition(":")[0]
        if not size.isascii() or not size.isdigit() or int(size) < 2:
            raise ModelNotFoundError(
                f"{name!r} names no table model: write {TABLE_PREFIX} and a vocabulary size of 2 or more"
            )
        return int(size), f"{TABLE_PREFIX}{size}"
    if name.startswith(timed.PREFIX):
        try:
            spec = timed.TimedModel.parse(name)
        except ValueError as error:
            raise ModelNotFoundError(str(error)) from error
        return spec.vocabulary, spec.fingerprint
    return None


def served_name(model: str, wanted: str | None) -> str:
    """The name that answers carry. Raises ValueError if a timed model would pass for another one."""
    if model.startswith(timed.PREFIX) and wanted is not None and not wanted.startswith(timed.PREFIX):
        raise ValueError(f"a timed model is served by a name that begins with {timed.PREFIX!r}, not as {wanted!r}")
    return wanted or (model if is_weightless(model) else Path(model).name)
