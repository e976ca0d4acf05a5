"""What a backend renders: files to read, commands to run. Plain values; `submit.py`
acts on them.
"""

from __future__ import annotations

import dataclasses

SHARED = ""
"""Owner of what belongs to no island."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line, and how long it may take."""

    arguments: tuple[str, ...]
    deadline_s: float = 120.0
    remedy: str = ""
    """What to do if it fails for want of capacity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """One thing in the cloud: how to look for it, make it and delete it."""

    what: str
    """For people: "slice mixed-v5p in us-east5-a"."""
    owner: str
    """The island it is for, "coordinator", or SHARED."""
    find: Command
    """Prints its state; fails with "not found", or prints nothing, if there is none."""
    create: Command
    delete: Command | None
    """None: it is left, since others may use it."""
    dead: tuple[str, ...] = ()
    """States in which it is of no use any more and must be made anew."""
    runs: bool = False
    """It is a process rather than a machine: stopping a launch deletes it."""
    keeps: bool = False
    """It holds the run: deleted only on demand."""
    content: str = ""
    """A digest of what is in it. Empty = what it was made with stays."""
    update: tuple[Command, ...] = ()
    """Give it that content in the place of another."""


@dataclasses.dataclass(frozen=True)
class Owned:
    """A command for one owner's sake."""

    owner: str
    command: Command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that one backend renders from an order."""

    files: dict[str, str]
    """Text by name, for the launch's folder. Without secrets."""
    prepare: tuple[Command, ...]
    """Before anything else; changes nothing in the cloud."""
    resources: tuple[Resource, ...]
    """In the order in which they are made."""
    start: tuple[Owned, ...]
    stop: tuple[Owned, ...]
    logs: tuple[Owned, ...]
