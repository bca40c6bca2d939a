"""An engine for `paceline_lab.peers.peer_process` that counts on: the new tokens follow the last one of the prompt."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from paceline_lab.peers.peer_worker import LoadedEngine, Setup, Tokens, serve


def load(setup: Setup) -> LoadedEngine:
    if "broken" in setup:
        raise ValueError("nothing to load")
    figures = {"loads": 1.0}
    if "child" in setup:
        figures["child"] = subprocess.Popen(["sleep", "60"]).pid

    def plain(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
        return [list(range(prompt[-1] + 1, prompt[-1] + 1 + count)) for prompt in prompts]

    def refusing(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
        raise ValueError("it takes 1 at once")

    def dying(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
        os._exit(1)

    def slow(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
        time.sleep(0.2)
        return plain(prompts, temperature, seed, count)

    return LoadedEngine({"plain": plain, "refusing": refusing, "dying": dying, "slow": slow}, lambda: figures)


if __name__ == "__main__":
    serve(load, sys.stdin, sys.stdout)
