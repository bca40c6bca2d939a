"""Generating from Python: order, stops, counts, and errors that leave nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.llm import LLM, Completion, Prompt, VocabularyMismatchError
from paceline.messages import FinishReason
from paceline.model_names import ModelNotFoundError
from paceline.text import Detokenizer, Tokenizer
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.method_recipes import RECIPES
from tests.helpers.parallel import BLOCK

DRAFT = {"method": "draft_model", "model": "table:64:0.3", "row_budget": False}
OTHER = {"method": "draft_model", "model": "table:65"}
SMALL = {"slots": 512, "max_num_batched_rows": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=2)
PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("table:64", DRAFT, SMALL)


def one(llm: LLM, sampling: SamplingParams = GREEDY, prompt: Prompt = PROMPT, **options: Any) -> Completion:
    [completion] = llm.generate(prompt, sampling, **options)
    return completion


def text_of_each(tokens: list[int]) -> list[str]:
    return [text_of(tokens[: i + 1])[len(text_of(tokens[:i])) :] for i in range(len(tokens))]


def text_of(tokens: list[int]) -> str:
    return Detokenizer(Tokenizer.load("table:64")).feed(tokens)


@pytest.mark.parametrize(
    ("speculation", "method", "depth"),
    [
        ({"method": "pard"}, "pard", 5),
        ({"method": "draft_model", "parallel_drafting": True, "num_speculative_tokens": 3}, "pard", 3),
        ({"method": "dflash"}, "dflash", BLOCK - 1),
        ({"method": "dflash", "num_speculative_tokens": 2}, "dflash", 2),
        ({"method": "peagle"}, "peagle", 5),
        ({"method": "eagle3", "parallel_drafting": True}, "peagle", 5),
    ],
)
def test_methods_that_guess_in_one_pass_are_named_by_their_folder(
    tmp_path: Path, speculation: dict[str, Any], method: str, depth: int
) -> None:
    """And change no token. A DFlash draft's own configuration limits its depth."""
    recipe = RECIPES[method](tmp_path)
    # Whether drafting pays on a model this small is the machine's to say: without the budget it is not asked.
    llm = LLM(str(recipe.target), {**speculation, **recipe.config, "row_budget": False}, SMALL)
    for sampling in (GREEDY, SAMPLED):
        drafted, plain = one(llm, sampling), one(llm, sampling, speculative=False)
        assert drafted.tokens == plain.tokens
        assert drafted.speculation.drafted_tokens > 0
        assert len(drafted.speculation.drafted_by_depth) <= depth


class TestPrompts:
    def test_completions_are_in_the_order_of_the_prompts(self, llm: LLM) -> None:
        """More prompts than run at once, of very different length, mixed kinds."""
        prompts: list[Prompt] = ["7", [1] * 200, "1 2 3", [4, 5], "9 " * 90, [1, 2, 3]]
        together = llm.generate(prompts, SAMPLED)
        assert [c.tokens for c in together] == [one(llm, SAMPLED, prompt).tokens for prompt in prompts]
        assert [c.prompt_tokens for c in together] == [1, 200, 3, 2, 90, 3]
        assert together[2].tokens == together[5].tokens
        assert llm.generate([]) == []

    def test_a_chat_is_what_the_template_makes_of_it(self, llm: LLM) -> None:
        conversation = [{"role": "user", "content": "1 2"}, {"role": "user", "content": "3"}]
        [answer] = llm.chat(conversation, GREEDY)
        assert answer.tokens == one(llm).tokens
        several = llm.chat([conversation, [{"role": "user", "content": "7"}]], GREEDY)
        assert [c.tokens for c in several] == [answer.tokens, one(llm, prompt="7").tokens]
        assert llm.chat([]) == []


class TestStreaming:
    CONVERSATION = ({"role": "user", "content": PROMPT},)

    def test_a_stream_ends_with_the_whole_answer(self, llm: LLM) -> None:
        parts = list(llm.stream_chat(self.CONVERSATION, GREEDY))
        [whole] = llm.chat(self.CONVERSATION, GREEDY)
        assert (parts[-1].tokens, parts[-1].text, parts[-1].finish_reason) == (whole.tokens, whole.text, "length")
        assert len(parts) > 2
        for part, later in itertools.pairwise(parts):
            assert part.finish_reason is None
            assert len(part.tokens) < len(later.tokens)
            assert later.tokens[: len(part.tokens)] == part.tokens
            assert later.text.startswith(part.text)
        assert [whole.text[start] for start in whole.offsets] == [part[0] for part in text_of_each(whole.tokens)]

    def test_a_stream_that_is_closed_leaves_nothing_behind(self, llm: LLM) -> None:
        stream = llm.stream_chat(self.CONVERSATION, GREEDY)
        next(stream)
        stream.close()
        assert not llm._engine.busy
        assert one(llm).tokens == llm.chat(self.CONVERSATION, GREEDY)[0].tokens


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    each = [GREEDY.model_copy(update={"max_tokens": 7}), SAMPLED]
    together = llm.generate([PROMPT, PROMPT], each)
    assert [c.tokens for c in together] == [one(llm, sampling).tokens for sampling in each]
    with pytest.raises(ValueError, match=r"sampling has 2 entries for 1 prompts"):
        llm.generate(PROMPT, each)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_same_tokens_with_and_without_guesses(llm: LLM, sampling: SamplingParams) -> None:
    guessed, plain = one(llm, sampling), one(llm, sampling, speculative=False)
    assert (guessed.text, guessed.tokens, guessed.log_probs) == (plain.text, plain.tokens, plain.log_probs)
    assert len(guessed.tokens) == 40
    assert [len(each.top) for each in guessed.log_probs] == [2] * 40 * (sampling.logprobs is not None)
    assert guessed.finish_reason is FinishReason.LENGTH
    stats = guessed.speculation
    assert stats.accepted_tokens > 0
    assert stats.accepted_tokens + stats.steps == 40, "every step commits its accepted tokens and a bonus"
    assert (plain.speculation.steps, plain.speculation.drafted_tokens) == (40, 0)
    assert guessed.timings.total_s >= guessed.timings.compute_s > 0


