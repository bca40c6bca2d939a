"""The probe of row invariance names the passes whose rows differ, for products that sum in an order of their own at
some numbers of rows, as a GPU's library does."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.model import loading, model_loader
from paceline.model.layers import Linear, use_whole_sums
from paceline.model.loading import build
from paceline.model.model import TransformersModel
from paceline.model.row_probe import PROBED_COUNTS, ROW_COUNTS, differing_row_counts, is_row_invariant
from tests.exactness.test_rows import network

GRAPHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of CUDA graphs."""


class SplitK(nn.Linear):
    """A product whose rows have the same bits for any number of rows, but that splits its sums in two for some."""

    def __init__(self, plain: nn.Linear, split: range) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, dtype=plain.weight.dtype)
        self.weight = plain.weight
        self._half = plain.in_features // 2
        self._whole = Linear(plain.weight.detach())
        self._parts = [Linear(part.contiguous()) for part in plain.weight.detach().split(self._half, 1)]
        self._split = split

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) in self._split:
            y = sum(part(half.contiguous()) for part, half in zip(self._parts, rows.split(self._half, 1), strict=True))
        else:
            y = self._whole(rows)
        assert isinstance(y, Tensor)
        return y.view(*x.shape[:-1], -1)


def model(split: range, *, head: bool, slots: int = 1024) -> TransformersModel:
    """Its layers' products, or only its output matrix, split for these numbers of rows."""
    made = network("olmo2", torch.float32)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and (name == "lm_head") is head:
            made.set_submodule(name, SplitK(module, split))
    return build(made, "olmo2", EngineConfig(slots=slots), "", [])


@pytest.mark.parametrize("head", [False, True], ids=["layers", "output matrix"])
@pytest.mark.parametrize("split", [range(96, 257), range(200, 201), range(0)], ids=["from 96", "at 200", "nowhere"])
def test_it_names_exactly_the_counts_at_which_a_product_differs(split: range, head: bool) -> None:
    """The output matrix was once probed with eight rows, and the layers with 8, 16 and 128."""
    probed = model(split, head=head)
    assert differing_row_counts(probed, PROBED_COUNTS) == [n for n in PROBED_COUNTS if n in split]


def test_a_difference_makes_the_verdict_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    probed = model(range(97, 201), head=True)
    assert is_row_invariant(probed), "passes of 8 and 16 rows show nothing"
    with caplog.at_level(logging.WARNING):
        assert not is_row_invariant(probed, GRAPHS)
    assert "passes of 128, 192 rows" in caplog.text


def test_every_graph_is_probed_and_the_step_after_it_is_measured() -> None:
    """Without 49 and 65 the row budget saw the steps there as gentle slopes."""
    assert set(GRAPHS) <= set(PROBED_COUNTS)
    assert {*GRAPHS, *(rows + 1 for rows in GRAPHS[:-1])} <= set(ROW_COUNTS)


def test_few_slots_limit_the_counts() -> None:
    probed = model(range(64, 257), head=True, slots=256)
    assert differing_row_counts(probed, PROBED_COUNTS) == [*range(64, 185, 8)]


@pytest.mark.parametrize(("device", "counts"), [("cpu", ()), ("meta", PROBED_COUNTS)])
def test_a_gpu_is_probed_at_every_count(
    device: str, counts: range | tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's start stays short."""
    probe, loaded = Mock(return_value=True), model(range(0), head=True, slots=256)
    monkeypatch.setattr(model_loader, "load_packed", lambda *_: loaded)
    monkeypatch.setattr(model_loader, "is_row_invariant", probe)
    assert model_loader.load("pydoc", EngineConfig(device=device)).rows_invariant
    probe.assert_called_once_with(loaded, counts)


def test_no_product_of_a_gpu_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is torch's own; cuBLAS refuses to compute with it, cuBLASLt follows it."""
    library = Mock()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    matmul = torch.backends.cuda.matmul
    try:
        use_whole_sums(torch.device("cpu"))
        assert [getattr(matmul, f"{name}_split_k") for name in names] == [True, True]
        use_whole_sums(torch.device("cuda", 1))
        assert [getattr(matmul, name) for name in names] == [False, False]
        assert [getattr(matmul, f"{name}_split_k") for name in names] == [False, False]
        library.assert_called_once_with("cublaslt")
    finally:
        for name in names:
            setattr(matmul, name, True)


def test_an_older_torch_says_that_it_cannot(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", object())
    use_whole_sums(torch.device("cuda"))
    assert "cannot switch split-K off" in caplog.text


def test_a_model_is_put_on_its_device_with_whole_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Mock()
    monkeypatch.setattr(loading, "use_whole_sums", given)
    model(range(0), head=True)
    given.assert_called_once_with(torch.device("cpu"))
