"""Options of every gRPC channel and server: message sizes, keepalive, backoff, mutual TLS.

Services reach each other by addresses that change. So a certificate names the kind of service that holds it:
`gateway.paceline`, `target.paceline` or `draft.paceline`, as a DNS name among its subject alternative names. A client
checks that the server is of the kind it wants, and a server checks the kind of its client. A compromised draft worker
cannot pass for a gateway. Certificate files may be replaced while a service runs.
"""

from __future__ import annotations

import grpc

from paceline.tls import Certificates

GATEWAY = "gateway.paceline"
TARGET = "target.paceline"
DRAFT = "draft.paceline"

ChannelOptions = list[tuple[str, int | str]]

FRAME_BYTES = 64 * 2**20
"""Largest frame with hidden states, or with the deltas of many requests."""
SUBMIT_FRAME_BYTES = 16 * 2**20
"""Largest frame with prompts: about five million tokens."""
GROWTH_FRAME_BYTES = 2**20
"""Largest frame that a target accepts from a draft: growth is small, and drafts are not trusted."""

# A peer that hangs or whose network is cut keeps its TCP connection: only an unanswered ping reveals it.
KEEPALIVE_TIME_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 5_000

CONNECT_TIMEOUT_MS = 5_000
"""Time for one attempt to connect: with TLS, three round trips and a key exchange."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""Time that a server allows for the handshake of a connection."""
MAX_CONCURRENT_STREAMS = 1024
"""Concurrent calls on one connection. Services need two or three long-lived ones."""

_KEEPALIVE: ChannelOptions = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # default: a minute, which applies while data is sent
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def draft_frame_bytes(*, hidden_states: bool) -> int:
    """Return the size of the largest frame that a draft accepts. `hidden_states`: whether it drafts from them."""
    return FRAME_BYTES if hidden_states else SUBMIT_FRAME_BYTES


def server_options(receive_bytes: int = FRAME_BYTES) -> ChannelOptions:
    """`receive_bytes`: size of the largest message that the server accepts."""
    return [
        *_KEEPALIVE,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", FRAME_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.so_reuseport", 0),  # or a second server on a taken port gets half of the connections instead of an error
    ]


def open_channel(
    address: str, *, receive_bytes: int = FRAME_BYTES, tls: Certificates | None = None, peer: str = ""
) -> grpc.aio.Channel:
    """Return a new channel to `host:port`, which connects when first used.

    With `tls`, the server's certificate must name `peer`.
    """
    options: ChannelOptions = [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", FRAME_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # the name misleads
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),  # links share neither connections nor backoff
        ("grpc.enable_http_proxy", 0),  # workers connect directly
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", peer))
    pem = tls.pem  # as the files are now; a channel keeps them for its life
    credentials = grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)
    return grpc.aio.secure_channel(address, credentials, options=options)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that read the files again at each new connection.

    Clients need a certificate if there is an authority to verify it with.
    """
    served = certificates.pem

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(served.key, served.certificate)], served.authority)

    def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        if certificates.pem is served:
            return None
        served = certificates.pem
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed_configuration,  # type: ignore[arg-type]  # None: unchanged
        require_client_authentication=served.authority is not None,
    )
