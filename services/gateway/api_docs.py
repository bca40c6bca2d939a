"""The description of the HTTP API: `/openapi.json`, and `/docs`, a page made from it that loads nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import HTMLResponse

from paceline_services.gateway.generation.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline_services.gateway.http.json_body import TEXT, Json
from paceline_services.gateway.pages.operations import AbortBody

NUMBER: Json = {"type": "integer"}
TOKENS: Json = {"type": "array", "items": NUMBER}


def object_of(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


def list_of(item: Json) -> Json:
    return {"type": "array", "items": item}


FINISH: Json = {"enum": ["stop", "length", "tool_calls", "error", "abort", None]}
USAGE = object_of(
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    total_tokens=NUMBER,
    prompt_tokens_details=object_of(cached_tokens=NUMBER),
    completion_tokens_details=object_of(reasoning_tokens=NUMBER),
)
CALL = object_of(id=TEXT, type=TEXT, function=object_of(name=TEXT, arguments=TEXT))
MESSAGE = object_of(
    role=TEXT,
    content={"type": ["string", "null"]},
    reasoning_content=TEXT,
    reasoning=TEXT,
    tool_calls=list_of(CALL),
)
LEFT_OUT: Json = {"left_out_keywords": list_of(TEXT)}
"""The keywords of schemas with `strict: false` to which the output is not kept. Absent if there are none."""
HEAD: Json = {"id": TEXT, "object": TEXT, "created": NUMBER, "model": TEXT, "system_fingerprint": TEXT, **LEFT_OUT}
CHOICE: Json = {"index": NUMBER, "logprobs": {"type": ["object", "null"]}, "finish_reason": FINISH}
PROMPT_LOGPROBS: Json = {"type": ["array", "null"], "items": {"type": ["object", "null"]}}
CARD = object_of(
    id=TEXT,
    object=TEXT,
    created=NUMBER,
    owned_by=TEXT,
    max_model_len={"type": ["integer", "null"]},
    sampling_defaults={"type": "object"},
)
RESPONSE_SCHEMAS: Mapping[str, Json] = {
    "Error": object_of(
        error=object_of(message=TEXT, type=TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
    ),
    "Completion": object_of(
        **HEAD, choices=list_of(object_of(**CHOICE, text=TEXT, prompt_logprobs=PROMPT_LOGPROBS)), usage=USAGE
    ),
    "ChatCompletion": object_of(
        **HEAD,
        choices=list_of(object_of(**CHOICE, message=MESSAGE)),
        usage=USAGE,
        prompt_logprobs=PROMPT_LOGPROBS,
    ),
    "Models": object_of(object=TEXT, data=list_of(CARD)),
    "Model": CARD,
    "Tokens": object_of(
        count=NUMBER, max_model_len=NUMBER, tokens=TOKENS, token_strs={"type": ["array", "null"], "items": TEXT}
    ),
    "Prompt": object_of(prompt=TEXT),
    "Health": object_of(status=TEXT),
    "OperatorState": object_of(
        at={"type": "number"},
        gateway=TEXT,
        in_flight=NUMBER,
        max_in_flight=NUMBER,
        max_queue=NUMBER,
        redis_unavailable={"type": "boolean"},
        gateways=list_of({"type": "object"}),
        models=list_of({"type": "object"}),
    ),
    "Version": object_of(version=TEXT),
    "Load": object_of(server_load=NUMBER, num_waiting_reqs={"type": "number"}),
    "ServerInfo": object_of(version=TEXT, models=list_of({"type": "object"}), options={"type": "object"}),
    "Aborted": object_of(aborted=list_of(TEXT)),
    "Request": object_of(
        id=TEXT,
        object=TEXT,
        model=TEXT,
        state={"enum": ["running", "finished"]},
        completion_tokens=NUMBER,
        targets=list_of(TEXT),
        replays=NUMBER,
        speculation={"type": "object"},
    ),
}
Routes = Mapping[tuple[str, str], tuple[tuple[type[BaseModel], ...], str, str]]
"""By method and path: the bodies, the response schema, and a summary."""
ROUTES: Routes = {
    ("post", "/v1/completions"): ((CompletionBody,), "Completion", "Continue prompts."),
    ("post", "/v1/chat/completions"): ((ChatBody,), "ChatCompletion", "Continue a conversation."),
    ("get", "/v1/models"): ((), "Models", "What is served."),
    ("get", "/v1/models/{model}"): ((), "Model", "One model."),
    ("post", "/tokenize"): ((TokenizeTextBody, TokenizeChatBody), "Tokens", "A text or a conversation as token ids."),
    ("post", "/detokenize"): ((DetokenizeBody,), "Prompt", "Token ids as text."),
    ("get", "/health"): ((), "Health", "200 while requests would be served."),
    ("get", "/ready"): ((), "Health", "As `/health`."),
    ("get", "/live"): ((), "Health", "200 while the gateway runs."),
    ("get", "/operator/state"): ((), "OperatorState", "Models, queues, workers and acceptance, for `/operator`."),
    ("get", "/version"): ((), "Version", "Of Paceline."),
    ("get", "/load"): ((), "Load", "Completions that are being generated, and those of them without a first token."),
    ("get", "/server_info"): ((), "ServerInfo", "Models and options of this gateway."),
    ("post", "/abort_requests"): ((AbortBody,), "Aborted", "End running requests of the same API key."),
    ("get", "/v1/requests/{request_id}"): ((), "Request", "What speculation did for a request of the same API key."),
}
STREAMS = ("/v1/completions", "/v1/chat/completions")
PREFIX = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class ApiDescription:
    """The routes of one API, and what its responses look like."""

    routes: Routes
    schemas: Mapping[str, Json]
    """Of responses, by name."""
    streams: Collection[str]
    """Paths whose response may be a stream."""
    error: str = "Error"
    """The schema of its errors."""
    parameters: Mapping[tuple[str, str], Sequence[Json]] = field(default_factory=dict)
    """By method and path: the parameters of the query, as OpenAPI has them."""


def add_api_docs(app: FastAPI) -> None:
    """Add the routes of the description. It has OpenAI's API, and what `describe` adds."""
    app.state.descriptions = [ApiDescription(ROUTES, RESPONSE_SCHEMAS, STREAMS)]
    app.openapi = lambda: app.openapi_schema or _described(app)  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html_page(app.openapi()))


