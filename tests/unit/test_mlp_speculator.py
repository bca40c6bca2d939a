"""MLP speculators: IBM's and Arctic's compute what the formulas say, and the likeliest nodes are expanded first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams
from paceline.core.sampling import History, SamplingRow, draw
from paceline.core.tree import TokenTree
from paceline.drafting.heads.mlp_network import is_mlp_speculator, load_mlp_speculator
from paceline.drafting.methods.mlp_speculator import MlpSpeculator
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening
from paceline.drafting.stateless_heads import MAX_ROWS
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.markov import (
    HIDDEN,
    final_states,
    logits_after,
    markov_model,
    mlp_config,
    projecting,
    save_head,
    seeing_mlp,
    trained,
)
from tests.helpers.seen import Seen, nodes_of, root_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
ROOT = len(PROMPT) - 1
STEPS = 3
INNER = 24
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def lent() -> TargetWeights:
    return build(peaked_llama(), "llama", EngineConfig(slots=256), "print", []).target_weights()


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * shape[-1] ** -0.5


def ibm(steps: int = STEPS, inner: int = INNER, emb: int = VOCABULARY, head: int = VOCABULARY) -> Tensors:
    tensors = {}
    for i in range(steps):
        tensors[f"emb.{i}.weight"] = some(emb, inner, seed=i)
        tensors[f"proj.{i}.weight"] = some(inner, inner if i else HIDDEN, seed=10 + i)
        tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = 1 + some(inner, seed=20 + i), some(inner, seed=30 + i)
        tensors[f"head.{i}.weight"] = 5 * some(head, inner, seed=40 + i)
    return tensors


def tied(tensors: Tensors) -> Tensors:
    """Every name, as a `.bin` has it: steps share all but the first projection."""
    shared = {}
    for name in tensors:
        part, index, *rest = name.split(".")
        source = str(min(int(index), 1)) if part == "proj" else "0"
        shared[name] = tensors[".".join([part, source, *rest])]
    return shared


def stored_once(tensors: Tensors) -> Tensors:
    """As safetensors has them."""
    return {name: t for name, t in tensors.items() if ".0." in name or name == "proj.1.weight"}


def lstm(inner: int = INNER) -> Tensors:
    tensors = {"forget_emb.0.weight": some(VOCABULARY, inner), "head.0.weight": 5 * some(VOCABULARY, inner, seed=1)}
    tensors |= {"projs.0.weight": some(4 * inner, HIDDEN), "projs.1.weight": some(4 * inner, inner)}
    for n, name in enumerate(("cell_ln.0", "state_ln.0")):
        tensors |= {f"{name}.weight": 1 + some(inner, seed=n), f"{name}.bias": some(inner, seed=5 + n)}
    return tensors


def weights_of(trained: int, inner: int) -> tuple[float, float]:
    state_weight = 0.5 ** (0.5 / trained)
    return state_weight, math.sqrt((1 - state_weight**2) * (inner / 2))


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight + bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def expected(tensors: Tensors, state: Tensor, tokens: Sequence[int], trained: int, *, scale: bool = False) -> Tensor:
    """Logits after the root and each further token, [tokens, head's rows], step by step."""
    inner = len(tensors["ln.0.weight"])
    sw, ew = weights_of(trained, inner)
    s = state / torch.sqrt((state * state).mean() + 1e-6) / math.sqrt(2) if scale else state
    logits = []
    for i, token in enumerate(tokens):
        s = tensors[f"proj.{i}.weight"] @ s + ew / sw * tensors[f"emb.{i}.weight"][token]
        s = gelu(norm(s, tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"]))
        logits.append(tensors[f"head.{i}.weight"] @ s)
    return torch.stack(logits)


def expected_lstm(tensors: Tensors, state: Tensor, tokens: Sequence[int], trained: int) -> Tensor:
    inner = len(tensors["state_ln.0.weight"])
    sw, ew = weights_of(trained, inner)
    s, c = state, torch.zeros(inner)
    logits = []
    for i, token in enumerate(tokens):
        a = tensors[f"projs.{min(i, 1)}.weight"] @ s + ew / sw * tensors["forget_emb.0.weight"][token].repeat(4)
        forget, into, out, candidate = a[:inner], a[inner : 2 * inner], a[2 * inner : 3 * inner], a[3 * inner :]
        candidate = gelu(norm(candidate, tensors["cell_ln.0.weight"], tensors["cell_ln.0.bias"]))
        c = c * torch.sigmoid(forget) + candidate * torch.sigmoid(into)
        s = gelu(norm(c, tensors["state_ln.0.weight"], tensors["state_ln.0.bias"])) * torch.sigmoid(out)
        logits.append(tensors["head.0.weight"] @ s)
    return torch.stack(logits)


def computed(folder: Path, lent: TargetWeights, state: Tensor, tokens: Sequence[int]) -> Tensor:
    """The same by ours, in a batch beside another chain."""
    network = load_mlp_speculator(Checkpoint(folder), lent)
    fed = network.begin(torch.stack([state, state.flip(0)]))
    logits = []
    for i, token in enumerate(tokens):
        both, fed = network.step(i, fed, torch.tensor([token, 0]))
        logits.append(both[0])
    return torch.stack(logits)


class TestFormats:
    STATE = some(HIDDEN, seed=3) * 8
    TOKENS = (9, 63, 0)

    @pytest.mark.parametrize("prefix", ["speculator.", ""])
    @pytest.mark.parametrize("scale", [True, False])
    @pytest.mark.parametrize("inner", [INNER, HIDDEN])
    def test_ibm_s(self, tmp_path: Path, lent: TargetWeights, prefix: str, scale: bool, inner: int) -> None:
        stored = {prefix + name: tensor for name, tensor in ibm(inner=inner).items()}
        folder = save_head(tmp_path, stored, mlp_config(STEPS, scale_input=scale))
        assert is_mlp_speculator(Checkpoint(folder))
        assert load_mlp_speculator(Checkpoint(folder), lent).steps == STEPS
        logits = expected(ibm(inner=inner), self.STATE, self.TOKENS, STEPS, scale=scale)
        torch.testing.assert_close(computed(folder, lent, self.STATE, self.TOKENS), logits)

    @pytest.mark.parametrize("once", [True, False])
    def test_tied_steps(self, tmp_path: Path, lent: TargetWeights, once: bool) -> None:
        tensors = tied(ibm())
        folder = save_head(tmp_path, stored_once(tensors) if once else tensors, mlp_config(STEPS, tie_weights=True))
        logits = expected(tensors, self.STATE, self.TOKENS, STEPS)
        torch.testing.assert_close(computed(folder, lent, self.STATE, self.TOKENS), logits)

    def test_a_single_tied_step(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, ibm(1), mlp_config(1, tie_weights=True))
        logits = expected(ibm(1), self.STATE, [9], 1)
        torch.testing.assert_close(computed(folder, lent, self.STATE, [9]), logits)

    def test_arctic_s_runs_further_than_it_was_trained_for(self, tmp_path: Path, lent: TargetWeights) -> None:
        """The weights of the sum are those of the training."""
        config = mlp_config(3, tie_weights=True, num_lookahead_tokens=5)
        config["architectures"] = ["ArcticMLPSpeculatorPreTrainedModel"]
        folder = save_head(tmp_path, stored_once(tied(ibm())), config)
        assert is_mlp_speculator(Checkpoint(folder))
        assert load_mlp_speculator(Checkpoint(folder), lent).steps == 5
        tokens = [*self.TOKENS, 7, 7]
        logits = expected(tied(ibm(5)), self.STATE, tokens, trained=3)
        torch.testing.assert_close(computed(folder, lent, self.STATE, tokens), logits)

    def test_arctic_s_sum_rnn(self, tmp_path: Path, lent: TargetWeights) -> None:
        tensors = stored_once(tied(ibm()))
        stored = {n if n.startswith("head") else ".".join([*n.split(".")[:2], "0", n.split(".")[2]]) for n in tensors}
        nested = dict(zip(sorted(stored), (tensors[name] for name in sorted(tensors)), strict=True))
        config = {"method": "sum_rnn", "n_predict": STEPS, "tie_weights": True, "inner_dim": str(INNER)}
        folder = save_head(tmp_path, nested, config)
        assert "emb.0.0.weight" in nested
        assert is_mlp_speculator(Checkpoint(folder))
        logits = expected(tied(ibm()), self.STATE, self.TOKENS, STEPS)
        torch.testing.assert_close(computed(folder, lent, self.STATE, self.TOKENS), logits)

    def test_arctic_s_sum_lstm(self, tmp_path: Path, lent: TargetWeights) -> None:
        config = {"method": "sum_lstm", "n_predict": STEPS, "tie_weights": True, "tie_lstm_embs": True}
        folder = save_head(tmp_path, lstm(), config)
        assert is_mlp_speculator(Checkpoint(folder))
        logits = expected_lstm(lstm(), self.STATE, self.TOKENS, STEPS)
        torch.testing.assert_close(computed(folder, lent, self.STATE, self.TOKENS), logits)

    def test_it_may_know_fewer_tokens_than_a_padded_target(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, ibm(emb=50, head=50), mlp_config(STEPS))
        network = load_mlp_speculator(Checkpoint(folder), lent)
        assert network.vocabulary_limit == 50
        assert network.ids is not None
        assert network.ids.tolist() == list(range(50))

    @pytest.mark.parametrize("config", [{}, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}])
    def test_other_checkpoints_are_none(self, tmp_path: Path, config: dict[str, object]) -> None:
        assert not is_mlp_speculator(Checkpoint(save_head(tmp_path, ibm(), config)))

    def test_each_tensor_is_read_once_and_none_of_the_target_s(
        self, tmp_path: Path, lent: TargetWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[str] = []
        take = Checkpoint.tensor
        monkeypatch.setattr(Checkpoint, "tensor", lambda self, name, *to: (read.append(name), take(self, name, *to))[1])
        target = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN)}
        folder = save_head(tmp_path, tied(ibm()) | target, mlp_config(STEPS, tie_weights=True))
        load_mlp_speculator(Checkpoint(folder), lent)
        assert sorted(read) == sorted(stored_once(ibm()))


class TestRefusals:
    def refused(self, lent: TargetWeights, folder: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as caught:
            load_mlp_speculator(Checkpoint(folder), lent)
        assert "\n" not in str(caught.value)

    def test_a_truncated_file(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, ibm(), mlp_config(STEPS))
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        self.refused(lent, folder, "cannot be read .*download it again")

    def test_another_hidden_size(self, tmp_path: Path, lent: TargetWeights) -> None:
        tensors = ibm() | {"proj.0.weight": torch.zeros(INNER, 32)}
        folder = save_head(tmp_path, tensors, mlp_config(STEPS))
        self.refused(lent, folder, r"shape \[24, 32\] where \[24, 64\].*hidden size 64")

    @pytest.mark.parametrize("part", ["emb", "head"])
    def test_more_tokens_than_the_target_has(self, tmp_path: Path, lent: TargetWeights, part: str) -> None:
        tensors = ibm(emb=65) if part == "emb" else ibm(head=65)
        folder = save_head(tmp_path, tensors, mlp_config(STEPS))
        self.refused(lent, folder, "trained for 65 tokens, llama has 64: choose a speculator that was trained for")

    @pytest.mark.parametrize("name", ["proj.1.weight", "ln.2.bias", "emb.2.weight", "ln.0.weight"])
    def test_a_missing_tensor(self, tmp_path: Path, lent: TargetWeights, name: str) -> None:
        tensors = ibm()
        del tensors[name]
        self.refused(lent, save_head(tmp_path, tensors, mlp_config(STEPS)), f"has no tensor {name}")

    @pytest.mark.parametrize("trained", [None, 0, "3"])
    def test_no_word_of_its_steps(self, tmp_path: Path, lent: TargetWeights, trained: object) -> None:
        folder = save_head(tmp_path, ibm(), mlp_config(STEPS, n_predict=trained))
        self.refused(lent, folder, "config.json lacks n_predict.*add it")

    def test_several_layers_in_a_step(self, tmp_path: Path, lent: TargetWeights) -> None:
        tensors = ibm() | {"emb.0.3.weight": torch.zeros(INNER, INNER)}
        folder = save_head(tmp_path, tensors, mlp_config(STEPS))
        self.refused(lent, folder, r"several layers in one step \(emb.0.3.weight\): choose")

    def test_an_embedding_for_each_gate(self, tmp_path: Path, lent: TargetWeights) -> None:
        tensors = lstm() | {"input_emb.0.weight": torch.zeros(VOCABULARY, INNER)}
        folder = save_head(tmp_path, tensors, {"method": "sum_lstm", "n_predict": STEPS})
        self.refused(lent, folder, "an embedding for each gate.*tie_lstm_embs")


def opening(
    *, key: int = 1, sampling: SamplingParams = GREEDY, depth: int = 8, nodes: int = 1000, root: int = PROMPT[-1]
) -> Opening:
    return Opening(key, [*PROMPT[:-1], root], 0, sampling, depth, nodes)


def told(speculator: MlpSpeculator, state: Tensor, key: int = 1) -> None:
    states = torch.cat((some(ROOT - 1, HIDDEN), state[None]))
    speculator.context(Context(key, 0, states.unsqueeze(1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("mlp"), ibm(), mlp_config(STEPS))


def speculator(folder: Path, lent: TargetWeights, width: int = 3, least: float = 0.0) -> MlpSpeculator:
    return MlpSpeculator(load_mlp_speculator(Checkpoint(folder), lent), lent, width, least)


def replica() -> TokenTree:
    return TokenTree(ROOT, PROMPT[-1])


def grown(mlp: MlpSpeculator, tree: TokenTree, key: int = 1) -> int:
    """Let it grow until it has nothing more to say; how many nodes came. All of them are new and have their parents."""
    count = 0
    while (news := mlp.grow()) or mlp.behind:
        if key in news:
            assert tree.graft(news[key], 10_000) == len(news[key])
            assert list(news[key].parent_ids) == sorted(news[key].parent_ids), "in which order they are cheapest"
            count += len(news[key])
    return count


def logits_at(node: Seen, state: Tensor, root: int = PROMPT[-1]) -> Tensor:
    return expected(ibm(), state, [root, *(each.token for each in node.path())], STEPS)[-1]


class TestTree:
    STATE = some(HIDDEN, seed=5) * 8

    @pytest.mark.parametrize("law", LAWS)
    def test_every_draw_is_predicted_with_its_noise_and_rules(
        self, folder: Path, lent: TargetWeights, law: SamplingParams
    ) -> None:
        mlp, tree = speculator(folder, lent), replica()
        mlp.open(opening(sampling=law))
        told(mlp, self.STATE)
        grown(mlp, tree)
        history = History(law, PROMPT, [], VOCABULARY)
        parents = [node for node in [root_of(tree), *nodes_of(tree)] if node.children]
        assert max(node.position for node in parents) == ROOT + STEPS - 1
        for parent in parents:
            path = [node.token for node in parent.path()]
            row = SamplingRow(law, parent.position + 1, history, path)
            [drawn] = draw(logits_at(parent, self.STATE)[None], [row]).tolist()
            assert max(parent.children.values(), key=lambda child: child.log_prob).token == drawn

    @pytest.mark.parametrize("depth", [1, 2, 8])
    def test_all_likely_paths_are_guessed_with_their_probabilities(
        self, folder: Path, lent: TargetWeights, depth: int
    ) -> None:
        mlp, tree = speculator(folder, lent, least=0.001), replica()
        mlp.open(opening(depth=depth))
        told(mlp, self.STATE)
        grown(mlp, tree)
        nodes = [root_of(tree), *nodes_of(tree)]
        assert max(node.position - ROOT for node in nodes) == min(depth, STEPS)
        for node in nodes:
            if node.position - ROOT < min(depth, STEPS):
                law = logits_at(node, self.STATE).log_softmax(-1)
                values, tokens = law.topk(3)
                likely = {
                    token: value
                    for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
                    if node.path_log_prob + value > math.log(0.001)
                }
                told_of = {token: child.log_prob for token, child in node.children.items()}
                assert told_of == pytest.approx(likely, abs=1e-4)

    def test_rules_see_the_output_the_path_and_every_commit(self, folder: Path, lent: TargetWeights) -> None:
        """Every guess is worth what the penalised logits say; the prompt's tokens do not count."""
        law = SamplingParams(temperature=0.0, frequency_penalty=0.5)
        mlp, tree = speculator(folder, lent, width=VOCABULARY), replica()
        mlp.open(Opening(1, PROMPT, 3, law, 2, 400))
        told(mlp, self.STATE)
        output, state = PROMPT[2:], self.STATE
        for _ in range(2):
            count = grown(mlp, tree)
            history = History(law, PROMPT[:2], output, VOCABULARY)
            new = nodes_of(tree)[-count:]
            assert any(node.token in output for node in new)
            for node in new:
                parent = node.parent
                path = [each.token for each in parent.path()]
                logits = history.apply_logits_rules(logits_at(parent, state, root_of(tree).token), path)
                assert node.log_prob == pytest.approx(float(logits.log_softmax(-1)[node.token]), abs=1e-4)
            root = tree.position
            token = max(root_of(tree).children.values(), key=lambda node: node.log_prob).token
            output, state = [*output, token], some(HIDDEN, seed=8) * 8
            tree.commit([token])
            mlp.commit(Commit(1, root, [token], 1, state[None, None]))

    @pytest.mark.parametrize("nodes", [1, 4, 10])
    def test_there_are_no_more_nodes_than_wanted(self, folder: Path, lent: TargetWeights, nodes: int) -> None:
        mlp, tree = speculator(folder, lent), replica()
        mlp.open(opening(nodes=nodes))
        told(mlp, self.STATE)
        assert grown(mlp, tree) == nodes
        mlp.limit(Limit(1, 8, nodes + 3))
        assert grown(mlp, tree) == 3

    def test_no_more_nodes_are_expanded_than_there_is_room_for_children_of(
        self, folder: Path, lent: TargetWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        network = load_mlp_speculator(Checkpoint(folder), lent)
        mlp, rows, step = MlpSpeculator(network, lent, 3, 0.0), [], network.step
        monkeypatch.setattr(network, "step", lambda *fed: (rows.append(len(fed[2])), step(*fed))[1])
        mlp.open(opening(nodes=7))
        told(mlp, self.STATE)
        assert grown(mlp, replica()) == 7
        assert rows == [1, 2], "after the root's three children there is room for four"

    def test_with_new_room_the_likeliest_node_comes_first(self, folder: Path, lent: TargetWeights) -> None:
        mlp, tree = speculator(folder, lent), replica()
        mlp.open(opening(nodes=3))
        told(mlp, self.STATE)
        assert grown(mlp, tree) == 3
        mlp.limit(Limit(1, 8, 4))
        assert grown(mlp, tree) == 1
        [followed] = [node for node in root_of(tree).children.values() if node.children]
        assert followed.log_prob == max(node.log_prob for node in root_of(tree).children.values())

    def test_a_round_is_bounded_and_takes_the_likeliest_of_all_requests(
        self, folder: Path, lent: TargetWeights
    ) -> None:
        mlp = speculator(folder, lent)
        trees = {key: replica() for key in range(50)}
        for key in trees:
            mlp.open(opening(key=key, sampling=SamplingParams(temperature=1.0, seed=key)))
            told(mlp, self.STATE, key)
        first = mlp.grow()
        for key, growth in first.items():
            trees[key].graft(growth, 1000)
        assert set(first) == set(trees)
        nodes = [node for tree in trees.values() for node in [root_of(tree), *nodes_of(tree)]]
        expanded = [node for node in nodes if node.children]
        assert len(expanded) == MAX_ROWS
        level = [node for node in nodes if node.position == ROOT + 2]
        taken = [node.path_log_prob for node in level if node.children]
        left = [node.path_log_prob for node in level if not node.children]
        assert taken
        assert min(taken) >= max(left)
        assert mlp.behind
        for key, growth in mlp.grow().items():
            trees[key].graft(growth, 1000)
        while mlp.grow() or mlp.behind:
            pass
        assert not mlp.behind

    def test_after_a_commit_it_is_grown_again_from_the_new_state(self, folder: Path, lent: TargetWeights) -> None:
        mlp, tree = speculator(folder, lent), replica()
        mlp.open(opening())
        told(mlp, self.STATE)
        grown(mlp, tree)
        kept = max(root_of(tree).children.values(), key=lambda node: node.log_prob).token
        tree.commit([kept])
        before = {node: node.path_log_prob for node in nodes_of(tree)}
        state = some(HIDDEN, seed=6) * 8
        mlp.commit(Commit(1, ROOT, [kept], 1, state[None, None]))
        assert grown(mlp, tree) > 0
        assert {node: node.path_log_prob for node in nodes_of(tree) if node in before} == before
        for node in [root_of(tree), *nodes_of(tree)]:
            if node.position - tree.position < STEPS:
                best = logits_at(node, state, root=kept).topk(3).indices.tolist()
                assert set(best) <= set(node.children), "survivors are followed by what the new state says, too"

    @pytest.mark.parametrize("law", [LAWS[0], LAWS[4]])
    def test_of_a_padded_target_only_known_tokens_are_guessed_and_followed(
        self, tmp_path: Path, lent: TargetWeights, law: SamplingParams
    ) -> None:
        folder = save_head(tmp_path, ibm(emb=3, head=4), mlp_config(STEPS))
        mlp = speculator(folder, lent, width=32)
        tree = TokenTree(ROOT, 2)
        mlp.open(opening(root=2, sampling=law))
        told(mlp, self.STATE)
        grown(mlp, tree)
        assert {node.token for node in nodes_of(tree)} == set(range(4))
        assert {node.token for node in nodes_of(tree) if node.children} == set(range(3))
        mlp.open(opening(root=60))
        told(mlp, self.STATE)
        assert not mlp.grow()


class TestStates:
    STATE = TestTree.STATE

    def test_nothing_is_guessed_before_the_state_has_come(self, folder: Path, lent: TargetWeights) -> None:
        mlp, tree = speculator(folder, lent), replica()
        mlp.open(opening())
        states = some(ROOT, 1, HIDDEN)
        for position in range(ROOT - 1):
            mlp.context(Context(1, position, states[position : position + 1]))
            assert not mlp.grow()
            assert not mlp.behind
        mlp.context(Context(1, 0, states))
        assert grown(mlp, tree) > 0

    def test_states_may_come_after_the_commit(self, folder: Path, lent: TargetWeights) -> None:
        mlp = speculator(folder, lent)
        mlp.open(opening())
        told(mlp, self.STATE)
        mlp.grow()
        mlp.commit(Commit(1, ROOT, [6, 7], 0))
        assert not mlp.grow()
        mlp.context(Context(1, ROOT, some(2, 1, HIDDEN)))
        assert mlp.grow()

    def test_the_same_states_again_change_nothing(self, folder: Path, lent: TargetWeights) -> None:
        mlp, tree = speculator(folder, lent), replica()
        mlp.open(opening())
        told(mlp, self.STATE)
        grown(mlp, tree)
        told(mlp, self.STATE)
        assert not mlp.grow()
        assert not mlp.behind

    def test_a_gap_is_refused(self, folder: Path, lent: TargetWeights) -> None:
        mlp = speculator(folder, lent)
        mlp.open(opening())
        with pytest.raises(DraftError, match="position 2, but not of 0"):
            mlp.context(Context(1, 2, some(1, 1, HIDDEN)))

    def test_a_paused_request_follows(self, folder: Path, lent: TargetWeights) -> None:
        mlp = speculator(folder, lent)
        mlp.open(opening())
        mlp.limit(Limit(1, 0, 0))
        told(mlp, self.STATE)
        assert not mlp.grow()
        mlp.commit(Commit(1, ROOT, [6], 0, self.STATE[None, None]))
        assert not mlp.grow()
        mlp.limit(Limit(1, 8, 10))
        assert grown(mlp, TokenTree(ROOT + 1, 6)) == 10

    def test_it_says_what_it_needs_to_know(self, folder: Path, lent: TargetWeights) -> None:
        mlp = speculator(folder, lent)
        assert (mlp.method, mlp.model) == ("mlp_speculator", folder.name)
        assert mlp.hidden_state_layers == (lent.layers + 1,)
        assert (mlp.vocabulary_fingerprint, mlp.vocabulary_size) == ("print", VOCABULARY)


class TestAlignment:
    """Which position's state and which token a step is fed with, on a target that is known by heart."""

    def chain(self, tmp_path: Path, tensors: Tensors) -> tuple[list[int], list[int], list[int]]:
        """What a greedy target says; and what is guessed behind four of these tokens, and behind six."""
        lent = markov_model().target_weights()
        folder = save_head(tmp_path, tensors, mlp_config(1 + max(int(name.split(".")[1]) for name in tensors)))
        mlp = MlpSpeculator(load_mlp_speculator(Checkpoint(folder), lent), lent, 1, 0.0)
        successor = logits_after().argmax(-1).tolist()
        tokens = [11]
        for _ in range(12):
            tokens.append(successor[tokens[-1]])
        assert len(set(tokens)) > 4
        states = final_states().float()[torch.tensor(tokens)].unsqueeze(1)
        mlp.open(Opening(1, tokens[:4], 0, GREEDY, 4, 10))
        mlp.context(Context(1, 0, states[:3]))
        first = list(mlp.grow()[1].tokens)
        mlp.commit(Commit(1, 3, [tokens[4], tokens[5]], 1, states[3:5]))
        return tokens, first, list(mlp.grow()[1].tokens)

    def test_the_token_is_the_root_and_then_each_guess(self, tmp_path: Path) -> None:
        tokens, first, second = self.chain(tmp_path, seeing_mlp(3))
        assert first == tokens[4:7]
        assert second == tokens[7:9], "what had been guessed is there; two more follow it"

    def test_the_state_is_the_one_that_the_root_was_drawn_from(self, tmp_path: Path) -> None:
        """One that looks at the state alone guesses the root again."""
        states = final_states()
        normed = states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        tensors = {
            "emb.0.weight": torch.zeros(VOCABULARY, HIDDEN),
            "proj.0.weight": torch.eye(HIDDEN),
            "ln.0.weight": torch.ones(HIDDEN),
            "ln.0.bias": torch.zeros(HIDDEN),
            "head.0.weight": projecting(torch.nn.functional.gelu(normed), logits_after()),
        }
        tokens, first, second = self.chain(tmp_path, tensors)
        assert (first, second) == ([tokens[3]], [tokens[5]])


@torch.inference_mode()
def test_what_is_trained_is_what_is_served(tmp_path: Path, lent: TargetWeights) -> None:
    """Step 0 takes in the token after the state's own position, every other step the next one."""
    module, reading = trained("mlp_speculator", tmp_path)
    assert is_mlp_speculator(Checkpoint(tmp_path))
    network = load_mlp_speculator(Checkpoint(tmp_path), lent)
    fed = network.begin(reading.states_BLSH[:, 0, 0])
    for step, logits in enumerate(module(reading, network.steps)):
        served, fed = network.step(step, fed, reading.ids_BL[:, 1 + step])
        torch.testing.assert_close(served, logits[:, 0])
