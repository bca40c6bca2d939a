"""The engine: step statistics, drafts, calibration, the draft gate, and the end of requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth
from paceline.core.messages import Delta, FinishReason, GenerationRequest
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.engine.draft_client import DraftClient, DraftUpdates, LocalDraftClient, NoDraftClient
from paceline.engine.draft_gate import DraftGate
from paceline.engine.engine import NOT_FINITE_ERROR, Engine
from paceline.engine.request import OWN_DRAFT_SOURCE
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.telemetry.step_stats import StepStats
from paceline_lab.fake_models.table_model import TableModel
from paceline_services.target.engine_process import model_facts
from tests.helpers.seen import FunctionTable, root_of

VOCABULARY = 64
SLOTS = 256
FREE = RowCost([8, 256], [1.0, 1.001])


class Script(NoDraftClient):
    """Records the messages to it, and returns the updates that a test sets."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []
        self.openings: list[Opening] = []
        self.limits: list[Limit] = []
        self.next = DraftUpdates()
        self.names: Sequence[str | None] = ["somebody"]

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self.messages.append(("open", opening.request_id))
        self.openings.append(opening)
        name, *rest = self.names
        self.names = rest or [name]
        return name

    def limit(self, limit: Limit) -> None:
        self.limits.append(limit)

    def close(self, request_id: int) -> None:
        self.messages.append(("close", request_id))

    def flush(self) -> None:
        self.messages.append(("flush", 0))

    def poll(self, timeout_s: float) -> DraftUpdates:
        updates, self.next = self.next, DraftUpdates()
        return updates


class RecordingScript(Script):
    """Also records commits."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, Commit | int]] = []

    def commit(self, commit: Commit) -> None:
        self.messages.append(("commit", commit.request_id))
        self.sent.append(("commit", commit))

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self.sent.append(("close", request_id))


class HiddenStateScript(Script):
    """Records hidden states by request and position since the opening."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: dict[int, dict[int, list[list[float]]]] = {}

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self.fed[opening.request_id] = {}
        return super().open(opening, drafts)

    def context(self, context: Context) -> None:
        self._take(context.request_id, context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if commit.hidden_states is not None:
            self._take(commit.request_id, commit.base_position, commit.hidden_states)

    def _take(self, request_id: int, base_position: int, states: Tensor) -> None:
        self.fed[request_id] |= {base_position + i: state for i, state in enumerate(states.tolist())}


class WatchedModel(TableModel):
    """Records the messages to drafts before each pass."""

    def __init__(self, script: Script) -> None:
        super().__init__(VOCABULARY, SLOTS, SLOTS)
        self.messages_before: list[list[tuple[str, int]]] = []
        self._script = script

    def run(self, *arguments: object) -> object:  # type: ignore[override]
        self.messages_before.append(self._script.messages.copy())
        return super().run(*arguments)  # type: ignore[arg-type]


def engine(
    drafting: DraftClient,
    *,
    model: TableModel | None = None,
    row_budget: bool = True,
    lookups: Sequence[DraftClient] = (),
    nodes: int = 8,
    strategy: Any = "coupled",
    schedule: Any = "streamed",
    **settings: int,
) -> Engine:
    return Engine(
        model or TableModel(VOCABULARY, SLOTS, SLOTS),
        EngineConfig(slots=SLOTS, **settings),
        SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=4,
            max_tree_nodes=nodes,
            row_budget=row_budget,
            rejection_sampling_strategy=strategy,
            draft_schedule=schedule,
        ),
        drafting,
        FREE,
        lookups=lookups,
    )


def local() -> LocalDraftClient:
    return LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS, 0.2), 2))


def submission(request_id: str, prompt: int, output: int = 10, **sampling: object) -> GenerationRequest:
    params = SamplingParams.model_validate({"temperature": 0.0, "max_tokens": output} | sampling)
    tokens = [(ord(request_id[0]) + 7 * i) % VOCABULARY for i in range(prompt)]
    return GenerationRequest(request_id, tokens, params, SpeculativeOptions(report=True))


