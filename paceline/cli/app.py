"""The commands. Heavy imports stand inside them, so that `paceline --help` answers at once."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import paceline
from paceline.cli.keys import keys
from paceline.cli.options import Config, Engine, Speculation, Speculations, start_errors
from paceline.config import EngineConfig

main = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(paceline.__version__)
        raise typer.Exit


@main.callback()
def options(
    *, version: Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True)] = False
) -> None:
    """The same tokens, sooner: speculative decoding over many processes."""


@main.command()
def serve(
    model: Annotated[str, typer.Argument(help="A folder with a checkpoint, or the name of a shipped model.")] = "pydoc",
    speculative_config: Speculation = None,
    engine_config: Engine = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 for any.")] = 8000,
    draft_workers: Annotated[int, typer.Option(min=0, help="Draft workers to run.")] = 1,
    target_workers: Annotated[int, typer.Option(min=1, help="Target workers to run.")] = 1,
    redis_url: Annotated[str | None, typer.Option(help="A Redis to use; without it, one of our own.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Processes that share the target.")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="Ask clients for a key: see `paceline keys`.")] = None,
    *,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")] = False,
    config: Config = None,
) -> None:
    """Serve a model on this machine: gateway, targets, drafts and Redis, restarted when they die."""
    from paceline.cli import deployment
    from paceline.cli import serve as command

    engine = engine_config or EngineConfig()
    if tensor_parallel_size is not None:
        engine = engine.model_copy(update={"tensor_parallel_size": tensor_parallel_size})
    wish = deployment.Wish(
        model,
        speculative_config,
        _trusting(engine, trust_remote_code),
        host,
        port,
        draft_workers,
        target_workers,
        served_model_name,
        api_keys,
    )
    with start_errors():
        code = command.serve(deployment.plan(wish), redis_url)
    raise typer.Exit(code)


def _trusting(engine: EngineConfig, trust: bool) -> EngineConfig:
    return engine.model_copy(update={"trust_remote_code": True}) if trust else engine


@main.command()
def doctor(
    model: Annotated[str, typer.Option(help="The target: a folder, or the name of a shipped model.")] = "pydoc",
    speculative_config: Speculations = None,
    prompts: Annotated[Path | None, typer.Option(help=".txt, one a line; or .jsonl, prompt or messages.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask a running Paceline server instead.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="0 and 0.8 by default.")] = None,
    engine_config: Engine = None,
) -> None:
    """Measure every way to draft that fits, on your prompts: what is accepted, what it is worth, what is wrong."""
    from rich.console import Console

    from paceline.cli import doctor as command

    wish = command.Wish(
        model,
        speculative_config or (),
        prompts,
        url,
        max_tokens,
        temperature or (0.0, 0.8),
        engine_config or EngineConfig(),
    )
    with start_errors():
        told = command.run(Console(highlight=False), wish)
    typer.echo(json.dumps(told))
    raise typer.Exit(0 if told["identical"] else 1)


@main.command()
def demo(
    *,
    json_only: Annotated[bool, typer.Option("--json", help="Print nothing but the last line.")] = False,
) -> None:
    """Show and measure it: starts everything, compares plain with speculative decoding, prints one JSON line."""
    from rich.console import Console

    from paceline.cli import demo as command

    with start_errors():
        result = command.run(Console(quiet=json_only, highlight=False))
    typer.echo(json.dumps(dataclasses.asdict(result)))
    raise typer.Exit(0 if result.identical else 1)


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Every argument, `--help` too, is the other program's."""


