"""`make test-real`: the tests with published models; arguments go to pytest.

Exit code 0 and one sentence if pip cannot download a model.
"""

from __future__ import annotations

import sys

import pytest

from paceline.published_models import PUBLISHED, NotAvailableError, download


def main(arguments: list[str]) -> int:
    try:
        for name in PUBLISHED:
            download(name)
    except NotAvailableError as error:
        print(f"Not tested with published models: {error}")
        return 0
    return pytest.main(["-m", "real", "-s", "tests/real", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
