"""Whole drafts by one function of memory: they guess what drafting from the host guesses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.drafting import build_speculator, graphed_drafts
from paceline.drafting.best_first import BestFirst, ModelNetwork
from paceline.drafting.draft_graph import DraftGraph, DraftShape
from paceline.drafting.graphed_drafts import DEPTHS, WIDTH, DepthChoice, GraphedDrafts, fastest_way
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import DraftingLimits, Speculator
from paceline.engine.draft_client import LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.messages import GenerationRequest
from paceline.model.attention import KVCache
from paceline.model.checkpoint import Checkpoint
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.gpu.paths import DeviceTables
from paceline.model.loading import build as build_model
from tests.helpers import device_draws, gpu_kernels
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.counted_kernels import Counting, FusedKernels
from tests.helpers.device_passes import use_device_passes, use_torch
from tests.helpers.engine_runs import EngineRun
from tests.helpers.head_methods import NETWORK, build_head, save_method, target_weights
from tests.helpers.llamas import LAWS as LLAMA_LAWS
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.targets import FREE
from tests.unit.drafting.drafting_formulas import prompt_of
from tests.unit.drafting.feeding import Feeding

TOLERANCES = {"eagle": 5e-2}
"""See `test_draft_guesses`."""
METHODS = ("eagle3", "eagle", "mtp", "draft_model")
HOT = SamplingParams(temperature=0.8, seed=11)
LAWS = (SamplingParams(temperature=0.0), HOT, SamplingParams(temperature=1.0, seed=5, top_k=12, top_p=0.9, min_p=0.01))


def build_drafts(method: str, folder: Path, config: EngineConfig, **settings: Any) -> Speculator:
    """On the configuration's device, in its dtype."""
    if method != "draft_model":
        target = build_model(peaked_llama(), "target", config, "", []).target_weights()
        return build_head(save_method(folder, method), method, target, slots=config.slot_count, **settings)
    options = {"num_speculative_tokens": 4, "tree_width": 2, "least_path_probability": 0} | settings
    speculation = SpeculativeConfig(method=method, model=str(save_checkpoint(folder)), **options)
    return build_speculator(speculation, config, lambda: None)  # type: ignore[arg-type, return-value]


def build(method: str, folder: Path, *, slots: int = 1024, **settings: Any) -> Speculator:
    return build_drafts(method, folder, EngineConfig(slots=slots), **settings)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def graphs_of(method: str, folder: Path, *, recorded: bool = False, **settings: Any) -> Speculator:
    """One that drafts by graphs, as deep as it may."""
    with pytest.MonkeyPatch.context() as patch:
        use_device_passes(patch, recorded=recorded)
        speculator: Any = build(method, folder / "graphs", **settings)
    draft_as_deep_as_allowed(speculator)
    return speculator  # type: ignore[no-any-return]


def draft_as_deep_as_allowed(speculator: Any) -> None:
    """By a clock for which graphs take no time."""
    assert isinstance(speculator._way, GraphedDrafts)
    ticks = itertools.cycle((1.0, 1e-6))  # before a draft, and during it
    speculator._way._clock = itertools.accumulate(ticks).__next__


def host_of(method: str, folder: Path, **settings: Any) -> Speculator:
    with pytest.MonkeyPatch.context() as patch:
        use_torch(patch)
        return build(method, folder / "host", **settings)


COMMITS = ([], [5], [1, 2, 3], [7] * 6, [9] * 12)


def rounds(ours: Feeding, *others: Feeding) -> Iterator[None]:
    """After every commit, when everything is drafted."""
    for committed in COMMITS:
        for each in (ours, *others):
            if committed:
                each.commit(committed)
            each.tell()
            each.grow()
        yield


@pytest.mark.parametrize("sampling", LAWS)
def test_the_guesses_are_those_of_drafting_from_the_host(method: str, sampling: SamplingParams, tmp_path: Path) -> None:
    """Over commits of several lengths. Eight nodes are a whole tree's third level."""
    graphs, host = graphs_of(method, tmp_path), host_of(method, tmp_path)
    ours, theirs = (Feeding(each, NETWORK, prompt_of(20), sampling=sampling, depth=4) for each in (graphs, host))
    for _ in rounds(ours, theirs):
        assert ours.tree.size == 2 + 4 + 8 + 16 or sampling.filtered
        assert ours.guesses() == pytest.approx(theirs.guesses(), abs=TOLERANCES.get(method, 1e-3))
        graphs.check_integrity()  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", LAWS[:2])
