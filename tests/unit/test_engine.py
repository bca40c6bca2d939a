"""What an engine says about its steps, when it calls on drafts, and what it leaves behind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth
from paceline.core.messages import Delta, FinishReason, Submission
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.draft_gate import DraftGate
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.engine.draft_client import DraftClient, DraftUpdates, LocalDraftClient, NoDraftClient
from paceline.engine.draft_manager import POOL_SOURCE
from paceline.engine.engine import NOT_FINITE_ERROR, Engine
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.telemetry.step_stats import StepStats
from paceline_lab.fake_models.table_model import TableModel
from paceline_services.target.engine_process import model_facts
from tests.helpers.seen import Weighing, root_of

VOCABULARY = 64
SLOTS = 256
FREE = RowCost([8, 256], [1.0, 1.001])


class Script(NoDraftClient):
    """A drafting that writes down what it is told, and says what a test wants it to."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.openings: list[Opening] = []
        self.limits: list[Limit] = []
        self.next = DraftUpdates()
        self.names: Sequence[str | None] = ["somebody"]

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self.heard.append(("open", opening.request_id))
        self.openings.append(opening)
        name, *rest = self.names
        self.names = rest or [name]
        return name

    def limit(self, limit: Limit) -> None:
        self.limits.append(limit)

    def close(self, request_id: int) -> None:
        self.heard.append(("close", request_id))

    def flush(self) -> None:
        self.heard.append(("flush", 0))

    def poll(self, timeout_s: float) -> DraftUpdates:
        news, self.next = self.next, DraftUpdates()
        return news


