"""Certificates made for a test, in files as services are given them."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from paceline.tls import Certificates


class Authority:
    """Signs certificates. `folder`: where files go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def issue(self, *names: str, place: str = "", expired: bool = False, edge: bool = False) -> Certificates:
        """A certificate for these names, in files called after the first, or `place`. `edge`: clients need none."""
        paths = self.replace(*names, place=place, expired=expired)
        return Certificates(*paths[:2] if edge else paths)

    def replace(self, *names: str, place: str = "", expired: bool = False) -> list[Path]:
        """The same, in files that somebody may read already: certificate, key, authority."""
        over = datetime.now(UTC) - timedelta(days=1) if expired else None
        begun = datetime.now(UTC) - timedelta(days=9)
        cert = self.ca.issue_cert(*names, not_before=begun, not_after=over)
        paths = [self.folder / f"{place or names[0]}.{kind}" for kind in ("crt", "key", "ca")]
        chain = b"".join(each.bytes() for each in cert.cert_chain_pems)
        for path, text in zip(paths, (chain, cert.private_key_pem.bytes(), self.pem), strict=True):
            path.write_bytes(text)
        return paths

    def context(self) -> ssl.SSLContext:
        """Of a client that believes this authority alone."""
        return ssl.create_default_context(cadata=self.pem.decode())
