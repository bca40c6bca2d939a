"""The schedule of faults: a function of the seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

REDIS = "redis"

FaultKind = Literal["kill", "stop", "terminate"]
ProcessPart = Literal["service", "compute", "both"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One signal to each of the victims, in quick succession.

    `kill` is SIGKILL to one half of a worker, `terminate` SIGTERM to its service, `stop` SIGSTOP for `lasts_s` seconds
    to both halves, or to its compute alone. `at_s` counts from the start.
    """

    at_s: float
    victims: Sequence[str]
    kind: FaultKind
    half: ProcessPart = "service"
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessNames:
    """Names of all processes, by kind."""

    gateways: Sequence[str]
    targets: Sequence[str]
    drafts: Sequence[str]


PARTS_BY_KIND: dict[FaultKind, Sequence[ProcessPart]] = {
    "kill": ("service", "compute"),
    "terminate": ("service",),
    "stop": ("both", "compute"),
}
LONG_STOP_S = 13.0
"""Longer than a keepalive: peers give up a process that is stopped this long."""


def random_faults(victims: ProcessNames, seed: int, every_s: float, duration_s: float) -> Iterator[Fault]:
    """Faults in order of time, with exponential waits of `every_s` on average; some hit all replicas of a kind."""
    random = Random(seed)
    at_s = every_s / 2
    while at_s < duration_s:
        yield _random_fault(random, victims, at_s)
        at_s += random.expovariate(1 / every_s)


def _random_fault(random: Random, victims: ProcessNames, at_s: float) -> Fault:
    several = [
        *[([target], 2) for target in victims.targets],
        *[([draft], 2) for draft in victims.drafts],
        *[([gateway], 1) for gateway in victims.gateways],
        ([REDIS], 1),
        (victims.targets, 1),
        (victims.drafts, 1),
    ]
    chosen = random.choices([names for names, _ in several], [weight for _, weight in several])[0]
    kinds: list[FaultKind] = ["kill", "stop"] if REDIS in chosen else ["kill", "kill", "stop", "terminate"]
    kind = random.choice(kinds)
    worker = chosen[0] in (*victims.targets, *victims.drafts)
    half = random.choice(PARTS_BY_KIND[kind]) if worker else PARTS_BY_KIND[kind][0]
    long = kind == "stop" and len(chosen) == 1 and worker and random.random() < 0.25
    lasts_s = LONG_STOP_S if long else random.uniform(0.5, 4.0)
    return Fault(at_s, tuple(chosen), kind, half, lasts_s if kind == "stop" else 0.0)