def served(target: Engine, *submissions: GenerationRequest, steps: list[StepStats] | None = None) -> dict[str, Delta]:
    """Serve the submissions; the merged deltas of each. Statistics of every step are appended to `steps`."""
    results = {s.request_id: Delta(s.request_id) for s in submissions}
    for each in submissions:
        target.submit(each)
    while target.busy:
        for delta in target.step():
            result = results[delta.request_id]
            result.tokens += delta.tokens
            result.accepted += delta.accepted
            result.finish_reason, result.usage, result.error = delta.finish_reason, delta.usage, delta.error
            result.speculation, result.stop_token = delta.speculation, delta.stop_token
        if steps is not None:
            steps.append(target.last_step)
        target.check_integrity()
    return results


class TestStepStats:
    def test_numbers_of_steps_add_up(self) -> None:
        """Prompt tokens count once, even if preemption recomputes them."""
        steps: list[StepStats] = []
        target = engine(local(), max_num_batched_rows=64)
        results = served(target, *(submission(name, 70, output=60) for name in "abcde"), steps=steps)
        assert sum(s.preemptions for s in steps) > 0
        assert sum(s.prompt_tokens for s in steps) == 5 * 70
        assert sum(s.generation_tokens for s in steps) == sum(len(a.tokens) for a in results.values()) == 5 * 60
        totals = [a.speculation for a in results.values()]
        for name in ("drafted_tokens", "accepted_tokens", "verifications", "steps"):
            assert sum(getattr(s.speculation, name) for s in steps) == sum(getattr(t, name) for t in totals)
        assert sum(s.nodes_grafted for s in steps) <= sum(s.nodes_received for s in steps)
        assert max(s.rows for s in steps) <= 64
        assert steps[-1].running == steps[-1].waiting == 0
        assert steps[-1].free_slots == SLOTS
        assert target.load.free_slots == SLOTS

    def test_cached_prompt_tokens_are_not_computed(self) -> None:
        steps: list[StepStats] = []
        target = engine(NoDraftClient())
        served(target, submission("a", 100), steps=steps)
        first = sum(s.prompt_tokens for s in steps)
        again = GenerationRequest("b", submission("a", 100).prompt, submission("a", 1).sampling)
        result = served(target, again, steps=steps)["b"]
        assert first == 100
        assert result.usage is not None
        assert sum(s.prompt_tokens for s in steps) - first == 100 - result.usage.cached_tokens == 4

    def test_every_token_is_accepted_or_a_bonus(self) -> None:
        results = served(engine(local()), *(submission(name, 9, output=50) for name in "abc"))
        for result in results.values():
            assert result.speculation is not None
            assert sum(result.accepted) == result.speculation.accepted_tokens > 0
            assert len(result.accepted) == len(result.tokens)
            assert result.accepted.count(False) == result.speculation.steps

    def test_a_deltas_statistics_are_independent(self) -> None:
        """The engine continues to count without changing them."""
        target = engine(local())
        target.submit(submission("a", 9))
        [first] = target.step()
        target.step()
        assert first.speculation is not None
        assert first.speculation.steps == 1

    def test_nodes_beyond_a_stop_token_are_not_accepted(self) -> None:
        """The stop token is an accepted node in the middle of a path."""
        whole = served(engine(NoDraftClient()), submission("a", 9, output=50))["a"].tokens
        perfect = LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS), 1))
        for index in range(1, 30):
            stop = submission("a", 9, output=50, stop_token_ids=[whole[index]])
            result = served(engine(perfect), stop)["a"]
            assert result.tokens == whole[: whole.index(whole[index]) + 1]
            assert result.stop_token == whole[index]
            assert result.speculation is not None
            assert sum(result.accepted) == result.speculation.accepted_tokens


class Damaged(TableModel):
    """Its logits after some tokens are not finite."""

    def __init__(self, *bad: int, value: float = math.nan) -> None:
        super().__init__(VOCABULARY, SLOTS, SLOTS)
        self._bad, self._value = bad, value

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        output = super().run(rows, wanted, hidden_layers)
        for i, row in enumerate(wanted):
            if rows[row].token in self._bad:
                output.logits[i, i % VOCABULARY] = self._value
        return output


class TestNotFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_it_ends_only_its_own_request(self, value: float) -> None:
        requests = [submission(name, 20, output=12, temperature=0.5) for name in "abc"]
        plain = served(engine(NoDraftClient()), *requests)
        bad = next(token for token in plain["b"].tokens[3:] if token not in plain["a"].tokens + plain["c"].tokens)
        results = served(engine(NoDraftClient(), model=Damaged(bad, value=value)), *requests)
        until = plain["b"].tokens.index(bad) + 1
        assert (results["b"].finish_reason, results["b"].error) == (FinishReason.ERROR, NOT_FINITE_ERROR)
        assert results["b"].tokens == plain["b"].tokens[:until]
        for name in "ac":
            assert results[name].tokens == plain[name].tokens
            assert results[name].finish_reason is FinishReason.LENGTH

    def test_its_blocks_are_not_cached(self) -> None:
        request = submission("a", 40)
        target = engine(NoDraftClient(), model=Damaged(request.prompt[-1]))
        served(target, request)
        again = GenerationRequest("b", request.prompt, request.sampling)
        usage = served(target, again)["b"].usage
        assert usage is not None
        assert usage.cached_tokens == 0

    def test_a_rejected_node_with_such_logits_changes_nothing(self) -> None:
        request = submission("a", 9, output=30)
        expected = served(engine(NoDraftClient()), request)["a"].tokens
        bad = next(token for token in range(VOCABULARY) if token not in expected + list(request.prompt))
        script = Script()
        target = engine(script, model=Damaged(bad), row_budget=False)
        target.submit(request)
        tokens: list[int] = []
        while target.busy:
            [delta] = target.step()
            tokens += delta.tokens
            target.check_integrity()
            if len(tokens) < 20:
                guesses = [expected[len(tokens)], bad]
                script.next = DraftUpdates(
                    [(1, Growth(8 + len(tokens), 1 + 2 * len(tokens), [0, 0], guesses, [-0.1, -0.1]))]
                )
        assert tokens == expected

    def test_minus_infinity_is_allowed(self) -> None:
        request = submission("a", 9)
        plain = served(engine(NoDraftClient()), request)["a"].tokens
        never = Damaged(*range(VOCABULARY), value=-math.inf)
        assert served(engine(NoDraftClient(), model=never), request)["a"].tokens == plain


class TestHiddenStates:
    """A table model's are a row's token and position."""

    @pytest.mark.parametrize("before", [(), (1,), (0, 1)], ids=["none", "one layer", "others"])
    def test_a_late_draft_gets_all_states(self, before: tuple[int, ...]) -> None:
        own = HiddenStateScript()
        own.hidden_state_layers = before
        target = engine(own)
        served(target, submission("a", 40))  # leaves its prompt in the cache
        target.submit(submission("b", 40, output=30))
        tokens = {"a": list[int](), "b": [token for _ in range(5) for delta in target.step() for token in delta.tokens]}
        assert len(tokens["b"]) == 5, "it runs"
        own.hidden_state_layers = (0, 3)
        own.next = DraftUpdates(lost=[2])  # its draft reads other layers
        target.submit(submission("a", 40))
        while target.busy:
            for delta in target.step():
                tokens[delta.request_id] += delta.tokens
            target.check_integrity()
        for name, fed, output in (("b", own.fed[2], 30), ("a", own.fed[3], 10)):
            asked = submission(name, 40, output)
            assert tokens[name] == served(engine(NoDraftClient()), asked)[name].tokens
            computed = [*asked.prompt, *tokens[name][:-1]]
            assert fed == {position: [[token, position]] * 2 for position, token in enumerate(computed)}

    def test_equal_layers_recompute_nothing(self) -> None:
        own = HiddenStateScript()
        own.hidden_state_layers = (0, 3)
        target = engine(own)
        served(target, submission("a", 40))
        own.hidden_state_layers = [0, 3]
        result = served(target, submission("a", 40))["a"]
        assert result.usage is not None
        assert result.usage.cached_tokens == 32


