"""The profiles of `make load`: stacks, numbers of streams, latency goals; and one run of a profile."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.load_figures import LatencyGoal
from loadtests.load_requests import Questions
from loadtests.load_shapes import SHAPES, UserStage, rows
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig

STREAMING = 100
OTHER_USERS = 8
"""For every STREAMING users that stream, the number that disconnect or send malformed requests, by their weights."""

TIMED_DRAFT = "timed:vocabulary=512,step_ms=20,knee_rows=2048,agreement=0.8"


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """One stack and its load. `answer_tokens`: fewest and most tokens of an answer, for timed models."""

    name: str
    deployment_options: DeploymentOptions
    streams: int
    """At once."""
    seconds: float
    ramp_s: float
    answer_tokens: tuple[int, int]
    goal: LatencyGoal
    stalled_s: float = 30.0
    """A stream without a token for this long hangs."""

    @property
    def users(self) -> int:
        return round(self.streams * (STREAMING + OTHER_USERS) / STREAMING)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run of Locust, pickled into its process. `url`: the gateway's; `grpc`: its host:port."""

    url: str
    grpc: str
    profile: LoadProfile
    shape: str
    speculative: bool
    questions: Questions

    @property
    def stages(self) -> list[UserStage]:
        return list(rows(SHAPES[self.shape], self.profile.ramp_s, self.profile.seconds, self.profile.users))


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
"""A target with steps of 200 ms: slow enough for two cores to carry 500 streams and their clients."""

FAMILY = LoadProfile(
    "family",
    DeploymentOptions(),
    streams=8,
    seconds=30.0,
    ramp_s=4.0,
    answer_tokens=(0, 0),
    goal=LatencyGoal(first_token_ms=2000.0, token_ms=100.0),
)
"""The shipped models, with real compute."""

PROFILES = {profile.name: profile for profile in (TIMED, FAMILY)}
