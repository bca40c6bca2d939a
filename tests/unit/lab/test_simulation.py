"""Target and draft in virtual time: the gain from overlap, independent of the machine."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.engine.draft_schedule import LockstepSchedule
from paceline.messages import GenerationRequest
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation.pair_simulation import SimulatedPair, SimulationResult, simulate
from paceline_lab.simulation.sequential_forecast import forecast_sequential
from paceline_lab.simulation.virtual_time import DelayedLink, VirtualTime

TARGET = TimedModelConfig.parse("timed:vocabulary=512,step_ms=10,knee_rows=128")
DRAFT = TimedModelConfig.parse("timed:vocabulary=512,step_ms=1,knee_rows=128,agreement=0.8")
USELESS = TimedModelConfig.parse("timed:vocabulary=512,step_ms=1,knee_rows=128,agreement=0,bias=60")
STREAMED = SimulatedPair(TARGET, DRAFT)
CHAINS = (4, 6, 8)


def lockstep(k: int, rtt_s: float, draft: TimedModelConfig = DRAFT) -> SimulatedPair:
    settings = {"num_speculative_tokens": k, "tree_width": 1, "draft_schedule": "lockstep", "least_path_probability": 0}
    speculation = SpeculativeConfig.model_validate({"method": "draft_model", "model": "draft", **settings})
    return SimulatedPair(TARGET, draft, rtt_s, speculation=speculation)


def served(pair: SimulatedPair, requests: int = 1, tokens: int = 200, prompt_tokens: int = 3) -> SimulationResult:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    prompts = [[i + 1, *[2, 3] * (prompt_tokens // 2)] for i in range(requests)]
    return simulate(pair, [(0.0, GenerationRequest(str(p), p, sampling, draft_addresses=["draft"])) for p in prompts])


@pytest.fixture(scope="module")
def plain() -> SimulationResult:
    return served(SimulatedPair(TARGET, None))


def test_time_is_what_the_models_take(plain: SimulationResult) -> None:
    assert plain.seconds == pytest.approx(200 * 0.01)
    assert plain.steps == 200


def test_the_same_simulation_gives_the_same_times() -> None:
    one, other = served(STREAMED, tokens=60), served(STREAMED, tokens=60)
    assert one == other


@pytest.mark.parametrize(
    ("rtt_s", "over_lockstep", "over_plain"), [(0.0, 1.4, 3.0), (0.01, 1.6, 2.2), (0.04, 1.5, 1.4)]
)
def test_overlapping_hides_draft_and_network(
    plain: SimulationResult, rtt_s: float, over_lockstep: float, over_plain: float
) -> None:
    """In lock-step over a slow network the draft does not pay, and is paused: that is plain decoding, nearly."""
    streamed = served(replace(STREAMED, rtt_s=rtt_s))
    waiting = [served(lockstep(k, rtt_s)) for k in CHAINS]
    assert all(outcome.tokens == plain.tokens for outcome in (streamed, *waiting))
    assert streamed.tokens_per_s > over_lockstep * max(outcome.tokens_per_s for outcome in waiting)
    assert streamed.tokens_per_s > over_plain * plain.tokens_per_s


@pytest.mark.parametrize("rtt_s", [0.0, 0.01, 0.04])
@pytest.mark.parametrize("requests", [1, 16])
def test_a_useless_draft_costs_next_to_nothing(rtt_s: float, requests: int) -> None:
    plain = served(SimulatedPair(TARGET, None), requests)
    useless = served(SimulatedPair(TARGET, USELESS, rtt_s), requests)
    assert useless.tokens == plain.tokens
    assert useless.tokens_per_s >= 0.97 * plain.tokens_per_s


def test_draft_tokens_are_cheap_on_the_wire() -> None:
    assert served(replace(STREAMED, rtt_s=0.002)).wire_bytes_per_token < 160


@pytest.mark.parametrize(("gbit_s", "over_plain", "carried"), [(10, 3.2, 1000), (1, 2.2, 1000), (0.1, 0.97, 512)])
def test_a_head_pays_as_far_as_the_link_carries_its_hidden_states(
    gbit_s: float, over_plain: float, carried: int
) -> None:
    """49 kB for each token, as for a target of 70 billion parameters: those of the prompt alone may take too long.

    `carried`: positions of the prompt, 256 a step, before the draft is paused or the request ends.
    """
    plain = served(SimulatedPair(TARGET, None), prompt_tokens=1000)
    pair = replace(STREAMED, rtt_s=0.001, link_bytes_per_s=gbit_s * 1.25e8, state_bytes=49152)
    head = served(pair, prompt_tokens=1000)
    assert head.tokens == plain.tokens
    assert carried <= head.wire_bytes / 49152 < carried + 201
    assert head.tokens_per_s > over_plain * plain.tokens_per_s


def test_a_forecast_is_the_simulation_of_one_request_after_another(plain: SimulationResult) -> None:
    forecast = forecast_sequential(SimulatedPair(TARGET, None), [[1, 2, 3]] * 2, 200)
    assert forecast.tokens_per_s == pytest.approx(plain.tokens_per_s)
    assert forecast.outputs == [next(iter(plain.tokens.values()))] * 2
    assert forecast_sequential(STREAMED, [[1, 2, 3]], 60).outputs == [forecast.outputs[0][:60]]


@pytest.mark.parametrize("requests", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_row_budget_beats_any_fixed_number_of_nodes(requests: int) -> None:
    def rate(**changes: object) -> float:
        pair = replace(STREAMED, speculation=STREAMED.speculation.model_copy(update=changes))
        return served(pair, requests, tokens=60).tokens_per_s

    assert rate() >= max(rate(row_budget=False, max_tree_nodes=nodes) for nodes in (1, 2, 4, 8))


@pytest.mark.parametrize("k", [4, pytest.param(6, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_lockstep_drafts_grow_whole_chains_at_any_price_of_a_row(k: int) -> None:
    """A short chain would make its step wait until the timeout."""
    requests, rtt_s = 64, 0.01
    draft = DRAFT.model_copy(update={"knee_rows": 16})
    outcome = served(lockstep(k, rtt_s, draft), requests, tokens=40)
    ends = sorted({0.0}.union(*outcome.times.values()))
    longest_s = TARGET.seconds(requests * (1 + k)) + k * draft.seconds(requests) + rtt_s
    assert max(end - start for start, end in itertools.pairwise(ends)) <= longest_s < LockstepSchedule.TIMEOUT_S / 10


# Virtual time itself


def test_actors_meet_in_time() -> None:
    time, seen = VirtualTime(), []
    wire: DelayedLink[str] = DelayedLink(time, 0.5)

    def send() -> None:
        for message in ("a", "b"):
            time.sleep(1.0)
            wire.put(message)

    def receive() -> None:
        while True:
            messages = wire.take(0.7)
            seen.append((round(time.now(), 3), messages))

    time.start(send)
    time.start(receive)
    time.run(lambda: len(seen) >= 5)
    assert seen == [(0.7, []), (1.4, []), (1.5, ["a"]), (2.2, []), (2.5, ["b"])]


def test_what_an_actor_raises_ends_the_run() -> None:
    time = VirtualTime()
    time.start(lambda: time.sleep(1 / 0))
    with pytest.raises(ZeroDivisionError):
        time.run(lambda: False)
    with pytest.raises(RuntimeError, match="only an actor"):
        VirtualTime().sleep(1.0)


def test_ctrl_c_ends_the_run_without_resuming_actors() -> None:
    time, went_on = VirtualTime(), threading.Event()

    def interrupting() -> None:
        raise KeyboardInterrupt

    def working() -> None:
        time.sleep(2.0)
        went_on.set()

    time.start(working)
    time.after(1.0, interrupting)
    with pytest.raises(KeyboardInterrupt):
        time.run(lambda: False)
    assert not went_on.is_set()