class TestDrafts:
    def test_waiting_requests_open_no_draft(self) -> None:
        script = Script()
        target = engine(script, max_num_seqs=1)
        target.submit(submission("a", 5))
        target.submit(submission("b", 5))
        target.step()
        assert [each for each in script.messages if each[0] == "open"] == [("open", 1)]

    def test_a_draft_is_opened_before_the_prompt_runs(self) -> None:
        script = Script()
        model = WatchedModel(script)
        target = engine(script, model=model)
        target.submit(submission("a", 5))
        target.step()
        assert model.messages_before[0] == [("open", 1), ("flush", 0)]

    def test_a_lost_draft_is_replaced_at_once(self) -> None:
        script = Script()
        script.names = ["first", "second"]
        target = engine(script)
        target.submit(submission("a", 5))
        target.step()
        script.next = DraftUpdates(lost=[1])
        target.step()
        target.cancel("a")
        [delta] = target.step()
        assert delta.speculation is not None
        assert delta.speculation.drafts == ["first", "second"]

    def test_without_a_draft_it_decodes_plainly(self) -> None:
        script = Script()
        script.names = [None]
        result = served(engine(script), submission("a", 5))["a"]
        assert len(result.tokens) == 10
        assert result.speculation is not None
        assert result.speculation.drafts == []

    def test_growth_of_an_unknown_request_is_dropped(self) -> None:
        script = Script()
        target = engine(script)
        target.submit(submission("a", 5))
        target.step()
        script.next = DraftUpdates([(99, Growth(0, 1, [0], [1], [-0.1]))], lost=[98])
        target.step()
        assert (target.last_step.nodes_received, target.last_step.nodes_grafted) == (1, 0)

    @pytest.mark.parametrize("token", [-1, VOCABULARY])
    def test_growth_outside_the_vocabulary_is_dropped(self, token: int) -> None:
        """A draft may be padded to more ids than its target; running one would crash the engine."""
        script = Script()
        target = engine(script)
        target.submit(submission("a", 5))
        target.step()
        script.next = DraftUpdates([(1, Growth(5, 1, [0, 0], [3, token], [-0.1, -0.1]))])
        target.step()
        assert (target.last_step.nodes_received, target.last_step.nodes_grafted) == (2, 0)

    def test_a_draft_short_of_slots_changes_no_token(self) -> None:
        """The draft refuses, drops and reopens requests as its slots allow."""
        tight = LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, 60, SLOTS), 2))
        requests = [submission(name, 20, output=40) for name in "abcd"]
        results = served(engine(tight), *requests)
        plain = served(engine(NoDraftClient()), *requests)
        assert {k: a.tokens for k, a in results.items()} == {k: a.tokens for k, a in plain.items()}
        assert sum(a.speculation.accepted_tokens for a in results.values() if a.speculation) > 0


class Useless(Script):
    """Has nodes for every root, and never the right token."""

    def __init__(self, expected: Sequence[int], width: int = 1) -> None:
        super().__init__()
        self.expected = expected
        self.width = width
        self._next_id = 1
        self._done = 0

    def start_over(self) -> None:
        self._done = 0

    def commit(self, commit: Commit) -> None:
        self._done += len(commit.tokens)
        if self._done == len(self.expected):
            return  # it was the last commit
        tokens = [(self.expected[self._done] + 1 + i) % VOCABULARY for i in range(self.width)]
        base, log_probs = commit.base_position + len(commit.tokens), [math.log(0.99 / self.width)] * self.width
        self.next.growths.append((commit.request_id, Growth(base, self._next_id, [0] * self.width, tokens, log_probs)))
        self._next_id += self.width


