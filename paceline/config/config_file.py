"""Reads the options of a command from a file, as vLLM's `--config` does: YAML, or TOML by the file's suffix.

    model: /models/llama-70b
    port: 8000
    speculative_config:
      method: eagle3
      model: /models/llama-70b-eagle3

Keys are the command's long options, with `-` or `_`. The command line overrides the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


class ConfigFileError(ValueError):
    """The message names the file and, for a wrong key, its line."""


def read(path: Path, known: Collection[str]) -> Mapping[str, Any]:
    """Values by option name, with `_`. Raises `ConfigFileError` if the file cannot be read or a key is not `known`."""
    import yaml  # most commands have no such file

    try:
        text = path.read_text(encoding="utf-8")
        given = _toml(text) if path.suffix == ".toml" else _yaml(text)
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    values = {}
    for key, (value, line) in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigFileError(f"{path}, line {line}: {key} is no option of this command")
        values[name] = value
    return values


def as_text(value: Any) -> str:
    """A value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def as_arguments(values: Mapping[str, Any]) -> Sequence[str]:
    """Command-line arguments. A list repeats its option; `true` is a switch."""
    arguments = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                arguments.append(option)
            elif each is not False and each is not None:
                arguments.append(f"{option}={as_text(each)}")
    return arguments


def _yaml(text: str) -> dict[str, tuple[Any, int]]:
    """Values and line numbers by key."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigFileError("it has to be a mapping of options to values")
        return {
            str(loader.construct_object(key)): (loader.construct_object(value, deep=True), key.start_mark.line + 1)
            for key, value in root.value
        }
    finally:
        loader.dispose()


def _toml(text: str) -> dict[str, tuple[Any, int]]:
    """Values and line numbers by key. tomllib has no line numbers: a key's line is the first that begins with it."""
    lines = text.splitlines()

    def line_of(key: str) -> int:
        begins = re.compile(rf'\s*\[?\s*"?{re.escape(key)}"?\s*[\].=]')
        return next((number for number, line in enumerate(lines, 1) if begins.match(line)), 1)

    return {key: (value, line_of(key)) for key, value in tomllib.loads(text).items()}