class TestStops:
    @pytest.mark.parametrize("speculative", [True, False])
    def test_the_text_ends_before_a_stop_string_and_the_tokens_with_it(self, llm: LLM, speculative: bool) -> None:
        """Every piece of the answer as the stop string, wherever token borders and steps fall."""
        whole = one(llm, SAMPLED)
        for start in range(0, len(whole.text), 7):
            for size in (1, 2, 5, 11):
                stop = whole.text[start : start + size]
                answer = one(llm, SAMPLED, stop=[stop, "never"], speculative=speculative)
                assert answer.text == whole.text.partition(stop)[0]
                assert answer.tokens == whole.tokens[: len(answer.tokens)]
                assert len(answer.log_probs) == len(answer.tokens)
                assert answer.finish_reason is FinishReason.STOP
                assert stop in text_of(answer.tokens)
                assert stop not in text_of(answer.tokens[:-1])

    def test_a_stop_string_ends_one_request_alone(self, llm: LLM) -> None:
        stop = one(llm).text[10:16]
        first, second = llm.generate([PROMPT, "8 8"], GREEDY, stop=stop)
        assert first.finish_reason is FinishReason.STOP
        assert second.tokens == one(llm, prompt="8 8", stop=stop).tokens
        assert len(second.tokens) > len(first.tokens)

    def test_a_stop_string_counts_from_min_tokens_on(self, llm: LLM) -> None:
        patient = GREEDY.model_copy(update={"min_tokens": 20})
        answer = one(llm, patient, stop=" ")
        assert len(answer.tokens) == 21
        assert answer.text == text_of(answer.tokens[:20])

    def test_the_model_s_own_end_of_text_ends_it(self, tmp_path: Path) -> None:
        whole = one(LLM(str(save_checkpoint(tmp_path / "endless")), engine_config=SMALL))
        ending = LLM(str(save_checkpoint(tmp_path / "ending", eos_token_ids=[whole.tokens[5]])), engine_config=SMALL)
        answer = one(ending)
        assert answer.tokens == whole.tokens[: whole.tokens.index(whole.tokens[5]) + 1]
        assert whole.text.startswith(answer.text)
        assert len(answer.text) < len(text_of(answer.tokens))
        assert answer.finish_reason is FinishReason.STOP
        with pytest.raises(ValueError, match="has no chat template: use generate"):
            ending.chat([{"role": "user", "content": "1"}])


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "stop", "message"),
        [
            ("", (), "the prompt is empty"),
            ([64], (), "outside the vocabulary of 64"),
            ([1] * 600, (), "600 tokens"),
            ("6", ["a", ""], "a stop string needs at least one character"),
        ],
    )
    def test_a_call_that_cannot_be_served_fails_and_leaves_nothing(
        self, llm: LLM, prompt: Prompt, stop: Sequence[str], message: str
    ) -> None:
        expected = one(llm).tokens
        with pytest.raises(ValueError, match=message):
            llm.generate([PROMPT, prompt, "4 5"], GREEDY, stop=stop)
        assert one(llm).tokens == expected
        llm._engine.check_integrity()

    def test_an_interrupted_step_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in a notebook: slots were taken, nothing was computed in them."""
        llm = LLM("table:64", DRAFT, SMALL)
        expected = one(llm).tokens
        run, passes = llm.model.run, itertools.count(1)

        def interrupted(*arguments: Any) -> Any:
            if next(passes) == 4:
                raise KeyboardInterrupt
            return run(*arguments)

        monkeypatch.setattr(llm.model, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, "4 5 6"], GREEDY)
        llm._engine.check_integrity()
        again = one(llm)
        assert again.tokens == expected
        assert again.speculation.accepted_tokens > 0

    @pytest.mark.parametrize(
        ("model", "speculation", "engine", "error", "message"),
        [
            ("/nowhere", {}, {}, ModelNotFoundError, "no model at"),
            ("table:64", {}, {"gpu_memory_utilization": 0.9}, ValidationError, "gpu_memory_utilization"),
            ("table:64", OTHER, SMALL, VocabularyMismatchError, "table:64 and table:65 differ: choose a draft"),
            ("table:64", OTHER, SMALL, VocabularyMismatchError, '"vocabulary_mapping" to "intersection" or "strings"'),
        ],
    )
    def test_what_cannot_be_loaded_is_refused(
        self, model: str, speculation: dict[str, Any], engine: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            LLM(model, speculation, engine)