class Overrated(Script):
    """Gives its two nodes of every root the same probability: the first is often right, the second never."""

    CLAIM = math.log(0.47)

    def __init__(self, expected: Sequence[int]) -> None:
        super().__init__()
        self.expected = expected
        self._done = 0

    def commit(self, commit: Commit) -> None:
        self._done += len(commit.tokens)
        if self._done == len(self.expected):
            return  # it was the last commit
        expected, wrong, hopeless = ((self.expected[self._done] + i) % VOCABULARY for i in range(3))
        first = expected if self._done % 3 else wrong
        base = commit.base_position + len(commit.tokens)
        growth = Growth(base, 1 + 2 * self._done, [0, 0], [first, hopeless], [self.CLAIM] * 2)
        self.next.growths.append((commit.request_id, growth))


class Recording(Calibration):
    """Records the cells of calibrated and of observed nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[int] = Counter()
        self.learned: Counter[int] = Counter()
        self.cache = FunctionTable(self._answer)

    def _answer(self, log_prob: float, rank: int, depth: int) -> tuple[int, float]:
        cell, corrected = self._calibrated(log_prob, rank, depth)
        self.asked[cell] += 1
        return cell, corrected

    def observe(self, cell: int, accepted: bool) -> None:
        self.learned[cell] += 1
        super().observe(cell, accepted)


class TestCalibration:
    LONG = 240

    def test_second_choices_are_calibrated_apart(self) -> None:
        expected = served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens
        target = engine(Overrated(expected))
        target.submit(submission("a", 5, output=self.LONG))
        shares: list[list[float]] = []
        for _ in range(self.LONG // 2):
            target.step()
            target._draft_manager.receive_growth(target._requests, ())
            tree = target._requests[1].tree
            shares.append([math.exp(node.path_log_prob) for node in root_of(tree).children.values()])
        assert shares[0] == pytest.approx([0.47, 0.47]), "not calibrated yet"
        first, second = shares[-1]
        assert first > 0.4
        assert second < 0.1

    def test_a_node_is_observed_in_the_cell_of_its_arrival(self) -> None:
        """A node may be verified long after its arrival, at a smaller depth."""
        target = engine(LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS, 0.1), 2)))
        recordings = {key: Recording() for key in target.calibrations}
        target.calibrations.update(recordings)
        steps: list[StepStats] = []
        served(target, *(submission(name, 9, output=100) for name in "abc"), steps=steps)
        pool = recordings[OWN_DRAFT_SOURCE, True]
        assert pool.learned
        assert pool.learned <= pool.asked, "each once, at its arrival"
        assert pool.learned == Counter(cell for step in steps for cell, _ in step.calibration_samples), (
            "the same samples are in the statistics"
        )
        assert len({cell % Calibration.DEPTH_COUNT for cell in pool.learned}) > 2, "of several depths"
        assert len({cell // Calibration.DEPTH_COUNT % Calibration.RANKS for cell in pool.learned}) > 1, (
            "of several ranks"
        )

    @pytest.mark.parametrize(
        ("strategy", "each"), [("coupled", 2), ("greedy", 2), ("typical-acceptance", 1)], ids=lambda value: str(value)
    )
    def test_nodes_without_a_row_are_observed_if_drafter_invariant(self, strategy: str, each: int) -> None:
        """One of the draft's two nodes gets a row. Both are observed only if tokens do not depend on the draft."""
        expected = served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens
        target = engine(Useless(expected, width=2), nodes=1, strategy=strategy)
        steps: list[StepStats] = []
        served(target, submission("a", 5, output=self.LONG), steps=steps)
        assert set(Counter(len(step.calibration_samples) for step in steps)) == {0, each}
        assert not any(hit for step in steps for _, hit in step.calibration_samples)

    def test_every_draft_of_a_node_observes_it(self) -> None:
        """Also a draft whose log-probability does not count."""
        expected = served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens
        target = engine(Overrated(expected), lookups=[Overrated(expected)])
        recordings = {key: Recording() for key in target.calibrations}
        target.calibrations.update(recordings)
        steps: list[StepStats] = []
        served(target, submission("a", 5, output=self.LONG), steps=steps)
        own, other = (recordings[source, True] for source in (OWN_DRAFT_SOURCE, OWN_DRAFT_SOURCE + 1))
        assert own.learned
        assert (own.learned, own.drafted, own.accepted) == (other.learned, other.drafted, other.accepted)
        assert own.learned == Counter(cell for step in steps for cell, _ in step.calibration_samples), (
            "the statistics have only the own draft's"
        )


