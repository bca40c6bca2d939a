"""Options for mutual TLS between services."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from paceline.launcher import StartError
from paceline.tls import CertificateError, Certificates


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add --tls-cert, --tls-key and --tls-ca."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="this service's certificate for other services")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority that signed all services' certificates")


def service_certificates(options: argparse.Namespace) -> Certificates | None:
    """Return the certificates of `add_tls_options`; None: no TLS between services. Raises `StartError`."""
    return load_certificates({name: getattr(options, name) for name in ("tls_cert", "tls_key", "tls_ca")})


def load_certificates(files: Mapping[str, Path | None]) -> Certificates | None:
    """Return the certificates of these files, by option name, or None if no file is given.

    `files` has certificate, key and optionally authority, in this order. Raises `StartError` if a file is missing.
    """
    given = [path for path in files.values() if path is not None]
    if not given:
        return None
    if missing := [f"--{name.replace('_', '-')}" for name, path in files.items() if path is None]:
        raise StartError(f"{' and '.join(missing)} must be given, too: TLS needs all of its files")
    try:
        return Certificates(*given)
    except CertificateError as error:
        raise StartError(f"TLS cannot be set up: {error}") from error
