"""The command line, and how its commands report results."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import main
from paceline.cli.deployment import DeploymentOptions
from paceline.cli.http_client import HttpCompletion
from paceline.cli.progress import progress
from paceline.cli.token_colours import ACCEPTED, BONUS, TokenPainter, served_summary
from paceline.doctor.prompt_file import CODE_FILES, code_prompts
from paceline.model_names import PUBLISHED, SMOLLM2
from paceline_lab.bench import control_plane
from paceline_lab.bench.bench_measurement import results_kept_on_interrupt
from paceline_lab.bench.demo import DemoRuns
from paceline_lab.bench.measured_stack import tree_pss_mb
from paceline_lab.bench.workloads import Workload, workloads
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation import capacity_plan as planning
from paceline_lab.simulation.pair_simulation import SimulatedPair
from paceline_lab.training.family.stdlib_corpus import HELD_OUT

COMMANDS = ("serve", "gateway", "target", "draft", "chat", "demo", "bench", "train", "plan", "doctor", "download")


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from paceline.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'transformers', 'grpc', 'redis', 'httpx'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("[]")
    assert all(f" {command} " in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--speculative-config", "{"], "is not valid JSON"),
        (["serve", "--speculative-config", '{"metod": "ngram"}'], "metod: is not known here"),
        (["serve", "--speculative-config", '{"method": "draft_model"}'], "needs `model`"),
        (["serve", "--engine-config", '{"threads": 0}'], "threads: must be at least 1, not 0"),
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--target-workers", "0"], "target-workers"),
        (["chat", "--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["chat", "--url", "http://127.0.0.1:1"], "paceline serve"),
        (["chat", "/nowhere"], "/nowhere cannot be loaded: no model at /nowhere"),
        (["chat", "pydoc-eagle3"], "pydoc-eagle3 cannot be loaded"),
        (["download", "llama"], "llama is no published model: there are smollm2-135m-instruct, "),
        (["doctor", "--prompts", "/nowhere.txt"], "cannot be read"),
        (["doctor", "--model", "/nowhere"], "no model at /nowhere"),
        (["doctor", "--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())  # typer prints it in a box


def test_a_chat_without_a_server() -> None:
    questions = "What does json.dumps do?\nAnd json.loads?\n"
    result = CliRunner().invoke(main, ["chat", "pydoc", "--max-tokens", "9", "--temperature", "0"], input=questions)
    assert result.exit_code == 0
    assert len(re.findall(r"9 tokens, \d+ tokens/s", result.output)) == 2


def test_what_cannot_be_downloaded_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["download", "smollm2-135m-instruct", "--or", "pydoc"])
    assert (result.exit_code, result.stdout) == (0, "pydoc\n")
    assert "pydoc takes its place" in result.stderr
    assert CliRunner().invoke(main, ["serve", "smollm2-135m-instruct"]).exit_code == 2


def test_without_a_name_a_published_model_is_served_or_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that is named is not looked for; a published one in the cache folder is not asked for again."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    served: list[str] = []

    def stop(options: DeploymentOptions) -> None:
        served.append(options.model)
        raise typer.Exit

    monkeypatch.setattr("paceline.cli.serve_command.plan_deployment", stop)
    monkeypatch.setattr("paceline_lab.bench.demo.run", lambda _, model: {"identical": True, "model": model})

    def words_of(*command: str) -> str:
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0
        return result.output

    assert words_of("serve", "mine.gguf") == ""
    assert "pydoc takes its place" in words_of("serve")
    model = PUBLISHED[SMOLLM2]
    (tmp_path / "models").mkdir(exist_ok=True)
    with (tmp_path / "models" / model.file).open("wb") as file:
        file.truncate(model.size)
    assert words_of("serve") == ""
    for options in (("--engine", "vllm"), ("--tensor-parallel-size", "2")):  # neither takes a GGUF file
        assert words_of("serve", *options) == ""
    assert served == ["mine.gguf", "pydoc", SMOLLM2, "pydoc", "pydoc"]
    assert [json.loads(words_of("demo", *name))["model"] for name in ((), ("mine.gguf",))] == [SMOLLM2, "mine.gguf"]


def test_ctrl_c_ends_the_measurement_only() -> None:
    console = Console(file=io.StringIO())
    with results_kept_on_interrupt(console), progress(console, "parts", 2) as done:
        done()
        raise KeyboardInterrupt
    assert "interrupted: what follows is what was measured" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_plan_follows_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LOADS", (1, 4, 16))
    monkeypatch.setattr(planning, "TOKENS", 40)
    options = (
        "--target-step-ms 12 --target-knee-rows 32 --draft-step-ms 4 --draft-knee-rows 8 --agreement 0.7 --rtt-ms 3 "
        "--overhead-ms 1 --requests-per-s 56 --output-tokens 50 --token-ms 13.5 --prompt-tokens 20 "
        "--link-gbit-s 0.5 --hidden-size 1024 --hidden-layers 3"
    )
    result = CliRunner().invoke(main, ["plan", *options.split()], env={"COLUMNS": "120"})
    target = TimedModelConfig(step_ms=12, knee_rows=32, overhead_ms=1)
    draft = TimedModelConfig(step_ms=4, knee_rows=8, agreement=0.7)
    pair = SimulatedPair(target, draft, rtt_s=0.003, link_bytes_per_s=62.5e6, state_bytes=6144)
    planned = planning.plan_capacity(pair, planning.PlannedDemand(56, 50, 13.5, prompt_tokens=20))
    assert result.exit_code == 0
    *shown, report = result.output.splitlines()
    expected = dataclasses.asdict(planned)
    for load, each in zip(expected["loads"], planned.loads, strict=True):
        load["token_ms"] = pytest.approx(each.token_ms, abs=0.005)
        load["link_mbit_s"] = pytest.approx(each.link_mbit_s, abs=0.005)
    assert json.loads(report) == expected
    rows = [row.replace("│", " ").split() for row in shown if row.startswith("│")]
    assert len(rows) == len(planned.formulas) + len(planned.loads)
    assert f"speculation pays up to {planned.pays_up_to} requests per target" in shown
    assert shown[-1].startswith(f"{planned.target_workers} target workers, {planned.draft_workers} draft workers: ")
    result = CliRunner().invoke(main, ["plan", "--token-ms", "0.5"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "0.5 ms needs a faster target, a better draft, or a shorter round trip" in result.stderr


def test_a_completion_sums_its_chunks() -> None:
    answer = HttpCompletion()
    answer.take({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    entry = {"token_ids": [5, 6], "accepted": [True, False], "text_offset": [0, 2], "finish_reason": None}
    answer.take({"choices": [{"delta": {"content": "abcd"}, **entry}]})
    answer.take({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    answer.take({"choices": [], "speculation": {"verifications": 1}, "timings": {"total_s": 0.5}})
    assert (answer.text, answer.tokens, answer.finish_reason) == ("abcd", [5, 6], "stop")


def test_text_takes_the_colour_of_its_token() -> None:
    """Text may lag behind its token: a chunk's characters are not those of the chunk's tokens."""

    def expected(*parts: tuple[str, str]) -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system="standard", width=80)
        for text, style in parts:
            console.print(text, style=style, end="", markup=False, highlight=False)
        return out.getvalue()

    painted = io.StringIO()
    painter = TokenPainter(Console(file=painted, force_terminal=True, color_system="standard", width=80))
    answer = HttpCompletion("ab", [1, 2], [True, False], [0, 2])
    painter(answer)
    assert painted.getvalue() == expected(("ab", ACCEPTED))
    answer.text, answer.accepted, answer.offsets = "abcde", [True, False, True], [0, 2, 4]
    painter(answer)
    assert painted.getvalue() == expected(("ab", ACCEPTED), ("cd", BONUS), ("e", ACCEPTED))


def test_a_summary_of_plain_and_speculative_decoding() -> None:
    answer = HttpCompletion(tokens=[1, 2, 3], timings={"total_s": 1.0}, speculation={"verifications": 0})
    answer.accepted = [False, True, False]
    assert served_summary(answer) == "3 tokens, 3 tokens/s, decoded plainly"
    answer.speculation = {"verifications": 2}
    assert "1 accepted, acceptance length 0.50" in served_summary(answer)


def test_prompts_are_text_that_training_never_saw() -> None:
    assert set(CODE_FILES) <= set(HELD_OUT)
    for prompt in code_prompts():
        assert prompt.splitlines()[-1].lstrip().startswith("def ")
        assert prompt.endswith(":\n")
    assert all(workload.bodies for workload in workloads())


def test_the_demo_notices_one_different_token() -> None:
    def completion(*tokens: int) -> HttpCompletion:
        stats = {"verifications": 2, "accepted_tokens": 3}
        return HttpCompletion(tokens=list(tokens), wall_s=2.0, timings={"total_s": 1.0}, speculation=stats)

    runs = DemoRuns(Workload("code", "/", []), 0.0)
    runs.plain.add(0, completion(1, 2))
    runs.speculative.add(0, completion(1, 2))
    assert runs.same == runs.outputs == 1
    row = runs.row()
    assert (row["speedup"], row["acceptance_length"]) == (1.0, 1.5)
    assert (row["plain_tokens_per_s"], row["plain_tokens_per_s_http"]) == (2.0, 1.0)
    runs.speculative.add(0, completion(1, 3))
    assert (runs.same, runs.outputs) == (0, 1)


def test_the_control_plane_notices_a_different_text() -> None:
    recording = control_plane.Recording(
        "1 2", 1.0, b'data: {"choices": [{"text": "3 4", "finish_reason": null}]}\n\ndata: [DONE]\n\n'
    )
    [completion] = control_plane.checked([recording], {"1 2": "3 4"})
    assert completion.text == "3 4"
    with pytest.raises(control_plane.OutputDiffersError, match="after '1 2'"):
        control_plane.checked([recording], {"1 2": "3 5"})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_includes_child_processes() -> None:
    """A large child: what this process has may change meanwhile."""
    hoard = "import sys; kept = b'x' * 200_000_000; print('ready', flush=True); sys.stdin.read()"
    before = tree_pss_mb()
    with subprocess.Popen(
        [sys.executable, "-c", hoard], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = tree_pss_mb()
        child.communicate()
    assert before is not None
    assert during is not None
    assert 150 < during - before < 300
