"""What drafts with a network guess: the likeliest tokens by the formula of the method, wherever a request stands.

One contract for all methods. `test_heads.py` has what heads share otherwise; a method's own file has its formats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.logits_rules import History, SamplingRow, apply_logits_rules
from paceline.core.sampling import draw
from paceline.drafting.network_speculator import PREFILL_ROWS
from paceline.drafting.speculator import Limit, Opening
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.head_checkpoints import HIDDEN, eagle_tensors, llama_config, save_head
from tests.helpers.head_methods import (
    AHEAD,
    CORRECTED,
    HEAD_METHODS,
    MATRICES,
    NETWORK,
    PARALLEL,
    STATELESS,
    build_head,
    save_method,
    target_weights,
)
from tests.helpers.llamas import LAWS, VOCABULARY
from tests.helpers.parallel import MASK, PEAGLE, peagle_tensors
from tests.helpers.seen import nodes_of
from tests.unit.drafting.drafting_formulas import DEPTH, Drafting, children_of, prompt_of
from tests.unit.drafting.feeding import Feeding

METHODS = (*HEAD_METHODS, "pard")
BLOCKS = (*PARALLEL, *CORRECTED, "pard")
"""They take the likeliest of all paths, and keep what one pass gave."""
MASKED = ("peagle", "dflash", "pard")
"""Of a guess's path their rules of sampling see only that it is there."""
TOLERANCES = {"medusa": 1e-4, "mlp_speculator": 1e-4, "eagle": 2e-2}
"""Measured for EAGLE-1, of logits up to 80: 1.6e-3 on an AMD EPYC, 5.9e-3 on an Intel Xeon. Its states have no norm
between the steps, so each step multiplies rounding errors by about 35."""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def pard_logits(tokens: Sequence[int], _states: Tensor, path: Sequence[int]) -> Tensor:
    masked = torch.tensor([[*tokens, *[MASK] * (AHEAD - 1)]])
    logits: Tensor = NETWORK(masked).logits[0, len(tokens) - 1 + len(path)]
    return logits


