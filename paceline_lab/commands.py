"""The lab's commands: `paceline demo`, `train`, `bench` and `plan`. Heavy imports are inside the functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import DEFAULT_MODEL, PASS_ON, become, start_errors
from paceline.family import NAMES

if TYPE_CHECKING:
    from rich.console import Console

train = typer.Typer(help="Train heads for a model of yours, or the models that ship again.", no_args_is_help=True)
PASS_SIZES = "shipped, widened, 'random 8B', 'random Qwen3.5-0.8B', 'random Qwen3.5-0.8B float32', or a model"
bench = typer.Typer(help="Measure on this machine; each ends with one JSON line.", no_args_is_help=True)


def add_to(main: typer.Typer) -> None:
    """Add every command of the lab."""
    main.command()(demo)
    main.add_typer(train, name="train")
    main.add_typer(bench, name="bench")
    main.command()(plan)


def _measured(measure: Callable[[Console], dict[str, Any]], *, quiet: bool = False) -> dict[str, Any]:
    """Run a benchmark and print its JSON line. Exits with code 2 if something cannot start."""
    from rich.console import Console

    with start_errors():
        result = measure(Console(quiet=quiet, highlight=False))
    typer.echo(json.dumps(result))
    return result


def demo(
    model: Annotated[str | None, typer.Argument(help=f"What act one serves. {DEFAULT_MODEL}")] = None,
    *,
    json_only: Annotated[bool, typer.Option("--json", help="Print nothing but the last line.")] = False,
) -> None:
    """Show and measure it: starts everything, compares plain with speculative decoding, prints one JSON line."""
    from paceline.cli.model_download import default_model, download_models
    from paceline_lab.bench import demo as command

    def measure(console: Console) -> dict[str, Any]:
        name = model or default_model()
        download_models(name)
        return command.run(console, name)

    result = _measured(measure, quiet=json_only)
    raise typer.Exit(0 if result["identical"] else 1)


@train.command(context_settings=PASS_ON)
def family(context: typer.Context) -> None:
    """Train the shipped target, its draft and its heads from the standard library's sources."""
    become("paceline_lab.training.train_family", context.args)


def _trains(method: str, what: str, short: str | None = None) -> None:
    def head(context: typer.Context) -> None:
        become("paceline_lab.training.heads.train_head", [method, *context.args])

    train.command(method, context_settings=PASS_ON, help=f"Train {what} for a target, on text of yours.")(head)
    if short is not None:
        train.command(short, context_settings=PASS_ON, hidden=True)(head)


_trains("eagle3", "an EAGLE-3 head")
_trains("eagle", "an EAGLE-1 head")
_trains("medusa", "Medusa heads")
_trains("mlp_speculator", "an MLP speculator", "mlp")
_trains("mtp", "a multi-token-prediction layer")
_trains("draft_model", "a small draft model", "draft")
_trains("pard", "a parallel draft model")


@bench.command()
def baseline() -> None:
    """This engine beside transformers: `bench peers` with these two engines, at the shipped size."""
    peers(engines=["paceline", "transformers"], sizes=["shipped"])


Methods = Annotated[list[str] | None, typer.Argument(help="names of methods, such as eagle3; all by default")]


Device = Annotated[str, typer.Option(help="Where the models compute, such as cuda:0.")]


@bench.command()
def methods(
    only: Methods = None,
    device: Device = "cpu",
    model: Annotated[str, typer.Option(help="The target: pydoc, or pydoc-hybrid, with states.")] = NAMES[0],
    times: Annotated[int, typer.Option(help="Of pydoc-hybrid's width, by zeros: 4 or 16.")] = 1,
) -> None:
    """Acceptance, by depth, and speed-up of every drafting method, on four workloads."""
    from paceline_lab.bench import method_comparison
    from paceline_lab.training.family.widened_family import copy_of

    def measure(console: Console) -> dict[str, Any]:
        with copy_of(model, times) as target:
            return method_comparison.run(console, only or (), device, target=target)

    _exit_if_equal(_measured(measure))


@bench.command()
def passes(
    device: Device = "cpu",
    sizes: Annotated[list[str] | None, typer.Option(help=PASS_SIZES)] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Positions before the rows.")] = None,
) -> None:
    """Milliseconds of the target's passes, by their number of rows."""
    from paceline_lab.bench import pass_times

    _measured(lambda console: pass_times.run(console, device, sizes or ("shipped", "widened"), context))


