"""A replica's placement group, in a process that its actor has started: vLLM places its ranks there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

import ray
from ray.util.placement_group import PlacementGroup

ADDRESS_VARIABLE = "RAY_ADDRESS"
GROUP_VARIABLE = "PACELINE_PLACEMENT_GROUP"


def placement_variables() -> Mapping[str, str]:
    """Environment variables for a process of this actor: the cluster's address, and the id of the placement group."""
    group = ray.util.get_current_placement_group()
    assert group is not None
    return {ADDRESS_VARIABLE: ray.get_runtime_context().gcs_address, GROUP_VARIABLE: group.id.hex()}


def join_placement_group() -> PlacementGroup | None:
    """Connect this process to the cluster, as a driver. Returns None if no actor of a replica has started it.

    Actors that it starts run in this process's Python, on all nodes. They end with this process or with the group.
    """
    if GROUP_VARIABLE not in os.environ:
        return None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address=os.environ[ADDRESS_VARIABLE], runtime_env={"py_executable": sys.executable})
    for number, handler in handlers.items():  # Ray replaced them
        signal.signal(number, handler)
    return PlacementGroup(ray.PlacementGroupID.from_hex(os.environ[GROUP_VARIABLE]))
