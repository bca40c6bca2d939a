"""Medusa heads: every published form computes what the formula says, and the likeliest paths become the tree."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams
from paceline.core.sampling import History, SamplingRow, draw
from paceline.core.tree import TokenTree
from paceline.drafting.heads.medusa_heads import is_medusa, load_medusa
from paceline.drafting.methods.medusa import MedusaSpeculator
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening
from paceline.drafting.stateless_heads import MAX_ROWS
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.markov import HIDDEN, final_states, logits_after, markov_model, save_head, trained
from tests.helpers.seen import nodes_of, root_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
ROOT = len(PROMPT) - 1
HEADS = 3
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def lent() -> TargetWeights:
    return build(peaked_llama(), "llama", EngineConfig(slots=256), "print", []).target_weights()


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * shape[-1] ** -0.5


def layers(head: int, count: int = 1, *, repeated: bool = False) -> Tensors:
    """The original's names."""
    tensors = {}
    for n in range(count):
        seed = 100 * head + (0 if repeated else n)
        tensors[f"{head}.{n}.linear.weight"] = some(HIDDEN, HIDDEN, seed=seed)
        tensors[f"{head}.{n}.linear.bias"] = some(HIDDEN, seed=seed)
    return tensors


def original(heads: int = HEADS, count: int = 1, rows: int = VOCABULARY, *, repeated: bool = False) -> Tensors:
    """Version 1: every head has an output of its own."""
    tensors = {}
    for head in range(heads):
        tensors |= layers(head, count, repeated=repeated)
        tensors[f"{head}.{count}.weight"] = 4 * some(rows, HIDDEN, seed=head)
    return tensors


def converted(tensors: Tensors, *, bias: bool = True) -> Tensors:
    """vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        if rest[0] == "linear" and (bias or rest[1] == "weight"):
            renamed[f"blocks.{head}.layers.{layer}.{rest[1]}"] = tensor
        elif rest[0] == "weight":
            renamed[f"lm_heads.{head}.weight"] = tensor
    return renamed


def expected(tensors: Tensors, states: Tensor, output: Tensor | None = None, count: int = 1) -> Tensor:
    """By the original's tensors, [n, heads, V]; columns that there are none of have -inf."""
    heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    logits = torch.full((len(states), heads, VOCABULARY), -math.inf)
    for n, head in itertools.product(range(len(states)), range(heads)):
        z = states[n]
        for layer in range(count):
            a = tensors[f"{head}.{layer}.linear.weight"] @ z + tensors[f"{head}.{layer}.linear.bias"]
            z = z + a / (1 + torch.exp(-a))
        matrix = tensors[f"{head}.{count}.weight"] if output is None else output
        logits[n, head, : len(matrix)] = matrix @ z
    return logits


def computed(folder: Path, lent: TargetWeights, states: Tensor) -> Tensor:
    """The same by ours."""
    heads = load_medusa(Checkpoint(folder), lent)
    logits = heads(states)
    if heads.ids is None:
        return logits
    whole = torch.full((*logits.shape[:2], VOCABULARY), -math.inf)
    return whole.index_copy_(2, heads.ids, logits)