@bench.command()
def gpu(
    device: Device = "cuda:0",
    budget: Annotated[float, typer.Option(min=1, help="Seconds for all steps together.")] = 570.0,
    only: Annotated[str, typer.Option(help="Steps with commas between them; all by default.")] = "",
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("gpu.json"),
) -> None:
    """Every test and figure that takes a GPU, in one JSON file; see docs/gpu.md."""
    from paceline_lab.bench import gpu_run

    names = [name.strip() for name in only.split(",") if name.strip()]
    report = _measured(lambda console: gpu_run.run(console, device, budget, names, output))
    raise typer.Exit(0 if all(step["exit_code"] == 0 for step in report["steps"].values()) else 1)


@bench.command()
def grammar(only: Methods = None) -> None:
    """The same on JSON extraction, where a schema binds every output: speculation over plain decoding."""
    from paceline_lab.bench import method_comparison

    _exit_if_equal(_measured(lambda console: method_comparison.run_with_grammar(console, only or ())))


def _exit_if_equal(result: dict[str, Any]) -> None:
    """End with code 0 if all outputs were those of plain decoding, else with 1."""
    raise typer.Exit(0 if all(row["identical"] for row in result["rows"]) else 1)


@bench.command()
def peers(
    engines: Annotated[list[str] | None, typer.Option(help="paceline, llama.cpp, vllm or transformers")] = None,
    sizes: Annotated[list[str] | None, typer.Option(help="shipped or widened; or real: published models")] = None,
    workloads: Annotated[list[str] | None, typer.Option(help="code, code-0.8, questions, edits or json")] = None,
    models: Annotated[list[str] | None, typer.Option(help="real: as `paceline download` lists them")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each prompt.")] = 3,
    environments: Annotated[Path, typer.Option(help="Where the other engines are installed.")] = Path(".venv-peers"),
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the result to this file.")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="real: ten minutes.")] = False,
) -> None:
    """This engine beside llama.cpp, vLLM and transformers, at two sizes; name several by repeating an option."""
    from paceline_lab.bench import peer_comparison, real_comparison

    def measure(console: Console) -> dict[str, Any]:
        if sizes == ["real"]:
            named: dict[str, Any] = {"models": models} if models else {}
            return real_comparison.run(
                console, real_comparison.RealBenchOptions(**named, quick=quick, repeats=repeats, folder=environments)
            )
        given = {"engines": engines, "sizes": sizes, "loads": workloads}
        chosen = {name: names for name, names in given.items() if names}
        options = peer_comparison.PeerBenchOptions(**chosen, repeats=repeats, folder=environments)
        return peer_comparison.run(console, options)

    result = _measured(measure)
    if svg is not None:
        svg.write_text(peer_comparison.picture(result))


@bench.command()
def vllm(
    sizes: Annotated[list[str] | None, typer.Option(help="shipped or widened")] = None,
    workloads: Annotated[list[str] | None, typer.Option(help="code, code-0.8, questions, edits or json")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="as the table calls them; all by default")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each prompt.")] = 3,
    python: Annotated[Path, typer.Option(help="Of an environment with vLLM.")] = Path(".venv-vllm/bin/python"),
    *,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile the model.")] = False,
) -> None:
    """VLLM with our draft pool beside vLLM with its own speculation, on the CPU."""
    from paceline_lab.bench import vllm_comparison

    def measure(console: Console) -> dict[str, Any]:
        given = {"sizes": sizes, "loads": workloads, "methods": methods}
        chosen: dict[str, Any] = {name: names for name, names in given.items() if names}
        options = vllm_comparison.VllmBenchOptions(python, **chosen, repeats=repeats, eager=eager)
        return vllm_comparison.run(console, options)

    _measured(measure)


@bench.command()
def profile(
    sizes: Annotated[list[str] | None, typer.Option(help="shipped or widened; both by default")] = None,
    requests: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; 1, 8, 32 and 100.")] = None,
    method: Annotated[str, typer.Option(help="How to draft, as `bench methods` calls it.")] = "draft_model",
    threads: Annotated[int | None, typer.Option(min=1, help="For the model; one per core by default.")] = None,
    device: Device = "cpu",
    before: Annotated[Path | None, typer.Option(help="An earlier run, to draw beside this one.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the result to this file.")] = None,
) -> None:
    """The parts of an engine step, beside what the machine could do."""
    from paceline_lab.bench import step_profile

    with start_errors():
        earlier = step_profile.read(before) if before else None
    result = _measured(
        lambda console: step_profile.run(
            console, sizes or step_profile.SIZES, requests or step_profile.REQUESTS, method, threads, device
        )
    )
    if svg is not None:
        svg.write_text(step_profile.picture(result, earlier))


@bench.command()
def control_plane(
    streams: Annotated[int, typer.Option(min=1, help="Clients that stream at once.")] = 16,
) -> None:
    """Gateway, target and draft with the model's compute taken out."""
    from paceline_lab.bench import control_plane

    _measured(lambda console: dataclasses.asdict(control_plane.run(console, streams)))


@bench.command()
def overlap() -> None:
    """Streamed against lock-step drafting and plain decoding, on simulated accelerators and a slow network."""
    from paceline_lab.bench import overlap

    _measured(lambda console: overlap.run(console).as_json())


@bench.command()
def hostile() -> None:
    """What one client can do to the others: costly grammars, huge prompts, many choices, malformed messages."""
    from paceline_lab.bench import hostile_clients

    _measured(lambda console: dataclasses.asdict(hostile_clients.run(console)))


@bench.command()
def scaling() -> None:
    """CPU time of the control plane per token, up to ten thousand requests, and the number of processes it implies."""
    from paceline_lab.bench import scaling

    _measured(lambda console: dataclasses.asdict(scaling.run(console)))


def plan(
    *,
    target_step_ms: Annotated[float, typer.Option(min=0.01, help="A pass of few rows through the target.")] = 10.0,
    target_knee_rows: Annotated[int, typer.Option(min=1, help="Rows from which on a pass takes longer.")] = 128,
    draft_step_ms: Annotated[float, typer.Option(min=0.01, help="A pass of few rows through the draft.")] = 1.0,
    draft_knee_rows: Annotated[int, typer.Option(min=1, help="Rows from which on a pass takes longer.")] = 128,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="How often the draft's choice is drawn.")] = 0.8,
    rtt_ms: Annotated[float, typer.Option(min=0.0, help="Round trip between target and draft.")] = 0.5,
    link_gbit_s: Annotated[float, typer.Option(min=0.001, help="Bandwidth between target and draft.")] = 10.0,
    hidden_size: Annotated[int, typer.Option(min=1, help="The target's: of what a head such as EAGLE-3 reads.")] = 4096,
    hidden_layers: Annotated[int, typer.Option(min=0, help="Layers that the head reads, in bfloat16; 0: none.")] = 0,
    overhead_ms: Annotated[float, typer.Option(min=0.0, help="Of each step, outside the model.")] = 0.5,
    requests_per_s: Annotated[float, typer.Option(min=0.001, help="Requests that arrive.")] = 5.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=16_000, help="Tokens per prompt, in no cache.")] = 3,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 200,
    token_ms: Annotated[float, typer.Option(min=0.01, help="Goal: time per output token.")] = 20.0,
) -> None:
    """How many workers a load needs, how fast they are, and when speculation stops paying: simulated, not guessed."""
    from rich.console import Console

    from paceline_lab.fake_models.timed_config import TimedModelConfig
    from paceline_lab.simulation import plan_command as command
    from paceline_lab.simulation.capacity_plan import CannotPlanError, PlannedDemand
    from paceline_lab.simulation.pair_simulation import SimulatedPair

    pair = SimulatedPair(
        TimedModelConfig(step_ms=target_step_ms, knee_rows=target_knee_rows, overhead_ms=overhead_ms),
        TimedModelConfig(step_ms=draft_step_ms, knee_rows=draft_knee_rows, agreement=agreement),
        rtt_ms / 1e3,
        link_bytes_per_s=link_gbit_s * 1e9 / 8,
        state_bytes=hidden_layers * hidden_size * 2,
    )
    demand = PlannedDemand(requests_per_s, output_tokens, token_ms, prompt_tokens)
    try:
        planned = command.run(Console(highlight=False), pair, demand)
    except CannotPlanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(planned))
