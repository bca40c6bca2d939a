"""Probes: whether a row's result depends on the other rows of a pass, and the cost of a row."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from paceline.core.policy.step_cost import LearnedRowCost, RowCost
from paceline.model.model import Model
from paceline.model.rows import GROUP, TILE, Row, SlotTable

log = logging.getLogger(__name__)

PROBE_CONTEXT = 2 * TILE - 5
"""Committed positions of the probe: two tiles, the second one almost full."""
PROBED_TOKENS = 8
"""Tokens of the probe's path that are computed alone, and then together."""
PROBE_DEPTH = 8
"""Depth of the chains of guesses that `measure_row_cost` measures."""

FEW_ROWS = 8
"""Rows of the second quick pass."""
QUICK_ROWS = 64
"""Rows of the third quick pass, if there is time for so many."""
QUICK_SECONDS = 0.5
"""For all quick passes."""
SHORTEST_PASS_S = 1e-9
"""A clock may not see a shorter one."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 97, 128, 129, 192, 193, 256)
"""Rows of the passes that `measure_row_cost` measures. On a GPU a CUDA graph has 8, 16, 24, 32, 48, 64, 96, 128, 192 or
256 rows, and a pass is padded to the next of these: a step in the cost has a count on either side."""
PROBED_COUNTS = range(GROUP, ROW_COUNTS[-1] + 1, GROUP)
"""Rows of the passes that `differing_row_counts` compares on a GPU. Rows are padded to multiples of GROUP, so these are
all numbers of rows that a product can have, in layers and in the output matrix, up to the rows of a default pass."""


def is_row_invariant(model: Model, counts: Iterable[int] = ()) -> bool:
    """Whether a path has the same logits, bit for bit, token by token, as a branch of a tree, and in passes of `counts`
    rows. The log names the counts where it does not.

    Without `counts` this proves that a row sees its own path only, wherever its slots are, and that products over 8 and
    16 rows, and the output matrix over 8, sum alike. `PROBED_COUNTS` add all other numbers of rows: where a library
    chooses a kernel by the number of rows, any of them may sum in another order. Larger passes, other tokens and longer
    paths are not tried.
    """
    if differing := differing_row_counts(model, counts):
        log.warning("a row's result differs in passes of %s rows", ", ".join(map(str, differing)))
    return _is_tree_exact(model) and not differing


def differing_row_counts(model: Model, counts: Iterable[int]) -> list[int]:
    """Those of `counts` for which a row of a pass with so many rows, all of them wanted, has other logits than alone.

    A pass has as many copies of a chain of guesses as fit, so each of its rows is known: a kernel may treat the rows of
    one block otherwise than the rest. Counts for which the model has too few slots are left out.
    """
    slots, tokens, length = _probed_path(model)
    counts = [count for count in counts if count <= model.slots - len(tokens)]
    if not counts:
        return []
    table = _context(model, tokens[:length], slots, length)
    alone = torch.stack(_one_by_one(model, tokens[length:], table, slots))
    table = _context(model, tokens[:length], iter(table.slots[:length]), length)
    free = list(itertools.islice(slots, max(counts)))
    rows = [
        table.branch_row(tokens[length + i % PROBED_TOKENS], free[i - i % PROBED_TOKENS : i + 1])
        for i in range(max(counts))
    ]
    expected = alone.repeat(-(-max(counts) // PROBED_TOKENS), 1)
    return [n for n in counts if not torch.equal(model.run(rows[:n], range(n)).logits, expected[:n])]


def _is_tree_exact(model: Model) -> bool:
    """Slots are scattered, the path crosses a tile border, and every node on it has a sibling. The context is computed
    in one pass for the path alone, and in two for the tree."""
    slots, tokens, length = _probed_path(model)
    alone = _one_by_one(model, tokens[length:], _context(model, tokens[:length], slots, length), slots)
    table = _context(model, tokens[:length], slots, 1)
    rows: list[Row] = []
    wanted: list[int] = []
    branch: list[int] = []
    for token in tokens[length:]:
        rows.append(table.branch_row((token + 1) % model.vocabulary_size, [*branch, next(slots)]))
        branch.append(next(slots))
        wanted.append(len(rows))
        rows.append(table.branch_row(token, branch))
    together = model.run(rows, wanted).logits
    return all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def _probed_path(model: Model) -> tuple[Iterator[int], list[int], int]:
    """All slots, the last one first; the probe's tokens; how many of these are the context."""
    length = max(1, min(PROBE_CONTEXT, model.max_model_len - 16, model.slots // 4))
    tokens = [(7 * i + 3) % model.vocabulary_size for i in range(length + PROBED_TOKENS)]
    return iter(range(model.slots, 0, -1)), tokens, length


def _context(model: Model, tokens: Sequence[int], slots: Iterator[int], split: int) -> SlotTable:
    """Compute the tokens before `split` in one pass, and the others in another."""
    table = SlotTable(itertools.islice(slots, len(tokens)))
    rows = [table.row(token, i) for i, token in enumerate(tokens)]
    for part in filter(None, (rows[:split], rows[split:])):
        model.run(part, [])
    return table


def _one_by_one(model: Model, tokens: Sequence[int], table: SlotTable, slots: Iterator[int]) -> list[torch.Tensor]:
    logits = []
    for i, token in enumerate(tokens, len(table)):
        table.slots.append(next(slots))
        logits.append(model.run([table.row(token, i)], [0]).logits[0])
    return logits


class Output(Protocol):
    """A `ModelOutput`, or a head's."""

    @property
    def logits(self) -> torch.Tensor: ...


class Measurable(Protocol):
    """A `Model`, or a head's network with the same three members."""

    slots: int
    max_model_len: int

    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> Output: ...


def measure_row_cost(model: Measurable, most: int, repeats: int = 5, context: int = PROBE_CONTEXT) -> RowCost:
    """Measure seconds per pass for 1, 2, ... `most` rows: chains of guesses after `context` positions, if the model has
    as many.

    Where rows are padded to multiples of eight, the ninth row costs as much as the sixteenth.
    """
    context = _context_length(model, context)
    table = SlotTable(range(1, context + 1))
    for start in range(0, context, ROW_COUNTS[-1]):
        finish(model.run([table.row(0, i) for i in range(start, min(start + ROW_COUNTS[-1], context))], []).logits)
    counts = [n for n in ROW_COUNTS if n <= min(most, model.slots // 4)]
    guesses = _guesses(table, max(counts))
    # Round robin, and the fastest of each: other processes on this machine then hardly distort the curve. The longest
    # first: a long pass evicts the weights from the caches, and several short ones bring them back.
    rounds = [[_timed(model, guesses[:count]) for count in reversed(counts)] for _ in range(repeats)]
    return RowCost(counts, [min(times) for times in zip(*rounds, strict=True)][::-1])


def quick_row_cost(model: Measurable, most: int) -> LearnedRowCost:
    """A first estimate from at most three passes: a few rows, one row, and as many as the budget has time for.

    In the budget each further row is taken to cost what a row of the second pass did. No pass computes a context: rows
    attend to what the slots hold, or have none where layers keep states.
    """
    most = max(1, min(most, model.slots // 4))
    few = min(FEW_ROWS, most)
    context = 0 if getattr(model, "states", None) else _context_length(model, PROBE_CONTEXT)
    table = SlotTable(range(1, context + 1))
    points = {count: _timed(model, _guesses(table, count)) for count in sorted({1, few}, reverse=True)}
    left = QUICK_SECONDS - sum(points.values())
    counts = [n for n in ROW_COUNTS if few < n <= min(most, QUICK_ROWS)]
    if affordable := [n for n in counts if n <= 2 * few or points[few] * n / few <= left]:
        points[affordable[-1]] = _timed(model, _guesses(table, affordable[-1]))
    return LearnedRowCost({count: max(seconds, SHORTEST_PASS_S) for count, seconds in points.items()})


def _guesses(table: SlotTable, count: int) -> list[Row]:
    """Chains of guesses, `PROBE_DEPTH` deep, after a table of the slots from 1 on."""
    context = len(table)
    return [table.branch_row(0, range(context + 1 + i - i % PROBE_DEPTH, context + 2 + i)) for i in range(count)]


def _context_length(model: Measurable, longest: int) -> int:
    return min(longest, model.max_model_len // 2, model.slots // 4)


def _timed(model: Measurable, rows: Sequence[Row]) -> float:
    start = time.perf_counter()
    finish(model.run(rows, range(len(rows))).logits)
    return time.perf_counter() - start


def finish(logits: torch.Tensor) -> None:
    """Wait for the pass that computes them: an accelerator runs asynchronously."""
    if not logits.is_cpu:
        torch.accelerator.synchronize(logits.device)
