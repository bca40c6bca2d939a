"""Growth by whole drafts: one graph on a device runs every level below a root, and the host reads its nodes once.

A request is drafted for as soon as all its tokens are known but the last few, whose rows are the graph's first level.
Prompts, and requests whose draws have rules or whose draft tokens are sampled, grow best first (`BestFirst`).

A draft takes longer the deeper it is, and each level is accepted less often. So its depth is that of the most tokens
per second, of the time of the graphs and of the time between two drafts, both as measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.noise import position_key
from paceline.core.tree import ROOT
from paceline.drafting.best_first import BestFirst, BestFirstRequest
from paceline.drafting.draft_graph import DraftGraph, DraftShape, Draws
from paceline.drafting.draw_prediction import MAX_ROWS, draw_params
from paceline.drafting.network_speculator import DraftCache, WayToGrow, round_robin, tree_width
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.gpu.paged_pass import fitting
from paceline.model.rows import GROUP

log = logging.getLogger(__name__)

ROWS = (8, 16, 64, 256)
"""Rows of the first level, of graphs."""
REQUESTS = (1, 8, 32, 64)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12)
WIDTH = 8
"""Most nodes of a request that a level expands."""
MOST_GRAPHS = 32
"""Graphs that are kept: each holds memory of the driver."""
LEARNING_RATE = 0.1
"""Weight of one draft in the averages."""
MOST_PAUSE = 3.0
"""The time between two drafts counts as at most so many times the usual: else a pause without requests would count."""
_32_BITS = 0xFFFF_FFFF


class DepthChoice:
    """How deep to draft for the most tokens per second.

    A step commits one token, and those of each level with some probability. `expected`: tokens of each level, by the
    draft's own probabilities. A level that was not drafted lately keeps what is known of it; one that never was counts
    like the one above it.
    """

    def __init__(self) -> None:
        self._expected: list[float] = []
        self._seconds: dict[DraftShape, float] = {}
        self._other_s = 0.0

    def choose(self, rows: int, requests: int, deepest: int) -> int:
        """A depth of `DEPTHS`, at most the first that is as deep as `deepest`. That one is chosen before any graph for
        as many requests has run."""
        last = next((depth for depth in DEPTHS if depth >= deepest), DEPTHS[-1])
        if not any(shape.requests == requests for shape in self._seconds):
            return last
        depths = (depth for depth in DEPTHS if depth <= last)
        return max(depths, key=lambda depth: self._rate(DraftShape(rows, requests, depth)))

    def observe(self, shape: DraftShape, seconds: float, other_s: float, expected: Sequence[float]) -> None:
        """A draft took `seconds`, the time since the one before it `other_s`; a request has `expected` tokens of each
        level on average."""
        self._seconds[shape] = _averaged(self._seconds.get(shape), seconds)
        usual_s = self._other_s or other_s
        self._other_s = _averaged(usual_s, min(other_s, MOST_PAUSE * usual_s))
        for level, tokens in enumerate(expected):
            if level == len(self._expected):
                self._expected.append(tokens)
            self._expected[level] = _averaged(self._expected[level], tokens)

    def _rate(self, shape: DraftShape) -> float:
        known = self._expected[: shape.depth]
        tokens = 1.0 + sum(known) + (shape.depth - len(known)) * known[-1]
        return tokens / (self._other_s + self._seconds_of(shape))

    def _seconds_of(self, shape: DraftShape) -> float:
        """A graph that never ran takes as long per level as the one most like it."""
        alike = (each for each in self._seconds if each.requests == shape.requests)
        nearest = min(alike, key=lambda each: (abs(each.depth - shape.depth), abs(each.rows - shape.rows)))
        return self._seconds[nearest] * shape.depth / nearest.depth


def _averaged(average: float | None, new: float) -> float:
    return new if average is None else average + LEARNING_RATE * (new - average)


class GraphedDrafts:
    """Drafts by graphs where it can, best first where it cannot."""

    request_type = BestFirstRequest

    def __init__(
        self,
        best_first: BestFirst,
        passes: DevicePasses,
        draws: Draws,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`passes`: of the network of `best_first`, a `GraphedNetwork`. Nothing takes back a committed token."""
        self._best_first, self._passes, self._draws = best_first, passes, draws
        self.network, self.limits = best_first.network, best_first.limits
        self.computed = False
        self._children = tree_width(self.network, self.limits)
        self._graphs: dict[DraftShape, tuple[DraftGraph, Callable[[], None]]] = {}
        """At most `MOST_GRAPHS`, in the order of their last use."""
        self._depths = DepthChoice()
        self._clock = clock
        self._ended: float | None = None
        self._fails = False
        """Whether graphs cannot be made here."""

    def grow(self, pool: DraftCache[BestFirstRequest]) -> Mapping[int, list[int]]:
        """Whole drafts for all requests that are due, then one round of `BestFirst` for the others."""
        new: dict[int, list[int]] = {}
        while requests := self._due(pool):
            new |= self._draft(requests, pool)
        others = self._best_first.grow(pool)
        self.computed = self._best_first.computed
        return {**new, **others}

    def _due(self, pool: DraftCache[BestFirstRequest]) -> list[BestFirstRequest]:
        """The next requests to draft for, as many as a graph and the free slots are for. Links have turns."""
        if self._fails:
            return []
        turns = round_robin(iter([each for each in requests if _is_due(each)]) for requests in pool.by_link())
        due: list[BestFirstRequest] = []
        rows = slots = 0
        for request in turns:
            more_rows, more_slots = request.missing, _levels_below(request) * WIDTH
            if len(due) < REQUESTS[-1] and rows + more_rows <= ROWS[-1] and slots + more_slots <= len(pool.free):
                due.append(request)
                rows, slots = rows + more_rows, slots + more_slots
        pool.turns += len(due)
        return due

    def _draft(self, requests: Sequence[BestFirstRequest], pool: DraftCache[BestFirstRequest]) -> dict[int, list[int]]:
        start = self._clock()
        rows = _at_least(ROWS, sum(request.missing for request in requests))
        count = _at_least(REQUESTS, len(requests))
        deepest = max(request.depth_limit for request in requests)
        shape = DraftShape(rows, count, self._depths.choose(rows, count, deepest))
        known = shape in self._graphs
        if known:
            self._graphs[shape] = self._graphs.pop(shape)  # now the last one
        else:
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]  # its last run is over: `download` waits
            try:
                self._graphs[shape] = self._captured(shape)
            except Exception as error:  # noqa: BLE001 - Triton and CUDA raise errors of many kinds
                log.warning("drafts are made level by level, and not as one graph: %s", error)
                self._fails = True
                return {}
        graph, replay = self._graphs[shape]
        self._load(graph, requests, reversed(pool.free))
        replay()
        graph.outputs.download()
        paths = _path_log_probs(graph)[:, : len(requests)]
        for n, request in enumerate(requests):
            paths[request.depth_limit :, n] = -np.inf
        new = {
            request.opening.request_id: self._add_nodes(request, graph, paths[:, n], n)
            for n, request in enumerate(requests)
        }
        end = self._clock()
        if known and self._ended is not None:
            expected = np.exp(paths).sum(-1).mean(-1)
            self._depths.observe(shape, end - start, start - self._ended, expected.tolist())
        self._ended = end
        return new

    def _captured(self, shape: DraftShape) -> tuple[DraftGraph, Callable[[], None]]:
        """Captured over padding rows: if that fails, no request has changed."""
        graph = self._graph(shape)
        self._load_padding(graph.inputs.host)
        graph.inputs.upload()
        replay, _ = self._passes.capture(graph.run)
        return graph, replay

    def _graph(self, shape: DraftShape) -> DraftGraph:
        width = min(WIDTH, MAX_ROWS // shape.requests) if self._children > 1 else max(1, GROUP // shape.requests)
        network: Any = self.network
        layers = self.network.description.hidden_state_layers
        states = None
        if layers:
            cache = self._passes.cache
            states = torch.zeros(
                shape.rows, len(layers), self.network.state_size, dtype=cache.dtype, device=cache.device
            )
        return DraftGraph(network, self._passes, self._draws, shape, width, self._children, states)

    def _load(self, graph: DraftGraph, requests: Sequence[BestFirstRequest], free: Iterator[int]) -> None:
        """Fill the graph's inputs. The missing tokens count as computed from now on. `free`: slots for the nodes, which
        stay free."""
        host, width = graph.inputs.host, graph.width
        self._load_padding(host)
        tables, writes = self._passes.tables.assign(request.slot_table for request in requests)
        host["writes"][:] = fitting(writes, graph.shape.rows, self._passes.tables, self._passes.kernels)
        rows, states = 0, []
        levels = np.arange(1, graph.shape.depth)[:, None]
        groups = [0]
        for n, request in enumerate(requests):
            table = tables[request.slot_table]
            length, span = len(request.tokens), range(request.computed, len(request.tokens))
            these, nodes = slice(rows, rows + len(span)), slice(n * width, (n + 1) * width)
            host["tokens"][these] = request.tokens[span.start :]
            host["positions"][these] = span
            host["slots"][these] = request.slot_table.slots[span.start :]
            host["table"][these], host["committed"][these] = table, length
            host["seen"][these] = range(span.start + 1, length + 1)
            states += request.take_states(len(span))
            request.computed = length
            groups += [*range(rows + GROUP, these.stop, GROUP), these.stop]
            rows = these.stop
            host["roots"][nodes] = rows - 1
            host["level_table"][nodes], host["level_committed"][nodes] = table, length
            deep = levels[: _levels_below(request)]  # no row is beyond the last position
            slots = np.fromiter(free, np.int64, deep.size * width)
            host["level_slots"][: len(deep), nodes] = slots.reshape(-1, width)
            host["level_positions"][: len(deep), nodes] = length - 1 + deep
            host["level_seen"][: len(deep), nodes] = length + deep
            host["keys"][:, nodes] = _keys(request, graph.shape.depth)[:, None]
        groups += range(rows + GROUP, graph.shape.rows, GROUP)
        groups += [graph.shape.rows] * (graph.shape.rows + 1 - len(groups))
        host["groups"][:] = groups
        params = draw_params([request.history.params for request in requests])
        host["params"][:, : len(requests) * width] = np.repeat(params, width, 1)
        graph.inputs.upload()
        if graph.states is not None:
            graph.states[:rows].copy_(torch.stack(states))

    def _load_padding(self, host: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Padding rows alone, which see nothing."""
        padding, tables = self._passes.cache.padding_slot, self._passes.tables
        for name, values in host.items():
            values.fill(padding if name in ("slots", "level_slots") else 0)
        rows = len(host["tokens"])
        host["groups"].fill(rows)
        host["groups"][: rows // GROUP] = range(0, rows, GROUP)
        host["writes"][:] = tables.padded(host["writes"][:0], rows)
        host["table"].fill(tables.count)
        host["level_table"].fill(tables.count)
        host["params"][0] = 1.0

    def _add_nodes(
        self, request: BestFirstRequest, graph: DraftGraph, paths: npt.NDArray[np.float32], n: int
    ) -> list[int]:
        """The likeliest nodes of request `n` that its tree does not have, within its limits. Nodes that a commit has
        left in the tree stay. `paths`: path log-probabilities of its nodes, [D, W * K]."""
        levels, children = np.nonzero(paths > request.least_path_log_prob)
        order = np.argsort(-paths[levels, children], kind="stable")
        tokens, log_probs = (graph.outputs.host[name][:, n].reshape(paths.shape) for name in ("tokens", "log_probs"))
        chosen = graph.outputs.host["chosen"][:, n]
        tree, left = request.tree, request.nodes_left
        nodes: dict[tuple[int, int], int] = {}
        new: list[int] = []
        for level, child in zip(levels[order].tolist(), children[order].tolist(), strict=True):
            expanded = child // self._children
            parent = nodes.get((level - 1, int(chosen[level - 1, expanded]))) if level else ROOT
            if parent is None:
                continue
            token = int(tokens[level, child])
            node = tree.child(parent, token)
            if node is None:
                if len(new) == left:
                    continue
                node = tree.add(parent, token, float(log_probs[level, child]))
                new.append(node)
            nodes[level, child] = node
        request.frontier = []
        return new


def fastest_way(best_first: BestFirst) -> WayToGrow[BestFirstRequest]:
    """Whole drafts by graphs where the network's device has them. Nothing may take back a committed token then."""
    network: Any = best_first.network
    passes: DevicePasses | None = getattr(network, "device_passes", None)
    if passes is None:
        return best_first
    return GraphedDrafts(best_first, passes, draw_kernels())


def draw_kernels() -> Draws:
    """Imported where there is a GPU: torch's builds for a CPU come without Triton."""
    from paceline.drafting import draw_kernels as kernels

    return kernels


def _is_due(request: BestFirstRequest) -> bool:
    """Whether children of its root are wanted, and everything is there that they take."""
    predicted = not request.sampled and not request.history.has_logits_rules
    wanted = request.opening.max_nodes and request.nodes_left and request.wanted == request.missing
    return bool(predicted and wanted and 0 < request.missing == request.computable <= ROWS[-1])


def _levels_below(request: BestFirstRequest) -> int:
    """How many levels of its nodes are expanded, at most."""
    return min(request.depth_limit, DEPTHS[-1]) - 1


def _at_least(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


def _keys(request: BestFirstRequest, depth: int) -> npt.NDArray[np.int64]:
    """Of the draws after the nodes of each depth, [D, 2]."""
    first = request.tree.position + 1
    keys = (position_key(request.history.params.seed, first + level) for level in range(depth))
    return np.array([(key >> 32, key & _32_BITS) for key in keys], dtype=np.int64)


def _path_log_probs(graph: DraftGraph) -> npt.NDArray[np.float32]:
    """Of all nodes, float32 [D, N, W * K]."""
    log_probs, chosen = graph.outputs.host["log_probs"], graph.outputs.host["chosen"]
    depth, requests, width, _ = log_probs.shape
    above = np.full((requests, width), -np.inf, dtype=np.float32)
    above[:, 0] = 0.0
    levels: list[npt.NDArray[np.float32]] = []
    for level in range(depth):
        paths = (above[..., None] + log_probs[level]).reshape(requests, -1)
        levels.append(paths)
        above = np.take_along_axis(paths, chosen[level], 1)
    return np.stack(levels)
