"""The name of a node: a file of its workdir, which knows where it was written.

A copy of the workdir on another machine has the name, too. It is told by the number of
the file on its disk and the place of the workdir: if both are others, it is a copy.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.files import write_text


def node_of(workdir: Path) -> str:
    """Return the name of the node with this workdir, which its first start draws."""
    path = workdir / run_files.NODE
    # An empty name would be that of nobody, whom a mandate calls in step.
    if not (path.exists() and read_name(workdir)):
        adopt(workdir, uuid.uuid4().hex[:8])
    return read_name(workdir)


def read_name(workdir: Path) -> str:
    """Return the name of the node with this workdir. Raises FileNotFoundError."""
    return (workdir / run_files.NODE).read_text().partition("\n")[0]


def copied_from(workdir: Path) -> str:
    """Return the place of which this workdir is a copy, HOST:PATH; empty if none."""
    path = workdir / run_files.NODE
    written, _, place = path.read_text().partition("\n")[2].partition(" ")
    if not place or place == _place(workdir) or written == str(path.stat().st_ino):
        return ""
    return place


def adopt(workdir: Path, name: str) -> None:
    """Give this workdir the name, whatever it was copied from."""
    path = workdir / run_files.NODE
    write_text(name, path)
    with path.open("a") as file:  # A crash before that leaves a name without a place.
        file.write(f"\n{path.stat().st_ino} {_place(workdir)}")


def _place(workdir: Path) -> str:
    return f"{socket.gethostname()}:{os.path.realpath(workdir)}"
