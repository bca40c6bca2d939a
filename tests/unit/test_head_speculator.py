"""A head that drafts token by token: which token and state its rows have, and what it guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.messages import GenerationRequest
from paceline.core.tree import TokenTree
from paceline.drafting import build_speculator, hidden_state_layers
from paceline.drafting.draw_prediction import SHORTLIST_SIZE
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.heads.head_speculator import HeadSpeculator
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.speculator import Commit, Context, Opening, Speculator
from paceline.engine.draft_client import LocalDraftClient
from paceline.engine.engine import Engine
from paceline.model.checkpoint import Checkpoint, CheckpointError
from tests.helpers.head_checkpoints import (
    HIDDEN,
    VOCABULARY,
    eagle3_tensors,
    eagle_tensors,
    llama_config,
    reduced,
    save_head,
    target_model,
    target_network,
    target_weights,
)
from tests.helpers.head_formulas import Eagle1, Formula, after
from tests.helpers.head_formulas import Eagle3 as Formula3
from tests.helpers.seen import nodes_of
from tests.helpers.targets import FREE

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
IDS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
STATES = torch.randn(64, 3, HIDDEN, generator=torch.Generator().manual_seed(29))
"""By position. EAGLE-1 reads the first of each."""


def head(network: HeadNetwork, width: int = 2) -> HeadSpeculator:
    """With every guess likely enough."""
    return HeadSpeculator("eagle3", network, "", VOCABULARY, width, least_path_probability=0.0)


def states(network: HeadNetwork, start: int, stop: int) -> Tensor:
    return STATES[start:stop, : len(network.hidden_state_layers)]


def opening(tokens: list[int], depth: int = 3) -> Opening:
    return Opening(1, tokens, 0, GREEDY, depth, 1000)


def grown(speculator: Speculator, tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Graft growth until there is no more; the log-probabilities of the new nodes by path."""
    known = set(nodes_of(tree))
    while (growth := speculator.grow()) or speculator.behind:
        for each in growth.values():
            assert tree.graft(each, 10_000) == len(each)
    return {tuple(n.token for n in node.path()): node.log_prob for node in nodes_of(tree) if node not in known}


HEADS: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], Any]] = {
    "EAGLE-1": (eagle_tensors(bias=True), {}, EagleNetwork),
    "EAGLE-3": (eagle3_tensors(), {}, Eagle3Network),
    "EAGLE-3 of a reduced vocabulary": (eagle3_tensors(columns=len(IDS)), reduced(IDS), Eagle3Network),
}


