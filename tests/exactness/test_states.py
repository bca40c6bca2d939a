"""Models whose layers keep states: a path's logits have the same bits however it was computed, and requests the same
tokens however they are served. `make models` compares them with transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.best_first import ModelNetwork
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.messages import Delta, GenerationRequest
from paceline.model.loading import build
from paceline.model.native.build import NativeUnavailableError
from paceline.model.row_probe import is_row_invariant
from paceline.model.rows import Row, SlotTable
from paceline.model.states.state_cache import StateLostError
from tests.exactness.architectures import VOCABULARY, Oracle, tiny
from tests.helpers.engine_runs import run

KINDS = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2", "falcon_h1")
"""Gated delta rule, Kimi's, Mamba-2, a convolution alone, and attention beside a state. Mamba's first kind multiplies
matrices outside linear layers, whose sums depend on the number of rows: the probe at the start says so."""
REQUESTS = 6
MODELS: dict[tuple[str, int], Any] = {}
BY_TORCH = " by torch"


def model_of(name: str, slots: int = 1024) -> Any:
    """Of an architecture, by native code if there is some or `BY_TORCH`. Kept: no test changes it."""
    if (name, slots) not in MODELS:
        config = EngineConfig(slots=slots, max_model_len=256, max_num_seqs=REQUESTS, max_num_batched_rows=64)
        architecture = name.removesuffix(BY_TORCH)
        switched_off = patch(
            "paceline.model.network_factory.NativeAttention", side_effect=NativeUnavailableError("switched off")
        )
        with switched_off if name.endswith(BY_TORCH) else nullcontext():
            MODELS[name, slots] = build(tiny(architecture), name, config, "", [])
    return MODELS[name, slots]


@pytest.fixture(params=[kind + way for kind in KINDS for way in ("", BY_TORCH)])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def text(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def computed(model: Any, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits [n, vocabulary] of tokens in passes of so many rows."""
    table, parts, start = SlotTable(range(1, len(tokens) + 1)), [], 0
    for size in chunks:
        rows = [table.row(tokens[i], i) for i in range(start, min(start + size, len(tokens)))]
        parts.append(model.run(rows, range(len(rows))).logits.clone())
        start += len(rows)
    assert start == len(tokens)
    return torch.cat(parts)


def test_bits_do_not_depend_on_chunks(model: Any) -> None:
    tokens = text(61)
    whole = computed(model, tokens, [61])
    for chunks in ([1] * 61, [7] * 9, [60, 1], [1, 2, 3, 5, 8, 13, 21, 8]):
        assert torch.equal(computed(model, tokens, chunks), whole)


def test_bits_do_not_depend_on_rows_beside(model: Any) -> None:
    assert model.keeps_states
    assert is_row_invariant(model)


@pytest.mark.parametrize("kind", KINDS)
def test_native_code_computes_what_torch_does(kind: str) -> None:
    native, by_torch = (computed(model_of(kind + way), text(61), [61]) for way in ("", BY_TORCH))
    torch.testing.assert_close(native, by_torch, atol=1e-4, rtol=1e-4)


def test_states_follow_what_was_accepted(model: Any) -> None:
    """Random trees over several steps, for two requests, of which one rests at times. A part of a tree is accepted, and
    each row has the bits of its path alone."""
    chance = random.Random(4)
    slots = iter(range(1000, 0, -1))
    paths = [Path(text(9 + 5 * n, n), slots) for n in range(2)]
    for step in range(9):
        awake = [path for path in paths if step == 0 or path is paths[step % 2] or chance.random() < 0.5]
        grown = [path.tree(chance) for path in awake]
        rows = [row for each in grown for row in each[0]]
        logits = iter(model.run(rows, range(len(rows))).logits.clone())
        for path, (own, tokens) in zip(awake, grown, strict=True):
            for _, expected in zip(own, tokens, strict=True):
                assert torch.equal(next(logits), computed(model_of(model.name), expected, [len(expected)])[-1])
            path.accept(chance.choice(path.nodes), chance.randrange(3, VOCABULARY))
    assert max(len(path.tokens) for path in paths) > 30


