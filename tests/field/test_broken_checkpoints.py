"""Broken checkpoints: targets and gateways refuse them in one sentence, and `serve` goes on without a broken draft."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline import family
from paceline.cli.deployment import DeploymentOptions
from paceline.cli.serve_command import _planned
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.draft_client import NoDraftClient
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.launcher import StartError
from paceline.model import load
from paceline.model.checkpoint import check_files
from paceline.model_names import BrokenFileError, ModelNotFoundError
from paceline_services.draft.speculator_process import load_speculator
from paceline_services.gateway.server import _load_tokenizer
from paceline_services.target.engine_process import build_drafting, build_engine
from tests.helpers.checkpoints import change_config, change_weights, save_checkpoint
from tests.helpers.gguf_files import tiny_config, write_gguf
from tests.helpers.pipes import pipes
from tests.helpers.served import serving
from tests.helpers.service_processes import ServiceProcess

Break = Callable[[Path], object]

CONFIG = EngineConfig(slots=512)
UP = "model.layers.1.mlp.up_proj.weight"
"""A matrix of 96 rows."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"), eos_token_ids=[5, 7])
    (folder / "tokenizer_config.json").write_text('{"eos_token": "5"}')
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def target_refusal(model: Path) -> str:
    """The sentence with which a target's model process ends."""
    with pipes() as (_, pipe), pytest.raises((StartError, ModelNotFoundError)) as refusal:
        build_engine(pipe, str(model), CONFIG, SpeculativeConfig())
    return sentence(refusal.value)


def gateway_refusal(model: Path) -> str:
    with pytest.raises((StartError, ModelNotFoundError)) as refusal:
        _load_tokenizer(str(model))
    return sentence(refusal.value)


def sentence(error: Exception) -> str:
    assert "\n" not in str(error)
    return str(error)


