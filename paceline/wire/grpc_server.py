"""A gRPC server as every service runs it: health, reflection, one error map, a start and an end in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.tls import Certificates
from paceline.wire.channels import FRAME_BYTES, server_options
from paceline.wire.credentials import server_credentials
from paceline.wire.interceptors import CallAdmission, Statuses, StatusInterceptor, admit_any_call
from paceline.wire.link_errors import LinkError

Register = Callable[[Any, grpc.aio.Server], None]


class PortInUseError(LinkError):
    """The address cannot be listened on."""


class GrpcServer:
    """Add services, `start`, later `drain`, then `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        statuses: Statuses | None = None,
        *,
        tls: Certificates | None = None,
        peer: str = "",
        receive_bytes: int = FRAME_BYTES,
        admit: CallAdmission = admit_any_call,
    ) -> None:
        """Port 0 lets the system choose one. `statuses`, `admit`: see `StatusInterceptor`.

        With `tls`, only who has a certificate as `peer` may call; with "" whoever has one that its authority signed.
        """
        self._host = f"[{host}]" if ":" in host else host
        self.address = f"{self._host}:{port}"
        """Where it listens; with the real port once it has started."""
        self.serving = False
        """Until it has started, and once it drains."""
        self._tls = tls
        interceptor = StatusInterceptor(statuses or {}, peer if tls is not None else "", admit)
        self._server = grpc.aio.server(interceptors=[interceptor], options=server_options(receive_bytes))
        self._health = health.aio.HealthServicer()
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(
        self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service: ServiceDescriptor
    ) -> None:
        """`register` is the generated `add_..._to_server`, `service` its descriptor, from the generated module."""
        register(servicer, self._server)
        self._names.append(service.full_name)

    async def start(self) -> str:
        """Listen and turn SERVING; return host:port. Raises `PortInUseError`."""
        reflection.enable_server_reflection(self._names, self._server)
        try:
            port = self._listen()
        except RuntimeError as error:
            raise PortInUseError(f"cannot listen on {self.address}; is the port taken? Choose another one.") from error
        self.address = f"{self._host}:{port}"
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.serving = True
        return self.address

    def _listen(self) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(self.address)
        return self._server.add_secure_port(self.address, server_credentials(self._tls))

    async def drain(self) -> None:
        """Turn NOT_SERVING, for good. Calls go on."""
        self.serving = False
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Give the calls that are open so many seconds, then end them."""
        await self._server.stop(grace_s)
