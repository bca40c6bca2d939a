"""llama.cpp's programs of this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

VARIABLE = "LLAMA_CPP"
"""Names the folder of the programs; without it they are looked for on the PATH."""


def find_program(name: str) -> Path | None:
    """None if llama.cpp is not installed."""
    found = shutil.which(name, path=os.environ.get(VARIABLE) or None)
    return Path(found) if found else None
