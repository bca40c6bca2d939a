"""Rules for the whole house: one name for one thing, in the field's words, no torch in a service, no stale mutant."""

import subprocess
import sys

import pytest

from tests.house import names
from tests.mutants.table import MUTANTS

ARCHITECTURE = names.ROOT / "docs" / "architecture.md"


def test_no_public_class_name_stands_twice() -> None:
    assert names.repeated_class_names() == {}


def test_names_use_the_words_of_the_glossary() -> None:
    assert names.denied_names() == []


def test_the_functions_in_the_architecture_s_tables_are_in_the_files_beside_them() -> None:
    rows = [line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("|") and ".py`" in line]
    assert len(rows) > 20
    assert list(names.misplaced_names(rows)) == []
    moved = "| 1 | what | `Engine.step`, `Engine.gone` | `paceline/engine/engine.py`, `wire/nowhere.py` |"
    assert list(names.misplaced_names([moved])) == [
        "no file wire/nowhere.py",
        "Engine.gone is not in paceline/engine/engine.py, wire/nowhere.py",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LaneOfHearsay", ["lane", "of", "hearsay"]),
        ("states_told", ["states", "told"]),
        ("KVCache", ["kv", "cache"]),
    ],
)
def test_a_denied_word_is_found_wherever_it_stands_in_a_name(name: str, words: list[str]) -> None:
    assert names.words(name) == words


@pytest.mark.parametrize("service", ["target", "draft", "gateway"])
def test_a_service_imports_no_torch(service: str) -> None:
    """Its model process does."""
    code = (
        f"import paceline_services.{service}.__main__, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_mutant_is_stale() -> None:
    """A stale one is to be written anew: one alone keeps `make mutants` from running."""
    assert [file for each in MUTANTS for file in each.tests if not (names.ROOT / "tests" / file).exists()] == []
    assert [each.name for each in MUTANTS if each.occurrences() != 1] == []
