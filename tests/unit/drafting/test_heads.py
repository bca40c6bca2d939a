"""What heads of all methods share: when they draft, what they refuse, and which matrices they keep.

`test_draft_guesses.py` checks what they guess, `test_speculator_contract.py` what they share with all other methods.
"""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.method_names import HEADS
from paceline.drafting import hidden_state_layers
from paceline.drafting.methods.dflash import DFlashNetwork
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.speculator import Commit, Context, Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear, TorchNetwork
from paceline.model.target_weights import TargetWeights, load_target_weights
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.head_checkpoints import random, read_tensors, save_bin, save_head, without
from tests.helpers.head_methods import (
    CORRECTED,
    HEAD_METHODS,
    MATRICES,
    NETWORK,
    build_head,
    save_method,
    target_weights,
)
from tests.helpers.llamas import POSITIONS, VOCABULARY
from tests.unit.drafting.feeding import Feeding

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ROOT = len(PROMPT) - 1


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


@pytest.fixture(params=HEAD_METHODS)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def head(method: str, target: TargetWeights, tmp_path: Path) -> Speculator:
    return build_head(save_method(tmp_path, method), method, target)


def test_every_head_has_a_formula() -> None:
    assert HEAD_METHODS.keys() == set(HEADS)


class TestHiddenStates:
    """A head drafts once the states of all positions before the root have arrived."""

    def test_nothing_is_drafted_before(self, head: Speculator) -> None:
        request = Feeding(head, NETWORK, PROMPT)
        for stop in range(ROOT):
            request.tell(stop)
            assert request.grow() == []
            assert not head.behind
        request.tell()
        assert request.grow()

    def test_they_may_arrive_after_a_commit_and_in_another_precision(self, head: Speculator) -> None:
        request = Feeding(head, NETWORK, PROMPT)
        request.tell(ROOT - 1)
        request.commit([7, 8])
        assert request.grow() == []
        head.context(Context(1, ROOT - 1, request.states()[ROOT - 1 : ROOT + 2].bfloat16()))
        assert request.grow()

    def test_a_commit_without_them_pauses_drafting(self, head: Speculator) -> None:
        request = Feeding(head, NETWORK, PROMPT)
        request.tell()
        request.grow()
        head.commit(Commit(1, ROOT, [6, 7], 0))
        assert head.grow() == {}

    def test_repeated_ones_change_nothing(self, head: Speculator) -> None:
        request = Feeding(head, NETWORK, PROMPT)
        request.tell()
        request.grow()
        request.known_states = 0
        request.tell()
        assert request.grow() == []
        assert not head.behind


def test_a_speculator_describes_itself(method: str, head: Speculator, target: TargetWeights, tmp_path: Path) -> None:
    config = SpeculativeConfig(method=method, model=str(tmp_path))  # type: ignore[arg-type]
    layers = {"eagle3": (0, 1, 2), "peagle": (0, 1, 2), "dflash": (1, 3), **dict.fromkeys(CORRECTED, (0, 2))}.get(
        method, (3,)
    )
    assert (head.description.method, head.description.model, head.description.vocabulary_fingerprint) == (
        method,
        tmp_path.name,
        "print",
    )
    assert head.description.vocabulary_size == VOCABULARY
    assert head.description.position_limit == (0 if method in ("medusa", "mlp_speculator") else POSITIONS)
    assert tuple(head.description.hidden_state_layers) == layers
    assert tuple(hidden_state_layers(config, EngineConfig(slots=256), lambda: target)) == layers


def test_the_users_layers_override_the_checkpoints(target: TargetWeights, tmp_path: Path) -> None:
    config = {"model": str(save_method(tmp_path, "eagle3")), "eagle_aux_hidden_state_layer_ids": [0, 1]}
    chosen = SpeculativeConfig(method="eagle3", **config)
    assert hidden_state_layers(chosen, EngineConfig(slots=256), lambda: target) == (0, 1)


class TestCheckpoints:
    """What does not fit is refused with one sentence that names the checkpoint."""

    def refused(self, folder: Path, method: str, target: TargetWeights, complaint: str, **settings: Any) -> None:
        with pytest.raises(CheckpointError, match=complaint) as caught:
            build_head(folder, method, target, **settings)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("save", [save_head, save_bin])
    def test_a_truncated_file(
        self, save: Callable[..., Path], method: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        save(tmp_path, HEAD_METHODS[method].tensors, HEAD_METHODS[method].config)
        [weights] = [path for path in tmp_path.iterdir() if path.name != "config.json"]
        weights.write_bytes(weights.read_bytes()[:-1000])
        self.refused(tmp_path, method, target, f"{weights.name} cannot be read .*: download it again")

    def test_a_missing_tensor(self, method: str, target: TargetWeights, tmp_path: Path) -> None:
        case = HEAD_METHODS[method]
        folder = save_head(tmp_path, without(case.tensors, case.required), case.config)
        self.refused(folder, method, target, "(has no tensor|lacks) ")

    def test_another_hidden_size(self, method: str, target: TargetWeights, tmp_path: Path) -> None:
        case = HEAD_METHODS[method]
        tensors = {
            name: torch.zeros([32 if size == 64 else size for size in t.shape]) for name, t in case.tensors.items()
        }
        self.refused(save_head(tmp_path, tensors, case.config), method, target, r"\b32\b")

    def test_a_configuration_that_is_no_json(self, method: str, target: TargetWeights, tmp_path: Path) -> None:
        (save_method(tmp_path, method) / "config.json").write_bytes(b'{"hidden_size": \xff')
        self.refused(tmp_path, method, target, "config.json cannot be read")

    def test_a_folder_without_weights(self, method: str, target: TargetWeights, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(HEAD_METHODS[method].config))
        self.refused(tmp_path, method, target, "holds no weights")

    def test_a_head_of_another_method(self, target: TargetWeights, tmp_path: Path) -> None:
        save_method(tmp_path, "eagle")
        complaint = "no tensor .*: it is incomplete, or not of the configured method"
        self.refused(tmp_path, "eagle3", target, complaint, eagle_aux_hidden_state_layer_ids=(0, 1, 2))

    def test_a_file_that_would_run_code(self, target: TargetWeights, tmp_path: Path) -> None:
        save_method(tmp_path, "eagle")
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Touch(tmp_path / "touched")}, 2))
        self.refused(tmp_path, "eagle", target, "pytorch_model.bin cannot be read")
        assert not (tmp_path / "touched").exists()


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before torch 1.6"])
def test_torchs_own_format_is_read(
    options: dict[str, Any], method: str, head: Speculator, target: TargetWeights, tmp_path: Path
) -> None:
    """Many uploads have no other format; some contain files of the training."""
    folder = save_bin(tmp_path / "bin", HEAD_METHODS[method].tensors, HEAD_METHODS[method].config, **options)
    torch.save({"args": Path("no tensor")}, folder / "training_args.bin")
    torch.save({"state": {0: torch.zeros(1)}}, folder / "optimizer.pt")
    assert drafted(build_head(folder, method, target), PROMPT) == pytest.approx(drafted(head, PROMPT), abs=1e-3)


