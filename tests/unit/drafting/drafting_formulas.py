"""A speculator whose guesses are compared with the formula of its network, after real hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.speculator import Speculator
from tests.helpers.head_methods import NETWORK, Logits
from tests.helpers.llamas import VOCABULARY
from tests.helpers.seen import nodes_of
from tests.unit.drafting.feeding import Feeding, Guess

DEPTH = 3


def prompt_of(length: int) -> list[int]:
    return [(7 * i + i // 5) % VOCABULARY for i in range(length)]


@dataclass(frozen=True)
class Drafting:
    """`ids`: the token of each column of `logits`; None: all tokens. `width`: most children of a node."""

    speculator: Speculator
    logits: Logits
    ids: Sequence[int] | None = None
    width: int = 2
    tolerance: float = 1e-3

    def request(self, tokens: Sequence[int], **options: Any) -> Feeding:
        """With the target's states of all tokens but the root."""
        request = Feeding(self.speculator, NETWORK, tokens, **{"depth": DEPTH, **options})
        request.tell()
        return request

    @torch.no_grad()
    def logits_after(self, request: Feeding, paths: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
        """What the formula says is next after the root and paths below it."""
        layers = self.speculator.description.hidden_state_layers
        states = request.states()[: len(request.tokens) - 1] if layers else torch.empty(0)
        return {path: self.logits(request.tokens, states, path) for path in paths}

    def check(self, request: Feeding, guesses: Sequence[Guess]) -> None:
        """New guesses have the formula's log-probabilities; a node that got some has all of the likeliest children."""
        for parent, logits in self.logits_after(request, {path[:-1] for path, _ in guesses}).items():
            distribution = logits.log_softmax(-1)
            columns = dict(zip(self.ids or range(len(distribution)), distribution.tolist(), strict=True))
            new = {path[-1]: log_prob for path, log_prob in guesses if path[:-1] == parent}
            assert new == pytest.approx({token: columns[token] for token in new}, abs=self.tolerance)
            best = sorted(columns.values(), reverse=True)[: self.width]
            if (children := children_of(request, parent)) == new.keys():
                assert sorted(new.values(), reverse=True) == pytest.approx(best, abs=self.tolerance)
            else:  # some are older
                assert children >= {token for token in columns if columns[token] > best[-1] + self.tolerance}

    def check_whole(self, request: Feeding) -> None:
        """Every path of the likeliest tokens is guessed."""
        guesses = request.grow()
        assert len(guesses) == sum(self.width**depth for depth in range(1, DEPTH + 1))
        self.check(request, guesses)

    def check_rounds(self, rounds: int = 12) -> None:
        """Accepted tokens are computed with the target's states, and what guesses computed is not kept."""
        rng = Random(1)
        request = self.request(prompt_of(58))
        survived = 0
        for _ in range(rounds):
            self.check(request, request.grow())
            if check_integrity := getattr(self.speculator, "check_integrity", None):
                check_integrity()
            chosen = rng.choice(nodes_of(request.tree)).path()
            request.commit([*(node.token for node in chosen), *rng.choices(range(VOCABULARY), k=rng.randrange(2))])
            survived += request.tree.size > 0
        assert 0 < survived < rounds


def children_of(request: Feeding, parent: Sequence[int]) -> set[int]:
    paths = [tuple(request.tree.path_tokens(node)) for node in request.tree.nodes()]
    return {path[-1] for path in paths if path[:-1] == tuple(parent)}
