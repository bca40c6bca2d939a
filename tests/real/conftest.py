"""The published models, downloaded, and llama.cpp, built."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.model_download import download
from paceline.model_names import PUBLISHED
from paceline_lab.peers.llama_cpp_build import llama_cpp_programs

PEERS = Path(".venv-peers")
"""Where `paceline bench peers` has llama.cpp, too."""


@pytest.fixture(scope="module", params=list(PUBLISHED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str) -> Path:
    return download(name)


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """The folder of llama.cpp's programs."""
    return llama_cpp_programs(PEERS)
