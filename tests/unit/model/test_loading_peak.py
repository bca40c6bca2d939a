"""The memory of a model while it is loaded, and of its passes and draws, counted and beside the plan.

`meta` stands for a GPU where sizes are enough. Where numbers are needed a CPU does, with products that do not lay their
weights out anew.
"""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from paceline import memory_plan
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import log_softmax, probabilities, scores
from paceline.memory_plan import model_memory, plan_memory
from paceline.model import layers, network_factory
from paceline.model.attention import Heads, KVCache
from paceline.model.decoder import layer_of
from paceline.model.gpu.memory import LOGIT_COPIES, PassMemory
from paceline.model.layer_weights import RotaryTables, stacked
from paceline.model.layers import TorchNetwork
from paceline.model.loading import build, outline
from paceline.model.network_factory import Network, make_network
from paceline.model.rows import Row, SlotTable
from paceline.model.torch_attention import TorchAttention
from tests.helpers import gpu_kernels
from tests.helpers.live_storages import LiveStorages
from tests.helpers.llamas import peaked_llama

H100 = (85_000_000_000, 85_500_000_000)
"""Free and all bytes of a card of 80 GB, when CUDA has begun."""


def sizes(*tensors: Tensor) -> int:
    """Of the storages of these."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def test_stacked_weights_share_one_memory() -> None:
    a, b = torch.rand(3, 4), torch.nn.Parameter(torch.rand(2, 4), requires_grad=False)
    expected = torch.cat([a, b])
    freed = weakref.ref(a.untyped_storage())
    stack = stacked(a, b)
    assert torch.equal(stack, expected)
    assert torch.equal(torch.cat([a, b]), expected)
    assert sizes(stack, a, b) == expected.nbytes
    assert freed() is None
    again = stacked(a, b)
    assert (again.data_ptr(), again.shape) == (stack.data_ptr(), stack.shape), "nothing is copied"
    assert stacked(b, a).data_ptr() != stack.data_ptr(), "in another order they are not adjacent"
    assert torch.equal(stacked(a, b), expected)


def test_only_adjacent_rows_of_one_kind_are_taken_as_they_are() -> None:
    whole = torch.arange(24.0).view(6, 4)
    for parts in (
        (whole[:2], whole[3:]),
        (whole[:2, :2], whole[2:, :2]),
        (whole[:2], whole[1:]),
        (whole.view(-1)[:8].view(4, 2), whole.view(-1)[8:].view(8, 2)[:3]),
    ):
        expected = torch.cat(parts)
        assert torch.equal(stacked(*parts), expected)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes by weights as they are."""
    monkeypatch.setattr(network_factory, "DTYPES", ())
    monkeypatch.setattr(layers, "DTYPES", ())
    monkeypatch.setattr(layers, "_onednn_computes_in", lambda dtype: False)


def test_loading_takes_the_weights_a_layer_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=12,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    network = LlamaForCausalLM(config).eval().requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    weights = sizes(*network.parameters())
    layer = sum(each.nbytes for each in network.model.layers[0].parameters())
    engine = EngineConfig(slots=2000)
    need = model_memory(network, engine)
    with LiveStorages("cpu", network.parameters()) as live:
        model = build(network, "tiny", engine, "", [])
    assert isinstance(model._network, TorchNetwork)  # type: ignore[attr-defined]
    assert live.peak <= weights + layer + model.cache.data.untyped_storage().nbytes() + need.activations
    assert sizes(*network.parameters()) == weights, "transformers' network has no weights of its own"
    assert {name: torch.equal(each, before[name]) for name, each in network.state_dict().items()} == dict.fromkeys(
        before, True
    )


def network_on_meta(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)


def made_on_meta(network: Any, slots: int) -> tuple[Network, KVCache]:
    """As `LlamaModel` makes it, without the comparison with transformers."""
    config, base = network.config, network.base_model
    half = Heads.of(config).head_size // 2
    tables = RotaryTables(*torch.zeros(2, config.max_position_embeddings, half, device="meta").unbind(0))
    with torch.no_grad():
        return make_network(
            [layer_of(layer) for layer in base.layers],
            Heads.of(config),
            slots,
            tables,
            hidden=config.hidden_size,
            eps=1e-6,
            scale=0.1,
            embedding=base.embed_tokens.weight,
            norm=base.norm.weight,
            head=network.lm_head.weight,
        )


QWEN_14B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=17_408,
    max_position_embeddings=40_960,
)
QWEN_32B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=5120,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    intermediate_size=27_648,
    max_position_embeddings=32_768,
)


