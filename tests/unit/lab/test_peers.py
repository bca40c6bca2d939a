"""Other engines: their processes, environments and files, and the figures of `paceline bench peers`."""

from __future__ import annotations

import io
import json
import math
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
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline import family
from paceline.cli import main
from paceline.launcher import StartError
from paceline_lab.bench import peer_comparison
from paceline_lab.bench.peer_comparison import METHODS, PeerBenchOptions, fastest, models, picture, ratios
from paceline_lab.bench.workloads import Workload
from paceline_lab.peers import peer_environments
from paceline_lab.peers.peer_environments import DONE, NotInstalledError, python_of
from paceline_lab.peers.peer_process import PeerError, PeerProcess
from tests.helpers.checkpoints import change_weights, save_checkpoint

ROOT = Path(__file__).parents[3]
REQUEST = {"method": "plain", "prompts": [[1, 5], [8]], "temperature": 0.0, "seed": 7, "max_tokens": 3}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PeerProcess]:
    argv = [sys.executable, "-m", "tests.unit.lab.toy_engine"]
    process = PeerProcess("toy", argv, {"PYTHONPATH": str(ROOT)}, tmp_path / "toy.log")
    yield process
    process.close()
    assert not Path(f"/proc/{process.pid}").exists()


def state(process: int) -> str:
    """A letter, as in proc(5). Z if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def becomes(process: int, letter: str) -> bool:
    """Waits: a signal takes its time to arrive."""
    for _ in range(500):
        if state(process) == letter:
            return True
        time.sleep(0.01)
    return False


def is_stopped(engine: PeerProcess) -> bool:
    return becomes(engine.pid, "T")


def test_an_engine_responds_line_by_line_and_is_stopped_between_requests(engine: PeerProcess) -> None:
    assert engine.start({}) == ["plain", "refusing", "dying", "slow"]
    assert is_stopped(engine)
    for _ in range(2):
        tokens, seconds = engine.generate(REQUEST)
        assert tokens == [[6, 7, 8], [9, 10, 11]]
        assert 0 < seconds < 1
        assert is_stopped(engine)
    _, seconds = engine.generate({**REQUEST, "method": "slow"})
    assert 0.2 <= seconds < 2, "it measures its own call"
    assert engine.figures() == {"loads": 1}
    assert is_stopped(engine)


def test_a_child_goes_on_while_its_engine_is_stopped(engine: PeerProcess) -> None:
    """Such as the process of the links to draft workers."""
    engine.start({"child": True})
    child = int(engine.figures()["child"])
    assert is_stopped(engine)
    assert becomes(child, "S")
    engine.close()
    assert becomes(child, "Z")


def test_an_engine_says_why_it_cannot_load(engine: PeerProcess) -> None:
    with pytest.raises(PeerError, match="nothing to load"):
        engine.start({"broken": True})


def test_an_engine_survives_a_refused_request(engine: PeerProcess) -> None:
    engine.start({})
    with pytest.raises(PeerError, match="toy: ValueError: it takes 1 at once"):
        engine.generate({**REQUEST, "method": "refusing"})
    assert engine.generate(REQUEST)[0][0] == [6, 7, 8]


def test_an_engine_stays_gone_after_it_died(engine: PeerProcess) -> None:
    engine.start({})
    for _ in range(2):
        with pytest.raises(PeerError, match=r"gone: see .*toy\.log"):
            engine.generate({**REQUEST, "method": "dying"})


def test_an_engine_is_killed_after_a_timeout(engine: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer would be taken for the next request's."""
    engine.start({})
    with monkeypatch.context() as patched:
        patched.setattr("paceline_lab.peers.peer_process.ANSWER_S", 0.05)
        began = time.perf_counter()
        with pytest.raises(PeerError, match="no answer in"):
            engine.generate({**REQUEST, "method": "slow", "max_tokens": 1})
        assert time.perf_counter() - began < 0.19
    with pytest.raises(PeerError, match="gone"):
        engine.generate(REQUEST)


