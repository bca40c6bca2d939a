"""Mutual TLS between services. Certificate files may be replaced while a service runs.

Services reach each other by addresses that change. So a certificate names the kind of service that holds it:
`gateway.paceline`, `target.paceline` or `draft.paceline`, as a DNS name among its subject alternative names. A client
checks that the server is of the kind it wants, and a server checks the kind of its client. A compromised draft worker
cannot pass for a gateway.
"""

from __future__ import annotations

import grpc

from paceline.tls import Certificates

GATEWAY = "gateway.paceline"
TARGET = "target.paceline"
DRAFT = "draft.paceline"


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return credentials from the files as they are now; a channel keeps them for its life."""
    pem = certificates.pem
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


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
