"""Limits that uvicorn lacks with its fast parser: the size and time of heads and trailers, and connections."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline_services.gateway.http import event_stream

MAX_HEAD_BYTES = 64 * 2**10
"""Largest request line with headers, and largest trailers, to within one read of the socket."""
HEAD_TIMEOUT_S = 20.0
"""Limit for a head to arrive, from the opening of the connection or the first byte of a further request; and for the
rest of a body whose response was sent before its end."""
MAX_CONNECTIONS = 16_384
"""HTTP connections, idle ones too. Beyond it, one request per connection is answered: probes, others with 503."""

OVER_CONNECTION_LIMIT = "crowded"
"""Key in the state of a request whose connection exceeds the limit."""
TOO_LARGE = b"431 Request Header Fields Too Large"
TOO_SLOW = b"408 Request Timeout"


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes connections whose head or trailer is too large or too slow.

    Every connection has a timer: while a response is due, the limits of the request apply; while a head or the rest of
    a body arrives, `HEAD_TIMEOUT_S`; while it is idle, uvicorn's keep-alive. A connection whose client reads nothing
    is aborted, since closing it would wait for the client.
    """

    _head_bytes = 0
    """Bytes since a head began or the latest part of a body: between the parts and after the last one, too."""
    _in_body = False
    _deadline: asyncio.TimerHandle | None = None
    _over_limit = False
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so only for sockets that report their protocol, which accepted ones may not. Without it the
        # kernel holds back a response's body until the client acknowledges the head: 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_deadline()
        self._over_limit = len(self.connections) > MAX_CONNECTIONS
        if self._over_limit:
            self.app_state = {**self.app_state, OVER_CONNECTION_LIMIT: True}

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._clear_read_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clear_read_timer()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._close_with(TOO_LARGE)
        elif not self._response_pending():
            self._restart_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._clear_deadline()
        self._in_body = True
        super().on_headers_complete()
        if self._over_limit:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._clear_deadline()
        self._in_body = False

    def _response_pending(self) -> bool:
        """Whether a request waits for the end of its response."""
        if self.cycle is None:  # before the first head
            return False
        return not self.cycle.response_complete

    def _restart_timer(self) -> None:
        """Start the timer that applies now: uvicorn stops its own when data arrives."""
        if self._in_body or self._head_bytes:
            self._start_deadline()
        else:  # the rest of a body has arrived
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._close_with, TOO_SLOW)

    def _clear_deadline(self) -> None:
        self._head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_read_timer(self, unsent: int) -> None:
        self._read_timer = self.loop.call_later(event_stream.CLIENT_READ_TIMEOUT_S, self._check_reader, unsent)

    def _check_reader(self, unsent: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < unsent:
            self._start_read_timer(left)
        else:
            self.transport.abort()

    def _clear_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _close_with(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._may_respond():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()

    def _may_respond(self) -> bool:
        """Whether the incoming request has no response, and no other response is being sent."""
        begun = self.cycle.response_started if self._in_body else self._response_pending()
        return not (begun or self.pipeline)
