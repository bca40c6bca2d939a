"""What `make load` runs: which stack, how many streams, and what they are to get."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.load_figures import LatencyGoal
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig

STREAMING = 100
OTHER_USERS = 8
"""Of so many users, by their weights: those who always stream, and those who leave or send nonsense beside them."""

TIMED_DRAFT = "timed:vocabulary=512,step_ms=20,knee_rows=2048,agreement=0.8"


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """`streams`: at once. `answers`: tokens of an answer, at least and at most, where questions can be made up."""

    name: str
    deployment_options: DeploymentOptions
    streams: int
    seconds: float
    ramp_s: float
    answer_tokens: tuple[int, int]
    goal: LatencyGoal

    @property
    def users(self) -> int:
        return round(self.streams * (STREAMING + OTHER_USERS) / STREAMING)


TIMED = LoadProfile(
    "timed",
    DeploymentOptions(
        "timed:vocabulary=512,step_ms=200,knee_rows=2048",
        SpeculativeConfig(
            method="draft_model", model=TIMED_DRAFT, num_speculative_tokens=8, tree_width=2, max_tree_nodes=16
        ),
        EngineConfig(slots=2**18, max_num_seqs=640, max_num_batched_rows=4096, cpus=()),
    ),
    streams=500,
    seconds=120.0,
    ramp_s=20.0,
    answer_tokens=(32, 96),
    goal=LatencyGoal(first_token_ms=2000.0, token_ms=300.0),
)
"""A target that takes 200 ms for a step: as slow as it must be for two cores to carry 500 streams and their clients."""

FAMILY = LoadProfile(
    "family",
    DeploymentOptions(),
    streams=8,
    seconds=30.0,
    ramp_s=4.0,
    answer_tokens=(0, 0),
    goal=LatencyGoal(first_token_ms=2000.0, token_ms=100.0),
)
"""The shipped models, which really compute."""

PROFILES = {profile.name: profile for profile in (TIMED, FAMILY)}
