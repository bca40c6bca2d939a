"""Models whose layers keep states: a path's logits have the same bits however it was computed, and requests the same
tokens however they are served. `make models` compares them with transformers."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from paceline import family
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.policy.step_cost import RowCost
from paceline.drafting import build_speculator
from paceline.drafting.network_speculator import DraftCache
from paceline.drafting.speculator import DraftError
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.messages import Delta, GenerationRequest
from paceline.model import load
from paceline.model.loading import build
from paceline.model.native.build import NativeUnavailableError
from paceline.model.row_probe import is_row_invariant
from paceline.model.rows import Row, SlotTable
from paceline.model.states.state_cache import StateCache, StateLostError
from tests.exactness.architectures import VOCABULARY, Oracle, tiny
from tests.helpers.drafts import model_draft
from tests.helpers.engine_runs import run
from tests.helpers.head_checkpoints import eagle3_tensors, llama_config, save_head
from tests.helpers.workers import opening

KINDS = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2", "falcon_h1")
"""Gated delta rule, Kimi's, Mamba-2, a convolution alone, and attention beside a state. Mamba's first kind multiplies
matrices outside linear layers, whose sums depend on the number of rows: the probe at the start says so."""
REQUESTS = 6
CHECKED_GUESSES = 36
"""Of the pass that checks a model when it is loaded."""
MODELS: dict[tuple[str, int], Any] = {}
BY_TORCH, BY_TRANSFORMERS = " by torch", " by transformers"
"""Without native code, and with native code in a forward of transformers."""
MADE = [*KINDS, "qwen3_5_text" + BY_TRANSFORMERS, *(kind + BY_TORCH for kind in KINDS)]


def model_of(name: str, slots: int = 1024) -> Any:
    """Of an architecture, by all native code that there is, or as the end of `name` says. Kept: no test changes it.

    An engine that was left before its requests ended is part of a cycle, and keeps their states until it is collected.
    """
    gc.collect()
    if (name, slots) not in MODELS:
        config = EngineConfig(slots=slots, max_model_len=256, max_num_seqs=REQUESTS, max_num_batched_rows=64)
        MODELS[name, slots] = built(name, config)
    return MODELS[name, slots]


def built(name: str, config: EngineConfig) -> Any:
    architecture = name.removesuffix(BY_TORCH).removesuffix(BY_TRANSFORMERS)
    off = Mock(side_effect=NativeUnavailableError("switched off"))
    names = {BY_TORCH: ("NativeNetwork", "NativeAttention"), BY_TRANSFORMERS: ("NativeNetwork",)}
    switched_off = next((names[way] for way in names if name.endswith(way)), ())
    with ExitStack() as patches:
        for each in switched_off:
            patches.enter_context(patch(f"paceline.model.network_factory.{each}", off))
        return build(tiny(architecture), name, config, "", [])


@pytest.fixture(params=MADE)
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
    assert model.states is not None
    assert is_row_invariant(model)


@pytest.mark.parametrize("name", [each for each in MADE if not each.endswith(BY_TORCH)])
def test_native_code_computes_what_torch_does(name: str) -> None:
    others = name.removesuffix(BY_TRANSFORMERS) + BY_TORCH
    native, by_torch = (computed(model_of(each), text(61), [61]) for each in (name, others))
    torch.testing.assert_close(native, by_torch, atol=1e-4, rtol=1e-4)


def test_the_shipped_hybrid_is_native_and_computes_what_transformers_does() -> None:
    """Two of its layers attend. `verify` compares: what is wrong would be run by transformers' code."""
    for dtype in ("float32", "bfloat16"):
        assert load(family.HYBRID, EngineConfig(slots=256, dtype=dtype, verify=True)).native


def test_a_dense_network_of_qwen3_5_is_native_as_a_whole() -> None:
    made = [model_of("qwen3_5_text" + way) for way in ("", BY_TRANSFORMERS, BY_TORCH)]
    assert [(each.native, each.has_native_attention) for each in made] == [(True, True), (False, True), (False, False)]


