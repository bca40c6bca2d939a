"""Generating from Python: order, stops, counts, and errors that leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.core.messages import FinishReason
from paceline.llm import LLM, Completion, Prompt, VocabularyMismatchError
from paceline.model_names import ModelNotFoundError
from paceline.text import Detokenizer, Tokenizer
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parallel import BLOCK, DFLASH, MASK, PEAGLE, dflash_tensors, peagle_tensors, save

DRAFT = {"method": "draft_model", "model": "table:64:0.3", "row_budget": False}
SMALL = {"slots": 512, "max_num_batched_rows": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=2)
PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("table:64", DRAFT, SMALL)


def one(llm: LLM, sampling: SamplingParams = GREEDY, **options: Any) -> Completion:
    [completion] = llm.generate(PROMPT, sampling, **options)
    return completion


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
    target = save_checkpoint(tmp_path / "target")
    # Whether drafting pays on a model this small is the machine's to say: without the budget it is not asked.
    draft = {"model": str(folder_of(method, tmp_path / "draft")), "row_budget": False}
    llm = LLM(str(target), {**speculation, **draft}, SMALL)
    for sampling in (GREEDY, SAMPLED):
        drafted, plain = one(llm, sampling), one(llm, sampling, speculative=False)
        assert drafted.tokens == plain.tokens
        assert drafted.speculation.drafted_tokens > 0
        assert len(drafted.speculation.drafted_by_depth) <= depth


def folder_of(method: str, folder: Path) -> Path:
    if method == "pard":
        save_checkpoint(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    elif method == "dflash":
        save(folder, DFLASH, dflash_tensors())
    else:
        save(folder, PEAGLE, peagle_tensors())
    return folder


class TestPrompts:
    def test_completions_are_in_the_order_of_the_prompts(self, llm: LLM) -> None:
        """More prompts than run at once, of very different length, mixed kinds."""
        prompts: list[Prompt] = ["7", [1] * 200, "1 2 3", [4, 5], "9 " * 90, [1, 2, 3]]
        together = llm.generate(prompts, SAMPLED)
        alone = [llm.generate([prompt], SAMPLED)[0] for prompt in prompts]
        assert [c.tokens for c in together] == [c.tokens for c in alone]
        assert [c.prompt_tokens for c in together] == [1, 200, 3, 2, 90, 3]
        assert together[2].tokens == together[5].tokens

    def test_one_prompt_need_not_be_in_a_list(self, llm: LLM) -> None:
        text, ids, listed = llm.generate("1 2 3"), llm.generate([1, 2, 3]), llm.generate(["1 2 3"])
        assert text[0].tokens == ids[0].tokens == listed[0].tokens
        assert len(text) == len(ids) == len(listed) == 1

    def test_no_prompts_no_completions(self, llm: LLM) -> None:
        assert llm.generate([]) == []

    def test_a_chat_is_what_the_template_makes_of_it(self, llm: LLM) -> None:
        conversation = [{"role": "user", "content": "1 2"}, {"role": "user", "content": "3"}]
        [answer] = llm.chat(conversation, GREEDY)
        assert answer.tokens == one(llm).tokens
        other = [{"role": "user", "content": "7"}]
        several = llm.chat([conversation, other], GREEDY)
        assert [c.tokens for c in several] == [answer.tokens, llm.generate("7", GREEDY)[0].tokens]
        assert llm.chat([]) == []


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_same_tokens_with_and_without_guesses(llm: LLM, sampling: SamplingParams) -> None:
    guessed, plain = one(llm, sampling), one(llm, sampling, speculative=False)
    assert (guessed.text, guessed.tokens, guessed.log_probs) == (plain.text, plain.tokens, plain.log_probs)
    assert guessed.speculation.accepted_tokens > 0
    assert guessed.speculation.steps < plain.speculation.steps == 40
    assert plain.speculation.drafted_tokens == 0


def test_counts_agree(llm: LLM) -> None:
    answer = one(llm, SAMPLED)
    assert len(answer.tokens) == len(answer.log_probs) == 40
    assert all(len(each.top) == 2 for each in answer.log_probs)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.prompt_tokens == 3
    stats = answer.speculation
    assert stats.accepted_tokens + stats.steps == 40, "every step commits its accepted tokens and a bonus"
    assert answer.timings.total_s >= answer.timings.compute_s > 0


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
        assert second.tokens == llm.generate("8 8", GREEDY, stop=stop)[0].tokens
        assert len(second.tokens) > len(first.tokens)

    def test_a_stop_string_that_never_comes(self, llm: LLM) -> None:
        assert one(llm, stop="x").text == one(llm).text
        unfinished = one(llm).text[-2:] + " never"
        assert one(llm, stop=unfinished).text == one(llm).text, "what was held back is shown in the end"

    def test_a_stop_string_counts_from_min_tokens_on(self, llm: LLM) -> None:
        patient = GREEDY.model_copy(update={"min_tokens": 20})
        answer = one(llm, patient, stop=" ")
        assert len(answer.tokens) == 21
        assert answer.text == text_of(answer.tokens[:20])

    def test_an_empty_stop_string_is_refused(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="a stop string needs at least one character"):
            one(llm, stop=["a", ""])

    def test_a_stop_token_is_a_token_but_no_text(self, llm: LLM) -> None:
        whole = one(llm)
        stops = GREEDY.model_copy(update={"stop_token_ids": (whole.tokens[6],)})
        answer = one(llm, stops)
        assert answer.tokens == whole.tokens[: whole.tokens.index(whole.tokens[6]) + 1]
        assert answer.text == text_of(answer.tokens[:-1])
        assert answer.finish_reason is FinishReason.STOP

    def test_the_model_s_own_end_of_text_ends_it(self, tmp_path: Path) -> None:
        endless = LLM(str(save_checkpoint(tmp_path / "endless")), engine_config=SMALL)
        whole = one(endless)
        ending = LLM(str(save_checkpoint(tmp_path / "ending", eos_token_ids=[whole.tokens[5]])), engine_config=SMALL)
        answer = one(ending)
        assert answer.tokens == whole.tokens[: whole.tokens.index(whole.tokens[5]) + 1]
        assert answer.finish_reason is FinishReason.STOP
        with pytest.raises(ValueError, match="has no chat template: use generate"):
            ending.chat([{"role": "user", "content": "1"}])


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [("", "the prompt is empty"), ([64], "outside the vocabulary of 64"), ([1] * 600, "600 tokens")],
    )
    def test_a_prompt_that_cannot_be_served_fails_the_call_and_leaves_nothing(
        self, llm: LLM, prompt: str | list[int], message: str
    ) -> None:
        expected = one(llm).tokens
        with pytest.raises(ValueError, match=message):
            llm.generate([PROMPT, prompt, "4 5"], GREEDY)
        assert one(llm).tokens == expected
        llm._engine.check_integrity()

    def test_an_interrupted_step_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in a notebook: slots were taken, nothing was computed in them."""
        llm = LLM("table:64", DRAFT, SMALL)
        expected = one(llm).tokens
        run, passes = llm.model.run, 0

        def interrupted(*arguments: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 4:
                raise KeyboardInterrupt
            return run(*arguments)

        monkeypatch.setattr(llm.model, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, "4 5 6"], GREEDY)
        llm._engine.check_integrity()
        assert one(llm).tokens == expected
        assert one(llm).speculation.accepted_tokens > 0

    def test_vocabularies_that_differ_are_refused_before_the_first_request(self) -> None:
        with pytest.raises(VocabularyMismatchError, match="table:64 and table:65 differ: choose a draft"):
            LLM("table:64", {"method": "draft_model", "model": "table:65"}, SMALL)

    def test_the_refusal_names_what_helps(self) -> None:
        with pytest.raises(VocabularyMismatchError, match='or set "vocabulary_mapping" to "intersection" or "strings"'):
            LLM("table:64", {"method": "draft_model", "model": "table:65"}, SMALL)

    def test_a_method_that_knows_only_ids_fits_any_vocabulary(self) -> None:
        looped = LLM("table:64", {"method": "ngram"}, SMALL)
        assert one(looped).tokens == one(looped, speculative=False).tokens

    def test_a_model_that_is_not_there(self) -> None:
        with pytest.raises(ModelNotFoundError, match="no model at"):
            LLM("/nowhere")

    def test_an_unknown_key_is_named(self) -> None:
        with pytest.raises(ValidationError, match="gpu_memory_utilization"):
            LLM("table:64", engine_config={"gpu_memory_utilization": 0.9})