def describe(app: FastAPI, api: ApiDescription) -> None:
    """Add another API to the description."""
    app.state.descriptions.append(api)


def _described(app: FastAPI) -> Json:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for api in app.state.descriptions:
        _add_description(schema, api)
    metrics = schema["paths"]["/metrics"]["get"]
    metrics["summary"] = "Figures for Prometheus."
    metrics["responses"] = {"200": {"description": "Text.", "content": {"text/plain": {"schema": TEXT}}}}
    app.openapi_schema = schema
    return schema


def _add_description(schema: Json, api: ApiDescription) -> None:
    schemas: Json = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas |= api.schemas
    for (method, path), (bodies, answer, about) in api.routes.items():
        operation = schema["paths"][path][method]
        operation["summary"] = about
        if query := api.parameters.get((method, path)):
            operation["parameters"] = [*operation.get("parameters", []), *query]
        operation["responses"] = {
            "200": {"description": about, "content": _content(answer, streams=path in api.streams)},
            "4XX": {"description": "What is wrong with the request.", "content": _content(api.error)},
            "5XX": {"description": "It cannot be served now.", "content": _content(api.error)},
        }
        for body in bodies:
            described = body.model_json_schema(ref_template=PREFIX + "{model}")
            schemas |= described.pop("$defs", {})
            schemas[body.__name__] = described
        if bodies:
            options = [{"$ref": PREFIX + body.__name__} for body in bodies]
            wanted = options[0] if len(options) == 1 else {"anyOf": options}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": wanted}}}


def _content(answer: str, *, streams: bool = False) -> Json:
    content: Json = {"application/json": {"schema": {"$ref": PREFIX + answer}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "with `stream`: chunks"}}
    return content


def html_page(schema: Json) -> str:
    """The description as HTML."""
    sections = [
        _section(method, path, operation, schema["components"]["schemas"])
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(schema['info']['title'])}</title>"
        "<style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.1rem 1rem .1rem 0;vertical-align:top}code{font-size:.9em}</style>"
        f"<h1>{escape(schema['info']['title'])} {escape(schema['info']['version'])}</h1>"
        "<p>As <a href=/openapi.json>openapi.json</a>.</p>" + "".join(sections)
    )


def _section(method: str, path: str, operation: Json, schemas: Json) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = [field for option in body.get("anyOf", [body]) if option for field in _fields(option, schemas)]
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(about)}" for name, kind, about in fields
    )
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('summary', ''))}</p>"
        f"<table>{rows}</table>"
    )


def _fields(option: Json, schemas: Json) -> Iterable[tuple[str, str, str]]:
    schema = schemas[option["$ref"].removeprefix(PREFIX)]
    for name, each in schema["properties"].items():
        yield name, _kind(each), each.get("description", "")


def _kind(schema: Json) -> str:
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(PREFIX)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
