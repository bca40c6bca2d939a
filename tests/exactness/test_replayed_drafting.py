"""The first steps of a request that lost its target: it is drafted as before, and its tokens do not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.config import SamplingParams
from paceline.core.policy.step_cost import RowCost
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.messages import Delta, GenerationRequest

SPECULATION = {"eagle3": {"method": "eagle3", "model": "pydoc-eagle3"}, "suffix": {"method": "suffix"}}
PROMPT = 'def read_lines(path):\n    """Return the lines of a file.'
BEFORE, SHOWN = 20, 10
"""Steps before the target is lost, and after it."""


class Target:
    """An engine with the shipped model."""

    def __init__(self, llm: LLM, method: str) -> None:
        made = llm.with_speculation(SPECULATION[method])
        self.engine = Engine(
            llm.model,
            llm.config,
            made.speculation,
            made._engine._draft_client,
            RowCost([1, 8, 64, 256], [0.010, 0.012, 0.030, 0.1]),
            clock=lambda: 0.0,  # so no step costs more than its pass
        )

    def steps(self, request: GenerationRequest, count: int) -> list[Delta]:
        """The deltas of the request's first steps."""
        self.engine.submit(request)
        deltas: list[Delta] = []
        while len(deltas) < count:
            deltas += [each for each in self.engine.step() if each.request_id == request.request_id and each.tokens]
        return deltas

    def pause_draft(self) -> None:
        """As after requests that the draft did not help."""
        self.steps(GenerationRequest("other", [5, 6, 7], SamplingParams(max_tokens=100)), 2)
        [gate] = self.engine._draft_manager._gates.values()
        gate._paused, gate._pause_left = True, gate.MIN_PAUSE_STEPS


def shown(deltas: Sequence[Delta]) -> list[tuple[int, int]]:
    """Nodes verified and accepted of each step."""
    return [(len(tree.tokens), sum(each.accepted)) for each in deltas for tree in each.trees]


@pytest.mark.parametrize("method", SPECULATION)
def test_a_replayed_request_is_drafted_from_the_first_step_on(method: str) -> None:
    """Its next target has paused the draft, which does not help other requests there."""
    llm = LLM("pydoc", SPECULATION[method], {"enable_prefix_caching": False, "threads": 1, "slots": 2048})
    prompt, sampling = llm.tokenizer.encode(PROMPT), SamplingParams(max_tokens=300, temperature=0.0)
    first = Target(llm, method)
    deltas = first.steps(GenerationRequest("r", prompt, sampling, return_tree=True), BEFORE + SHOWN + 1)
    committed = [token for each in deltas[:BEFORE] for token in each.tokens]
    expected = [token for each in deltas[BEFORE:] for token in each.tokens]
    [running] = first.engine._requests.values()
    first.engine.reset()
    steps = {"undisturbed": shown(deltas[BEFORE + 1 :])}
    for name, average in (("without", None), ("with", running.stats.accepted_average)):
        target = Target(llm, method)
        target.pause_draft()
        replayed = GenerationRequest(
            "r", prompt, sampling, committed=committed, return_tree=True, accepted_average=average
        )
        deltas = target.steps(replayed, SHOWN + 1)
        steps[name] = shown(deltas[1:])  # the first one computes the prompt
        tokens = [token for each in deltas for token in each.tokens]
        common = min(len(tokens), len(expected))
        assert tokens[:common] == expected[:common]
        target.engine.reset()
    print(method, *(f"\n{name:12}{values}" for name, values in steps.items()))
    assert not any(nodes for nodes, _ in steps["without"])
    assert sum(accepted for _, accepted in steps["with"]) > SHOWN
