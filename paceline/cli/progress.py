"""How far a measurement is, how long it goes on, and what is left of it when somebody ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar that is gone afterwards; call what it yields once for each of `total` parts that is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def results_kept_on_interrupt(console: Console) -> Iterator[None]:
    """Ctrl-C ends what is measured within, and nothing more: what was measured by then is told."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what follows is what was measured[/yellow]")
