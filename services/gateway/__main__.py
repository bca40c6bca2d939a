"""`python -m services.gateway`: one gateway."""

from __future__ import annotations

import argparse
import secrets
import sys

from paceline.models import served_name
from paceline.telemetry import logs
from services.gateway.gateway import Limits
from services.gateway.server import Settings, serve
from services.process import run


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    try:
        served_name(options.model, options.served_model_name)
    except ValueError as error:
        parser.error(str(error))
    logs.configure("gateway", options.worker_id)
    return run(lambda stop: serve(_settings(options), options.redis_url, stop))


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        model=options.model,
        served_model_name=options.served_model_name or options.model,
        host=options.host,
        port=options.port,
        grpc_port=options.grpc_port,
        drain_s=options.drain_s,
        limits=Limits(options.max_in_flight, options.max_body_bytes, options.resume_s),
        worker_id=options.worker_id,
    )


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m services.gateway",
        description="OpenAI's HTTP API and gRPC in front of target workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="name or folder of the model, for its tokenizer; as the targets have it")
    add("--served-model-name", help="what clients and targets call it; else as --model")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="HTTP; 0: the system chooses")
    add("--grpc-port", type=int, default=0, help="0: the system chooses")
    add("--redis-url", required=True, help="where workers are registered")
    add("--worker-id", default=f"gateway-{secrets.token_hex(3)}", help="its name in logs and registry")
    add("--max-in-flight", type=int, default=limits.max_in_flight, help="completions generated at once")
    add("--max-body-bytes", type=int, default=limits.max_body_bytes, help="largest request body")
    add("--resume-s", type=float, default=limits.resume_s, help="wait so long for another target after a loss")
    add("--drain-s", type=float, default=60.0, help="requests may go on so long after SIGTERM")
    return parser


if __name__ == "__main__":
    sys.exit(main())
