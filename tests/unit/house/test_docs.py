"""What the documentation names exists: files, and functions of classes."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.house import names

PAGES = [names.ROOT / "README.md", *sorted((names.ROOT / "docs").rglob("*.md"))]


def members() -> dict[str, set[str]]:
    """The methods and attributes of every class of the product, its bases' included, and the fields of messages."""
    bases: dict[str, list[str]] = {}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for _, tree in names.modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = re.findall(r"\w+", " ".join(map(ast.unparse, node.bases)))
                found[node.name] |= {name for name, _ in names.given_names(node)}
    for proto in (names.ROOT / "proto").rglob("*.proto"):
        for message, body in re.findall(r"^message (\w+) \{\n(.*?)^\}", proto.read_text(), re.MULTILINE | re.DOTALL):
            found[message] |= set(re.findall(r"\w+", body))

    def inherited(name: str) -> set[str]:
        return found[name].union(*(inherited(base) for base in bases.get(name, ()) if base != name))

    return {name: inherited(name) for name in tuple(found)}


MEMBERS = members()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(names.ROOT)))
def test_functions_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [f"{cls}.{name}" for cls, name in named_functions(text) if name not in MEMBERS.get(cls, ())]
    assert missing + [path for path in named_files(text) if not (names.ROOT / path).exists()] == []


def test_names_are_found_in_a_page() -> None:
    text = "`Fleet.choose` of `services/gateway/routing/fleet.py`, `Engine._step`, `x.py`, `services/NAME.py`"
    assert named_functions(text) == [("Fleet", "choose"), ("Engine", "_step")]
    assert named_files(text) == ["services/gateway/routing/fleet.py"]
    assert "choose" in MEMBERS["Fleet"]


def named_functions(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`", text)


def named_files(text: str) -> list[str]:
    """Without names to be chosen, which are in capitals."""
    return re.findall(r"`((?:paceline|paceline_lab|services|tests|proto|deploy|loadtests)/[a-z\d_./-]+\.\w+)`", text)


def test_the_example_of_a_parameter_applies_to_the_code_as_it_is() -> None:
    """If it does not: apply it by hand, run its tests, and write it again with `git diff -U2`."""
    example = "docs/examples/epsilon_cutoff.diff"
    subprocess.run(["git", "apply", "--check", example], cwd=names.ROOT, check=True)


def test_the_figures_of_published_models_are_those_of_their_run() -> None:
    run = json.loads((names.ROOT / "benchmarks" / "real.json").read_text())
    table = (names.ROOT / "README.md").read_text().partition("| tokens/s: llama.cpp")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    loads = {"short": "plain", "batch8": "batch8", "prompt_512": "prompt_512", "prompt_4096": "prompt_4096"}
    loads |= {"code": "best_code", "edits": "best_edits"}
    expected = [[_speeds(run, model, load, ratio) for model in run["real"]] for load, ratio in loads.items()]
    expected.append([f"{ratios['speculative_chat_08']:.2f}" for ratios in run["real"].values()])
    starts = {name: f"{start['first_token_s']:.1f}" for name, start in run["starts"].items()}
    expected.append([f"{starts[f'{model}, llama.cpp']} · {starts[f'{model}, paceline']}" for model in run["real"]])
    assert [cells for _, *cells in rows] == expected


def _speeds(run: dict[str, Any], model: str, load: str, ratio: str) -> str:
    """The fastest method's tokens per second of both engines, and their ratio."""
    rows = [row for row in run["rows"] if (row["model"], row["load"]) == (model, load)]
    engines = ("llama.cpp", "paceline")
    fastest = [max(row["tokens_per_s"] for row in rows if row["engine"] == engine) for engine in engines]
    return f"{' · '.join(f'{each:,.0f}' for each in fastest)} ({run['real'][model][ratio]:.2f})"
