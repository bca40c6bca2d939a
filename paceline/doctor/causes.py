"""Likely causes of low acceptance, found in measured figures.

Acceptance at depth 1 shows most, because deeper draft tokens stand on it. Where in the output draft tokens are accepted
shows the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts

MIN_STEPS = 16
"""Verifications of a trained draft, or steps of a model-free one: fewer show nothing."""
MIN_TOKENS = 32
"""On each side of a comparison."""
CHANCE = 0.05
"""Acceptance at depth 1 of a draft that knows nothing: common tokens are accepted by chance."""
BAD = 0.4
"""Acceptance at depth 1 below which a draft trained for its target is bad."""
GOOD = 0.5
LONG_PROMPT = 256
"""Tokens: a draft that cannot read shorter prompts was not trained at all."""
MIN_PER_STEP = 0.2
"""Accepted tokens per step below which model-free drafting finds no repetition."""
MIN_SHARE = 0.2
"""A smaller share of accepted tokens cannot be said to fall."""
FALLEN_RATIO = 0.6
"""A share has fallen if it is at most this part of the other one."""


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    says: str


@dataclass(frozen=True, slots=True)
class FirstTokenCause:
    """A cause shown by acceptance at depth 1 in [at_least, below), if the facts apply."""

    name: str
    applies: Callable[[MethodFacts], bool]
    at_least: float
    below: float
    says: str
    """A format of `first`, the acceptance, and `roles` of special tokens."""


FIRST_TOKEN_CAUSES = (
    FirstTokenCause(
        "wrong head",
        lambda facts: facts.trained and facts.same_vocabulary,
        0.0,
        CHANCE,
        "only {first:.0%} of first draft tokens are accepted, hardly more than by chance: this checkpoint was trained "
        "for another target, or its hidden states are taken from other layers than it learned",
    ),
    FirstTokenCause(
        "tokenizer",
        lambda facts: facts.trained and not facts.same_vocabulary,
        0.0,
        BAD,
        "{first:.0%} of first draft tokens are accepted, from a draft with another tokenizer: where one writes one "
        "token and the other several, they cannot agree; choose a draft with the target's tokenizer",
    ),
    FirstTokenCause(
        "special tokens",
        lambda facts: bool(facts.other_special_tokens),
        0.0,
        BAD,
        "draft and target differ in {roles}: the target's prompts look unlike any text that the draft was trained on; "
        "choose a draft of the same family, base or instruct as the target is",
    ),
    FirstTokenCause(
        "chat template",
        lambda facts: facts.trained and facts.bare_prompts,
        CHANCE,
        BAD,
        'the model has a chat template, and the prompts do not use it: write them as {{"messages": ...}}, since '
        "draft and target were trained on text of that form",
    ),
)


def causes(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> list[Cause]:
    """The causes that the figures show; none if the figures are good or too few."""
    enough = [each for each in acceptances if (each.verifications if facts.trained else each.steps) >= MIN_STEPS]
    if not enough:
        return []
    surest = min(enough, key=lambda each: each.temperature)  # the least noise
    roles = ", ".join(facts.other_special_tokens)
    found = [
        Cause(cause.name, cause.says.format(first=surest.first, roles=roles))
        for cause in FIRST_TOKEN_CAUSES
        if cause.applies(facts) and cause.at_least <= surest.first < cause.below
    ]
    others = {
        "temperature": temperature(enough),
        "context limit": context_limit(enough, facts),
        "stale state": stale_state(enough, facts),
        "no repetition": no_repetition(surest, facts),
    }
    return found + [Cause(name, says) for name, says in others.items() if says is not None]


def temperature(acceptances: Sequence[MeasuredAcceptance]) -> str | None:
    greedy = [each for each in acceptances if each.temperature == 0.0]
    sampled = [each for each in acceptances if each.temperature > 0.0]
    if not greedy or not sampled or greedy[0].first < GOOD:
        return None
    worst = min(sampled, key=lambda each: each.first)
    if worst.first > FALLEN_RATIO * greedy[0].first:
        return None
    return (
        f"{greedy[0].first:.0%} of first draft tokens are accepted at temperature 0, {worst.first:.0%} at "
        f"{worst.temperature:g}: the text has many continuations there, and the draft is not to blame; lower the "
        "temperature, or expect less"
    )


def context_limit(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    if not facts.trained:
        return None
    return _beyond(acceptances, facts.position_limit) or _longer(acceptances)


def _beyond(acceptances: Sequence[MeasuredAcceptance], limit: int) -> str | None:
    """Compares positions before and beyond the draft's limit."""
    if not limit:
        return None
    tokens = [token for each in acceptances for completion in each.completions for token in _positions(completion)]
    before = [accepted for position, accepted in tokens if position < limit]
    beyond = [accepted for position, accepted in tokens if position >= limit]
    if not _has_fallen(before, beyond):
        return None
    return (
        f"the draft's positions end at {limit}: {_share(before):.0%} of tokens before were accepted draft tokens, "
        f"{_share(beyond):.0%} beyond; choose a draft with a longer context"
    )


