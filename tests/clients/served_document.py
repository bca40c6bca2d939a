"""Schemathesis: requests made up from the gateway's own description of its API, half of them against it.

No response is a server error, and each has a status, a type and a body that the description has. What the description
forbids is refused.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case, HookContext
from schemathesis.checks import CHECKS

from tests.clients.asked import MODEL, URL

schema = schemathesis.openapi.from_url(f"{URL}/openapi.json")
schema.config.phases.coverage.enabled = False  # each bound of each field: bodies have too many of them
CHECKED = CHECKS.get_by_names(
    [
        *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
        "negative_data_rejection",
    ]
)
TOO_LARGE = 413
"""Of a body with more bytes than the gateway reads. That is a refusal, too."""
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""By path, the field that limits an output: nobody waits for long ones."""


@schema.hooks.hook
def map_body(context: HookContext, body: Any) -> Any:
    """Names a model that exists, so that the rest of the body matters."""
    path = context.operation.path if context.operation else ""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if path in LIMITS and isinstance(body.get(LIMITS[path], 0), int | float):
        body[LIMITS[path]] = 4
    return body


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_route(case: Case) -> None:
    response = case.call(timeout=30)
    checks = [check for check in CHECKED if response.status_code != TOO_LARGE or "negative" not in check.__name__]
    case.validate_response(response, checks=checks)
