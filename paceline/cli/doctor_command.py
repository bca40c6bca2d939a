"""`paceline doctor`: acceptance and speed of each method on your prompts, and likely causes of low acceptance.

Everything runs in this process, and no prompt is cached. `accepted` is accepted tokens per verification, without the
bonus token, of prompts decoded one by one; `by depth`, the share of verifications that accepted a token at each depth.
Speeds are of all requests together, prompts included; plain decoding and speculation take turns. `predicted` follows
from acceptance and the measured cost of rows, without the draft's own time: about the speed with drafts in processes of
their own.

With `--url` the same prompts go to a running server, with `"speculative": false` and without.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from paceline.cli import served_measurement
from paceline.cli.http_client import ApiRefusedError
from paceline.cli.progress import progress
from paceline.config import LOOKUP_METHODS, EngineConfig, SpeculativeConfig
from paceline.doctor.candidates import candidates
from paceline.doctor.diagnosis import Advice, DiagnosedMethod, Diagnosis, config_json, diagnose
from paceline.doctor.measurement import MeasurementSettings
from paceline.doctor.measurements import MethodFacts, MethodMeasurement, Speed
from paceline.doctor.prompt_file import QUESTIONS, Prompt, code_prompts, encoded, lack_chat_template, read
from paceline.launcher import StartError
from paceline.llm import LLM
from paceline.model.device_memory import gigabytes
from paceline.model.row_probe import measure_row_cost
from paceline.model_names import ModelNotFoundError

SHOWN_DEPTHS = 8
BAR = 32
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options of the command. `prompts`: a file; None: the default prompts. `url`: of a running server."""

    model: str
    given: Sequence[SpeculativeConfig] = ()
    prompts: Path | None = None
    url: str | None = None
    max_tokens: int = 128
    temperatures: Sequence[float] = (0.0, 0.8)
    engine: EngineConfig = field(default_factory=EngineConfig)


def run(console: Console, options: DoctorOptions) -> dict[str, Any]:
    """Measure, show, and return the JSON of the last line. Raises `StartError`."""
    prompts = _prompts(options)
    diagnosis = _served(console, options, prompts) if options.url else _here(console, options, prompts)
    show(console, diagnosis)
    return diagnosis.as_json()


def _prompts(options: DoctorOptions) -> list[Prompt]:
    if options.prompts is not None:
        return read(options.prompts)
    questions = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [*code_prompts(), *questions]


def _here(console: Console, options: DoctorOptions, prompts: Sequence[Prompt]) -> Diagnosis:
    # Drafts come and go beside the target, so it does not plan to fill the memory.
    engine: dict[str, Any] = {"enable_prefix_caching": False, "slots": options.engine.slot_count}
    if "threads" not in options.engine.model_fields_set:
        engine["threads"] = os.cpu_count() or 1
    try:
        chosen = candidates(options.model, options.given)
        with console.status("loading"):
            target = LLM(options.model, None, options.engine.model_copy(update=engine))
            target.cost = measure_row_cost(target.model, target.config.max_num_batched_rows)  # speeds are predicted
        if target.tokenizer.chat_template is None and options.prompts is None:
            prompts = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
        bare = lack_chat_template(prompts, target.tokenizer)
        settings = MeasurementSettings(
            encoded(prompts, target.tokenizer), options.max_tokens, options.temperatures, bare
        )
        with progress(console, "methods", len(chosen) + 1) as done:  # and a combination
            return diagnose(target, chosen, settings, done)
    except (ValueError, ModelNotFoundError) as error:
        raise StartError(str(error)) from error


