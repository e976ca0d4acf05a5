"""A launch's certificates: made on this machine, and packed by machine for the others.

The authority's key stays here.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from diloco_jax.launch.order import COORDINATOR
from diloco_jax.wire.certificates import add, make_certificates, principals, renew
from diloco_jax.wire.errors import SecurityError
from diloco_jax.wire.peers import REVOKED
from diloco_jax.wire.principal import COORDINATOR as PRINCIPAL
from diloco_jax.wire.principal import island, of_stem, worker

DAYS = 90
"""Days for which a launch's certificates are valid."""
RENEWED_DAYS = 45
"""Days before its end in which a certificate is made anew: at each create or run, and
by a watch."""


class Unrenewed(NamedTuple):
    """Certificates that could not be renewed."""

    days: int | None
    """Days until the first one ends; None = they are not here."""
    why: str


def prepare_certificates(
    folder: Path,
    hosts: tuple[str, ...],
    islands: tuple[str, ...],
    workers: int = 0,
) -> None:
    """Make certificates for the coordinator on `hosts`, for these islands and for so
    many workers in `folder`, and STEM.tar of each one's files (`files_of`).

    Existing files are kept unless they end soon. Raises SecurityError if they cannot be
    completed.
    """
    if not (folder / "ca.pem").exists():
        make_certificates(folder, hosts, DAYS, islands=islands, workers=workers)
    else:
        here = set(principals(folder))
        lacking = [name for name in islands if island(name) not in here]
        new = workers if any(w not in here for w in map(worker, range(workers))) else 0
        missing = [host for host in hosts if host not in _known_hosts(folder)]
        if missing or lacking or new:
            add(folder, missing, DAYS, islands=lacking, workers=new)
        renew(folder, DAYS, RENEWED_DAYS)
    serving = (PRINCIPAL, *map(worker, range(workers)))
    for who in (*serving, *map(island, islands)):
        _pack(folder, who.stem)


def keep_renewed(folder: Path, stems: Sequence[str]) -> Unrenewed | None:
    """Make the certificates anew that end soon, and STEM.tar of these stems.

    None is added: a name whose key was revoked gets no other one. Returns why it
    failed, or None.
    """
    try:
        here = [stem for stem in stems if (folder / f"{stem}.pem").exists()]
        if not here:
            return Unrenewed(None, f"{folder} has none of them")
        renew(folder, DAYS, RENEWED_DAYS)
        for stem in here:
            _pack(folder, stem)
    except (SecurityError, OSError, ValueError) as error:
        return Unrenewed(_days_left(folder, stems), str(error))
    return None


def files_of(folder: Path, stem: str) -> list[str]:
    """Name the files that a machine with the certificates of this stem gets: `ca.pem`,
    `STEM.pem`, `STEM.key`; and the list of revoked ones if there is one, unless it is
    an island's, which asks the coordinator."""
    owner = of_stem(stem)
    revoked = owner is not None and owner.role != "island"
    lists = [REVOKED] if revoked and (folder / REVOKED).exists() else []
    return ["ca.pem", f"{stem}.pem", f"{stem}.key", *lists]


def digest(folder: Path, stem: str) -> str:
    """Return the SHA-256 of STEM.tar; empty if there is none."""
    try:
        packed = (folder / f"{stem}.tar").read_bytes()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(packed).hexdigest()


def _days_left(folder: Path, stems: Sequence[str]) -> int:
    """Return the days until the first certificate ends; 0 if one cannot be read."""
    now = datetime.datetime.now(datetime.UTC)
    left = []
    for path in (folder / f"{stem}.pem" for stem in stems):
        try:
            if path.exists():
                certificate = x509.load_pem_x509_certificate(path.read_bytes())
                left.append((certificate.not_valid_after_utc - now).days)
        except (OSError, ValueError):
            left.append(0)
    return max(0, min(left, default=0))


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


def _pack(folder: Path, stem: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in files_of(folder, stem):
            entry = tarfile.TarInfo(name)
            content = (folder / name).read_bytes()
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    path, new = folder / f"{stem}.tar", folder / f"{stem}.tar.new"
    if path.exists() and path.read_bytes() == packed.getvalue():
        return
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(packed.getvalue())
    new.replace(path)
