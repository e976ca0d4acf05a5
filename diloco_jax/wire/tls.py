"""TLS of one principal: whose certificates peers have, and why one cannot be reached.

Certificates are read and checked before any socket is opened. gRPC says "unavailable"
for nearly every failure, so after one, and never before, the socket itself is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from diloco_jax.wire.addresses import parse_address
from diloco_jax.wire.certificates import REVOKED, principals, serials
from diloco_jax.wire.errors import (
    REVOKED_CODE,
    ConnectionLost,
    Refused,
    SecurityError,
    WireError,
)
from diloco_jax.wire.peers import READER, Principal, mismatch, of_uri

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """Files that one principal needs from the folder that `diloco certs` makes."""

    folder: Path
    who: Principal
    authority_pem: bytes
    """One certificate or, while an authority is replaced by another, both."""
    certificate_pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)

    @classmethod
    def load(cls, folder: str | Path, who: Principal) -> TlsFiles:
        """Read `ca.pem`, and the principal's certificate and key.

        Raises SecurityError naming the file if one is missing or unreadable, expired,
        not signed by the authority, not of a pair, or another principal's.
        """
        folder = Path(folder)
        files = cls(folder, who, *map(_read, _paths(folder, who)))
        files._check()
        return files

    @classmethod
    def load_given(cls, folder: str | Path, who: Principal) -> TlsFiles | None:
        """Load as `load` does; return None, for no TLS, if the folder is empty text."""
        return cls.load(folder, who) if str(folder) else None

    @classmethod
    def load_any(cls, folder: str | Path) -> TlsFiles:
        """Load the reader's files if the folder has them, or else those of any
        principal.

        It serves people who ask for the state of a run. Raises SecurityError as `load`
        does.
        """
        here = principals(folder)
        return cls.load(folder, READER if READER in here or not here else here[0])

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """The files of authority, certificate and key."""
        return _paths(self.folder, self.who)

    def server_credentials(self) -> Any:
        """Return `grpc.ServerCredentials` that let in only what the authority signed.

        Files that change are read again at the next connection, so that certificates
        are renewed without a restart; files that are not fit leave things as they are.
        """

        def configuration(files: TlsFiles) -> Any:
            return grpc.ssl_server_certificate_configuration(
                [(files.key_pem, files.certificate_pem)],
                root_certificates=files.authority_pem,
            )

        renewed = Renewed(self, configuration)
        last = renewed.current()

        def changed() -> Any:
            nonlocal last
            before, last = last, renewed.current()
            return None if last is before else last

        return grpc.dynamic_ssl_server_credentials(
            last, changed, require_client_authentication=True
        )

    def channel_credentials(self) -> Any:
        """Return `grpc.ChannelCredentials` that trust only the authority."""
        return grpc.ssl_channel_credentials(
            self.authority_pem, self.key_pem, self.certificate_pem
        )

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client's plain socket, which trusts only the
        authority. It compares the coordinator's name with its certificate.
        """
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def peer_context(self) -> ssl.SSLContext:
        """Return such a context for other islands: the certificate of an island names
        the island, which the caller compares, and no machine."""
        context = self.client_context()
        context.check_hostname = False
        return context

    def server_contexts(self) -> Callable[[], ssl.SSLContext]:
        """Return a function that gives the context of the next connection; see
        `server_credentials`."""
        return Renewed(self, TlsFiles._server_context).current

    def _server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # Nobody resumes sessions, and a ticket would look like an answer.
        context.num_tickets = 0
        return self._filled(context)

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        # No stricter than gRPC, which serves the other port.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority_pem.decode())
        # The standard library reads keys only from files.
        with _private_file(self.certificate_pem + self.key_pem) as pair:
            context.load_cert_chain(pair)
        return context

    def _check(self) -> None:
        authority_path, path, key_path = self.paths
        authorities = _parse(authority_path, self.authority_pem)
        certificate = _parse(path, self.certificate_pem)[0]
        signers = [one for one in authorities if _signed(certificate, one)]
        if not signers:
            raise SecurityError(
                f"{path} is not signed by {authority_path}: they come from different "
                f"runs of `diloco certs`; copy both from the same folder"
            )
        _check_dates(signers[0], authority_path)
        _check_dates(certificate, path)
        if (found := principal_of(certificate)) != self.who:
            raise SecurityError(
                f"{path} is the certificate of {found or 'nobody'}, and has to be that "
                f"of {self.who}; make it with `diloco certs`"
            )
        try:
            key = serialization.load_pem_private_key(self.key_pem, password=None)
        except (ValueError, TypeError) as error:
            raise SecurityError(
                f"{key_path} is not an unencrypted private key in PEM form ({error}); "
                f"make it with `diloco certs`"
            ) from error
        if key.public_key() != certificate.public_key():
            raise SecurityError(
                f"{key_path} does not belong to {path}; copy both from the same "
                f"folder made by `diloco certs`"
            )