def test_states_follow_what_was_accepted(model: Any) -> None:
    """Random trees over several steps, for two requests, of which one rests at times. A part of a tree is accepted, and
    each row has the bits of its path alone."""
    chance = random.Random(4)
    slots = iter(range(1000, 0, -1))
    paths = [KeptRequest(text(9 + 5 * n, n), slots) for n in range(2)]
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
    resting, busy = KeptRequest(text(9, 1), slots), KeptRequest(text(9, 2), slots)
    model.run(resting.tree(chance)[0], [])
    resting.accept(max(resting.nodes, key=lambda node: len(node[0])), 7)
    assert len(resting.table) > 9
    for _ in range(model._states.cache.guesses // 7 + 2):
        model.run(busy.tree(chance)[0], [])
        busy.accept(([], []), 7)
    rows, texts = resting.tree(chance)
    for logits, expected in zip(model.run(rows, range(len(rows))).logits.clone(), texts, strict=True):
        assert torch.equal(logits, computed(model, expected, [len(expected)])[-1])


class KeptRequest:
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
    model.states.check_integrity([*tables, other])


def test_one_request_at_a_time_is_enough() -> None:
    """The checks of a loaded model take more."""
    config = EngineConfig(slots=1024, max_model_len=256, max_num_seqs=1, verify=True)
    assert is_row_invariant(build(tiny("lfm2"), "lfm2", config, "", []))


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
    model: Any,
    given: list[GenerationRequest],
    drafting: DraftClient,
    steps: list[Any] | None = None,
    together: int = 100,
    **settings: Any,
) -> dict[str, Delta]:
    config = EngineConfig(**{"slots": model.slots, "max_num_batched_rows": 48, "max_num_seqs": REQUESTS} | settings)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    gc.collect()  # see `model_of`
    engine = Engine(model, config, speculation, drafting, RowCost([8, 256], [1.0, 1.001]))
    return run(engine, given, together, steps)


def tokens(results: dict[str, Delta]) -> dict[str, list[int]]:
    assert not [each.error for each in results.values() if each.error]
    return {name: each.tokens for name, each in results.items()}


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_tokens_do_not_depend_on_guesses_preemption_or_replay(architecture: str) -> None:
    """Half of the guesses are wrong. A replay begins with the tokens that another engine has committed."""
    model = model_of(architecture)
    plain: dict[str, list[int]] = {}
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


def shared(model: Any, before: list[int], prefix: int, after: list[int]) -> torch.Tensor:
    """Logits of the last rows of a path that begins with the slots of `before`, whose table is given up."""
    first = SlotTable(range(1, len(before) + 1))
    model.run([first.row(token, i) for i, token in enumerate(before)], [])
    slots = first.slots[:prefix]
    first.clear()
    table = SlotTable([*slots, *range(500, 500 + len(after))])
    rows = [table.row(token, prefix + i) for i, token in enumerate(after)]
    logits: torch.Tensor = model.run(rows, range(len(rows))).logits.clone()
    return logits


def test_a_path_that_begins_with_another_has_the_same_bits(model: Any) -> None:
    """At the last end of a block in the chunk that was computed."""
    before, after = text(61), text(9, 5)
    assert torch.equal(shared(model, before, 48, after), computed(model, before[:48] + after, [48 + len(after)])[48:])
    with pytest.raises(StateLostError):
        shared(model, text(61, 2), 32, after)