def test_what_was_accepted_outlives_the_guesses_of_others() -> None:
    """Of a request that rests, as it does where the rows of a pass go to others, while these have more guesses than
    are kept."""
    model, chance = model_of("lfm2"), random.Random(1)
    slots = iter(range(1000, 0, -1))
    resting, busy = Path(text(9, 1), slots), Path(text(9, 2), slots)
    model.run(resting.tree(chance)[0], [])
    resting.accept(max(resting.nodes, key=lambda node: len(node[0])), 7)
    assert len(resting.table) > 9
    for _ in range(model._states.cache.guesses // 7 + 2):
        model.run(busy.tree(chance)[0], [])
        busy.accept(([], []), 7)
    rows, texts = resting.tree(chance)
    for logits, expected in zip(model.run(rows, range(len(rows))).logits.clone(), texts, strict=True):
        assert torch.equal(logits, computed(model, expected, [len(expected)])[-1])


class Path:
    """A request as the engine keeps it."""

    def __init__(self, tokens: list[int], slots: Iterator[int]) -> None:
        self.tokens, self.table, self._slots = tokens, SlotTable(), slots
        self.nodes: list[tuple[list[int], list[int]]] = []
        """Tokens and slots of the last tree's paths, of which one is empty."""

    def tree(self, chance: random.Random) -> tuple[list[Row], list[list[int]]]:
        """Rows of the tokens that are not computed and of a random tree, and the text up to each."""
        start = len(self.table)
        self.table.slots.extend([next(self._slots) for _ in self.tokens[start:]])
        rows = [self.table.row(self.tokens[i], i) for i in range(start, len(self.tokens))]
        texts = [self.tokens[: i + 1] for i in range(start, len(self.tokens))]
        self.nodes = [([], [])]
        for _ in range(7):
            tokens, branch = chance.choice(self.nodes)
            node = [*tokens, chance.randrange(3, VOCABULARY)], [*branch, next(self._slots)]
            self.nodes.append(node)
            rows.append(self.table.branch_row(node[0][-1], node[1]))
            texts.append([*self.tokens, *node[0]])
        return rows, texts

    def accept(self, node: tuple[list[int], list[int]], bonus: int) -> None:
        """One of the tree's paths, and a bonus token."""
        tokens, branch = node
        self.tokens = [*self.tokens, *tokens, bonus]
        self.table.slots.extend(branch)


def test_a_row_without_its_past_is_an_error() -> None:
    model = model_of("qwen3_5_text")
    with pytest.raises(StateLostError, match="tokens before a row"):
        model.run([SlotTable(range(1, 9)).row(5, 7)], [0])
    table = SlotTable(range(1, 9))
    model.run([table.row(5, n) for n in range(8)], [0])
    table.truncate(4)
    with pytest.raises(StateLostError):
        model.run([table.branch_row(5, [9])], [0])
    with pytest.raises(StateLostError, match="leave out"):
        model.run([table.row(5, 0), table.row(5, 2)], [0])


def test_as_many_requests_keep_states_as_may_run() -> None:
    """A request that ends, and a table that nobody has any more, gives its state back."""
    model = model_of("lfm2")
    tables = [SlotTable([n]) for n in range(1, REQUESTS + 1)]
    model.run([table.row(5, 0) for table in tables], [])
    with pytest.raises(ValueError, match=f"more than {REQUESTS} requests keep states: raise max_num_seqs"):
        model.run([SlotTable([50]).row(5, 0)], [])
    tables[2].clear()
    other = SlotTable([51])
    model.run([other.row(5, 0)], [])
    del tables[0]
    model.run([SlotTable([52]).row(5, 0)], [])
    model._states.cache.check_integrity()


def test_a_state_starts_at_zero() -> None:
    model = model_of("nemotron_h")
    expected = computed(model, text(20), [20])
    for _ in range(2 * REQUESTS):
        computed(model, text(30, 9), [30])
    assert torch.equal(computed(model, text(20), [20]), expected)


def requests() -> list[GenerationRequest]:
    laws = (SamplingParams(temperature=0.0, max_tokens=48), SamplingParams(temperature=0.9, seed=7, max_tokens=48))
    return [GenerationRequest(f"r{n}", text(6 + 3 * n, n), laws[n % 2]) for n in range(8)]


def served(
    model: Any, given: list[GenerationRequest], drafting: DraftClient, steps: list[Any] | None = None, **settings: Any
) -> dict[str, Delta]:
    config = EngineConfig(**{"slots": model.slots, "max_num_batched_rows": 48, "max_num_seqs": REQUESTS} | settings)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    engine = Engine(model, config, speculation, drafting, RowCost([8, 256], [1.0, 1.001]))
    return run(engine, given, steps=steps)


def tokens(results: dict[str, Delta]) -> dict[str, list[int]]:
    assert not [each.error for each in results.values() if each.error]
    return {name: each.tokens for name, each in results.items()}


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_tokens_do_not_depend_on_guesses_preemption_or_replay(architecture: str) -> None:
    """Half of the guesses are wrong. A replay begins with the tokens that another engine has committed."""
    model, plain = model_of(architecture), {}
    for request in requests():
        plain |= tokens(served(model, [request], NoDraftClient()))
    oracle = Oracle({tuple(request.prompt): plain[request.request_id] for request in requests()})
    with_guesses = served(model, requests(), LocalDraftClient(oracle))
    assert tokens(with_guesses) == plain
    accepted = [each.speculation.accepted_by_depth for each in with_guesses.values() if each.speculation]
    assert sum(map(sum, accepted)) > 60
    steps: list[Any] = []
    preempted = served(model_of(architecture, 256), requests(), LocalDraftClient(oracle), steps)
    assert tokens(preempted) == plain
    assert sum(step.preemptions for step in steps) > 0
    cut = [
        GenerationRequest(each.request_id, each.prompt, each.sampling, committed=plain[each.request_id][:9])
        for each in requests()
    ]
    replayed = tokens(served(model, cut, LocalDraftClient(oracle)))
    assert {name: plain[name][:9] + rest for name, rest in replayed.items()} == plain


def test_no_request_begins_with_the_prefix_of_another() -> None:
    model = model_of("qwen3_5_text")
    same = [GenerationRequest(f"r{n}", text(60), SamplingParams(temperature=0.0, max_tokens=4)) for n in range(3)]
    results = [served(model, [each], NoDraftClient(), enable_prefix_caching=True) for each in same]
    assert len({tuple(*tokens(each).values()) for each in results}) == 1
    assert [each.usage.cached_tokens for result in results for each in result.values() if each.usage] == [0, 0, 0]


def test_such_a_model_is_refused_as_a_draft() -> None:
    with pytest.raises(ValueError, match="lfm2 cannot be a draft: its layers keep states"):
        ModelNetwork(model_of("lfm2"))


def test_a_guess_takes_the_inputs_of_its_update_and_no_state() -> None:
    """As decision 030 says, for this shape: two heads of 16 by 16, and a convolution of 96 channels."""
    model = model_of("kimi_linear")
    inputs, states = model._states._memories
    cache = model._states.cache
    heads, size, channels = 4, 16, 3 * 4 * 16
    assert len(states._kept) == cache.guesses
    assert states._kept[0].nbytes == 4 * heads * (3 * size + 1)
    assert states._roots[0].nbytes == 4 * heads * size * size
    assert inputs._data[0].nbytes == 4 * channels
