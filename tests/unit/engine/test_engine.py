"""The engine: step statistics, drafts, calibration, the draft gate, and the end of requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import RowCost, StepCost
from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient, PollResult
from paceline.engine.draft_gate import DraftGate
from paceline.engine.draft_manager import MAX_HELD_TOKENS
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.engine.engine import NOT_FINITE_ERROR, Engine
from paceline.messages import Delta, FinishReason, GenerationRequest, Timings
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.telemetry.step_stats import StepStats
from paceline_lab.fake_models.table_model import TableModel
from paceline_services.target.engine_process import model_facts
from tests.helpers.drafts import model_draft
from tests.helpers.engine_runs import run
from tests.helpers.targets import FREE

VOCABULARY = 64
SLOTS = 256
LONG = 120
Message = TypeVar("Message")


class Script(NoDraftClient):
    """Records the messages to it, and returns the updates that a test sets."""

    def __init__(self, *names: str) -> None:
        """`names`: of the drafts that it finds for requests, in turn; the last one from then on."""
        self.messages: list[Any] = []
        self.next = PollResult()
        self._names = names or ("somebody",)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.messages if isinstance(message, kind)]

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self.messages.append(opening)
        return self._names[min(len(self.of(Opening)), len(self._names)) - 1]

    def context(self, context: Context) -> None:
        self.messages.append(context)

    def commit(self, commit: Commit) -> None:
        self.messages.append(commit)

    def limit(self, limit: Limit) -> None:
        self.messages.append(limit)

    def close(self, request_id: int) -> None:
        self.messages.append(f"close {request_id}")

    def flush(self) -> None:
        self.messages.append("flush")

    def poll(self, timeout_s: float) -> PollResult:
        updates, self.next = self.next, PollResult()
        return updates


class Guesser(Script):
    """Sends `width` nodes for every root, all with the same log-probability. By default none is the right token."""

    def __init__(
        self,
        *names: str,
        width: int = 1,
        claim: float = 0.99,
        hit: Callable[[int], bool] | None = None,
        output: int = LONG,
    ) -> None:
        """`hit`: whether the first node has the right token, by the number of output tokens before it."""
        super().__init__(*names)
        self.expected = answer(output)
        self._width, self._claim, self._hit = width, claim, hit
        self._next_id, self._done = 1, 0

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self._done = opening.output_tokens
        return super().open(opening, drafts)

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self._done += len(commit.tokens)
        if self._done == len(self.expected):
            return  # it was the last commit
        first = not (self._hit and self._hit(self._done))
        tokens = [(self.expected[self._done] + first + i) % VOCABULARY for i in range(self._width)]
        base, log_probs = commit.base_position + len(commit.tokens), [math.log(self._claim / self._width)] * self._width
        self.next.growths.append((commit.request_id, Growth(base, self._next_id, [0] * self._width, tokens, log_probs)))
        self._next_id += self._width


class Watched(TableModel):
    """Calls `before` with the number of each pass, from 1. Logits after the tokens in `bad` are `value`."""

    def __init__(self, before: Callable[[int], object] = bool, bad: Collection[int] = (), value: float = math.nan):
        super().__init__(VOCABULARY, SLOTS, SLOTS)
        self._before, self._bad, self._value = before, bad, value
        self._passes = 0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self._passes += 1
        self._before(self._passes)
        output = super().run(rows, wanted, hidden_layers)
        for i, row in enumerate(wanted):
            if rows[row].token in self._bad:
                output.logits[i, i % VOCABULARY] = self._value
        return output


def table(disagreement: float = 0.0, slots: int = SLOTS) -> TableModel:
    return TableModel(VOCABULARY, slots, SLOTS, disagreement)


def engine(
    drafting: DraftClient,
    *,
    model: TableModel | None = None,
    lookups: Sequence[DraftClient] = (),
    cost: RowCost = FREE,
    clock: Callable[[], float] | None = None,
    speculation: dict[str, Any] | None = None,
    **settings: int,
) -> Engine:
    defaults = {"method": "ngram", "num_speculative_tokens": 4, "max_tree_nodes": 8}
    speculative = SpeculativeConfig.model_validate(defaults | (speculation or {}))
    config = EngineConfig(slots=SLOTS, **settings)
    clocks = {} if clock is None else {"clock": clock}
    return Engine(model or table(), config, speculative, drafting, cost, lookup_clients=lookups, **clocks)


def local(disagreement: float = 0.2, width: int = 2, slots: int = SLOTS) -> LocalDraftClient:
    return LocalDraftClient(model_draft(table(disagreement, slots), width))


def generation_request(
    request_id: str = "a", prompt: int = 5, output: int = 10, **sampling: object
) -> GenerationRequest:
    params = SamplingParams.model_validate({"temperature": 0.0, "max_tokens": output} | sampling)
    tokens = [(ord(request_id[0]) + 7 * i) % VOCABULARY for i in range(prompt)]
    return GenerationRequest(request_id, tokens, params, SpeculativeOptions(report=True))


def answer(output: int = LONG) -> list[int]:
    """The tokens of the request "a"."""
    return served(engine(NoDraftClient()), generation_request(output=output))["a"].tokens


def served(
    target: Engine, *generation_requests: GenerationRequest, steps: list[StepStats] | None = None
) -> dict[str, Delta]:
    """Serve the requests; the merged deltas of each. Statistics of every step are appended to `steps`."""
    return run(target, generation_requests, steps=steps)


@pytest.mark.parametrize("method", ["draft_model", "ngram"], ids=["own draft", "lookup"])
def test_a_tree_has_what_its_step_verified(method: str) -> None:
    """The accepted nodes are one path, that of the committed guesses."""
    speculation = {"method": ["ngram", "draft_model"], "model": "table:64"}
    drafts = (local(), []) if method == "draft_model" else (Script(), [Guesser(width=2, hit=lambda done: done % 3 > 0)])
    target = engine(drafts[0], lookups=drafts[1], speculation=speculation)
    target.submit(replace(generation_request(output=LONG), return_tree=True))
    nodes, deltas = [], []
    while target.busy:
        deltas += target.step()
    for delta in deltas:
        [tree] = delta.trees
        path, reached = [], 0
        for number, node in enumerate(zip(tree.parents, tree.tokens, tree.accepted, tree.methods, strict=True), 1):
            parent, token, accepted, _ = node
            assert parent < number
            if accepted:
                assert parent == reached
                path, reached = [*path, token], number
            nodes.append(node)
        assert path == delta.tokens[: sum(delta.accepted)]
    assert [token for delta in deltas for token in delta.tokens] == answer()
    stats = deltas[-1].speculation
    assert stats is not None
    assert len(nodes) == stats.drafted_tokens > stats.accepted_tokens > 0
    assert sum(accepted for _, _, accepted, _ in nodes) == stats.accepted_tokens
    assert {each for *_, each in nodes} == {method}


def test_trees_are_made_on_request_alone() -> None:
    assert served(engine(local()), generation_request())["a"].trees == []


class TestStepStats:
    def test_numbers_of_steps_add_up(self) -> None:
        """Prompt tokens count once, even if preemption recomputes them. Each token is accepted or a bonus."""
        steps: list[StepStats] = []
        target = engine(local(), max_num_batched_rows=64)
        results = served(target, *(generation_request(name, 70, output=60) for name in "abcde"), steps=steps)
        assert sum(s.preemptions for s in steps) > 0
        assert sum(s.prompt_tokens for s in steps) == 5 * 70
        assert sum(s.generation_tokens for s in steps) == sum(len(a.tokens) for a in results.values()) == 5 * 60
        totals = [a.speculation for a in results.values()]
        for name in ("drafted_tokens", "accepted_tokens", "verifications", "steps"):
            assert sum(getattr(s.speculation, name) for s in steps) == sum(getattr(t, name) for t in totals)
        for result in results.values():
            assert result.speculation is not None
            assert result.accepted.count(True) == result.speculation.accepted_tokens > 0
            assert result.accepted.count(False) == result.speculation.steps
        assert sum(s.nodes_grafted for s in steps) <= sum(s.nodes_received for s in steps)
        assert max(s.rows for s in steps) <= 64
        assert steps[-1].running == steps[-1].waiting == 0
        assert steps[-1].free_slots == target.load.free_slots == SLOTS

    def test_a_deltas_statistics_are_independent(self) -> None:
        """The engine continues to count without changing them."""
        target = engine(local())
        target.submit(generation_request())
        [first] = target.step()
        assert first.speculation is not None
        before = deepcopy(first.speculation)
        while target.busy:
            target.step()
        assert first.speculation == before
        assert before.steps == 1

    @pytest.mark.parametrize("index", range(1, 30))
    def test_nodes_beyond_a_stop_token_are_not_accepted(self, index: int) -> None:
        """The stop token is an accepted node in the middle of a path."""
        whole = answer()
        result = served(engine(local(0.0, 1)), generation_request(output=50, stop_token_ids=[whole[index]]))["a"]
        assert result.tokens == whole[: whole.index(whole[index]) + 1]
        assert result.stop_token == whole[index]
        assert result.speculation is not None
        assert sum(result.accepted) == result.speculation.accepted_tokens

    def test_a_computed_prompt_is_shared_before_its_request_ends(self) -> None:
        """Choices of one HTTP request have the same prompt. Cached tokens are not computed."""
        target = engine(NoDraftClient())
        target.submit(generation_request("first", 40, output=50))
        target.step()
        target.submit(generation_request("fellow", 40, output=1))
        [ended] = [delta for delta in target.step() if delta.request_id == "fellow"]
        assert target.load.running == 1, "the first is still running"
        assert ended.usage is not None
        assert ended.usage.cached_tokens == 32
        assert target.last_step.prompt_tokens == 8


class TestNotFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_it_ends_only_its_own_request(self, value: float) -> None:
        requests = [generation_request(name, 20, output=12, temperature=0.5) for name in "abc"]
        plain = served(engine(NoDraftClient()), *requests)
        bad = next(token for token in plain["b"].tokens[3:] if token not in plain["a"].tokens + plain["c"].tokens)
        results = served(engine(NoDraftClient(), model=Watched(bad=[bad], value=value)), *requests)
        until = plain["b"].tokens.index(bad) + 1
        assert (results["b"].finish_reason, results["b"].error) == (FinishReason.ERROR, NOT_FINITE_ERROR)
        assert results["b"].tokens == plain["b"].tokens[:until]
        for name in "ac":
            assert results[name].tokens == plain[name].tokens
            assert results[name].finish_reason is FinishReason.LENGTH

    def test_its_blocks_are_not_cached(self) -> None:
        request = generation_request(prompt=40)
        target = engine(NoDraftClient(), model=Watched(bad=request.prompt[-1:]))
        served(target, request)
        usage = served(target, request)["a"].usage
        assert usage is not None
        assert usage.cached_tokens == 0

    def test_a_rejected_node_with_such_logits_changes_nothing(self) -> None:
        script = Guesser(width=2, hit=lambda _: True)
        bad = set(range(VOCABULARY)) - {*script.expected, *generation_request().prompt}
        assert any((token + 1) % VOCABULARY in bad for token in script.expected[1:]), "the second node's token"
        target = engine(script, model=Watched(bad=bad), speculation={"row_budget": False})
        assert served(target, generation_request(output=LONG))["a"].tokens == script.expected

    def test_minus_infinity_is_allowed(self) -> None:
        never = Watched(bad=range(VOCABULARY), value=-math.inf)
        assert served(engine(NoDraftClient(), model=never), generation_request())["a"].tokens == answer(10)


class TestHiddenStates:
    """A table model's are a row's token and position."""

    @pytest.mark.parametrize("before", [(), (1,), (0, 1)], ids=["none", "one layer", "others"])
    def test_a_late_draft_gets_all_states(self, before: tuple[int, ...]) -> None:
        own = Script()
        own.hidden_state_layers = before
        target = engine(own)
        served(target, generation_request("a", 40))  # leaves its prompt in the cache
        target.submit(generation_request("b", 40, output=30))
        tokens = {"a": list[int](), "b": [token for _ in range(5) for delta in target.step() for token in delta.tokens]}
        assert len(tokens["b"]) == 5, "it runs"
        own.hidden_state_layers = (0, 3)
        own.next = PollResult(lost=[2])  # its draft reads other layers
        own.messages.clear()
        target.submit(generation_request("a", 40))
        while target.busy:
            for delta in target.step():
                tokens[delta.request_id] += delta.tokens
            target.check_integrity()
        for key, name, output in ((2, "b", 30), (3, "a", 10)):
            asked, fed = generation_request(name, 40, output), dict[int, list[list[float]]]()
            assert tokens[name] == served(engine(NoDraftClient()), asked)[name].tokens
            for message in (*own.of(Context), *own.of(Commit)):
                if message.request_id == key and message.hidden_states is not None:
                    fed |= enumerate(message.hidden_states.tolist(), message.base_position)
            computed = [*asked.prompt, *tokens[name][:-1]]
            assert fed == {position: [[token, position]] * 2 for position, token in enumerate(computed)}

    def test_equal_layers_recompute_nothing(self) -> None:
        own = Script()
        own.hidden_state_layers = (0, 3)
        target = engine(own)
        served(target, generation_request(prompt=40))
        own.hidden_state_layers = [0, 3]
        usage = served(target, generation_request(prompt=40))["a"].usage
        assert usage is not None
        assert usage.cached_tokens == 32


class TestDrafts:
    def test_a_draft_is_opened_before_the_prompt_runs(self) -> None:
        """And none for a request that waits."""
        script, before = Script(), list[list[Any]]()
        target = engine(script, model=Watched(lambda _: before.append(script.messages.copy())), max_num_seqs=1)
        target.submit(generation_request("a"))
        target.submit(generation_request("b"))
        target.step()
        assert before == [[*script.of(Opening), "flush"]]
        assert [opening.request_id for opening in script.of(Opening)] == [1]

    def test_a_lost_draft_is_replaced_at_once(self) -> None:
        script = Script("first", "second")
        target = engine(script)
        target.submit(generation_request())
        target.step()
        script.next = PollResult(lost=[1])
        target.step()
        target.cancel("a")
        [delta] = target.step()
        assert delta.speculation is not None
        assert delta.speculation.drafts == ["first", "second"]

    @pytest.mark.parametrize(("request_id", "token"), [(99, 1), (1, -1), (1, VOCABULARY)])
    def test_invalid_growth_is_dropped(self, request_id: int, token: int) -> None:
        """Of an unknown request, or outside the vocabulary: a draft may be padded to more ids than its target."""
        script = Script()
        target = engine(script)
        target.submit(generation_request())
        target.step()
        script.next = PollResult([(request_id, Growth(5, 1, [0, 0], [3, token], [-0.1, -0.1]))], lost=[98])
        target.step()
        assert (target.last_step.nodes_received, target.last_step.nodes_grafted) == (2, 0)

    def test_a_draft_short_of_slots_changes_no_token(self) -> None:
        """The draft refuses, drops and reopens requests as its slots allow."""
        requests = [generation_request(name, 20, output=40) for name in "abcd"]
        results = served(engine(local(slots=60)), *requests)
        plain = served(engine(NoDraftClient()), *requests)
        assert {k: a.tokens for k, a in results.items()} == {k: a.tokens for k, a in plain.items()}
        assert sum(a.speculation.accepted_tokens for a in results.values() if a.speculation) > 0
        assert all(a.speculation.drafts == [] for a in plain.values() if a.speculation)


class Recording(Calibration):
    """Records the cells of calibrated and of observed nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[int] = Counter()
        self.learned: Counter[int] = Counter()
        recording, table = self, self.cache

        class Asked(dict[tuple[float, int, int], tuple[int, float]]):
            def __missing__(self, guess: tuple[float, int, int]) -> tuple[int, float]:
                recording.asked[table[guess][0]] += 1
                return table[guess]

        self.cache = Asked()

    def observe(self, cell: int, accepted: bool) -> None:
        self.learned[cell] += 1
        super().observe(cell, accepted)