class Listening(Script):
    """Writes down what it is told of tokens, too."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, Commit | int]] = []

    def commit(self, commit: Commit) -> None:
        self.heard.append(("commit", commit.request_id))
        self.said.append(("commit", commit))

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self.said.append(("close", request_id))


class Fed(Script):
    """Knows the hidden states that it was told of, by request and position, since that was opened."""

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


class Watched(TableModel):
    """Knows what had been told to the drafts when it ran."""

    def __init__(self, script: Script) -> None:
        super().__init__(VOCABULARY, SLOTS, SLOTS)
        self.heard_before: list[list[tuple[str, int]]] = []
        self._script = script

    def run(self, *arguments: object) -> object:  # type: ignore[override]
        self.heard_before.append(self._script.heard.copy())
        return super().run(*arguments)  # type: ignore[arg-type]


def engine(
    drafting: DraftClient,
    *,
    model: TableModel | None = None,
    row_budget: bool = True,
    beside: Sequence[DraftClient] = (),
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
        beside=beside,
    )


def local() -> LocalDraftClient:
    return LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS, 0.2), 2))


def submission(request_id: str, prompt: int, output: int = 10, **sampling: object) -> Submission:
    law = SamplingParams.model_validate({"temperature": 0.0, "max_tokens": output} | sampling)
    tokens = [(ord(request_id[0]) + 7 * i) % VOCABULARY for i in range(prompt)]
    return Submission(request_id, tokens, law, SpeculativeOptions(report=True))


def served(target: Engine, *submissions: Submission, steps: list[StepStats] | None = None) -> dict[str, Delta]:
    """The whole answer to each. `steps` gets the numbers of every step."""
    answers = {s.request_id: Delta(s.request_id) for s in submissions}
    for each in submissions:
        target.submit(each)
    while target.busy:
        for delta in target.step():
            answer = answers[delta.request_id]
            answer.tokens += delta.tokens
            answer.accepted += delta.accepted
            answer.finish_reason, answer.usage, answer.error = delta.finish_reason, delta.usage, delta.error
            answer.speculation, answer.stop_token = delta.speculation, delta.stop_token
        if steps is not None:
            steps.append(target.last_step)
        target.check_integrity()
    return answers


class TestSteps:
    def test_their_numbers_add_up(self) -> None:
        """Prompt tokens count once, however often preemption has them computed again."""
        steps: list[StepStats] = []
        target = engine(local(), max_num_batched_rows=64)
        answers = served(target, *(submission(name, 70, output=60) for name in "abcde"), steps=steps)
        assert sum(s.preemptions for s in steps) > 0
        assert sum(s.prompt_tokens for s in steps) == 5 * 70
        assert sum(s.generation_tokens for s in steps) == sum(len(a.tokens) for a in answers.values()) == 5 * 60
        totals = [a.speculation for a in answers.values()]
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
        again = Submission("b", submission("a", 100).prompt, submission("a", 1).sampling)
        answer = served(target, again, steps=steps)["b"]
        assert first == 100
        assert answer.usage is not None
        assert sum(s.prompt_tokens for s in steps) - first == 100 - answer.usage.cached_tokens == 4

    def test_every_token_is_accepted_or_a_bonus(self) -> None:
        answers = served(engine(local()), *(submission(name, 9, output=50) for name in "abc"))
        for answer in answers.values():
            assert answer.speculation is not None
            assert sum(answer.accepted) == answer.speculation.accepted_tokens > 0
            assert len(answer.accepted) == len(answer.tokens)
            assert answer.accepted.count(False) == answer.speculation.steps

    def test_a_delta_s_counts_stay_as_they_are(self) -> None:
        """They belong to whoever got them, while the engine goes on counting."""
        target = engine(local())
        target.submit(submission("a", 9))
        [first] = target.step()
        target.step()
        assert first.speculation is not None
        assert first.speculation.steps == 1

    def test_what_lies_beyond_a_stop_was_not_accepted(self) -> None:
        """The stop token is a guess that came true in the midst of a path; what follows it was never drawn."""
        whole = served(engine(NoDraftClient()), submission("a", 9, output=50))["a"].tokens
        perfect = LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS), 1))
        for place in range(1, 30):
            stop = submission("a", 9, output=50, stop_token_ids=[whole[place]])
            answer = served(engine(perfect), stop)["a"]
            assert answer.tokens == whole[: whole.index(whole[place]) + 1]
            assert answer.stop_token == whole[place]
            assert answer.speculation is not None
            assert sum(answer.accepted) == answer.speculation.accepted_tokens


class Damaged(TableModel):
    """After some tokens its logits are not finite."""

    def __init__(self, *bad: int, value: float = math.nan) -> None:
        super().__init__(VOCABULARY, SLOTS, SLOTS)
        self._bad, self._value = bad, value

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        output = super().run(rows, wanted, hidden_layers)
        for i, row in enumerate(wanted):
            if rows[row].token in self._bad:
                output.logits[i, i % VOCABULARY] = self._value
        return output


class TestLogitsThatAreNotFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_end_their_own_request(self, value: float) -> None:
        requests = [submission(name, 20, output=12, temperature=0.5) for name in "abc"]
        plain = served(engine(NoDraftClient()), *requests)
        bad = next(token for token in plain["b"].tokens[3:] if token not in plain["a"].tokens + plain["c"].tokens)
        answers = served(engine(NoDraftClient(), model=Damaged(bad, value=value)), *requests)
        until = plain["b"].tokens.index(bad) + 1
        assert (answers["b"].finish_reason, answers["b"].error) == (FinishReason.ERROR, NOT_FINITE_ERROR)
        assert answers["b"].tokens == plain["b"].tokens[:until]
        for name in "ac":
            assert answers[name].tokens == plain[name].tokens
            assert answers[name].finish_reason is FinishReason.LENGTH

    def test_are_not_cached_for_others(self) -> None:
        request = submission("a", 40)
        target = engine(NoDraftClient(), model=Damaged(request.prompt[-1]))
        served(target, request)
        again = Submission("b", request.prompt, request.sampling)
        usage = served(target, again)["b"].usage
        assert usage is not None
        assert usage.cached_tokens == 0

    def test_change_nothing_where_only_a_refused_guess_leads(self) -> None:
        request = submission("a", 9, output=30)
        right = served(engine(NoDraftClient()), request)["a"].tokens
        bad = next(token for token in range(VOCABULARY) if token not in right + list(request.prompt))
        script = Script()
        target = engine(script, model=Damaged(bad), row_budget=False)
        target.submit(request)
        tokens: list[int] = []
        while target.busy:
            [delta] = target.step()
            tokens += delta.tokens
            target.check_integrity()
            if len(tokens) < 20:
                guesses = [right[len(tokens)], bad]
                script.next = DraftUpdates(
                    [(1, Growth(8 + len(tokens), 1 + 2 * len(tokens), [0, 0], guesses, [-0.1, -0.1]))]
                )
        assert tokens == right

    def test_minus_infinity_is_a_token_that_never_comes(self) -> None:
        request = submission("a", 9)
        plain = served(engine(NoDraftClient()), request)["a"].tokens
        never = Damaged(*range(VOCABULARY), value=-math.inf)
        assert served(engine(NoDraftClient(), model=never), request)["a"].tokens == plain


class TestHiddenStates:
    """A table model's are a row's token and position."""

    @pytest.mark.parametrize("before", [(), (1,), (0, 1)], ids=["none", "one layer", "others"])
    def test_a_draft_that_asks_for_them_late_gets_all_of_them(self, before: tuple[int, ...]) -> None:
        own = Fed()
        own.hidden_state_layers = before
        target = engine(own)
        served(target, submission("a", 40))  # leaves its prompt in the cache
        target.submit(submission("b", 40, output=30))
        tokens = {"a": list[int](), "b": [token for _ in range(5) for delta in target.step() for token in delta.tokens]}
        assert len(tokens["b"]) == 5, "it runs"
        own.hidden_state_layers = (0, 3)
        own.next = DraftUpdates(lost=[2])  # whoever drafted for it asked for others
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

    def test_nothing_is_computed_again_for_drafts_that_ask_for_the_same(self) -> None:
        own = Fed()
        own.hidden_state_layers = (0, 3)
        target = engine(own)
        served(target, submission("a", 40))
        own.hidden_state_layers = [0, 3]
        answer = served(target, submission("a", 40))["a"]
        assert answer.usage is not None
        assert answer.usage.cached_tokens == 32


class TestDrafts:
    def test_who_waits_for_slots_needs_no_draft_yet(self) -> None:
        script = Script()
        target = engine(script, max_num_seqs=1)
        target.submit(submission("a", 5))
        target.submit(submission("b", 5))
        target.step()
        assert [each for each in script.heard if each[0] == "open"] == [("open", 1)]

    def test_a_draft_hears_of_a_request_before_the_target_reads_its_prompt(self) -> None:
        script = Script()
        model = Watched(script)
        target = engine(script, model=model)
        target.submit(submission("a", 5))
        target.step()
        assert model.heard_before[0] == [("open", 1), ("flush", 0)]

    def test_a_request_that_lost_its_draft_finds_another_at_once(self) -> None:
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
        answer = served(engine(script), submission("a", 5))["a"]
        assert len(answer.tokens) == 10
        assert answer.speculation is not None
        assert answer.speculation.drafts == []

    def test_growth_for_whom_nobody_knows_is_dropped(self) -> None:
        script = Script()
        target = engine(script)
        target.submit(submission("a", 5))
        target.step()
        script.next = DraftUpdates([(99, Growth(0, 1, [0], [1], [-0.1]))], lost=[98])
        target.step()
        assert (target.last_step.nodes_received, target.last_step.nodes_grafted) == (1, 0)

    @pytest.mark.parametrize("token", [-1, VOCABULARY])
    def test_a_guess_outside_the_vocabulary_is_dropped(self, token: int) -> None:
        """A draft may be padded to more ids than its target; running one would end the engine."""
        script = Script()
        target = engine(script)
        target.submit(submission("a", 5))
        target.step()
        script.next = DraftUpdates([(1, Growth(5, 1, [0, 0], [3, token], [-0.1, -0.1]))])
        target.step()
        assert (target.last_step.nodes_received, target.last_step.nodes_grafted) == (2, 0)

    def test_a_draft_without_room_is_no_error(self) -> None:
        """Requests are refused, let go and taken in again as slots come and go; the tokens stay the same."""
        tight = LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, 60, SLOTS), 2))
        requests = [submission(name, 20, output=40) for name in "abcd"]
        answers = served(engine(tight), *requests)
        plain = served(engine(NoDraftClient()), *requests)
        assert {k: a.tokens for k, a in answers.items()} == {k: a.tokens for k, a in plain.items()}
        assert sum(a.speculation.accepted_tokens for a in answers.values() if a.speculation) > 0


class Useless(Script):
    """Has guesses for every root, and never the right one."""

    def __init__(self, right: Sequence[int], width: int = 1) -> None:
        super().__init__()
        self.right = right
        self.width = width
        self._next_id = 1
        self._done = 0

    def start_over(self) -> None:
        self._done = 0

    def commit(self, commit: Commit) -> None:
        self._done += len(commit.tokens)
        if self._done == len(self.right):
            return  # it was the last commit
        tokens = [(self.right[self._done] + 1 + i) % VOCABULARY for i in range(self.width)]
        base, log_probs = commit.base_position + len(commit.tokens), [math.log(0.99 / self.width)] * self.width
        self.next.growths.append((commit.request_id, Growth(base, self._next_id, [0] * self.width, tokens, log_probs)))
        self._next_id += self.width


class Overrated(Script):
    """Says the same of its two guesses for every root: the first is right every other time, the second never."""

    CLAIM = math.log(0.47)

    def __init__(self, right: Sequence[int]) -> None:
        super().__init__()
        self.right = right
        self._done = 0

    def commit(self, commit: Commit) -> None:
        self._done += len(commit.tokens)
        if self._done == len(self.right):
            return  # it was the last commit
        right, wrong, hopeless = ((self.right[self._done] + i) % VOCABULARY for i in range(3))
        first = right if self._done % 3 else wrong
        base = commit.base_position + len(commit.tokens)
        growth = Growth(base, 1 + 2 * self._done, [0, 0], [first, hopeless], [self.CLAIM] * 2)
        self.next.growths.append((commit.request_id, growth))


class Recording(Calibration):
    """Knows which cells were asked for, and which were learned of."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[int] = Counter()
        self.learned: Counter[int] = Counter()
        self.cache = Weighing(self._answer)

    def _answer(self, log_prob: float, rank: int, depth: int) -> tuple[int, float]:
        cell, corrected = self._calibrated(log_prob, rank, depth)
        self.asked[cell] += 1
        return cell, corrected

    def observe(self, cell: int, accepted: bool) -> None:
        self.learned[cell] += 1
        super().observe(cell, accepted)


