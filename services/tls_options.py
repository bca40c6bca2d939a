"""The certificate options that all services have: all of them, or none."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from paceline.tls import CertificateError, Certificates
from paceline_services.service_entrypoint import ServiceStartError


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Mutual TLS between services."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="this service's certificate for other services")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority that signed all services' certificates")


def service_certificates(options: argparse.Namespace) -> Certificates | None:
    """What `add_tls_options` asked for; None: services talk in the clear. Raises `ServiceStartError`."""
    return load_certificates({name: getattr(options, name) for name in ("tls_cert", "tls_key", "tls_ca")})


def load_certificates(files: Mapping[str, Path | None]) -> Certificates | None:
    """Options by name: certificate, key and, perhaps, authority. Raises `ServiceStartError` if only some are given."""
    given = [path for path in files.values() if path is not None]
    if not given:
        return None
    if missing := [f"--{name.replace('_', '-')}" for name, path in files.items() if path is None]:
        raise ServiceStartError(f"{' and '.join(missing)} must be given, too: TLS needs all of its files")
    try:
        return Certificates(*given)
    except CertificateError as error:
        raise ServiceStartError(f"TLS cannot be set up: {error}") from error
