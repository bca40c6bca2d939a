"""Load over time, as tables of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class ShapeStage(NamedTuple):
    """For this part of the run, this share of the users."""

    part: float
    share: float


Shape = Sequence[ShapeStage]

SHAPES: Mapping[str, Shape] = {
    "soak": [
        ShapeStage(part=1.0, share=1.0),
    ],
    "steps": [
        ShapeStage(part=0.2, share=0.125),
        ShapeStage(part=0.2, share=0.25),
        ShapeStage(part=0.2, share=0.5),
        ShapeStage(part=0.2, share=1.0),
        ShapeStage(part=0.2, share=0.125),
    ],
    "spike": [
        ShapeStage(part=0.3, share=0.2),
        ShapeStage(part=0.2, share=1.0),
        ShapeStage(part=0.5, share=0.2),
    ],
}


class UserStage(NamedTuple):
    """A stage of one run: seconds since its beginning, and the number of users."""

    begins: float
    ends: float
    users: int


def rows(shape: Shape, ramp_s: float, seconds: float, peak: int) -> Iterator[UserStage]:
    """The stages of a run: `ramp_s` to start the first users, then `seconds`."""
    begins = ramp_s
    for stage in shape:
        ends = begins + stage.part * seconds
        yield UserStage(begins, ends, max(1, round(stage.share * peak)))
        begins = ends


def users_at(elapsed: float, stages: Sequence[UserStage]) -> int | None:
    """The number of users `elapsed` seconds after the beginning; None when the run is over."""
    return next((row.users for row in stages if elapsed < row.ends), None)
