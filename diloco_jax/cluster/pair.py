"""The standby of `diloco run --with-standby`: where it is, and what files it leaves.

The first coordinator's workdir is that of the run, and the second one's is a folder in
it. Either may lead. Once no process of the run is left, `settle` makes one workdir of
the two, with the state of the one that led.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.cluster.commands import free_port
from diloco_jax.config import ConfigError, Placement
from diloco_jax.config.validation import require_followable
from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.coordinator.standby.name import read_name
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.observability.tape import closed_segments, put_aside
from diloco_jax.wire import addresses
from diloco_jax.workdir import held, holds_run

OPTION = "--with-standby"
WON, MOVING = f"{run_files.STANDBY}.won", f"{run_files.STANDBY}.moving"
"""Names of the standby's folder while `settle` is at work."""
SNAPSHOTS = f"{run_files.CHECKPOINTS}/coordinator"
STATE = (
    run_files.FACTS,
    run_files.LOG,
    run_files.PUBLISHES,
    SNAPSHOTS,
    run_files.SOURCE,
    run_files.ROSTER,
    run_files.SUMMARY,
    run_files.NODE,
)
"""Files from which a coordinator goes on, beside the tape."""


def require_pairable(placement: Placement) -> None:
    """Raise ConfigError if this placement cannot have a standby beside it."""
    require_followable(placement, OPTION)
    host, _ = addresses.parse_address(placement.bind)
    for field, wrong in (
        ("bind", not addresses.is_loopback(host)),
        ("advertise", bool(placement.advertise)),
    ):
        if wrong:
            raise ConfigError(
                f"placement.{field} = {getattr(placement, field)!r} and {OPTION}: the "
                f"standby of a local run is at a loopback address, which no other "
                f"machine reaches; leave one of them out, or start both coordinators "
                f"with diloco coordinator"
            )


def with_standby(placement: Placement, workdir: Path) -> Placement:
    """Return the placement of a run with a standby in this workdir. Raises ConfigError
    as `require_pairable` does, and if it names a mandate elsewhere."""
    require_pairable(placement)
    if placement.mandate and not is_local(placement):
        raise ConfigError(
            f"placement.mandate = {placement.mandate!r} and {OPTION}, which has one in "
            f"its workdir; leave one of them out"
        )
    return dataclasses.replace(
        placement,
        mandate=str(workdir / run_files.MANDATE),
        standby=f"127.0.0.1:{free_port()}",
    )


def is_local(placement: Placement) -> bool:
    """Tell whether the mandate is that of a local run, as in a config from its workdir:
    a run of that config has a standby, too."""
    path = Path(placement.mandate)
    return path.name == run_files.MANDATE and (path.parent / run_files.CONFIG).exists()


def is_paired(placement: Placement, workdir: Path) -> bool:
    """Tell whether a run in this workdir has a standby beside it."""
    return placement.mandate == str(workdir / run_files.MANDATE)


def standby_of(workdir: Path) -> Path:
    """Return the standby's workdir."""
    return workdir / run_files.STANDBY


def standby_leads(workdir: Path) -> bool:
    """Tell whether the standby leads the run in this workdir, or led it last."""
    folder = standby_of(workdir)
    if not holds_run(folder):
        return False
    if not holds_run(workdir):
        return True
    _, mandate = FolderStore(str(workdir / run_files.MANDATE)).read(0.0)
    try:
        return mandate is not None and mandate.holder == read_name(folder)
    except FileNotFoundError:
        return False


def address_file(workdir: Path) -> Path:
    """Return the file with the address of whoever leads the run in this workdir."""
    beside = standby_of(workdir) / run_files.ADDRESS
    own = workdir / run_files.ADDRESS
    # One that is stopped, or was killed, leaves its own there.
    led = beside.exists() and (not own.exists() or standby_leads(workdir))
    return beside if led else own


def settle(workdir: Path) -> None:
    """Make one workdir of the two, once their processes have ended. Call it again if it
    was cut off. Raises ConfigError if a coordinator is at work."""
    folder, won, moving = (workdir / name for name in (run_files.STANDBY, WON, MOVING))
    if not (folder.is_dir() or won.is_dir() or moving.is_dir()):
        return
    with contextlib.ExitStack() as locks:
        places = (workdir, folder)
        for place in places:
            if (lock := place / run_files.LOCK).exists():
                locks.enter_context(held(lock, "a coordinator"))
        for place in places:
            # The workers of a lead that was killed live on, and write there.
            rendezvous.end_others(place, 0)
        if folder.is_dir():
            if standby_leads(workdir):
                folder.rename(won)
            else:
                _keep_records(folder, workdir)
                shutil.rmtree(folder)
        if won.is_dir():
            # From here on the workdir's own state does not count.
            _remove_state(workdir)
            won.rename(moving)
        if moving.is_dir():
            _keep_records(moving, workdir)
            _move_state(moving, workdir)
            shutil.rmtree(moving)
        # Nobody leads now. A run that goes on begins with a mandate of its own.
        shutil.rmtree(workdir / run_files.MANDATE, ignore_errors=True)


def _state(folder: Path) -> list[Path]:
    """Return what there is of a coordinator's state, run.json first."""
    tape = folder / run_files.TAPE
    found = [folder / name for name in STATE]
    return [path for path in (*found, *closed_segments(tape), tape) if path.exists()]


def _remove_state(folder: Path) -> None:
    for path in _state(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _move_state(source: Path, target: Path) -> None:
    """Move it; run.json last, without which the target holds no run."""
    for path in reversed(_state(source)):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        path.rename(to)


def _keep_records(source: Path, target: Path) -> None:
    """Put what a coordinator left for people to what the other one did."""
    metrics = source / run_files.METRICS
    newest = target / run_files.METRICS
    for path in (*closed_segments(metrics), metrics):
        if path.exists():
            if newest.exists():
                put_aside(newest)
            path.rename(newest)
    for name in (run_files.CURVES, run_files.KEPT, run_files.PROFILES):
        for path in [p for p in (source / name).rglob("*") if p.is_file()]:
            to = target / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