class TestCalibration:
    @staticmethod
    def recorded(target: Engine, *requests: GenerationRequest) -> tuple[list[Recording], Counter[int]]:
        """The calibrations of greedy requests by draft, and the cells in the steps' statistics."""
        recordings = {key: Recording() for key in target.calibrations}
        target.calibrations.update(recordings)
        steps: list[StepStats] = []
        served(target, *requests, steps=steps)
        greedy = [recordings[source, True] for source, is_greedy in sorted(recordings) if is_greedy]
        return greedy, Counter(cell for step in steps for cell, _ in step.calibration_samples)

    def test_a_node_is_observed_in_the_cell_of_its_arrival(self) -> None:
        """A node may be verified long after its arrival, at a smaller depth."""
        requests = [generation_request(name, 9, output=100) for name in "abc"]
        [own], samples = self.recorded(engine(local(0.1)), *requests)
        assert own.learned <= own.asked, "each once, at its arrival"
        assert own.learned == samples, "the same samples are in the statistics"
        assert len({cell % Calibration.DEPTH_COUNT for cell in own.learned}) > 2, "of several depths"
        ranks = {cell // Calibration.DEPTH_COUNT % Calibration.RANKS for cell in own.learned}
        assert len(ranks) > 1, "of several ranks"

    def test_every_draft_of_a_node_observes_it(self) -> None:
        """Also a draft whose log-probability does not count. The statistics have only the own draft's."""
        drafts = [Guesser(width=2, claim=0.94, hit=lambda done: done % 3 > 0) for _ in range(2)]
        target = engine(drafts[OWN_DRAFT_SOURCE], lookups=drafts[1:])
        [own, other], samples = self.recorded(target, generation_request(output=LONG))
        assert own.learned
        assert (own.learned, own.drafted, own.accepted) == (other.learned, other.drafted, other.accepted)
        assert own.learned == samples

    @pytest.mark.parametrize(("strategy", "each"), [("coupled", 2), ("greedy", 2), ("typical-acceptance", 1)])
    def test_nodes_without_a_row_are_observed_if_drafter_invariant(self, strategy: str, each: int) -> None:
        """One of the draft's two nodes gets a row. Both are observed only if tokens do not depend on the draft."""
        speculation = {"max_tree_nodes": 1, "rejection_sampling_strategy": strategy}
        steps: list[StepStats] = []
        served(engine(Guesser(width=2), speculation=speculation), generation_request(output=LONG), steps=steps)
        assert set(Counter(len(step.calibration_samples) for step in steps)) == {0, each}
        assert not any(hit for step in steps for _, hit in step.calibration_samples)


class TestCosts:
    @pytest.fixture
    def observed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
        """What the engine's step cost observes."""
        observed: list[tuple[object, ...]] = []

        class Observed(StepCost):
            def observe(self, rows: int, seconds: float, nodes: int = 0) -> None:
                observed.append((rows, seconds, nodes))

            def observe_plain(self, rows: int, seconds: float, *, drafted: bool = False) -> None:
                observed.append(("plain", drafted))

        monkeypatch.setattr("paceline.engine.step_meter.StepCost", Observed)
        return observed

    def test_step_cost_excludes_prompts_and_waits(self, observed: list[tuple[object, ...]]) -> None:
        """Neither steps with prompt tokens nor the time of waits count."""
        now, steps = [0.0], list[StepStats]()

        class Slow(LocalDraftClient):
            def poll(self, timeout_s: float) -> PollResult:
                now[0] += 7.0
                return super().poll(timeout_s)

        def tick(_: int) -> None:
            now[0] += 0.25

        draft = Slow(model_draft(table(0.1), 2))
        served(
            engine(draft, model=Watched(tick), clock=lambda: now[0]),
            generation_request(prompt=9, output=40),
            steps=steps,
        )
        decoding = [step for step in steps if step.rows and not step.prompt_tokens]
        assert [each for each in observed if each[0] != "plain"] == [
            (step.rows, 0.25, step.rows - 1) for step in decoding
        ]
        assert len(decoding) > 3

    def test_a_step_that_preempts_for_a_prompt_is_not_observed(self, observed: list[tuple[object, ...]]) -> None:
        """It was expected only to draw: no more requests may run."""
        target = engine(NoDraftClient(), max_num_seqs=2)
        for name in ("a", "b"):
            target.submit(replace(generation_request(name, output=40), client="x"))
        while not observed:
            target.step()
        observed.clear()
        target.submit(replace(generation_request("c", prompt=30), client="y"))
        target.step()
        assert target.last_step.prompt_tokens
        assert not observed

    @pytest.mark.parametrize("drafting", [Script(), NoDraftClient()], ids=["a draft", "no draft"])
    def test_plain_steps_are_observed_with_or_without_draft(
        self, observed: list[tuple[object, ...]], drafting: NoDraftClient
    ) -> None:
        served(engine(drafting), generation_request())
        assert {each[1] for each in observed if each[0] == "plain"} == {isinstance(drafting, Script)}

    @pytest.mark.parametrize("late", [False, True])
    def test_an_accepted_but_costly_draft_is_paused(self, late: bool) -> None:
        now, paused = [0.0], []

        class ConcurrentDraft(LocalDraftClient):
            concurrent = True

            def poll(self, timeout_s: float) -> PollResult:
                now[0] += 20.0 if late else 0.0
                return super().poll(timeout_s)

            def limit(self, limit: Limit) -> None:
                paused.append(limit.max_nodes == 0)
                super().limit(limit)

        def tick(_: int) -> None:
            now[0] += 1.0

        draft = ConcurrentDraft(model_draft(table(), 1))
        target = engine(draft, model=Watched(tick), clock=lambda: now[0], speculation={"num_speculative_tokens": 2})
        result = served(target, generation_request(output=60))["a"]
        assert result.speculation is not None
        assert result.speculation.accepted_tokens > 0
        assert any(paused) is late

    @pytest.mark.parametrize(("budgeted", "most"), [(True, 8), (False, 9)])
    def test_without_the_row_budget_every_node_is_verified(self, budgeted: bool, most: int) -> None:
        """Nine rows cost a hundred times as much as eight; a tree of eight nodes and the root fill nine."""
        speculation = {"num_speculative_tokens": 8, "row_budget": budgeted, "draft_schedule": "lockstep"}
        steps: list[StepStats] = []
        steep = RowCost([8, 16], [1.0, 100.0])
        served(engine(local(0.0, 1), cost=steep, speculation=speculation), generation_request(output=60), steps=steps)
        assert max(step.rows for step in steps[1:]) == most


class TestDraftGate:
    def test_a_useless_draft_is_paused_and_probed(self) -> None:
        script = Guesser()
        result = served(engine(script), generation_request(output=LONG))["a"]
        assert result.tokens == script.expected
        limits = [limit.max_nodes for limit in script.of(Limit)[:3]]
        assert limits == [0, script.of(Opening)[0].max_nodes, 0]

    def test_growth_on_its_way_to_a_paused_request_is_dropped(self) -> None:
        script = Guesser()
        target = engine(script)
        target.submit(generation_request(output=LONG))
        while not script.of(Limit):
            target.step()
            assert target.last_step.nodes_received == target.last_step.nodes_grafted
        target.step()
        assert (target.last_step.nodes_received, target.last_step.nodes_grafted) == (1, 0)

    def test_a_paused_draft_gets_commits_later(self) -> None:
        """Many tokens at a time, and all of them before it is resumed or closed. Lookup drafts are not paused."""
        own, lookup = Guesser(output=2 * LONG), Script()
        result = served(engine(own, lookups=[lookup]), generation_request(output=2 * LONG))["a"]
        lengths, paused = {True: list[int](), False: list[int]()}, False
        for message in own.messages:
            if isinstance(message, Limit):
                paused = message.max_nodes == 0
            elif isinstance(message, Commit):
                lengths[paused].append(len(message.tokens))
        assert set(lengths[False]) == {1}
        first, *full, last = lengths[True]
        assert (first, full) == (DraftGate.MIN_PAUSE_STEPS, [MAX_HELD_TOKENS] * 2)
        assert 0 < last < MAX_HELD_TOKENS
        for each in (own, lookup):
            commits = each.of(Commit)
            assert [token for commit in commits for token in commit.tokens] == result.tokens
            assert [commit.base_position for commit in commits] == [
                4 + sum(len(earlier.tokens) for earlier in commits[:number]) for number in range(len(commits))
            ]
        assert [len(commit.tokens) for commit in lookup.of(Commit)] == [1] * (2 * LONG)

    def test_the_next_request_of_a_paused_draft_is_paused(self) -> None:
        script = Guesser()
        target = engine(script)
        for _ in range(8):
            served(target, generation_request(output=LONG))
        script.messages.clear()
        target.submit(generation_request(output=LONG))
        target.step()
        assert [limit.max_nodes for limit in script.of(Limit)] == [0]

    def test_a_paused_request_is_unpaused_at_another_draft(self) -> None:
        script = Guesser("useless", "other")
        target = engine(script)
        target.submit(generation_request(output=LONG))
        while not script.of(Limit):
            target.step()
        for _ in range(3):
            target.step()
        script.next = PollResult(lost=[1])
        target.step()
        first, second = script.of(Opening)
        assert script.of(Commit)[-1].base_position == len(second.tokens) - 1, "the opening has the tokens before it"
        assert second.max_nodes == first.max_nodes > 0
        assert second.max_depth == first.max_depth > 0
        assert len(script.of(Limit)) == 1, "the other draft is not judged yet"

    @pytest.mark.parametrize(
        ("gated", "speculation"), [(True, {}), (False, {"row_budget": False}), (False, {"draft_schedule": "lockstep"})]
    )
    def test_without_row_budget_or_in_lockstep_there_is_no_gate(self, gated: bool, speculation: dict[str, Any]) -> None:
        script = Guesser(width=8)
        target = engine(script, max_num_batched_rows=8, speculation=speculation)
        for name in "ab":
            served(target, generation_request(name, output=LONG))
        assert any(limit.max_nodes == 0 for limit in script.of(Limit)) is gated


class TestEnds:
    def test_waiting_running_and_unknown_requests_can_be_cancelled(self) -> None:
        script = Script()
        target = engine(script, max_num_batched_rows=16)
        for name, prompt in (("a", 5), ("b", 40), ("c", 40)):
            target.submit(generation_request(name, prompt))
        target.step()
        target.step()
        for name in ("c", "a", "unknown", "b", "a"):
            target.cancel(name)
            target.check_integrity()
        deltas = {delta.request_id: delta for delta in target.step()}
        assert list(deltas) == ["c", "a", "b"]
        assert {delta.finish_reason for delta in deltas.values()} == {FinishReason.CANCELLED}
        usage, speculation = deltas["a"].usage, deltas["a"].speculation
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2)
        assert speculation is not None
        assert speculation.steps == 2
        assert "close 1" in script.messages
        assert not target.busy
        assert target.load.free_slots == SLOTS

    @pytest.mark.parametrize("output", [2, 3, 7])
    def test_drafts_get_the_last_tokens_before_the_close(self, output: int) -> None:
        """The request's own draft and lookup drafts get the same messages. The last ones are flushed together."""
        own, lookup = Script(), Script()
        own.hidden_state_layers = (0, 3)
        result = served(engine(own, lookups=[lookup]), generation_request(output=output))["a"]
        for each in (own, lookup):
            commits = each.of(Commit)
            assert [token for commit in commits for token in commit.tokens] == result.tokens
            assert [commit.base_position for commit in commits] == list(range(4, 4 + output))
            assert [message for message in each.messages if message != "flush"][-2:] == [commits[-1], "close 1"]
        assert own.messages[-3:] == [own.of(Commit)[-1], "close 1", "flush"]
        last = own.of(Commit)[-1].hidden_states
        assert last is not None, "read before the slots are freed; the last token itself has none"
        assert last[:, 0].tolist() == [[[*generation_request().prompt, *result.tokens][3 + output], 3 + output]]

    def test_an_engine_can_be_used_after_reset(self) -> None:
        def fail_once(number: int) -> None:
            if number == 3:
                raise RuntimeError("the device is gone")

        target = engine(local(), model=Watched(fail_once))
        with pytest.raises(RuntimeError, match="the device is gone"):
            served(target, generation_request("a", 30), generation_request("b", 30))
        target.reset()
        target.check_integrity()
        assert not target.busy
        result = served(target, generation_request("a", 30))["a"]
        assert result.tokens == served(engine(NoDraftClient()), generation_request("a", 30))["a"].tokens
        assert result.speculation is not None
        assert result.speculation.accepted_tokens > 0

    @pytest.mark.parametrize("slots", [SLOTS, 4 * SLOTS])
    def test_a_prompt_of_the_announced_length_is_served(self, slots: int) -> None:
        """Gateways refuse longer prompts. One request cannot have more than all slots."""
        target = engine(NoDraftClient(), model=TableModel(VOCABULARY, slots, 2 * SLOTS))
        longest = model_facts(target, SpeculativeConfig()).max_model_len
        assert longest == min(slots, 2 * SLOTS)
        for prompt in (1, longest - 1):
            result = served(target, generation_request(prompt=prompt, output=longest - prompt))["a"]
            assert (len(result.tokens), result.error) == (longest - prompt, "")

    def test_the_phases_of_requests_are_timed(self) -> None:
        """A pass takes a second. Three passes compute the first prompt; the second request waits for it."""
        now = [0.0]

        def tick(_: int) -> None:
            now[0] += 1.0

        limits = {"max_num_seqs": 1, "max_num_batched_rows": 8}
        target = engine(NoDraftClient(), model=Watched(tick), clock=lambda: now[0], **limits)
        results = served(target, generation_request("a", 20, output=4), generation_request("b", 5, output=1))
        assert results["a"].timings == Timings(queue_s=0.0, compute_s=6.0, total_s=6.0, prefill_s=3.0)
        assert results["b"].timings == Timings(queue_s=6.0, compute_s=1.0, total_s=7.0, prefill_s=1.0)
        assert [results[name].timings.decode_s for name in "ab"] == [3.0, 0.0]

    def test_a_request_id_may_be_reused_after_the_end(self) -> None:
        target = engine(NoDraftClient())
        assert served(target, generation_request())["a"].tokens == served(target, generation_request())["a"].tokens
        target.submit(generation_request())
        target.submit(generation_request())
        [refused, *_] = target.step()
        assert refused.finish_reason is FinishReason.ERROR
        assert "'a' is in use" in refused.error
