"""A pass that runs asynchronously hides the delivery of the step before. Nothing else changes.

The model here computes at once, but notes when its logits are read: an accelerator would be waited for then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.sampling import log_softmax
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient, PollResult
from paceline.engine.engine import NOT_FINITE_ERROR, Engine
from paceline.engine.host_copy import HostCopy
from paceline.engine.log_probabilities import StartedLogProbs
from paceline.messages import Delta, FinishReason, GenerationRequest
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers import engine_runs
from tests.helpers.drafts import model_draft
from tests.helpers.targets import FREE
from tests.unit.engine.test_engine import SLOTS, VOCABULARY, Guesser, Script, Watched, answer, generation_request, local

READS = (
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.nonzero),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__),
)


class Unread(torch.Tensor):
    """Calls `on_read` before anything of it, or of what was computed from it, is read."""

    on_read: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            cls.on_read()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Accelerator(Watched):
    """Notes "run" and "read" in `events`."""

    def __init__(self, events: list[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.asynchronous = True
        self._events = events

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self._events.append("run")
        output = super().run(rows, wanted, hidden_layers)
        unread = type("Unread", (Unread,), {"on_read": lambda: self._events.append("read")})
        return ModelOutput(output.logits.as_subclass(unread), output.hidden)


class Waiting(Guesser):
    """Notes "wait" in `events`. Its growth comes only to those who wait."""

    def __init__(self, events: list[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._events = events

    def poll(self, timeout_s: float) -> PollResult:
        if timeout_s:
            self._events.append("wait")
        return super().poll(timeout_s) if timeout_s else PollResult()


class Rounds(LocalDraftClient):
    """Notes "round" in `events`."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(model_draft(TableModel(VOCABULARY, SLOTS, SLOTS, 0.2), 2))
        self._events = events

    def poll(self, timeout_s: float) -> PollResult:
        self._events.append("round")
        return super().poll(timeout_s)


def engine(model: TableModel, drafting: DraftClient, speculation: dict[str, Any] | None = None) -> Engine:
    config = {"method": "ngram", "num_speculative_tokens": 4, "max_tree_nodes": 8} | (speculation or {})
    limits = EngineConfig(slots=model.slots, max_num_batched_rows=64)
    return Engine(model, limits, SpeculativeConfig.model_validate(config), drafting, FREE)


def order(target: Engine, events: list[str], *requests: GenerationRequest) -> list[str]:
    """What happened, each read of a pass once."""
    for request in requests:
        target.submit(request)
    while target.busy:
        target.overlapped_step(lambda deltas: events.append(f"deliver {len(deltas)}"))
    return [event for event, before in zip(events, ["", *events], strict=False) if event != "read" or before != "read"]


