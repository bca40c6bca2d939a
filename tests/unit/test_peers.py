"""Other engines: their processes, environments and files, and the figures of `paceline bench peers`."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline import family
from paceline.cli import main
from paceline.launcher import StartError
from paceline_lab.bench import peer_comparison
from paceline_lab.bench.bench_measurement import Measurement
from paceline_lab.bench.peer_comparison import METHODS, PeerBenchOptions, models, picture, ratios
from paceline_lab.bench.workloads import Workload
from paceline_lab.peers import peer_environments
from paceline_lab.peers.peer_environments import DONE, NotInstalledError, python_of
from paceline_lab.peers.peer_process import PeerError, PeerProcess
from tests.helpers.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[2]
REQUEST = {"method": "plain", "prompts": [[1, 5], [8]], "temperature": 0.0, "seed": 7, "max_tokens": 3}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PeerProcess]:
    process = toy(tmp_path)
    yield process
    process.close()


def toy(folder: Path) -> PeerProcess:
    argv = [sys.executable, "-m", "tests.helpers.toy_engine"]
    return PeerProcess("toy", argv, {"PYTHONPATH": str(ROOT)}, folder / "toy.log")


def is_stopped(engine: PeerProcess) -> bool:
    """Waits: a signal takes its time to arrive."""
    for _ in range(500):
        if Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


class TestProcess:
    def test_responds_line_by_line(self, engine: PeerProcess) -> None:
        assert engine.start({}) == ["plain", "refusing", "dying", "slow"]
        for _ in range(2):
            tokens, seconds = engine.generate(REQUEST)
            assert tokens == [[6, 7, 8], [9, 10, 11]]
            assert 0 < seconds < 1

    def test_measures_its_own_call(self, engine: PeerProcess) -> None:
        engine.start({})
        _, seconds = engine.generate({**REQUEST, "method": "slow"})
        assert 0.2 <= seconds < 2

    def test_is_stopped_between_requests(self, engine: PeerProcess) -> None:
        engine.start({})
        assert is_stopped(engine)
        engine.generate(REQUEST)
        assert is_stopped(engine)

    def test_survives_an_error(self, engine: PeerProcess) -> None:
        engine.start({})
        with pytest.raises(PeerError, match="toy: ValueError: it takes 1 at once"):
            engine.generate({**REQUEST, "method": "refusing"})
        assert engine.generate(REQUEST)[0][0] == [6, 7, 8]

    def test_reports_why_it_cannot_load(self, engine: PeerProcess) -> None:
        with pytest.raises(PeerError, match="nothing to load"):
            engine.start({"broken": True})

    def test_stays_gone_after_it_died(self, engine: PeerProcess) -> None:
        engine.start({})
        for _ in range(2):
            with pytest.raises(PeerError, match=r"gone: see .*toy\.log"):
                engine.generate({**REQUEST, "method": "dying"})

    def test_times_out_without_an_answer(self, engine: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        engine.start({})
        monkeypatch.setattr("paceline_lab.peers.peer_process.ANSWER_S", 0.05)
        began = time.perf_counter()
        with pytest.raises(PeerError, match="no answer in"):
            engine.generate({**REQUEST, "method": "slow"})
        assert time.perf_counter() - began < 0.19

    def test_is_killed_after_a_timeout(self, engine: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its late answer would be taken for the next request's."""
        engine.start({})
        monkeypatch.setattr("paceline_lab.peers.peer_process.ANSWER_S", 0.05)
        with pytest.raises(PeerError, match="no answer in"):
            engine.generate({**REQUEST, "method": "slow", "max_tokens": 1})
        monkeypatch.undo()
        with pytest.raises(PeerError, match="gone"):
            engine.generate(REQUEST)

    def test_can_be_closed_while_it_is_stopped(self, tmp_path: Path) -> None:
        process = toy(tmp_path)
        process.start({})
        process.close()
        assert not Path(f"/proc/{process.pid}").exists()