@pytest.mark.parametrize(("config", "weights"), [(QWEN_14B, 29.5e9), (QWEN_32B, 65.5e9)])
def test_large_models_load_on_80_gb_at_their_own_length(
    config: PreTrainedConfig, weights: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all slots that are planned."""
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: H100)
    monkeypatch.setattr("paceline.model.loading.use_device", torch.device)
    monkeypatch.setattr("paceline.model.gpu.memory.kernel_attends", lambda heads, device: True)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    engine = EngineConfig(device="cuda")
    planned = plan_memory(engine, SpeculativeConfig(), str(tmp_path), target=True, draft=False)
    assert planned.slots is not None
    assert planned.slots >= config.max_position_embeddings
    network = outline(str(tmp_path), engine).requires_grad_(False)
    need = model_memory(network, engine)
    assert need.weights == pytest.approx(weights, rel=0.01)
    layer = sum(each.nbytes for each in network.base_model.layers[0].parameters())  # type: ignore[union-attr]
    with LiveStorages("meta", network.parameters()) as live:
        _, cache = made_on_meta(network, planned.slots)
    assert live.peak <= need.weights + max(layer, cache.data.nbytes + need.activations), "no pass runs yet"
    assert live.peak <= 0.9 * H100[0]


SMALL = {
    "vocab_size": 128,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
}


def guesses_after_a_long_prompt() -> list[Row]:
    table = SlotTable(range(1, 4000))
    return [table.branch_row(1, [4001 + n]) for n in range(256)]


def requests_of_few_tokens() -> list[Row]:
    return [SlotTable(range(8 * n + 1, 8 * n + 8)).row(1, 6) for n in range(256)]


@pytest.mark.parametrize("rows", [guesses_after_a_long_prompt, requests_of_few_tokens])
def test_a_pass_by_torch_takes_no_more_than_the_plan_says(rows: Any) -> None:
    config = LlamaConfig(**SMALL)
    network = network_on_meta(config)
    most = PassMemory(256, 4096, 4096, 6, 256, 512, Heads.of(config), torch.bfloat16)
    before = LiveStorages("meta", network.parameters()).bytes
    made, cache = made_on_meta(network, 8192)
    with LiveStorages("meta", [*network.parameters(), cache.data]) as live, torch.no_grad():
        made.run(rows(), range(256))
    taken = live.peak - before - cache.data.nbytes
    planned = most.total(by_kernel=False)
    logits = 256 * 128 * 4
    assert planned / 8 < taken <= planned + logits


@pytest.mark.parametrize(
    "params",
    [
        *({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 5}),
        {"temperature": 0.8, "min_p": 1e-9, "top_k": 4000, "top_p": 0.99},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_take_no_more_copies_of_the_logits_than_planned(params: dict[str, Any], dtype: torch.dtype) -> None:
    """All rows are flat, so that top-p sorts the vocabulary. One row is greedy: the others are copied."""
    count, vocabulary = 16, 4096
    rows = [
        SamplingRow(SamplingParams(**each), n, History(SamplingParams(**each), (), (), vocabulary))
        for n, each in enumerate([{"temperature": 0.0}, *[params] * (count - 1)])
    ]
    logits = torch.zeros(count, vocabulary, dtype=dtype)
    copies = {}
    for name, function in {
        "scores": lambda: scores(logits, rows),
        "probabilities": lambda: probabilities(logits, rows),
        "log_softmax": lambda: log_softmax(logits),
    }.items():
        with LiveStorages("cpu", [logits]) as live:
            function()
        copies[name] = live.peak / logits.numel() / 4
    assert max(copies.values()) <= LOGIT_COPIES
    if dtype == torch.float32 and params.get("top_p"):
        assert copies["scores"] > LOGIT_COPIES - 1, "no more is planned than is used"


def test_a_way_that_fails_is_dropped_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    made: list[weakref.ref[Watched]] = []

    class Watched:
        """In place of a network: its copies of weights, and its graphs, would be alive as long."""

        def __init__(self, *_: Any, **__: Any) -> None:
            assert [each() for each in made] == [None] * len(made)
            made.append(weakref.ref(self))

    def check(network: Any) -> None:
        if len(made) < 3:
            raise ValueError(f"the logits of {network} are off")

    monkeypatch.setattr(network_factory, "TorchNetwork", Watched)
    monkeypatch.setattr(
        TorchAttention,
        "ways",
        lambda *given: iter(TorchAttention(*given, each) for each in (gpu_kernels, gpu_kernels, None)),
    )
    layer = layer_of(peaked_llama().requires_grad_(False).base_model.layers[0])
    network, _ = make_network([layer], Heads(2, 2, 16), 8, RotaryTables(*torch.zeros(2, 8, 8)), check)
    assert [each() for each in made] == [None, None, network]
