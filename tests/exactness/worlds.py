"""Tiny worlds that can be enumerated: distributions of a target and of a draft, and drafters of every kind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from tests.exactness.chance import NOISE_LEVELS, Chance

Distribution = Sequence[Fraction]
Tokens = tuple[int, ...]


@dataclass
class World:
    """A target's and a draft's distribution after every prefix, the same for the same seed.

    Distributions are multiples of 1/NOISE_LEVELS, so that a draw can be an exact function of one value of the noise.
    """

    vocabulary: int
    length: int
    seed: int = 0
    _distributions: dict[Hashable, Distribution] = field(default_factory=dict, repr=False)

    def target(self, prefix: Tokens, history: Tokens | None = None) -> Distribution:
        """The target's distribution after `prefix`, under a rule that looks back: a repeated token loses two levels.

        `history`: what that rule sees; default the prefix, which is right.
        """
        last = (prefix if history is None else history)[-1:]
        if (prefix, last) not in self._distributions:
            distribution = list(self._random_distribution("target", prefix))
            for token in last:
                loss = min(distribution[token], Fraction(2, NOISE_LEVELS))
                distribution[token] -= loss
                distribution[(token + 1) % self.vocabulary] += loss
            self._distributions[prefix, last] = distribution
        return self._distributions[prefix, last]

    def draft(self, prefix: Tokens) -> Distribution:
        return self._random_distribution("draft", prefix)

    def sequences(self) -> dict[Tokens, Fraction]:
        """The distribution of the whole output that the target alone would produce, by the chain rule."""
        distribution = {(): Fraction(1)}
        for _ in range(self.length):
            distribution = {
                (*prefix, token): weight * p
                for prefix, weight in distribution.items()
                for token, p in enumerate(self.target(prefix))
                if p
            }
        return distribution

    def _random_distribution(self, whose: str, prefix: Tokens) -> Distribution:
        if (whose, prefix) not in self._distributions:
            rng = random.Random(repr((self.seed, whose, prefix)))
            cuts = [0, *sorted(rng.choices(range(NOISE_LEVELS + 1), k=self.vocabulary - 1)), NOISE_LEVELS]
            self._distributions[whose, prefix] = [
                Fraction(high - low, NOISE_LEVELS) for low, high in itertools.pairwise(cuts)
            ]
        return self._distributions[whose, prefix]


def drawn(distribution: Distribution, noise: int) -> int:
    """The token that a distribution draws with this noise: over all values of the noise, exactly the distribution."""
    levels = itertools.accumulate(p.numerator * (NOISE_LEVELS // p.denominator) for p in distribution)
    return next(token for token, level in enumerate(levels) if noise < level)


@dataclass(frozen=True)
class Scene:
    """What a drafter sees when it is asked to grow; a hostile one even knows the noise of draws to come."""

    world: World
    tree: TokenTree
    output: Tokens
    chance: Chance

    def prefix(self, node: int) -> Tokens:
        return (*self.output, *self.tree.path_tokens(node))

    def wants(self, prefix: Tokens) -> bool:
        return len(prefix) < self.world.length

    def true_draw(self, prefix: Tokens) -> int:
        return drawn(self.world.target(prefix), self.chance.noise(len(prefix)))


Drafter = Callable[[Scene], None]


def chain(guess: Callable[[Scene, Tokens], int | None]) -> Drafter:
    """A drafter that extends the deepest line of the tree, one guess at a time."""

    def grow(scene: Scene) -> None:
        node = ROOT
        while scene.wants(scene.prefix(node)):
            token = guess(scene, scene.prefix(node))
            if token is None:
                return
            node = scene.tree.child(node, token) or scene.tree.add(node, token, -0.1)

    return grow


def bushy(scene: Scene) -> None:
    """Every continuation there is; the least likely ones praised the most, so that a few are never verified."""
    for node in range(scene.tree.size + 1):
        prefix = scene.prefix(node)
        if scene.wants(prefix):
            distribution = scene.world.target(prefix)
            for token in range(scene.world.vocabulary):
                if scene.tree.child(node, token) is None:
                    scene.tree.add(node, token, -float(distribution[token]))


def worst_first(scene: Scene) -> None:
    """Next to each right token, two wrong ones with probability 1."""
    node = ROOT
    while scene.wants(prefix := scene.prefix(node)):
        right = scene.true_draw(prefix)
        for token in range(scene.world.vocabulary):
            if scene.tree.child(node, token) is None:
                scene.tree.add(node, token, -1.0 if token == right else 0.0)
        node = scene.tree.match([*scene.tree.path_tokens(node), right])[-1]


class Laggard:
    """Drafts from a replica that commits a step late; its growth arrives another step late, and twice."""

    def __init__(self) -> None:
        self._begin()

    def __call__(self, scene: Scene) -> None:
        if not scene.output:
            self._begin()
        for growth in self._under_way * 2:
            scene.tree.graft(growth, 100)
        known = set(self._replica.nodes())
        bushy(Scene(scene.world, self._replica, self._output, scene.chance))
        self._under_way = [self._replica.growth([n for n in self._replica.nodes() if n not in known])]
        if new_tokens := scene.output[len(self._output) :]:
            self._replica.commit(new_tokens)
        self._output = scene.output

    def _begin(self) -> None:
        self._replica = TokenTree(0, 0)
        self._output: Tokens = ()
        self._under_way: list[Growth] = []


def no_draft(scene: Scene) -> None:
    """Plain decoding."""


DRAFTERS: dict[str, Drafter] = {
    "no draft": no_draft,
    "predicts with the shared noise": chain(
        lambda s, prefix: drawn(s.world.draft(prefix), s.chance.noise(len(prefix)))
    ),
    "samples by itself": chain(
        lambda s, prefix: s.chance.choose(s.world.draft(prefix)) if len(prefix) < len(s.output) + 2 else None
    ),
    "always right": chain(lambda s, prefix: s.true_draw(prefix)),
    "always wrong": chain(lambda s, prefix: (s.true_draw(prefix) + 1) % s.world.vocabulary),
    "right only where it likes the outcome": chain(lambda s, prefix: 0 if s.true_draw(prefix) == 0 else None),
    "constant": chain(lambda s, prefix: 1),
    "bushy": bushy,
    "worst first": worst_first,
    "laggard": Laggard(),
}
