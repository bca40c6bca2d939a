"""Verification rules as programs whose output distribution can be enumerated.

`Coupled` is built from the real tree and the real walk, `Rejection` from the real tree and the real rules of
`residual`. A mutant changes one part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, Protocol

from paceline.core.growth import DraftDistribution as Weights
from paceline.core.strategies import residual as rejection
from paceline.core.strategies.residual import ChainAcceptance, ChainToken
from paceline.core.tree import ROOT, TokenTree
from paceline.core.verify import follow_draws
from tests.exactness.chance import Chance, distribution_of
from tests.exactness.worlds import NOISE_LEVELS, Distribution, Drafter, Scene, Tokens, World, drawn, no_draft

ROWS = 4
DEPTH = 3


class Rule(Protocol):
    def __call__(self, world: World, drafter: Drafter, chance: Chance) -> Tokens:
        """The first `world.length` tokens of output."""


def distribution_error(rule: Rule, world: World, drafter: Drafter) -> Fraction:
    """The largest difference in probability, over all outputs, between a rule and the target alone."""
    distribution = distribution_of(lambda chance: rule(world, drafter, chance))
    right = world.sequences()
    return max(abs(distribution.get(s, Fraction(0)) - right.get(s, Fraction(0))) for s in {*distribution, *right})


def drafter_changes_output(rule: Rule, world: World, drafter: Drafter) -> bool:
    """Whether, for some noise, the output differs from that of plain decoding with the same noise."""
    agreement = distribution_of(lambda c: rule(world, drafter, c) == rule(world, no_draft, c))
    return bool(agreement.get(False))


Draw = Callable[[Scene, int], int]
Follow = Callable[[TokenTree, Sequence[int], Sequence[int]], list[int]]


def draw(scene: Scene, node: int) -> int:
    """The target's draw after a node: the committed output and a path of guesses."""
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise(len(prefix)))


