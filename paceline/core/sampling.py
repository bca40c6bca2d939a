"""From logits to the drawn token.

A token is ``argmax(warp(logits) / T + gumbel(seed, position, token))``, the Gumbel-max form of sampling from
``softmax(warp(logits) / T)``. The noise is a hash of request seed, absolute position and token id (`noise`). So the
draw at a position is a function of the logits there, the tokens before, and the parameters. The target draws with these
functions, and a draft predicts the draw with the same ones, noise included. On CPUs `draw_candidates.hpp` computes the
noise, too, to find the tokens that can win.

The steps for a row of logits, in vLLM's order:

1. masks: tokens the grammar forbids. Then, each unless that masks every token: tokens outside `allowed_token_ids`; a
   token that would complete a bad word, and stop tokens before `min_tokens`
2. `logit_bias`
3. `repetition_penalty` over prompt and output, then `frequency_penalty` and `presence_penalty` over output
4. temperature; 0 ends here, with the largest
5. `min_p`, then `top_k`, then `top_p`, each on the tokens left by the one before. Equal logits are kept or dropped
   together.
6. noise; the largest wins, among equals the lowest id

Steps 1 to 3 (`logits_rules`) see the row's own prefix: the committed tokens, and the draft tokens on the path to it.

By contract a row's result does not depend, to the bit, on the other rows of the call.

Shapes: R rows, V vocabulary, K kept candidates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.logits_rules import MASKED, SamplingRow, apply_logits_rules
from paceline.core.noise import gumbel, keyed_bits, mix, position_keys
from paceline.core.upload import upload

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
Candidates: TypeAlias = tuple[IntArray, npt.NDArray[np.uint32]]
FindCandidates: TypeAlias = Callable[[FloatArray, npt.NDArray[np.uint32], IntArray, float], Candidates | None]
"""A faster `_candidates`: it takes the same arguments and `ROUNDING_MARGIN`, and returns the same result, or None where
it cannot run."""
Filters: TypeAlias = tuple[float, int, float]
"""min_p, top_k and top_p."""

TOP_P_UNITS = 2**40
"""Probabilities are summed as multiples of 1 / this."""
TOP_P_CANDIDATES = (64, 512)
"""How many of the largest logits top-p tries before it sorts the vocabulary."""
VECTOR = 4
"""Float32 numbers in one vector load of a GPU."""
ROUNDING_MARGIN = 1.001
"""Factor on the largest noise integer that can win, to cover rounding."""
LOWEST_TEMPERATURE = 0.01
"""Lower temperatures except 0 are raised to this, as in vLLM: logits divided by less leave float32."""


def draw(logits_RV: Tensor, rows: Sequence[SamplingRow], find: FindCandidates | None = None) -> Tensor:
    """The drawn tokens, int64 [R]: the largest of `scores`. Logits of any float type are not modified.

    On CPUs noise is computed only for tokens that can still win, which `find` finds, or numpy. On a GPU nothing waits
    where all rows have a temperature of 0; else the draws are read, and the result is on the CPU.
    """
    noisy = [i for i, row in enumerate(rows) if not row.params.greedy]
    ruled = any(row.history.has_logits_rules for row in rows)
    if noisy and logits_RV.device.type != "cpu":
        return _draw_on_gpu(logits_RV, rows)
    logits_RV = apply_logits_rules(logits_RV, rows) if ruled else logits_RV.float()
    if logits_RV.device.type != "cpu":
        return logits_RV.argmax(-1)
    logits = logits_RV.numpy()
    largest_R = logits.argmax(-1)  # several times as fast as torch's
    if noisy:
        largest_R[noisy] = _draw_on_cpu(logits[noisy], [rows[i] for i in noisy], largest_R[noisy], find)
    return torch.from_numpy(largest_R)


def scores(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Steps 1 to 6 of the module's docstring, float32 [R, V]; the draw is the largest.

    A masked or filtered token has -inf. At T > 0 a row is relative to its largest logit, so that float32 is finest
    where the draw is decided; at T = 0 it holds the logits after step 3.
    """
    ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    return _scored(apply_logits_rules(logits_RV, rows), rows, ids_V)[0]


