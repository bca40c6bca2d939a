"""The pages: their files and headers, the operator's report, and demo mode. Over real sockets."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from paceline import __version__
from paceline.api_keys import ApiKey, KeyFile, digest, new_key, write
from paceline.cli.local_stack import open_draft_killer
from paceline.cli.supervised_process import Program
from paceline.cli.supervisor import Supervisor
from paceline.state import AcceptanceCounts, WorkerRecord
from paceline_services.gateway.pages.static_files import FOLDER, HEADERS, page_paths
from tests.helpers.openai_stack import TOKENIZER, Stack, counts, open_stack
from tests.helpers.waiting import eventually, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HTML = ("/", "/operator")
SCRIPTS = sorted(path for path in page_paths() if path.endswith(".js"))
STYLES = sorted(path for path in page_paths() if path.endswith(".css"))
HTML_SINKS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|srcdoc|DOMParser")
FOREIGN = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")
SLEEP = (sys.executable, "-S", "-c", "import signal; print('up', flush=True); signal.pause()")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with open_stack(counts, counts) as stack:
        yield stack


@pytest.mark.parametrize("path", sorted(page_paths()))
async def test_every_file_has_the_headers_that_keep_other_code_out(stack: Stack, path: str) -> None:
    answer = await stack.http.get(path)
    assert answer.status_code == 200
    assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS)
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    kind = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}
    assert answer.headers["content-type"].startswith(kind.get(Path(path).suffix, "text/html"))


@pytest.mark.parametrize("path", HTML)
async def test_a_page_loads_its_own_files_alone(stack: Stack, path: str) -> None:
    """No inline script or style, no handler in an attribute; each file that it names is there."""
    page = ElementsOf((await stack.http.get(path)).text)
    assert page.texts["script"] == page.texts["style"] == ""
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
        loaded = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
        if loaded is not None:
            assert loaded in page_paths()
    assert {attributes["src"] for tag, attributes in page.elements if tag == "script"} <= set(SCRIPTS)


@pytest.mark.parametrize("path", HTML)
async def test_every_control_of_a_page_has_a_name(stack: Stack, path: str) -> None:
    page = ElementsOf((await stack.http.get(path)).text)
    labelled = {attributes["for"] for tag, attributes in page.elements if tag == "label" and "for" in attributes}
    for tag, attributes in page.elements:
        if tag in ("input", "select", "textarea") and attributes.get("type") not in ("radio", "checkbox"):
            assert attributes["id"] in labelled, attributes
        if attributes.get("role") == "region":
            assert {"aria-label", "aria-labelledby"} & attributes.keys(), attributes


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES])
async def test_code_of_the_pages_makes_no_html_and_names_no_other_site(stack: Stack, path: str) -> None:
    text = (await stack.http.get(path)).text
    assert not HTML_SINKS.search(text)
    assert [found for found in FOREIGN.findall(text) if found != "http://www.w3.org"] == []
    for imported in re.findall(r'from "\./(\S+)"', text):
        assert f"/pages/{imported}" in page_paths()


async def test_a_browser_that_has_a_file_gets_it_only_when_it_changes(stack: Stack) -> None:
    first = await stack.http.get("/pages/base.css")
    again = await stack.http.get("/pages/base.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await stack.http.get("/pages/base.css", headers={"if-none-match": '"other"'})
    assert (other.status_code, other.content) == (200, (FOLDER / "base.css").read_bytes())


async def test_pages_are_read_and_nothing_else(stack: Stack) -> None:
    head = await stack.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (await stack.http.post("/")).status_code == 405
    for path in ("/pages/", "/pages/none.js", "/pages/../static_files.py", "/pages/%2e%2e/static_files.py"):
        assert (await stack.http.get(path)).status_code == 404
    answer = await stack.http.get("/pages/settings.json")
    assert answer.json() == {"version": __version__, "requires_key": False, "demo": False}


async def test_pages_are_open_and_the_report_needs_a_key(tmp_path: Path) -> None:
    key = new_key()
    write(tmp_path / "keys.json", KeyFile(keys=(ApiKey(name="alice", sha256=digest(key)),)))
    async with open_stack(counts, api_keys=tmp_path / "keys.json") as stack:
        for path in page_paths():
            assert (await stack.http.get(path)).status_code == 200
        assert (await stack.http.get("/pages/settings.json")).json()["requires_key"] is True
        assert (await stack.http.get("/operator/state")).status_code == 401
        answer = await stack.http.get("/operator/state", headers={"authorization": f"Bearer {key}"})
        assert answer.json()["models"][0]["model"] == "pydoc"


async def test_the_report_has_what_the_gateway_knows(stack: Stack) -> None:
    """Its own counts at once, those of others from the registry."""
    before = await report(stack)
    await stack.text(max_tokens=20)
    for target in stack.targets:
        target.decoder.hold_after = 1
    async with stack.streaming(max_tokens=100, seed=5) as events:
        await anext(events)
        running = await report(stack)
        for target in stack.targets:
            target.decoder.hold_after = None
            target.decoder.gate.set()
    assert running["in_flight"] == model_of(running)["running"] == 1
    assert model_of(running)["tokens"] >= model_of(before)["tokens"] + 21, "tokens of running requests count"
    assert model_of(running)["first_tokens"] == model_of(before)["first_tokens"] + 2
    assert running["at"] > before["at"]
    targets = model_of(running)["targets"]
    named = {each["id"]: (each["state"], each["slots"]) for each in targets}
    assert named == {"target-0": ("up", 1000), "target-1": ("up", 1000)}
    [gateway] = running["gateways"]
    assert (gateway["id"], gateway["running"]) == (running["gateway"], 1)
    await stack.idle()


async def test_the_report_lists_drafts_and_what_they_brought(stack: Stack) -> None:
    """A draft worker, a target that is listed and not there, and acceptance by kind."""
    fingerprint, now = TOKENIZER.fingerprint, time.time()
    draft = WorkerRecord("draft", "draft-9", "127.0.0.1:9", "pydoc-draft", "draft_model", fingerprint, now)
    gone = WorkerRecord("target", "target-9", "127.0.0.1:9", "pydoc", "ngram", fingerprint, now)
    registry = stack.store.registry
    await registry.heartbeat(draft, {"requests": 3.0})
    await registry.heartbeat(gone, {})
    counts_of = stack.store.acceptance
    await counts_of.record("pydoc", "draft_model pydoc-draft greedy", AcceptanceCounts(40, (10, 8), (8, 4)))
    await counts_of.record("pydoc", "ngram", AcceptanceCounts(5, (5,), (1,)))

    async def known() -> bool:
        model = model_of(await report(stack))
        return bool(model["drafts"]) and len(model["targets"]) == 3 and any(each["rates"] for each in measured(model))

    await eventually(known)
    model = model_of(await report(stack))
    [listed] = model["drafts"]
    assert (listed["id"], listed["state"], listed["requests"]) == ("draft-9", "up", 3.0)
    assert {each["id"]: each["state"] for each in model["targets"]}["target-9"] == "not reached"
    greedy = next(each for each in measured(model) if each["requests"] == "greedy")
    assert (greedy["verifications"], greedy["acceptance_length"], greedy["rates"]) == (10, 1.2, [0.8, 0.5])
    await registry.deregister(draft)
    await registry.deregister(gone)


async def test_a_page_kills_no_draft_unless_the_gateway_is_a_demo(stack: Stack) -> None:
    assert (await stack.http.post("/demo/kill-draft")).status_code == 404


async def test_a_demo_kills_a_draft_worker_which_is_started_again() -> None:
    log: list[str] = []
    async with (
        Supervisor([[Program("draft-1", SLEEP)]], log.append) as supervisor,
        open_draft_killer(list(supervisor.children.values())) as socket,
        open_stack(counts, demo_socket=socket) as stack,
    ):
        await supervisor.until(until(lambda: log))
        worker = supervisor.children["draft-1"]
        before = worker.pid
        assert (await stack.http.get("/pages/settings.json")).json()["demo"] is True
        assert (await stack.http.get("/demo/kill-draft")).status_code == 405
        foreign = await stack.http.post("/demo/kill-draft", headers={"origin": "https://elsewhere.example"})
        assert (foreign.status_code, worker.pid) == (403, before)
        answer = await stack.http.post("/demo/kill-draft")
        assert answer.json() == {"killed": "draft-1"}
        await until(lambda: worker.pid not in (None, before))


async def test_a_demo_without_a_draft_worker_and_without_a_launcher(tmp_path: Path) -> None:
    async with open_draft_killer(()) as socket, open_stack(counts, demo_socket=socket) as stack:
        assert socket.parent.stat().st_mode & 0o077 == 0, "for this user alone"
        assert (await stack.http.post("/demo/kill-draft")).json() == {"killed": None}
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(b"kill target\n")
        assert await reader.read() == b"", "it does that one thing"
        writer.close()
    async with open_stack(counts, demo_socket=tmp_path / "none") as stack:
        assert (await stack.http.post("/demo/kill-draft")).status_code == 503


async def report(stack: Stack) -> dict[str, Any]:
    answer = await stack.http.get("/operator/state")
    assert answer.status_code == 200
    return dict(answer.json())


def model_of(report: dict[str, Any]) -> dict[str, Any]:
    [model] = report["models"]
    return dict(model)


def measured(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Its acceptance by kind of draft worker."""
    return [each for each in model["acceptance"] if each["model"]]


class ElementsOf(HTMLParser):
    """The elements of a page, each with its attributes, and the text in scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts = {"script": "", "style": ""}
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside] += data
