"""Why so little is accepted, as far as figures tell. Each cause is one function: a sentence, or None.

Acceptance at depth 1 tells most: deeper guesses stand on it. Where in an answer guesses came true tells the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts

FEWEST_STEPS = 16
"""That verified something, or of what is looked up any: with fewer nothing can be said."""
FEWEST_TOKENS = 32
"""On each side of a comparison."""
CHANCE = 0.05
"""Accepted at depth 1 by a draft that knows nothing: common tokens come by themselves."""
BAD = 0.4
"""Accepted at depth 1: less is bad for a draft that was trained for its target."""
GOOD = 0.5
LONG = 256
"""Tokens of a prompt: a draft that cannot read shorter ones was not trained at all."""
LOW_DRAFT_SHARE = 0.2
"""Accepted tokens per step, of what is looked up."""
SOME = 0.2
"""A smaller share of guessed tokens cannot fall."""
DEEP = 4
"""Guesses one after the other: fewer are never too many."""
RARE = 0.05
"""Of verifications: a depth that is reached as seldom brings nothing."""
FEWEST_ANSWERS = 4
UNEVEN = 4.0
"""Of shares of guessed tokens, the largest over the smallest."""
FALLEN_RATIO = 0.6
"""Of the other side, or less: it has fallen."""


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    says: str


def causes(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> list[Cause]:
    """Those that the figures show, none if they are good or too few."""
    enough = [each for each in acceptances if (each.verifications if facts.trained else each.steps) >= FEWEST_STEPS]
    if not enough:
        return []
    found = ((name, look(enough, facts)) for name, look in CAUSES.items())
    return [Cause(name, says) for name, says in found if says is not None]


def wrong_head(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    first = _surest(acceptances).first
    if not facts.trained or not facts.same_vocabulary or first >= CHANCE:
        return None
    return (
        f"only {first:.0%} of first guesses are accepted, hardly more than by chance: this checkpoint was trained for "
        "another target, or its hidden states are taken from other layers than it learned"
    )


def vocabulary(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    first = _surest(acceptances).first
    if not facts.trained or facts.same_vocabulary or first >= BAD:
        return None
    return (
        f"{first:.0%} of first guesses are accepted, from a draft with another tokenizer: what one of the two "
        "writes as one token the other cannot guess; choose a draft with the target's tokenizer"
    )


def special_tokens(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    first = _surest(acceptances).first
    if not facts.other_special_tokens or first >= BAD:
        return None
    return (
        f"draft and target differ in {', '.join(facts.other_special_tokens)}: the draft reads the target's prompts as "
        "it never saw any; choose a draft of the same family, base or instruct as the target is"
    )


def chat_template(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    first = _surest(acceptances).first
    if not facts.trained or not facts.bare_prompts or not CHANCE <= first < BAD:
        return None
    return (
        'the model has a chat template, and the prompts do not go through it: ask with {"messages": ...}, since what '
        "draft and target were trained on looks otherwise"
    )


def temperature(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    greedy = [each for each in acceptances if each.temperature == 0.0]
    sampled = [each for each in acceptances if each.temperature > 0.0]
    if not greedy or not sampled or greedy[0].first < GOOD:
        return None
    worst = min(sampled, key=lambda each: each.first)
    if worst.first > FALLEN_RATIO * greedy[0].first:
        return None
    return (
        f"{greedy[0].first:.0%} of first guesses are accepted at temperature 0, {worst.first:.0%} at "
        f"{worst.temperature:g}: the text is open there, not the draft bad; sample less wildly, or expect less"
    )


def context_limit(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    if not facts.trained:
        return None
    return _beyond(acceptances, facts.position_limit) or _longer(acceptances)


def _beyond(acceptances: Sequence[MeasuredAcceptance], limit: int) -> str | None:
    if not limit:
        return None
    tokens = [token for each in acceptances for answer in each.answers for token in _placed(answer)]
    before = [accepted for position, accepted in tokens if position < limit]
    beyond = [accepted for position, accepted in tokens if position >= limit]
    if not _has_fallen(before, beyond):
        return None
    return (
        f"the draft's positions end at {limit}: {_share(before):.0%} of tokens before were guessed, "
        f"{_share(beyond):.0%} beyond; choose a draft with a longer context"
    )


def _longer(acceptances: Sequence[MeasuredAcceptance]) -> str | None:
    """Answers to the longer half of the prompts beside those to the shorter half."""
    answers = sorted(
        (answer for each in acceptances for answer in each.answers), key=lambda answer: answer.prompt_tokens
    )
    short, long = answers[: len(answers) // 2], answers[(len(answers) + 1) // 2 :]
    if not short or _mean_prompt(long) < max(LONG, 2 * _mean_prompt(short)):
        return None
    of_short, of_long = _tokens(short), _tokens(long)
    if not _has_fallen(of_short, of_long):
        return None
    return (
        f"after prompts of about {_mean_prompt(long):.0f} tokens {_share(of_long):.0%} of tokens are guessed, after "
        f"those of about {_mean_prompt(short):.0f} {_share(of_short):.0%}: the draft was trained on shorter texts"
    )


def stale_state(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    """Within an answer, before the draft's limit."""
    limit = facts.position_limit
    kept = [
        [accepted for position, accepted in _placed(answer) if not limit or position < limit]
        for each in acceptances
        for answer in each.answers
    ]
    begin = [accepted for tokens in kept for accepted in tokens[: len(tokens) // 2]]
    end = [accepted for tokens in kept for accepted in tokens[len(tokens) // 2 :]]
    if not facts.trained or not _has_fallen(begin, end):
        return None
    return (
        f"{_share(begin):.0%} of tokens are guessed in the first half of an answer, {_share(end):.0%} in the second: "
        "the draft's state does not follow what is committed; in a speculator of your own, look at `commit`"
    )


def too_deep(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    """Guesses that are verified at a depth which hardly any verification reaches."""
    surest = _surest(acceptances)
    depths = sum(2 * drafted >= surest.verifications for drafted in surest.drafted_by_depth)
    reached = [depth for depth, share in enumerate(surest.by_depth, 1) if share >= RARE]
    wanted = max(reached, default=1)
    if surest.first < CHANCE or depths < max(DEEP, 2 * wanted):
        return None
    return (
        f"steps verify guesses {depths} deep, of which fewer than {RARE:.0%} are accepted beyond depth {wanted}: "
        f"num_speculative_tokens {wanted} costs less and brings as much"
    )


def uneven(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    """Requests of which some are foreseen well and others hardly."""
    answers = [answer for answer in _surest(acceptances).answers if len(answer.accepted) >= FEWEST_TOKENS]
    shares = sorted(_share(answer.accepted) for answer in answers)
    if len(shares) < FEWEST_ANSWERS or shares[-1] < GOOD or shares[0] > shares[-1] / UNEVEN:
        return None
    return (
        f"acceptance varies by request: {shares[0]:.0%} of an answer's tokens are guessed at the worst, "
        f"{shares[-1]:.0%} at the best; what the draft was not trained on gains nothing, so look at your prompts apart"
    )


def no_repetition(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts) -> str | None:
    if facts.trained or _surest(acceptances).per_step >= LOW_DRAFT_SHARE:
        return None
    return "this text does not repeat itself, so there is little to look up; it pays with edits, extraction and code"


Look = Callable[[Sequence[MeasuredAcceptance], MethodFacts], str | None]
CAUSES: dict[str, Look] = {
    "wrong head": wrong_head,
    "tokenizer": vocabulary,
    "special tokens": special_tokens,
    "chat template": chat_template,
    "temperature": temperature,
    "context limit": context_limit,
    "stale state": stale_state,
    "too deep": too_deep,
    "uneven requests": uneven,
    "no repetition": no_repetition,
}


def _surest(acceptances: Sequence[MeasuredAcceptance]) -> MeasuredAcceptance:
    """The one with the least noise in it."""
    return min(acceptances, key=lambda each: each.temperature)


def _placed(answer: MeasuredCompletion) -> Iterable[tuple[int, bool]]:
    """Each token's position, and whether it was guessed."""
    return enumerate(answer.accepted, answer.prompt_tokens)


def _tokens(answers: Sequence[MeasuredCompletion]) -> list[bool]:
    return [accepted for answer in answers for accepted in answer.accepted]


def _mean_prompt(answers: Sequence[MeasuredCompletion]) -> float:
    return sum(answer.prompt_tokens for answer in answers) / len(answers)


def _share(tokens: Sequence[bool]) -> float:
    return sum(tokens) / len(tokens)


def _has_fallen(before: Sequence[bool], after: Sequence[bool]) -> bool:
    if min(len(before), len(after)) < FEWEST_TOKENS or _share(before) < SOME:
        return False
    return _share(after) <= FALLEN_RATIO * _share(before)
