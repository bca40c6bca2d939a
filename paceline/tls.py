"""Certificate files that may be replaced while a service runs. Imports no network library."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]
"""Modification time, size and inode of each file. Rotating a secret in Kubernetes changes all three."""


class CertificateError(Exception):
    """The files hold no usable certificate; the text names them."""


@dataclass(frozen=True, slots=True)
class PemFiles:
    """The contents of the files."""

    certificate: bytes
    key: bytes
    authority: bytes | None


class Certificates:
    """A certificate with its key, and the authority that verifies peers.

    `pem` checks the files for every new connection, so a renewed certificate needs no restart. While the files do not
    match, as in the middle of a rotation, the previous contents stay in use.
    """

    def __init__(self, certificate: Path, key: Path, authority: Path | None = None) -> None:
        """Raises `CertificateError`."""
        self.certificate = certificate
        self.key = key
        self.authority = authority
        self._stamp: Stamp | None = self._read_stamp()
        self._pem = self._read_pem()

    @property
    def pem(self) -> PemFiles:
        """The newest contents that are valid. The same object until the files change. Any thread."""
        previous = self._stamp
        stamp: Stamp | None = None
        try:
            stamp = self._read_stamp()
            if stamp != previous:
                self._pem = self._read_pem()
                log.info("certificate %s was replaced", self.certificate)
        except CertificateError as error:
            if stamp != previous:  # once per change, not for every connection
                log.warning("the previous certificate stays in use: %s", error)
        self._stamp = stamp
        return self._pem

    def server_context(self) -> ssl.SSLContext:
        """Return a context for a server whose clients need no certificate. Raises `CertificateError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            raise CertificateError(f"{self.certificate} and {self.key} cannot be used together: {error}") from error
        return context

    def _read_stamp(self) -> Stamp:
        try:
            stats = [path.stat() for path in self._paths()]
        except OSError as error:
            raise CertificateError(f"{error.filename} cannot be read: {error.strerror}") from error
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)

    def _read_pem(self) -> PemFiles:
        context = self.server_context()  # raises if key and certificate do not match
        try:
            if self.authority is not None:
                context.load_verify_locations(self.authority)
            texts = [path.read_bytes() for path in self._paths()]
        except (OSError, ValueError) as error:
            raise CertificateError(f"{self.authority or self.certificate} cannot be used: {error}") from error
        return PemFiles(texts[0], texts[1], texts[2] if self.authority is not None else None)

    def _paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.authority) if path is not None]


class ServerContext:
    """An `ssl.SSLContext` that serves each new connection with the current certificate.

    Pass `context` to the server. OpenSSL calls back at each client hello.
    """

    def __init__(self, certificates: Certificates) -> None:
        """Raises `CertificateError`."""
        self.context = certificates.server_context()
        self.context.sni_callback = self._choose  # also called for clients that name no server
        self._certificates = certificates
        self._pem = certificates.pem
        self._current = self.context

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        pem = self._certificates.pem
        if pem is not self._pem:
            try:
                self._current = self._certificates.server_context()
            except CertificateError as error:  # replaced again in between
                log.warning("the previous certificate stays in use: %s", error)
            else:
                self._pem = pem
        connection.context = self._current