RECIPE = [["install", "one"], ["install", "two"]]


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def recipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer_environments, "RECIPES", {"toy": RECIPE})

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
        """Commands given to pip."""
        commands: list[Sequence[str]] = []
        monkeypatch.setattr(peer_environments, "_pip", lambda python, command: commands.append(command))
        monkeypatch.setattr(peer_environments.venv, "create", lambda folder, with_pip: self.make(folder))
        return commands

    def make(self, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    def test_is_made_once(self, tmp_path: Path, commands: list[Sequence[str]]) -> None:
        python = python_of("toy", tmp_path)
        assert python == tmp_path / "toy" / "bin" / "python"
        assert commands == RECIPE
        assert python_of("toy", tmp_path) == python
        assert len(commands) == 2

    def test_is_completed_after_a_change_of_recipe(self, tmp_path: Path, commands: list[Sequence[str]]) -> None:
        self.make(tmp_path / "toy")
        (tmp_path / "toy" / DONE).write_text("install an older one")
        python_of("toy", tmp_path)
        assert commands == RECIPE

    def test_without_a_recipe_is_this_one(self, tmp_path: Path) -> None:
        assert python_of("paceline", tmp_path) == Path(sys.executable)

    def test_failure_is_reported_in_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.make(tmp_path / "toy")

        def fails(python: Path, command: Sequence[str]) -> None:
            raise subprocess.CalledProcessError(1, list(command), stderr="trying\nno route to the index\n")

        monkeypatch.setattr(peer_environments, "_pip", fails)
        with pytest.raises(NotInstalledError, match=r"^toy cannot be installed: no route to the index$"):
            python_of("toy", tmp_path)
        assert not (tmp_path / "toy" / DONE).exists()

    def test_is_completed_if_it_is_half_made(self, tmp_path: Path, commands: list[Sequence[str]]) -> None:
        self.make(tmp_path / "toy")
        python_of("toy", tmp_path)
        assert (tmp_path / "toy" / DONE).read_text() == "install one\ninstall two"


class TestModel:
    def test_has_no_token_that_ends_a_text(self, tmp_path: Path) -> None:
        paths = models("shipped", tmp_path / "models")
        for which in ("target", "draft"):
            for name in ("config.json", "generation_config.json"):
                assert json.loads((Path(paths[which]) / name).read_text())["eos_token_id"] is None
        shipped = family.path(family.NAMES[0])
        assert (Path(paths["target"]) / "model.safetensors").read_bytes() == (
            shipped / "model.safetensors"
        ).read_bytes()

    def test_is_written_anew_in_every_run(self, tmp_path: Path) -> None:
        gguf = Path(models("shipped", tmp_path / "models")["gguf"])
        gguf.write_text("of an older model")
        models("shipped", tmp_path / "models")
        assert not gguf.exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    weights = {name: each.bfloat16() for name, each in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> Mapping[str, Any]:
    gguf = pytest.importorskip("gguf", reason="pip install gguf: `make setup` does")
    from paceline_lab.peers.gguf_writer import write_gguf

    write_gguf(checkpoint, checkpoint / "model.gguf")
    reader = gguf.GGUFReader(checkpoint / "model.gguf")
    assert reader.get_field("llama.attention.key_length").contents() == 16
    assert reader.get_field("llama.attention.layer_norm_rms_epsilon").contents() == pytest.approx(1e-6)
    return {tensor.name: tensor for tensor in reader.tensors}


class TestGgufFile:
    """Read back with the package's own reader."""

    def test_has_every_tensor_once(self, checkpoint: Path, tensors: Mapping[str, Any]) -> None:
        assert len(tensors) == len(load_file(checkpoint / "model.safetensors"))

    def test_keeps_every_bit_of_a_matrix(self, checkpoint: Path, tensors: Mapping[str, Any]) -> None:
        weight = load_file(checkpoint / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
        assert tensors["blk.1.ffn_down.weight"].data.tobytes() == weight.view(torch.uint8).numpy().tobytes()
        assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "BF16"

    def test_has_norms_in_float32(self, checkpoint: Path, tensors: Mapping[str, Any]) -> None:
        weight = load_file(checkpoint / "model.safetensors")["model.norm.weight"]
        assert np.array_equal(tensors["output_norm.weight"].data, weight.float().numpy())

    @pytest.mark.parametrize(("ours", "theirs", "heads"), [("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)])
    def test_reorders_rows_for_rotary_embedding(
        self, ours: str, theirs: str, heads: int, checkpoint: Path, tensors: Mapping[str, Any]
    ) -> None:
        """Turning number i with number i + D / 2, then dotting, is turning neighbours of the reordered rows."""
        weight = load_file(checkpoint / "model.safetensors")[f"model.layers.0.self_attn.{ours}.weight"]
        raw = torch.from_numpy(tensors[f"blk.0.{theirs}.weight"].data.copy())
        x = torch.randn(64, generator=torch.Generator().manual_seed(1))
        halves = (weight.float() @ x).view(heads, 2, -1)
        pairs = (raw.view(torch.bfloat16).view(weight.shape).float() @ x).view(heads, -1, 2)
        assert torch.allclose(pairs[..., 0], halves[:, 0])
        assert torch.allclose(pairs[..., 1], halves[:, 1])

    def test_is_refused_for_other_dtypes(self, tmp_path: Path) -> None:
        pytest.importorskip("gguf", reason="pip install gguf: `make setup` does")
        from paceline_lab.peers.gguf_writer import write_gguf

        with pytest.raises(ValueError, match="F32, not BF16"):
            write_gguf(save_checkpoint(tmp_path / "float32"), tmp_path / "model.gguf")


# Figures


def rows(**speeds: float) -> list[dict[str, Any]]:
    """Rows of `engine/method/load/batch` in the shipped size; `engine` alone: plain code."""
    made = []
    for key, speed in speeds.items():
        engine, method, load, batch = (*key.split("/"), *["plain", "code", "1"][key.count("/") :])
        made.append(
            {"size": "shipped", "engine": engine, "method": method, "load": load, "batch": int(batch)}
            | {"tokens_per_s": speed}
        )
    return made


def test_the_best_method_counts() -> None:
    found = ratios(rows(**{"paceline": 10, "paceline/ngram": 60, "llama.cpp": 20, "llama.cpp/prompt_lookup": 15}))
    assert found["shipped: best / llama.cpp best, code"] == 3
    assert found["shipped: speculative / plain, code"] == 6


def test_one_figure_for_several_loads_is_their_geometric_mean() -> None:
    found = ratios(
        rows(
            **{
                "paceline": 40,
                "paceline/plain/questions": 90,
                "llama.cpp": 10,
                "llama.cpp/plain/questions": 10,
            }
        )
    )
    assert found["shipped: plain / llama.cpp plain"] == 6


def test_what_was_not_measured_has_no_ratio() -> None:
    found = ratios(rows(**{"paceline": 40, "llama.cpp": 10}))
    assert "shipped: plain / llama.cpp plain" not in found, "half of the loads"
    assert found == {"shipped: best / llama.cpp best, code": 4.0}


def test_batches_are_not_mixed() -> None:
    speeds = {f"{engine}/plain/{load}/8": 8.0 for engine in ("paceline", "vllm") for load in ("code", "questions")}
    assert ratios(rows(**speeds))["shipped: best / vllm best, batch 8"] == 1
    assert "shipped: best / vllm best, batch 1" not in ratios(rows(**speeds))


def test_the_slowest_method_counts_where_drafting_does_not_pay() -> None:
    speeds = {"paceline": 100, "paceline/ngram": 96, "paceline/eagle3": 120}
    found = ratios(
        rows(**{f"{key if '/' in key else key + '/plain'}/code-0.8": speed for key, speed in speeds.items()})
    )
    assert found["shipped: slowest method / plain, code-0.8"] == 0.96


def test_an_output_is_equal_if_every_repetition_is() -> None:
    plain, other = Measurement(), Measurement()
    for _ in range(2):
        plain.add(0, [[1, 2], [3, 4]], 1.0)
    other.add(0, [[1, 2], [3, 4]], 1.0)
    other.add(0, [[1, 2], [3, 5]], 1.0)
    assert (plain.equal_prompts(plain), other.equal_prompts(plain)) == (2, 1)
    assert Measurement().equal_prompts(plain) == other.equal_prompts(Measurement()) == 0


def test_speed_counts_the_tokens_of_all_requests() -> None:
    this = Measurement()
    this.add(0, [[1, 2], [3, 4, 5]], 2.0)
    assert this.median_speed == 2.5


# A run


PROMPTS = [[1, 2], [3, 4], [5, 6], [7, 8]]


class Fake:
    """In place of an engine's process: 96 tokens in 1 s, with a draft in half of that."""

    requests: ClassVar[list[tuple[str, str, int]]] = []
    interrupt_at = math.inf

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.engine = argv[-1]
        self.threads = int(environment["OMP_NUM_THREADS"])

    def start(self, setup: Mapping[str, Any]) -> list[str]:
        if self.engine == "transformers":
            raise PeerError("transformers, shipped is gone")
        assert self.engine != "paceline" or setup["speculation"]["suffix + eagle3"]["model"] == "h"
        return list(setup["methods"])

    def generate(self, request: Mapping[str, Any]) -> tuple[list[list[int]], float]:
        method, prompts = request["method"], request["prompts"]
        if len(self.requests) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.requests.append((self.engine, method, len(prompts)))
        if self.engine == "llama.cpp" and method != "plain" and len(prompts) > 1:
            raise PeerError("llama.cpp, shipped: it takes 1 at once")
        tokens = [[prompt[0]] * request["max_tokens"] for prompt in prompts]
        return tokens, (1.0 if method == "plain" else 0.5) * (1.0 if self.threads == 1 else 0.8)

    def close(self) -> None:
        pass


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PeerBenchOptions:
    monkeypatch.setattr(peer_comparison, "PeerProcess", Fake)
    monkeypatch.setattr(peer_comparison, "python_of", lambda engine, folder: Path(sys.executable))
    monkeypatch.setattr(peer_comparison, "models", lambda size, folder: {"target": size, "draft": "d", "head": "h"})
    monkeypatch.setattr(peer_comparison, "prompts_of", lambda workload: PROMPTS)
    monkeypatch.setattr(peer_comparison.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(peer_comparison, "workloads", lambda: [Workload("code completion", "", [])])
    monkeypatch.setattr(peer_comparison, "repetitive_workloads", lambda: [])
    monkeypatch.setattr(Fake, "requests", [])
    return PeerBenchOptions(sizes=["shipped"], loads=["code"], repeats=2, folder=tmp_path / "peers")


def run(options: PeerBenchOptions) -> tuple[dict[str, Any], str]:
    shown = io.StringIO()
    return peer_comparison.run(Console(file=shown, width=160), options), shown.getvalue()


def test_every_method_is_measured_in_turns(faked: PeerBenchOptions) -> None:
    summary, shown = run(faked)
    singles = [each for each in Fake.requests if each[2] == 1]
    able = [(engine, method) for engine, methods in METHODS.items() for method in methods if engine != "transformers"]
    assert [each[:2] for each in singles[-len(able) :]] == able
    assert [each[:2] for each in singles[-2 * len(able) : -len(able)]] == able
    speeds = {(row["engine"], row["method"], row["batch"]): row["tokens_per_s"] for row in summary["rows"]}
    assert speeds["vllm", "plain", 1] == 96 / 0.8
    assert speeds["vllm", "eagle3", 8] == 8 * 96 / 0.4
    assert ("llama.cpp", "prompt_lookup", 8) not in speeds
    assert all(row["equal"] == row["outputs"] == (4 if row["batch"] == 1 else 8) for row in summary["rows"])
    assert summary["threads"] == {"paceline, shipped": 2, "llama.cpp, shipped": 2, "vllm, shipped": 2}
    assert summary["ratios"]["shipped: best / llama.cpp best, code"] == 1
    assert "120" in shown


def test_an_engine_that_fails_is_left_out(faked: PeerBenchOptions) -> None:
    summary, shown = run(faked)
    assert "left out: transformers, shipped is gone" in shown
    assert {row["engine"] for row in summary["rows"]} == {"paceline", "llama.cpp", "vllm"}
    assert sum("takes 1 at once" in reason for reason in summary["left_out"]) == 2


def test_an_engine_that_cannot_be_installed_is_left_out(
    faked: PeerBenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(engine: str, folder: Path) -> Path:
        if engine == "vllm":
            raise NotInstalledError("vllm cannot be installed: no route")
        return Path(sys.executable)

    monkeypatch.setattr(peer_comparison, "python_of", missing)
    summary, shown = run(faked)
    assert "left out: vllm cannot be installed: no route" in shown
    assert {row["engine"] for row in summary["rows"]} == {"paceline", "llama.cpp"}


def test_an_interruption_keeps_what_was_measured(faked: PeerBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "interrupt_at", 60)
    summary, shown = run(faked)
    assert "interrupted" in shown
    assert summary["rows"]
    assert all(row["batch"] == 1 for row in summary["rows"])


def test_unknown_names_are_refused() -> None:
    for wrong in ({"engines": ["sglang"]}, {"sizes": ["huge"]}, {"loads": ["poems"]}):
        with pytest.raises(StartError, match="choose from"):
            PeerBenchOptions(**wrong)  # type: ignore[arg-type]


def test_the_command_ends_with_one_line_of_json(
    faked: PeerBenchOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    svg = tmp_path / "peers.svg"
    options = ["--sizes", "shipped", "--workloads", "code", "--repeats", "1", "--environments", str(faked.folder)]
    result = CliRunner().invoke(main, ["bench", "peers", *options, "--svg", str(svg)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output.splitlines()[-1])["rows"]
    assert ElementTree.fromstring(svg.read_text()) is not None
    assert CliRunner().invoke(main, ["bench", "peers", "--engines", "sglang"]).exit_code == 2


def test_baseline_is_peers_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[PeerBenchOptions] = []

    def run(console: Console, options: PeerBenchOptions) -> dict[str, Any]:
        given.append(options)
        return {"rows": []}

    monkeypatch.setattr(peer_comparison, "run", run)
    assert CliRunner().invoke(main, ["bench", "baseline"]).exit_code == 0
    assert (given[0].engines, given[0].sizes) == (["paceline", "transformers"], ["shipped"])


def test_the_picture_shows_plain_and_best_of_every_engine(faked: PeerBenchOptions) -> None:
    speeds = {
        f"{engine}/{method}/{load}": 10.0 * (1 + len(method))
        for engine in METHODS
        for method in METHODS[engine]
        for load in ("code", "questions")
    }
    drawn = picture({"rows": rows(**speeds)})
    texts = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"paceline", "llama.cpp", "vllm", "transformers", "shipped family"} <= set(texts)
    assert "160 suffix + eagle3" in texts
    assert "widened family" not in texts
    assert "Tokens per second, one request: code and questions" in texts


def test_the_picture_shows_the_loads_that_were_measured() -> None:
    drawn = picture({"rows": rows(**{"paceline": 40, "llama.cpp": 10})})
    assert "one request: code<" in drawn
    assert ">40<" in drawn
    assert "json<" in picture({"rows": rows(**{"paceline/plain/json": 40})})
