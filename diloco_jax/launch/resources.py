"""The output of a backend: files to read, commands to run.

All are plain values; `submit.py` acts on them.
"""

from __future__ import annotations

import dataclasses

SHARED = ""
"""Owner of resources that belong to no island."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line and its deadline."""

    arguments: tuple[str, ...]
    deadline_s: float = 120.0
    remedy: str = ""
    """Advice if the command fails for want of capacity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """One thing in the cloud, with the commands that find, make and delete it."""

    what: str
    """Description for people, such as "slice mixed-v5p in us-east5-a"."""
    owner: str
    """Name of the island that it is for, "coordinator", or SHARED."""
    find: Command
    """Command that prints the state. It fails with "not found", or prints nothing, if
    the resource does not exist."""
    create: Command
    delete: Command | None
    """Command that deletes it; None = it stays, since others may use it."""
    dead: tuple[str, ...] = ()
    """States in which it is useless and must be made anew."""
    runs: bool = False
    """True for a process rather than a machine: stopping a launch deletes it."""
    keeps: bool = False
    """True if it holds the run: it is deleted only on demand."""
    content: str = ""
    """Digest of its content. Empty = the content never changes."""
    update: tuple[Command, ...] = ()
    """Commands that replace its content."""


@dataclasses.dataclass(frozen=True)
class Owned:
    """A command and its owner."""

    owner: str
    command: Command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that one backend renders from an order."""

    files: dict[str, str]
    """Texts by name, for the launch's folder, without secrets."""
    prepare: tuple[Command, ...]
    """Commands to run before all others; they change nothing in the cloud."""
    resources: tuple[Resource, ...]
    """Resources in the order in which they are made."""
    start: tuple[Owned, ...]
    stop: tuple[Owned, ...]
    logs: tuple[Owned, ...]