def _longer(acceptances: Sequence[MeasuredAcceptance]) -> str | None:
    """Compares completions of the longer half of the prompts with those of the shorter half."""
    completions = sorted(
        (completion for each in acceptances for completion in each.completions), key=lambda each: each.prompt_tokens
    )
    short, long = completions[: len(completions) // 2], completions[(len(completions) + 1) // 2 :]
    if not short or _mean_prompt(long) < max(LONG_PROMPT, 2 * _mean_prompt(short)):
        return None
    of_short, of_long = _tokens(short), _tokens(long)
    if not _has_fallen(of_short, of_long):
        return None
    return (
        f"after prompts of about {_mean_prompt(long):.0f} tokens {_share(of_long):.0%} of tokens are accepted draft "
        f"tokens, after prompts of about {_mean_prompt(short):.0f} {_share(of_short):.0%}: the draft was trained on "
        "shorter texts"
    )


def stale_state(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    """Compares the halves of each completion, before the draft's position limit."""
    limit = facts.position_limit
    kept = [
        [accepted for position, accepted in _positions(completion) if not limit or position < limit]
        for each in acceptances
        for completion in each.completions
    ]
    begin = [accepted for tokens in kept for accepted in tokens[: len(tokens) // 2]]
    end = [accepted for tokens in kept for accepted in tokens[len(tokens) // 2 :]]
    if not facts.trained or not _has_fallen(begin, end):
        return None
    return (
        f"{_share(begin):.0%} of tokens are accepted draft tokens in the first half of the output, {_share(end):.0%} "
        "in the second: the draft's state does not follow the committed tokens; in a speculator of your own, look at "
        "`commit`"
    )


def no_repetition(surest: MeasuredAcceptance, facts: MethodFacts) -> str | None:
    if facts.trained or surest.per_step >= MIN_PER_STEP:
        return None
    return "this text does not repeat itself, so a lookup finds little; it pays with edits, extraction and code"


def _positions(completion: MeasuredCompletion) -> Iterable[tuple[int, bool]]:
    """Each output token's position, and whether it was an accepted draft token."""
    return enumerate(completion.accepted, completion.prompt_tokens)


def _tokens(completions: Sequence[MeasuredCompletion]) -> list[bool]:
    return [accepted for completion in completions for accepted in completion.accepted]


def _mean_prompt(completions: Sequence[MeasuredCompletion]) -> float:
    return sum(completion.prompt_tokens for completion in completions) / len(completions)


def _share(tokens: Sequence[bool]) -> float:
    return sum(tokens) / len(tokens)


def _has_fallen(before: Sequence[bool], after: Sequence[bool]) -> bool:
    if min(len(before), len(after)) < MIN_TOKENS or _share(before) < MIN_SHARE:
        return False
    return _share(after) <= FALLEN_RATIO * _share(before)