def save_torch(folder: Path, tensors: Tensors, config: Mapping[str, object]) -> Path:
    folder.mkdir()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TestFormats:
    @pytest.fixture
    def states(self) -> Tensor:
        return some(4, HIDDEN, seed=9) * 8

    def test_the_original_has_more_heads_than_its_configuration_says(
        self, tmp_path: Path, lent: TargetWeights, states: Tensor
    ) -> None:
        folder = save_torch(tmp_path / "a", original(5), {"medusa_num_heads": 2, "medusa_num_layers": 1})
        assert is_medusa(Checkpoint(folder))
        assert len(load_medusa(Checkpoint(folder), lent)) == 5
        torch.testing.assert_close(computed(folder, lent, states), expected(original(5), states))

    def test_as_safetensors_without_a_configuration(self, tmp_path: Path, lent: TargetWeights, states: Tensor) -> None:
        save_file(original(), tmp_path / "medusa_lm_head.safetensors")
        assert is_medusa(Checkpoint(tmp_path))
        torch.testing.assert_close(computed(tmp_path, lent, states), expected(original(), states))

    def test_version_2_uses_the_target_s_output(self, tmp_path: Path, lent: TargetWeights, states: Tensor) -> None:
        tensors = layers(0) | layers(1)
        folder = save_head(tmp_path, tensors, {"version": "2"})
        output = peaked_llama().lm_head.weight.detach()
        torch.testing.assert_close(computed(folder, lent, states), expected(tensors, states, output))

    @pytest.mark.parametrize("version", [1, 2])
    def test_merged_with_its_model(self, tmp_path: Path, lent: TargetWeights, states: Tensor, version: int) -> None:
        """Whose tensors are passed over, whose configuration is the model's, and whose output may not be another."""
        tensors = original() if version == 1 else layers(0) | layers(1)
        model = {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN), "model.layers.0.weight": torch.zeros(3)}
        merged = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()} | model
        folder = save_head(tmp_path, merged, {"num_hidden_layers": 32, "medusa_num_heads": 2})
        output = None if version == 1 else peaked_llama().lm_head.weight.detach()
        torch.testing.assert_close(computed(folder, lent, states), expected(tensors, states, output))

    @pytest.mark.parametrize("prefix", ["", "medusa_heads."])
    @pytest.mark.parametrize("bias", [True, False])
    def test_vllm_s_conversion(
        self, tmp_path: Path, lent: TargetWeights, states: Tensor, bias: bool, prefix: str
    ) -> None:
        tensors = original()
        stored = {prefix + name: tensor for name, tensor in converted(tensors, bias=bias).items()}
        folder = save_head(tmp_path, stored, {"model_type": "medusa", "num_heads": HEADS})
        assert is_medusa(Checkpoint(folder))
        if not bias:
            tensors |= {name: torch.zeros(HIDDEN) for name in tensors if name.endswith("bias")}
        torch.testing.assert_close(computed(folder, lent, states), expected(tensors, states))

    @pytest.mark.parametrize("truncated", [True, False])
    def test_a_token_map_says_which_tokens_the_columns_are(
        self, tmp_path: Path, lent: TargetWeights, states: Tensor, truncated: bool
    ) -> None:
        ids = torch.tensor([40, 3, 17, 60, 9])
        tensors = converted(original())
        if truncated:
            tensors = {name: t[ids].clone() if name.startswith("lm_heads") else t for name, t in tensors.items()}
        folder = save_head(tmp_path, tensors | {"token_map": ids}, {"truncated_vocab_size": 5})
        whole = expected(original(), states)
        others = [token for token in range(VOCABULARY) if token not in ids.tolist()]
        whole[..., others] = -math.inf
        torch.testing.assert_close(computed(folder, lent, states), whole)

    @pytest.mark.parametrize("ids", [None, [7, 5]])
    def test_the_original_output_is_the_target_s(
        self, tmp_path: Path, lent: TargetWeights, states: Tensor, ids: list[int] | None
    ) -> None:
        """A copy that stands in the file is not read."""
        tensors = {name: tensor for name, tensor in converted(original()).items() if "lm_head" not in name}
        tensors["lm_heads.0.weight"] = torch.zeros(VOCABULARY, HIDDEN)
        if ids:
            tensors["token_map"] = torch.tensor(ids)
        folder = save_head(tmp_path, tensors, {"original_lm_head": True})
        whole = expected(original(), states, peaked_llama().lm_head.weight.detach())
        if ids:
            whole[..., [token for token in range(VOCABULARY) if token not in ids]] = -math.inf
        torch.testing.assert_close(computed(folder, lent, states), whole)

    def test_several_layers(self, tmp_path: Path, lent: TargetWeights, states: Tensor) -> None:
        folder = save_head(tmp_path, original(count=2), {})
        torch.testing.assert_close(computed(folder, lent, states), expected(original(count=2), states, count=2))

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_repeated_layer_may_be_stored_once(
        self, tmp_path: Path, lent: TargetWeights, states: Tensor, version: int
    ) -> None:
        whole = original(count=2, repeated=True)
        tensors = {name: t for name, t in whole.items() if ".1.linear" not in name}
        output = None
        if version == 2:
            tensors = {name: t for name, t in tensors.items() if "linear" in name}
            output = peaked_llama().lm_head.weight.detach()
        folder = save_head(tmp_path, tensors, {"medusa_num_layers": 2} if version == 2 else {})
        torch.testing.assert_close(computed(folder, lent, states), expected(whole, states, output, count=2))

    def test_heads_may_know_fewer_tokens_than_a_padded_target(
        self, tmp_path: Path, lent: TargetWeights, states: Tensor
    ) -> None:
        folder = save_head(tmp_path, original(rows=50), {})
        torch.testing.assert_close(computed(folder, lent, states), expected(original(rows=50), states))

    def test_other_checkpoints_are_not_medusa(self, tmp_path: Path) -> None:
        folder = save_head(tmp_path, {"fc.weight": torch.zeros(4, 8), "layers.0.mlp.weight": torch.zeros(2)}, {})
        assert not is_medusa(Checkpoint(folder))

    def test_no_matrix_of_the_target_is_read_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Version 2 holds its layers and nothing else, and asks the target's own matrix."""
        asked: list[tuple[int, ...]] = []
        read: list[str] = []

        def output(states: Tensor) -> Tensor:
            asked.append(tuple(states.shape))
            return torch.zeros(len(states), VOCABULARY)

        model = build(peaked_llama(), "llama", EngineConfig(slots=256), "", [])
        plain = model.target_weights()
        lent = TargetWeights(**{name: getattr(plain, name) for name in TargetWeights.__slots__} | {"output": output})
        merged = {f"medusa_head.{name}": tensor for name, tensor in (layers(0) | layers(1)).items()}
        save_head(tmp_path, merged | {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}, {})
        take = Checkpoint.tensor
        monkeypatch.setattr(Checkpoint, "tensor", lambda self, name, *to: (read.append(name), take(self, name, *to))[1])
        load_medusa(Checkpoint(tmp_path), lent)(torch.zeros(3, HIDDEN))
        assert asked == [(3, HIDDEN)] * 2
        assert sorted(read) == sorted(name for name in merged)