@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_a_level_expands_the_likeliest_of_the_one_above(method: str, sampling: SamplingParams, tmp_path: Path) -> None:
    """EAGLE-1's rounding errors are too large at this depth."""
    depth = 6
    graphs, host = graphs_of(method, tmp_path), host_of(method, tmp_path)
    ours, theirs = (Feeding(each, NETWORK, prompt_of(9), sampling=sampling, depth=depth) for each in (graphs, host))
    for _ in rounds(ours, theirs):
        every, expected, frontier = theirs.guesses(), {}, {(): 0.0}
        for _ in range(depth):
            below = {path: log_prob for path, log_prob in every.items() if path[:-1] in frontier}
            expected |= below
            paths = {path: frontier[path[:-1]] + log_prob for path, log_prob in below.items()}
            frontier = dict(sorted(paths.items(), key=lambda item: -item[1])[:WIDTH])
        assert ours.guesses() == pytest.approx(expected, abs=TOLERANCES.get(method, 1e-3))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("recorded", [False, True], ids=["run again", "repeated on the same memory"])
def test_requests_of_one_graph_do_not_touch_one_another(method: str, recorded: bool, tmp_path: Path) -> None:
    """A graph is repeated for other requests, at other positions, in other slots, drawn otherwise, up to other depths.
    Those with rules, or with sampled drafts, are drafted for beside it, from the host."""
    together, host = graphs_of(method, tmp_path, recorded=recorded), host_of(method, tmp_path)
    ruled = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    laws = [(law, "coupled", 2 + n) for n, law in enumerate(LAWS)] + [(ruled, "coupled", 4), (HOT, "residual", 2)]
    for turn in range(3):
        pairs = []
        for key, (sampling, strategy, depth) in enumerate(laws, 10 * turn):
            tokens = prompt_of(5 + 7 * turn + 3 * key)
            options = {"key": key, "sampling": sampling, "strategy": strategy, "depth": depth}
            pairs.append([Feeding(each, NETWORK, tokens, **options) for each in (together, host)])
        for count in (0, 1, 2, turn + 3):
            for ours, theirs in pairs:
                committed = [unguessed(theirs)] * count
                for each in (ours, theirs):
                    if committed:
                        each.commit(committed)
                    each.tell()
            while (grown := together.grow()) or together.behind:
                for ours, _ in pairs:
                    ours.graft(grown)
            while (grown := host.grow()) or host.behind:
                for _, theirs in pairs:
                    theirs.graft(grown)
            for ours, theirs in pairs:
                assert ours.tree.size > 0
                assert ours.guesses() == pytest.approx(theirs.guesses(), abs=TOLERANCES.get(method, 1e-3))
            together.check_integrity()  # type: ignore[attr-defined]
        for ours, _ in pairs[turn % 2 :: 2]:  # the others stay open
            together.close(ours.key)
            host.close(ours.key)


def unguessed(request: Feeding) -> int:
    """A token that no child of the root has. Nodes that a commit leaves are expanded again from the host alone."""
    return min(set(range(VOCABULARY)) - request.children().keys())


def test_nodes_that_a_commit_leaves_stay(tmp_path: Path) -> None:
    graphs = graphs_of("eagle3", tmp_path)
    request = Feeding(graphs, NETWORK, prompt_of(20), depth=4)
    request.tell()
    request.grow()
    request.commit(request.likeliest()[:2])
    left = request.guesses()
    assert len(left) == 2 + 4
    request.grow()
    assert left.items() <= request.guesses().items()
    assert len(request.guesses()) >= 2 + 4 + 8 + 16
    fresh = Feeding(graphs, NETWORK, request.tokens, depth=4, key=2)
    fresh.tell()
    fresh.grow()
    assert fresh.guesses().keys() <= request.guesses().keys()


def test_one_draft_is_one_round(tmp_path: Path) -> None:
    """A target that drafts on its own time does not ask for a second one."""
    graphs = graphs_of("eagle3", tmp_path)
    request = Feeding(graphs, NETWORK, prompt_of(20), depth=4)
    request.tell()
    assert len(request.graft(graphs.grow())) == 2 + 4 + 8 + 16
    assert not graphs.behind
    assert not graphs.grow()


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_limits_hold(method: str, tmp_path: Path) -> None:
    graphs = graphs_of(method, tmp_path)
    few = Feeding(graphs, NETWORK, prompt_of(20), depth=6, nodes=9)
    few.tell()
    few.grow()
    assert few.tree.size == 9
    likely = Feeding(graphs, NETWORK, prompt_of(20), depth=6, key=2, least_path_probability=0.05)
    likely.tell()
    likely.grow()
    assert 0 < likely.tree.size < 50
    assert min(likely.path_log_probs()) > math.log(0.05)
    paused = Feeding(graphs, NETWORK, prompt_of(20), depth=6, key=3)
    paused.limit(0, 0)
    paused.tell()
    paused.grow()
    assert paused.tree.size == 0
    paused.limit(2, 100)
    paused.grow()
    assert paused.tree.size == 2 + 4