def top_scores(
    logits_RV: Tensor, rows: Sequence[SamplingRow], count: int, ids_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `count` tokens with the largest logits after step 3, int64 [R, K], and their scores, float32 [R, K], falling.

    For drafts, which only predict draws: noise for a whole vocabulary can cost more than a small model's pass. Filters
    see only these tokens. `ids_V`: the columns' token ids, each once; None: column n is token n.
    """
    logits_RK, tokens_RK = _top_logits(logits_RV, rows, count, ids_V)
    scores_RK, _ = _scored(logits_RK, rows, tokens_RK)
    if all(row.params.greedy for row in rows):
        return tokens_RK, scores_RK
    scores_RK, order_RK = scores_RK.sort(dim=-1, descending=True, stable=True)
    return tokens_RK.gather(-1, order_RK), scores_RK


def probabilities(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The distribution that `draw` samples, float32 [R, V]: steps 1 to 5, then a softmax. At T = 0 it is one-hot."""
    return _probabilities(apply_logits_rules(logits_RV, rows), rows)


def top_probabilities(
    logits_RV: Tensor, rows: Sequence[SamplingRow], count: int, ids_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `count` tokens with the largest logits after step 3, int64 [R, K], and their distribution.

    The distribution is float32 [R, K], normalised over these tokens, and 0 everywhere in rows where all are masked.
    Filters see only these tokens; `ids_V` as in `top_scores`.
    """
    logits_RK, tokens_RK = _top_logits(logits_RV, rows, count, ids_V)
    none_R1 = ~(logits_RK[:, :1] > MASKED)
    return tokens_RK, _probabilities(logits_RK, rows).masked_fill_(none_R1, 0.0)


def logit_sum(logits_RV: Tensor) -> Tensor:
    """For `is_finite`. Waits for no GPU."""
    return logits_RV.sum(dtype=torch.float32)


def is_finite(logits_RV: Tensor, total: Tensor | None = None) -> bool:
    """Whether no logit is NaN or +inf; -inf is allowed. `total`: their `logit_sum`, if it was computed before."""
    if float(logit_sum(logits_RV) if total is None else total) < math.inf:
        return True
    return not bool((logits_RV.isnan() | (logits_RV == math.inf)).any())  # large finite logits may sum to infinity


def log_softmax(logits_RV: Tensor) -> Tensor:
    """In float32. Rows are padded so that each is aligned: a GPU sums unaligned rows in another order."""
    vocabulary = logits_RV.shape[-1]
    padded = F.pad(logits_RV.float(), (0, -vocabulary % VECTOR), value=MASKED)
    return padded.log_softmax(-1)[:, :vocabulary]


def _scatter_to_vocabulary(logits_RV: Tensor, rows: Sequence[SamplingRow], ids_V: Tensor | None) -> Tensor:
    """Columns by token id, as the rules need them. Tokens without a column have -inf."""
    if ids_V is None:
        return logits_RV
    whole = logits_RV.new_full((len(logits_RV), rows[0].history.vocabulary_size), MASKED)
    return whole.index_copy_(1, ids_V, logits_RV)


def _top_logits(
    logits_RV: Tensor, rows: Sequence[SamplingRow], count: int, ids_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The `count` largest logits after step 3, falling, and their tokens, both [R, K]."""
    if any(row.history.has_logits_rules for row in rows):
        logits_RV, ids_V = apply_logits_rules(_scatter_to_vocabulary(logits_RV, rows, ids_V), rows), None
    logits_RK, tokens_RK = logits_RV.float().topk(min(count, logits_RV.shape[-1]))
    return logits_RK, tokens_RK if ids_V is None else ids_V[tokens_RK]


def _probabilities(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Steps 4 and 5 and a softmax. Overwrites `logits_RV`."""
    greedy = [i for i, row in enumerate(rows) if row.params.greedy]
    filters = _same_filters(rows)
    greedy_G, temperatures_R, *members = upload(logits_RV.device, greedy, _temperatures(rows), *filters.values())
    greedy_G = greedy_G.long()
    largest_G = logits_RV.index_select(0, greedy_G).argmax(-1)
    if len(greedy) < len(rows):
        _scale(logits_RV, temperatures_R)
        _filter(logits_RV, dict(zip(filters, members, strict=True)))
    logits_RV.index_fill_(0, greedy_G, MASKED)
    logits_RV.index_put_((greedy_G, largest_G), logits_RV.new_zeros(()))
    return logits_RV.softmax(-1)


def _scored(
    logits_RV: Tensor, rows: Sequence[SamplingRow], tokens: Tensor, candidates: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Steps 4 to 6, in place. `tokens`: the columns' token ids, [V] for all rows or [R, V]. The rest as `_filter`."""
    noisy = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not noisy:
        return logits_RV, []
    drawn = [rows[i] for i in noisy]
    filters = _same_filters(drawn)
    keys = position_keys([row.params.seed for row in drawn], [row.position for row in drawn])
    noisy_N, temperatures_N, first_N, second_N, *members = upload(
        logits_RV.device, noisy, _temperatures(drawn), *keys, *filters.values()
    )
    logits_NV, noisy_N = logits_RV, noisy_N.long()
    if len(noisy) < len(rows):
        logits_NV = logits_RV.index_select(0, noisy_N)
        tokens = tokens if tokens.dim() == 1 else tokens.index_select(0, noisy_N)
    _scale(logits_NV, temperatures_N)
    enough = _filter(logits_NV, dict(zip(filters, members, strict=True)), candidates)
    logits_NV.add_(gumbel(keyed_bits(tokens, first_N, second_N)))
    return logits_NV if len(noisy) == len(rows) else logits_RV.index_copy_(0, noisy_N, logits_NV), enough


def _draw_on_gpu(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The largest of `scores`, int64 [R] on the CPU, in one read, but for the rare rows whose top-p has more tokens
    than candidates: these show in the same read, and all is drawn again."""
    vocabulary = logits_RV.shape[-1]
    ids_V = torch.arange(vocabulary, device=logits_RV.device)
    tokens: list[int] = []
    for candidates in (TOP_P_CANDIDATES[-1], vocabulary):
        scores_RV, enough = _scored(apply_logits_rules(logits_RV, rows), rows, ids_V, candidates)
        found = torch.cat((scores_RV.argmax(-1), *(each.long().view(1) for each in enough))).tolist()
        tokens = found[: len(rows)]
        if all(found[len(rows) :]):
            break
    return torch.tensor(tokens)


def _draw_on_cpu(
    x_RV: FloatArray, rows: Sequence[SamplingRow], largest_R: IntArray, find: FindCandidates | None
) -> IntArray:
    """Steps 4 to 6 and the draw, int64 [R], for rows with a temperature above 0, on a CPU.

    Overwrites the logits `x_RV` and `largest_R`, their argmax. Typically two or three tokens of a row can win; their
    scores are computed as in `scores`.
    """
    with np.errstate(invalid="ignore"):  # whether all logits are finite is looked at after the draw
        x_RV -= x_RV[np.arange(len(rows)), largest_R][:, None]
    x_RV /= np.array(_temperatures(rows), dtype=np.float32)[:, None]
    _filter(torch.from_numpy(x_RV), {each: torch.tensor(members) for each, members in _same_filters(rows).items()})
    keys = position_keys([row.params.seed for row in rows], [row.position for row in rows])
    keys_R2 = np.ascontiguousarray(np.array(keys, dtype=np.uint32).T)
    found = find(x_RV, keys_R2, largest_R, ROUNDING_MARGIN) if find is not None else None
    rivals_N, bits_N = found or _candidates(x_RV, keys_R2, largest_R)
    if len(rivals_N) > len(rows):
        scores_N = x_RV.reshape(-1)[rivals_N] + gumbel(torch.from_numpy(bits_N.astype(np.int64))).numpy()
        rows_N, tokens_N = np.divmod(rivals_N, x_RV.shape[1])
        firsts = np.flatnonzero(np.diff(rows_N, prepend=-1))
        best_R = np.full(len(rows), MASKED, dtype=np.float32)
        best_R[rows_N[firsts]] = np.maximum.reduceat(scores_N, firsts)
        winners = np.flatnonzero(scores_N == best_R[rows_N])[::-1]  # among equals the lowest id is set last
        largest_R[rows_N[winners]] = tokens_N[winners]
    return largest_R


def _candidates(x_RV: FloatArray, keys_R2: npt.NDArray[np.uint32], largest_R: IntArray) -> Candidates:
    """Indices into the flat x_RV of all tokens that can win their row's draw, and their noise integers, both [N].

    Gumbel noise is -log E, so the largest of x - log E is the smallest of E / exp(x). The largest logit has x = 0, so
    another token wins only if its E <= exp(x) * E of that one. Since u <= E, its integer has to be below a limit.
    """
    tops_R = np.arange(len(x_RV)), largest_R
    bits_RV = mix(np.arange(x_RV.shape[1], dtype=np.uint32) ^ keys_R2[:, :1], keys_R2[:, 1:])
    exponentials_R = -np.log1p((bits_RV[tops_R] + 0.5) * -(2.0**-32))
    limits_RV = np.exp(x_RV)
    limits_RV *= (exponentials_R * (ROUNDING_MARGIN * 2.0**32)).astype(np.float32)[:, None]
    rivals_N = np.flatnonzero(bits_RV.astype(np.float32) <= limits_RV)
    return rivals_N, bits_RV.reshape(-1)[rivals_N]


def _scale(logits_RV: Tensor, temperatures_R: Tensor) -> None:
    """Step 4, in place: every row relative to its largest logit. Rows with T = 0 become meaningless."""
    logits_RV -= logits_RV.amax(-1, keepdim=True)
    logits_RV /= temperatures_R.float()[:, None]


def _temperatures(rows: Sequence[SamplingRow]) -> list[float]:
    return [max(row.params.temperature, LOWEST_TEMPERATURE) for row in rows]


def _same_filters(rows: Iterable[SamplingRow]) -> dict[Filters, list[int]]:
    """Indices of the rows with the same filters."""
    members: defaultdict[Filters, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.params.filtered:
            members[row.params.min_p, row.params.top_k, row.params.top_p].append(i)
    return members


def _filter(logits_RV: Tensor, filters: Mapping[Filters, Tensor], candidates: int | None = None) -> list[Tensor]:
    """Step 5, in place, for rows whose largest logit is 0. `filters`: the indices of the rows with each.

    `candidates`: top-p looks at so many of the largest logits, and nothing waits for a GPU. Returns for each top-p
    whether they were enough, bool []; if not, too few tokens are left.
    """
    enough: list[Tensor] = []
    for each, members in filters.items():
        if len(members) == len(logits_RV):
            enough += _filter_alike(logits_RV, each, candidates)
        else:
            rows = members.long()
            part = logits_RV.index_select(0, rows)
            enough += _filter_alike(part, each, candidates)
            logits_RV.index_copy_(0, rows, part)
    return enough


def _filter_alike(logits_RV: Tensor, filters: Filters, candidates: int | None) -> list[Tensor]:
    """`_filter` for rows that all have the same filters."""
    min_p, top_k, top_p = filters
    if min_p > 0:  # relative to the largest, whose logit is 0
        logits_RV.masked_fill_(logits_RV < math.log(min_p), MASKED)
    if 0 < top_k < logits_RV.shape[-1]:
        logits_RV.masked_fill_(logits_RV < logits_RV.topk(top_k).values[:, -1:], MASKED)
    if top_p == 1:
        return []
    threshold_R1, enough = _top_p_threshold(logits_RV, top_p, candidates)
    logits_RV.masked_fill_(logits_RV < threshold_R1, MASKED)
    return enough


def _top_p_threshold(logits_RV: Tensor, top_p: float, candidates: int | None) -> tuple[Tensor, list[Tensor]]:
    """The smallest logit that top-p keeps, [R, 1]: the tokens with larger logits have less than `top_p` in sum.

    Sorting a vocabulary is slow and most distributions are peaked, so a few of the largest logits are tried first.
    Their number does not change the result: the sums run from the largest down. The second result is `_filter`'s.
    """
    # Not logsumexp: it splits a single long row among threads, so the order of summation would depend on the other
    # rows. Sums of integers are the same in any order.
    vocabulary = logits_RV.shape[-1]
    largest_R1 = log_softmax(logits_RV).amax(-1, keepdim=True)
    needed = math.ceil(top_p * TOP_P_UNITS)
    for tried in (*TOP_P_CANDIDATES, vocabulary) if candidates is None else (candidates,):
        values_RK = logits_RV.topk(min(tried, vocabulary)).values
        mass_RK = (values_RK + largest_R1).exp().mul(TOP_P_UNITS).long().cumsum(-1)
        enough = [(mass_RK[:, -1] >= needed).all()] if tried < vocabulary else []
        if candidates is None and all(map(bool, enough)):
            break
    kept_R1 = (mass_RK < needed).sum(-1, keepdim=True).clamp(max=values_RK.shape[-1] - 1)
    return values_RK.gather(-1, kept_R1), enough