@pytest.fixture(params=HEADS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[HeadNetwork, Formula]:
    """A network, and what it is to compute."""
    tensors, more, kind = HEADS[request.param]
    save_head(tmp_path, tensors | more, llama_config())
    target = target_network()
    formula = (Eagle1 if kind is EagleNetwork else Formula3)(
        tensors, target.model.embed_tokens.weight, target.lm_head.weight
    )
    return kind(Checkpoint(tmp_path), target_weights(), 256), formula


class TestPairing:
    """The row of the token at position i + 1 reads the state of position i and predicts the token at i + 2."""

    @torch.no_grad()
    def test_guesses_are_the_formulas(self, pair: tuple[HeadNetwork, Formula]) -> None:
        network, formula = pair
        speculator, tree = head(network), TokenTree(len(PROMPT) - 1, PROMPT[-1])
        speculator.open(opening(PROMPT))
        speculator.context(Context(1, 0, states(network, 0, len(PROMPT) - 1)))
        guesses = grown(speculator, tree)
        assert len(guesses) == 2 + 4 + 8
        self.are_likeliest(guesses, network, formula, PROMPT)

    @torch.no_grad()
    def test_after_commits_too(self, pair: tuple[HeadNetwork, Formula]) -> None:
        """A commit of draft tokens and another token, then a commit of another token alone."""
        network, formula = pair
        tokens = PROMPT.copy()
        speculator, tree = head(network), TokenTree(len(tokens) - 1, tokens[-1])
        speculator.open(opening(tokens))
        speculator.context(Context(1, 0, states(network, 0, len(tokens) - 1)))
        likely = max(grown(speculator, tree), key=len)
        for committed in ([*likely[:2], 90], [91]):
            base = len(tokens) - 1
            tokens += committed
            tree.commit(committed)
            speculator.commit(Commit(1, base, committed, 0, states(network, base, len(tokens) - 1)))
            guesses = grown(speculator, tree)
            assert len(guesses) == 2 + 4 + 8
            self.are_likeliest(guesses, network, formula, tokens)

    @pytest.mark.parametrize("count", [1, 2])
    @torch.no_grad()
    def test_accepted_draft_tokens_are_computed_again(self, count: int, pair: tuple[HeadNetwork, Formula]) -> None:
        """Nodes that remain keep their probabilities; new nodes are those of a fresh start."""
        network, formula = pair
        speculator, tree = head(network), TokenTree(len(PROMPT) - 1, PROMPT[-1])
        speculator.open(opening(PROMPT))
        speculator.context(Context(1, 0, states(network, 0, len(PROMPT) - 1)))
        committed = max(grown(speculator, tree), key=len)[:count]
        tree.commit(committed)
        assert tree.size == {1: 2 + 4, 2: 2}[count]
        known = states(network, 0, len(PROMPT) + count - 1)
        speculator.commit(Commit(1, len(PROMPT) - 1, committed, count, known[len(PROMPT) - 1 :]))
        guesses = grown(speculator, tree)
        assert max(map(len, guesses)) == 3
        for path, log_prob in guesses.items():
            distribution = self.distribution(formula, network, [*PROMPT, *committed], known, path[:-1])
            assert log_prob == pytest.approx(distribution[path[-1]], abs=5e-3)  # measured: 1.6e-3, of logits up to 80

    def distribution(
        self, formula: Formula, network: HeadNetwork, tokens: list[int], known: Tensor, path: tuple[int, ...]
    ) -> dict[int, float]:
        """Log-probabilities of the shortlisted tokens, likeliest first."""
        ids = range(VOCABULARY) if network.ids is None else network.ids.tolist()
        logits, columns = after(formula, tokens, known, path)[0].topk(min(SHORTLIST_SIZE, len(ids)))
        return dict(zip([ids[c] for c in columns.tolist()], logits.log_softmax(-1).tolist(), strict=True))

    def are_likeliest(
        self, guesses: dict[tuple[int, ...], float], network: HeadNetwork, formula: Formula, tokens: list[int]
    ) -> None:
        known = states(network, 0, len(tokens) - 1)
        for parent in {path[:-1] for path in guesses}:
            expected = dict(list(self.distribution(formula, network, tokens, known, parent).items())[:2])
            got = {path[-1]: guesses[path] for path in guesses if path[:-1] == parent}
            assert got == pytest.approx(expected, abs=5e-3)  # as above

    def test_the_state_is_of_the_position_before_the_token(self, tmp_path: Path) -> None:
        """A head that passes the state on predicts what the target drew from that state: the root, in a real engine."""
        for path, children in engine_guesses(passing_on(tmp_path, state=True)):
            assert children[0] == path[-1]

    def test_the_token_is_the_one_after_the_state(self, tmp_path: Path) -> None:
        """A head that passes the embedding on predicts from the root alone."""
        network = target_network()
        with torch.no_grad():
            likeliest = (network.model.embed_tokens.weight @ network.lm_head.weight.T).argmax(-1).tolist()
        for path, children in engine_guesses(passing_on(tmp_path, state=False)):
            assert children[0] == likeliest[path[-1]]

    def test_a_prompt_of_one_token(self, pair: tuple[HeadNetwork, Formula]) -> None:
        """No state stands before it until the target has drawn the next one."""
        network, formula = pair
        speculator, tree = head(network), TokenTree(0, 7)
        speculator.open(opening([7]))
        assert grown(speculator, tree) == {}
        tree.commit([8])
        speculator.commit(Commit(1, 0, [8], 0, states(network, 0, 1)))
        with torch.no_grad():
            self.are_likeliest(grown(speculator, tree), network, formula, [7, 8])


def without_layer(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """The layer's output is its input."""
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[f"{layer}.{name}"].zero_()
    return tensors


def passing_on(folder: Path, *, state: bool) -> EagleNetwork:
    """A head whose output is its state, or else its token's embedding."""
    tensors = without_layer(eagle_tensors(), "layers.0")
    halves = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    tensors["fc.weight"] = torch.cat(halves[::-1] if state else halves, 1)
    return EagleNetwork(Checkpoint(save_head(folder, tensors, llama_config())), target_weights(), 256)


class RecordingClient(LocalDraftClient):
    """Records the children of every root, with the tokens up to it."""

    def __init__(self, speculator: Speculator) -> None:
        super().__init__(speculator)
        self.recorded: list[tuple[list[int], list[int]]] = []
        self._tokens: list[int] = []

    def open(self, opening: Opening, drafts: Any) -> str | None:
        self._tokens = list(opening.tokens)
        return super().open(opening, drafts)

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self._tokens += commit.tokens

    def poll(self, timeout_s: float) -> Any:
        update = super().poll(timeout_s)
        for _, growth in update.growths:
            if growth.base_position == len(self._tokens) - 1:
                children = [t for t, p in zip(growth.tokens, growth.parent_ids, strict=True) if p == 0]
                self.recorded += [(self._tokens.copy(), children)] if children else []
        return update


def engine_guesses(network: HeadNetwork) -> list[tuple[list[int], list[int]]]:
    """After each token of a request that a real target decodes greedily: the tokens, and the head's first guesses."""
    drafting = RecordingClient(head(network))
    config = SpeculativeConfig(method="eagle", model="-", num_speculative_tokens=1, tree_width=2)
    engine = Engine(target_model(), EngineConfig(slots=1024), config, drafting, FREE)
    engine.submit(GenerationRequest("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=12)))
    while engine.busy:
        engine.step()
    assert len(drafting.recorded) > 3
    return drafting.recorded


class TestPositions:
    def test_guesses_end_before_the_targets_last_position(self, tmp_path: Path) -> None:
        network = EagleNetwork(Checkpoint(save_head(tmp_path, eagle_tensors(), llama_config())), target_weights(), 256)
        network.position_limit = len(PROMPT) + 2
        speculator, tree = head(network), TokenTree(len(PROMPT) - 1, PROMPT[-1])
        speculator.open(opening(PROMPT, depth=9))
        speculator.context(Context(1, 0, states(network, 0, len(PROMPT) - 1)))
        assert max(map(len, grown(speculator, tree))) == 2

    def test_the_heads_own_limit_does_not_count(self, tmp_path: Path) -> None:
        """Configurations name 2048 positions, and the heads work far beyond."""
        save_head(tmp_path, eagle3_tensors(), llama_config(max_position_embeddings=16))
        assert Eagle3Network(Checkpoint(tmp_path), target_weights(), 256).position_limit == 512


class TestConfigured:
    def test_the_users_layers_override_the_checkpoints(self, tmp_path: Path) -> None:
        save_head(tmp_path, eagle3_tensors(), llama_config())
        config = SpeculativeConfig(method="eagle3", model=str(tmp_path), eagle_aux_hidden_state_layer_ids=(0, 1, 2))
        assert build_speculator(config, EngineConfig(slots=256), target_weights).hidden_state_layers == (0, 1, 2)
        assert hidden_state_layers(config, EngineConfig(slots=256), target_weights) == (0, 1, 2)

    def test_a_head_of_another_method_is_refused(self, tmp_path: Path) -> None:
        save_head(tmp_path, eagle_tensors(), llama_config())
        config = SpeculativeConfig(method="eagle3", model=str(tmp_path))
        with pytest.raises(CheckpointError, match=r"no tensor .*: it is incomplete, or not of the configured method"):
            build_speculator(config, EngineConfig(slots=256), target_weights)
