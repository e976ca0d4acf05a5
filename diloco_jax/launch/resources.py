"""The output of a backend: files to read, commands to run.

All are plain values; `submit.py` acts on them.
"""

from __future__ import annotations

import dataclasses
import re

from diloco_jax.launch.order import Order

SHARED = ""
"""Owner of resources that belong to no island."""


RUN_LABEL, PART_LABEL = "diloco-run", "diloco-part"
"""Labels by which what is left over can be found."""


def labels(order: Order, owner: str) -> str:
    """Return the labels of what costs money, as `gcloud` takes them."""
    return f"{RUN_LABEL}={order.name},{PART_LABEL}={part_of(owner)}"


def part_of(owner: str) -> str:
    """Return the label of a part of the run."""
    return re.sub(r"[^-_a-z0-9]", "-", owner.lower()) or "shared"


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
    holds: str = ""
    """State in which there are machines in it, whose state is then looked for too."""
    inside: Command | None = None
    """Command that prints the state of those machines."""
    well: tuple[str, ...] = ()
    """All words of the state of one whose machines work."""
    job: str = ""
    """Name of the job whose state is in the JSON that `find` prints. Once it is dead,
    nothing is left of it to delete."""
    ended: tuple[str, ...] = ()
    """States, or last words, that mean that the run is over."""
    last_word: Command | None = None
    """Command that prints why it is there no more, as it said itself at its end."""
    revives: bool = False
    """True if a watch makes it anew when it is dead, whatever it died of, when it was
    asked for and never came, or when its machines stay unwell."""
    runs: bool = False
    """True for a process rather than a machine: stopping a launch deletes it."""
    keeps: bool = False
    """True if it holds the run, or its beginning: it is deleted only on demand."""
    content: str = ""
    """Digest of its content. Empty = the content never changes."""
    update: tuple[Command, ...] = ()
    """Commands that replace its content."""
    carried: bool = False
    """True if a watch replaces its content once that has changed here."""
    grant: tuple[Command, ...] = ()
    """Commands that let others use it, before it has its content; they may be
    repeated."""


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
    statuses: tuple[Command, ...]
    """Commands that print what `diloco status --json` does, beside each coordinator;
    the one that leads answers."""
    results: tuple[Command, ...]
    """Commands that copy the run's folder to `results` beside the launch's folder."""
