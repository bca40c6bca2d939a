"""Targets and drafts in virtual time: the real engine, scheduler, tree, row budget, draft loop and frames.

Simulated are the models (`paceline_lab.fake_models.timed_model`), the network (bandwidth, and a delay each way), and
the processes' communication, which takes no time. Hidden states are only bytes on the wire. The result is that of an
otherwise idle machine.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.best_first import BestFirst, ModelNetwork
from paceline.drafting.draft_loop import DraftLoop, DraftRounds, LinkEvents, RequestClosed
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Commit, Context, DraftingLimits, Limit, Opening
from paceline.engine.draft_client import DraftClient
from paceline.engine.draft_manager import MAX_HIDDEN_STATES_SENT
from paceline.engine.engine import Engine
from paceline.engine.engine_loop import EngineLoop, StepResult
from paceline.ipc.pipe import MessageDispatcher
from paceline.messages import GenerationRequest
from paceline.model import ModelOutput
from paceline.model.rows import Row
from paceline.wire.draft_codec import encode_growth_frame, parse_draft_frame, parse_growth_frame
from paceline.wire.draft_stream_messages import ConnectDrafts, SendDraftFrame, StreamUp, StreamUpdate
from paceline.wire.remote_draft_client import RemoteDraftClient
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from paceline_lab.simulation.virtual_time import DelayedLink, VirtualTime

ADDRESS = "draft"
FRAME_OVERHEAD = 14
"""Bytes of HTTP/2's and gRPC's headers per message."""


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """A target and its drafts. `draft` None: plain decoding."""

    target: TimedModelConfig
    draft: TimedModelConfig | None
    rtt_s: float = 0.0
    drafts: int = 1
    """Draft workers; requests are assigned in turn."""
    targets: int = 1
    """Targets of these drafts; requests are assigned in turn."""
    link_bytes_per_s: float = math.inf
    """Bandwidth between the target and each draft worker, in each direction."""
    state_bytes: int = 0
    """Hidden states that the target sends for each token of prompt and output, as for EAGLE-3; 0: none."""
    speculation: SpeculativeConfig = field(
        default_factory=lambda: SpeculativeConfig(
            method="draft_model", model=ADDRESS, num_speculative_tokens=16, tree_width=4, max_tree_nodes=64
        )
    )
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(slots=2**17, max_num_seqs=256, max_num_batched_rows=1024)
    )


@dataclass(slots=True)
class SimulationResult:
    """The result. Times in seconds since the beginning."""

    tokens: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Commit time of each token."""
    steps: int = 0
    seconds: float = 0.0
    wire_bytes: int = 0
    step_cpu_s: list[tuple[int, float]] = field(default_factory=list, compare=False)
    """By step: requests that got tokens, and CPU seconds without the model. They differ from run to run."""

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def wire_bytes_per_token(self) -> float:
        return self.wire_bytes / sum(map(len, self.tokens.values()))


class _Pipe(MessageDispatcher):
    """Replaces `paceline.ipc.pipe.Pipe`."""

    def __init__(self, time: VirtualTime, sent: Callable[[object], None]) -> None:
        super().__init__()
        self._wire: DelayedLink[object] = DelayedLink(time, 0.0)
        self._sent = sent

    def put(self, message: object) -> None:
        """Send a message to the computing end."""
        self._wire.put(message)

    def send(self, message: object) -> None:
        self._sent(message)

    def receive(self, timeout_s: float | None) -> None:
        for message in self._wire.take(timeout_s):
            self.dispatch(message)


class _MeteredModel(TimedModel):
    """A timed model that measures its own CPU time."""

    cpu_s = 0.0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        began = time.thread_time()
        try:
            return super().run(rows, wanted, hidden_layers)
        finally:
            self.cpu_s += time.thread_time() - began


