"""Spans of requests: one tree over gateway, target and draft, in the client's trace; none without traces."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paceline.config import SpeculativeConfig
from paceline.launcher import StartError
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.state import WorkerRecord
from paceline.telemetry.otel_tracing import OtelTracing
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.draft_stream_messages import ConnectDrafts
from paceline.wire.link_errors import WireError
from paceline.wire.target_codec import decode_request, encode_request
from paceline_lab.fake_models.table_model import TableModel
from paceline_services import service_entrypoint
from paceline_services.gateway.server import Addresses, running
from paceline_services.gateway.settings import GatewaySettings
from tests.helpers.drafts import model_draft
from tests.helpers.memory_state import open_state
from tests.helpers.openai_stack import counts, open_stack, refusal
from tests.helpers.targets import SLOTS, VOCABULARY, TargetWorker, generation_request, target_worker
from tests.helpers.waiting import until
from tests.helpers.workers import draft_worker

MODEL = f"table:{VOCABULARY}"
SERVED = "tested"
"""The name under which `tests.helpers.targets` serves."""
SPECULATION = SpeculativeConfig(method="draft_model", model=MODEL, draft_schedule="lockstep", row_budget=False)
HELD_AFTER = 4
"""Passes of a model that is held."""
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
"""The example of W3C's text."""


class HeldModel(TableModel):
    """Stands still after some passes until it is released."""

    def __init__(self, released: threading.Event) -> None:
        super().__init__(VOCABULARY, SLOTS, SLOTS)
        self._released = released
        self._passes = 0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self._passes += 1
        if self._passes > HELD_AFTER:
            self._released.wait()
        return super().run(rows, wanted, hidden_layers)


@dataclass
class Recorder:
    """The spans of all services of a test."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def tracing(self, service: str) -> OtelTracing:
        provider = TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return OtelTracing(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def paths(self) -> Counter[str]:
        """Every span's path from its root, with the service that made it."""
        known = {span.context.span_id: span for span in self.spans if span.context}

        def path(span: ReadableSpan) -> str:
            above = known.get(span.parent.span_id) if span.parent else None
            return f"{path(above)}/{span.name}" if above else span.name

        return Counter(f"{span.resource.attributes['service.name']}: {path(span)}" for span in self.spans)


@dataclass
class TracedStack:
    recorder: Recorder
    targets: list[TargetWorker]
    released: threading.Event
    http: httpx.AsyncClient
    addresses: Addresses


@asynccontextmanager
async def traced_stack(targets: int = 1) -> AsyncIterator[TracedStack]:
    """A gateway, targets with our engine, and a draft worker, all with traces. Models are held until released."""
    recorder, released = Recorder(), threading.Event()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        speculator = model_draft(TableModel(VOCABULARY, SLOTS, SLOTS, disagreement=0.2), 2)
        draft = await enter(draft_worker(speculator, tracing=recorder.tracing("draft")))
        store = await enter(open_state(ttl_s=3600.0))
        await store.registry.register(WorkerRecord("draft", "one", draft.address, "", "custom", "", time.time()))
        workers = []
        for number in range(targets):
            model = HeldModel(released)
            worker = await enter(target_worker(SPECULATION, model, tracing=recorder.tracing("target")))
            stack.callback(released.set)  # before the engine has to end
            worker.pool.connect(ConnectDrafts([draft.address]))
            record = WorkerRecord(
                "target", f"t{number}", worker.address, SERVED, "draft_model", model.fingerprint, time.time()
            )
            await store.registry.register(record)
            workers.append(worker)
        await until(lambda: all(worker.pool.connected for worker in workers))
        settings = GatewaySettings({SERVED: MODEL}, port=0, drain_s=1.0)
        models, addresses = await enter(running(settings, store, recorder.tracing("gateway")))
        await until(lambda: len(models.first.fleet.targets) == targets and models.first.fleet.drafts.kinds())
        http = await enter(httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=60.0))
        yield TracedStack(recorder, workers, released, http, addresses)