def test_step_cost_excludes_prompts_and_waits() -> None:
    """Neither steps with prompt tokens nor the time of waits count."""
    now = [0.0]

    class Slow(LocalDraftClient):
        def poll(self, timeout_s: float) -> DraftUpdates:
            now[0] += 7.0
            return super().poll(timeout_s)

    class Ticking(TableModel):
        def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
            now[0] += 0.25
            return super().run(rows, wanted, hidden_layers)

    model = Ticking(VOCABULARY, SLOTS, SLOTS)
    draft = Slow(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS, 0.1), 2))
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    target = Engine(model, EngineConfig(slots=SLOTS), speculation, draft, FREE, clock=lambda: now[0])
    observed: list[tuple[int, float, int]] = []
    target._cost.observe = lambda *step: observed.append(step)  # type: ignore[method-assign, assignment]
    steps: list[StepStats] = []
    served(target, submission("a", 9, output=40), steps=steps)
    decoding = [step for step in steps if step.rows and not step.prompt_tokens]
    assert observed == [(step.rows, 0.25, step.rows - 1) for step in decoding]
    assert len(observed) > 3


@pytest.mark.parametrize("late", [False, True])
def test_an_accepted_but_costly_draft_is_paused(late: bool) -> None:
    now, paused = [0.0], []

    class ConcurrentDraft(LocalDraftClient):
        concurrent = True

        def poll(self, timeout_s: float) -> DraftUpdates:
            now[0] += 20.0 if late else 0.0
            return super().poll(timeout_s)

        def limit(self, limit: Limit) -> None:
            paused.append(limit.max_nodes == 0)
            super().limit(limit)

    class Ticking(TableModel):
        def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
            now[0] += 1.0
            return super().run(rows, wanted, hidden_layers)

    draft = ConcurrentDraft(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS), 1))
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    model = Ticking(VOCABULARY, SLOTS, SLOTS)
    target = Engine(model, EngineConfig(slots=SLOTS), speculation, draft, FREE, clock=lambda: now[0])
    result = served(target, submission("a", 5, output=60))["a"]
    assert result.speculation is not None
    assert result.speculation.accepted_tokens > 0
    assert any(paused) is late


