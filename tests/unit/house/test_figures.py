"""`make house`: its figures of a tiny product, counted by hand, and the one of ours that must stay as it is."""

from __future__ import annotations

from pathlib import Path

from tests.house.figures import figures
from tests.house.names import ROOT

FILES = {
    "paceline/__init__.py": '"""A docstring alone."""\n',
    "paceline/v1/stub_pb2.py": "import paceline.low\n" * 60,
    "paceline/low/__init__.py": "class Base:\n    pass\n",
    "paceline/low/table.py": "import enum\n\n\nclass Kind(enum.Enum):\n    A = 1\n",
    "paceline/middle.py": "from paceline.low.table import Kind\n\n\ndef long():\n" + "    Kind.A\n" * 40,
    "paceline/high/one.py": (
        '"""Text\nof two lines."""\n'
        "from typing import Generic\n\nfrom paceline import middle  # the room, not the house\n"
        "from paceline.low import Base\n\n\n"
        "class Derived(Generic, Base):\n"
        '    field: int\n    """What it is."""\n\n'
        "    def method(self):\n        from paceline.high import two\n"
    ),
    "paceline/high/two.py": "from paceline.high import one\n\n\nclass Last(one.Derived[int]):\n    pass\n"
    + "X = 1\n" * 46,
    "services/gateway/__init__.py": "",
    "services/gateway/server.py": "from paceline_services.gateway.http import app\nimport paceline.high.one\n",
    "services/gateway/http/app.py": "from paceline_services.gateway import auth\n",
    "services/gateway/auth.py": "",
    "tests/test_all.py": "\n\n\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_figures_of_a_tiny_product(tmp_path: Path) -> None:
    assert figures(write(tmp_path, FILES)) == {
        "rooms": 4,  # low, middle, high, gateway
        "gateway_rooms": 3,  # server, http, auth
        "gateway_arrows": 2,
        "longest_chain": 4,  # gateway > high > middle > low
        "imports_up": 0,
        "circles": 0,
        "deepest_bases": 3,  # Last > Derived > Base
        "classes": 4,
        "long_functions": ["paceline/middle.py: long (41)"],
        "small_files": 7,  # not high/two.py, of 51 lines, nor files of a docstring or nothing
        "product_lines": 120,
        "test_lines": 3,
        "code_share": round((2 + 3 + 42 + 7 + 49 + 2 + 1) / 120, 3),
    }


def test_a_circle_counts_once_and_its_imports_lead_up(tmp_path: Path) -> None:
    circle = {"paceline/low/back.py": "def later():\n    import paceline.high.one\n"}
    found = figures(write(tmp_path, FILES | circle))
    assert (found["circles"], found["imports_up"], found["longest_chain"]) == (1, 4, 2)


def test_the_product_has_no_circle() -> None:
    found = figures(ROOT)
    assert (found["circles"], found["imports_up"]) == (0, 0)