async def test_a_request_is_one_tree_of_spans_with_an_attempt_for_each_target() -> None:
    """The first target is lost after the first tokens. Its own spans end because its service lives on here."""
    async with traced_stack(targets=2) as stack:
        body = {"prompt": "1 2 3", "max_tokens": 60, "seed": 5, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        async with stack.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line async for line in response.aiter_lines() if line.startswith("data: {"))
            await anext(lines)
            [lost] = [worker for worker in stack.targets if worker.servicer.busy]
            await lost.server.stop()
            stack.released.set()
            usage = [json.loads(line.removeprefix("data: ")).get("usage") async for line in lines][-1]
        recorder = stack.recorder
        await until(lambda: recorder.named("llm_request") and len(recorder.named("draft_request")) == 2)
    attempt = "llm_request/attempt"
    assert recorder.paths() == {
        "gateway: llm_request": 1,
        "gateway: llm_request/grammar_check": 1,
        "gateway: llm_request/tokenize": 1,
        "gateway: llm_request/wait_for_target": 2,
        f"gateway: {attempt}": 2,
        f"target: {attempt}/target_request": 2,
        f"target: {attempt}/target_request/queue": 1,
        f"target: {attempt}/target_request/prefill": 1,
        f"target: {attempt}/target_request/decode": 1,
        f"draft: {attempt}/target_request/draft_request": 2,
    }
    assert len({span.context.trace_id for span in recorder.spans if span.context}) == 1
    first, second = sorted(recorder.named("attempt"), key=lambda span: span.start_time or 0)
    assert [each.status.status_code for each in (first, second)] == [StatusCode.ERROR, StatusCode.UNSET]
    assert attributes(first)["error.type"] == "TargetLost"
    assert attributes(first)["paceline.committed_tokens"] == 0 < attributes(second)["paceline.committed_tokens"]
    assert attributes(first)["paceline.worker.id"] != attributes(second)["paceline.worker.id"]
    abandoned, served = sorted(recorder.named("target_request"), key=lambda span: span.start_time or 0)
    assert attributes(abandoned)["error.type"] == "abandoned"
    assert attributes(served)["paceline.committed_tokens"] == attributes(second)["paceline.committed_tokens"]
    assert attributes(served)["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 60
    check_phases(recorder, served)
    for draft in recorder.named("draft_request"):
        assert attributes(draft)["paceline.draft.method"] == "draft_model"
        assert attributes(draft)["paceline.draft.nodes"] > 0
    root = recorder.one("llm_request")
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.UNSET
    assert (root.start_time or 0) <= (first.start_time or 0)
    assert (root.end_time or 0) >= (second.end_time or 0)


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def check_phases(recorder: Recorder, served: ReadableSpan) -> None:
    """Queue, prefill and decode follow one another to the request's end, and last as long as its attributes say."""
    phases = [recorder.one(name) for name in ("queue", "prefill", "decode")]
    edges = [(phase.start_time or 0, phase.end_time or 0) for phase in phases]
    assert [end for _, end in edges] == [*(start for start, _ in edges[1:]), served.end_time]
    named = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    latencies = [attributes(served)[f"gen_ai.latency.{name}"] for name in named]
    assert [(end - start) / 1e9 for start, end in edges] == pytest.approx(latencies, abs=1e-6)
    assert min(latencies[1:]) > 0


async def test_a_span_describes_the_request_and_what_it_brought() -> None:
    async with traced_stack() as stack:
        stack.released.set()
        body = {"prompt": "1 2 3", "n": 2, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 11}
        response = (await stack.http.post("/v1/completions", json=body, headers={"x-session-id": "mine"})).json()
        refused = await stack.http.post("/v1/completions", json=body | {"max_tokens": 10**7})
        await until(lambda: len(stack.recorder.named("llm_request")) == 2)
    described, unserved = map(attributes, stack.recorder.named("llm_request"))
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": SERVED,
        "gen_ai.response.model": SERVED,
        "gen_ai.request.id": response["id"].removeprefix("cmpl-"),
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 11,
        "gen_ai.request.stream": False,
        "gen_ai.conversation.id": "mine",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": response["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.usage.completion_tokens": 14,
        "gen_ai.usage.num_sequences": 2,
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert {name: described.get(name) for name in expected} == expected
    latency = {name: described[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e")}
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]
    assert (refused.status_code, unserved["http.response.status_code"]) == (400, 400)
    assert stack.recorder.named("llm_request")[1].status.status_code is StatusCode.UNSET, "it is the client's fault"


@pytest.mark.parametrize(
    ("header", "traced", "same_trace"),
    [
        (None, True, False),
        (PARENT, True, True),
        (f"{PARENT[:-1]}0", False, False),
        ("00-nonsense-01", True, False),
    ],
    ids=["none", "sampled", "not sampled", "malformed"],
)
async def test_the_client_decides_whether_and_where_its_request_is_traced(
    header: str | None, traced: bool, same_trace: bool
) -> None:
    headers = {"traceparent": header} if header else {}
    async with traced_stack() as stack:
        stack.released.set()
        answer = await stack.http.post("/v1/completions", json={"prompt": "1 2 3", "max_tokens": 4}, headers=headers)
        assert answer.status_code == 200
        async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(text="1 2 3"), metadata=tuple(headers.items()))
            assert [each async for each in call]
        await until(lambda: not any(worker.servicer.busy for worker in stack.targets))
        await until(lambda: len(stack.recorder.named("draft_request")) == len(stack.recorder.named("llm_request")))
    roots = stack.recorder.named("llm_request")
    assert len(roots) == 2 * traced
    assert bool(stack.recorder.spans) == traced, "no service traces what the client does not"
    trace_id, parent_id = (int(part, 16) for part in PARENT.split("-")[1:3])
    for root in roots:
        assert root.context is not None
        assert (root.context.trace_id == trace_id) == same_trace
        assert (root.parent.span_id if root.parent else None) == (parent_id if same_trace else None)


async def test_a_failed_request_fails_its_span() -> None:
    recorder = Recorder()

    def fails(request: object) -> Sequence[int]:
        raise RuntimeError("out of order")

    async with open_stack(fails, tracing=recorder.tracing("gateway")) as stack:
        assert (await stack.complete()).status_code == 500
        await until(lambda: recorder.named("llm_request"))
    for name in ("attempt", "llm_request"):
        assert recorder.one(name).status.status_code is StatusCode.ERROR
    assert attributes(recorder.one("attempt"))["error.type"] == "TargetRefusedError"


async def test_a_refused_call_has_a_span_as_a_refused_request_has() -> None:
    recorder = Recorder()
    async with open_stack(counts, tracing=recorder.tracing("gateway")) as stack, stack.inference() as stub:
        await refusal(stub, inference_pb2.GenerateRequest(text="x", n=1000))
        assert (await stack.complete(n=1000)).status_code == 400
        await until(lambda: len(recorder.named("llm_request")) == 2)
    assert [span.status.status_code for span in recorder.named("llm_request")] == [StatusCode.UNSET] * 2


async def test_without_traces_targets_hear_of_none() -> None:
    async with open_stack(counts) as stack:
        await stack.text(headers={"traceparent": PARENT})
        assert stack.decoder.requests[0].trace_parent == ""


def test_without_traces_no_service_imports_what_makes_them() -> None:
    """redis-py imports the SDK's metrics where the SDK is installed."""
    code = """
import sys
import paceline_services.draft.draft_worker, paceline_services.gateway.__main__
import paceline_services.target.target_worker
from paceline_services.service_entrypoint import open_tracing
with open_tracing("gateway", "g", None) as tracing:
    assert not tracing
ours = {"opentelemetry.sdk.trace", "opentelemetry.exporter", "paceline.telemetry.otel_tracing"}
assert not ours & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trace_parent_travels_and_is_no_place_for_long_texts() -> None:
    assert decode_request(encode_request(generation_request(trace_parent=PARENT))).trace_parent == PARENT
    with pytest.raises(WireError, match="trace_parent: longer than 55 characters"):
        decode_request(encode_request(generation_request(trace_parent=f"{PARENT}0")))


@pytest.mark.parametrize(
    ("variable", "endpoint", "exporters"),
    [
        ("", None, set()),
        ("none", None, set()),
        ("console", None, {"console"}),
        ("console, otlp", None, {"console", "otlp"}),
        ("none", "http://c", {"otlp"}),
        ("console", "http://c", {"console", "otlp"}),
    ],
)
def test_the_option_and_opentelemetrys_variable_name_exporters(
    variable: str, endpoint: str | None, exporters: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", variable)
    assert service_entrypoint.requested_exporters(endpoint) == exporters


def test_what_cannot_be_exported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(StartError, match="jaeger"), service_entrypoint.open_tracing("gateway", "g", None):
        pass
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setitem(sys.modules, "paceline.telemetry.otel_tracing", None)
    with pytest.raises(StartError, match=r"paceline\[otel\]"), service_entrypoint.open_tracing("gateway", "g", None):
        pass


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The URL of an HTTP server, and the path and body of each POST to it."""
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Not to stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def test_a_service_that_stops_has_sent_its_spans_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    with collector() as (url, received):
        with service_entrypoint.open_tracing("target", "t-1", service_entrypoint.collector_url(url)) as tracing:
            tracing.start("target_request", PARENT, {"gen_ai.request.id": "r"}, role="server").end()
        [(path, body)] = received
    assert path == "/v1/traces"
    [resource_spans] = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("paceline-target", "t-1")
    [span] = resource_spans.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("target_request", *PARENT.split("-")[1:3])


def test_the_console_gets_a_line_for_each_span(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with service_entrypoint.open_tracing("draft", "d-1", None) as tracing, tracing.start_request({}) as root:
        root.child("tokenize").end()
    written = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["name"] for line in written] == ["tokenize", "llm_request"]
    assert {line["resource"]["attributes"]["deployment.environment.name"] for line in written} == {"test"}
