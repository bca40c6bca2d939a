"""On a GPU a draw with its rules is queued behind the pass: nothing in it waits, and only the drawn tokens are read.

In place of the GPU is torch's `meta` device, whose tensors have no numbers: reading one raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paceline.config import SamplingParams
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import draw

VOCABULARY = 64
GPU = torch.device("meta")


class Waits(TorchFunctionMode):
    """Notes calls that wait for a GPU: copies to it that may not be queued, and lists as indices, which are such."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == GPU
        copies |= func is torch.Tensor.to and args[0].device != GPU == args[1] and not kwargs.get("non_blocking")
        indices = args[1] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else ()
        if copies or any(
            isinstance(each, list) for each in (indices, *(indices if isinstance(indices, tuple) else ()))
        ):
            self.seen.append(func.__name__)
        return func(*args, **kwargs)


@pytest.fixture
def waits() -> Iterator[Waits]:
    with Waits() as mode:
        yield mode


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7},
    "min_p, top_k": {"temperature": 0.7, "min_p": 0.1, "top_k": 5},
    "bias": {"logit_bias": {3: 1.5}},
    "allowed": {"allowed_token_ids": [3, 4, 5]},
    "bad words": {"bad_words": [(3,)]},
    "stop tokens": {"min_tokens": 9, "stop_token_ids": [5]},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "beside greedy rows"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_draw_waits_for_nothing(name: str, mixed: bool, waits: Waits) -> None:
    settings = {"temperature": 0.7, "seed": 3} | SETTINGS[name]
    rows = [_row(settings, position) for position in (9, 10)]
    if mixed:
        rows.append(_row({"temperature": 0.0}, 9))
    logits_RV = torch.empty(len(rows), VOCABULARY, device=GPU)
    waits.seen.clear()
    drawn = draw(logits_RV, rows)
    assert drawn.device == GPU
    assert waits.seen == []


def _row(settings: dict[str, Any], position: int) -> SamplingRow:
    params = SamplingParams.model_validate(settings)
    return SamplingRow(params, position, History(params, [1, 2, 3], [4, 5], VOCABULARY), (7,) * (position - 9))