class TestCalibration:
    LONG = 240

    def test_second_choices_are_believed_for_what_they_are_worth(self) -> None:
        right = served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens
        target = engine(Overrated(right))
        target.submit(submission("a", 5, output=self.LONG))
        shares: list[list[float]] = []
        for _ in range(self.LONG // 2):
            target.step()
            target._draft_manager.receive_growth(target._requests, ())
            tree = target._requests[1].tree
            shares.append([math.exp(node.path_log_prob) for node in root_of(tree).children.values()])
        assert shares[0] == pytest.approx([0.47, 0.47]), "nothing is known yet"
        first, second = shares[-1]
        assert first > 0.4
        assert second < 0.1

    def test_a_guess_is_weighed_as_what_it_is_learned_from(self) -> None:
        """It may be verified long after it came, when the root is nearer."""
        target = engine(LocalDraftClient(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS, 0.1), 2)))
        recordings = {key: Recording() for key in target.calibrations}
        target.calibrations.update(recordings)
        steps: list[StepStats] = []
        served(target, *(submission(name, 9, output=100) for name in "abc"), steps=steps)
        pool = recordings[POOL_SOURCE, True]
        assert pool.learned
        assert pool.learned <= pool.asked, "each once, when it came"
        assert pool.learned == Counter(cell for step in steps for cell, _ in step.calibration_samples), (
            "and told others"
        )
        assert len({cell % Calibration.DEPTH_COUNT for cell in pool.learned}) > 2, "from near the root and far from it"
        assert len({cell // Calibration.DEPTH_COUNT % Calibration.RANKS for cell in pool.learned}) > 1, (
            "first and others"
        )

    @pytest.mark.parametrize(
        ("strategy", "each"), [("coupled", 2), ("greedy", 2), ("typical-acceptance", 1)], ids=lambda value: str(value)
    )
    def test_guesses_without_a_row_teach_where_tokens_do_not_depend_on_guesses(self, strategy: str, each: int) -> None:
        """There is a row for one guess, and the draft always has two. What was drawn tells of both, unless another
        token would have been drawn had the other one been verified."""
        right = served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens
        target = engine(Useless(right, width=2), nodes=1, strategy=strategy)
        steps: list[StepStats] = []
        served(target, submission("a", 5, output=self.LONG), steps=steps)
        assert set(Counter(len(step.calibration_samples) for step in steps)) == {0, each}
        assert not any(hit for step in steps for _, hit in step.calibration_samples)

    def test_every_draft_that_made_a_guess_learns_of_it(self) -> None:
        """Whoever is surest: one that says what others are surer of is as right as they are."""
        right = served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens
        target = engine(Overrated(right), beside=[Overrated(right)])
        recordings = {key: Recording() for key in target.calibrations}
        target.calibrations.update(recordings)
        steps: list[StepStats] = []
        served(target, submission("a", 5, output=self.LONG), steps=steps)
        own, other = (recordings[source, True] for source in (POOL_SOURCE, POOL_SOURCE + 1))
        assert own.learned
        assert (own.learned, own.drafted, own.accepted) == (other.learned, other.drafted, other.accepted)
        assert own.learned == Counter(cell for step in steps for cell, _ in step.calibration_samples), (
            "others are told of one"
        )


def test_it_is_learned_what_steps_take_that_may_be_held_back() -> None:
    """Not of those that compute prompts. The time for which a step was held back is none of its own."""
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
    told: list[tuple[int, float, int]] = []
    target._cost.observe = lambda *observed: told.append(observed)  # type: ignore[method-assign, assignment]
    steps: list[StepStats] = []
    served(target, submission("a", 9, output=40), steps=steps)
    decoding = [step for step in steps if step.rows and not step.prompt_tokens]
    assert told == [(step.rows, 0.25, step.rows - 1) for step in decoding]
    assert len(told) > 3


@pytest.mark.parametrize("late", [False, True])
def test_a_draft_that_guesses_well_but_costs_more_is_paused(late: bool) -> None:
    now, paused = [0.0], []

    class Beside(LocalDraftClient):
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

    draft = Beside(DraftModelSpeculator(TableModel(VOCABULARY, SLOTS, SLOTS), 1))
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    model = Ticking(VOCABULARY, SLOTS, SLOTS)
    target = Engine(model, EngineConfig(slots=SLOTS), speculation, draft, FREE, clock=lambda: now[0])
    answer = served(target, submission("a", 5, output=60))["a"]
    assert answer.speculation is not None
    assert answer.speculation.accepted_tokens > 0
    assert any(paused) is late


class TestPauses:
    LONG = 120

    def right(self) -> Sequence[int]:
        return served(engine(NoDraftClient()), submission("a", 5, output=self.LONG))["a"].tokens

    def test_one_in_this_process_that_costs_nothing_may_bring_nothing(self) -> None:
        script = Useless(self.right())
        script.concurrent = False
        served(engine(script), submission("a", 5, output=self.LONG))
        assert not any(limit.max_nodes == 0 for limit in script.limits)

    @pytest.mark.parametrize("drafting", [Script(), NoDraftClient()], ids=["a draft", "no draft"])
    def test_steps_without_guesses_count_as_plain_by_whether_there_is_a_draft(self, drafting: NoDraftClient) -> None:
        target, told = engine(drafting), list[bool]()
        target._cost.observe_plain = lambda *_, drafted: told.append(drafted)  # type: ignore[method-assign]
        served(target, submission("a", 5))
        assert set(told) == {isinstance(drafting, Script)}

    def test_a_draft_that_brings_nothing_is_told_to_pause_and_to_try_again(self) -> None:
        script = Useless(self.right())
        steps: list[StepStats] = []
        answer = served(engine(script), submission("a", 5, output=self.LONG), steps=steps)["a"]
        assert answer.tokens == self.right()
        assert [limit.max_nodes > 0 for limit in script.limits[:3]] == [False, True, False]
        assert script.openings[0].max_nodes == script.limits[1].max_nodes
        paused = [step for step in steps if step.nodes_received and not step.nodes_grafted]
        assert len(paused) > DraftGate.MIN_PAUSE_STEPS - 2, "what a paused draft sends all the same is not looked at"

    def test_the_next_request_of_that_draft_starts_paused(self) -> None:
        script = Useless(self.right())
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

    def test_a_paused_request_that_moves_to_another_draft_starts_afresh(self) -> None:
        script = Useless(self.right())
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
        assert len(script.limits) == 1, "nothing is known of the other one"

    def test_before_its_first_guess_a_draft_is_not_judged(self) -> None:
        script = Script()
        served(engine(script), submission("a", 5, output=self.LONG))
        assert script.limits == []

    @pytest.mark.parametrize(
        ("judged", "config"), [(True, {}), (False, {"row_budget": False}), (False, {"schedule": "lockstep"})]
    )
    def test_without_the_row_budget_or_in_lockstep_nobody_is_judged(self, judged: bool, config: Any) -> None:
        """Neither paused nor told a price; and nothing is kept of each step to judge by."""
        script = Useless(self.right(), width=8)
        target = engine(script, max_num_batched_rows=8, **config)
        for name in "ab":
            script.start_over()
            served(target, submission(name, 5, output=self.LONG))
        assert any(limit.max_nodes == 0 for limit in script.limits) is judged
        assert any(limit.least_path_probability > 0 for limit in script.limits) is judged
        assert (script.openings[1].least_path_probability > 0) is judged
        assert bool(target._draft_manager._gates) is judged


@pytest.mark.parametrize(("budgeted", "most"), [(True, 8), (False, 9)])
def test_without_the_row_budget_every_guess_is_verified(budgeted: bool, most: int) -> None:
    """Nine rows cost a hundred times what eight do; a tree of eight guesses and the root fill nine."""
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
    def test_a_cancelled_request_tells_what_it_came_to(self) -> None:
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
        assert ("close", 1) in script.heard
        assert not target.busy

    @pytest.mark.parametrize("output", [1, 2, 7])
    def test_who_drafts_hears_the_last_tokens_before_the_end(self, output: int) -> None:
        """And from wherever: the request's own draft and who drafts beside are told the same."""
        own, beside = Listening(), Listening()
        target = engine(own, beside=[beside])
        answer = served(target, submission("a", 5, output=output))["a"]
        for each in (own, beside):
            assert [what for what, _ in each.said] == ["commit"] * output + ["close"]
            commits = [said for what, said in each.said if isinstance(said, Commit)]
            assert [token for commit in commits for token in commit.tokens] == answer.tokens
            assert [commit.base_position for commit in commits] == list(range(4, 4 + output))
            assert [said for what, said in each.said if what == "close"] == [1]

    def test_the_last_tokens_and_the_end_leave_together(self) -> None:
        own = Listening()
        served(engine(own), submission("a", 5, output=2))
        last_flush = len(own.heard) - 1 - own.heard[::-1].index(("flush", 0))
        assert own.heard[last_flush - 2 : last_flush] == [("commit", 1), ("close", 1)]

    def test_the_last_tokens_come_with_their_hidden_states(self) -> None:
        """Before the request gives its slots back; of the last token itself there are none yet."""
        own = Listening()
        own.hidden_state_layers = (0, 3)
        answer = served(engine(own), submission("a", 5, output=3))["a"]
        [*_, last] = [said for _, said in own.said if isinstance(said, Commit)]
        assert last.hidden_states is not None
        assert last.hidden_states[:, 0].tolist() == [[answer.tokens[-2], 4 + 2]]

    def test_cancelling_who_waits_half_reads_or_is_unknown(self) -> None:
        target = engine(local(), max_num_batched_rows=16)
        for name in "abc":
            target.submit(submission(name, 40))
        target.step()
        for name in ("c", "a", "nobody", "b", "a"):
            target.cancel(name)
            target.check_integrity()
        assert [d.request_id for d in target.step()] == ["c", "a", "b"]
        assert target.load.free_slots == SLOTS

    def test_an_engine_that_failed_half_way_can_be_used_again(self) -> None:
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
        answer = served(target, submission("a", 30))["a"]
        assert answer.tokens == expected
        assert answer.speculation is not None
        assert answer.speculation.accepted_tokens > 0

    @pytest.mark.parametrize("slots", [SLOTS, 4 * SLOTS])
    def test_what_a_target_says_it_has_room_for_it_serves(self, slots: int) -> None:
        """Gateways refuse what is longer, and promise all that is not. One request cannot have more than all slots."""
        model = TableModel(VOCABULARY, slots, 2 * SLOTS)
        target = Engine(model, EngineConfig(slots=slots), SpeculativeConfig(), NoDraftClient(), FREE)
        longest = model_facts(target, SpeculativeConfig()).max_model_len
        assert longest == min(slots, 2 * SLOTS)
        for prompt in (1, longest - 1):
            law = SamplingParams(temperature=0.0, max_tokens=longest - prompt)
            answer = served(target, Submission("r", [1] * prompt, law))["r"]
            assert (len(answer.tokens), answer.error) == (longest - prompt, "")

    def test_a_request_id_may_come_again_once_it_is_over(self) -> None:
        target = engine(NoDraftClient())
        first = served(target, submission("a", 5))["a"]
        assert served(target, submission("a", 5))["a"].tokens == first.tokens
        target.submit(submission("a", 5))
        target.submit(submission("a", 5))
        [refused, *_] = target.step()
        assert refused.finish_reason is FinishReason.ERROR
        assert "'a' is in use" in refused.error


def test_a_prompt_that_is_computed_serves_others_before_its_request_ends() -> None:
    """As the choices of one request, which have the same one."""
    this = engine(NoDraftClient())
    prompt = [number % VOCABULARY for number in range(40)]
    this.submit(Submission("first", prompt, SamplingParams(max_tokens=50)))
    this.step()
    this.submit(Submission("second", prompt, SamplingParams(max_tokens=1)))
    ended = [delta for _ in range(3) for delta in this.step() if delta.request_id == "second" and delta.usage]
    assert this.load.running == 1, "the first goes on"
    assert ended[0].usage is not None
    assert ended[0].usage.cached_tokens == 32
    this.check_integrity()
