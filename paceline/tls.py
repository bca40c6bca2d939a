"""Certificate files, and noticing that they were replaced. No network library is imported here."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]
"""Of each file: when it changed, its size and its number. A rotated secret in Kubernetes differs in all three."""


class CertificateError(Exception):
    """The files are no certificate that can be used; the text names them."""


@dataclass(frozen=True, slots=True)
class PemFiles:
    """What the files hold."""

    certificate: bytes
    key: bytes
    authority: bytes | None


class Certificates:
    """A certificate with its key, and the authority whose certificates are believed, as files that may be replaced.

    `pem` is looked at for every new connection, so that a renewed certificate needs no restart. Files that do not
    belong together, as in the middle of a rotation, are passed over: what was there before counts until they do.
    """

    def __init__(self, certificate: Path, key: Path, authority: Path | None = None) -> None:
        """Raises `CertificateError`."""
        self.certificate = certificate
        self.key = key
        self.authority = authority
        self._stamp: Stamp | None = self._look()
        self._pem = self._read()

    @property
    def pem(self) -> PemFiles:
        """The newest that is whole. The same object for as long as nothing changes. Any thread."""
        before = self._stamp
        stamp: Stamp | None = None
        try:
            stamp = self._look()
            if stamp != before:
                self._pem = self._read()
                log.info("certificate %s was replaced", self.certificate)
        except CertificateError as error:
            if stamp != before:  # once, not for every connection
                log.warning("the certificate stays as it was: %s", error)
        self._stamp = stamp
        return self._pem

    def server_context(self) -> ssl.SSLContext:
        """For a server whose clients need no certificate. Raises `CertificateError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            raise CertificateError(f"{self.certificate} and {self.key} cannot be used together: {error}") from error
        return context

    def _look(self) -> Stamp:
        try:
            stats = [path.stat() for path in self._paths()]
        except OSError as error:
            raise CertificateError(f"{error.filename} cannot be read: {error.strerror}") from error
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)

    def _read(self) -> PemFiles:
        context = self.server_context()  # the key is the certificate's, or this raises
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
    """An `ssl.SSLContext` that serves each new connection with the certificate that the files hold then.

    Give `context` to the server. OpenSSL asks for the right one when a client has said hello.
    """

    def __init__(self, certificates: Certificates) -> None:
        """Raises `CertificateError`."""
        self.context = certificates.server_context()
        self.context.sni_callback = self._choose  # is called for clients that name nobody, too
        self._certificates = certificates
        self._pem = certificates.pem
        self._current = self.context

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        pem = self._certificates.pem
        if pem is not self._pem:
            try:
                self._current = self._certificates.server_context()
            except CertificateError as error:  # replaced again this very moment
                log.warning("the certificate stays as it was: %s", error)
            else:
                self._pem = pem
        connection.context = self._current