def test_what_is_kept_for_prefixes() -> None:
    """States at each interval and at the last end of a block of a prompt: the last used ones. Passes of a few rows take
    none in between, and slots that are written again lose theirs."""
    config = EngineConfig(slots=1024, max_model_len=256, state_snapshots=4, state_snapshot_interval=32)
    model: Any = build(tiny("lfm2"), "lfm2", config, "", [])
    states: StateCache = model.states

    def read(table: SlotTable, count: int) -> None:
        model.run([table.row(5, len(table) - count + i) for i in range(count)], [])

    first = SlotTable(range(1, 101))
    read(first, 100)
    assert [states.prefix_length(first.slots[:n]) for n in (15, 31, 32, 63, 64, 95, 100)] == [0, 0, 32, 32, 64, 64, 96]
    for n in range(100, 131):
        first.slots.append(n + 1)
        read(first, 1)
    assert states.prefix_length(first.slots) == 128  # the fourth, beside 32, 64 and 96
    other = SlotTable(range(200, 250))
    read(other, 50)
    assert [states.prefix_length(each) for each in (first.slots[:64], first.slots, other.slots)] == [0, 128, 48]
    again = SlotTable(first.slots[:96] + other.slots[48:])
    read(again, 2)
    read(SlotTable(range(300, 317)), 17)
    assert [states.prefix_length(each) for each in (first.slots, again.slots, other.slots)] == [96, 96, 48]
    read(SlotTable([first.slots[95]]), 1)
    assert [states.prefix_length(each) for each in (first.slots, other.slots)] == [0, 48]
    states.check_integrity([first, other, again])
    with pytest.raises(AssertionError, match="no request"):
        states.check_integrity([first, again])


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h" + BY_TORCH])
def test_a_pass_takes_no_more_snapshots_than_there_are(name: str) -> None:
    """A pass that reaches more ends of blocks keeps some of them, and each is the state that it is found as."""
    model = built(name, EngineConfig(slots=1024, max_model_len=256, state_snapshots=2, state_snapshot_interval=16))
    paths = {5: SlotTable(range(1, 18)), 6: SlotTable([*range(1, 17), *range(100, 180)]), 7: SlotTable(range(200, 296))}
    model.run([paths[5].row(5, i) for i in range(17)], [])
    logits = model.run([*(paths[7].row(7, i) for i in range(96)), *(paths[6].row(6, i) for i in range(16, 96))], [175])
    texts = {5: [5] * 17, 6: [5] * 16 + [6] * 80, 7: [7] * 96}
    assert torch.equal(logits.logits[0], computed(model_of(name), texts[6], [96])[-1])
    model.states.check_integrity(paths.values())
    found = 0
    for token, table in paths.items():
        for length in range(16, len(table) + 1, 16):
            if model.states.prefix_length(table.slots[:length]) < length:
                continue
            again = SlotTable([*table.slots[:length], 500 + token])
            alone = computed(model_of(name), [*texts[token][:length], 9], [length + 1])[-1]
            assert torch.equal(model.run([again.row(9, length)], [0]).logits[0], alone)
            again.clear()
            found += 1
    assert found


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_requests_begin_with_prefixes_of_others(architecture: str) -> None:
    """Whole blocks of a prompt, in one engine; outputs stay what they were. Where two part before the first snapshot,
    nothing is shared."""
    model, prompt = model_of(architecture), text(70)
    prompts = [[*prompt, *text(3 * n, n)] for n in range(6)] + [[*prompt[:40], *text(9, 9)]]
    given = [
        GenerationRequest(f"r{n}", each, SamplingParams(temperature=0.9, seed=n, max_tokens=20))
        for n, each in enumerate(prompts)
    ]
    plain: dict[str, list[int]] = {}
    for each in given:
        plain |= tokens(served(model, [each], NoDraftClient(), enable_prefix_caching=False))
    oracle = Oracle({tuple(each.prompt): plain[each.request_id] for each in given})
    results = served(model, given, LocalDraftClient(oracle), together=2)
    assert tokens(results) == plain
    cached = [each.usage.cached_tokens for each in results.values() if each.usage]
    assert cached[0] == cached[-1] == 0
    assert sum(each >= 48 for each in cached) >= 4


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_a_draft_keeps_states(architecture: str) -> None:
    """The target's own weights guess what it draws next."""
    assert right_at_once(drafted(architecture)) > 0.95