# Environments


def make_environment(folder: Path, ends_with: str = "exit 0") -> None:
    """With a Python that writes its arguments to `calls`, and only does that."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {folder / "calls"}\n{ends_with}\n')
    python.chmod(0o755)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of an engine whose recipe is two commands."""
    monkeypatch.setattr(peer_environments, "RECIPES", {"toy": [["install", "one"], ["install", "two"]]})
    monkeypatch.setattr(peer_environments.venv, "create", lambda folder, with_pip: make_environment(folder))
    return tmp_path / "toy"


@pytest.mark.parametrize("earlier", ["nothing", "half made", "made by an older recipe"])
def test_an_environment_is_made_once(toy: Path, earlier: str) -> None:
    if earlier != "nothing":
        make_environment(toy)
    if earlier == "made by an older recipe":
        (toy / DONE).write_text("install an older one")
    for _ in range(2):
        assert python_of("toy", toy.parent) == toy / "bin" / "python"
    commands = [call.rpartition("--disable-pip-version-check ")[2] for call in (toy / "calls").read_text().splitlines()]
    assert commands == ["install one", "install two"]
    assert python_of("paceline", toy.parent) == Path(sys.executable), "an engine without a recipe"


def test_a_failed_installation_is_reported_in_one_line(toy: Path) -> None:
    make_environment(toy, "echo trying >&2; echo no route to the index >&2; exit 1")
    with pytest.raises(NotInstalledError, match=r"^toy cannot be installed: no route to the index$"):
        python_of("toy", toy.parent)
    assert not (toy / DONE).exists()


# Checkpoints and GGUF files


def test_models_have_no_end_of_text_and_are_written_anew(tmp_path: Path) -> None:
    paths = models("shipped", tmp_path / "models")
    for which in ("target", "draft"):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((Path(paths[which]) / name).read_text())["eos_token_id"] is None
    shipped, copied = (folder / "model.safetensors" for folder in (family.path(family.NAMES[0]), Path(paths["target"])))
    assert shipped.read_bytes() == copied.read_bytes()
    Path(paths["gguf"]).write_text("of an older model")
    models("shipped", tmp_path / "models")
    assert not Path(paths["gguf"]).exists()


def test_a_gguf_file_has_the_checkpoint_s_numbers(tmp_path: Path) -> None:
    """Read back with the package's own reader."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf: `make setup` does")
    from paceline_lab.peers.gguf_writer import write_gguf

    folder = save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="F32, not BF16"):
        write_gguf(folder, tmp_path / "model.gguf")
    change_weights(folder, lambda weights: {name: each.bfloat16() for name, each in weights.items()})
    weights = load_file(folder / "model.safetensors")
    write_gguf(folder, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("llama.attention.key_length").contents() == 16
    assert reader.get_field("llama.attention.layer_norm_rms_epsilon").contents() == pytest.approx(1e-6)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(reader.tensors) == len(weights)
    down = weights["model.layers.1.mlp.down_proj.weight"]
    assert tensors["blk.1.ffn_down.weight"].data.tobytes() == down.view(torch.uint8).numpy().tobytes()
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "BF16"
    assert np.array_equal(tensors["output_norm.weight"].data, weights["model.norm.weight"].float().numpy())
    for ours, theirs, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
        # Turning number i with number i + D / 2, then dotting, is turning neighbours of the reordered rows.
        weight = weights[f"model.layers.0.self_attn.{ours}.weight"]
        raw = torch.from_numpy(tensors[f"blk.0.{theirs}.weight"].data.copy())
        x = torch.randn(64, generator=torch.Generator().manual_seed(1))
        halves = (weight.float() @ x).view(heads, 2, -1)
        pairs = (raw.view(torch.bfloat16).view(weight.shape).float() @ x).view(heads, -1, 2)
        torch.testing.assert_close(pairs, halves.transpose(1, 2))


# Figures


def rows(speeds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows of `engine/method/load/batch` in the shipped size; `engine` alone: plain code."""
    made = []
    for key, speed in speeds.items():
        engine, method, load, batch = (*key.split("/"), *["plain", "code", "1"][key.count("/") :])
        labels = {"size": "shipped", "engine": engine, "method": method, "load": load, "batch": int(batch)}
        made.append(labels | {"tokens_per_s": speed})
    return made


