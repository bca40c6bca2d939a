"""The same tokens over the real wire: gateway link, target, draft workers, whatever happens to the drafts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.drafting import build_speculator
from paceline.drafting.best_first import BestFirst
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import DraftingLimits, Speculator
from paceline.messages import GenerationRequest, SpeculationStats
from paceline.model import Model, load
from paceline.model.checkpoint import Checkpoint
from paceline.model.loading import build
from paceline.model.target_weights import load_target_weights
from paceline.wire.draft_stream_messages import ConnectDrafts
from paceline.wire.target_link import TargetLink
from paceline_lab.fake_models.table_model import TableModel
from tests.exactness.test_draw_distribution import SIGNIFICANCE
from tests.exactness.test_strategies_engine import LENGTH, SIZE, distribution_after, generation_requests, tail
from tests.helpers.drafts import model_draft, ngram_draft, suffix_draft
from tests.helpers.head_checkpoints import HIDDEN, eagle_tensors, llama_config, save_head, target_model, target_network
from tests.helpers.llamas import peaked_llama
from tests.helpers.markov import save_markov, save_seeing
from tests.helpers.parallel import drafting_for
from tests.helpers.service_processes import service_process
from tests.helpers.targets import collect, linked, target_worker
from tests.helpers.waiting import until
from tests.helpers.workers import RecordingSpeculator, draft_worker

TABLE_VOCABULARY = 24  # small, so that outputs repeat and n-grams match
SLOTS = 2048
TEMPERATURES = [pytest.param(0.0, marks=pytest.mark.slow), 0.8]
"""One case per method; `test_engine.py` has all cases, in one process."""
NO_GAP = "a draft drops a request with a gap in its hidden states"


def table(disagreement: float = 0.0) -> Model:
    return TableModel(TABLE_VOCABULARY, SLOTS, 512, disagreement)


def llama(dtype: torch.dtype, noise: float = 0.0) -> Model:
    return build(peaked_llama(noise).to(dtype), "llama", EngineConfig(slots=SLOTS), "", [])


def requests(
    temperature: float, *, plain: bool, drafts: Sequence[str] = (), tokens: int = 40
) -> list[GenerationRequest]:
    """Requests with repetitive prompts of several lengths, some of them resumed."""
    return [
        GenerationRequest(
            str(i),
            [1 + (i + j) % 7 for j in range(5 + 6 * i)],
            SamplingParams(temperature=temperature, max_tokens=tokens, seed=i),
            SpeculativeOptions(enabled=False if plain else None, report=True),
            committed=[3] * (i % 3),
            draft_addresses=drafts,
        )
        for i in range(5)
    ]


async def run(
    link: TargetLink, generation_requests: Sequence[GenerationRequest]
) -> tuple[list[list[int]], list[SpeculationStats]]:
    results = await asyncio.gather(*(collect(link, each) for each in generation_requests))
    return [tokens for tokens, _ in results], [last.speculation for _, last in results if last.speculation]


@asynccontextmanager
async def served(
    model: Model, speculation: SpeculativeConfig, *speculators: Speculator, drafts: Sequence[str] = ()
) -> AsyncIterator[tuple[TargetLink, list[str]]]:
    """A target connected to one worker per speculator, and to the workers at `drafts`."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(draft_worker(speculator, f"draft {i}"))
            for i, speculator in enumerate(speculators)
        ]
        addresses = [*drafts, *(worker.address for worker in workers)]
        target = await stack.enter_async_context(target_worker(speculation, model))
        target.pool.connect(ConnectDrafts(addresses))
        await until(lambda: set(target.pool.connected) == set(addresses))
        [link] = await stack.enter_async_context(linked(target))
        yield link, addresses


def config(method: str | Sequence[str], depth: int, width: int, **keys: object) -> SpeculativeConfig:
    named = {"method": method, "model": "-", "num_speculative_tokens": depth, "tree_width": width}
    return SpeculativeConfig.model_validate(named | keys)


WAITING: dict[str, object] = {"draft_schedule": "lockstep", "row_budget": False}
"""The target waits for draft tokens, so that there are some."""


def speculator(method: str, width: int) -> Speculator:
    if method == "draft_model":
        return model_draft(table(0.3), width)
    return ngram_draft(1, 4, width) if method == "ngram" else suffix_draft(config("suffix", 4, width))


