"""Log-probabilities as responses show them, and the text of echoed prompts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.messages import LogProbs
from paceline.text import Tokenizer
from paceline_services.gateway.generation.bodies import CompletionBody
from paceline_services.gateway.generation.echoed_prompt import EchoedPrompt
from paceline_services.gateway.generation.logprobs import TokenSpelling, completion_log_probs, prompt_log_probs

TOKENIZER = Tokenizer.load("pydoc")
KNOWN = len(TOKENIZER.pieces)
PARTS = [token for token in range(KNOWN) if "\ufffd" in TOKENIZER.piece(token).decode(errors="replace")]
"""Parts of characters, which are all spelled alike."""
tokens = st.one_of(st.sampled_from(PARTS), st.integers(0, KNOWN - 1))


@given(
    token=tokens,
    others=st.lists(st.tuples(tokens, st.floats(-20, -0.01)), max_size=5, unique_by=lambda pair: pair[0]),
    value=st.floats(-20, -0.01),
)
def test_a_token_equals_the_best_number_only_if_it_is_the_best(
    token: int, others: list[tuple[int, float]], value: float
) -> None:
    """So evaluations tell greedy continuations from others, whatever the tokens are spelled like."""
    top = sorted([pair for pair in others if pair[0] != token], key=lambda pair: -pair[1])
    shown = completion_log_probs([token], [LogProbs(value, top)], [0], TokenSpelling(TOKENIZER))
    [best] = shown["top_logprobs"]
    assert shown["token_logprobs"] == [value]
    assert max(best.values()) == max([value, *(each for _, each in top)])
    by_id = completion_log_probs([token], [LogProbs(value, top)], [0], TokenSpelling(TOKENIZER, by_id=True))
    assert by_id["top_logprobs"] == [{f"token_id:{each}": number for each, number in [*top, (token, value)]}]


def test_what_json_has_no_number_for() -> None:
    impossible = LogProbs(float("-inf"), [(5, float("-inf"))], 9)
    [_, known] = prompt_log_probs([3, 7], [impossible], 1, TOKENIZER)
    assert known is not None
    assert [(name, each["logprob"], each["rank"]) for name, each in known.items()] == [
        ("7", -9999.0, 9),
        ("5", -9999.0, 1),
    ]


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}])
@pytest.mark.parametrize("further", [{}, {"logprobs": 0}, {"truncate_prompt_tokens": 99}])
def test_the_echoed_text_does_not_depend_on_log_probabilities(fields: dict[str, Any], further: dict[str, Any]) -> None:
    """A text is the client's own, without what its encoding adds; ids follow `skip_special_tokens`."""
    text, start = "<|im_start|>user\nhi<|im_end|>\n", TOKENIZER.token_id("<|endoftext|>")
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert start not in ids
    sent = CompletionBody.model_validate({"prompt": text, "echo": True, **fields, **further})
    assert EchoedPrompt.of(sent, 0, [start, *ids], TOKENIZER).text == text
    sent = CompletionBody.model_validate({"prompt": ids, "echo": True, **fields, **further})
    assert EchoedPrompt.of(sent, 0, ids, TOKENIZER).text == (text if fields else "user\nhi\n")


@settings(deadline=None)
@given(prompt=st.lists(tokens, min_size=1, max_size=20), skip=st.booleans())
def test_the_offsets_of_an_echoed_prompt_cut_its_text(prompt: list[int], skip: bool) -> None:
    """A character begins where its first token does, and counts from its last one on."""
    fields = {"prompt": prompt, "echo": True, "logprobs": 0, "skip_special_tokens": skip}
    echoed = EchoedPrompt.of(CompletionBody.model_validate(fields), 0, prompt, TOKENIZER)
    pieces = TOKENIZER.visible_pieces if skip else TOKENIZER.pieces
    assert echoed.text == b"".join(pieces[token] for token in prompt).decode(errors="replace")
    assert echoed.offsets[0] == 0
    assert list(echoed.offsets) == sorted(echoed.offsets)
    for at, token in enumerate(prompt):
        before = b"".join(pieces[each] for each in prompt[:at])
        if pieces[token].isascii() and before.isascii():
            assert echoed.text[echoed.offsets[at] :].startswith(pieces[token].decode())