class TestDraftGate:
    LONG = 120

    def expected(self) -> Sequence[int]:
        return served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens

    def test_a_local_draft_without_cost_is_not_paused(self) -> None:
        script = Useless(self.expected())
        script.concurrent = False
        served(engine(script), submission("a", 5, output=self.LONG))
        assert not any(limit.max_nodes == 0 for limit in script.limits)

    @pytest.mark.parametrize("drafting", [Script(), NoDraftClient()], ids=["a draft", "no draft"])
    def test_plain_steps_are_observed_with_or_without_draft(self, drafting: NoDraftClient) -> None:
        target, observed = engine(drafting), list[bool]()
        target._cost.observe_plain = lambda *_, drafted: observed.append(drafted)  # type: ignore[method-assign]
        served(target, submission("a", 5))
        assert set(observed) == {isinstance(drafting, Script)}

    def test_a_useless_draft_is_paused_and_probed(self) -> None:
        script = Useless(self.expected())
        steps: list[StepStats] = []
        result = served(engine(script), submission("a", 5, output=self.LONG), steps=steps)["a"]
        assert result.tokens == self.expected()
        assert [limit.max_nodes > 0 for limit in script.limits[:3]] == [False, True, False]
        assert script.openings[0].max_nodes == script.limits[1].max_nodes
        paused = [step for step in steps if step.nodes_received and not step.nodes_grafted]
        assert len(paused) > DraftGate.MIN_PAUSE_STEPS - 2, "growth of a paused draft is dropped"

    def test_the_next_request_of_a_paused_draft_is_paused(self) -> None:
        script = Useless(self.expected())
        target = engine(script)
        for _ in range(8):
            script.limits.clear()
            script.start_over()
            served(target, submission("a", 5, output=self.LONG))
        script.limits.clear()
        script.start_over()
        target.submit(submission("a", 5, output=self.LONG))
        target.step()
        assert [limit.max_nodes for limit in script.limits] == [0]

    def test_a_paused_request_is_unpaused_at_another_draft(self) -> None:
        script = Useless(self.expected())
        script.names = ["useless", "other"]
        target = engine(script)
        target.submit(submission("a", 5, output=self.LONG))
        while not script.limits:
            target.step()
        script.next = DraftUpdates(lost=[1])
        target.step()
        assert len(script.openings) == 2
        assert script.openings[1].max_nodes == script.openings[0].max_nodes > 0
        assert script.openings[1].max_depth == script.openings[0].max_depth > 0
        assert len(script.limits) == 1, "the other draft is not judged yet"

    def test_a_draft_is_not_judged_before_its_first_growth(self) -> None:
        script = Script()
        served(engine(script), submission("a", 5, output=self.LONG))
        assert script.limits == []

    @pytest.mark.parametrize(
        ("gated", "config"), [(True, {}), (False, {"row_budget": False}), (False, {"schedule": "lockstep"})]
    )
    def test_without_row_budget_or_in_lockstep_there_is_no_gate(self, gated: bool, config: Any) -> None:
        """Drafts are neither paused nor limited by probability."""
        script = Useless(self.expected(), width=8)
        target = engine(script, max_num_batched_rows=8, **config)
        for name in "ab":
            script.start_over()
            served(target, submission(name, 5, output=self.LONG))
        assert any(limit.max_nodes == 0 for limit in script.limits) is gated
        assert any(limit.least_path_probability > 0 for limit in script.limits) is gated
        assert (script.openings[1].least_path_probability > 0) is gated
        assert bool(target._draft_manager._gates) is gated


@pytest.mark.parametrize(("budgeted", "most"), [(True, 8), (False, 9)])
def test_without_the_row_budget_every_node_is_verified(budgeted: bool, most: int) -> None:
    """Nine rows cost a hundred times as much as eight; a tree of eight nodes and the root fill nine."""
    speculation = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=8,
        max_tree_nodes=8,
        tree_width=1,
        row_budget=budgeted,
        draft_schedule="lockstep",
    )
    draft = LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS), 1))
    steep = RowCost([8, 16], [1.0, 100.0])
    target = Engine(TableModel(VOCABULARY, SLOTS, SLOTS), EngineConfig(slots=SLOTS), speculation, draft, steep)
    steps: list[StepStats] = []
    served(target, submission("a", 5, output=60), steps=steps)
    assert max(step.rows for step in steps[1:]) == most


