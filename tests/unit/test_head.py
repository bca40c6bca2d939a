"""A head at work: what stands in its rows, what it guesses, and what it keeps in memory."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.messages import Submission
from paceline.core.tree import TokenTree
from paceline.drafting import build_speculator, hidden_state_layers
from paceline.drafting.draw_prediction import SHORTLIST_SIZE
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.heads.head_speculator import HeadSpeculator
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.speculator import Commit, Context, DraftError, Opening, Speculator
from paceline.engine.draft_client import LocalDraftClient
from paceline.engine.engine import Engine
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear, TorchNetwork
from paceline.model.target_weights import load_target_weights
from tests.helpers.head_checkpoints import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    eagle3_tensors,
    eagle_tensors,
    lent,
    llama_config,
    random,
    reduced,
    save_head,
    save_target,
    target_model,
    target_network,
)
from tests.helpers.head_formulas import Eagle1, Formula, after
from tests.helpers.head_formulas import Eagle3 as Formula3
from tests.helpers.seen import nodes_of
from tests.helpers.targets import FREE

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KNOWN = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
STATES = torch.randn(64, 3, HIDDEN, generator=torch.Generator().manual_seed(29))
"""By position. EAGLE-1 is fed with the first of each."""


def head(network: HeadNetwork, width: int = 2) -> HeadSpeculator:
    """One that thinks no guess too unlikely."""
    return HeadSpeculator("eagle3", network, "", VOCABULARY, width, least_path_probability=0.0)


def states(network: HeadNetwork, start: int, stop: int) -> Tensor:
    return STATES[start:stop, : len(network.hidden_state_layers)]


def opening(tokens: list[int], depth: int = 3) -> Opening:
    return Opening(1, tokens, 0, GREEDY, depth, 1000)


def grown(speculator: Speculator, tree: TokenTree) -> dict[tuple[int, ...], float]:
    """By their paths, the log-probabilities of the nodes that come until no more do."""
    known = set(nodes_of(tree))
    while (growth := speculator.grow()) or speculator.behind:
        for each in growth.values():
            assert tree.graft(each, 10_000) == len(each)
    return {tuple(n.token for n in node.path()): node.log_prob for node in nodes_of(tree) if node not in known}


HEADS: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], Any]] = {
    "EAGLE-1": (eagle_tensors(bias=True), {}, EagleNetwork),
    "EAGLE-3": (eagle3_tensors(), {}, Eagle3Network),
    "EAGLE-3 of a reduced vocabulary": (eagle3_tensors(columns=len(KNOWN)), reduced(KNOWN), Eagle3Network),
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
    return kind(Checkpoint(tmp_path), lent(), 256), formula


class TestPairing:
    """The row of the token at position i + 1 is fed with the state of position i, and predicts the token at i + 2."""

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
        """One of guesses and a token that was none, then one of a token that was none."""
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
    def test_guesses_that_came_true_are_computed_again(self, count: int, pair: tuple[HeadNetwork, Formula]) -> None:
        """With the target's states. What stays in the tree keeps its odds; what grows from it is as if it were new."""
        network, formula = pair
        speculator, tree = head(network), TokenTree(len(PROMPT) - 1, PROMPT[-1])
        speculator.open(opening(PROMPT))
        speculator.context(Context(1, 0, states(network, 0, len(PROMPT) - 1)))
        committed = max(grown(speculator, tree), key=len)[:count]
        tree.commit(committed)
        assert tree.size == {1: 2 + 4, 2: 2}[count]
        told = states(network, 0, len(PROMPT) + count - 1)
        speculator.commit(Commit(1, len(PROMPT) - 1, committed, count, told[len(PROMPT) - 1 :]))
        guesses = grown(speculator, tree)
        assert max(map(len, guesses)) == 3
        for path, log_prob in guesses.items():
            law = self.law(formula, network, [*PROMPT, *committed], told, path[:-1])
            assert log_prob == pytest.approx(law[path[-1]], abs=5e-3)  # measured: 1.6e-3, of logits up to 80

    def law(
        self, formula: Formula, network: HeadNetwork, tokens: list[int], told: Tensor, path: tuple[int, ...]
    ) -> dict[int, float]:
        """Log-probabilities of the tokens that are looked at, likeliest first."""
        ids = range(VOCABULARY) if network.ids is None else network.ids.tolist()
        logits, columns = after(formula, tokens, told, path)[0].topk(min(SHORTLIST_SIZE, len(ids)))
        return dict(zip([ids[c] for c in columns.tolist()], logits.log_softmax(-1).tolist(), strict=True))

    def are_likeliest(
        self, guesses: dict[tuple[int, ...], float], network: HeadNetwork, formula: Formula, tokens: list[int]
    ) -> None:
        told = states(network, 0, len(tokens) - 1)
        for parent in {path[:-1] for path in guesses}:
            expected = dict(list(self.law(formula, network, tokens, told, parent).items())[:2])
            got = {path[-1]: guesses[path] for path in guesses if path[:-1] == parent}
            assert got == pytest.approx(expected, abs=5e-3)  # as above

    def test_the_state_is_of_the_position_before_the_token(self, tmp_path: Path) -> None:
        """A head that hands the state on predicts what the target drew from that state: the root, in a real engine."""
        for path, children in engine_guesses(handing_on_the_state(tmp_path)):
            assert children[0] == path[-1]

    def test_the_token_is_the_one_after_the_state(self, tmp_path: Path) -> None:
        """A head that hands the embedding on guesses by the root alone."""
        network = target_network()
        with torch.no_grad():
            likeliest = (network.model.embed_tokens.weight @ network.lm_head.weight.T).argmax(-1).tolist()
        for path, children in engine_guesses(handing_on_the_token(tmp_path)):
            assert children[0] == likeliest[path[-1]]

    def test_a_prompt_of_one_token(self, pair: tuple[HeadNetwork, Formula]) -> None:
        """Nothing stands before it, so nothing is known of it, until the target has drawn the next one."""
        network, formula = pair
        speculator, tree = head(network), TokenTree(0, 7)
        speculator.open(opening([7]))
        assert grown(speculator, tree) == {}
        tree.commit([8])
        speculator.commit(Commit(1, 0, [8], 0, states(network, 0, 1)))
        with torch.no_grad():
            self.are_likeliest(grown(speculator, tree), network, formula, [7, 8])