class Renewed(Generic[Made]):
    """Something made of a principal's files, made anew once they change: certificates
    are renewed without a restart. Any thread may ask.

    Files that are not fit, as between the renewal of a key and that of its certificate,
    leave things as they are.
    """

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], Made]) -> None:
        self.files = files
        """Those that count."""
        self._make, self._made = make, make(files)
        self._seen = [_stamp(path) for path in files.paths]
        self._lock = threading.Lock()

    def current(self) -> Made:
        """Return what was made of the newest files."""
        with self._lock:
            try:
                stamps = [_stamp(path) for path in self.files.paths]
                if stamps != self._seen:
                    found = TlsFiles.load(self.files.folder, self.files.who)
                    if found != self.files:
                        self._made, self.files = self._make(found), found
                        logger.info("%s is read again", found.paths[1])
                    self._seen = stamps
            except (OSError, SecurityError) as error:
                logger.error("the certificates stay as they were: %s", error)
                # What could not be read may be readable the next time.
                if not isinstance(error.__cause__ or error, OSError):
                    self._seen = stamps
            return self._made


@contextlib.contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """Yield the name of a file that its user alone can open: in memory where the system
    has that, since no folder for temporary files may be writable."""
    in_memory = hasattr(os, "memfd_create")
    with (
        os.fdopen(os.memfd_create("pair"), "wb")
        if in_memory
        else tempfile.NamedTemporaryFile()
    ) as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}" if in_memory else file.name