BEST = "shipped: best / llama.cpp best, code"


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (
            {"paceline": 10, "paceline/ngram": 60, "llama.cpp": 20, "llama.cpp/prompt_lookup": 15},
            {BEST: 3, "shipped: speculative / plain, code": 6},  # the best method counts
        ),
        (
            {"paceline": 40, "paceline/plain/questions": 90, "llama.cpp": 10, "llama.cpp/plain/questions": 10},
            {"shipped: plain / llama.cpp plain": 6},  # the geometric mean over loads
        ),
        (
            {"paceline": 40, "llama.cpp": 10},
            {"shipped: plain / llama.cpp plain": None, BEST: 4},  # half of the loads was not measured
        ),
        (
            {f"{engine}/plain/{load}/8": 8 for engine in ("paceline", "vllm") for load in ("code", "questions")},
            {"shipped: best / vllm best, batch 8": 1, "shipped: best / vllm best, batch 1": None},
        ),
        (
            {f"paceline/{name}/code-0.8": x for name, x in {"plain": 100, "ngram": 96, "eagle3": 120}.items()},
            {"shipped: slowest method / plain, code-0.8": 0.96},  # where drafting does not pay
        ),
    ],
)
def test_ratios_compare_what_was_measured(speeds: Mapping[str, float], expected: Mapping[str, float | None]) -> None:
    found = ratios(rows(speeds))
    assert {name: found.get(name) for name in expected} == expected


def test_the_picture_shows_plain_and_best_of_every_engine() -> None:
    speeds = {
        f"{engine}/{method}/{load}": 10.0 * (1 + len(method))
        for engine in METHODS
        for method in METHODS[engine]
        for load in ("code", "questions")
    }
    drawn = picture({"rows": rows(speeds)})
    texts = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"paceline", "llama.cpp", "vllm", "transformers", "shipped family", "160 suffix + eagle3"} <= set(texts)
    assert "Tokens per second, one request: code and questions" in texts
    assert "widened family" not in texts
    assert "one request: json<" in picture({"rows": rows({"paceline/plain/json": 40})}), "a load that was measured"


# A run


