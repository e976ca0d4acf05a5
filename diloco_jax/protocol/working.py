"""Messages between the lead's process and a worker's beside those of `holding.py`: how
a worker begins, shows that it lives, and ends.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.holding import (
    AnchorKept,
    DeltaArrived,
    FragmentsRestored,
    FromHolder,
    KeepFragment,
    MergePrepared,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.messages import Message

MAX_FRAME_BYTES = 64 << 20
"""Most bytes of one message; the largest are those of a start, with all fragments."""


class BeginWorker(Message, frozen=True, kw_only=True):
    """First message to a worker: hold these fragments, serve islands at `bind`."""

    config: dict[str, Any]
    """The run's, as builtins."""
    workdir: str
    run_id: str
    worker: int
    fragments: tuple[int, ...]
    bind: str
    ticket_key: bytes
    """Key of the tickets of this life of the lead; see `tickets`."""
    lead: int = 1
    """Counts the lives of the lead in the run: a worker believes the newest alone."""
    life: int = 1
    """Counts the processes of this worker in the run."""
    dial: int = 0
    """Counts the lines of this life of the lead to a worker on another machine."""
    clock: float = 0.0
    """The lead's clock as it says this, by which its tickets end. It does not jump, and
    passes while the machine sleeps (`coordinator/sleeping.py`)."""

    def is_newer(self, lead: int, dial: int) -> bool:
        """Tell whether it comes after a line of that lead, with that number."""
        return (self.lead, self.dial) > (lead, dial)

    def is_like(self, other: BeginWorker) -> bool:
        """Tell whether a worker that was begun so can go on with `other`."""
        return _for_a_worker(self) == _for_a_worker(other)


def _for_a_worker(begin: BeginWorker) -> BeginWorker:
    """Return what must not change under a worker. A lead that is started again may
    serve at another port, and the worker goes on where it serves."""
    placement = begin.config.get("placement", {})
    own = {k: v for k, v in placement.items() if k not in ("bind", "advertise")}
    config = {**begin.config, "placement": own}
    return replace(
        begin,
        config=config,
        ticket_key=b"",
        lead=0,
        life=0,
        dial=0,
        bind="",
        clock=0.0,
    )


class SaveAll(Message, frozen=True, kw_only=True):
    """Write the last snapshots; see `Saver.write_last`."""

    within_s: float | None


class AllSaved(Message, frozen=True, kw_only=True):
    """Answer to `SaveAll`: digests of Theta, by fragment; text: why snapshots are not
    written, empty if they are."""

    digests: dict[int, str]
    text: str = ""


class FragmentKept(Message, frozen=True, kw_only=True):
    """A fragment of a kept cycle is on disk; `trouble` says why not, if it is not."""

    keep: KeepFragment
    trouble: str = ""


class EndWorker(Message, frozen=True, kw_only=True):
    """End: the coordinator is about to end."""


class LeadAlive(Message, frozen=True, kw_only=True):
    """Sign of life of the lead."""


class WorkerServes(Message, frozen=True, kw_only=True):
    """The worker answers islands at this HOST:PORT. It follows `FragmentsRestored`."""

    address: str


class WorkerAlive(Message, frozen=True, kw_only=True):
    """Sign of life of a worker. alerts: what people should know about its snapshots."""

    alerts: tuple[str, ...]
    memory_bytes: int
    """The most memory that the process has had."""
    resident_bytes: int
    """The memory that the process has now."""
    process: str
    """Drawn by each process: another one means that the one before has ended."""


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Last message of a worker that cannot go on."""

    text: str
    errno: int = 0
    """Number of the system's error, if it is one."""


class WorkerRefused(Message, frozen=True, kw_only=True):
    """A worker on another machine does not do that; text: why, with the remedy."""

    text: str
    passing: bool = False
    """Another attempt may succeed."""


ToWorker = BeginWorker | RestoreFragments | ToHolder | SaveAll | EndWorker | LeadAlive
FromWorker = (
    FragmentsRestored
    | FromHolder
    | WorkerServes
    | WorkerAlive
    | AllSaved
    | FragmentKept
    | WorkerFailed
    | WorkerRefused
)

OF_ONE_LEAD = MergePrepared | AnchorKept | DeltaArrived
"""Messages for the lead under which they were made, and for no later one: merges that
a later one has not committed never were, and it is told of deltas anew."""

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker).decode
from_worker = msgspec.msgpack.Decoder(FromWorker).decode