def save_draft(folder: Path, method: str) -> Path:
    if method != "pard":
        return save_method(folder, method)
    config = json.loads((save_checkpoint(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return folder


@dataclass(frozen=True)
class Method(Drafting):
    name: str = ""


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Method:
    """All tests of a method share its speculator, so a test also shows that the ones before left nothing."""
    name = request.param
    folder = save_draft(tmp_path_factory.mktemp(name), name)
    logits = pard_logits if name == "pard" else HEAD_METHODS[name].logits
    return Method(build_head(folder, name), logits, tolerance=TOLERANCES.get(name, 1e-3), name=name)


class TestDistributions:
    @pytest.mark.parametrize("length", [2, 8, 62, 64, 65])
    def test_guesses_are_the_formulas(self, method: Method, length: int) -> None:
        method.check_whole(method.request(prompt_of(length)))

    def test_a_long_prompt_takes_several_rounds(self, method: Method) -> None:
        request = method.request(prompt_of(PREFILL_ROWS + 30))
        if method.name not in STATELESS:
            assert method.speculator.grow() == {}
            assert method.speculator.behind
        method.check_whole(request)

    def test_after_a_prompt_of_one_token_the_first_commit_has_the_first_state(self, method: Method) -> None:
        request = method.request([5])
        assert bool(request.grow()) == (method.name in (*CORRECTED, "dflash", "pard")), "only these need no state"
        request.commit([7])
        method.check_whole(request)

    def test_guesses_after_commits_are_those_of_a_fresh_start(self, method: Method) -> None:
        method.check_rounds()

    def test_several_requests_are_drafted_for_as_each_alone(self, method: Method) -> None:
        requests = {key: method.request(prompt_of(3 * key), key=key) for key in (1, 2, 5)}
        guesses: dict[int, list[Any]] = {key: [] for key in requests}
        while (grown := method.speculator.grow()) or method.speculator.behind:
            for key, growth in grown.items():
                tree = requests[key].tree
                known = tree.size
                tree.graft(growth, 1000)
                guesses[key] += [(tuple(tree.path_tokens(n)), tree.log_prob(n)) for n in tree.nodes()[known:]]
        for key, request in requests.items():
            assert len(guesses[key]) == 2 + 4 + 8
            method.check(request, guesses[key])
            method.speculator.close(key)


@pytest.mark.parametrize("params", LAWS)
def test_the_likeliest_guess_is_the_targets_draw(method: Method, params: SamplingParams) -> None:
    """With its noise and its rules, which see the output, the path and every commit."""
    request = Feeding(method.speculator, NETWORK, PROMPT, sampling=params, depth=DEPTH)
    method.speculator.open(Opening(1, PROMPT, 3, params, DEPTH, 1000))
    request.tell()
    history = History(params, PROMPT[:-3], PROMPT[-3:], VOCABULARY)
    committed = check_draws(method, request, history)
    request.commit([committed])
    history.extend([committed])
    check_draws(method, request, history)


def check_draws(method: Method, request: Feeding, history: History) -> int:
    """The draw after the root."""
    guesses = dict(request.grow())
    draws = {}
    for parent, logits in method.logits_after(request, {path[:-1] for path in guesses}).items():
        seen = [VOCABULARY] * len(parent) if method.name in MASKED else parent
        row = SamplingRow(history.params, len(request.tokens) + len(parent), history, seen)
        [draws[parent]] = draw(logits[None], [row]).tolist()
        children = {path[-1]: log_prob for path, log_prob in guesses.items() if path[:-1] == parent}
        assert draws[parent] in children_of(request, parent)
        if children.keys() == children_of(request, parent):
            assert max(children, key=children.__getitem__) == draws[parent]
        if history.params.temperature == 0:
            log_probs = apply_logits_rules(logits[None], [row])[0].log_softmax(-1)
            assert children == pytest.approx({t: float(log_probs[t]) for t in children}, abs=method.tolerance)
    return draws.get((), -1)


class TestLimits:
    @pytest.mark.parametrize("nodes", [1, 3, 6])
    def test_a_tree_has_as_many_nodes_as_wanted_and_a_raised_limit_is_used_at_once(
        self, method: Method, nodes: int
    ) -> None:
        request = method.request(PROMPT, nodes=nodes)
        assert len(request.grow()) == nodes
        request.limit(DEPTH, nodes + 5)
        assert len(request.grow()) == 5

    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_no_guess_is_deeper_than_wanted(self, method: Method, depth: int) -> None:
        assert len(method.request(PROMPT, depth=depth).grow()) == sum(2**d for d in range(1, depth + 1))

    def test_a_lowered_limit_of_depth_holds(self, method: Method) -> None:
        request = method.request(PROMPT, nodes=1)
        assert len(request.grow()) == 1
        request.limit(1, 1000)
        more = [len(path) for path, _ in request.grow()]
        assert more == [1] if method.name in BLOCKS else not more, "only a block's distributions are kept"

    def test_unlikely_paths_are_not_guessed(self, method: Method) -> None:
        request = method.request(PROMPT)
        likely = {path: p for path, p in path_log_probs(request).items() if p > math.log(0.01)}
        again = Feeding(method.speculator, NETWORK, PROMPT, depth=9)
        method.speculator.limit(Limit(1, DEPTH, 1000, least_path_probability=0.01))
        again.tell()
        assert path_log_probs(again) == pytest.approx(likely, abs=1e-3)
        assert len(likely) < 14

    @pytest.mark.parametrize("nodes", [3, 7])
    def test_the_likeliest_nodes_come_first(self, method: Method, nodes: int) -> None:
        everything = path_log_probs(method.request(PROMPT))
        chosen = path_log_probs(method.request(PROMPT, nodes=nodes))
        if method.name in BLOCKS:
            likeliest = sorted(everything, key=lambda path: -everything[path])[:nodes]
            assert chosen.keys() == set(likeliest)
        else:
            expanded = {path[:-1] for path in chosen} - {()}
            assert max((p for p in chosen if len(p) == 1), key=chosen.__getitem__) in expanded

    def test_no_guess_is_at_or_beyond_the_targets_last_position(self, method: Method) -> None:
        if limit := method.speculator.description.position_limit:
            assert max(len(path) for path, _ in method.request(prompt_of(limit - 2)).grow()) == 2
        else:
            assert method.name in STATELESS


def path_log_probs(request: Feeding) -> dict[tuple[int, ...], float]:
    request.grow()
    return {tuple(n.token for n in node.path()): node.path_log_prob for node in nodes_of(request.tree)}


@pytest.mark.parametrize("ahead", [1, 2, 7])
@pytest.mark.parametrize("name", ["eagle", "peagle", "pard"])
def test_guesses_reach_as_deep_as_the_request_and_the_method_allow(name: str, ahead: int, tmp_path: Path) -> None:
    folder = save_draft(tmp_path, name)
    speculator = build_head(folder, name, num_speculative_tokens=ahead, tree_width=1)
    request = Drafting(speculator, pard_logits).request(PROMPT, depth=9)
    assert len(request.grow()) == (9 if name == "eagle" else ahead)


def passing(state: bool) -> dict[str, Tensor]:
    """An EAGLE head whose output is its state, or else its token's embedding."""
    tensors = eagle_tensors()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    halves = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    return tensors | {"fc.weight": torch.cat(halves[::-1] if state else halves, 1)}


def passing_peagle() -> dict[str, Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in peagle_tensors().items()}
    own = {"lm_head.weight": MATRICES[1], "norm.weight": NETWORK.model.norm.weight.detach()}
    return tensors | own | {"fc.weight": torch.cat((torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)), 1)}


PASSING: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "eagle": (passing(state=True), llama_config()),
    "peagle": (passing_peagle(), PEAGLE),
    "medusa": ({"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN), "0.0.linear.bias": torch.zeros(HIDDEN)}, {}),
}


def drawn_greedily(count: int) -> list[int]:
    tokens = list(PROMPT)
    with torch.no_grad():
        while len(tokens) < count:
            tokens.append(int(NETWORK(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


class TestAlignment:
    """Whatever the formulas say: which state and which token a guess follows from."""

    @pytest.mark.parametrize("name", PASSING)
    def test_a_head_that_passes_its_state_on_guesses_the_root_again(self, name: str, tmp_path: Path) -> None:
        """The root is what the target drew from the state before it."""
        speculator = build_head(save_head(tmp_path, *PASSING[name]), name, target_weights(), tree_width=1)
        tokens = drawn_greedily(20)
        assert len(set(tokens[-4:])) == 4
        request = Drafting(speculator, pard_logits).request(tokens[:-3], depth=1)
        assert request.grow()[0][0] == (tokens[-4],)
        request.commit(tokens[-3:])
        assert request.grow()[0][0] == (tokens[-1],)

    def test_a_head_that_passes_its_token_on_predicts_from_the_root(self, tmp_path: Path) -> None:
        folder = save_head(tmp_path, passing(state=False), llama_config())
        request = Drafting(build_head(folder, "eagle", tree_width=1), pard_logits).request(PROMPT, depth=2)
        embedding, output = MATRICES
        likeliest = (embedding @ output.T).argmax(-1).tolist()
        assert [path[-1] for path, _ in request.grow()] == [first := likeliest[PROMPT[-1]], likeliest[first]]
