"""All that islands and the coordinator say to each other: one set of messages.

What the coordinator's half decides to tell an island is one of these, and what an
island says is an event of the coordinator's half: nothing is renamed on the way.
`wire/messages.py` makes bytes of them; arrays travel apart from them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from diloco_jax.protocol.reasons import EndReason
from diloco_jax.protocol.values import (
    ISLAND_NAME,
    Count,
    Outstanding,
    Phase,
    Record,
    Span,
    Verdict,
    Version,
)

MAX_RECORDS = 1000
"""Most records of one report."""
MAX_TEXT = 1000
"""Most characters of what is said to people."""
MAX_SECONDS = 1e9
MAX_BYTES = 2**56
MAX_TOKENS = 2**56
"""Most tokens of one incarnation: sums over many stay whole numbers of 64 bits."""

# A bound on a number bounds no product: see `coordinator/door.py`.
Sequences = Annotated[int, Meta(ge=1, le=2**24)]
Tokens = Annotated[int, Meta(ge=1, le=2**40)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Term = Annotated[int, Meta(ge=0, le=2**20)]
Name = Annotated[str, Meta(pattern=ISLAND_NAME)]
Identifier = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]

# What goes onto the tape as it comes: JSON can say it, and no reader gets lost in it.
Fact = (
    Annotated[str, Meta(max_length=16 << 10)]
    | int
    | Annotated[float, Meta(ge=-1e300, le=1e300)]
    | bool
    | None
)
Facts = Annotated[dict[Identifier, Fact], Meta(max_length=64)]
Fields = dict[Identifier, Fact | list[Fact | list[Fact]]]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all control messages; the class name is the tag. Its options are said
    again by every message because type checkers do not inherit them."""


# ---- from an island -------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message on every control stream."""

    run_id: Identifier
    """Empty at an island's first join: it learns it from the Welcome."""
    fingerprint: Identifier
    run: dict[Identifier, Fact | Fields] = msgspec.field(default_factory=dict)
    """`config.shared_fields` of the RunConfig, to name what differs."""
    plan: Identifier = ""
    """`FragmentPlan.digest` of its model."""
    island: Name
    island_config: Facts = msgspec.field(default_factory=dict)
    incarnation: Count
    session: Identifier
    environment: Facts = msgspec.field(default_factory=dict)
    """Versions, device kind, host, thread and process counts: for the tape."""
    tokens_per_step: Tokens
    sequences_per_step: Sequences
    phase: Phase = "joining"
    steps: Count = 0
    step_seconds: Seconds = 0.0
    outstanding: tuple[Outstanding, ...] = ()
    sequences_granted: Count = 0
    records_through: Count = 0
    """Its records up to this number are acknowledged."""
    term: Term = 0
    """The newest one in which it was welcomed; 0: in none."""
    versions: tuple[Version, ...] = ()
    """Of its anchors, by fragment; empty until it has all of them. With what follows,
    it is what a coordinator without its state goes by."""
    tokens: Count = 0
    """Progress of the run, as it last heard."""
    next_position: Count = 0
    """Up to which data was granted to anybody, as far as it heard."""
    lead: Annotated[int, Meta(ge=0, le=2**16)] = 0
    """Boundaries from a request to its take: its hosts agree on it ahead."""


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What an incarnation measured of itself since it started (seconds)."""

    steps: Count = 0
    skipped_steps: Count = 0
    """Of them, those that changed nothing: their loss or gradient was not finite."""
    median_step_seconds: Seconds = 0.0
    max_step_gap_seconds: Seconds = 0.0
    step_seconds_total: Seconds = 0.0
    stalled_seconds: Seconds = 0.0
    eval_seconds: Seconds = 0.0
    compile_seconds: Seconds = 0.0
    loss: float = float("nan")
    """Training loss, mean over the last few steps, nats per token."""
    eval_loss: float = float("nan")
    learning_rate: Rate = 0.0
    first_step_unix: UnixSeconds = 0.0
    last_step_unix: UnixSeconds = 0.0
    bytes_up: Bytes = 0
    """Bytes of deltas sent, headers included."""
    bytes_down: Bytes = 0
    """Bytes of published fragments received, headers included, joins apart."""
    bytes_join: Bytes = 0


class Report(Message, frozen=True, kw_only=True, tag=True):
    """Where the island is; sent as often as `Deadlines.report_s` says."""

    phase: Phase
    steps: Count
    step_seconds: Seconds
    """Running median, 0 before the second step."""
    records: Annotated[tuple[Record, ...], Meta(max_length=MAX_RECORDS)] = ()
    measures: Measures = Measures()


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """The island leaves. `text` says why, for people."""

    reason: EndReason
    text: Text


# ---- from the coordinator -------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The island is in. Term 0: of a coordinator that gathers anchors."""

    run_id: str
    term: int
    resumed: bool
    versions: tuple[Version, ...]
    """Current version of every fragment."""


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """The coordinator ends this session; the island exits with code 3."""

    code: str
    message: str


class TakeRequest(Message, frozen=True, kw_only=True, tag=True):
    """Take the fragment and send it, `after` boundaries later than it can."""

    fragment: int
    tick: int
    after: int = 0


class ResendRequest(Message, frozen=True, kw_only=True, tag=True):
    """Send the delta of this take once more."""

    fragment: int
    tick: int


class Published(Message, frozen=True, kw_only=True, tag=True):
    """A fragment has a new version; fetch it. The verdict is on this island's take."""

    fragment: int
    version: Version
    tick: int = -1
    verdict: Verdict = "none"
    reason: str = ""


class TakeVerdict(Message, frozen=True, kw_only=True, tag=True):
    """What became of a take, apart from a publish."""

    fragment: int
    tick: int
    verdict: Verdict
    reason: str
    version: Version


class Granted(Message, frozen=True, kw_only=True, tag=True):
    """More data: these positions follow the first `offset` ones."""

    span: Span
    offset: int


class Progress(Message, frozen=True, kw_only=True, tag=True):
    """How far the run is: tokens of all islands that are not lost, and those of this
    incarnation's steps; records up to `records_through` need no resending; nothing from
    `next_position` on is granted to anybody."""

    tokens: int
    own_tokens: int
    records_through: int
    next_position: int


class AnchorRequest(Message, frozen=True, kw_only=True, tag=True):
    """Send the anchor of this fragment: the coordinator has lost its state."""

    fragment: int


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """The run has its tokens: no more steps, answer takes."""


class MayLeave(Message, frozen=True, kw_only=True, tag=True):
    """All that this island, which is about to leave, could be asked for is here."""


class Finished(Message, frozen=True, kw_only=True, tag=True):
    """The run is over; the island may leave."""


FromIsland = Hello | Report | Goodbye
FromCoordinator = (
    Welcome
    | Refused
    | TakeRequest
    | ResendRequest
    | Published
    | TakeVerdict
    | Granted
    | Progress
    | AnchorRequest
    | Stop
    | MayLeave
    | Finished
)
