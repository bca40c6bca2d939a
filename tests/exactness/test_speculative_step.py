"""docs/speculative-step.md: its code runs, and its claims hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.core import verify
from paceline.core.tree import ROOT, TokenTree
from paceline.core.verify import Verdict
from tests.house.names import ROOT as REPOSITORY

[CODE] = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs/speculative-step.md").read_text(), re.M | re.S)


def names(code: str = CODE) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(code, "docs/speculative-step.md", "exec"), found)
    return found


def test_the_page_decodes_the_same_tokens_in_fewer_passes() -> None:
    page = names()
    assert page["speculative"] == page["plain"]
    assert len(page["plain"]) == 102
    assert page["passes"] < page["plain_passes"] / 2
    assert len(CODE.splitlines()) <= 60


def test_a_useless_draft_costs_passes_and_no_token() -> None:
    page = names(CODE.replace("target(text) + torch.randn(", "0 * torch.randn("))
    assert page["speculative"] == page["plain"]
    assert page["passes"] > names()["passes"]


def test_the_page_catches_a_verification_that_accepts_what_was_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_guess(tree: TokenTree, verified: list[int], draws: list[int]) -> Verdict:
        accepted = verified[:1]
        return Verdict(accepted, dict(zip((ROOT, *verified), draws, strict=True))[accepted[0] if accepted else ROOT])

    monkeypatch.setattr(verify, "follow_draws", first_guess)
    with pytest.raises(AssertionError):
        names()
