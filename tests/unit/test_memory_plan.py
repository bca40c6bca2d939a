"""The plan's arithmetic against real caches and weights, sharing, and refusals. CUDA is replaced by two numbers."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from paceline import memory_plan
from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.config import UNPLANNED_SLOTS, EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.network_speculator import PREFILL_ROWS
from paceline.llm import LLM
from paceline.memory_plan import WorkerMemory, draft_memory, model_memory, packed_memory, plan_memory
from paceline.model import device_memory, load, network_factory, torch_attention
from paceline.model.attention import SPARE_SLOTS, Heads, KVCache
from paceline.model.gguf_model import packed_config
from paceline.model.gpu import memory as gpu_memory
from paceline.model.gpu.memory import MOST_TABLES, PassMemory
from paceline.model.gpu.pass_graphs import Outputs
from paceline.model.loading import build, outline
from paceline.model.model import TransformersModel
from paceline.model.rows import SlotTable
from paceline.model.states.stored_states import STATE_COPIES, _Inputs, _States
from paceline.model.target_weights import load_target_weights
from tests.exactness.architectures import tiny
from tests.exactness.test_rows import network
from tests.helpers.checkpoints import change_config, save_checkpoint, save_tokenizer
from tests.helpers.device_passes import use_torch
from tests.helpers.gguf_files import tiny_config, write_gguf
from tests.helpers.gpu_kernels import use_stand_ins
from tests.helpers.head_checkpoints import eagle3_tensors, llama_config, save_head
from tests.helpers.head_checkpoints import save_target as save_small_target
from tests.helpers.live_storages import LiveStorages

GIB = 2**30
NONE = SpeculativeConfig()
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=24),
    "gemma2": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "gpt2": GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "deepseek": DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 512 positions."""
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeConfig:
    folder = tmp_path_factory.mktemp("head")
    return SpeculativeConfig(model=str(save_head(folder, eagle3_tensors(), llama_config())), method="eagle3")


def set_memory(monkeypatch: pytest.MonkeyPatch, free: int, total: int | None = None) -> None:
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (free, free if total is None else total))


def need_of(model: Path, engine: EngineConfig, speculation: SpeculativeConfig = NONE, **parts: bool) -> WorkerMemory:
    """Read from two plans: the bytes of a slot, and of all that is not slots."""
    engine = engine.model_copy(update={"device_memory_utilization": 1.0})
    roles = {"target": True, "draft": True} | parts
    with pytest.MonkeyPatch.context() as patch:

        def slots_in(memory: int) -> int:
            set_memory(patch, memory)
            return planned(model, engine, speculation, **roles)

        patch.setattr(memory_plan, "UNPLANNED_SLOTS", 2**40)
        few, many = slots_in(GIB), slots_in(3 * GIB)
    slot = round(2 * GIB / (many - few))
    return WorkerMemory(GIB - slot * (few + SPARE_SLOTS), 0, slot)


def planned(model: Path, engine: EngineConfig, speculation: SpeculativeConfig = NONE, **roles: bool) -> int:
    slots = plan_memory(engine, speculation, str(model), **({"target": True, "draft": True} | roles)).slots
    assert slots is not None
    return slots


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_takes_what_the_plan_says(tmp_path: Path, architecture: str, dtype: Any, kv_cache_dtype: Any) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(64))
    engine = EngineConfig(slots=300, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=256)
    need = model_memory(outline(str(tmp_path), engine), engine)
    model = load(str(tmp_path), engine)
    assert isinstance(model, TransformersModel)
    assert model.cache.data.nbytes == need.bytes_per_slot * (300 + SPARE_SLOTS)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype)
    assert need.weights == sum(parameter.nbytes for parameter in network.parameters())
    assert need.activations > 256 * 64 * 4, "the float32 logits of a full pass"


