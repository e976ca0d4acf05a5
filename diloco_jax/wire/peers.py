"""Tell who calls, from the certificate of the connection."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from cryptography import x509

from diloco_jax.wire.errors import REVOKED_CODE, Refused, SecurityError
from diloco_jax.wire.principal import Principal, of_uri

logger = logging.getLogger(__name__)

REVOKED = "revoked.txt"
"""In the coordinator's folder: a serial number in hex per line, and what it was."""
READ_AGAIN_S = 1.0
MOST_KNOWN = 4096
"""Certificates whose principals are remembered."""


class Peers:
    """The peers of a server. Any thread may ask."""

    def __init__(self, folder: Path) -> None:
        """folder: with the coordinator's certificates; its `revoked.txt` is read
        again when it changes."""
        self._path = folder / REVOKED
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[Principal, int]] = {}
        """Principal and serial number by certificate."""
        self._revoked: frozenset[int] = frozenset()
        self._changed: tuple[int, ...] | None = None
        self._looked = float("-inf")

    def identify(self, pem: bytes) -> Principal:
        """Return whose certificate a connection has. Raises SecurityError if it names
        nobody, Refused if it is revoked."""
        caller, serial = self.named_in(pem)
        if self.is_revoked(serial):
            raise revoked(caller, serial)
        return caller

    def named_in(self, pem: bytes) -> tuple[Principal, int]:
        """Return whose certificate it is, and its serial number, though it may be
        revoked. Raises SecurityError if it names nobody."""
        with self._lock:
            found = self._known.get(pem)
            if found is None:
                found = _read(pem)
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[pem] = found
            return found

    def is_revoked(self, serial: int) -> bool:
        """Tell whether the certificate of this serial number is revoked."""
        with self._lock:
            self._look()
            return serial in self._revoked

    def _look(self) -> None:
        """Read the serial numbers again, if the file changed."""
        now = time.monotonic()
        if now < self._looked + READ_AGAIN_S:
            return
        self._looked = now
        try:
            # By more than its time: a copy may keep that.
            found = self._path.stat()
            changed: tuple[int, ...] = found.st_ino, found.st_mtime_ns, found.st_size
            if changed != self._changed:
                self._revoked = frozenset(serials(self._path.read_text()))
                logger.info("%d certificates are revoked", len(self._revoked))
        except FileNotFoundError:
            changed, self._revoked = (), frozenset()
        except (OSError, ValueError) as error:
            # A peer that was shut out stays so.
            logger.error(
                "%s cannot be read, and is left as it was: %s", self._path, error
            )
            return
        self._changed = changed


def revoked(whose: Principal, serial: int) -> Refused:
    """Return the error for whoever comes with a revoked certificate."""
    return Refused(
        REVOKED_CODE,
        f"the certificate of {whose}, serial number {serial:x}, is revoked; ask for "
        f"another one (`diloco certs DIR --add`)",
    )


def serials(text: str) -> list[int]:
    """Return the serial numbers in a `revoked.txt`. Raises ValueError, naming the line,
    if one is no number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            found.append(int(words[0], 16))
        except ValueError:
            raise ValueError(f"line {number}: {words[0]!r} is no hex number") from None
    return found


def principal_of(certificate: x509.Certificate) -> Principal | None:
    """Return who a certificate belongs to; None if it names nobody."""
    try:
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    found = [principal for uri in uris if (principal := of_uri(uri))]
    return found[0] if len(found) == 1 else None


def _read(pem: bytes) -> tuple[Principal, int]:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise SecurityError(
            f"the peer's certificate cannot be read: {error}"
        ) from error
    principal = principal_of(certificate)
    if principal is None:
        subject = certificate.subject.rfc4514_string()
        raise SecurityError(
            f"the peer's certificate ({subject}) names no role and no island; make "
            f"certificates with this version's `diloco certs`"
        )
    return principal, certificate.serial_number
