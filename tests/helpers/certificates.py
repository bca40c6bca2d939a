"""Certificate files for tests."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from paceline.tls import Certificates


class Authority:
    """Signs certificates, and writes them to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def issue(self, *names: str, file: str = "", expired: bool = False, edge: bool = False) -> Certificates:
        """Issue a certificate for these names, in files named after the first or `file`. `edge`: clients need none."""
        paths = self.replace(*names, file=file, expired=expired)
        return Certificates(*paths[:2] if edge else paths)

    def replace(self, *names: str, file: str = "", expired: bool = False, folder: Path | None = None) -> list[Path]:
        """Write the files of a certificate, also over existing ones. Returns certificate, key and authority."""
        now = datetime.now(UTC)
        not_after = now - timedelta(days=1) if expired else None
        cert = self.ca.issue_cert(*names, not_before=now - timedelta(days=9), not_after=not_after)
        paths = [(folder or self.folder) / f"{file or names[0]}.{kind}" for kind in ("crt", "key", "ca")]
        chain = b"".join(each.bytes() for each in cert.cert_chain_pems)
        for path, text in zip(paths, (chain, cert.private_key_pem.bytes(), self.pem), strict=True):
            path.write_bytes(text)
        return paths

    def context(self) -> ssl.SSLContext:
        """Return the context of a client that trusts only this authority."""
        return ssl.create_default_context(cadata=self.pem.decode())
