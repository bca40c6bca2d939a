"""`make combinations`: random combinations of up to six rules, each answered with speculation and without.

One real stack (`paceline serve`: gateway, target, draft worker, Redis) serves the shipped model, with markers of
reasoning and tool calls in its vocabulary. First comes every rule alone, in every way in which it exists, then random
combinations until enough were answered. Both answers must be equal to the bit: tokens, log-probabilities (also of the
prompt), text, usage, finish and stop reason, calls and reasoning. A request that is refused must be refused twice, for
the same reason. The last line is JSON. The exit code is 1 if any two answers differ, or a rule alone is only refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.combinations.api_answers import Answer, ApiClient, api_client, as_grpc
from tests.combinations.request_rules import RULES, Combination, at_random, each_alone
from tests.helpers.served import serving
from tests.helpers.tool_models import save_tool_weights

AT_ONCE = 4
"""Combinations under way: requests with and without speculation share steps."""


@dataclass
class Comparison:
    """What came of the combinations so far."""

    counts: Counter[str] = field(default_factory=Counter)
    answered_alone: set[str] = field(default_factory=set)
    """Rules that were answered without others."""
    differences: list[str] = field(default_factory=list)

    def add(self, sent: Combination, way: str, on: Answer, off: Answer) -> None:
        if on != off:
            self.differences.append(
                f"{way}: {', '.join(sent.rules)}\n{json.dumps(sent.body)}\n  on:  {on}\n  off: {off}"
            )
        if on.refused:
            self.counts["refused"] += 1
            return
        if len(sent.rules) == 1:
            self.answered_alone.update(sent.rules)
        self.counts["combinations"] += 1
        self.counts[way] += 1
        self.counts["streamed"] += way == "grpc" or bool(sent.body.get("stream"))


async def compare(client: ApiClient, sent: Combination, draw: Random, found: Comparison) -> None:
    """Send one combination with speculation and without, over gRPC if it can be and the draw says so."""
    requests = [sent, sent.with_body(speculative=False)]
    encoded = [each for each in map(as_grpc, requests) if each is not None]
    if len(encoded) == 2 and draw.random() < 0.8:
        on, off = await asyncio.gather(*map(client.over_grpc, encoded))
        found.add(sent, "grpc", on, off)
    else:
        on, off = await asyncio.gather(*map(client.over_http, requests))
        found.add(sent, "http", on, off)


async def compare_all(client: ApiClient, count: int, seed: int, *, alone: bool) -> Comparison:
    """Compare until `count` combinations were answered. `alone`: every rule by itself first."""
    found, draw = Comparison(), Random(seed)
    endless = iter(lambda: at_random(draw), None)
    combinations = chain(each_alone(draw) if alone else (), endless)

    async def work() -> None:
        while found.counts["combinations"] < count:
            await compare(client, next(combinations), draw, found)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return found


@contextmanager
def served_model() -> Iterator[tuple[str, str]]:
    """The stack's HTTP URL and gRPC address. Drafts guess whatever it costs, so that much is accepted."""
    with TemporaryDirectory() as folder:
        target, draft = (Path(folder, name) for name in ("pydoc", "pydoc-draft"))
        for each in (target, draft):
            each.mkdir()
            save_tool_weights(each, each.name)
        speculation = {
            "method": ["ngram", "draft_model"],
            "model": str(draft),
            "num_speculative_tokens": 6,
            "prompt_lookup_min": 1,
            "row_budget": False,
        }
        with serving(str(target), "--port", "0", "--speculative-config", json.dumps(speculation)) as served:
            grpc_address = served.wait_for(r"grpc=(\S+)")[1]
            yield served.wait_for(r"Serving pydoc at (\S+)/v1")[1], grpc_address


async def _run(count: int, seed: int) -> tuple[Comparison, int]:
    with served_model() as (url, address):
        async with api_client(url, address) as client:
            return await compare_all(client, count, seed, alone=True), client.accepted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="combinations to be answered (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found, accepted = asyncio.run(_run(options.count, options.seed))
    print(*found.differences, sep="\n\n")
    never = sorted(RULES.keys() - found.answered_alone)
    if never:
        print(f"never answered alone: {', '.join(never)}")
    counts = {name: found.counts[name] for name in ("combinations", "http", "grpc", "streamed", "refused")}
    print(json.dumps(counts | {"accepted_tokens": accepted, "different": len(found.differences)}))
    return int(bool(found.differences or never))


if __name__ == "__main__":
    sys.exit(main())
