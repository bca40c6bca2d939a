"""Command lines of rendered containers, read by the services' own parsers: what these refuse cannot be deployed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from unittest.mock import patch

import paceline_services.draft.__main__ as draft
import paceline_services.gateway.__main__ as gateway
import paceline_services.target.__main__ as target
from paceline_services.target import ray_replicas
from tests.deploy.helm import Document
from tests.deploy.pods import command_line, environment

POD = {
    "POD_NAME": "demo-0",
    "POD_IP": "10.1.2.3",
    "PACELINE_REDIS_URL": "rediss://:secret@redis.example:6380/0",
    "REDIS_PASSWORD": "secret",
}
"""What Kubernetes would fill in."""

Parse = Callable[[Sequence[str]], argparse.Namespace]

SERVICES: dict[str, Parse] = {"gateway": gateway.parse, "target": target.parse_options, "draft": draft.parse_options}


def options(container: Document) -> argparse.Namespace:
    """What the service in this container would understand. Raises `SystemExit` for what it refuses."""
    name, *arguments = command_line(container, POD)
    with patch.dict(os.environ, environment(container, POD)):
        if name == "sh":
            return ray_replicas.parse_pool_options(command_of_shell(arguments))[0]
        return SERVICES[name](arguments)


def shown(container: Document) -> Sequence[str]:
    """What everybody on the node can read of its process."""
    return command_line(container, POD)


def command_of_shell(arguments: Sequence[str]) -> Sequence[str]:
    """A Ray head's shell starts Ray, and then becomes `paceline target` with the arguments that follow."""
    flags, script, name, *rest = arguments
    assert (flags, name) == ("-ec", "paceline")
    assert script.endswith('exec paceline target "$@"\n')
    return rest


def parsed(pod: Document) -> int:
    """Parses those of a pod that are services'; how many."""
    ours = [container for container in pod["containers"] if container["name"] in (*SERVICES, "ray-head")]
    for container in ours:
        options(container)
    return len(ours)
