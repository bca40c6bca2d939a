"""`paceline plan`: sizes a pool from a few figures, by simulation (`paceline_lab.simulation.capacity_plan`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline_lab.simulation.capacity_plan import CapacityPlan, PlannedDemand, plan_capacity
from paceline_lab.simulation.pair_simulation import SimulatedPair


def run(console: Console, pair: SimulatedPair, demand: PlannedDemand) -> dict[str, Any]:
    """Plan and show; return the JSON document. Raises `CannotPlanError`."""
    with console.status("simulating"):
        planned = plan_capacity(pair, demand)
    _show(console, planned)
    return dataclasses.asdict(planned) | {
        "loads": [
            {**dataclasses.asdict(load), "token_ms": round(load.token_ms, 2), "link_mbit_s": round(load.link_mbit_s, 2)}
            for load in planned.loads
        ]
    }


def _show(console: Console, planned: CapacityPlan) -> None:
    console.print("By formula, for one request and a chain of draft tokens with one acceptance rate:")
    table = Table("draft tokens", "accepted, expected", "speed-up in lock-step", "if drafting is hidden")
    for each in planned.formulas:
        table.add_row(str(each.guesses), f"{each.accepted:.2f}", f"{each.lockstep:.2f}", f"{each.hidden:.2f}")
    console.print(table)
    console.print("Simulated, with trees that grow while the target computes; Mbit/s between a target and its draft:")
    table = Table(
        "requests per target", "plain tokens/s", "streamed tokens/s", "streamed / plain", "ms per token", "Mbit/s"
    )
    for load in planned.loads:
        table.add_row(
            str(load.requests),
            f"{load.plain:.0f}",
            f"{load.streamed:.0f}",
            f"{load.streamed / load.plain:.2f}",
            f"{load.token_ms:.1f}",
            f"{load.link_mbit_s:.1f}",
        )
    console.print(table)
    pays = f"up to {planned.pays_up_to} requests per target" if planned.pays_up_to else "at no load"
    console.print(f"speculation pays {pays}")
    console.print(
        f"{planned.target_workers} target workers, {planned.draft_workers} draft workers: "
        f"{planned.at_once:.1f} requests at once on each target, a token every {planned.token_ms:.1f} ms"
    )
