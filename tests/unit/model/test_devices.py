"""A model on a GPU other than the first. Tensors of torch's fake mode stand for its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from paceline.config import EngineConfig
from paceline.drafting.best_first import RowOutput
from paceline.model.device_memory import use_device
from paceline.model.loading import dtype_of
from paceline.model.row_probe import measure_row_cost
from paceline.model.rows import Row
from paceline.model.target_weights import load_target_weights
from tests.helpers.checkpoints import save_checkpoint

SECOND = torch.device("cuda:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of the current GPU, of several that are pretended."""
    number = [0]

    def exchange(index: int) -> int:
        before = number[0]
        if index >= 0:
            number[0] = index
        return before

    monkeypatch.setattr(torch.cuda, "set_device", exchange)
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    with FakeTensorMode():
        yield number


def test_the_gpu_of_a_model_becomes_the_current_one(current: list[int]) -> None:
    assert use_device("cuda:1") == SECOND
    assert current == [1]
    use_device("cpu")
    assert current == [1]
    use_device("cuda")  # the first
    assert current == [0]


def test_a_model_s_dtype_is_not_asked_for_elsewhere(current: list[int]) -> None:
    """The memory plan asks for it, before anything else is done with a model's device."""
    dtype_of(LlamaConfig(dtype="bfloat16"), EngineConfig(device="cuda:1"))
    assert current == [1]


@pytest.mark.usefixtures("current")
def test_a_draft_worker_reads_its_target_s_matrices_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(index: int) -> None:
        raise InterruptedError(str(index))

    monkeypatch.setattr(torch.cuda, "set_device", reached)
    with pytest.raises(InterruptedError, match="1"):
        load_target_weights(str(folder), None, "cuda:1")


def test_a_kernel_is_started_on_the_gpu_of_its_tensors(current: list[int]) -> None:
    """Triton once started every kernel on the first GPU, which cannot read the second one's memory."""
    launch = pytest.importorskip("paceline.model.gpu.launch").launch
    started: list[object] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
            return self

        def __call__(self, first: torch.Tensor, *others: object, **constants: object) -> None:
            started.append((current[0], first.device, *others, constants))

    launch(Kernel(), (1,), torch.empty(2, device=SECOND), 3, BLOCK=4)
    launch(Kernel(), (1,), torch.empty(2))
    assert started == [(1, SECOND, 3, {"BLOCK": 4}), (0, torch.device("cpu"), {})]
    assert current == [0], "and no other thread's library is moved there"


class _Elsewhere:
    """Passes that end later, on the second GPU."""

    slots, max_model_len = 512, 512

    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> RowOutput:
        with FakeTensorMode():
            return RowOutput(torch.empty(len(wanted), 8, device=SECOND))


def test_a_measured_pass_ends_on_the_model_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU was waited for, so the cost of a pass was that of starting it."""
    waited: list[torch.device | None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: waited.append(device))
    cost = measure_row_cost(_Elsewhere(), 16, repeats=2)
    assert waited == [SECOND] * (1 + 2 * len(cost.points)), "the context, then every timed pass"
