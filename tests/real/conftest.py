"""The published models, downloaded, and programs of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.published_models import PUBLISHED, download
from tests.real.llama_cpp import VARIABLE, find_program


@pytest.fixture(scope="module", params=list(PUBLISHED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str) -> Path:
    return download(name)


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """llama.cpp's program of this name."""
    return program("llama-server")


@pytest.fixture(scope="session")
def llama_perplexity() -> Path:
    """llama.cpp's program of this name."""
    return program("llama-perplexity")


def program(name: str) -> Path:
    found = find_program(name)
    if found is None:
        pytest.skip(f"there is no {name}: name the folder of llama.cpp's programs in {VARIABLE}")
    return found
