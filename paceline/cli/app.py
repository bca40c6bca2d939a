"""The commands. Heavy imports are inside them, so that `paceline --help` is fast."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

import paceline
from paceline.cli.keys_command import keys
from paceline.cli.options import (
    DEFAULT_MODEL,
    PASS_ON,
    Config,
    Engine,
    EngineName,
    Speculation,
    Speculations,
    VllmSettings,
    become,
    start_errors,
)
from paceline.config import EngineConfig, SamplingParams
from paceline.config.engine_config import Quantization
from paceline.config.sampling_params import GenerationConfig
from paceline.config.vllm_options import VllmOptions

MODEL = "A folder with a checkpoint, a GGUF file, or a name: of a shipped model, or one of `paceline download`."

main = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(paceline.__version__)
        raise typer.Exit


@main.callback()
def options(
    *, version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False
) -> None:
    """The same tokens, sooner: speculative decoding over many processes."""


@main.command()
@start_errors()
def serve(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL} {DEFAULT_MODEL}")] = None,
    speculative_config: Speculation = None,
    engine_config: Engine = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 for any.")] = 8000,
    draft_workers: Annotated[int, typer.Option(min=0, help="Draft workers to run.")] = 1,
    target_workers: Annotated[int, typer.Option(min=1, help="Target workers to run.")] = 1,
    redis_url: Annotated[str | None, typer.Option(help="A Redis to use; without it, one of our own.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Processes that share the target.")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="Require API keys: see `paceline keys`.")] = None,
    engine: Annotated[EngineName, typer.Option(help="What computes for the targets.")] = "paceline",
    vllm_options: VllmSettings = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A file with a chat template, or one of the model's own by name.")
    ] = None,
    tool_call_parser: Annotated[str, typer.Option(help="How the model writes tool calls; auto: by template.")] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help="How the model marks reasoning; auto: by template.")] = "auto",
    generation_config: Annotated[
        GenerationConfig, typer.Option(help="Sampling defaults: the model's, or none.")
    ] = "auto",
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="Send traces to this OTLP collector.")] = None,
    *,
    demo_page: Annotated[
        bool, typer.Option("--demo-page", help="A button on the page kills a draft worker: the text goes on.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")] = False,
    quantization: Annotated[Quantization | None, typer.Option(help="Pack weights at load, for CPUs.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare native code with transformers first.")] = False,
    config: Config = None,
) -> None:
    """Serve a model on this machine: gateway, targets, drafts and Redis, restarted when they die."""
    from paceline.cli import deployment
    from paceline.cli import serve_command as command
    from paceline.cli.model_download import default_model, download_models

    given: dict[str, object] = {"trust_remote_code": trust_remote_code, "quantization": quantization, "verify": verify}
    given |= {"tensor_parallel_size": tensor_parallel_size}
    if engine != "vllm" and vllm_options is not None:
        raise typer.BadParameter("--vllm-options is for --engine vllm")
    settings = (engine_config or EngineConfig()).model_copy(update={key: each for key, each in given.items() if each})
    takes_gguf = engine != "vllm" and settings.tensor_parallel_size == 1
    model = model or default_model(takes_gguf=takes_gguf)
    download_models(model, speculative_config)
    options = deployment.DeploymentOptions(
        model,
        speculative_config,
        settings,
        host,
        port,
        draft_workers,
        target_workers,
        served_model_name,
        api_keys,
        (vllm_options or VllmOptions()) if engine == "vllm" else None,
        chat_template,
        tool_call_parser,
        reasoning_parser,
        generation_config,
        otlp_traces_endpoint,
        demo_page,
    )
    raise typer.Exit(command.serve(options, redis_url))


@main.command()
@start_errors()
def doctor(
    model: Annotated[str, typer.Option(help=f"The target. {MODEL}")] = "pydoc",
    speculative_config: Speculations = None,
    prompts: Annotated[Path | None, typer.Option(help=".txt, one a line; or .jsonl, prompt or messages.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask a running Paceline server instead.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output.")] = 128,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="0 and 0.8 by default.")] = None,
    engine_config: Engine = None,
) -> None:
    """Measure every speculator that fits on your prompts: acceptance, speed, and likely causes of low acceptance."""
    from rich.console import Console

    from paceline.cli import doctor_command as command
    from paceline.cli.model_download import download_models

    options = command.DoctorOptions(
        model,
        speculative_config or (),
        prompts,
        url,
        max_tokens,
        temperature or (0.0, 0.8),
        engine_config or EngineConfig(),
    )
    if url is None:
        download_models(model)
    report = command.run(Console(highlight=False), options)
    typer.echo(json.dumps(report))
    raise typer.Exit(0 if report["identical"] else 1)


LAB = "paceline_lab"
"""Part of the repository, not of the wheel: it adds the commands bench, demo, plan and train."""


@main.command(context_settings=PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run one gateway: HTTP and gRPC in front of the targets registered in Redis."""
    become("paceline_services.gateway", context.args)


@main.command(context_settings=PASS_ON)
def target(context: typer.Context) -> None:
    """Run one target worker; with --ray auto, local or an address: replicas of it on a Ray cluster."""
    on_ray = any(argument.partition("=")[0] == "--ray" for argument in context.args)
    become("paceline_services.target.ray_replicas" if on_ray else "paceline_services.target", context.args)


@main.command(context_settings=PASS_ON)
def rank(context: typer.Context) -> None:
    """Run one further rank of a model that several processes share; rank 0 is the worker itself."""
    become("paceline_services.rank", context.args)


@main.command(context_settings=PASS_ON)
def draft(context: typer.Context) -> None:
    """Run one draft worker."""
    become("paceline_services.draft", context.args)


main.add_typer(keys, name="keys")


@main.command()
@start_errors()
def chat(
    model: Annotated[str | None, typer.Argument(help=f"Chat with it here, without a server. {MODEL}")] = None,
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output.")] = 256,
    speculative_config: Speculation = None,
    engine_config: Engine = None,
) -> None:
    """Chat with a running server, or with a model and no server, and see which tokens were drafted."""
    from rich.console import Console

    from paceline.cli import chat_command as command
    from paceline.cli.deployment import default_speculative_config
    from paceline.cli.model_download import download_models

    console = Console(highlight=False)
    if model is None:
        command.run(console, url, {"temperature": temperature, "max_tokens": max_tokens})
    else:
        speculation = speculative_config or default_speculative_config(model)
        download_models(model, speculation)
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        command.run_here(console, model, speculation, engine_config or EngineConfig(), sampling)


@main.command()
@start_errors()
def download(
    model: Annotated[str | None, typer.Argument(help="One of these names.")] = None,
    fallback: Annotated[str | None, typer.Option("--or", help="What to print if it cannot be downloaded.")] = None,
) -> None:
    """Download a published model and print its name; without a name, list the published models."""
    from paceline.cli import model_download

    typer.echo("\n".join(model_download.offers()) if model is None else model_download.available(model, fallback))


if importlib.util.find_spec(LAB) is not None:
    importlib.import_module(f"{LAB}.commands").add_to(main)
