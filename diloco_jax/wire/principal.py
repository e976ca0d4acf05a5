"""Principals: the owners of certificates, by role, and by name if there are several.

A certificate carries its principal as a URI, `diloco:island:v6e`, and its files are
named after it, `island.v6e.pem`. The name that an island claims is compared with the
certificate of its connection at every hello, upload and fetch. Reports belong to the
stream of a hello.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509

from diloco_jax.protocol.messages import ISLAND_NAME
from diloco_jax.wire.errors import REVOKED_CODE, Refused, SecurityError

logger = logging.getLogger(__name__)

NO_NAME = r"\A\Z"
NAMES = {
    "coordinator": NO_NAME,
    "worker": r"\A[0-9]{1,64}\Z",
    "island": ISLAND_NAME,
    "reader": NO_NAME,
    "operator": NO_NAME,
}
"""Patterns of the names of principals by role."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a key of its own."""

    role: str
    """One of `NAMES`."""
    name: str = ""
    """Name of an island, or number of a worker; empty for other roles."""

    @property
    def uri(self) -> str:
        """The principal's name in its certificate."""
        return ":".join(filter(None, ("diloco", self.role, self.name)))

    @property
    def stem(self) -> str:
        """The name of the principal's files, without .pem and .key."""
        return ".".join(filter(None, (self.role, self.name)))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.role, self.name)))


COORDINATOR = Principal(role="coordinator")
READER = Principal(role="reader")
"""Looks on: `diloco status`."""
OPERATOR = Principal(role="operator")
"""Steers a run from outside."""


def island(name: str) -> Principal:
    """Return the principal of an island."""
    return Principal(role="island", name=name)


def worker(number: int) -> Principal:
    """Return the principal of a worker of the coordinator."""
    return Principal(role="worker", name=str(number))


def of_uri(uri: str) -> Principal | None:
    """Return the principal that a URI names; None if it names none."""
    found = _of(*uri.removeprefix("diloco:").partition(":")[::2])
    return found if found is not None and found.uri == uri else None


def of_stem(stem: str) -> Principal | None:
    """Return the principal whose files have this name; None if there is none."""
    found = _of(*stem.partition(".")[::2])
    return found if found is not None and found.stem == stem else None


def _of(role: str, name: str) -> Principal | None:
    known = role in NAMES and re.search(NAMES[role], name)
    return Principal(role=role, name=name) if known else None


def require(caller: Principal | None, wanted: Principal) -> None:
    """Raise Refused unless the caller is the principal whom a call is for.

    caller: None if the address is served without TLS; then every caller is accepted.
    """
    if caller is None or caller == wanted:
        return
    how = f"--add --islands {wanted.name}" if wanted.role == "island" else "--add"
    raise Refused(
        "identity",
        f"this is for the {wanted}, and the caller's certificate is that of {caller}; "
        f"start it with the {wanted.stem}.pem and .key of the {wanted} (`diloco certs "
        f"DIR {how}` makes them)",
    )


def require_run(call: Any, run_id: str) -> None:
    """Raise Refused unless a call is of the run that this process serves."""
    if call.run_id != run_id:
        raise Refused(
            "run_id",
            f"this process serves run {run_id}, the call is of run {call.run_id}; "
            f"check the coordinator's address",
        )


def mismatch(found: Principal | None, field: str, *wanted: Principal) -> str:
    """Explain why a server is none of the principals that may answer; empty if it is
    one. field: the config's, with the address that was dialled."""
    if found in wanted:
        return ""
    return (
        f"that is the certificate of {found or 'nobody'}, and has to be that of "
        f"{' or of the '.join(map(str, wanted))}; check {field}, and what listens there"
    )


REVOKED = "revoked.txt"
"""In the coordinator's folder: a serial number in hex per line, and what it was."""
READ_AGAIN_S = 1.0
MOST_KNOWN = 4096
"""Certificates whose principals are remembered."""


class Peers:
    """The peers of a server. Any thread may ask."""

    def __init__(self, folder: Path | None) -> None:
        """folder: with the server's certificates; its `revoked.txt` is read again when
        it changes. None: there is no TLS, and nobody is known or revoked."""
        self._path = folder / REVOKED if folder is not None else None
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[Principal, int]] = {}
        """Principal and serial number by certificate."""
        self._revoked: frozenset[int] = frozenset()
        self._changed: tuple[int, ...] | None = None
        self._looked = float("-inf")

    def identify(self, pem: bytes) -> Principal | None:
        """Return whose certificate a connection has; None without TLS. Raises
        SecurityError if it names nobody, Refused if it is revoked."""
        if self._path is None:
            return None
        with self._lock:
            found = self._known.get(pem)
            if found is None:
                found = _read(pem)
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[pem] = found
        caller, serial = found
        if self.is_revoked(serial):
            raise Refused(
                REVOKED_CODE,
                f"the certificate of {caller}, serial number {serial:x}, is revoked; "
                f"ask for another one (`diloco certs DIR --add`)",
            )
        return caller

    def is_revoked(self, serial: int) -> bool:
        """Tell whether the certificate of this serial number is revoked."""
        with self._lock:
            now = time.monotonic()
            if self._path is not None and now >= self._looked + READ_AGAIN_S:
                self._looked = now
                self._look(self._path)
            return serial in self._revoked

    def _look(self, path: Path) -> None:
        """Read the serial numbers again, if the file changed."""
        try:
            # By more than its time: a copy may keep that.
            found = path.stat()
            changed: tuple[int, ...] = found.st_ino, found.st_mtime_ns, found.st_size
            if changed != self._changed:
                self._revoked = frozenset(serials(path.read_text()))
                logger.info("%d certificates are revoked", len(self._revoked))
        except FileNotFoundError:
            changed, self._revoked = (), frozenset()
        except (OSError, ValueError) as error:
            # A peer that was shut out stays so.
            logger.error("%s cannot be read, and is left as it was: %s", path, error)
            return
        self._changed = changed


def serials(text: str) -> list[int]:
    """Return the serial numbers in a `revoked.txt`. Raises ValueError, naming the line,
    if one is no number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        try:
            found += [int(words[0], 16)] if words else []
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
