"""The output of draw, tree and walk does not depend on the draft tokens, under any sampling parameters.

The model is a table: its logits after a prefix are random, and the same whenever the same few tokens come last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.sampling import History, SamplingRow, draw
from paceline.core.tree import ROOT, TokenTree
from paceline.core.verify import STRATEGIES, walk

VOCABULARY, LENGTH = 16, 40
PROMPT = [3, 1, 4, 1, 5]


def table_logits(prefix: Sequence[int]) -> Tensor:
    seed = int.from_bytes(bytes(prefix[-3:]), "big")
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2.5


def plain(params: SamplingParams) -> list[int]:
    """One token at a time, without draft tokens."""
    output: list[int] = []
    for _ in range(LENGTH):
        row = SamplingRow(params, len(PROMPT) + len(output), History(params, PROMPT, output, VOCABULARY))
        output += draw(table_logits(PROMPT + output)[None], [row]).tolist()
    return output


Rows = Callable[[SamplingRow], SamplingRow]


def speculative(params: SamplingParams, rng: random.Random, alter: Rows | None = None) -> list[int]:
    """Trees with some right nodes; `alter` changes the rows of nodes."""
    right = plain(params)
    history = History(params, PROMPT, [], VOCABULARY)
    tree = TokenTree(len(PROMPT) - 1, PROMPT[-1])
    output: list[int] = []
    while len(output) < LENGTH:
        grow(tree, right[len(output) :], rng)
        verified = tree.best(rng.randrange(12), max_depth=rng.randrange(7))
        paths = [tree.path_tokens(node) for node in (ROOT, *verified)]
        rows = [SamplingRow(params, len(PROMPT) + len(output) + len(path), history, path) for path in paths]
        if alter is not None:
            rows[1:] = map(alter, rows[1:])
        logits = torch.stack([table_logits([*PROMPT, *output, *path]) for path in paths])
        committed = walk(tree, verified, draw(logits, rows).tolist())
        tree.commit(committed)
        history.extend(committed)
        output += committed
    return output[:LENGTH]


def grow(tree: TokenTree, right: Sequence[int], rng: random.Random) -> None:
    """Add paths that follow the right continuation for a while, then random tokens."""
    for _ in range(rng.randrange(4)):
        node, astray = ROOT, False
        for token in right[: rng.randrange(8)]:
            astray = astray or rng.random() < 0.15
            guess = rng.randrange(VOCABULARY) if astray else token
            node = tree.child(node, guess) or tree.add(node, guess, -rng.random())


PARAMS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.5},
    "filters": {"top_k": 7, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.6, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.6, "frequency_penalty": 0.5},
    "bars": {
        "bad_words": ((7,), *((token, token) for token in range(VOCABULARY))),
        "min_tokens": 20,
        "max_tokens": LENGTH,
        "stop_token_ids": (1, 9),
        "logit_bias": {1: 3.0},
    },
}


@pytest.fixture(params=PARAMS.values(), ids=PARAMS)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return SamplingParams(seed=21, **request.param)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(5))
def test_draft_tokens_change_nothing(params: SamplingParams, strategy: str, seed: int) -> None:
    effective = STRATEGIES[strategy].effective_params(params)
    assert speculative(effective, random.Random(seed)) == plain(effective)


def caught(alter: Rows, **settings: object) -> bool:
    params = SamplingParams(seed=21, **settings)
    return any(speculative(params, random.Random(seed), alter) != plain(params) for seed in range(5))


def test_unchanged_rows_are_not_caught() -> None:
    assert not any(caught(lambda row: row, **settings) for settings in PARAMS.values())


@pytest.mark.parametrize(
    "alter",
    [
        lambda row: row._replace(position=len(row.path)),
        lambda row: row._replace(position=row.position - len(row.path)),
        lambda row: row._replace(params=row.params.model_copy(update={"seed": 22 + row.path[-1]})),
        lambda row: row._replace(params=row.params.model_copy(update={"temperature": 1.3})),
        lambda row: row._replace(position=row.position + 1),
    ],
    ids=["noise by depth", "the root's noise", "noise by node", "another temperature", "noise of the next position"],
)
def test_rows_with_the_wrong_noise_are_caught(alter: Rows) -> None:
    assert caught(alter)


@pytest.mark.parametrize("rules", ["penalties", "greedy penalties", "bars"])
def test_rules_without_the_path_are_caught(rules: str) -> None:
    assert caught(lambda row: row._replace(path=()), **PARAMS[rules])
    assert caught(lambda row: row._replace(path=row.path[:-1]), **PARAMS[rules])
