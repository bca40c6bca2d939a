"""One session of a training run: steps, held-out losses and checkpoints, until the budget or a signal."""

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import nn

from paceline_lab.training.family.family_models import next_token_loss
from paceline_lab.training.family.progress_line import shown
from paceline_lab.training.family.token_corpus import Ids, windows
from paceline_lab.training.family.trainer import Model, Trainer

log = logging.getLogger(__name__)

STEPS_PER_RECORD = 10
CHECKPOINT_SECONDS = 120.0
EVALUATION_SECONDS = 300.0


class TrainingStopped(Exception):
    """A signal ended the session before the budget was spent; the checkpoint holds everything."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = 128 + number
        """As after death by the signal: the parent process sees that training is unfinished."""


def train(trainer: Trainer[Model], name: Path, evaluate: Callable[[], Mapping[str, Any]]) -> None:
    """Train until the budget is spent. Writes `name`.pt and `name`.jsonl.

    `evaluate` gives figures of the current model for the journal. A terminal shows a progress bar.
    Raises `TrainingStopped` on SIGTERM or SIGINT.
    """
    checkpoint, journal = name.with_suffix(".pt"), name.with_suffix(".jsonl")
    checkpoint_due, evaluation_due = _Timer(CHECKPOINT_SECONDS), _Timer(EVALUATION_SECONDS)
    with _noticed_signals() as signals, shown(trainer, name.name, Console(stderr=True)) as update:
        while trainer.fraction < 1 and not signals:
            loss = trainer.step()
            update(loss)
            if trainer.progress.step % STEPS_PER_RECORD == 0:
                _record(journal, trainer, {"loss": loss})
            if evaluation_due():
                _record(journal, trainer, evaluate())
            if checkpoint_due():
                trainer.save(checkpoint)
    trainer.save(checkpoint)
    if trainer.fraction < 1:
        raise TrainingStopped(
            signals[0], f"stopped at {trainer.fraction:.0%}; the same command goes on from {checkpoint.name}"
        )
    _record(journal, trainer, evaluate())


def held_out_loss_of(model: nn.Module, documents: Sequence[Ids]) -> Callable[[], Mapping[str, Any]]:
    """An evaluation of a language model for `train`."""
    return lambda: {"held_out_loss": held_out_loss(model, documents)}


@torch.no_grad()
def held_out_loss(model: nn.Module, documents: Sequence[Ids], length: int = 512, count: int = 32) -> float:
    """Mean cross-entropy over `count` windows of the held-out files, nats per token."""
    cut = windows(documents, length, seed=0)[:count].to(next(model.parameters()).device)
    losses = [next_token_loss(model, batch) for batch in cut.split(4)]
    return float(torch.stack(losses).mean())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The records of a journal, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _record(journal: Path, trainer: Trainer[Model], figures: Mapping[str, Any]) -> None:
    progress = trainer.progress
    spent = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
    record = {**spent, "fraction": trainer.fraction, "threads": torch.get_num_threads(), **figures}
    with journal.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    log.info("%s", record)


class _Timer:
    """True once per `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = time.monotonic()

    def __call__(self) -> bool:
        due = time.monotonic() - self._since > self._seconds
        if due:
            self._since = time.monotonic()
        return due


@contextmanager
def _noticed_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of ending."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