class TestOrder:
    def test_a_step_is_delivered_while_the_next_pass_runs(self) -> None:
        events: list[str] = []
        target = engine(Accelerator(events), NoDraftClient())
        steps = order(target, events, generation_request("a", output=4), generation_request("b", output=3))
        hidden = ["run", "deliver 2", "read"]
        assert steps == ["run", "read", *hidden, *hidden, "run", "deliver 2", "read", "deliver 1"]

    def test_without_an_asynchronous_pass_a_step_is_delivered_before_the_next_one(self) -> None:
        events: list[str] = []
        model = Accelerator(events)
        model.asynchronous = False
        steps = order(engine(model, NoDraftClient()), events, generation_request("a", output=3))
        assert steps == ["run", "read", "deliver 1"] * 3

    def test_log_probabilities_are_read_behind_the_next_pass(self) -> None:
        """The first read of a pass is of its draws, the one before a delivery of the log-probabilities."""
        events: list[str] = []
        target = engine(Accelerator(events), NoDraftClient())
        target.submit(generation_request("a", output=3, logprobs=2))
        while target.busy:
            draws = len(events)
            target.overlapped_step(lambda deltas: events.append(f"deliver {len(deltas)}"))
            reads = events[draws:]
            if "deliver 1" in reads[:-1]:
                assert reads.index("run") < reads.index("read") < reads.index("deliver 1")
        assert events.count("deliver 1") == 3

    def test_starting_log_probabilities_reads_nothing(self) -> None:
        events: list[str] = []
        unread = type("Unread", (Unread,), {"on_read": lambda: events.append("read")})
        torch.manual_seed(3)
        for decimals in (0, 1, 6):
            logits_RV = torch.randn(9, VOCABULARY).round(decimals=decimals)
            logits_RV[1, ::3] = -torch.inf
            logits_RV[2] = 0.0
            started = StartedLogProbs(logits_RV.as_subclass(unread), range(9), 5)
            assert not events
            ids_RK = log_softmax(logits_RV).sort(dim=-1, descending=True, stable=True).indices[:, :5]
            assert [[token for token, _ in row.top] for row in started.read()] == ids_RK.tolist()
            events.clear()

    def test_nothing_waits_for_guesses_undelivered(self) -> None:
        events: list[str] = []
        drafting = Waiting(events, hit=lambda _: True)
        target = engine(Accelerator(events), drafting, {"draft_schedule": "lockstep", "num_speculative_tokens": 1})
        steps = order(target, events, generation_request("a", output=9))
        assert steps.count("wait") > 1
        assert steps[3] == "wait", "the draft starts once the first token is there"
        for number, event in enumerate(steps):
            assert event != "wait" or steps[number - 1] in ("deliver 1", "wait")

    @pytest.mark.parametrize("elsewhere", [True, False])
    def test_a_step_copies_states_for_all_drafts_elsewhere_at_once(
        self, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each copy waits for a GPU. A draft in this process reads them where they are."""
        copied: list[int] = []

        def copy(states: torch.Tensor) -> HostCopy:
            copied.append(len(states))
            return HostCopy(states)

        monkeypatch.setattr("paceline.engine.engine.HostCopy", copy)
        drafting = Script()
        drafting.concurrent = elsewhere
        drafting.hidden_state_layers = (0, 3)
        target = engine(Accelerator([]), drafting)
        order(target, [], *(generation_request(name, 5, output=3) for name in "abc"))
        assert copied == ([15, 3, 3] if elsewhere else [])

    def test_a_draft_in_this_process_delays_no_delivery(self) -> None:
        events: list[str] = []
        steps = order(engine(Accelerator(events), Rounds(events)), events, generation_request("a", output=9))
        assert steps.count("round") > 2
        assert not any(steps[number : number + 2] == ["read", "round"] for number in range(len(steps)))

    def test_a_draft_in_this_process_runs_beside_a_prompt_once_all_is_delivered(self) -> None:
        events: list[str] = []
        target = engine(Accelerator(events), Rounds(events))
        for request in (generation_request("a", output=30), generation_request("b", 200, output=3)):
            target.submit(request)
            for _ in range(3):
                target.overlapped_step(lambda deltas: events.append(f"deliver {len(deltas)}"))
        rounds = [number for number, event in enumerate(events) if event == "round"]
        assert any(events[number - 1] == "deliver 1" and events[number + 1] == "run" for number in rounds)
        assert not any(events[number - 1] == "read" for number in rounds[1:])

    def test_a_request_that_starts_between_the_halves_is_in_the_next_pass(self) -> None:
        events: list[str] = []
        target = engine(Accelerator(events), NoDraftClient())
        target.submit(generation_request("a", output=9))
        target.overlapped_step(lambda _: None)
        target.submit(generation_request("b", output=9))
        delivered: list[list[str]] = []
        for _ in range(2):
            target.overlapped_step(lambda deltas: delivered.append([delta.request_id for delta in deltas]))
        assert delivered == [["a"], ["a", "b"]]


def outputs(target: Engine, requests: Sequence[GenerationRequest], seed: int, *, overlapped: bool) -> dict[str, Delta]:
    """Requests come, and some are cancelled, between steps. Checks that every final delta is the last one."""
    chance = random.Random(seed)
    results, queue, steps = {each.request_id: Delta(each.request_id) for each in requests}, list(requests), 0
    cancelled = {each.request_id: 6 + chance.randrange(6) for each in requests[::4]}
    """After how many steps."""

    def deliver(deltas: list[Delta]) -> None:
        for delta in deltas:
            assert results[delta.request_id].finish_reason is None
            results[delta.request_id].extend(delta)

    while queue or target.busy:
        if queue:
            target.submit(queue.pop(0))
        for name in [name for name, after in cancelled.items() if after == steps]:
            target.cancel(name)
        if overlapped:
            target.overlapped_step(deliver)
        else:
            deliver(target.step())
        target.check_integrity()
        steps += 1
    return results


DRAFTS: dict[str, Callable[[], DraftClient]] = {
    "none": NoDraftClient,
    "here": local,
    "elsewhere": lambda: Guesser("one", "other", width=2, hit=lambda done: done % 3 > 0),
}


def test_log_probabilities_are_those_of_a_request_alone() -> None:
    """They are computed for many requests at once, whatever each of them reports."""
    reported: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"logprobs": 0},
        {"logprob_token_ids": [7, 3], "logprobs": 2},
        {},
    ]
    requests = [
        generation_request(name, 3 + number, output=9, temperature=0.7, **reported[number % 4])
        for number, name in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    ]
    together = engine_runs.run(engine(TableModel(VOCABULARY, 4096, SLOTS), NoDraftClient()), requests)
    for request in requests[::7]:
        alone = engine_runs.run(engine(Watched(), NoDraftClient()), [request])[request.request_id]
        assert together[request.request_id].log_probs == alone.log_probs
        assert len(alone.log_probs) == (9 if request.sampling.logprobs is not None else 0)


class TestSameOutput:
    @pytest.mark.parametrize("drafting", DRAFTS)
    @pytest.mark.parametrize("seed", range(3))
    def test_as_plain_steps(self, drafting: str, seed: int) -> None:
        """With cancelled requests, stop tokens, log-probabilities, and more requests than there are slots for."""
        whole = answer(60)
        requests = [
            generation_request(
                name,
                20 + 9 * number,
                output=40,
                temperature=0.7 * (number % 2),
                stop_token_ids=whole[17 + number : 19 + number] if number % 3 == 0 else (),
                logprobs=2 if number % 3 == 1 else None,
                prompt_logprobs=1 if number == 5 else None,
            )
            for number, name in enumerate("abcdefghi")
        ]
        speculation = {"row_budget": False}
        plain = outputs(engine(Watched(), DRAFTS[drafting](), speculation), requests, seed, overlapped=False)
        target = engine(Accelerator([]), DRAFTS[drafting](), speculation)
        overlapped = outputs(target, requests, seed, overlapped=True)
        assert {each.finish_reason for each in plain.values()} > {FinishReason.CANCELLED, FinishReason.LENGTH}
        for name, each in plain.items():
            other = overlapped[name]
            assert (each.tokens, each.log_probs, each.prompt_log_probs) == (
                other.tokens,
                other.log_probs,
                other.prompt_log_probs,
            )
            assert (each.finish_reason, each.usage, each.stop_token) == (
                other.finish_reason,
                other.usage,
                other.stop_token,
            )

    def test_tokens_of_a_cancelled_request_come_before_its_end(self) -> None:
        target = engine(Accelerator([]), NoDraftClient())
        target.submit(generation_request("a", output=9))
        delivered: list[Delta] = []
        target.overlapped_step(delivered.extend)
        target.cancel("a")
        target.submit(generation_request("a", output=1))
        while target.busy:
            target.overlapped_step(delivered.extend)
        assert [(len(each.tokens), each.finish_reason) for each in delivered] == [
            (1, None),
            (0, FinishReason.CANCELLED),
            (1, FinishReason.LENGTH),
        ]

    def test_a_draft_lost_between_the_halves_loses_no_token(self) -> None:
        drafting = Guesser("one", "other", hit=lambda _: True)
        target = engine(Accelerator([]), drafting)
        target.submit(generation_request("a", output=30))
        delivered: list[Delta] = []
        while target.busy:
            target.overlapped_step(delivered.extend)
            drafting.next.lost = [1] if len(delivered) == 3 else []
        assert [token for each in delivered for token in each.tokens] == answer(30)
        assert len(drafting.of(object)) > 0
        assert delivered[-1].speculation is not None
        assert delivered[-1].speculation.drafts == ["one", "other"]

    def test_logits_that_are_not_finite_end_a_request_after_its_tokens(self) -> None:
        """They are looked at after the draws, which were not waited for before."""
        bad = answer(9)[5]
        target = engine(Accelerator([], bad=[bad]), NoDraftClient())
        target.submit(generation_request("a", output=9))
        delivered: list[Delta] = []
        while target.busy:
            target.overlapped_step(delivered.extend)
        assert [token for each in delivered for token in each.tokens] == answer(9)[: answer(9).index(bad) + 1]
        assert delivered[-1].error == NOT_FINITE_ERROR

    def test_a_reset_engine_delivers_nothing_of_before(self) -> None:
        target = engine(Accelerator([]), NoDraftClient())
        target.submit(generation_request("a", output=9))
        target.overlapped_step(lambda _: None)
        target.reset()
        assert not target.busy
        target.submit(generation_request("b", output=2))
        delivered: list[Delta] = []
        while target.busy:
            target.overlapped_step(delivered.extend)
        assert [each.request_id for each in delivered] == ["b", "b"]
