"""Make a run's own certificate authority and the certificates of its two roles.

Folder: `ca.pem`, `ca.key` (needed only to add hosts; keep it off the islands),
`coordinator.pem`, `coordinator.key`, `island.pem`, `island.key`. EC P-256 throughout.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_jax.wire.errors import SecurityError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
CA_DAYS = 3650
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*\.?")


def make_certificates(
    folder: str | Path,
    names: Iterable[str],
    days: int,
    *,
    replace: bool = False,
) -> None:
    """Write a new authority and both roles' certificates, valid for `days`.

    `names` are host names and IP addresses at which islands reach the coordinator.
    Raises SecurityError if the folder has an authority already, unless `replace`.
    """
    folder = Path(folder)
    if (folder / "ca.pem").exists() and not replace:
        raise SecurityError(
            f"{folder / 'ca.pem'} exists: a new authority would shut out every process "
            f"that has certificates of the old one; add names to it (`diloco certs "
            f"--add`), choose another folder, or replace it on purpose (`diloco certs "
            f"--replace`)"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name("diloco authority")
    certificate = (
        _builder(subject, subject, key.public_key(), key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    leaves = _leaves(certificate, key, [*LOCAL_NAMES, *names], days)
    _write(folder, {"ca": (certificate, key), **leaves})


def add_names(folder: str | Path, names: Iterable[str], days: int) -> None:
    """Sign both roles' certificates anew, the coordinator's with further names.

    Certificates given out before stay valid. Raises SecurityError if the folder does
    not hold the authority with its key.
    """
    folder = Path(folder)
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        coordinator = x509.load_pem_x509_certificate(
            (folder / "coordinator.pem").read_bytes()
        )
        key = serialization.load_pem_private_key(
            (folder / "ca.key").read_bytes(), password=None
        )
    except (OSError, ValueError, TypeError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.filename}: {error.strerror}"
        raise SecurityError(
            f"cannot add names to the certificates in {folder} ({why}); it needs "
            f"ca.pem, ca.key and coordinator.pem as `diloco certs` made them; without "
            f"--add it makes a new authority"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SecurityError(
            f"{folder / 'ca.key'} is no EC key; make a new authority with "
            f"`diloco certs --replace`"
        )
    _write(folder, _leaves(authority, key, [*_names_in(coordinator), *names], days))


def coordinator_names(folder: str | Path) -> list[str]:
    """Return the names and addresses in the coordinator's certificate."""
    path = Path(folder) / "coordinator.pem"
    return _names_in(x509.load_pem_x509_certificate(path.read_bytes()))


def _names_in(certificate: x509.Certificate) -> list[str]:
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(entry.value) for entry in known.value]


_Signed = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _leaves(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Iterable[str],
    days: int,
) -> dict[str, _Signed]:
    signed = {}
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    # People on the coordinator's machine ask for its status there.
    for role, usages in (("coordinator", [server, client]), ("island", [client])):
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(
                _name(f"diloco {role}"),
                authority.subject,
                key.public_key(),
                authority_key.public_key(),
                days,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        if role == "coordinator":
            builder = builder.add_extension(_alternative_names(names), critical=False)
        signed[role] = (builder.sign(authority_key, hashes.SHA256()), key)
    return signed


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    days: int,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        # One hour back, for machines whose clocks are behind.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        # RFC 5280 asks for it, and Python from 3.13 on insists.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), False
        )
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(names: Iterable[str]) -> x509.SubjectAlternativeName:
    entries: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            entries.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            if len(name) > 253 or not HOST_NAME.fullmatch(name):
                raise SecurityError(
                    f"name {name!r} is neither an IP address nor a host name (letters, "
                    f"digits, '-' and '.'); give it as islands dial it"
                ) from None
            entries.append(x509.DNSName(name))
    return x509.SubjectAlternativeName(entries)


def _write(folder: Path, signed: dict[str, _Signed]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for role, (certificate, key) in signed.items():
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = certificate.public_bytes(serialization.Encoding.PEM)
        _replace(folder / f"{role}.key", private, 0o600)
        _replace(folder / f"{role}.pem", public, 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(partial, path)
