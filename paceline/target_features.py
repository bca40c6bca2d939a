"""Features: what a target can do beyond the first builds, by name; a gateway sends no target what it cannot do.

A build ignores the fields of a message that it does not know, so a target names the sampling parameters that it has.

Labels: what an operator says of a target, each KEY=VALUE; a request may ask for some.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from paceline.config import SamplingParams

NO_OUTPUT = "no_output"
"""The feature of computing a prompt and drawing nothing: `max_tokens` 0."""
FULL_PROMPT = "full_prompt"
"""The feature of computing, without output, a prompt that fills the whole context."""
COMMON_PARAMETERS = frozenset(
    (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "bad_words", "grammar", "min_tokens", "max_tokens", "seed", "stop_token_ids", "logprobs"),
    )
)
"""The parameters of every target, also of one that names none. Closed: a parameter that comes later is a feature."""
VLLM_LACKS = ("grammar_begins_after", "grammar_waits_if", "logprob_token_ids", FULL_PROMPT)
"""The features that a target with vLLM as its engine does not have: its grammars begin with the output, and it draws a
token after every prompt."""
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9./_-]{0,62}=[A-Za-z0-9._-]{0,63}")
MAX_LABELS = 16


def all_features(without: Collection[str] = ()) -> list[str]:
    """The features of this build, without those that its engine lacks."""
    named = {*SamplingParams.model_fields, NO_OUTPUT, FULL_PROMPT} - COMMON_PARAMETERS
    return sorted(named - set(without))


def needed_features(sampling: SamplingParams) -> frozenset[str]:
    """What a target must be able to do for a request: its parameters that have another value than by default."""
    fields = SamplingParams.model_fields.keys() - COMMON_PARAMETERS
    changed = {
        name
        for name in fields
        if getattr(sampling, name) != SamplingParams.model_fields[name].get_default(call_default_factory=True)
    }
    return frozenset(changed | {NO_OUTPUT} if sampling.max_tokens == 0 else changed)


def parse_labels(text: str) -> frozenset[str]:
    """The labels in `KEY=VALUE,KEY=VALUE`. Raises ValueError."""
    labels = frozenset(part.strip() for part in text.split(",") if part.strip())
    if len(labels) > MAX_LABELS or not all(map(LABEL.fullmatch, labels)):
        raise ValueError(f"labels have to be KEY=VALUE, separated by commas, and at most {MAX_LABELS}")
    return labels
