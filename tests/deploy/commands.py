"""Command lines of rendered containers, parsed by the services' own parsers."""

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
"""Variables that Kubernetes fills in."""

Parse = Callable[[Sequence[str]], argparse.Namespace]

SERVICES: dict[str, Parse] = {"gateway": gateway.parse, "target": target.parse_options, "draft": draft.parse_options}


def options(container: Document) -> argparse.Namespace:
    """The options of the service in this container. Raises `SystemExit` for an invalid command line."""
    name, *arguments = command_line(container, POD)
    with patch.dict(os.environ, environment(container, POD)):
        if name == "sh":
            return ray_replicas.parse_pool_options(command_of_shell(arguments))[0]
        return SERVICES[name](arguments)


def shown(container: Document) -> Sequence[str]:
    """The command line, visible to every process on the node."""
    return command_line(container, POD)


def command_of_shell(arguments: Sequence[str]) -> Sequence[str]:
    """A Ray head's shell starts Ray, and then becomes `paceline target` with the arguments that follow."""
    flags, script, name, *rest = arguments
    assert (flags, name) == ("-ec", "paceline")
    assert script.endswith('exec paceline target "$@"\n')
    return rest


def parsed(pod: Document) -> int:
    """Parse the command lines of a pod's services; returns their number."""
    ours = [container for container in pod["containers"] if container["name"] in (*SERVICES, "ray-head")]
    for container in ours:
        options(container)
    return len(ours)