def _paths(folder: Path, who: Principal) -> tuple[Path, Path, Path]:
    return folder / "ca.pem", folder / f"{who.stem}.pem", folder / f"{who.stem}.key"


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with a file, more than its time, which a copy may keep; empty
    if there is none. Raises OSError if that cannot be told."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SecurityError(
            f"cannot read {path} ({error.strerror}); make certificates with "
            f"`diloco certs`, or give the folder that holds them"
        ) from error


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _parse(path: Path, content: bytes) -> list[x509.Certificate]:
    """Return the certificates in a file, one or more."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise SecurityError(
            f"{path} is not a certificate in PEM form; make it with `diloco certs`"
        ) from error


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not start <= now <= end:
        raise SecurityError(
            f"{path} is valid from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, "
            f"and this machine's clock says {now:%Y-%m-%d %H:%M}; renew it with "
            f"`diloco certs --add`, or set the clock"
        )


READ_AGAIN_S = 1.0
MOST_CERTIFICATES = 4096
"""Certificates whose principals are remembered."""


class Peers:
    """The peers of a server. Any thread may ask."""

    def __init__(self, folder: Path | None) -> None:
        """folder: with the server's certificates; its `revoked.txt` is read again when
        it changes. None: there is no TLS, and nobody is known or revoked.

        Raises SecurityError if the list is there and cannot be read.
        """
        self._path = folder / REVOKED if folder is not None else None
        self._lock = threading.Lock()
        self._revoked: frozenset[int] = frozenset()
        self._seen: tuple[int, ...] = ()
        self._looked = float("-inf")
        if self._path is not None:
            try:
                self._read(self._path)
            except (OSError, ValueError) as error:
                raise SecurityError(
                    f"{self._path} cannot be read ({error}), so nobody knows who is "
                    f"shut out; mend it, or copy it anew from where `diloco certs` ran"
                ) from error

    def identify(self, pem: bytes) -> Principal | None:
        """Return whose certificate a connection has; None without TLS. Raises
        SecurityError if it names nobody, Refused if it is revoked."""
        if self._path is None:
            return None
        caller, serial = _identity(pem)
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
        """Read the serial numbers again, if the file changed and can be read."""
        before = self._seen
        try:
            self._read(path)
            if self._seen != before:
                logger.info("%d certificates are revoked", len(self._revoked))
        except (OSError, ValueError) as error:
            # A peer that was shut out stays so.
            logger.error("%s cannot be read, and is left as it was: %s", path, error)

    def _read(self, path: Path) -> None:
        stamp = _stamp(path)
        if stamp != self._seen:
            text = path.read_text() if stamp else ""
            self._revoked, self._seen = frozenset(serials(text)), stamp


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


@functools.lru_cache(MOST_CERTIFICATES)
def _identity(pem: bytes) -> tuple[Principal, int]:
    """Return principal and serial number of a certificate."""
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


def dial(
    address: str,
    tls: Renewed[ssl.SSLContext] | None,
    timeout_s: float,
    *answers: Principal,
    field: str = "the coordinator's address",
) -> socket.socket:
    """Connect to a server, and shake hands if there is TLS.

    answers: principals one of which has to answer; none: whoever has this address in
    its certificate. field: the config's, with the address. Raises ConnectionLost or
    SecurityError, each with cause and remedy. Whether the server lets this process in
    shows only as it says its first word.
    """
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        why, remedy = f"no connection within {timeout_s:g} s ({error})", field
        if isinstance(error, socket.gaierror):
            why = f"host name {host!r} is not known ({error.strerror})"
        elif isinstance(error, ConnectionRefusedError):
            why, remedy = "nothing listens there", f"{field}, and that it runs"
        raise ConnectionLost(
            f"{address}: {why}; check {remedy}, the network between and its firewalls"
        ) from error
    if tls is None:
        return connection
    with connection:  # Its descriptor belongs to the secured one from here on.
        try:
            secured = tls.current().wrap_socket(connection, server_hostname=host)
        except OSError as error:
            raise _no_handshake(address, tls.files, timeout_s, error) from error
    try:
        certificate = x509.load_der_x509_certificate(
            secured.getpeercert(binary_form=True) or b""
        )
        found = principal_of(certificate)
        if answers and (wrong := mismatch(found, field, *answers)):
            raise SecurityError(f"{address}: {wrong}")
        if Peers(tls.files.folder).is_revoked(certificate.serial_number):
            raise SecurityError(
                f"{address}: the certificate of {found} there, serial number "
                f"{certificate.serial_number:x}, is revoked; give it another one "
                f"(`diloco certs DIR --add`)"
            )
    except BaseException:
        secured.close()
        raise
    return secured


def _no_handshake(
    address: str, files: TlsFiles, timeout_s: float, error: OSError
) -> WireError:
    """Explain why a server that was connected to is not spoken with."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return SecurityError(
            f"{address}: the certificate there does not fit {files.paths[0]} or this "
            f"address: {error.verify_message}; use certificates of one authority, and "
            f"add the address with `diloco certs --add --hosts` if it is not named "
            f"there"
        )
    if isinstance(error, TimeoutError):
        # A slow peer may have certificates all the same.
        return ConnectionLost(
            f"{address}: no TLS handshake within {timeout_s:g} s; check that this is "
            f"the right address; {large_lost(address)}"
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        # A server without TLS answers in its own way; a relay has nobody to ask.
        return ConnectionLost(
            f"{address}: the connection ended before an answer ({error}); check that "
            f"the server runs, if a relay or load balancer listens there"
        )
    return SecurityError(
        f"{address} does not answer with TLS ({error}) and this process has "
        f"certificates; give the server there its own too, or neither"
    )


def explain(address: str, tls: TlsFiles | None, timeout_s: float) -> WireError | None:
    """Return why gRPC gets no answer there, with its remedy, or None if connecting
    works as it should."""

    def context(files: TlsFiles | None) -> ssl.SSLContext:
        unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        made = files.client_context() if files is not None else unchecked
        made.set_alpn_protocols(["h2"])
        return made

    renewed = Renewed(tls, context) if tls is not None else None
    try:
        with dial(address, renewed, timeout_s) as connection:
            if tls is None:
                with contextlib.suppress(OSError):  # No TLS there, as expected.
                    context(None).wrap_socket(connection).close()
                    return SecurityError(
                        f"{address} speaks TLS and this process has no certificates; "
                        f"give the folder made by `diloco certs`"
                    )
                return None
            # In TLS 1.3 the server judges our certificate after our side of the
            # handshake.
            verdict = "it closed the connection"
            try:
                if connection.recv(1):
                    return None
            except TimeoutError:
                return None
            except OSError as error:
                verdict = str(error)
    except WireError as error:
        return error
    return SecurityError(
        f"{address} does not accept {tls.paths[1]} ({verdict}); use certificates of "
        f"the coordinator's authority, and see the coordinator's log"
    )


def large_lost(address: str) -> str:
    """Return what is to be tried where a peer accepts connections and what it sends
    does not come."""
    return (
        f"its machine or the network between is overloaded, or large packets are lost "
        f"on the way (MTU, firewall): try `ping -M do -s 1472 "
        f"{parse_address(address)[0]}`, and lower the MTU of this machine if that fails"
    )
