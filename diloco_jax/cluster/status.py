"""The state of a run, from its coordinator or from the files in its workdir."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.cluster.private import with_own_keys
from diloco_jax.config import ConfigError, Placement
from diloco_jax.config.loading import read_config_json
from diloco_jax.files import expand
from diloco_jax.observability.measures import EVALUATING
from diloco_jax.observability.terminal import duration_text
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import has_begun, is_held, read_summary, require_format


def status_client(address: str, placement: Placement) -> Client:
    """Return a connection for `status()` alone; the caller closes it."""
    folder = placement.certificates
    return Client(
        address,
        tls=TlsFiles.load_any(folder) if folder else None,
        deadlines=placement.deadlines,
        bulk_channels=0,
        insecure=placement.insecure,
    )


def reached(target: str, placement: Placement) -> tuple[str, Placement]:
    """Return the address of a coordinator, given as HOST:PORT or by the workdir of its
    run, and the placement with which to call it.

    For a workdir, certificates are those of the run's config unless `placement` names
    others. Raises ConfigError, or ConnectionLost if no coordinator is up there.
    """
    workdir = expand(target)
    if not workdir.is_dir():
        if ":" not in target:
            raise ConfigError(
                f"{target!r} is neither a folder nor HOST:PORT; give a run's workdir, "
                f"or its coordinator's address"
            )
        return target, placement
    require_format(workdir)
    file = workdir / run_files.ADDRESS
    if not file.exists():
        raise ConnectionLost(f"no coordinator is up in {workdir}")
    return file.read_text().strip(), _own(workdir, placement)


def read_status(target: str, placement: Placement) -> dict[str, Any]:
    """Return the status of a run: from its coordinator at HOST:PORT, or of a workdir.

    If the coordinator of a workdir is gone, this is the run's summary with `phase`
    "done", "evaluating" while a `diloco run` computes its loss, or "stopped" if the run
    had not ended. Raises ConnectionLost if there is no
    summary either. If `placement` names no certificates, those of the workdir's config
    are used.
    """
    workdir = expand(target)
    if not workdir.is_dir():
        return _ask(*reached(target, placement))
    require_format(workdir)
    address, summary = workdir / run_files.ADDRESS, read_summary(workdir)
    if not address.exists() and not summary:
        if has_begun(workdir):
            raise ConnectionLost(f"no coordinator is up. {_cut_off(workdir)}")
        raise ConfigError(
            f"{workdir} has neither {run_files.ADDRESS} nor summary.json: no run was "
            f"started there, or its coordinator is not up yet"
        )
    if address.exists():
        try:
            return _ask(*reached(target, placement))
        except ConnectionLost as error:
            if not summary:
                raise ConnectionLost(f"{error}. {_cut_off(workdir)}") from error
    phase = "done" if summary["phase"] == "done" else "stopped"
    if phase == "done" and "eval_loss" not in summary and is_held(workdir):
        phase = EVALUATING
    return {**summary, "phase": phase}


def _own(workdir: Path, placement: Placement) -> Placement:
    """Return the placement with which to call a workdir's coordinator."""
    if placement.certificates:
        return placement
    own = read_config_json(workdir / run_files.CONFIG).placement
    return with_own_keys(own, workdir)


def _cut_off(workdir: Path) -> str:
    """Describe a run that has neither a coordinator nor a summary."""
    tape, silent = workdir / run_files.TAPE, ""
    if tape.exists():
        seconds = max(0.0, time.time() - tape.stat().st_mtime)
        silent = f", and wrote nothing to its tape for {duration_text(seconds)}"
    return (
        f"The run in {workdir} left no summary{silent}: it was cut off, or its "
        f"coordinator is being started again; if nothing does that, `diloco run "
        f"--resume {workdir}` goes on with a run of this machine"
    )


def _ask(address: str, placement: Placement) -> dict[str, Any]:
    client = status_client(address, placement)
    try:
        return client.status(placement.deadlines.connect_s)
    finally:
        client.close()
