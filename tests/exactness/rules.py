"""Rules that turn guesses into output, as programs whose laws can be counted.

`Coupled` is ours, built from the real tree and the real walk; a mutant of it changes one part. `Chain` is rejection
sampling as published, correct by default: Paceline does not have it yet, but a checker that has never seen a right
rule of that family could not be trusted to tell its broken relatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from paceline.tree import Node, TokenTree
from paceline.verify import walk
from tests.exactness.chance import Chance, law_of
from tests.exactness.worlds import Drafter, Law, Scene, Tokens, World, drawn, nobody

ROWS = 4
DEPTH = 3


class Rule(Protocol):
    def __call__(self, world: World, drafter: Drafter, chance: Chance) -> Tokens:
        """The first `world.length` tokens of output."""


def law_error(rule: Rule, world: World, drafter: Drafter) -> Fraction:
    """The largest difference in probability, over all outputs, between a rule and the target alone."""
    law = law_of(lambda chance: rule(world, drafter, chance))
    right = world.sequences()
    return max(abs(law.get(s, Fraction(0)) - right.get(s, Fraction(0))) for s in {*law, *right})


def drafter_changes_output(rule: Rule, world: World, drafter: Drafter) -> bool:
    """Whether, for some noise, the output differs from that of plain decoding with the same noise."""
    agreement = law_of(lambda c: rule(world, drafter, c) == rule(world, nobody, c))
    return bool(agreement.get(False))


Draw = Callable[[Scene, Sequence[Node]], int]
Walk = Callable[[Node, Sequence[Node], Sequence[int]], list[int]]


def draw(scene: Scene, path: Sequence[Node]) -> int:
    """The target's draw after the committed output and a path of guesses."""
    prefix = (*scene.output, *(node.token for node in path))
    return drawn(scene.world.target(prefix), scene.chance.noise(len(prefix)))


@dataclass(frozen=True)
class Coupled:
    """Draw after the root and every verified node, walk, commit."""

    draw: Draw = draw
    walk: Walk = walk

    def __call__(self, world: World, drafter: Drafter, chance: Chance) -> Tokens:
        tree, output = TokenTree(0, 0), ()
        while len(output) < world.length:
            scene = Scene(world, tree, output, chance)
            drafter(scene)
            verified = tree.best(ROWS, min(DEPTH, world.length - len(output) - 1))
            draws = [self.draw(scene, node.path()) for node in (tree.root, *verified)]
            committed = self.walk(tree.root, verified, draws)
            tree.commit(committed)
            output = (*output, *committed)
        return output[: world.length]


def likely_as(target: Fraction, draft: Fraction) -> Fraction:
    return min(Fraction(1), target / draft)


def residual(target: Law, draft: Law) -> Law:
    return normalised([max(p - q, Fraction(0)) for p, q in zip(target, draft, strict=True)])


def normalised(weights: Sequence[Fraction]) -> Law:
    return [weight / sum(weights) for weight in weights]


def truncated(law: Law, keep: int = 2) -> list[Fraction]:
    """The `keep` largest probabilities as they are, zero for the rest: no law until normalised."""
    kept = sorted(range(len(law)), key=lambda token: -law[token])[:keep]
    return [p if token in kept else Fraction(0) for token, p in enumerate(law)]


@dataclass(frozen=True)
class Chain:
    """Rejection sampling of a chain of guesses.

    The draft samples from `sampled(its law)` and verification believes it sampled from `claimed(its law)`. A guess
    is accepted with probability `accept(its probability under target, and as claimed)`; the first rejected one is
    replaced by a draw from `replace(target, claimed)`. Guesses that are not `admitted` are not verified: the
    position is drawn plainly.
    """

    sampled: Callable[[Law], Law] = lambda law: law
    claimed: Callable[[Law], Sequence[Fraction]] = lambda law: law
    accept: Callable[[Fraction, Fraction], Fraction] = likely_as
    replace: Callable[[Law, Sequence[Fraction]], Law] = residual
    admitted: Callable[[Fraction], bool] = lambda claimed: True
    guesses: int = 2

    def __call__(self, world: World, drafter: Drafter, chance: Chance) -> Tokens:
        output: Tokens = ()
        while len(output) < world.length:
            output = (*output, *self._step(world, output, chance))
        return output[: world.length]

    def _step(self, world: World, output: Tokens, chance: Chance) -> Tokens:
        prefix = output
        for _ in range(min(self.guesses, world.length - len(output))):
            target, draft = world.target(prefix), world.draft(prefix)
            claimed = self.claimed(draft)
            guess = chance.choose(self.sampled(draft))
            if not self.admitted(claimed[guess]):
                break
            accept = self.accept(target[guess], claimed[guess])
            if chance.choose([accept, 1 - accept]):
                return (*prefix[len(output) :], chance.choose(self.replace(target, claimed)))
            prefix = (*prefix, guess)
        if len(prefix) == world.length:
            return prefix[len(output) :]
        return (*prefix[len(output) :], chance.choose(world.target(prefix)))
