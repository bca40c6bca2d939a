"""Mutual TLS between services, from certificate files that may be replaced while a service runs.

Workers are dialled by address, and addresses come and go. So a certificate is made out to what its holder *is*:
`gateway.paceline`, `target.paceline` or `draft.paceline`, as a DNS name among its subject alternative names. A client
checks that it reached a worker of the kind it wants; a server checks that its caller is of the kind it serves. A draft
worker that was taken over cannot pass for a gateway.
"""

from __future__ import annotations

import grpc

from paceline.tls import Certificates

GATEWAY = "gateway.paceline"
TARGET = "target.paceline"
DRAFT = "draft.paceline"


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """As the files are now: a channel keeps them for its life."""
    pem = certificates.pem
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """As the files are at each new connection. Clients need a certificate if there is an authority to check it by."""
    told = certificates.pem

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(told.key, told.certificate)], told.authority)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal told
        if certificates.pem is told:
            return None
        told = certificates.pem
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed,  # type: ignore[arg-type]  # None says that nothing changed
        require_client_authentication=told.authority is not None,
    )
