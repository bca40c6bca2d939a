"""Limits on what comes before a request's body: uvicorn has none with its fast parser."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 2**10
"""Largest request line and headers, give or take what one read of a socket brings."""
HEAD_S = 20.0
"""How long they may take, from the opening of a connection or the first byte of a further request."""

TOO_LARGE = b"431 Request Header Fields Too Large"
TOO_SLOW = b"408 Request Timeout"


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which hangs up on who sends an endless head, or none."""

    _head_bytes: int | None = 0
    """Of the present head so far; None: it has come."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > HEAD_BYTES:
            self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes = 0

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self._refuse, TOO_SLOW)

    def _head_came(self) -> None:
        self._head_bytes = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
