"""Optimisation with checkpoints: float32 master weights, a compute copy, by default in bfloat16, a time budget."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from paceline_lab.training.family.token_corpus import Position, Stream

Model = TypeVar("Model", bound=nn.Module)

Loss = Callable[[nn.Module, Tensor], Tensor]
"""(model, one batch of the stream) -> mean loss in nats per token, a scalar."""


@dataclass(frozen=True)
class Phase:
    """Until this fraction of the budget, batches have `rows` rows of `length` tokens."""

    until: float
    rows: int
    length: int


@dataclass(frozen=True)
class Schedule:
    """Learning rates of Muon (hidden matrices) and AdamW (the rest), and their shape over the budget."""

    phases: tuple[Phase, ...]
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warmup: float = 0.01
    decay_from: float = 0.4

    def phase(self, fraction: float) -> Phase:
        """The phase at a fraction of the budget."""
        return next((phase for phase in self.phases if fraction < phase.until), self.phases[-1])

    def scale(self, fraction: float) -> float:
        """The factor on both learning rates: up, flat, then straight down to 0."""
        rise = min(1.0, (fraction + 1e-4) / self.warmup)
        fall = min(1.0, (1.0 - fraction) / (1.0 - self.decay_from))
        return min(rise, fall)


@dataclass
class Progress:
    """Training so far; `seconds` counts training only, over all resumes."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    position: Position = field(default_factory=Position)


class Trainer(Generic[Model]):
    """Trains one model on one stream until `budget` seconds are spent."""

    def __init__(
        self,
        model: Model,
        stream: Stream,
        loss: Loss,
        schedule: Schedule,
        budget: float,
        clock: Callable[[], float] = time.perf_counter,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`dtype`: of the compute copy. float32 is faster for small models on a CPU without bfloat16 products."""
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        self.model = model.to(dtype)
        self.progress = Progress()
        self._stream = stream
        self._loss = loss
        self._schedule = schedule
        self._budget = budget
        self._clock = clock
        self._optimizers = _optimizers(self.masters, schedule)

    @property
    def fraction(self) -> float:
        """The share of the budget that is spent, 0 to 1."""
        return min(1.0, self.progress.seconds / self._budget)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._budget - self.progress.seconds)

    def step(self) -> float:
        """One update; returns the loss before it, in nats per token."""
        started = self._clock()
        phase = self._schedule.phase(self.fraction)
        loss = self._loss(self.model, self._stream.batch(phase.rows, phase.length))
        loss.backward()
        self._update()
        self.progress.step += 1
        self.progress.tokens += phase.rows * phase.length
        self.progress.position = self._stream.position
        self.progress.seconds += self._clock() - started
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write everything that a resumed run needs, atomically."""
        state = {
            "progress": asdict(self.progress),
            "masters": self.masters,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a file that `save` wrote; the budget and the number of threads may differ."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        progress = state["progress"]
        self.progress = Progress(**progress | {"position": Position(**progress["position"])})
        self._stream.position = self.progress.position
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._copy_to_model()

    def _update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        if math.isfinite(float(norm)):
            self._step_optimizers(self._schedule.scale(self.fraction))
        self._copy_to_model()

    def _step_optimizers(self, scale: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            optimizer.step()

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name])


def _optimizers(masters: Mapping[str, Tensor], schedule: Schedule) -> list[Optimizer]:
    hidden = [p for name, p in masters.items() if _is_hidden_matrix(name, p)]
    others = [p for name, p in masters.items() if not _is_hidden_matrix(name, p)]
    optimizers: list[Optimizer] = [
        Muon(hidden, lr=schedule.muon_rate, momentum=0.95, weight_decay=0.02),
        AdamW(others, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
