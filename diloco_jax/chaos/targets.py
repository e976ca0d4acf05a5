"""The processes that strikes meet: those of the launcher, and the lead's workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.faults import worker_number

Target = Callable[[signal.Signals], bool]
"""Signals a process; returns whether it was there."""


def found(workdir: Path, name: str) -> list[Target]:
    """Return the processes that have this name in the run now."""
    number = worker_number(name)
    if number is not None:
        survivor = rendezvous.process_of(workdir, number)
        return [] if survivor is None else [survivor.send]
    try:
        noted = json.loads((workdir / run_files.PROCESSES).read_bytes())
    except OSError:
        return []
    return [_group(pid) for pid in noted.get(name, ())]


def _group(pid: int) -> Target:
    def send(number: signal.Signals) -> bool:
        with contextlib.suppress(ProcessLookupError):
            # The launcher made it the leader of its group.
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
                return True
        return False

    return send