def test_positions_end(tmp_path: Path) -> None:
    """No row of a deep graph is beyond the last position."""
    graphs = graphs_of("eagle3", tmp_path)
    limit = graphs.description.position_limit
    request = Feeding(graphs, NETWORK, prompt_of(limit - 3), depth=12)
    request.tell()
    request.grow()
    assert max(request.tree.depths) == 3


def test_few_free_slots_are_no_reason_to_draft_nothing(tmp_path: Path) -> None:
    graphs = graphs_of("eagle3", tmp_path, slots=256)
    request = Feeding(graphs, NETWORK, prompt_of(250), depth=6)
    request.tell()
    request.grow()
    assert request.tree.size > 2
    graphs.check_integrity()  # type: ignore[attr-defined]


def test_the_graph_that_was_used_longest_ago_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes back is made again, and guesses what it guessed."""
    monkeypatch.setattr(graphed_drafts, "MOST_GRAPHS", 2)
    speculator: Any = graphs_of("eagle3", tmp_path, recorded=True)
    depths, guesses = [], []
    for key, depth in enumerate((2, 3, 2, 4, 3, 4, 2)):
        monkeypatch.setattr(speculator._way._depths, "choose", lambda *_, depth=depth: depth)
        request = Feeding(speculator, NETWORK, prompt_of(7), depth=depth, key=key)
        request.tell()
        request.grow()
        depths.append([shape.depth for shape in speculator._way._graphs])
        guesses.append(request.guesses())
        speculator.close(key)
    assert depths == [[2], [2, 3], [3, 2], [2, 4], [4, 3], [3, 4], [4, 2]]
    for first, again in ((0, 2), (0, 6), (1, 4), (3, 5)):
        assert guesses[first] == guesses[again]
    assert max(map(len, guesses)) == 2 + 4 + 8 + 16


class TestDepth:
    SHAPE = DraftShape(8, 1, 5)

    def test_before_anything_is_known_it_is_the_deepest(self) -> None:
        assert DepthChoice().choose(8, 1, 5) == 5
        assert DepthChoice().choose(8, 1, 7) == 8
        assert DepthChoice().choose(8, 1, 99) == DEPTHS[-1]

    @pytest.mark.parametrize(("expected", "depth"), [([0.9] * 5, 5), ([0.9, 0.8, 0.1, 0.05, 0.01], 2)])
    def test_a_level_pays_by_what_is_expected_of_it(self, expected: list[float], depth: int) -> None:
        """A level takes a third of the rest of a step."""
        choice = DepthChoice()
        choice.observe(self.SHAPE, 5.0, 3.0, expected)
        assert choice.choose(8, 1, 5) == depth

    def test_of_measured_graphs_the_time_counts(self) -> None:
        """Not the share of another one's."""
        choice = DepthChoice()
        for level in range(1, 6):
            choice.observe(DraftShape(8, 1, level), 1.0, 1.0, [0.5] * level)
        assert choice.choose(8, 1, 5) == 5
        for _ in range(20):
            choice.observe(self.SHAPE, 9.0, 1.0, [0.5] * 5)
        assert choice.choose(8, 1, 5) == 4

    def test_a_pause_is_no_step(self) -> None:
        choice = DepthChoice()
        expected = [0.9, 0.8, 0.1, 0.05, 0.01]
        choice.observe(self.SHAPE, 5.0, 3.0, expected)
        choice.observe(self.SHAPE, 5.0, 3600.0, expected)
        assert choice.choose(8, 1, 5) == 2


