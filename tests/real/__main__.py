"""`make test-real`: the tests with published models; arguments go to pytest.

Exit code 0 and one sentence if pip cannot download a model, or llama.cpp cannot be built.
"""

from __future__ import annotations

import sys

import pytest

from paceline.cli.model_download import NotAvailableError, download
from paceline.model_names import PUBLISHED
from paceline_lab.peers.llama_cpp_build import llama_cpp_programs
from paceline_lab.peers.peer_environments import NotInstalledError
from tests.real.conftest import PEERS


def main(arguments: list[str]) -> int:
    try:
        for name in PUBLISHED:
            download(name)
        llama_cpp_programs(PEERS)
    except (NotAvailableError, NotInstalledError) as error:
        print(f"Not tested with published models: {error}")
        return 0
    return pytest.main(["-m", "real", "-s", "tests/real", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
