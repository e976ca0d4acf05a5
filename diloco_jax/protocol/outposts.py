"""Messages between a lead and an outpost: the process on another machine that starts a
worker there.

Each connection begins with the outpost's word. The lead then says `BeginWorker`, and
speaks with the worker from there on; or it asks about files, one after another; or it
says that the run is over.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from diloco_jax.protocol.messages import Message
from diloco_jax.protocol.values import Version
from diloco_jax.protocol.working import BeginWorker, WorkerRefused

Kind = Literal["snapshot", "publish"]
LEADS_OF_TERM = 1 << 32
"""Numbers of leads that one term has: more than unix time has seconds."""


class OutpostReady(Message, frozen=True, kw_only=True):
    """First word of an outpost: it obeys this caller."""

    worker: int


class AboutFiles(Message, frozen=True, kw_only=True):
    """First message of a connection for files: which lead asks."""

    run_id: str
    worker: int
    lead: int


class AskNewest(Message, frozen=True, kw_only=True):
    """Which is the newest snapshot of a fragment there? `Newest` answers."""

    fragment: int


class Newest(Message, frozen=True, kw_only=True):
    """Version of that snapshot; None: there is none. seal: see `sealed.seal_of`."""

    version: Version | None
    seal: str = ""


class PutFile(Message, frozen=True, kw_only=True):
    """Keep a file of a fragment, whose bytes follow. `Stored` answers."""

    kind: Kind
    fragment: int
    version: Version
    size: int


class Stored(Message, frozen=True, kw_only=True):
    """The file is on disk."""


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Send the newest snapshot of a fragment. `FileComes` answers."""

    fragment: int


class GetKept(Message, frozen=True, kw_only=True):
    """Send a fragment of a kept cycle. `FileComes` answers."""

    cycle: int
    fragment: int


class DropKept(Message, frozen=True, kw_only=True):
    """Delete it: the lead has it on disk. `Stored` answers."""

    cycle: int
    fragment: int


class RunOver(Message, frozen=True, kw_only=True):
    """The run is over: nobody will begin the worker again. `OutpostEnds` answers."""


class AtWork(Message, frozen=True, kw_only=True):
    """Sign of life from either end, while it forces a file to disk or checks one; what
    the other end waits for follows."""


class OutpostEnds(Message, frozen=True, kw_only=True):
    """The outpost ends, and the worker with it."""


class FileComes(Message, frozen=True, kw_only=True):
    """The bytes of the file follow. version: a snapshot's."""

    size: int
    version: Version = Version()


FilesAsked = AskNewest | PutFile | GetSnapshot | GetKept | DropKept | RunOver | AtWork
FirstWord = BeginWorker | AboutFiles
FromOutpost = (
    OutpostReady | WorkerRefused | Newest | Stored | FileComes | OutpostEnds | AtWork
)


def first_number(term: int, unix_s: float) -> int:
    """Return the least number of a lead of workers on other machines. One that has lost
    its disk comes after those before it, whatever its clock shows: it opens a term."""
    return term * LEADS_OF_TERM + int(unix_s)


def next_number(last: int, at_least: int) -> int:
    """Return the number of a lead on a disk whose last one had the number `last`."""
    return max(at_least, last + 1)


class Obeyed(NamedTuple):
    """The line of a lead that a worker on another machine obeyed last."""

    run_id: str = ""
    lead: int = 0
    dial: int = 0

    def after(self, word: FirstWord) -> Obeyed | None:
        """Return what is obeyed after a lead of this run has said that; None if it is
        an older one, which is refused."""
        if isinstance(word, BeginWorker):
            newer, dial = word.is_newer(self.lead, self.dial), word.dial
        else:
            newer = word.lead >= self.lead
            dial = self.dial if word.lead == self.lead else 0
        return Obeyed(word.run_id, word.lead, dial) if newer else None


first_word = msgspec.msgpack.Decoder(FirstWord).decode
files_asked = msgspec.msgpack.Decoder(FilesAsked).decode
from_outpost = msgspec.msgpack.Decoder(FromOutpost).decode