@main.command(context_settings=PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run one gateway: HTTP and gRPC in front of the targets that Redis knows."""
    _become("services.gateway", context.args)


@main.command(context_settings=PASS_ON)
def target(context: typer.Context) -> None:
    """Run one target worker; with --ray auto, local or an address: replicas of it on a Ray cluster."""
    on_ray = any(argument.partition("=")[0] == "--ray" for argument in context.args)
    _become("services.target.pool" if on_ray else "services.target", context.args)


@main.command(context_settings=PASS_ON)
def rank(context: typer.Context) -> None:
    """Run one of the processes that share a worker's model: any but rank 0, which is the worker."""
    _become("services.rank", context.args)


@main.command(context_settings=PASS_ON)
def draft(context: typer.Context) -> None:
    """Run one draft worker."""
    _become("services.draft", context.args)


def _become(module: str, arguments: list[str]) -> None:
    """Replace this process, so that signals and exit code are the service's own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


main.add_typer(keys, name="keys")

train = typer.Typer(help="Train heads for a model of yours, or the models that ship again.", no_args_is_help=True)
main.add_typer(train, name="train")


@train.command(context_settings=PASS_ON)
def family(context: typer.Context) -> None:
    """Train the shipped target, its draft and its heads from the standard library's sources."""
    _become("paceline.training.family", context.args)


def _trains(method: str, what: str, short: str | None = None) -> None:
    def head(context: typer.Context) -> None:
        _become("paceline.training.heads", [method, *context.args])

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


bench = typer.Typer(help="Measure on this machine; each ends with one JSON line.", no_args_is_help=True)
main.add_typer(bench, name="bench")


@bench.command()
def baseline() -> None:
    """This engine beside transformers: generate, assisted generation, prompt lookup."""
    from rich.console import Console

    from paceline.cli import bench_baseline

    typer.echo(json.dumps(bench_baseline.run(Console(highlight=False))))


@bench.command()
def methods(
    only: Annotated[list[str] | None, typer.Argument(help="names of methods, such as eagle3; all by default")] = None,
) -> None:
    """Every way to draft: what is accepted, by depth, and what it is worth, on four workloads."""
    from rich.console import Console

    from paceline.cli import bench_methods

    with start_errors():
        result = bench_methods.run(Console(highlight=False), only or ())
    typer.echo(json.dumps(result))
    raise typer.Exit(0 if all(row["identical"] for row in result["rows"]) else 1)


@bench.command()
def peers(
    engines: Annotated[list[str] | None, typer.Option(help="paceline, llama.cpp, vllm or transformers")] = None,
    sizes: Annotated[list[str] | None, typer.Option(help="shipped or widened")] = None,
    workloads: Annotated[list[str] | None, typer.Option(help="code, code-0.8, questions, edits or json")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each prompt is asked.")] = 3,
    environments: Annotated[Path, typer.Option(help="Where the others are installed.")] = Path(".venv-peers"),
    svg: Annotated[Path | None, typer.Option(help="A file for a picture of it.")] = None,
) -> None:
    """This engine beside llama.cpp, vLLM and transformers, at two sizes; name several by repeating an option."""
    from rich.console import Console

    from paceline.cli import bench_peers

    given = {"engines": engines, "sizes": sizes, "loads": workloads}
    with start_errors():
        wish = bench_peers.Wish(
            **{name: names for name, names in given.items() if names}, repeats=repeats, folder=environments
        )
        result = bench_peers.run(Console(highlight=False), wish)
    if svg is not None:
        svg.write_text(bench_peers.picture(result))
    typer.echo(json.dumps(result))


@bench.command()
def profile(
    sizes: Annotated[list[str] | None, typer.Option(help="shipped or widened; both by default")] = None,
    requests: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; 1, 8, 32 and 100.")] = None,
    method: Annotated[str, typer.Option(help="How to draft, as `bench methods` calls it.")] = "draft_model",
    threads: Annotated[int | None, typer.Option(min=1, help="For the model; one per core by default.")] = None,
    before: Annotated[Path | None, typer.Option(help="An earlier run, to draw beside this one.")] = None,
    svg: Annotated[Path | None, typer.Option(help="A file for a picture of it.")] = None,
) -> None:
    """A step taken apart: where the time goes, beside what the machine could do."""
    from rich.console import Console

    from paceline.cli import bench_profile

    with start_errors():
        earlier = bench_profile.read(before) if before else None
        result = bench_profile.run(
            Console(highlight=False),
            sizes or bench_profile.SIZES,
            requests or bench_profile.REQUESTS,
            method,
            threads,
        )
    if svg is not None:
        svg.write_text(bench_profile.picture(result, earlier))
    typer.echo(json.dumps(result))


@bench.command()
def control_plane(
    streams: Annotated[int, typer.Option(min=1, help="Clients that stream at once.")] = 16,
) -> None:
    """Gateway, target and draft with the model's compute taken out."""
    from rich.console import Console

    from paceline.cli import bench_control_plane

    with start_errors():
        result = bench_control_plane.run(Console(highlight=False), streams)
    typer.echo(json.dumps(dataclasses.asdict(result)))


@bench.command()
def overlap() -> None:
    """Streamed against lock-step drafting and plain decoding, on simulated accelerators and a slow network."""
    from rich.console import Console

    from paceline.cli import bench_overlap

    with start_errors():
        result = bench_overlap.run(Console(highlight=False))
    typer.echo(json.dumps(result.told()))


@bench.command()
def hostile() -> None:
    """What one client can do to the others: costly grammars, huge prompts, many choices, bytes that are no message."""
    from rich.console import Console

    from paceline.cli import bench_hostile

    with start_errors():
        result = bench_hostile.run(Console(highlight=False))
    typer.echo(json.dumps(dataclasses.asdict(result)))


@bench.command()
def scaling() -> None:
    """What the control plane costs per token, up to ten thousand requests, and how many processes that makes."""
    from rich.console import Console

    from paceline.cli import bench_scaling

    with start_errors():
        result = bench_scaling.run(Console(highlight=False))
    typer.echo(json.dumps(dataclasses.asdict(result)))


@main.command()
def plan(
    *,
    target_step_ms: Annotated[float, typer.Option(min=0.01, help="A pass of few rows through the target.")] = 10.0,
    target_knee_rows: Annotated[int, typer.Option(min=1, help="Rows from which on a pass takes longer.")] = 128,
    draft_step_ms: Annotated[float, typer.Option(min=0.01, help="A pass of few rows through the draft.")] = 1.0,
    draft_knee_rows: Annotated[int, typer.Option(min=1, help="Rows from which on a pass takes longer.")] = 128,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="How often the draft's choice is drawn.")] = 0.8,
    rtt_ms: Annotated[float, typer.Option(min=0.0, help="Round trip between target and draft.")] = 0.5,
    overhead_ms: Annotated[float, typer.Option(min=0.0, help="Of each step, outside the model.")] = 0.5,
    requests_per_s: Annotated[float, typer.Option(min=0.001, help="Requests that arrive.")] = 5.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 200,
    token_ms: Annotated[float, typer.Option(min=0.01, help="Goal: time per output token.")] = 20.0,
) -> None:
    """How many workers it takes, how fast it gets, and when speculation stops paying: simulated, not guessed."""
    from rich.console import Console

    from paceline.cli import plan as command
    from paceline.simulation.pair import Pair
    from paceline.simulation.plan import CannotPlanError, Demand
    from paceline.timed import TimedModel

    pair = Pair(
        TimedModel(step_ms=target_step_ms, knee_rows=target_knee_rows, overhead_ms=overhead_ms),
        TimedModel(step_ms=draft_step_ms, knee_rows=draft_knee_rows, agreement=agreement),
        rtt_ms / 1e3,
    )
    try:
        planned = command.run(Console(highlight=False), pair, Demand(requests_per_s, output_tokens, token_ms))
    except CannotPlanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(planned))


@main.command()
def chat(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
) -> None:
    """Talk to a running server, and see which tokens were guessed."""
    from rich.console import Console

    from paceline.cli import chat as command

    with start_errors():
        command.run(Console(highlight=False), url, {"temperature": temperature, "max_tokens": max_tokens})
