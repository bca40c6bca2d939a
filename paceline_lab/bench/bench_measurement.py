"""Shared by the benchmarks: one method's outputs and times, their interruption by Ctrl-C, and the refusal of unknown
names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console

from paceline.launcher import StartError

PLAIN = "plain"
"""Decoding without speculation; every other method is compared with it."""


@dataclass(slots=True)
class Measurement:
    """Repeated calls of one method. A call decodes consecutive prompts, numbered from its first prompt on."""

    outputs: dict[int, list[list[int]]] = field(default_factory=dict)
    """By prompt, the tokens of each repetition."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By first prompt of a call, the time of each repetition."""
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each call."""

    def add(self, first_prompt: int, outputs: Sequence[Sequence[int]], seconds: float) -> None:
        """Record one call: new tokens of each prompt, and the call's time."""
        for prompt, tokens in enumerate(outputs, first_prompt):
            self.outputs.setdefault(prompt, []).append(list(tokens))
        self.seconds.setdefault(first_prompt, []).append(seconds)
        self.speeds.append(sum(map(len, outputs)) / seconds)

    @property
    def median_speed(self) -> float:
        """Tokens per second, median over calls."""
        return median(self.speeds)

    @property
    def fastest_s(self) -> float:
        """Time of the fastest repetition of each call, summed over calls."""
        return sum(map(min, self.seconds.values()))

    @property
    def fastest_speed(self) -> float:
        """Tokens per second over the fastest repetitions."""
        return sum(len(repetitions[0]) for repetitions in self.outputs.values()) / self.fastest_s

    def equal_prompts(self, plain: Measurement) -> int:
        """Number of prompts for which every output equals every output of `plain`."""
        return sum(
            prompt in plain.outputs and all(a == b for a in repetitions for b in plain.outputs[prompt])
            for prompt, repetitions in self.outputs.items()
        )


def check_names(chosen: Iterable[str], known: Collection[str]) -> None:
    """Raises `StartError` for a name that is not known."""
    for name in chosen:
        if name not in known:
            raise StartError(f"there is no {name!r}: choose from {', '.join(known)}")


@contextmanager
def results_kept_on_interrupt(console: Console) -> Iterator[None]:
    """Ctrl-C ends the body only, so that the caller can show its results so far."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what follows is what was measured[/yellow]")
