"""How every channel and server of Paceline is set up: message sizes, keepalive, backoff."""

from __future__ import annotations

import grpc

from paceline.tls import Certificates
from paceline.wire.credentials import channel_credentials

ChannelOptions = list[tuple[str, int | str]]

FRAME_BYTES = 64 * 2**20
"""Largest frame that carries hidden states, or what many requests were answered."""
SUBMIT_FRAME_BYTES = 16 * 2**20
"""Largest frame that carries prompts: some five million tokens."""
GROWTH_FRAME_BYTES = 2**20
"""Largest frame that a target takes from a draft: guesses are small, and drafts are not trusted."""

# A peer that is stopped, or whose network is cut, keeps its TCP connection: only an unanswered ping tells.
KEEPALIVE_TIME_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 5_000

CONNECT_TIMEOUT_MS = 5_000
"""How long a client gives one attempt to connect: with TLS that is three round trips, and a key to compute."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""How long a server gives a connection to become one."""
MAX_CONCURRENT_STREAMS = 1024
"""Calls at once on one connection. Between services there are two or three, long-lived ones."""

_KEEPALIVE: ChannelOptions = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # or else a minute, which counts where much is being sent
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def draft_frame_bytes(*, hidden_states: bool) -> int:
    """Of the largest frame that a draft takes, by whether it drafts from hidden states."""
    return FRAME_BYTES if hidden_states else SUBMIT_FRAME_BYTES


def server_options(receive_bytes: int = FRAME_BYTES) -> ChannelOptions:
    """`receive_bytes`: of the largest message that is taken."""
    return [
        *_KEEPALIVE,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", FRAME_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.so_reuseport", 0),  # so that a port that is taken is an error, not half of the connections
    ]


def open_channel(
    address: str, *, receive_bytes: int = FRAME_BYTES, tls: Certificates | None = None, peer: str = ""
) -> grpc.aio.Channel:
    """A channel of its own to `host:port`. Connects when first used. With `tls`, only to a server that is `peer`."""
    options: ChannelOptions = [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", FRAME_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # the name misleads
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),  # links do not share a connection, nor each other's backoff
        ("grpc.enable_http_proxy", 0),  # workers talk to each other directly
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", peer))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)