def test_no_token_changes() -> None:
    """Requests that come and go, drawn by all laws, with a draft that mostly agrees."""
    requests = [GenerationRequest(f"r{n}", prompt_of(3 + 9 * n), law) for n, law in enumerate(LLAMA_LAWS)]
    target = build_model(peaked_llama(), "target", EngineConfig(slots=2048), "", [])
    with pytest.MonkeyPatch.context() as patch:
        use_device_passes(patch)
        model = build_model(peaked_llama(0.02), "draft", EngineConfig(slots=2048), "", [])
        best_first = BestFirst(ModelNetwork(model), DraftingLimits(tree_width=2))
        speculator: Any = NetworkSpeculator(fastest_way(best_first))
    assert isinstance(speculator._way, GraphedDrafts)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4, max_tree_nodes=16)
    runs = []
    for client in (NoDraftClient(), LocalDraftClient(speculator)):
        engine = Engine(target, EngineConfig(slots=2048), speculation, client, FREE)
        runs.append(EngineRun().run(engine, *requests))
    assert runs[1].outputs == runs[0].outputs
    assert speculator._way._graphs
    assert runs[1].accepted > 40


def test_drafts_go_on_level_by_level_where_no_graph_can_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """No request has changed when a capture fails: the guesses are those of drafting from the host."""
    target = build_model(peaked_llama(), "target", EngineConfig(slots=2048), "", [])

    def fails(run: object) -> Any:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        use_device_passes(patch)
        model = build_model(peaked_llama(0.02), "draft", EngineConfig(slots=2048), "", [])
        from_host, by_graphs = (BestFirst(ModelNetwork(model), DraftingLimits(tree_width=2)) for _ in range(2))
        graphed: Any = fastest_way(by_graphs)
        graphed._passes = replace(graphed._passes, capture=fails)
    runs = []
    for way in (from_host, graphed):
        speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4, max_tree_nodes=16)
        engine = Engine(target, EngineConfig(slots=2048), speculation, LocalDraftClient(NetworkSpeculator(way)), FREE)
        runs.append(EngineRun().run(engine, GenerationRequest("r", prompt_of(30), LLAMA_LAWS[0])))
    assert runs[0].outputs == runs[1].outputs
    assert runs[0].accepted == runs[1].accepted > 0
    assert caplog.text.count("level by level, and not as one graph: out of memory") == 1


class FusedDraws:
    """Three kernels of a GPU; here one operator."""

    @staticmethod
    def predict(*_: Any) -> None:
        """Nothing."""

    @staticmethod
    def choose(paths: Tensor, tokens: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return paths, tokens[:, :, 0].flatten().clone(), others[1], others[4]


def draft_graph(
    network: Any, depth: int, device: str, kernels: Any = gpu_kernels, draws: Any = device_draws
) -> DraftGraph:
    """For one request, with a frontier of eight nodes."""
    cache = KVCache(1, 256, network.device_passes.cache.heads, torch.float32, torch.device(device))
    layers = len(network.description.hidden_state_layers)
    states = torch.zeros(8, layers, network.state_size, device=device)
    passes = DevicePasses(cache, kernels, DeviceTables(1, 256, cache.device), network.device_passes.capture)
    return DraftGraph(network, passes, draws, DraftShape(8, 1, depth), 8, 2, states)


def eagle_on(device: str, folder: Path) -> EagleNetwork:
    target, place = target_weights(), torch.device(device)
    embedding = target.embedding().to(place)
    output = partial(F.linear, weight=embedding)
    target = replace(target, device=place, embedding=lambda: embedding, output=output)
    with pytest.MonkeyPatch.context() as patch:
        use_device_passes(patch)
        return EagleNetwork(Checkpoint(save_method(folder, "eagle")), target, 256)


def test_a_run_waits_for_no_number(tmp_path: Path) -> None:
    """On `meta` tensors, which have none: `.item()`, `tolist` and masks as indices raise, as do two devices in one."""
    with torch.inference_mode():
        outputs = draft_graph(eagle_on("meta", tmp_path), 4, "meta").run()
    assert [tuple(each.shape) for each in outputs] == [(4, 1, 8, 2), (4, 1, 8, 2), (4, 1, 8)]
    with pytest.raises(RuntimeError):
        int(outputs[0][0, 0, 0, 0])


def test_a_level_of_eagle3_is_fifteen_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three predict and choose (`draw_kernels`): here one operator does. One makes the input, nine are the layer's, one
    adds and norms its output, and one is the output matrix."""
    use_device_passes(monkeypatch)
    network = Eagle3Network(Checkpoint(save_method(tmp_path, "eagle3")), target_weights(), 256)
    monkeypatch.setattr(network._network, "_between", FusedKernels)
    counts = []
    for depth in (3, 4):
        graph = draft_graph(network, depth, "cpu", FusedKernels, FusedDraws)
        with torch.inference_mode(), Counting() as counting:
            graph.run()
        counts.append(counting.kernels)
    assert counts[1] - counts[0] + 2 == 3 + 1 + 9 + 1 + 1
