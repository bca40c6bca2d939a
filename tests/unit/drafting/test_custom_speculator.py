"""The speculator that the documentation shows: it can be pasted, it drafts, and it changes no token."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import SamplingParams
from paceline.llm import LLM

DOCUMENT = Path(__file__).parents[3] / "docs" / "custom-speculator.md"
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, logprobs=1)
SAMPLED = GREEDY.model_copy(update={"temperature": 0.7, "seed": 3})
REPEATS_ITSELF = SAMPLED.model_copy(update={"logit_bias": {5: 12.0}})


@pytest.fixture
def pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The dotted path of its class, in a module that holds the document's Python and nothing else."""
    [block] = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "again.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    yield "again.Again"
    sys.modules.pop("again", None)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, REPEATS_ITSELF])
@pytest.mark.parametrize("key", ["speculator", "model"])
def test_the_documented_speculator_drafts_and_changes_no_token(pasted: str, key: str, sampling: SamplingParams) -> None:
    settings = {"method": "custom_class", key: pasted, "row_budget": False, "draft_schedule": "lockstep"}
    llm = LLM("table:24", settings, {"slots": 512})
    guessed = llm.generate(["1 2 3", "4 4"], sampling)
    plain = llm.generate(["1 2 3", "4 4"], sampling, speculative=False)
    assert [(each.tokens, each.log_probs) for each in guessed] == [(each.tokens, each.log_probs) for each in plain]
    assert all(each.speculation.drafted_tokens > 0 for each in guessed)
    if sampling is REPEATS_ITSELF:
        assert all(each.speculation.accepted_tokens > 20 for each in guessed)
    assert not any(each.speculation.drafted_tokens for each in plain)


def test_the_documented_speculator_drafts_together_with_another(pasted: str) -> None:
    llm = LLM(
        "table:24", {"method": ["custom_class", "suffix"], "speculator": pasted, "row_budget": False}, {"slots": 512}
    )
    [guessed] = llm.generate("1 2 3", REPEATS_ITSELF)
    [plain] = llm.generate("1 2 3", REPEATS_ITSELF, speculative=False)
    assert guessed.tokens == plain.tokens
    assert guessed.speculation.accepted_tokens > 20


def test_a_model_beside_the_class_is_left_to_the_class(pasted: str) -> None:
    settings = {"method": "custom_class", "speculator": pasted, "model": "no.such.checkpoint", "row_budget": False}
    [answer] = LLM("table:24", settings, {"slots": 512}).generate("1 2 3", GREEDY)
    assert answer.speculation.drafted_tokens > 0