class TestEnds:
    def test_a_cancelled_request_returns_usage_and_statistics(self) -> None:
        script = Script()
        target = engine(script)
        target.submit(submission("a", 5))
        target.step()
        target.step()
        target.cancel("a")
        target.check_integrity()
        [delta] = target.step()
        assert delta.finish_reason is FinishReason.CANCELLED
        assert delta.usage is not None
        assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (5, 2)
        assert delta.speculation is not None
        assert delta.speculation.steps == 2
        assert ("close", 1) in script.messages
        assert not target.busy

    @pytest.mark.parametrize("output", [1, 2, 7])
    def test_drafts_get_the_last_tokens_before_the_close(self, output: int) -> None:
        """The request's own draft and lookup drafts get the same messages."""
        own, lookup = RecordingScript(), RecordingScript()
        target = engine(own, lookups=[lookup])
        result = served(target, submission("a", 5, output=output))["a"]
        for each in (own, lookup):
            assert [what for what, _ in each.sent] == ["commit"] * output + ["close"]
            commits = [sent for what, sent in each.sent if isinstance(sent, Commit)]
            assert [token for commit in commits for token in commit.tokens] == result.tokens
            assert [commit.base_position for commit in commits] == list(range(4, 4 + output))
            assert [sent for what, sent in each.sent if what == "close"] == [1]

    def test_the_last_commit_and_the_close_are_flushed_together(self) -> None:
        own = RecordingScript()
        served(engine(own), submission("a", 5, output=2))
        last_flush = len(own.messages) - 1 - own.messages[::-1].index(("flush", 0))
        assert own.messages[last_flush - 2 : last_flush] == [("commit", 1), ("close", 1)]

    def test_the_last_commit_has_hidden_states(self) -> None:
        """They are read before the slots are freed. The last token itself has none."""
        own = RecordingScript()
        own.hidden_state_layers = (0, 3)
        result = served(engine(own), submission("a", 5, output=3))["a"]
        [*_, last] = [sent for _, sent in own.sent if isinstance(sent, Commit)]
        assert last.hidden_states is not None
        assert last.hidden_states[:, 0].tolist() == [[result.tokens[-2], 4 + 2]]

    def test_cancelling_waiting_running_and_unknown_requests(self) -> None:
        target = engine(local(), max_num_batched_rows=16)
        for name in "abc":
            target.submit(submission(name, 40))
        target.step()
        for name in ("c", "a", "unknown", "b", "a"):
            target.cancel(name)
            target.check_integrity()
        assert [d.request_id for d in target.step()] == ["c", "a", "b"]
        assert target.load.free_slots == SLOTS

    def test_an_engine_can_be_used_after_reset(self) -> None:
        expected = served(engine(local()), submission("a", 30))["a"].tokens

        class Failing(TableModel):
            passes = 0

            def run(self, *arguments: object) -> object:  # type: ignore[override]
                self.passes += 1
                if self.passes == 3:
                    raise RuntimeError("the device is gone")
                return super().run(*arguments)  # type: ignore[arg-type]

        target = engine(local(), model=Failing(VOCABULARY, SLOTS, SLOTS))
        with pytest.raises(RuntimeError, match="the device is gone"):
            served(target, submission("a", 30), submission("b", 30))
        target.reset()
        target.check_integrity()
        assert not target.busy
        result = served(target, submission("a", 30))["a"]
        assert result.tokens == expected
        assert result.speculation is not None
        assert result.speculation.accepted_tokens > 0

    @pytest.mark.parametrize("slots", [SLOTS, 4 * SLOTS])
    def test_a_prompt_of_the_announced_length_is_served(self, slots: int) -> None:
        """Gateways refuse longer prompts. One request cannot have more than all slots."""
        model = TableModel(VOCABULARY, slots, 2 * SLOTS)
        target = Engine(model, EngineConfig(slots=slots), SpeculativeConfig(), NoDraftClient(), FREE)
        longest = model_facts(target, SpeculativeConfig()).max_model_len
        assert longest == min(slots, 2 * SLOTS)
        for prompt in (1, longest - 1):
            params = SamplingParams(temperature=0.0, max_tokens=longest - prompt)
            result = served(target, GenerationRequest("r", [1] * prompt, params))["r"]
            assert (len(result.tokens), result.error) == (longest - prompt, "")

    def test_a_request_id_may_be_reused_after_the_end(self) -> None:
        target = engine(NoDraftClient())
        first = served(target, submission("a", 5))["a"]
        assert served(target, submission("a", 5))["a"].tokens == first.tokens
        target.submit(submission("a", 5))
        target.submit(submission("a", 5))
        [refused, *_] = target.step()
        assert refused.finish_reason is FinishReason.ERROR
        assert "'a' is in use" in refused.error


def test_a_computed_prompt_is_shared_before_its_request_ends() -> None:
    """Choices of one HTTP request have the same prompt."""
    this = engine(NoDraftClient())
    prompt = [number % VOCABULARY for number in range(40)]
    this.submit(GenerationRequest("first", prompt, SamplingParams(max_tokens=50)))
    this.step()
    this.submit(GenerationRequest("second", prompt, SamplingParams(max_tokens=1)))
    ended = [delta for _ in range(3) for delta in this.step() if delta.request_id == "second" and delta.usage]
    assert this.load.running == 1, "the first is still running"
    assert ended[0].usage is not None
    assert ended[0].usage.cached_tokens == 32
    this.check_integrity()
