"""The shipped heads, on text that neither they nor their target were trained on.

test_freshness.py shows bit by bit that a head gets the same states after a disturbance as without one. These tests show
the effect: a trained head's acceptance rate stays the same at every depth.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paceline import family
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.messages import GenerationRequest, SpeculationStats
from paceline.drafting import build_speculator
from paceline.drafting.speculator import Context, Speculator
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.model import load
from paceline.model.model import Model
from paceline_lab.bench.method_comparison import prompts_of
from paceline_lab.bench.workloads import workloads
from tests.helpers.moving import Moving
from tests.helpers.targets import FREE

SLOTS = 4096
DEPTH = 4
TOKENS = 64
CHAIN = {
    "num_speculative_tokens": DEPTH,
    "tree_width": 1,
    "least_path_probability": 0,
    "draft_placement": "target",
    "draft_schedule": "lockstep",
    "row_budget": False,
}
"""Every step verifies a chain of DEPTH draft tokens, on machines of any speed."""
NEAR = 0.04
"""Acceptance rates that differ by less count as equal. After a disturbance, steps begin at other tokens of the text."""


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family.NAMES[0], EngineConfig(slots=SLOTS))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt for workload in workloads() for prompt in prompts_of(workload)]


def head(model: Model, method: str) -> Speculator:
    config = SpeculativeConfig(method=method, model=family.HEADS[method], **CHAIN)
    return build_speculator(config, EngineConfig(slots=SLOTS), model.target_weights, model.name)


@dataclass
class Served:
    """The tokens of requests, and the sum of their statistics."""

    tokens: list[list[int]]
    stats: SpeculationStats
    cached: int = 0
    preemptions: int = 0

    def rates(self) -> list[float]:
        """By depth, the share of verifications that accepted a draft token there."""
        return [count / self.stats.verifications for count in self.stats.accepted_by_depth]


def engine(model: Model, drafting: DraftClient, **settings: Any) -> Engine:
    config = SpeculativeConfig(method="eagle3", model="-", **CHAIN)
    return Engine(model, EngineConfig(**{"slots": SLOTS, **settings}), config, drafting, FREE)


def serve(target: Engine, prompts: Sequence[Sequence[int]]) -> Served:
    served = Served([[] for _ in prompts], SpeculationStats())
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
        target.submit(GenerationRequest(str(number), list(prompt), sampling, SpeculativeOptions(report=True)))
    while target.busy:
        for delta in target.step():
            served.tokens[int(delta.request_id)] += delta.tokens
            served.cached += delta.usage.cached_tokens if delta.usage else 0
            if delta.finish_reason and delta.speculation:
                add(served.stats, delta.speculation)
        served.preemptions += target.last_step.preemptions
    return served


def add(total: SpeculationStats, more: SpeculationStats) -> None:
    total.verifications += more.verifications
    total.accepted_by_depth += [0] * (DEPTH - len(total.accepted_by_depth))
    for depth, count in enumerate(more.accepted_by_depth):
        total.accepted_by_depth[depth] += count


@pytest.fixture(scope="module")
def plain(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    return serve(engine(model, NoDraftClient()), prompts).tokens


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[] if each == "eagle3" else pytest.mark.slow) for each in family.HEADS]
)
def test_a_head_predicts_far_better_than_chance(
    method: str, model: Model, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """The commonest token is right one time in ten, a random one of 4096 hardly ever."""
    served = serve(engine(model, LocalDraftClient(head(model, method))), prompts)
    assert served.tokens == plain
    [(_, commonest)] = Counter(itertools.chain(*plain)).most_common(1)
    assert served.rates()[0] > 2 * commonest / sum(map(len, plain))
    assert served.rates()[0] > served.rates()[1] > served.rates()[2] > 0


@pytest.fixture(scope="module")
def undisturbed(model: Model, prompts: list[list[int]]) -> Served:
    return serve(engine(model, LocalDraftClient(head(model, "eagle3"))), prompts)


class TestAcceptanceStaysTheSame:
    """After disturbances that lower it in other engines."""

    def test_after_a_hit_in_the_prefix_cache(self, model: Model, prompts: list[list[int]], undisturbed: Served) -> None:
        """vLLM's and SGLang's users saw it fall from 0.98 to 0.10: the head had no states of cached positions."""
        target = engine(model, LocalDraftClient(head(model, "eagle3")))
        serve(target, prompts)
        again = serve(target, prompts)
        assert again.cached > sum(map(len, prompts)) / 2
        assert again.rates() == pytest.approx(undisturbed.rates(), abs=NEAR)
        assert again.tokens == undisturbed.tokens

    @pytest.mark.slow
    def test_across_the_borders_of_prefill_chunks(
        self, model: Model, prompts: list[list[int]], undisturbed: Served
    ) -> None:
        target = engine(model, LocalDraftClient(head(model, "eagle3")), max_num_batched_rows=64)
        served = serve(target, prompts)
        assert served.rates() == pytest.approx(undisturbed.rates(), abs=NEAR)
        assert served.tokens == undisturbed.tokens

    @pytest.mark.slow
    def test_after_preemption(self, prompts: list[list[int]], undisturbed: Served) -> None:
        scarce = load(family.NAMES[0], EngineConfig(slots=512))
        served = serve(engine(scarce, LocalDraftClient(head(scarce, "eagle3")), slots=512), prompts)
        assert served.preemptions > 0
        assert served.rates() == pytest.approx(undisturbed.rates(), abs=NEAR)
        assert served.tokens == undisturbed.tokens

    @pytest.mark.parametrize(
        "losses", [[40, 60, 80], *(pytest.param(each, marks=pytest.mark.slow) for each in ([20], [50, 51, 52, 53]))]
    )
    def test_after_a_move_to_another_draft(
        self, losses: list[int], model: Model, prompts: list[list[int]], undisturbed: Served
    ) -> None:
        served = serve(engine(model, Moving(head(model, "eagle3"), losses)), prompts)
        assert served.rates() == pytest.approx(undisturbed.rates(), abs=NEAR)
        assert served.tokens == undisturbed.tokens

    def test_wrong_states_change_it(self, model: Model, prompts: list[list[int]], undisturbed: Served) -> None:
        """As if the states of cached positions belonged to other positions."""
        served = serve(engine(model, ShufflingClient(head(model, "eagle3"))), prompts)
        assert served.tokens == undisturbed.tokens
        assert served.rates() != pytest.approx(undisturbed.rates(), abs=NEAR)


class ShufflingClient(LocalDraftClient):
    """Sends the states of a prompt in another order."""

    def context(self, context: Context) -> None:
        shuffled = torch.randperm(len(context.hidden_states), generator=torch.Generator().manual_seed(0))
        super().context(replace(context, hidden_states=context.hidden_states[shuffled]))
