"""A launch's certificates: made on this machine, and packed by role for the others.

The authority's key stays here.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

from cryptography import x509

from diloco_jax.launch.order import COORDINATOR
from diloco_jax.wire.certificates import add_names, make_certificates
from diloco_jax.wire.errors import SecurityError

DAYS = 365
ROLES = (COORDINATOR, "island")


def prepare_certificates(folder: Path, hosts: tuple[str, ...]) -> None:
    """Make certificates for `hosts` in `folder`, and ROLE.tar of each role's three
    files: `ca.pem`, `ROLE.pem`, `ROLE.key`.

    Existing files are kept. Raises SecurityError if they cannot be completed.
    """
    if not (folder / "ca.pem").exists():
        make_certificates(folder, hosts, DAYS)
    elif missing := [host for host in hosts if host not in _known_hosts(folder)]:
        add_names(folder, missing, DAYS)
    for role in ROLES:
        _pack(folder, role)


def digest(folder: Path, role: str) -> str:
    """Return the SHA-256 of a role's ROLE.tar; empty if there is none."""
    try:
        packed = (folder / f"{role}.tar").read_bytes()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(packed).hexdigest()


def _known_hosts(folder: Path) -> set[str]:
    path = folder / f"{COORDINATOR}.pem"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise SecurityError(
            f"{path} cannot be read as a coordinator's certificate ({error}); make a "
            f"new authority in another folder (--certificates)"
        ) from error
    return {str(name.value) for name in names.value}


def _pack(folder: Path, role: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("ca.pem", f"{role}.pem", f"{role}.key"):
            entry = tarfile.TarInfo(name)
            content = (folder / name).read_bytes()
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    path = folder / f"{role}.tar"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(packed.getvalue())
