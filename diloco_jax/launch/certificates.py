"""A launch's certificates: made on this machine, and packed by machine for the others.

The authority's key stays here. Nobody renews them while a run goes on, so they last
longer than it may.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
from pathlib import Path

from cryptography import x509

from diloco_jax.config import LaunchConfig
from diloco_jax.launch.spec import LaunchSpec
from diloco_jax.wire.certificates import (
    REVOKED,
    add,
    coordinator_names,
    make_certificates,
    principals,
    renew,
)
from diloco_jax.wire.errors import SecurityError
from diloco_jax.wire.peers import COORDINATOR, island, of_stem, worker

MARGIN_DAYS = 14
"""Days for which certificates last beyond `launch.max_hours` and `linger_hours`."""
WITHOUT_END_DAYS = 365
"""Days for which they last if `launch.max_hours` is 0; in the last half of them, each
`create` or `run` makes them anew."""


def prepare_certificates(
    folder: Path, hosts: tuple[str, ...], spec: LaunchSpec
) -> None:
    """Make certificates for the coordinator on `hosts`, for the launch's islands and
    workers in `folder`, and STEM.tar of each one's files (`files_of`).

    Existing files are kept unless they end too soon. Raises SecurityError if they
    cannot be completed.
    """
    names, workers = [i.name for i in spec.islands], len(spec.workers)
    lasting, needed = days(spec.settings)
    if not (folder / "ca.pem").exists():
        make_certificates(folder, hosts, lasting, islands=names, workers=workers)
    else:
        here, known = set(principals(folder)), _known_hosts(folder)
        lacking = [name for name in names if island(name) not in here]
        new = workers if any(w not in here for w in map(worker, range(workers))) else 0
        missing = [host for host in hosts if host not in known]
        if missing or lacking or new:
            add(folder, missing, lasting, islands=lacking, workers=new)
        renew(folder, lasting, needed)
    for who in (COORDINATOR, *map(worker, range(workers)), *map(island, names)):
        _pack(folder, who.stem)


def days(settings: LaunchConfig) -> tuple[int, int]:
    """Return the days for which new certificates last, and those below which an old one
    is made anew."""
    if not settings.max_hours:
        return WITHOUT_END_DAYS, WITHOUT_END_DAYS // 2
    needed = math.ceil((settings.max_hours + settings.linger_hours) / 24)
    return needed + MARGIN_DAYS, needed + MARGIN_DAYS // 2


def files_of(folder: Path, stem: str) -> list[str]:
    """Name the files that a machine with the certificates of this stem gets: `ca.pem`,
    `STEM.pem`, `STEM.key`; and the list of revoked ones if there is one, unless it is
    an island's, which asks the coordinator."""
    owner = of_stem(stem)
    revoked = owner is not None and owner.role != "island"
    lists = [REVOKED] if revoked and (folder / REVOKED).exists() else []
    return ["ca.pem", f"{stem}.pem", f"{stem}.key", *lists]


def digest(folder: Path, stem: str) -> str:
    """Return a digest of STEM.tar that fits into a label; of nothing if there is
    none."""
    path = folder / f"{stem}.tar"
    packed = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(packed).hexdigest()[:32]


def _known_hosts(folder: Path) -> list[str]:
    try:
        return coordinator_names(folder)
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise SecurityError(
            f"{folder / 'coordinator.pem'} cannot be read as a coordinator's "
            f"certificate ({error}); make a new authority in another folder "
            f"(--certificates)"
        ) from error


def _pack(folder: Path, stem: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in files_of(folder, stem):
            entry = tarfile.TarInfo(name)
            content = (folder / name).read_bytes()
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    path, new = folder / f"{stem}.tar", folder / f"{stem}.tar.new"
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(packed.getvalue())
    new.replace(path)