@pytest.mark.parametrize("architecture", ["qwen3_next", "nemotron_h", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_take_what_the_plan_says(tmp_path: Path, architecture: str, dtype: Any) -> None:
    """Those of requests, snapshots, and inputs of guesses; layers that keep them have no keys and values."""
    tiny(architecture).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(128))
    engine = EngineConfig(
        slots=300, dtype=dtype, max_model_len=256, max_num_seqs=5, max_num_batched_rows=300, state_snapshots=7
    )
    need = model_memory(outline(str(tmp_path), engine), engine)
    model: Any = load(str(tmp_path), engine)
    assert model.cache.data.nbytes == need.bytes_per_slot * (300 + SPARE_SLOTS)
    model.run([SlotTable([1]).row(5, 0)], [])
    inputs = [each for each in model._states._memories if isinstance(each, _Inputs)]
    rows = sum(each.nbytes - each._data[: model.states.first_row].nbytes + each._data[0].nbytes for each in inputs)
    states = [each._states[0].nbytes for each in model._states._memories if isinstance(each, _States)]
    assert model.states.states == 5 + 7
    assert need.states == model._states.nbytes - rows + 300 * STATE_COPIES * max(states, default=0)
    fewer = model_memory(outline(str(tmp_path), engine), engine.model_copy(update={"enable_prefix_caching": False}))
    assert fewer.states < need.states
    assert need.slots_in(GIB + need.states) == fewer.slots_in(GIB + fewer.states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_a_native_network_take_what_the_plan_says(tmp_path: Path, dtype: Any) -> None:
    """In a folder, and in a file; a folder's plan has room for torch's copies, too."""
    tiny("qwen3_5_text").save_pretrained(tmp_path / "folder")
    save_tokenizer(tmp_path / "folder", range(128))
    write_gguf(file := tmp_path / "tiny.gguf", tiny_config("qwen3_5_text"), "F32")
    engine = EngineConfig(slots=300, dtype=dtype, max_num_seqs=5, max_num_batched_rows=300, state_snapshots=7)
    settings = packed_config(str(file), engine)
    assert settings is not None
    needs = {
        tmp_path / "folder": model_memory(outline(str(tmp_path / "folder"), engine), engine),
        file: packed_memory(str(file), settings, engine),
    }
    for path, need in needs.items():
        model: Any = load(str(path), engine)
        assert model.native
        assert model.cache.data.nbytes == need.bytes_per_slot * (300 + SPARE_SLOTS)
        shape, layers = model._states.shape, model.layers - len(model.cache.data)
        zeros = layers * shape.mixed * model.dtype.itemsize  # what is before a path's first token
        copies = 0 if path == file else 300 * STATE_COPIES * 4 * shape.heads * shape.size * shape.channels
        assert need.states == model._states.nbytes - zeros + copies


def test_a_rank_has_its_share_of_layers_and_heads(target: Path) -> None:
    network = outline(str(target), EngineConfig())
    whole, half = (model_memory(network, EngineConfig(tensor_parallel_size=size)) for size in (1, 2))
    assert half.bytes_per_slot * 2 == whole.bytes_per_slot
    layers = sum(each.nbytes for each in network.base_model.layers.parameters())
    assert half.weights == whole.weights - layers // 2


def test_given_slots_and_fake_models_have_no_plan(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 1)
    assert planned(target, EngineConfig(slots=777)) == 777
    fake = plan_memory(EngineConfig(), NONE, "table:64", target=True, draft=False)
    assert (fake.slots, fake.slot_count) == (None, UNPLANNED_SLOTS)


def test_a_cpu_gets_no_more_than_it_got_without_a_plan(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 1000 * GIB)
    assert planned(target, EngineConfig()) == UNPLANNED_SLOTS
    assert planned(target, EngineConfig(max_model_len=100_000)) == 100_000
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: None)
    assert planned(target, EngineConfig()) == UNPLANNED_SLOTS


def test_the_slots_of_a_plan_fit_and_one_more_would_not(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(device_memory_utilization=0.5)
    need = model_memory(outline(str(target), engine), engine)
    fixed = need.weights + need.activations
    memory = 2 * (fixed + need.bytes_per_slot * (1000 + SPARE_SLOTS))
    set_memory(monkeypatch, memory)
    assert planned(target, engine) == 1000
    set_memory(monkeypatch, memory - 2)
    assert planned(target, engine) == 999


def test_the_served_model_has_the_planned_slots(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig()
    need = model_memory(outline(str(target), engine), engine)
    set_memory(monkeypatch, round((need.weights + need.activations + need.bytes_per_slot * 1002) / 0.9) + 9)
    assert LLM(str(target), None, {"threads": 1}).model.slots == 1000


def test_one_request_of_the_full_length_must_fit(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(device_memory_utilization=1.0)
    need = model_memory(outline(str(target), engine), engine)
    enough = need.weights + need.activations + need.bytes_per_slot * (512 + SPARE_SLOTS)
    set_memory(monkeypatch, enough)
    assert planned(target, engine) == 512
    set_memory(monkeypatch, enough - 1)
    with pytest.raises(
        ValueError, match=r"^512 positions do not fit into the memory of cpu, .* and 4\.0 KiB for each position: lower"
    ):
        planned(target, engine)
    assert planned(target, engine.model_copy(update={"max_model_len": 511})) == 511


def test_a_head_beside_its_target_takes_weights_a_cache_and_states(
    target: Path, draft: SpeculativeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots of both caches and of the hidden states come out of one budget."""
    alone, both = need_of(target, EngineConfig()), need_of(target, EngineConfig(), draft)
    remote = need_of(target, EngineConfig(), draft, draft=False)
    llm = LLM(str(target), None, {"slots": 512, "threads": 1})
    weights = llm.model.target_weights()
    states = 3 * weights.hidden_size * weights.dtype.itemsize
    caches: list[KVCache] = []

    class RecordedCache(KVCache):
        def __init__(self, *shape: Any) -> None:
            super().__init__(*shape)
            caches.append(self)

    monkeypatch.setattr(network_factory, "KVCache", RecordedCache)
    build_speculator(draft, EngineConfig(slots=512), llm.model.target_weights)
    (cache,) = caches
    assert remote.bytes_per_slot == alone.bytes_per_slot + states, "a remote head reads states that the target keeps"
    assert both.bytes_per_slot == alone.bytes_per_slot + states + cache.data.nbytes // cache.slot_count
    stored = sum(tensor.numel() for tensor in eagle3_tensors().values()) * weights.dtype.itemsize
    assert abs(both.weights - alone.weights - stored) <= both.bytes_per_slot


def test_workers_on_one_device_plan_the_same(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a worker that starts again, beside others that have their memory, plans what it planned before."""
    speculation = SpeculativeConfig(method="draft_model", model=str(target))
    engine = EngineConfig(device_workers=(2, 1), device_memory_utilization=1.0)
    need = model_memory(outline(str(target), engine), engine)
    one = need.weights + need.activations + need.bytes_per_slot * 1002
    set_memory(monkeypatch, 3 * one)
    assert planned(target, engine, speculation, draft=False) == 1000
    assert planned(target, engine, speculation, target=False) == 1000
    set_memory(monkeypatch, one, 3 * one)
    assert planned(target, engine, speculation, draft=False) == 1000
    set_memory(monkeypatch, one // 2 + need.weights, 3 * one)
    assert planned(target, engine, speculation, target=False) < 1000, "never more than is free"
    set_memory(monkeypatch, 3 * (need.weights + need.activations) + need.bytes_per_slot * 1200)
    with pytest.raises(ValueError, match=r"512 positions .* for 3 workers with"):
        planned(target, engine, speculation, draft=False)
    assert planned(target, engine, speculation, target=False) == 398, "a draft goes without the longest requests"


def test_a_draft_worker_says_when_nothing_fits(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 2**20)
    speculation = SpeculativeConfig(method="draft_model", model=str(target))
    with pytest.raises(ValueError, match="256 positions do not fit"):
        plan_memory(EngineConfig(), speculation, None, target=False, draft=True)
    ngram = plan_memory(EngineConfig(), SpeculativeConfig(method="ngram"), str(target), target=False, draft=True)
    assert ngram.slots is None, "it has no cache"


def test_an_unusable_model_has_no_plan(tmp_path: Path) -> None:
    """Loading it says what is wrong."""
    save_checkpoint(tmp_path)
    change_config(tmp_path, model_type="nothing")
    assert plan_memory(EngineConfig(), NONE, str(tmp_path), target=True, draft=False).slots is None


def test_a_gpu_s_memory_is_what_cuda_says(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is planned, for as many requests of the full length as may run at once."""
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 10 * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr("paceline.model.loading.use_device", torch.device)
    engine = EngineConfig(device="cuda:1", max_num_seqs=48)
    assert planned(target, engine) == 48 * 512
    assert asked == [torch.device("cuda:1")]
    engine = engine.model_copy(update={"max_num_seqs": 2**20})
    on_gpu = model_memory(outline(str(target), engine), engine)
    fitting = (int(10 * GIB * 0.9) - on_gpu.weights - on_gpu.activations) // on_gpu.bytes_per_slot - SPARE_SLOTS
    assert planned(target, engine) == fitting


def test_copies_that_torch_makes_are_planned_where_torch_attends(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow with rows and positions. Where a kernel attends, tables of slots grow."""
    monkeypatch.setattr("paceline.model.loading.use_device", torch.device)
    network = outline(str(target), EngineConfig())

    def activations(positions: int) -> int:
        return model_memory(network, EngineConfig(device="cuda", max_model_len=positions, max_num_seqs=7)).activations

    monkeypatch.setattr(gpu_memory, "triton_compiles", lambda: True)
    assert activations(500) - activations(100) == 400 * (MOST_TABLES + 1) * 4
    monkeypatch.setenv("PACELINE_ATTENTION", "torch")
    heads = Heads.of(network.config)
    scores = 3 * 256 * heads.kv_heads * heads.queries_per_kv * 4
    assert activations(500) - activations(100) == 400 * scores
    monkeypatch.delenv("PACELINE_ATTENTION")
    monkeypatch.setattr(gpu_memory, "triton_compiles", lambda: False)
    assert activations(500) - activations(100) == 400 * scores


def capture_outputs(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Keeps a pass' outputs alone, as CUDA graphs that share their temporary memory do."""
    outputs = run()

    @torch.inference_mode()
    def replay() -> None:
        for kept, new in zip(outputs, run(), strict=True):
            kept.copy_(new)

    return replay, outputs


def kept_by_graphs(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a model holds more with graphs than without."""
    held = []
    for graphs in ("1", "0"):
        monkeypatch.setenv("PACELINE_CUDA_GRAPHS", graphs)
        made = network("olmo2", torch.float32, vocab_size=vocabulary)
        with LiveStorages("cpu") as live:
            model = build(made, "olmo2", EngineConfig(slots=512), "", [])
            gc.collect()
            held.append(live.bytes)
        assert ("CUDA graphs" in model.cache.attention_name) == (graphs == "1")
    return held[0] - held[1]


@pytest.mark.usefixtures("kernels")
def test_logits_that_graphs_of_transformers_forward_keep_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what graphs of Llama layers keep. Ranks and packed weights have no such graphs."""

    few, many = 512, 1024

    def growth(kind: str, ranks: int = 1, packed: int | None = None) -> int:
        """Of the plan, from few tokens to many."""
        engine = EngineConfig(device="cuda", tensor_parallel_size=ranks)
        networks = [network(kind, torch.float32, vocab_size=vocabulary) for vocabulary in (many, few)]
        large, small = (model_memory(each, engine, packed).activations for each in networks)
        return large - small

    use_torch(monkeypatch)
    use_stand_ins(monkeypatch)
    monkeypatch.setattr(torch_attention, "CudaCapture", lambda device: capture_outputs)
    kept = kept_by_graphs(many, monkeypatch) - kept_by_graphs(few, monkeypatch)
    assert growth("olmo2") - growth("llama") == kept > 0
    assert growth("olmo2", ranks=2) == growth("llama", ranks=2)
    assert growth("olmo2", packed=1) == growth("llama")


def head_need(folder: Path, engine: EngineConfig, speculation: SpeculativeConfig, **where: bool) -> WorkerMemory:
    """Of a head alone."""
    target = load_target_weights(str(folder), torch.float32, "cpu", 300)
    return draft_memory(speculation, engine, target, **where)[0]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with Triton."""
    monkeypatch.setattr("paceline.model.loading.use_device", torch.device)
    for module in ("gpu.memory", "packed_model"):
        monkeypatch.setattr(f"paceline.model.{module}.triton_compiles", lambda: True)


@pytest.mark.usefixtures("kernels")
def test_a_head_on_a_gpu_takes_a_pass_of_its_own_shape(target: Path, tmp_path: Path) -> None:
    """Beside logits."""
    h = 128  # the target's hidden size is 64
    head = save_head(tmp_path, eagle3_tensors(h=h), llama_config(h))
    speculation = SpeculativeConfig(model=str(head), method="eagle3")
    on_cpu, on_gpu = (head_need(target, EngineConfig(device=device), speculation) for device in ("cpu", "cuda"))
    weights = load_target_weights(str(target), None, "cpu")
    heads = Heads.of(LlamaConfig(**llama_config(h)))
    inner = llama_config()["intermediate_size"]
    rows = MAX_ROWS + PREFILL_ROWS
    largest = PassMemory(rows, 300, 300, 1, h, inner, heads, weights.dtype).total(by_kernel=True)
    assert on_cpu.activations == 0
    assert on_gpu.activations == largest + MAX_ROWS * weights.vocabulary_size * 4 * 2
    assert (on_gpu.weights, on_gpu.bytes_per_slot) == (on_cpu.weights, on_cpu.bytes_per_slot)


@pytest.mark.usefixtures("kernels")
def test_a_head_without_a_cache_takes_logits_alone(target: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path, {"0.0.linear.weight": torch.zeros(64, 64)}, {"medusa_num_heads": 1})
    speculation = SpeculativeConfig(model=str(head), method="medusa")
    vocabulary = load_target_weights(str(target), None, "cpu").vocabulary_size
    assert head_need(target, EngineConfig(device="cuda"), speculation).activations == MAX_ROWS * vocabulary * 4 * 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("packing", ["in a file", "chosen"])
def test_a_head_beside_a_packed_target_has_an_embedding(
    target: Path, draft: SpeculativeConfig, tmp_path: Path, packing: str
) -> None:
    """In the target's process. A draft worker has both matrices of the target anyway."""
    if packing == "in a file":
        model, engine = tmp_path / "model.gguf", EngineConfig(device="cuda")
        write_gguf(model, tiny_config("llama", num_hidden_layers=8), "Q8_0")
    else:
        model, engine = target, EngineConfig(device="cuda", quantization="q8_0")
    embedding = load_target_weights(str(model), torch.float32, "cpu").embedding()

    def weights(folder: Path, engine: EngineConfig, **where: bool) -> int:
        return head_need(folder, engine, draft, **where).weights

    stored = weights(target, EngineConfig(device="cuda"))
    assert weights(model, engine) == stored + embedding.nbytes
    assert weights(model, engine, worker=True) == stored + 2 * embedding.nbytes


def test_a_head_reads_both_matrices_of_a_target_that_ranks_share(target: Path, draft: SpeculativeConfig) -> None:
    """Each rank has only a part of them."""
    ranks = EngineConfig(tensor_parallel_size=2)
    weights = load_target_weights(str(target), None, "cpu")
    matrices = 2 * weights.embedding().nbytes
    heads = []
    for engine in (EngineConfig(), ranks):
        alone, both = need_of(target, engine), need_of(target, engine, draft)
        heads.append(both.weights - alone.weights)
    assert abs(heads[1] - heads[0] - matrices) <= 2 * both.bytes_per_slot


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    monkeypatch.setattr(device_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(device_memory, "CGROUP_LIMIT", limit)
    cpu = torch.device("cpu")
    assert device_memory.device_memory(cpu) == (6000 * 1024, 8000 * 1024)
    for text, expected in (("max\n", (6000, 8000)), ("7168000\n", (6000, 7000)), ("1024000\n", (1000, 1000))):
        limit.write_text(text)
        assert device_memory.device_memory(cpu) == (expected[0] * 1024, expected[1] * 1024)
    meminfo.unlink()
    assert device_memory.device_memory(cpu) is None


@pytest.mark.parametrize(
    ("engine", "speculation", "shared"),
    [
        ({}, {}, [(2, 3)] * 5),
        ({"device": "cuda"}, {"draft_devices": ("cuda:0", "cuda:1")}, [(2, 2), (2, 2), (2, 2), (0, 1), (2, 2)]),
        (
            {"device": "cuda", "tensor_parallel_size": 2},
            {"draft_devices": ("cuda:3", "cuda:9")},
            [(1, 0), (1, 2), (1, 2), (0, 1), (1, 2)],
        ),
    ],
)
def test_serve_counts_the_workers_of_each_device(
    engine: dict[str, Any], speculation: dict[str, Any], shared: list[tuple[int, int]]
) -> None:
    drafts = SpeculativeConfig(method="draft_model", model="table:64", **speculation)
    deployment = plan_deployment(
        DeploymentOptions("table:64", drafts, EngineConfig(**engine), target_workers=2, draft_workers=3)
    )
    programs = [each for group in deployment.programs("redis://127.0.0.1:1") for each in group]
    engines = [each.argv[each.argv.index("--engine-config") + 1] for each in programs if "--engine-config" in each.argv]
    assert [tuple(json.loads(each)["device_workers"]) for each in engines] == shared
