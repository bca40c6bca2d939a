"""The settings of a gateway: what `option` makes is an option of the command line, too."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from paceline.config.sampling_params import GenerationConfig
from paceline.parsing.output_format import AUTO, NONE, TOOL_FORMATS
from paceline.parsing.reasoning import REASONING_FORMATS
from paceline.state.record_store import RecordLimits
from paceline.tls import Certificates
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.http.event_stream import PING_S
from paceline_services.service_entrypoint import option


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway."""

    models: Mapping[str, str]
    """Each served model: the name for clients and targets, and where its tokenizer is."""
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "HTTP; 0: the system chooses")
    grpc_port: int = option(0, "0: the system chooses")
    worker_id: str = option(lambda: f"gateway-{secrets.token_hex(3)}", "its name in logs and registry")
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of models."""
    api_keys: Path | None = option(None, "ask clients for a key: see `paceline keys`", type=Path, metavar="FILE")
    allow_origin: Sequence[str] = option(
        list,
        "pages of this site may use the API, such as https://chat.example; *: of any",
        action="append",
        metavar="ORIGIN",
    )
    chat_template: str | None = option(
        None, "for all chats: a file with a template, or a name among the models' own, such as tool_use", metavar="FILE"
    )
    tool_call_parser: str = option(
        AUTO, "how the models write tool calls; auto: as each chat template shows", choices=(AUTO, NONE, *TOOL_FORMATS)
    )
    reasoning_parser: str = option(
        AUTO,
        "how the models mark their reasoning; auto: as each chat template shows",
        choices=(AUTO, NONE, *REASONING_FORMATS),
    )
    generation_config: GenerationConfig = option(
        AUTO,
        "auto: sampling defaults of each model's generation_config.json; none: those of the API",
        choices=get_args(GenerationConfig),
    )
    records: RecordLimits = field(default_factory=RecordLimits)
    """Of what is kept for clients: finished responses, and journals of streams."""
    ping_s: float = option(PING_S, "a stream that is silent so long sends a ping; 0: never")
    demo_socket: Path | None = option(None, "set by `paceline serve --demo-page`", type=Path, metavar="PATH")
    drain_s: float = option(60.0, "requests may go on so long after SIGTERM")
    edge_tls: Certificates | None = None
    """For clients; None: HTTP and gRPC are in plain text."""
    tls: Certificates | None = None
    """For targets and Redis."""
    otlp_traces_endpoint: str | None = None
    """Where traces are sent; None: as `open_tracing` reads the environment."""

    @property
    def public(self) -> dict[str, Any]:
        """The options as JSON, without files and paths: of these only whether they are given."""
        addresses, times = ("host", "port", "grpc_port"), ("drain_s", "ping_s")
        shown = (*addresses, *times, "worker_id", "tool_call_parser", "reasoning_parser", "generation_config")
        given = {name: getattr(self, name) is not None for name in ("chat_template", "api_keys", "edge_tls", "tls")}
        others = {
            "aliases": dict(self.aliases),
            "allow_origin": list(self.allow_origin),
            "records": asdict(self.records),
        }
        return {name: getattr(self, name) for name in shown} | given | others | asdict(self.limits)