class TestRefusals:
    def refused(self, lent: TargetWeights, folder: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as caught:
            load_medusa(Checkpoint(folder), lent)
        assert "\n" not in str(caught.value)

    def test_a_truncated_file(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, original(), {})
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        self.refused(lent, folder, "cannot be read .*download it again")

    def test_a_truncated_torch_file(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_torch(tmp_path / "a", original(), {})
        whole = (folder / "medusa_lm_head.pt").read_bytes()
        (folder / "medusa_lm_head.pt").write_bytes(whole[: len(whole) // 2])
        self.refused(lent, folder, "cannot be read .*download it again")

    def test_another_hidden_size(self, tmp_path: Path, lent: TargetWeights) -> None:
        tensors = {"0.0.linear.weight": torch.zeros(32, 32), "0.0.linear.bias": torch.zeros(32)}
        self.refused(lent, save_head(tmp_path, tensors, {}), r"shape \[32, 32\] where \[64, 64\].*hidden size 64")

    def test_more_tokens_than_the_target_has(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, original(rows=VOCABULARY + 1), {})
        self.refused(lent, folder, "guesses 65 tokens, llama has 64: choose heads that were trained for this model")

    def test_a_token_map_beyond_the_vocabulary(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, converted(original()) | {"token_map": torch.tensor([1, 64])}, {})
        self.refused(lent, folder, "names token 64, llama has 64")

    def test_a_token_map_that_is_not_of_its_heads(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, converted(original(rows=9)) | {"token_map": torch.arange(8)}, {})
        self.refused(lent, folder, "guesses 9 tokens, and its token_map names 8: choose")

    @pytest.mark.parametrize("name", ["1.0.linear.weight", "2.1.weight", "0.1.weight"])
    def test_a_missing_tensor(self, tmp_path: Path, lent: TargetWeights, name: str) -> None:
        tensors = original()
        del tensors[name]
        self.refused(lent, save_head(tmp_path, tensors, {}), "has no tensor .*incomplete")

    def test_no_heads_at_all(self, tmp_path: Path, lent: TargetWeights) -> None:
        folder = save_head(tmp_path, {"fc.weight": torch.zeros(4, 8)}, {})
        self.refused(lent, folder, "has no Medusa heads.*choose a folder with medusa_lm_head")


def opening(
    *, key: int = 1, sampling: SamplingParams = GREEDY, depth: int = 8, nodes: int = 1000, least: float = 0.0
) -> Opening:
    return Opening(key, PROMPT, 0, sampling, depth, nodes, least_path_probability=least)


def told(speculator: MedusaSpeculator, state: Tensor, key: int = 1) -> None:
    """The states of all positions before the root, of which only the last counts."""
    states = torch.cat((some(ROOT - 1, HIDDEN), state[None]))
    speculator.context(Context(key, 0, states.unsqueeze(1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("medusa"), original(), {})


def speculator(folder: Path, lent: TargetWeights, width: int = 3, least: float = 0.0) -> MedusaSpeculator:
    return MedusaSpeculator(load_medusa(Checkpoint(folder), lent), lent, width, least)


def replica() -> TokenTree:
    return TokenTree(ROOT, PROMPT[-1])


def grown(medusa: MedusaSpeculator, tree: TokenTree, key: int = 1) -> int:
    """Let it grow until it has nothing more to say; how many nodes came. All of them are new and have their parents."""
    count = 0
    while (news := medusa.grow()) or medusa.behind:
        if key in news:
            assert tree.graft(news[key], 10_000) == len(news[key])
            assert list(news[key].parent_ids) == sorted(news[key].parent_ids), "in which order they are cheapest"
            count += len(news[key])
    return count


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(each.token for each in node.path()): node.path_log_prob for node in nodes_of(tree)}


def all_paths(laws: Tensor, width: int) -> dict[tuple[int, ...], float]:
    """Of one of the `width` likeliest tokens by each row of log-probabilities, however long."""
    values, tokens = laws.topk(width)
    found = {}
    for length in range(1, len(laws) + 1):
        for ranks in itertools.product(range(width), repeat=length):
            path = tuple(int(tokens[i, rank]) for i, rank in enumerate(ranks))
            found[path] = sum(float(values[i, rank]) for i, rank in enumerate(ranks))
    return found


class TestTree:
    STATE = some(HIDDEN, seed=5) * 8

    @pytest.mark.parametrize("nodes", [1, 2, 5, 17, 1000])
    @pytest.mark.parametrize("depth", [1, 2, 8])
    @pytest.mark.parametrize("width", [1, 3])
    def test_it_is_the_likeliest_of_all_paths(
        self, folder: Path, lent: TargetWeights, nodes: int, depth: int, width: int
    ) -> None:
        medusa, tree = speculator(folder, lent, width), replica()
        medusa.open(opening(nodes=nodes, depth=depth))
        told(medusa, self.STATE)
        grown(medusa, tree)
        laws = expected(original(), self.STATE[None])[0, :depth].log_softmax(-1)
        brute = sorted(all_paths(laws, width).items(), key=lambda each: -each[1])[:nodes]
        assert paths(tree) == pytest.approx(dict(brute), abs=1e-4)

    def test_unlikely_paths_are_not_guessed(self, folder: Path, lent: TargetWeights) -> None:
        medusa, tree = speculator(folder, lent, least=0.01), replica()
        medusa.open(opening())
        told(medusa, self.STATE)
        grown(medusa, tree)
        laws = expected(original(), self.STATE[None])[0].log_softmax(-1)
        likely = {path: p for path, p in all_paths(laws, 3).items() if math.exp(p) > 0.01}
        assert 0 < len(likely) < len(all_paths(laws, 3))
        assert paths(tree) == pytest.approx(likely, abs=1e-4)

    @pytest.mark.parametrize("law", LAWS)
    def test_every_draw_is_predicted_with_its_noise_and_rules(
        self, folder: Path, lent: TargetWeights, law: SamplingParams
    ) -> None:
        """The likeliest child of every node is what would be drawn there from its head's logits."""
        medusa, tree = speculator(folder, lent), replica()
        medusa.open(opening(sampling=law))
        told(medusa, self.STATE)
        grown(medusa, tree)
        logits = expected(original(), self.STATE[None])[0]
        history = History(law, PROMPT, [], VOCABULARY)
        parents = [node for node in [root_of(tree), *nodes_of(tree)] if node.children]
        assert parents
        for parent in parents:
            depth = parent.position - ROOT
            path = [node.token for node in parent.path()]
            [drawn] = draw(logits[depth][None], [SamplingRow(law, parent.position + 1, history, path)]).tolist()
            assert max(parent.children.values(), key=lambda child: child.log_prob).token == drawn

    def test_after_a_commit_it_is_grown_again_from_the_new_state(self, folder: Path, lent: TargetWeights) -> None:
        """Guesses that survive keep what they were worth, and are followed by what the heads say now."""
        medusa, tree = speculator(folder, lent), replica()
        medusa.open(opening())
        told(medusa, self.STATE)
        grown(medusa, tree)
        kept = max(root_of(tree).children.values(), key=lambda node: node.log_prob).token
        state = some(1, HIDDEN, seed=6) * 8
        tree.commit([kept])
        survivors = paths(tree)
        assert survivors
        medusa.commit(Commit(1, ROOT, [kept], 1, state.unsqueeze(1)))
        assert grown(medusa, tree) > 0
        brute = all_paths(expected(original(), state)[0].log_softmax(-1), 3)
        assert {path: p for path, p in paths(tree).items() if path in survivors} == survivors
        assert set(brute) <= set(paths(tree))
        deeper = [path for path in paths(tree) if len(path) == HEADS and path[:-1] in survivors]
        assert deeper, "survivors are followed"
        assert {path[-1] for path in deeper} == {path[-1] for path in brute if len(path) == HEADS}

    def test_rules_see_the_output_the_path_and_every_commit(self, folder: Path, lent: TargetWeights) -> None:
        """Every guess is worth what the penalised logits say; the prompt's tokens do not count."""
        law = SamplingParams(temperature=0.0, frequency_penalty=0.5)
        medusa, tree = speculator(folder, lent, width=VOCABULARY), replica()
        medusa.open(Opening(1, PROMPT, 3, law, 2, 400))
        told(medusa, self.STATE)
        output, state = PROMPT[2:], self.STATE
        for _ in range(2):
            count = grown(medusa, tree)
            history = History(law, PROMPT[:2], output, VOCABULARY)
            new = nodes_of(tree)[-count:]
            assert any(node.token in output for node in new)
            for node in new:
                parent = node.parent
                logits = history.apply_logits_rules(
                    expected(original(), state[None])[0, parent.position - tree.position],
                    [n.token for n in parent.path()],
                )
                assert node.log_prob == pytest.approx(float(logits.log_softmax(-1)[node.token]), abs=1e-4)
            root = tree.position
            token = max(root_of(tree).children.values(), key=lambda node: node.log_prob).token
            output, state = [*output, token], some(HIDDEN, seed=8) * 8
            tree.commit([token])
            medusa.commit(Commit(1, root, [token], 1, state[None, None]))

    def test_a_limit_that_is_raised_is_used_at_once(self, folder: Path, lent: TargetWeights) -> None:
        medusa, tree = speculator(folder, lent), replica()
        medusa.open(opening(nodes=5))
        told(medusa, self.STATE)
        assert grown(medusa, tree) == 5
        medusa.limit(Limit(1, 8, 12))
        assert grown(medusa, tree) == 7

    def test_heads_do_not_run_for_a_tree_that_is_full(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening(nodes=0))
        told(medusa, self.STATE)
        assert not medusa.grow()
        assert not medusa.behind

    def test_a_limit_on_paths_is_kept(self, folder: Path, lent: TargetWeights) -> None:
        medusa, tree = speculator(folder, lent), replica()
        medusa.open(opening())
        medusa.limit(Limit(1, 8, 1000, least_path_probability=0.01))
        told(medusa, self.STATE)
        grown(medusa, tree)
        assert min(paths(tree).values()) > math.log(0.01)

    def test_many_requests_take_several_rounds_of_bounded_size(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        for key in range(100):
            medusa.open(opening(key=key))
            told(medusa, self.STATE, key)
        first, second = medusa.grow(), medusa.grow()
        assert len(first) == MAX_ROWS // HEADS
        assert set(first) | set(second) == set(range(100))
        assert medusa.behind
        assert not medusa.grow()
        assert not medusa.behind

    def test_of_a_padded_target_only_known_tokens_are_guessed(self, tmp_path: Path, lent: TargetWeights) -> None:
        medusa, tree = speculator(save_head(tmp_path, original(rows=4), {}), lent, width=32), replica()
        medusa.open(opening(sampling=LAWS[4]))
        told(medusa, self.STATE)
        grown(medusa, tree)
        assert {node.token for node in nodes_of(tree)} == set(range(4))


class TestStates:
    """Of what the target says of its states, the one before the root is needed."""

    STATE = TestTree.STATE

    def test_nothing_is_guessed_before_it_has_come(self, folder: Path, lent: TargetWeights) -> None:
        medusa, tree = speculator(folder, lent), replica()
        medusa.open(opening())
        states = some(ROOT, 1, HIDDEN)
        for position in range(ROOT - 1):
            medusa.context(Context(1, position, states[position : position + 1]))
            assert not medusa.grow()
            assert not medusa.behind
        medusa.context(Context(1, 0, states))  # told again from the start, as after a preemption
        assert grown(medusa, tree) > 0

    def test_a_request_of_one_token_waits_for_its_first_commit(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(Opening(1, [5], 0, GREEDY, 8, 10))
        assert not medusa.grow()
        medusa.commit(Commit(1, 0, [6], 0, self.STATE[None, None]))
        assert medusa.grow()

    def test_states_may_come_after_the_commit(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        medusa.commit(Commit(1, ROOT, [6, 7], 0))
        assert not medusa.grow()
        medusa.context(Context(1, 0, some(ROOT + 1, 1, HIDDEN)))
        assert not medusa.grow()
        medusa.context(Context(1, ROOT + 1, some(1, 1, HIDDEN)))
        assert medusa.grow()

    def test_a_commit_makes_the_state_before_it_old(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        told(medusa, self.STATE)
        medusa.commit(Commit(1, ROOT, [6], 0))
        assert not medusa.grow()

    def test_a_state_from_beyond_the_root_is_not_taken_for_the_one_before_it(
        self, folder: Path, lent: TargetWeights
    ) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        medusa.context(Context(1, 0, some(ROOT + 1, 1, HIDDEN)))
        assert not medusa.grow()
        medusa.commit(Commit(1, ROOT, [6], 0))
        assert medusa.grow(), "now it is"

    def test_only_the_last_state_is_kept(self, folder: Path, lent: TargetWeights) -> None:
        """And not the memory of those that came with it."""
        medusa = speculator(folder, lent)
        medusa.open(opening())
        told(medusa, self.STATE)
        [draft] = medusa._drafts.values()
        assert draft.state is not None
        assert draft.state.untyped_storage().nbytes() == HIDDEN * 4
        assert torch.equal(draft.state, self.STATE)

    def test_earlier_states_that_come_again_do_not_take_it_back(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        told(medusa, self.STATE)
        medusa.context(Context(1, 0, some(2, 1, HIDDEN)))
        assert medusa.grow()
        medusa.commit(Commit(1, ROOT, [6], 0, self.STATE[None, None]))
        assert medusa.grow()

    def test_a_gap_is_refused(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        with pytest.raises(DraftError, match="position 1, but not of 0"):
            medusa.context(Context(1, 1, some(1, 1, HIDDEN)))

    @pytest.mark.parametrize("shape", [(2, 1, 32), (2, 2, HIDDEN), (2, HIDDEN)])
    def test_states_of_another_shape_are_refused(self, folder: Path, lent: TargetWeights, shape: Sequence[int]) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        with pytest.raises(DraftError, match="hidden states of shape"):
            medusa.context(Context(1, 0, torch.zeros(*shape)))

    def test_a_paused_request_follows(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        medusa.limit(Limit(1, 0, 0))
        told(medusa, self.STATE)
        assert not medusa.grow()
        assert not medusa.behind
        medusa.commit(Commit(1, ROOT, [6], 0, self.STATE[None, None]))
        assert not medusa.grow()
        medusa.limit(Limit(1, 8, 10))
        tree = TokenTree(ROOT + 1, 6)
        assert grown(medusa, tree) == 10

    def test_a_commit_at_another_root_is_refused(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        with pytest.raises(DraftError, match=f"the root is at {ROOT}, the commit at 9"):
            medusa.commit(Commit(1, 9, [6], 0))

    def test_an_unknown_strategy_is_refused(self, folder: Path, lent: TargetWeights) -> None:
        with pytest.raises(DraftError, match="unknown strategy 'lucky'"):
            speculator(folder, lent).open(Opening(1, PROMPT, 0, GREEDY, 8, 10, strategy="lucky"))

    def test_the_strategy_says_what_is_drawn_with(self, folder: Path, lent: TargetWeights) -> None:
        medusa, tree = speculator(folder, lent, width=1), replica()
        hot = SamplingParams(temperature=100.0, seed=4)
        medusa.open(Opening(1, PROMPT, 0, hot, 1, 10, strategy="greedy"))
        told(medusa, self.STATE)
        grown(medusa, tree)
        assert set(root_of(tree).children) == {int(expected(original(), self.STATE[None])[0, 0].argmax())}

    def test_requests_that_are_not_open_are_ignored(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        medusa.open(opening())
        medusa.close(1)
        medusa.close(1)
        medusa.context(Context(1, 0, some(ROOT, 1, HIDDEN)))
        medusa.commit(Commit(1, 3, [6], 0))
        medusa.limit(Limit(1, 8, 10))
        assert not medusa.grow()

    def test_it_says_what_it_needs_to_know(self, folder: Path, lent: TargetWeights) -> None:
        medusa = speculator(folder, lent)
        assert (medusa.method, medusa.model) == ("medusa", folder.name)
        assert medusa.hidden_state_layers == (lent.layers + 1,)
        assert (medusa.vocabulary_fingerprint, medusa.vocabulary_size) == ("print", VOCABULARY)


def test_a_head_that_repeats_the_target_guesses_the_root_again(tmp_path: Path) -> None:
    """Layers of zeros and the target's output: its logits are those that the root was drawn from. This pins which
    position's state is used; the root's own would give the token after it."""
    lent = markov_model().target_weights()
    tensors = {"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN), "0.0.linear.bias": torch.zeros(HIDDEN)}
    medusa = MedusaSpeculator(load_medusa(Checkpoint(save_head(tmp_path, tensors, {})), lent), lent, 1, 0.0)
    successor = logits_after().argmax(-1).tolist()
    tokens = [11]
    for _ in range(8):
        tokens.append(successor[tokens[-1]])
    assert len(set(tokens)) > 4
    states = final_states().float()[torch.tensor(tokens)].unsqueeze(1)
    medusa.open(Opening(1, tokens[:4], 0, GREEDY, 4, 10))
    medusa.context(Context(1, 0, states[:3]))
    assert medusa.grow()[1].tokens == [tokens[3]]
    medusa.commit(Commit(1, 3, tokens[4:6], 1, states[3:5]))
    assert medusa.grow()[1].tokens == [tokens[5]]


@torch.inference_mode()
def test_what_is_trained_is_what_is_served(tmp_path: Path, lent: TargetWeights) -> None:
    """The head s of a state says the token s + 2 places on, in training as here."""
    module, reading = trained("medusa", tmp_path)
    assert is_medusa(Checkpoint(tmp_path))
    heads = load_medusa(Checkpoint(tmp_path), lent)
    for step, logits in enumerate(module(reading, len(heads))):
        served = heads(reading.states_BLSH[:, : logits.shape[1], 0].flatten(0, 1))[:, step]
        torch.testing.assert_close(served, logits.flatten(0, 1))