class _UnsentStates:
    """Which hidden states the real engine would send: none to a paused draft, until it goes on."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._paused: set[int] = set()

    def take(self, sent: SendDraftFrame) -> int:
        """The number of positions whose states go with this frame."""
        for event in parse_draft_frame(sent.frame):
            match event:
                case Opening():
                    self._positions[event.request_id] = len(event.tokens)
                    self._set_limit(event.request_id, event.max_nodes)
                case Commit():
                    self._positions[event.request_id] += len(event.tokens)
                case Limit():
                    self._set_limit(event.request_id, event.max_nodes)
                case RequestClosed():
                    self._positions.pop(event.request_id, None)
                case Context():
                    pass
        due = {key: min(unsent, MAX_HIDDEN_STATES_SENT) for key, unsent in self._positions.items()}
        due = {key: positions for key, positions in due.items() if key not in self._paused}
        for key, positions in due.items():
            self._positions[key] -= positions
        return sum(due.values())

    def _set_limit(self, request_id: int, nodes: int) -> None:
        if nodes:
            self._paused.discard(request_id)
        else:
            self._paused.add(request_id)


def simulate(pair: SimulatedPair, generation_requests: Sequence[tuple[float, GenerationRequest]]) -> SimulationResult:
    """Serve each request from its arrival time on, until all have ended."""
    return _Run(pair, generation_requests).result()


class _Run:
    """One simulation."""

    def __init__(self, pair: SimulatedPair, generation_requests: Sequence[tuple[float, GenerationRequest]]) -> None:
        self.time = VirtualTime()
        self.pair = pair
        self.outcome = SimulationResult()
        self.running = len(generation_requests)
        self.draft_pipes: list[_Pipe] = []
        self._sent_at: defaultdict[object, float] = defaultdict(float)
        """By link and direction: when the last bit has left."""
        self._targets = [_Target(self, number) for number in range(pair.targets)]
        if pair.draft is not None:
            for number in range(pair.drafts):
                self._start_draft(pair.draft, number)
        for number, (when, generation_request) in enumerate(generation_requests):
            turn, target = divmod(number, pair.targets)
            drafted = replace(generation_request, draft_addresses=[f"{ADDRESS}-{turn % pair.drafts}"])
            self.time.after(when, partial(self._targets[target].pipe.put, drafted))

    def _start_draft(self, spec: TimedModelConfig, number: int) -> None:
        pipe = _Pipe(self.time, partial(self._receive_from_draft, number))
        self.draft_pipes.append(pipe)
        model, cost = self.model(spec, MAX_ROWS)
        limits = DraftingLimits.of(self.pair.speculation)
        draft = NetworkSpeculator(BestFirst(ModelNetwork(model), limits, cost, self.time.now))
        self.time.start(DraftLoop(draft, pipe, self.time.now).run)  # type: ignore[arg-type]

    def result(self) -> SimulationResult:
        self.time.run(lambda: not self.running)
        self.outcome.seconds = self.time.now()
        return self.outcome

    def model(self, spec: TimedModelConfig, most_rows: int) -> tuple[_MeteredModel, RowCost]:
        rows = sorted({1, min(spec.knee_rows, most_rows), most_rows})
        model = _MeteredModel("timed:", spec, self.pair.engine.slot_count, 2**14, self.time.now, self.time.sleep)
        return model, RowCost(rows, [max(spec.seconds(count), 1e-9) for count in rows])

    def _receive_from_draft(self, draft: int, message: object) -> None:
        assert isinstance(message, DraftRounds)
        for target, grown in message.grown:
            data = encode_growth_frame(grown).SerializeToString()
            self.transmit((target, draft, "up"), len(data), partial(self._targets[target].deliver, draft, data))

    def transmit(self, direction: object, size: int, arrive: Callable[[], None]) -> None:
        """`direction`: a link's; its messages leave one after another."""

        def arrived() -> None:
            self.outcome.wire_bytes += size
            arrive()

        size += FRAME_OVERHEAD
        now = self.time.now()
        self._sent_at[direction] = max(now, self._sent_at[direction]) + size / self.pair.link_bytes_per_s
        self.time.after(self._sent_at[direction] - now + self.pair.rtt_s / 2, arrived)


class _Target:
    """One target. Its number is its link's at every draft, a draft's number is its link's here."""

    def __init__(self, run: _Run, number: int) -> None:
        self.pipe = _Pipe(run.time, self._receive_from_engine)
        self._run = run
        self._number = number
        self._unsent_states = _UnsentStates()
        pair, drafting = run.pair, DraftClient()
        if pair.draft is not None:
            drafting = RemoteDraftClient(self.pipe, clock=run.time.now)  # type: ignore[arg-type]
            for draft in range(pair.drafts):
                address = f"{ADDRESS}-{draft}"
                self.pipe.put(StreamUp(draft, address, address, hidden_state_layers=()))
        self._model, cost = run.model(pair.target, pair.engine.max_num_batched_rows)
        self._step_began_s = 0.0
        engine = Engine(self._model, pair.engine, pair.speculation, drafting, cost, run.time.now)
        run.time.start(EngineLoop(engine, self.pipe).run)  # type: ignore[arg-type]

    def deliver(self, draft: int, data: bytes) -> None:
        """A draft's frame has arrived."""
        grown = parse_growth_frame(data)
        self.pipe.put(StreamUpdate(draft, grown.growths, list(grown.dropped)))

    def _receive_from_engine(self, message: object) -> None:
        """Called in the engine's thread. Its own CPU time does not count as the engine's."""
        cpu_s, run = self._engine_cpu_s(), self._run
        match message:
            case StepResult(deltas):
                run.outcome.steps += 1
                run.outcome.step_cpu_s.append((len(deltas), cpu_s - self._step_began_s))
                for delta in deltas:
                    run.outcome.tokens[delta.request_id] += delta.tokens
                    run.outcome.times[delta.request_id] += [run.time.now()] * len(delta.tokens)
                    run.running -= delta.finish_reason is not None
                self._step_began_s = cpu_s
            case SendDraftFrame(draft, data) as sent:
                size = len(data) + self._unsent_states.take(sent) * run.pair.state_bytes
                run.transmit((self._number, draft, "down"), size, partial(self._deliver_to_draft, draft, data))
            case ConnectDrafts():
                pass
        self._step_began_s += self._engine_cpu_s() - cpu_s

    def _engine_cpu_s(self) -> float:
        return time.thread_time() - self._model.cpu_s

    def _deliver_to_draft(self, draft: int, data: bytes) -> None:
        events = LinkEvents(self._number, parse_draft_frame(data), self._run.time.now())
        self._run.draft_pipes[draft].put(events)