def _served(console: Console, options: DoctorOptions, prompts: Sequence[Prompt]) -> Diagnosis:
    assert options.url is not None
    trained = not options.given or options.given[0].method not in LOOKUP_METHODS
    count = served_measurement.prompt_count(prompts, options.temperatures)
    with progress(console, "prompts, plain and speculative in turns", count) as done:
        work = served_measurement.measure(
            options.url, prompts, options.max_tokens, options.temperatures, MethodFacts(trained), done
        )
        try:
            return Diagnosis([DiagnosedMethod(asyncio.run(work))], [], None)
        except ApiRefusedError as error:
            raise StartError(f"the server at {options.url} refuses a prompt: {error}") from error
        except httpx.HTTPError as error:
            raise StartError(
                f"no server answers at {options.url} ({error}): start one with `paceline serve`"
            ) from error


def show(console: Console, diagnosis: Diagnosis) -> None:
    measured = [case.measured for case in diagnosis.cases]
    console.print(_acceptances(measured))
    _plot_speeds(console, measured)
    for case in diagnosis.cases:
        _show_case(console, case)
    for each in diagnosis.refused:
        console.print(f"[red]{each.name} was not measured[/red] ({each.cause}): {each.says}")
    if diagnosis.left:
        console.print(f"[yellow]interrupted: {', '.join(diagnosis.left)} not measured[/yellow]")
    if not diagnosis.identical:
        console.print("OUTPUT DIFFERS between plain and speculative decoding", style="bold red")
    if diagnosis.advice is not None:
        _show_advice(console, diagnosis.advice)


def _acceptances(measured: Sequence[MethodMeasurement]) -> Table:
    table = Table("method", "T", "accepted", "by depth", "", "output")
    for this in measured:
        output = {True: "identical", False: "[bold red]DIFFERS", None: "same distribution"}[this.identical]
        for each in this.acceptances:
            shares = each.by_depth[:SHOWN_DEPTHS]
            depths = " ".join(f"{share:.2f}" for share in shares)
            table.add_row(this.name, f"{each.temperature:g}", f"{each.length:.2f}", depths, columns(shares), output)
    return table


def _plot_speeds(console: Console, measured: Sequence[MethodMeasurement]) -> None:
    """A bar for each method and number of requests at once."""
    most = max((_highest(speed) for this in measured for speed in this.speeds), default=0.0)
    table = Table("at once", "method", "tokens/s", "× plain", "measured █, predicted ░", box=None)
    for this in measured:
        for speed in this.speeds:
            table.add_row(
                str(speed.requests), this.name, f"{speed.speculative:.0f}", f"{speed.speedup:.2f}", _bars(speed, most)
            )
    console.print(table)


def _bars(speed: Speed, most: float) -> str:
    """The measured speed; a lighter part shows by how much the prediction exceeds it."""
    measured = bar(speed.speculative, most, BAR)
    beyond = bar(speed.predicted or 0.0, most, BAR)
    return measured + "░" * (len(beyond) - len(measured))


def _highest(speed: Speed) -> float:
    return max(speed.speculative, speed.predicted or 0.0)


def _show_case(console: Console, case: DiagnosedMethod) -> None:
    for cause in case.causes:
        console.print(f"[yellow]{case.measured.name}[/yellow]: likely cause, {cause.name}: {cause.says}")
    if case.need.total:
        free = "" if case.free is None else f", {gigabytes(case.free)} were free"
        console.print(f"{case.measured.name} takes at most {gigabytes(case.need.total)}{free}")


def _show_advice(console: Console, advice: Advice) -> None:
    console.print(f"\n[bold]{advice.why}[/bold]")
    console.print("--speculative-config", end=" ")
    console.print_json(data=config_json(advice.config), indent=None)


EIGHTHS = "▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉"


def columns(shares: Sequence[float], width: int = 2) -> str:
    """One vertical bar for each share of 1."""
    return " ".join(_column(share) * width for share in shares)


def bar(value: float, most: float, width: int) -> str:
    """A horizontal bar; `most` is `width` characters long."""
    eighths = round(8 * width * value / most) if most > 0 else 0
    return ("█" * (eighths // 8) + PARTS[eighths % 8]).rstrip()


def _column(share: float) -> str:
    return EIGHTHS[min(7, max(0, round(8 * share) - 1))] if share > 0 else "·"
