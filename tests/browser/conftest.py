"""They need headless Chromium: `apt-get install chromium`. Without it they are left out; where CI runs they fail."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests.browser.chromium import chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = chromium() is None or find_spec("playwright") is None
    if missing and not os.environ.get("CI"):
        reason = pytest.mark.skip(reason="needs `apt-get install chromium`, and playwright from `make setup`")
        for item in items:
            if item.path.parent.name == "browser":
                item.add_marker(reason)
