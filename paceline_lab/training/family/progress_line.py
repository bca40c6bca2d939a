"""Training progress on one line of a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from paceline_lab.training.family.trainer import Model, Trainer


@contextmanager
def shown(trainer: Trainer[Model], name: str, console: Console) -> Iterator[Callable[[float], None]]:
    """A function to call with the loss of each step. Draws on a terminal only; log lines appear above the bar."""
    if not console.file.isatty():
        yield lambda loss: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    began, terminal = replace(trainer.progress), sys.stderr
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task(name, total=1.0, figures="")
        progress.update(task, completed=trainer.fraction)

        def update(loss: float) -> None:
            now = trainer.progress
            speed = (now.tokens - began.tokens) / max(now.seconds - began.seconds, 1e-9)
            left = timedelta(seconds=round(trainer.seconds_left))
            figures = f"loss {loss:.3f} · {speed:,.0f} tokens/s · {left} left"
            progress.update(task, completed=trainer.fraction, figures=figures)

        with _logging_above(terminal):
            yield update


@contextmanager
def _logging_above(terminal: TextIO) -> Iterator[None]:
    """Point log handlers to the redirected stderr while the bar is drawn; they would write into the bar otherwise."""
    ours = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler) and h.stream is terminal]
    for handler in ours:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in ours:
            handler.setStream(terminal)