def drafted(head: Speculator, tokens: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The log-probability of every path of at most three draft tokens."""
    request = Feeding(head, NETWORK, tokens, depth=3)
    request.tell()
    return dict(request.grow())


class TestMemory:
    """A head keeps its own tensors and no copy of the target's."""

    COPIES: ClassVar = dict(zip(("embed_tokens.weight", "lm_head.weight"), MATRICES, strict=True))

    def test_every_tensor_is_read_once(
        self, method: str, target: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = read_tensors(monkeypatch)
        build_head(save_method(tmp_path, method), method, target)
        assert sorted(names) == sorted(HEAD_METHODS[method].tensors)

    @pytest.mark.parametrize("method", ["eagle", "mtp", "medusa", "mlp_speculator"])
    def test_the_targets_matrices_are_not_read(
        self, method: str, target: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Merged checkpoints repeat them."""
        folder = save_head(tmp_path, HEAD_METHODS[method].tensors | self.COPIES, HEAD_METHODS[method].config)
        names = read_tensors(monkeypatch)
        build_head(folder, method, target)
        assert "lm_head.weight" not in names
        assert ("embed_tokens.weight" in names) == (method == "eagle")

    @pytest.mark.parametrize("in_worker", [False, True], ids=["in the target's process", "in a draft worker"])
    @pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash"])
    def test_copies_of_them_are_not_kept(
        self, method: str, in_worker: bool, target: TargetWeights, tmp_path: Path
    ) -> None:
        if in_worker:
            target = load_target_weights(str(save_checkpoint(tmp_path / "target")), None, "cpu")
        embedding, output = self.matrices(method, target, tmp_path, self.COPIES)
        assert embedding is target.embedding()
        assert output == target.output

    @pytest.mark.parametrize("changed", ["embed_tokens.weight", "lm_head.weight"])
    @pytest.mark.parametrize("method", ["eagle3", "dflash"])
    def test_matrices_that_differ_are_kept(
        self, method: str, changed: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        copies = {name: tensor.clone() for name, tensor in self.COPIES.items()}
        copies[changed][5, 0] += 1
        embedding, output = self.matrices(method, target, tmp_path, copies)
        assert (embedding is target.embedding()) == (changed != "embed_tokens.weight")
        assert (output == target.output) == (changed != "lm_head.weight")

    def matrices(self, method: str, target: TargetWeights, folder: Path, more: dict[str, Tensor]) -> tuple[Any, Any]:
        """The embedding and the output projection that the network uses."""
        case = HEAD_METHODS[method]
        checkpoint = Checkpoint(save_head(folder, {**case.tensors, **more}, case.config))
        if method == "dflash":
            draft = DFlashNetwork(checkpoint, target, 64)
            return draft._embedding, draft._output
        head = (EagleNetwork if method == "eagle" else Eagle3Network)(checkpoint, target, 64)
        network: Any = head._network
        embedding = network._embedding if isinstance(network, TorchNetwork) else network._kept_alive[1]
        return embedding, head._target_output

    def test_a_matrix_that_is_tied_to_the_embedding_is_not_copied(self) -> None:
        """On devices whose products need no layout of their own, such as a GPU."""
        embedding = torch.empty(VOCABULARY, 64, device="meta")
        product: Any = Linear(embedding)._product
        assert any(each is embedding for each in inspect.getclosurevars(product).nonlocals.values())

    def test_a_draft_worker_reads_two_matrices_of_the_target(
        self, target: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save_checkpoint(tmp_path)
        names = read_tensors(monkeypatch)
        loaded = load_target_weights(str(folder), None, "cpu")
        assert sorted(names) == ["lm_head.weight", "model.embed_tokens.weight"]
        final = random(torch.Generator().manual_seed(1), 8, 64)
        assert torch.equal(loaded.embedding(), target.embedding())
        assert torch.equal(loaded.output(final), target.output(final))
        assert (loaded.vocabulary_size, loaded.max_model_len, loaded.final_layer) == (VOCABULARY, POSITIONS, 3)
