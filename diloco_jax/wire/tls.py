"""Certificates of one role, read and checked before any socket is opened."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any, Literal

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from diloco_jax.wire.errors import SecurityError

Role = Literal["coordinator", "island"]


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """Files that one role needs from the folder that `diloco certs` makes."""

    folder: Path
    role: Role
    authority_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)

    @classmethod
    def load(cls, folder: str | Path, role: Role) -> TlsFiles:
        """Read `ca.pem`, `ROLE.pem` and `ROLE.key`.

        Raises SecurityError naming the file if one is missing or unreadable, expired,
        not signed by the authority, or not of a pair.
        """
        folder = Path(folder)
        files = cls(
            folder,
            role,
            *(_read(folder / n) for n in ("ca.pem", f"{role}.pem", f"{role}.key")),
        )
        files._check()
        return files

    @classmethod
    def load_any(cls, folder: str | Path) -> TlsFiles:
        """Load the island's files, or the coordinator's where only these exist, as for
        a person who asks how the run stands. Raises SecurityError as `load` does."""
        islands = (Path(folder) / "island.pem").exists()
        return cls.load(
            folder,
            "coordinator"
            if not islands and (Path(folder) / "coordinator.pem").exists()
            else "island",
        )

    def server_credentials(self) -> Any:
        """Return `grpc.ServerCredentials` that let in only what the authority
        signed."""
        return grpc.ssl_server_credentials(
            [(self.key_pem, self.certificate_pem)],
            root_certificates=self.authority_pem,
            require_client_auth=True,
        )

    def channel_credentials(self) -> Any:
        """Return `grpc.ChannelCredentials` that trust only the authority."""
        return grpc.ssl_channel_credentials(
            self.authority_pem, self.key_pem, self.certificate_pem
        )

    def _check(self) -> None:
        authority_path = self.folder / "ca.pem"
        path, key_path = (self.folder / f"{self.role}.{e}" for e in ("pem", "key"))
        authority = _parse(authority_path, self.authority_pem)
        certificate = _parse(path, self.certificate_pem)
        for checked, checked_path in ((authority, authority_path), (certificate, path)):
            _check_dates(checked, checked_path)
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError) as error:
            raise SecurityError(
                f"{path} is not signed by {authority_path}: they come from different "
                f"runs of `diloco certs`; copy both from the same folder"
            ) from error
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SecurityError(
            f"cannot read {path} ({error.strerror}); make certificates with "
            f"`diloco certs`, or give the folder that holds them"
        ) from error


def _parse(path: Path, content: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(content)
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