class FakeProcess:
    """In place of an engine's process: 96 tokens in 1 s, with a draft in half of that."""

    requests: ClassVar[list[tuple[str, str, int]]] = []
    interrupted_batch = math.inf
    """A batch of so many prompts is interrupted."""

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
        if len(prompts) >= self.interrupted_batch:
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
    monkeypatch.setattr(peer_comparison, "PeerProcess", FakeProcess)

    def python_of(engine: str, folder: Path) -> Path:
        if engine == "vllm":
            raise NotInstalledError("vllm cannot be installed: no route")
        return Path(sys.executable)

    monkeypatch.setattr(peer_comparison, "python_of", python_of)
    monkeypatch.setattr(peer_comparison, "models", lambda size, folder: {"target": size, "draft": "d", "head": "h"})
    monkeypatch.setattr(peer_comparison, "prompts_of", lambda workload: [[1, 2], [3, 4], [5, 6], [7, 8]])
    monkeypatch.setattr(peer_comparison.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(peer_comparison, "workloads", lambda: [Workload("code completion", "", [])])
    monkeypatch.setattr(peer_comparison, "repetitive_workloads", list)
    monkeypatch.setattr(FakeProcess, "requests", [])
    return PeerBenchOptions(sizes=["shipped"], loads=["code"], repeats=2, folder=tmp_path / "peers")


def run(options: PeerBenchOptions) -> tuple[dict[str, Any], str]:
    shown = io.StringIO()
    return peer_comparison.run(Console(file=shown, width=160), options), shown.getvalue()


def test_every_method_is_measured_in_turns(faked: PeerBenchOptions) -> None:
    summary, shown = run(faked)
    measured = ("paceline", "llama.cpp")  # vllm is not installed, transformers does not start
    singles, batches = ([each[:2] for each in FakeProcess.requests if each[2] == batch] for batch in (1, 8))
    able = [(engine, method) for engine, methods in METHODS.items() for method in methods if engine in measured]
    assert singles[-8 * len(able) :] == able * 8, "two repetitions of four prompts"
    able = [each for each in able if each[0] == "paceline" or each[1] == "plain"]
    assert batches[-8 * len(able) :] == able * 8, "as many calls"
    speeds = {(row["engine"], row["method"], row["batch"]): row["tokens_per_s"] for row in summary["rows"]}
    assert speeds["paceline", "plain", 1] == 96 / 0.8
    assert speeds["paceline", "eagle3", 8] == 8 * 96 / 0.4
    assert ("llama.cpp", "prompt_lookup", 8) not in speeds
    assert all(row["equal"] == row["outputs"] == (4 if row["batch"] == 1 else 8) for row in summary["rows"])
    assert summary["threads"] == {f"{engine}, shipped": 2 for engine in measured}
    assert summary["ratios"][BEST] == 1
    assert "120" in shown
    assert "left out: transformers, shipped is gone" in shown
    assert "left out: vllm cannot be installed: no route" in shown
    assert sum("takes 1 at once" in reason for reason in summary["left_out"]) == 2


def test_numbers_of_threads_are_compared_in_turns_after_a_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is fastest, on a machine that gets faster from call to call and has one hiccup."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    calls: list[int] = []
    closed: list[int] = []

    class Timed(PeerProcess):
        def __init__(self, threads: int) -> None:
            self.threads = threads

        def generate(self, request: Mapping[str, Any]) -> tuple[list[list[int]], float]:
            calls.append(self.threads)
            if calls == [1, 1, 2]:
                return [], 0.01  # of the first round
            if calls == [1, 1, 2, 2, 1]:
                return [], 50.0  # the hiccup
            return [], {1: 1.0, 2: 1.2}[self.threads] / (1 + 0.1 * len(calls))

        def close(self) -> None:
            closed.append(self.threads)

    threads, process = fastest(Timed, "plain", [[1, 5], [8]])
    assert (threads, process.threads) == (1, 1)  # type: ignore[attr-defined]
    assert calls == [1, 1, 2, 2] * 3
    assert closed == [2]


def test_an_interruption_keeps_what_was_measured(faked: PeerBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "interrupted_batch", 2)
    summary, shown = run(faked)
    assert "interrupted" in shown
    assert {row["batch"] for row in summary["rows"]} == {1}


@pytest.mark.parametrize("wrong", [{"engines": ["sglang"]}, {"sizes": ["huge"]}, {"loads": ["poems"]}])
def test_unknown_names_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StartError, match="choose from"):
        PeerBenchOptions(**wrong)


def test_the_command_ends_with_one_line_of_json(faked: PeerBenchOptions, tmp_path: Path) -> None:
    svg = tmp_path / "peers.svg"
    options = ["--sizes", "shipped", "--workloads", "code", "--repeats", "1", "--environments", str(faked.folder)]
    result = CliRunner().invoke(main, ["bench", "peers", *options, "--svg", str(svg)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output.splitlines()[-1])["rows"]
    assert svg.read_text().startswith("<svg")
    assert CliRunner().invoke(main, ["bench", "peers", "--engines", "sglang"]).exit_code == 2


def test_baseline_is_peers_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[PeerBenchOptions] = []
    monkeypatch.setattr(peer_comparison, "run", lambda console, options: given.append(options) or {"rows": []})
    assert CliRunner().invoke(main, ["bench", "baseline"]).exit_code == 0
    assert (given[0].engines, given[0].sizes) == (["paceline", "transformers"], ["shipped"])