def split(folder: Path) -> Path:
    """The same weights in two files, and the path of their index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (name > UP)}-of-00002.safetensors" for name in weights}
    for file in set(files.values()):
        part = {name: each for name, each in weights.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


BREAKS: Mapping[str, Break] = {
    "cut off": lambda path: cut(path, 5),
    "no object": lambda path: path.write_text("[1]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x80"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", BREAKS)
def test_a_target_names_the_side_file_that_it_cannot_read(copy: Path, file: str, how: str) -> None:
    BREAKS[how](copy / file)
    assert f"{copy / file} " in target_refusal(copy)


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_gateway_names_the_side_file_that_it_cannot_read(copy: Path, file: str, how: str) -> None:
    BREAKS[how](copy / file)
    assert f"{copy / file} " in gateway_refusal(copy)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (b"{% for message in messages %}{{ message.content }", "the model's chat template does not parse"),
        (b"{% break %}", "the model's chat template does not parse"),
        (b"{{ (" * 2000, "the model's chat template does not parse"),
        (b"\xff\xfe\x80", "chat_template.jinja is no text"),
    ],
)
def test_a_gateway_refuses_a_broken_template_and_a_target_needs_none(copy: Path, source: bytes, complaint: str) -> None:
    (copy / "chat_template.jinja").write_bytes(source)
    refusal = gateway_refusal(copy)
    assert str(copy) in refusal
    assert complaint in refusal
    assert load(str(copy), CONFIG).fingerprint != ""


@pytest.mark.parametrize("template", [[{"nam": "default"}], [5], 5, {"default": "x"}])
def test_a_template_of_another_type(copy: Path, template: object) -> None:
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if isinstance(template, list):  # without one called default there is none
        assert _load_tokenizer(str(copy)).chat_template is None
    else:
        assert "chat_template in " in gateway_refusal(copy)


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_a_tensor_of_another_size_is_named_with_both(copy: Path, quantization: str | None) -> None:
    change_weights(copy, lambda weights: weights | {UP: torch.zeros(90, 64)})
    config = CONFIG.model_copy(update={"quantization": quantization})
    with pytest.raises(ValueError, match=rf"{UP} .*\[90, 64\].*\[96, 64\]"):
        load(str(copy), config)


def test_a_size_in_the_configuration_that_no_tensor_has(copy: Path) -> None:
    change_config(copy, vocab_size=32)
    assert "[64, 64], and its configuration asks for [32, 64]" in target_refusal(copy)


def test_a_report_of_sizes_is_not_logged_beside_the_sentence(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(copy, vocab_size=32)
    target_refusal(copy)
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type is 'spiral', which is not known"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_type is 'spiral', which is not known"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": 5}, "'rope_parameters' with value 5"),
        ({"hidden_size": "64"}, "'hidden_size' expected int"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads (3)"),
        ({"dtype": "float128"}, "float128"),
        ({"hidden_act": "nosuch"}, "'nosuch' is not known here"),
        ({"quantization_config": 5}, "quantization_config is 5"),
    ],
)
def test_a_value_that_makes_no_model(copy: Path, changes: dict[str, object], complaint: str) -> None:
    change_config(copy, **changes)
    refusal = target_refusal(copy)
    assert complaint in refusal
    assert str(copy) in refusal


def test_a_file_that_was_cut_off_is_named_with_both_sizes(copy: Path) -> None:
    path = copy / "model.safetensors"
    whole = path.stat().st_size
    cut(path, 500)
    assert f"it has {whole - 500} bytes, and its header lists {whole}" in target_refusal(copy)
    path.write_bytes(path.read_bytes()[:100])
    assert f"{path} cannot be read" in target_refusal(copy)
    path.write_bytes(b"")
    assert f"{path} cannot be read" in target_refusal(copy)


@pytest.mark.parametrize(
    ("breaks", "complaint"),
    [
        (lambda index: cut(index, 9), "model.safetensors.index.json cannot be read"),
        (lambda index: index.write_text("[]"), "model.safetensors.index.json holds no JSON object"),
        (lambda index: index.write_text("{}"), "model.safetensors.index.json has no weight_map"),
        (lambda index: index.with_name("model-00002-of-00002.safetensors").unlink(), "names model-00002-of-00002"),
        (
            lambda index: cut(index.with_name("model-00001-of-00002.safetensors"), 50),
            "model-00001-of-00002.safetensors",
        ),
    ],
)
def test_an_index_or_one_of_its_files(copy: Path, breaks: Break, complaint: str) -> None:
    breaks(split(copy))
    assert complaint in target_refusal(copy)


def draft(folder: Path, **more: str) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(folder), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "breaks",
    [
        lambda folder: cut(folder / "model.safetensors", 500),
        lambda folder: cut(folder / "tokenizer.json", 5),
        lambda folder: change_config(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        lambda folder: change_weights(folder, lambda weights: weights | {UP: torch.zeros(90, 64)}),
    ],
    ids=["weights", "tokenizer", "rope", "size"],
)
def test_a_target_serves_without_a_broken_draft_in_its_process(
    checkpoint: Path, copy: Path, breaks: Break, caplog: pytest.LogCaptureFixture
) -> None:
    breaks(copy)
    target, vocabulary = load(str(checkpoint), CONFIG), GrammarVocabulary.of(str(checkpoint))
    with pipes() as (_, pipe):
        client = build_drafting(target, pipe, draft(copy, draft_placement="target"), CONFIG, vocabulary)
    assert isinstance(client, NoDraftClient)
    assert "the target serves without it" in caplog.text
    assert str(copy) in caplog.text


def test_a_target_serves_without_a_gguf_draft_that_was_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafting = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for path in (target, drafting):
        write_gguf(path, tiny_config("qwen2"))
    cut(drafting, 300)
    with pipes() as (_, pipe):
        speculation, vocabulary = draft(drafting, draft_placement="target"), GrammarVocabulary.of(str(target))
        client = build_drafting(load(str(target), CONFIG), pipe, speculation, CONFIG, vocabulary)
    assert isinstance(client, NoDraftClient)
    assert f"{drafting} is cut off within the tensor" in caplog.text


def test_a_template_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", tiny_config("qwen2"), metadata={"tokenizer.chat_template": "{% break %}"})
    assert "a.gguf: the model's chat template does not parse" in gateway_refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize("value", [("num_hidden_layers", 0), ("rope_theta", "x"), ("rope_theta", None)])
def test_a_head_with_a_value_that_makes_no_head(tmp_path: Path, value: tuple[str, object]) -> None:
    head = Path(shutil.copytree(family.path("pydoc-eagle3"), tmp_path / "head"))
    change_config(head, **dict([value]))
    with pytest.raises(StartError, match=value[0]) as refusal:
        load_speculator(SpeculativeConfig(method="eagle3", model=str(head)), CONFIG, "pydoc")
    assert str(head) in sentence(refusal.value)


def test_a_process_with_a_broken_checkpoint_ends_once(copy: Path) -> None:
    cut(copy / "model.safetensors", 500)
    service = ServiceProcess("target", "--model", str(copy))
    _, log = service.process.communicate(timeout=60)
    assert service.process.returncode == 2
    assert "Traceback" not in log
    assert len([line for line in log.splitlines() if "cannot be read" in line]) == 1


@pytest.mark.alone
@pytest.mark.parametrize(
    ("file", "count", "complaint"),
    [
        ("model.safetensors", 500, r"draft-1-\w+ could not start: .*the others serve without it"),
        ("tokenizer.json", 5, r"tokenizer\.json cannot be read.*the others serve without it"),
    ],
)
def test_serve_goes_on_without_a_broken_draft(
    checkpoint: Path, copy: Path, file: str, count: int, complaint: str
) -> None:
    cut(copy / file, count)
    with serving(str(checkpoint), "--port", "0", "--speculative-config", draft(copy).model_dump_json()) as served:
        served.wait_for(complaint)
        served.wait_for("Serving ")
        assert not any("Traceback" in line or "started again" in line for line in served.log)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait() == 0


def test_serve_keeps_the_lookups_beside_a_broken_draft(checkpoint: Path, copy: Path) -> None:
    cut(copy / "tokenizer.json", 5)
    together = SpeculativeConfig(
        method="draft_model",
        model=str(copy),
        beside=("ngram", "suffix"),
        prompt_lookup_min=1,
        rejection_sampling_strategy="residual",
    )
    planned = _planned(DeploymentOptions(str(checkpoint), together)).speculation
    assert (planned.method, planned.beside, planned.model) == ("ngram", ("suffix",), None)
    assert (planned.prompt_lookup_min, planned.draft_placement) == (1, "target")
    assert planned.strategy.name == "residual"
    alone = _planned(DeploymentOptions(str(checkpoint), draft(copy))).speculation
    assert not alone.enabled


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no memory is left")])
def test_memory_that_runs_out_is_no_refusal(copy: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start may find more: the exit code of a refusal would prevent it."""

    def from_pretrained(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(type(error)) as raised:
        load(str(copy), CONFIG)
    assert raised.value is error


def test_an_index_that_is_left_over_beside_safetensors_is_not_blamed(copy: Path) -> None:
    """A publisher converted the weights, and left the index of the old files."""
    index = json.dumps({"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00002.bin"}})
    (copy / "pytorch_model.bin.index.json").write_text(index)
    check_files(copy)
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BrokenFileError, match=r"names pytorch_model-00001-of-00002\.bin, which is not there"):
        check_files(copy)
