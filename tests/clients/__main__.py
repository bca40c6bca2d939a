"""`make clients`: the clients that people use, unchanged, against a stack that this command starts.

The stack serves the shipped model in float32, with two targets, a draft worker, and a chat template that has tools.
Each client is a file beside this one, and runs in the environment `.venv-clients`. The last line of output is one JSON
document with the number of calls, of those that passed, and the names of the others, by client. The exit code is 1 if a
call failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.deployment import LOOPBACK, DeploymentOptions, default_speculative_config, plan_deployment
from paceline.cli.options import start_errors
from paceline.config import EngineConfig
from paceline.launcher import die_with_parent
from paceline.model_names import resolve_model
from paceline_lab.bench.measured_stack import ready_stack
from tests.helpers.tool_models import TEMPLATE

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"
CLIENTS = {
    "openai": "openai_client.py",
    "openai-npm": "openai_client.cjs",
    "anthropic": "anthropic_client.py",
    "litellm": "litellm_client.py",
    "langchain-openai": "langchain_client.py",
    "instructor": "instructor_client.py",
    "lm-eval": "lm_eval_client.py",
    "agents": "agent_requests.py",
    "schemathesis": "served_document.py",
}
"""By name, the file with a client's calls: tests for pytest, or for node's own runner."""
PYTEST = (
    *("--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("--quiet", "--tb=short", "--disable-warnings"),
)
"""Without the project's own configuration: its plugins are not in the clients' environment."""


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What one client's calls came to. `failed`: the names of calls that did not pass."""

    calls: int
    failed: list[str]

    @property
    def good(self) -> bool:
        return self.calls > 0 and not self.failed


def main(
    clients: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(CLIENTS)}; all by default")] = None,
) -> None:
    """Call a stack of our own with other people's clients."""
    if unknown := set(clients or ()) - set(CLIENTS):
        raise typer.BadParameter(f"no client is called {unknown.pop()}: choose from {', '.join(CLIENTS)}")
    with tempfile.TemporaryDirectory() as folder, start_errors():
        results = asyncio.run(call_all(clients or list(CLIENTS), Path(folder)))
    good = all(result.good for result in results.values())
    rows = {
        name: {"calls": result.calls, "passed": result.calls - len(result.failed), "failed": result.failed}
        for name, result in results.items()
    }
    typer.echo(json.dumps({"good": good, "clients": rows}))
    raise typer.Exit(0 if good else 1)


async def call_all(clients: list[str], folder: Path) -> dict[str, ClientResult]:
    """Start a stack, and run one client after another. `folder` is for the model and the results."""
    options = DeploymentOptions(
        model=str(link_model(folder / "pydoc")),
        speculation=default_speculative_config("pydoc"),
        engine=EngineConfig(dtype="float32"),
        target_workers=2,
    )
    async with ready_stack(plan_deployment(options), Console(highlight=False)) as stack:
        environment = {
            **os.environ,
            "PACELINE_URL": stack.deployment.url,
            "PACELINE_MODEL": stack.deployment.model,
            "PYTHONPATH": str(HERE.parents[1]),
            "NODE_PATH": str(ENVIRONMENT / "node_modules"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": LOOPBACK,
        }
        return {name: await call(name, folder, environment) for name in clients}


def link_model(folder: Path) -> Path:
    """A folder of the shipped model whose chat template knows tools and reasoning."""
    folder.mkdir()
    for file in Path(resolve_model("pydoc")).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


async def call(client: str, folder: Path, environment: dict[str, str]) -> ClientResult:
    """Run the calls of one client. Its own report goes to the output."""
    typer.echo(f"{client}:")
    file, report = HERE / CLIENTS[client], folder / f"{client}.xml"
    reporters = ("--test-reporter=spec", "--test-reporter-destination=stdout", "--test-reporter=junit")
    node = (ENVIRONMENT / "bin" / "node", "--test", *reporters, f"--test-reporter-destination={report}")
    pytest = (ENVIRONMENT / "bin" / "python", "-m", "pytest", "-c", os.devnull, "--rootdir", HERE, *PYTEST)
    command = (*node, file) if file.suffix == ".cjs" else (*pytest, f"--junitxml={report}", file)
    process = await asyncio.create_subprocess_exec(*die_with_parent([str(each) for each in command]), env=environment)
    await process.wait()
    return read_report(report)


def read_report(file: Path) -> ClientResult:
    """What a JUnit file says. A client that ended before it wrote one has made no calls."""
    if not file.is_file():
        return ClientResult(0, [])
    cases = list(ElementTree.parse(file).iter("testcase"))
    bad = ("failure", "error", "skipped")
    return ClientResult(
        len(cases), [str(case.get("name")) for case in cases if any(case.find(kind) is not None for kind in bad)]
    )


if __name__ == "__main__":
    typer.run(main)