def walk(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    return follow_draws(tree, verified, draws).tokens(tree)


@dataclass(frozen=True)
class Coupled:
    """Draw after the root and every verified node, walk, commit."""

    draw: Draw = draw
    follow: Follow = walk

    def __call__(self, world: World, drafter: Drafter, chance: Chance) -> Tokens:
        tree, output = TokenTree(0, 0), ()
        while len(output) < world.length:
            scene = Scene(world, tree, output, chance)
            drafter(scene)
            verified = tree.best(ROWS, min(DEPTH, world.length - len(output) - 1))
            draws = [self.draw(scene, node) for node in (ROOT, *verified)]
            committed = self.follow(tree, verified, draws)
            tree.commit(committed)
            output = (*output, *committed)
        return output[: world.length]


def normalised(weights: Sequence[Fraction]) -> Distribution:
    return [weight / sum(weights) for weight in weights]


class Coin:
    """A uniform number of which only what was asked is settled: a comparison is one choice, with its exact chance."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._low, self._high = Fraction(0), Fraction(1)

    def __mul__(self, factor: Fraction) -> _Scaled:
        return _Scaled(self, factor)

    def __lt__(self, limit: Fraction) -> bool:
        split = min(max(Fraction(limit), self._low), self._high)
        if split in (self._low, self._high):
            return split == self._high
        share = (split - self._low) / (self._high - self._low)
        below = not self._chance.choose([share, 1 - share])
        self._low, self._high = (self._low, split) if below else (split, self._high)
        return below

    def draw(self, distribution: Distribution) -> int:
        return next(token for token, level in enumerate(accumulate(distribution)) if self < level)


@dataclass(frozen=True)
class _Scaled:
    coin: Coin
    factor: Fraction

    def __lt__(self, limit: Fraction) -> bool:
        return self.coin < limit / self.factor


@dataclass
class Places:
    """What a rule may key noise by: the root, and the path of guesses to the place."""

    root: Tokens
    path: Tokens

    @property
    def position(self) -> int:
        return len(self.root) + len(self.path)


def by_root_and_path(places: Places) -> Hashable:
    return len(places.root), places.path


def by_root_and_depth(places: Places) -> Hashable:
    return len(places.root), len(places.path)


def by_position(places: Places) -> Hashable:
    return places.position


def everything(scene: Scene, nodes: Sequence[int]) -> int:
    return len(nodes)


def weights(distribution: Distribution) -> Weights:
    return {token: int(p * NOISE_LEVELS) for token, p in enumerate(distribution) if p}


def left_over(target: Distribution, draft: Distribution, weight: Fraction) -> Distribution:
    left = [max(weight * p - q, Fraction(0)) for p, q in zip(target, draft, strict=True)]
    return normalised(left if any(left) else target)


@dataclass(frozen=True)
class Rejection:
    """`residual`, from the real tree and a real rule, over a draft that guesses ahead in a stream.

    The draft samples `ahead` tokens below each root; surviving tokens are tested by a later step. `rows` says
    how many of the chain have rows; the guess after them is tested too if `beyond`.
    """

    rule: Callable[[Sequence[ChainToken], Sequence[Any]], ChainAcceptance] = rejection.accept_each
    guess_key: Callable[[Places], Hashable] = by_root_and_path
    coin_key: Callable[[Places], Hashable] = by_root_and_depth
    sampled: Callable[[Distribution], Distribution] = lambda distribution: distribution
    claimed: Callable[[Distribution], Weights] = weights
    replace: Callable[[Distribution, Distribution, Fraction], Distribution] = left_over
    rows: Callable[[Scene, Sequence[int]], int] = everything
    sent: Callable[[Distribution, int], bool] = lambda distribution, token: True
    beyond: bool = True
    ahead: int = 2

    def __call__(self, world: World, drafter: Drafter, chance: Chance) -> Tokens:
        tree, coins, output = TokenTree(0, 0, chain=True), {}, ()
        while len(output) < world.length:
            scene = Scene(world, tree, output, chance)
            self._guess(scene, coins)
            committed = self._step(scene, coins)
            tree.commit(committed)
            output = (*output, *committed)
        return output[: world.length]

    def _guess(self, scene: Scene, coins: dict[Hashable, Coin]) -> None:
        """The chain is made as deep as `ahead`; what is there already stays."""
        node = ROOT
        for _ in range(self.ahead):
            prefix = scene.prefix(node)
            if node == scene.tree.size and scene.wants(prefix):
                distribution = self.sampled(scene.world.draft(prefix))
                places = Places(scene.output, prefix[len(scene.output) :])
                token = coins.setdefault(("guess", self.guess_key(places)), Coin(scene.chance)).draw(distribution)
                if not self.sent(distribution, token):
                    return
                scene.tree.add(node, token, -0.1, self.claimed(scene.world.draft(prefix)))
            node = min(node + 1, scene.tree.size)

    def _step(self, scene: Scene, coins: dict[Hashable, Coin]) -> Tokens:
        nodes = list(scene.tree.nodes())
        rows = self.rows(scene, nodes)
        tested = nodes[: rows + self.beyond]
        before = [scene.prefix(node)[:-1] for node in tested]
        places = [Places(scene.output, prefix[len(scene.output) :]) for prefix in before]
        uniforms = [coins.setdefault(("accept", self.coin_key(each)), Coin(scene.chance)) for each in places]
        links = [self._link(scene, node, prefix) for node, prefix in zip(tested, before, strict=True)]
        result = self.rule(links, uniforms)
        accepted = tuple(link.token for link in links[: result.accepted])
        if result.accepted > rows:  # the last one had no row
            return accepted
        target = scene.world.target((*scene.output, *accepted))
        if result.accepted < len(tested):
            claimed = links[result.accepted].draft_probs
            draft = [claimed.get(token, Fraction(0)) for token in range(scene.world.vocabulary)]
            target = self.replace(target, draft, Fraction(result.weight))
        return (*accepted, scene.chance.choose(target))

    def _link(self, scene: Scene, node: int, prefix: Tokens) -> ChainToken:
        distribution, target = scene.tree.distributions[node], scene.world.target(prefix)
        return ChainToken(
            scene.tree.tokens[node],
            {token: Fraction(weight) / sum(distribution.values()) for token, weight in distribution.items()},
            {token: target[token] for token in distribution},
        )
