"""A product's row has the same bits for any number of rows, at the widths of real models."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import EngineConfig
from paceline.model import layers
from paceline.model.layers import Linear, chunked_product, use_chunked_linear
from paceline.model.loading import build
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native_linear import NativeLinear, PassRows, use_pass_rows
from paceline.model.row_probe import is_row_invariant
from tests.exactness.architectures import tiny
from tests.exactness.test_rows import network

ROWS = 256
needs_native = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")


@pytest.fixture(params=[(512, 256), (1536, 512), (4096, 1024)], ids=str)
def weight(request: pytest.FixtureRequest) -> Tensor:
    width, columns = request.param
    return torch.randn(columns, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [16, 40, 64, 128, ROWS])
def test_rows_do_not_depend_on_how_many_there_are(weight: Tensor, dtype: torch.dtype, rows: int) -> None:
    weight = weight.to(dtype)
    x = torch.randn(ROWS, weight.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    module = nn.Linear(*weight.shape[::-1], bias=False, dtype=dtype)
    module.weight = nn.Parameter(weight, requires_grad=False)
    use_chunked_linear(module)
    for product in (Linear(weight), lambda some: chunked_product(lambda piece: F.linear(piece, weight), some), module):
        alone = torch.cat([product(some) for some in x.split(8)])
        assert torch.equal(product(x[:rows]), alone[:rows])


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(("width", "columns"), [(64, 192), (4096, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_few_rows_are_as_many(
    dtype: torch.dtype, width: int, columns: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads read hidden states a few rows at a time, without padding."""
    if not native:
        monkeypatch.setattr(layers, "NativeProduct", Mock(side_effect=NativeUnavailableError("switched off")))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(columns, width, generator=generator).to(dtype)
    product = Linear(weight, biases=[torch.zeros(columns, dtype=dtype)])
    x = torch.randn(64, width, generator=generator).to(dtype)
    for rows in range(1, 10):
        assert torch.equal(product(x[:rows]), product(x)[:rows])


def test_onednn_is_never_given_one_float32_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would sum it in another order on some CPUs, which those that sum it in the same order do not show."""
    given: list[int] = []

    class Given(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.mkldnn._linear_pointwise.default:
                given.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(layers, "NativeProduct", Mock(side_effect=NativeUnavailableError("switched off")))
    product = Linear(torch.zeros(8, 1536))
    with Given():
        assert [len(product(torch.zeros(rows, 1536))) for rows in (1, 3)] == [1, 3]
    assert given == [2, 3]


@pytest.mark.parametrize("rows", [40, 0], ids=["some rows", "an expert without rows"])
def test_a_layers_input_may_have_more_dimensions(rows: int) -> None:
    module = nn.Linear(64, 32).to(torch.bfloat16)
    x = torch.randn(1, rows, 2, 64).to(torch.bfloat16)
    expected = module(x)
    use_chunked_linear(module)
    assert module(x).shape == expected.shape
    torch.testing.assert_close(module(x), expected, atol=2e-2, rtol=2e-2)


@needs_native
def test_native_layers_multiply_no_padding() -> None:
    module = nn.Linear(64, 32).to(torch.bfloat16)
    x = torch.randn(1, 16, 64).to(torch.bfloat16)
    expected = module(x)
    NativeLinear(module)
    whole = module(x)
    torch.testing.assert_close(whole, expected, atol=2e-2, rtol=2e-2)
    with use_pass_rows(PassRows(layers=(9, 16), head=(3, 8))):
        assert torch.equal(module(x), torch.cat([whole[:, :9], torch.zeros(1, 7, 32, dtype=torch.bfloat16)], 1))
        for others in (x[0], x.view(2, 8, 64), x[:, :15]):  # of experts, of heads, of the output matrix
            assert torch.equal(module(others).flatten(), whole.flatten()[: others.numel() // 2])


@needs_native
def test_a_native_layer_keeps_no_numbers_unless_its_network_reads_them() -> None:
    """Mamba's step sizes are a product by the weight of a layer that nobody calls."""
    for architecture in ("gemma2", "mamba"):
        made = tiny(architecture)
        build(made, architecture, EngineConfig(slots=512, max_model_len=128), "", [])
        linear = {name: each for name, each in made.named_modules() if isinstance(each, nn.Linear)}
        read = {name for name, each in linear.items() if not each.weight.is_meta}
        assert read == {name for name in linear if name.endswith("dt_proj")}
        assert made.get_output_embeddings().weight.shape == made.get_input_embeddings().weight.shape


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_wide_models_have_invariant_rows(family: str) -> None:
    """By our layers, and by transformers'."""
    wide = network(family, torch.bfloat16, hidden_size=768, intermediate_size=1536)
    assert is_row_invariant(build(wide, family, EngineConfig(slots=512), "", []))
