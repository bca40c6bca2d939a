"""The gRPC server of every service: health, reflection, status codes, start and stop in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.launcher import StartError
from paceline.tls import Certificates
from paceline.wire.channels import FRAME_BYTES, server_credentials, server_options
from paceline.wire.interceptors import CallAdmission, Statuses, StatusInterceptor
from paceline.wire.link_errors import LinkError

Register: TypeAlias = Callable[[Any, grpc.aio.Server], None]
"""A generated `add_..._to_server`."""


class PortInUseError(LinkError, StartError):
    """The server cannot listen on its address."""


class GrpcServer:
    """Call `add`, `start`, later `drain`, then `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        statuses: Statuses | None = None,
        *,
        tls: Certificates | None = None,
        peer: str = "",
        receive_bytes: int = FRAME_BYTES,
        admit: CallAdmission | None = None,
    ) -> None:
        """Port 0: the system chooses one. `statuses`, `admit`: see `StatusInterceptor`.

        With `tls`, a client's certificate must name `peer`; "": any certificate that the authority signed will do.
        """
        self._host = f"[{host}]" if ":" in host else host
        self.address = f"{self._host}:{port}"
        """Where it listens; with the actual port after `start`."""
        self.serving = False
        """True from `start` to `drain`."""
        self._tls = tls
        interceptor = StatusInterceptor(statuses or {}, peer if tls is not None else "", admit)
        self._server = grpc.aio.server(interceptors=[interceptor], options=server_options(receive_bytes))
        self._health = health.aio.HealthServicer()
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Register, servicer: object, service: ServiceDescriptor) -> None:
        register(servicer, self._server)
        self._names.append(service.full_name)

    async def start(self) -> str:
        """Listen, turn SERVING and return host:port. Raises `PortInUseError`."""
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
        """Turn NOT_SERVING for good. Open calls continue."""
        self.serving = False
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Give open calls this many seconds to finish, then end them."""
        await self._server.stop(grace_s)
