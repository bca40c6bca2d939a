"""The API's description matches the API, and can be read without a network."""

from __future__ import annotations

import re

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from paceline_services.gateway.openai.bodies import ChatBody, CompletionBody
from tests.helpers.openai_stack import counts, open_stack

BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


async def test_bodies_and_responses_are_described() -> None:
    async with open_stack(counts) as stack:
        schema = (await stack.http.get("/openapi.json")).json()
        for path, body in BODIES.items():
            operation = schema["paths"][path]["post"]
            wanted = operation["requestBody"]["content"]["application/json"]["schema"]
            assert wanted == {"$ref": f"#/components/schemas/{body.__name__}"}
            described = schema["components"]["schemas"][body.__name__]
            assert set(described["properties"]) >= {"model", "stream", "temperature", "structured_outputs"}
            assert "text/event-stream" in operation["responses"]["200"]["content"]
        assert set(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
        assert (await stack.http.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_a_request_and_its_answer_are_as_described() -> None:
    async with open_stack(counts) as stack:
        schema = (await stack.http.get("/openapi.json")).json()
        asked = {"prompt": "x", "max_tokens": 3}
        answered = (await stack.http.post("/v1/completions", json=asked)).json()
        refused = (await stack.http.post("/v1/completions", json={"prompt": 5})).json()
        for name, each in (("CompletionBody", asked), ("Completion", answered), ("Error", refused)):
            whole = {"$ref": f"#/components/schemas/{name}", "components": schema["components"]}
            assert validator_for(whole, Draft202012Validator)(whole).is_valid(each), name


async def test_every_reference_leads_somewhere() -> None:
    async with open_stack() as stack:
        text = (await stack.http.get("/openapi.json")).text
        known = (await stack.http.get("/openapi.json")).json()["components"]["schemas"]
        assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(known)


async def test_the_page_needs_nothing_else() -> None:
    async with open_stack() as stack:
        page = await stack.http.get("/docs")
        assert page.status_code == 200
        assert "src=" not in page.text
        assert "http" not in page.text.replace("<!doctype html>", "").replace("openapi.json", "")
        for shown in ("POST /v1/completions", "GET /metrics", "structured_outputs", "prompt_cache_key"):
            assert shown in page.text