def test_a_draft_takes_no_more_requests_than_it_keeps_states_for() -> None:
    config = EngineConfig(slots=1024, max_model_len=256, max_num_seqs=5)
    speculator = model_draft(build(tiny("lfm2"), "lfm2", config, "", []), tree_width=2)
    for n in range(5):
        speculator.open(opening(n))
    with pytest.raises(DraftError, match="keeps states for 5 requests: raise max_num_seqs"):
        speculator.open(opening(5))
    speculator.close(3)
    speculator.open(opening(6))


def test_a_draft_computes_guesses_again_whose_inputs_gave_way(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    forget = DraftCache.forget

    def counted(self: Any, request: Any, nodes: list[int]) -> None:
        forgotten.extend(nodes)
        forget(self, request, nodes)

    monkeypatch.setattr(DraftCache, "forget", counted)
    monkeypatch.setattr("paceline.model.decoder.MEASURED_ROWS", CHECKED_GUESSES)
    assert right_at_once(drafted("lfm2")) > 0.95
    assert forgotten


def right_at_once(results: dict[str, Delta]) -> float:
    """Of the steps with guesses, the share whose first token was guessed."""
    verified = [each.speculation for each in results.values() if each.speculation]
    return sum(each.accepted_by_depth[0] for each in verified) / sum(each.drafted_by_depth[0] for each in verified)


def drafted(architecture: str) -> dict[str, Delta]:
    """Answers with the guesses of a draft that keeps states; the tokens are those without."""
    model = model_of(architecture)
    plain: dict[str, list[int]] = {}
    for request in requests():
        plain |= tokens(served(model, [request], NoDraftClient()))
    config = EngineConfig(slots=1024, max_model_len=256, max_num_batched_rows=8, max_num_seqs=REQUESTS)
    speculator = model_draft(build(tiny(architecture), architecture, config, "", []), tree_width=2)
    results = served(model, requests(), LocalDraftClient(speculator))
    assert tokens(results) == plain
    speculator.check_integrity()
    return results


def test_a_head_reads_hidden_states_of_such_a_target(tmp_path: Path) -> None:
    """They are transformers' own, and an EAGLE-3 head that reads them changes no token."""
    model, network = model_of("qwen3_5_text"), tiny("qwen3_5_text")
    prompt = text(21)
    with torch.inference_mode():
        expected = network(torch.tensor([prompt]), use_cache=False, output_hidden_states=True).hidden_states
    table = SlotTable(range(1, 22))
    hidden = model.run([table.row(token, i) for i, token in enumerate(prompt)], [], [0, 1]).hidden
    table.clear()
    torch.testing.assert_close(hidden, torch.cat(expected[:2]).transpose(0, 1), atol=1e-4, rtol=1e-4)
    config = llama_config(vocab_size=VOCABULARY, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    folder = save_head(tmp_path, eagle3_tensors(columns=VOCABULARY), config)
    speculation = SpeculativeConfig(method="eagle3", model=str(folder))
    head = build_speculator(speculation, EngineConfig(slots=1024), model.target_weights, model.name)
    plain: dict[str, list[int]] = {}
    for request in requests():
        plain |= tokens(served(model, [request], NoDraftClient()))
    results = served(model, requests(), LocalDraftClient(head))
    assert tokens(results) == plain
    assert sum(each.speculation.drafted_tokens for each in results.values() if each.speculation) > 100


def test_a_guess_takes_the_inputs_of_its_update_and_no_state() -> None:
    """As decision 030 says, for this shape: two heads of 16 by 16, and a convolution of 96 channels."""
    model = model_of("kimi_linear")
    inputs, states = model._states._memories
    cache = model._states.cache
    heads, size, channels = 4, 16, 3 * 4 * 16
    assert len(states._kept) == cache.guesses
    assert states._kept[0].nbytes == 4 * heads * (3 * size + 1)
    assert states._states[0].nbytes == 4 * heads * size * size
    assert inputs._data[0].nbytes == 4 * channels
