"""Predicts the target's draws from a draft's logits, and keeps what that needs of each request.

The target perturbs its logits with noise that is known in advance (`paceline.core.sampling`) and draws the largest. A
draft perturbs its own logits with the same noise; a softmax over the perturbed logits gives the probability of each
draw. At temperature 0 there is no noise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.config import STRATEGIES
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import top_scores
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import DraftError, Opening
from paceline.drafting.tree_speculator import TreeRequest, TreeSpeculator
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.model.model import Model

MAX_ROWS = 256
"""Rows of draft tokens in one round."""
SHORTLIST_SIZE = 64
"""The target's draw is predicted among this many of the likeliest tokens."""

RankedTokens = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The attributes of `Speculator` that follow from the network that drafts, and the network's sizes."""

    model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    columns: int
    """Tokens that the network's logits are for."""
    slots: int = 0
    """Positions in its KV cache."""
    position_limit: int = 0
    hidden_state_layers: Sequence[int] = ()

    @classmethod
    def of_model(cls, model: Model) -> NetworkFacts:
        """The facts of a language model of its own."""
        size = model.vocabulary_size
        return cls(model.name, model.fingerprint, size, size, model.slots, model.max_model_len)


@dataclass(slots=True, eq=False)
class PredictedRequest(TreeRequest):
    """A request whose draws are predicted."""

    history: History
    """Parameters and tokens, as the target's rules see them."""
    least_path_log_prob: float
    """Only nodes with a larger path log-probability are added."""

    def refresh_frontier(self) -> None:
        """The root, its state, the tree or the limits changed: decide again what to draft."""

    def draw_row(self, node: int) -> SamplingRow:
        """The target's draw after `node`."""
        position = self.tree.position + self.tree.depths[node] + 1
        return SamplingRow(self.history.params, position, self.history, self.tree.path_tokens(node))

    def new_children(self, node: int, ranked: RankedTokens) -> RankedTokens:
        """The tokens likely enough to follow `node` that it has no child for."""
        path_log_prob, tree = self.tree.path_log_probs[node], self.tree
        return [
            (token, log_prob)
            for token, log_prob in ranked
            if path_log_prob + log_prob > self.least_path_log_prob and tree.child(node, token) is None
        ]


P = TypeVar("P", bound=PredictedRequest)


class PredictingSpeculator(TreeSpeculator[P]):
    """Drafts with a network."""

    def __init__(self, facts: NetworkFacts, tree_width: int, least_path_probability: float) -> None:
        """`tree_width`: most children of a node. `least_path_probability`: only nodes on likelier paths are added; 0
        admits all."""
        super().__init__()
        self.model = facts.model
        self.vocabulary_fingerprint = facts.vocabulary_fingerprint
        self.vocabulary_size = facts.vocabulary_size
        self.position_limit = facts.position_limit
        self.hidden_state_layers = tuple(facts.hidden_state_layers)
        self._width = min(tree_width, facts.columns)
        self._least_path_probability = least_path_probability
        self._computed = False
        """Whether the last round ran the network; if not, there was nothing to compute."""

    @abstractmethod
    def begin(self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float) -> P:
        """The state of a new request. Raises `DraftError`."""

    @property
    def behind(self) -> bool:
        return self._computed

    def new_request(self, opening: Opening, tree: TokenTree) -> P:
        history = request_history(opening, self.vocabulary_size, self.grammars)
        return self.begin(opening, tree, history, self._least_path_log_prob(opening))

    def limits_changed(self, request: P) -> None:
        request.least_path_log_prob = self._least_path_log_prob(request.opening)
        request.refresh_frontier()

    def _least_path_log_prob(self, opening: Opening) -> float:
        least = max(opening.least_path_probability, self._least_path_probability)
        return math.log(least) if least else -math.inf


def request_history(opening: Opening, vocabulary_size: int, grammars: GrammarCompiler | None) -> History:
    """The history that the target has when it opens the request. Raises `DraftError` for an unknown strategy."""
    strategy = STRATEGIES.get(opening.strategy)
    if strategy is None:
        raise DraftError(f"unknown strategy {opening.strategy!r}")
    params, split = strategy.effective_params(opening.sampling), len(opening.tokens) - opening.output_tokens
    prompt, output = opening.tokens[:split], opening.tokens[split:]
    grammar = None if grammars is None else grammars.start_request(params, output)
    return History(params, prompt, output, vocabulary_size, grammar)


def predict_draws(
    logits_RV: Tensor, rows: Sequence[SamplingRow], width: int, ids_V: Tensor | None = None
) -> list[RankedTokens]:
    """The `width` likeliest results of each row's draw. `ids_V`: see `top_scores`.

    A forbidden token has log-probability -inf; if all of `ids_V` are forbidden, all are NaN. A tree takes neither.
    """
    tokens_RK, scores_RK = top_scores(logits_RV, rows, SHORTLIST_SIZE, ids_V)
    log_probs_RK = torch.log_softmax(scores_RK, -1)
    tokens, log_probs = (each[:, :width].tolist() for each in (tokens_RK, log_probs_RK))
    return [list(zip(*row, strict=True)) for row in zip(tokens, log_probs, strict=True)]
