"""A local run is closed to other users of its machine.

Loopback is open to all of them. So the run's processes prove by keys of the run's own
who they are, as processes on several machines do. Only the owner reads these keys and
the other files of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import Config, Placement
from diloco_jax.wire import addresses
from diloco_jax.wire.certificates import CA_DAYS, add, make_certificates, principals
from diloco_jax.wire.principal import island

OTHERS = 0o077
"""Permissions of everybody but the owner."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Have this process and those that it starts make files for the owner alone."""
    before = os.umask(OTHERS)
    os.umask(before | OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def with_keys(config: Config, workdir: Path) -> Config:
    """Return the config of a local run with the keys in its workdir, which are made if
    they are missing.

    A run with certificates of its config, or with `placement.insecure`, has none. Those
    that it had before it was stopped are put aside.
    """
    placement, folder = config.placement, workdir / run_files.KEYS
    host, _ = addresses.parse_address(placement.bind)
    own = are_own(placement, workdir)
    foreign = placement.certificates and not own
    if foreign or placement.insecure or not addresses.is_loopback(host):
        if not own and folder.exists():
            folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}"))
        return config
    names = (*config.islands, *placement.admit)
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        make_certificates(scratch, [], CA_DAYS, islands=names)
        scratch.rename(folder)
    here = principals(folder)
    if missing := [name for name in names if island(name) not in here]:
        add(folder, [], CA_DAYS, islands=missing)
    return dataclasses.replace(config, placement=with_own_keys(placement, workdir))


def are_own(placement: Placement, workdir: Path) -> bool:
    """Tell whether the placement names the keys in the workdir of a local run, as a
    config that was copied from there does."""
    folder = workdir / run_files.KEYS
    given = placement.certificates
    return bool(given) and Path(given).resolve() == folder.resolve()


def with_own_keys(placement: Placement, workdir: Path) -> Placement:
    """Return the placement with the keys in the workdir of a local run, if it names no
    certificates and there are such keys."""
    folder = workdir / run_files.KEYS
    if placement.certificates or not folder.is_dir():
        return placement
    return dataclasses.replace(placement, certificates=str(folder))