def without_layer(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """What comes into the layer goes out of it."""
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[f"{layer}.{name}"].zero_()
    return tensors


def handing_on_the_state(folder: Path) -> EagleNetwork:
    tensors = without_layer(eagle_tensors(), "layers.0")
    tensors["fc.weight"] = torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)), 1)
    return EagleNetwork(Checkpoint(save_head(folder, tensors, llama_config())), lent(), 256)


def handing_on_the_token(folder: Path) -> EagleNetwork:
    tensors = without_layer(eagle_tensors(), "layers.0")
    tensors["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    return EagleNetwork(Checkpoint(save_head(folder, tensors, llama_config())), lent(), 256)


class Noting(LocalDraftClient):
    """Keeps the children of every root, with the tokens up to it."""

    def __init__(self, speculator: Speculator) -> None:
        super().__init__(speculator)
        self.noted: list[tuple[list[int], list[int]]] = []
        self._tokens: list[int] = []

    def open(self, opening: Opening, drafts: Any) -> str | None:
        self._tokens = list(opening.tokens)
        return super().open(opening, drafts)

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self._tokens += commit.tokens

    def poll(self, timeout_s: float) -> Any:
        news = super().poll(timeout_s)
        for _, growth in news.growths:
            if growth.base_position == len(self._tokens) - 1:
                children = [t for t, p in zip(growth.tokens, growth.parent_ids, strict=True) if p == 0]
                self.noted += [(self._tokens.copy(), children)] if children else []
        return news


def engine_guesses(network: HeadNetwork) -> list[tuple[list[int], list[int]]]:
    """What a head guesses first after each token of a request that a real target decodes greedily."""
    drafting = Noting(head(network))
    config = SpeculativeConfig(method="eagle", model="-", num_speculative_tokens=1, tree_width=2)
    engine = Engine(target_model(), EngineConfig(slots=1024), config, drafting, FREE)
    engine.submit(Submission("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=12)))
    while engine.busy:
        engine.step()
    assert len(drafting.noted) > 3
    return drafting.noted


class TestWhatItIsTold:
    def test_states_of_later_positions_than_the_next_are_refused(self, pair: tuple[HeadNetwork, Formula]) -> None:
        network, _ = pair
        speculator = head(network)
        speculator.open(opening(PROMPT))
        speculator.context(Context(1, 0, states(network, 0, 2)))
        with pytest.raises(DraftError, match="hidden states of position 3, but not of 2 before it"):
            speculator.context(Context(1, 3, states(network, 3, 5)))

    def test_nothing_is_guessed_before_everything_was_told(self, pair: tuple[HeadNetwork, Formula]) -> None:
        network, _ = pair
        speculator, tree = head(network), TokenTree(len(PROMPT) - 1, PROMPT[-1])
        speculator.open(opening(PROMPT))
        speculator.context(Context(1, 0, states(network, 0, len(PROMPT) - 2)))
        assert grown(speculator, tree) == {}
        assert not speculator.behind
        speculator.context(Context(1, len(PROMPT) - 2, states(network, len(PROMPT) - 2, len(PROMPT) - 1)))
        assert len(grown(speculator, tree)) == 2 + 4 + 8

    def test_of_requests_that_it_does_not_know_nothing_is_kept(self, pair: tuple[HeadNetwork, Formula]) -> None:
        network, _ = pair
        speculator = head(network)
        speculator.context(Context(5, 3, states(network, 3, 4)))
        speculator.commit(Commit(5, 3, [1], 0, states(network, 3, 4)))
        assert speculator.grow() == {}
        speculator.check_integrity()

    def test_guesses_end_before_the_targets_last_position(self, tmp_path: Path) -> None:
        network = EagleNetwork(Checkpoint(save_head(tmp_path, eagle_tensors(), llama_config())), lent(), 256)
        network.position_limit = len(PROMPT) + 2
        speculator, tree = head(network), TokenTree(len(PROMPT) - 1, PROMPT[-1])
        speculator.open(opening(PROMPT, depth=9))
        speculator.context(Context(1, 0, states(network, 0, len(PROMPT) - 1)))
        assert max(map(len, grown(speculator, tree))) == 2

    def test_positions_beyond_what_the_heads_own_configuration_names(self, tmp_path: Path) -> None:
        """Heads say 2048, and work far beyond: the target's limit is what counts."""
        save_head(tmp_path, eagle3_tensors(), llama_config(max_position_embeddings=16))
        assert Eagle3Network(Checkpoint(tmp_path), lent(), 256).position_limit == 512


class TestMemory:
    """A head holds its own tensors, and none of the target's."""

    @pytest.mark.parametrize("place", ["in the target's process", "in a draft worker"])
    def test_copies_of_the_targets_matrices_are_not_kept(self, place: str, tmp_path: Path) -> None:
        network = target_network()
        copies = {
            "embed_tokens.weight": network.model.embed_tokens.weight.detach(),
            "lm_head.weight": network.lm_head.weight.detach(),
        }
        target = (
            lent()
            if place == "in the target's process"
            else load_target_weights(str(save_target(tmp_path / "t")), None, "cpu")
        )
        for n, kind in enumerate((EagleNetwork, Eagle3Network)):
            own = eagle_tensors() if kind is EagleNetwork else eagle3_tensors(lm_head=False)
            folder = save_head(tmp_path / str(n), own | copies, llama_config())
            loaded = kind(Checkpoint(folder), target, 256)
            assert embedding_in(loaded) is target.embedding()
            assert loaded._layers._target_output == target.output

    def test_a_matrix_that_is_tied_to_the_embedding_is_no_copy_of_it(self) -> None:
        """Where products want no layout of their own, as on a GPU."""
        embedding = torch.empty(VOCABULARY, HIDDEN, device="meta")
        assert any(each is embedding for each in inspect.getclosurevars(Linear(embedding)._product).nonlocals.values())

    @pytest.mark.parametrize("changed", ["embed_tokens.weight", "lm_head.weight"])
    def test_matrices_that_differ_are(self, changed: str, tmp_path: Path) -> None:
        network = target_network()
        copies = {
            "embed_tokens.weight": network.model.embed_tokens.weight.detach().clone(),
            "lm_head.weight": network.lm_head.weight.detach().clone(),
        }
        copies[changed][5, 0] += 1
        save_head(tmp_path, eagle3_tensors(lm_head=False) | copies, llama_config())
        target = lent()
        loaded = Eagle3Network(Checkpoint(tmp_path), target, 256)
        assert (embedding_in(loaded) is target.embedding()) == (changed != "embed_tokens.weight")
        assert (loaded._layers._target_output == target.output) == (changed != "lm_head.weight")

    def test_a_worker_reads_two_matrices_of_the_target(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = save_target(tmp_path)
        read: list[str] = []
        tensor = Checkpoint.tensor

        def noted(self: Checkpoint, name: str, *options: Any) -> Tensor:
            read.append(name)
            return tensor(self, name, *options)

        monkeypatch.setattr(Checkpoint, "tensor", noted)
        there, here = load_target_weights(str(folder), None, "cpu"), lent()
        assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight"]
        final = random(torch.Generator().manual_seed(1), 8, HIDDEN)
        assert torch.equal(there.embedding(), here.embedding())
        assert torch.equal(there.output(final), here.output(final))
        assert (there.vocabulary_size, there.max_model_len, there.final_layer) == (VOCABULARY, 512, LAYERS + 1)

    def test_a_head_without_matrices_of_its_own_has_none(self, tmp_path: Path) -> None:
        """None of the tensors that it holds is a copy of a matrix of the target."""
        save_head(tmp_path, eagle3_tensors(lm_head=False), llama_config())
        target = lent()
        theirs = {id(tensor) for tensor in held(target)}
        own = [tensor for tensor in held(Eagle3Network(Checkpoint(tmp_path), target, 256)) if id(tensor) not in theirs]
        network = target_network()
        lent_matrices = network.model.embed_tokens.weight, network.lm_head.weight
        assert own
        for tensor in own:
            if tensor.layout is torch.strided:
                assert not any(torch.equal(tensor, matrix) for matrix in lent_matrices)
            else:  # laid out for oneDNN, which only its shape tells; gate and up together have twice as many rows
                assert tensor.shape != (VOCABULARY, HIDDEN)


def embedding_in(head: EagleNetwork | Eagle3Network) -> Tensor | None:
    """What it looks tokens up in."""
    network: Any = head._layers._network
    return network._embedding if isinstance(network, TorchNetwork) else network._kept_alive[1]


def held(thing: Any) -> list[Tensor]:
    """Each tensor that can be reached from it, once."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    left = [thing]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            found[id(each)] = each
        elif isinstance(each, (list, tuple)):
            left += each
        elif isinstance(each, MethodType):
            left.append(each.__self__)
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
        elif not isinstance(each, type):
            slots = [getattr(each, name) for name in getattr(type(each), "__slots__", ()) if hasattr(each, name)]
            left += [*getattr(each, "__dict__", {}).values(), *slots]
    return list(found.values())


class TestConfigured:
    """As `paceline.drafting.build_speculator` makes heads for a service."""

    @pytest.mark.parametrize(("method", "tensors"), [("eagle", eagle_tensors()), ("eagle3", eagle3_tensors())])
    def test_build(self, method: Any, tensors: dict[str, Tensor], tmp_path: Path) -> None:
        save_head(tmp_path, tensors, llama_config())
        config, engine = SpeculativeConfig(method=method, model=str(tmp_path)), EngineConfig(slots=256)
        speculator = build_speculator(config, engine, lent)
        layers = (LAYERS + 1,) if method == "eagle" else (2, 4, 5)
        assert speculator.method == method
        assert speculator.hidden_state_layers == layers == tuple(hidden_state_layers(config, engine, lent))
        assert speculator.position_limit == 512
        assert speculator.vocabulary_size == VOCABULARY

    def test_what_the_user_says_of_a_checkpoint_counts(self, tmp_path: Path) -> None:
        save_head(tmp_path, eagle3_tensors(), llama_config())
        config = SpeculativeConfig(method="eagle3", model=str(tmp_path), eagle_aux_hidden_state_layer_ids=(0, 1, 2))
        assert build_speculator(config, EngineConfig(slots=256), lent).hidden_state_layers == (0, 1, 2)
        assert hidden_state_layers(config, EngineConfig(slots=256), lent) == (0, 1, 2)

    def test_a_head_of_another_method(self, tmp_path: Path) -> None:
        save_head(tmp_path, eagle_tensors(), llama_config())
        config = SpeculativeConfig(method="eagle3", model=str(tmp_path))
        with pytest.raises(CheckpointError, match=r"fc.weight in .* has shape"):
            build_speculator(config, EngineConfig(slots=256), lent)
