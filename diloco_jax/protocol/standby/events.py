"""Events and effects of the primary's and the standby's halves: their interface.

Records are numbered in the order in which the primary writes them. At most one request
to the object of the mandate is under way; each is answered by one of `MandateWritten`,
`WriteRefused`, `MandateRead` and `StoreSilent`. The shell knows when an event came.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from diloco_jax.protocol.coordinator.events import Alert, Timer
from diloco_jax.protocol.standby.mandate import Mandate

# ---- events of both sides -------------------------------------------------------


class MandateRead(msgspec.Struct, frozen=True, kw_only=True):
    """The object as it was read. mandate: None if it does not exist."""

    generation: str
    mandate: Mandate | None


class MandateWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The write is done. generation: the object's, from now on."""

    generation: str


class WriteRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The object was not at the generation that the write names; nothing changed."""


class StoreSilent(msgspec.Struct, frozen=True, kw_only=True):
    """The request failed, or was not answered in time: a write may have been done."""


FromStore = MandateRead | MandateWritten | WriteRefused | StoreSilent

# ---- events of the primary ------------------------------------------------------


class RecordWritten(msgspec.Struct, frozen=True, kw_only=True):
    """A record is durable on the primary's disk, and on its way to the standby."""

    number: int


class StandbyAttached(msgspec.Struct, frozen=True, kw_only=True):
    """A standby asks to follow, from now on."""

    node: str


class StandbyAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to this record is durable at the standby. Sent as a sign of life,
    too."""

    number: int


class StandbyLost(msgspec.Struct, frozen=True, kw_only=True):
    """The standby's stream ended, or it cannot be sent as much as is written."""


class StateLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """The primary has read its disk, and is about to let things be seen."""


class DiskBroken(msgspec.Struct, frozen=True, kw_only=True):
    """The primary cannot go on with its disk: it ends, and lets nothing more be
    seen."""


class StateGathered(msgspec.Struct, frozen=True, kw_only=True):
    """A primary that gathered has a state of its own again, durably."""


class RunFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over: nobody needs to take over."""


PrimaryEvent = (
    FromStore
    | RecordWritten
    | StandbyAttached
    | StandbyAnswered
    | StandbyLost
    | StateLoaded
    | DiskBroken
    | StateGathered
    | RunFinished
    | Timer
)

# ---- events of the standby ------------------------------------------------------


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """The primary has accepted this standby, and sends a copy of its files."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """The copy is whole and durable, with the records up to this number."""

    number: int


class PrimaryHeard(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to this record is durable here, or there is no news; a sign of
    life of the primary."""

    number: int


class PrimaryLost(msgspec.Struct, frozen=True, kw_only=True):
    """The stream to the primary ended, or it did not let this standby follow."""


StandbyEvent = FromStore | Following | Copied | PrimaryHeard | PrimaryLost | Timer

# ---- effects of both sides ------------------------------------------------------


class ReadMandate(msgspec.Struct, frozen=True, kw_only=True):
    """Read the object."""


class WriteMandate(msgspec.Struct, frozen=True, kw_only=True):
    """Write the object, if it is at this generation."""

    mandate: Mandate
    generation: str


# ---- effects of the primary -----------------------------------------------------


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Carry out what waits for the records up to this one: anyone may see it."""

    through: int


class Accept(msgspec.Struct, frozen=True, kw_only=True):
    """Send the standby a copy of the files, and every record after that."""

    node: str


class Dismiss(msgspec.Struct, frozen=True, kw_only=True):
    """End the standby's stream; it comes again later."""

    reason: str


class Lapse(msgspec.Struct, frozen=True, kw_only=True):
    """End the islands' sessions: the mandate has run out, and another node may lead."""


class Reign(msgspec.Struct, frozen=True, kw_only=True):
    """Lead: this node holds the mandate. gathers: not from its disk."""

    number: int
    gathers: bool


class StepDown(msgspec.Struct, frozen=True, kw_only=True):
    """End the process, and let nothing more be seen: it is not to lead."""

    reason: str
    follows: bool = False
    """True if another node leads, which this one may follow as its standby."""


PrimaryEffect = (
    ReadMandate
    | WriteMandate
    | Release
    | Accept
    | Dismiss
    | Alert
    | Lapse
    | Reign
    | StepDown
)

# ---- effects of the standby -----------------------------------------------------


class AnswerPrimary(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the primary that everything up to this record is durable here."""

    number: int


class Dial(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the primary to be followed."""


class HangUp(msgspec.Struct, frozen=True, kw_only=True):
    """End the stream to the primary: nothing is answered any more."""


class TakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """Lead: this node holds the mandate. by: "log" goes on from the disk, where
    everything is that anyone has seen; "gathering" opens a new term with what the
    islands have."""

    by: Literal["log", "gathering"]


class Retire(msgspec.Struct, frozen=True, kw_only=True):
    """End the process: the run is over."""


StandbyEffect = (
    ReadMandate | WriteMandate | AnswerPrimary | Dial | HangUp | TakeOver | Retire
)