METHODS = (["draft_model"], ["ngram"], ["suffix"])
STACKS = (
    ["suffix", "draft_model"],
    ["ngram", "draft_model"],
    ["ngram", "suffix"],
    ["ngram", "draft_model", "suffix"],
)
QUICK = (*METHODS, *STACKS[2:])


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("methods", "depth", "width"),
    [
        pytest.param(methods, *sizes, marks=() if methods in QUICK and sizes == (5, 3) else pytest.mark.slow)
        for methods in (*METHODS, *STACKS)
        for sizes in (((1, 1), (4, 1), (5, 3)) if methods in METHODS else ((5, 3),))
    ],
)
async def test_speculation_changes_nothing(methods: Sequence[str], depth: int, width: int, temperature: float) -> None:
    """Plain and speculative requests in one batch give the tokens that each gives alone.

    Model-free methods of a stack run in the target and add to the same trees as the worker.
    """
    stack = config(methods, depth, width, **WAITING if "draft_model" in methods else {})
    async with served(table(), stack, speculator(stack.method, width)) as (link, drafts):
        stats = await same_tokens(link, temperature, drafts)
        assert sum(each.drafted_tokens for each in stats) > 0
        assert methods in METHODS[1:] or sum(each.accepted_tokens for each in stats) > 0


async def test_model_free_methods_draft_for_requests_that_have_no_draft() -> None:
    async with served(table(), config(["suffix", "draft_model"], 5, 3)) as (link, _):
        alone, _ = await run(link, requests(0.0, plain=True, tokens=200))
        results, stats = await run(link, requests(0.0, plain=False, tokens=200))
        assert results == alone
        assert sum(each.accepted_tokens for each in stats) > 0
        assert not any(each.drafts for each in stats)


Drafted = tuple[Model, SpeculativeConfig, Speculator]


def eagle(folder: Path) -> Drafted:
    """It drafts once it has all hidden states, and well: the target's next token depends mostly on the last."""
    network = target_network()
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
    tensors = eagle_tensors()
    tensors["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[f"layers.0.{name}"].zero_()
    model = target_model(network, slots=SLOTS)
    head = EagleNetwork(Checkpoint(save_head(folder, tensors, llama_config())), model.target_weights(), SLOTS)
    head.description = replace(head.description, vocabulary_fingerprint="")
    draft = NetworkSpeculator(BestFirst(head, DraftingLimits(3)))
    return model, config("eagle", 5, 3, **WAITING), draft


def from_one_state(method: str, folder: Path, temperature: float) -> Drafted:
    """The worker loads the head and parts of the target's checkpoint."""
    target = str(save_markov(folder / "target"))
    speculation = config(method, 3, 3, model=str(save_seeing(method, folder / "head", temperature)))
    settings = EngineConfig(slots=SLOTS)
    speculator = build_speculator(speculation, settings, lambda: load_target_weights(target, None, "cpu"))
    return load(target, settings), speculation, speculator


def transformer(name: str, folder: Path, temperature: float) -> Drafted:
    if name == "eagle":
        return eagle(folder)
    if name in ("medusa", "mlp_speculator"):
        return from_one_state(name, folder, temperature)
    if name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        return llama(dtype), config("draft_model", 5, 3), model_draft(llama(dtype, noise=0.01), tree_width=3)
    draft = drafting_for(llama(torch.float32), name, folder, width=1)
    return llama(torch.float32), config("draft_model", 4, 1, **WAITING), draft


LEAST_ACCEPTED = {
    **dict.fromkeys(("float32", "bfloat16", "eagle", "pard"), 1),
    **dict.fromkeys(("dflash", "peagle"), 0),
    **dict.fromkeys(("medusa", "mlp_speculator"), 21),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", LEAST_ACCEPTED)
async def test_speculation_changes_nothing_in_a_transformer(name: str, temperature: float, tmp_path: Path) -> None:
    """Hidden states come to the draft with the target's frames."""
    model, speculation, draft = transformer(name, tmp_path, temperature)
    async with served(model, speculation, draft) as (link, drafts):
        stats = await same_tokens(link, temperature, drafts)
        assert sum(each.drafted_tokens for each in stats) > 0
        assert sum(each.accepted_tokens for each in stats) >= LEAST_ACCEPTED[name]
        assert all(each.drafts == ["draft 0"] for each in stats), NO_GAP


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"block_verification": True}], ids=["one by one", "as a block"])
async def test_residual_has_the_distribution_of_the_target_over_the_wire(keys: dict[str, object]) -> None:
    """The statistics are over many requests, of three tokens each."""
    speculation = config("draft_model", 4, 1, rejection_sampling_strategy="residual", **WAITING, **keys)
    draft = model_draft(TableModel(SIZE, SLOTS, 512, 0.5), 1)
    async with served(TableModel(SIZE, SLOTS, 512), speculation, draft) as (link, drafts):
        results, stats = [], []
        for start in range(0, 400, 20):
            some = [replace(each, draft_addresses=drafts) for each in generation_requests(start + 20)[start:]]
            tokens, reports = await run(link, some)
            results += tokens
            stats += reports
    assert tail(results, distribution_after(TableModel(SIZE, SLOTS, 512), SamplingParams(), LENGTH)) > SIGNIFICANCE
    assert sum(each.accepted_tokens for each in stats) > 50
    assert {(each.strategy, each.lossy, each.drafter_invariant) for each in stats} == {("residual", False, False)}


