"""Tile registers at other optimisation levels: a compiler may move or drop stores that it does not see to be read.

GCC 12's headers declare that a tile configuration reads 8 of its 64 bytes, and do not say that loads of tiles read
memory. Seen in another program, whose tiles had a wrong shape and which died by an illegal instruction.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.model.native.build import ISAS, cpu_flags

AMX = next(isa for isa in ISAS["x86_64"] if isa.name == "amx")
ROWS = """
import torch
from paceline.config import EngineConfig
from paceline.model import load
from paceline.model.native.build import native_description
from tests.helpers.row_runs import assert_same, chunks, one_by_one

torch.set_num_threads(2)
assert native_description().startswith("amx"), native_description()
tokens = [(37 * i + 11) % 300 for i in range(50)]
engine = EngineConfig(slots=1024, dtype="bfloat16", threads=2)
assert_same(chunks(load("pydoc", engine), tokens, 21), one_by_one(load("pydoc", engine), tokens))
"""


@pytest.mark.skipif(not cpu_flags() >= AMX.needs, reason="the CPU has no AMX")
@pytest.mark.parametrize("flags", ["-O1", "-O2", "-O3 -flto"])
def test_tiles_compute_what_vectors_compute(flags: str, tmp_path: Path) -> None:
    """A chunk's rows, by tiles, equal those of one row each, by vectors."""
    environment = {**os.environ, "PACELINE_NATIVE_FLAGS": flags, "PACELINE_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", ROWS], check=True, env=environment, timeout=600)