async def test_residual_over_the_wire_at_temperature_0_changes_nothing() -> None:
    speculation = config("draft_model", 4, 1, rejection_sampling_strategy="residual")
    async with served(table(), speculation, model_draft(table(0.3), 1)) as (link, drafts):
        stats = await same_tokens(link, 0.0, drafts)
        assert sum(each.accepted_tokens for each in stats) > 0


async def test_a_draft_killed_halfway_changes_nothing() -> None:
    """SIGKILL to a real process; its requests continue on the next draft."""
    speculation = config("draft_model", 5, 3, model=f"table:{TABLE_VOCABULARY}:0.3")
    arguments = ("--worker-id", "killed", "--speculative-config", speculation.model_dump_json())
    with service_process("draft", *arguments) as killed:
        spare = model_draft(table(0.3), 3)
        async with served(table(), config("draft_model", 5, 3), spare, drafts=[killed.address]) as (link, drafts):
            tokens = 300  # so that no request ends before the loss is noticed
            alone, _ = await run(link, requests(0.8, plain=True, tokens=tokens))
            submitted = requests(0.8, plain=False, drafts=drafts, tokens=tokens)
            killing = [follow(link, each, killed.process) for each in submitted]
            results = await asyncio.gather(*killing)
            assert [tokens for tokens, _ in results] == alone
            assert {tuple(stats.drafts) for _, stats in results} == {("killed", "draft 0")}
            assert killed.process.returncode == -signal.SIGKILL


async def test_hidden_states_of_every_position_reach_the_draft() -> None:
    """Of the whole prompt and of every committed token, in their places."""
    recording = RecordingSpeculator(TABLE_VOCABULARY)
    steady = config("draft_model", 4, 1, row_budget=False)  # a paused draft gets no commits
    async with served(table(), steady, recording) as (link, drafts):
        alone, _ = await run(link, requests(0.8, plain=True))
        submitted = requests(0.8, plain=False, drafts=drafts)
        results, stats = await run(link, submitted)
        assert results == alone
        assert all(each.drafts == ["draft 0"] for each in stats), NO_GAP
        histories = [[*each.prompt, *each.committed, *tokens] for each, tokens in zip(submitted, results, strict=True)]
        computed = sorted(history[:-1] for history in histories)  # the last token is no pass's input
        lengths = sorted(map(len, computed))
        await until(lambda: sorted(map(len, recording.seen.values())) == lengths)  # the last commits are on their way
        assert sorted([seen[position] for position in range(len(seen))] for seen in recording.seen.values()) == computed


async def same_tokens(link: TargetLink, temperature: float, drafts: Sequence[str]) -> list[SpeculationStats]:
    """Check that requests give the same tokens alone and plain, and in one batch plain and speculative.

    Returns the statistics of the speculative ones.
    """
    plain = requests(temperature, plain=True)
    alone, _ = await run(link, plain)
    speculative = requests(temperature, plain=False, drafts=drafts)
    others = [replace(each, request_id=f"plain {each.request_id}") for each in plain]
    (mixed, stats), (mixed_plain, _) = await asyncio.gather(run(link, speculative), run(link, others))
    assert mixed == mixed_plain == alone
    return stats


async def follow(
    link: TargetLink, generation_request: GenerationRequest, process: subprocess.Popen[str]
) -> tuple[list[int], SpeculationStats]:
    """Return tokens and statistics of a request. Kills the process when the first request is a quarter through."""
    tokens: list[int] = []
    stats = SpeculationStats()
    async with aclosing(link.submit(generation_request)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
            stats = delta.speculation or stats
            if len(tokens) >= generation_request.sampling.max_tokens // 4 and process.poll() is None:
                process.kill()
                process.wait()
    return tokens, stats
