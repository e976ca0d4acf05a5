"""The messages that islands and the coordinator exchange, and the values in them.

Values are those of events, records and effects, too: versions, data, deltas, records of
islands. Steps count from 0 within an incarnation. Intervals of steps are half-open;
sets of numbers are sorted, disjoint `Span`s. `tokens` counts the tokens of one island.
Reasons for lost steps, under which the ledger books them, are words for programs, from
a fixed set. A peer's explanation for people goes to the log and the tape (`said`).

The coordinator's half decides to send a message, and takes one of an island as an
event; nothing is renamed on the way. `wire/bulk.py` turns them into bytes; arrays
travel separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

# ---- values ---------------------------------------------------------------------

Phase = Literal["joining", "compiling", "training", "stopped"]
BEGINNING: tuple[Phase, ...] = ("joining", "compiling")
"""Phases of an island before its first step."""
Verdict = Literal["merged", "pending", "refused"]

ISLAND_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Pattern of an island's name, which appears in paths, commands and log lines."""

# Bounds every count that decisions use: above that of any run, and far below the limit
# of 64-bit integers.
MAX_COUNT = 2**48
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
MOST_POSITION = MAX_COUNT // 2
"""Largest position that an island may say it knows: a term that begins there has room
for all that it grants."""
CountOrNone = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""A count, or -1 for none."""
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Term = Annotated[int, Meta(ge=0, le=2**20)]

LOOKAHEAD = 2
"""Boundaries between a decision and its time, where several hosts must have it; more
than the steps dispatched ahead, so that no host waits."""


def lookahead_of(hosts: int) -> int:
    """Return the boundaries between a decision of an island and its time."""
    return LOOKAHEAD if hosts > 1 else 0


class Version(NamedTuple):
    """Version of a fragment. A coordinator that lost its state opens a new term."""

    term: Term = 1
    number: Count = 0

    def next(self) -> Version:
        """Return the version that the next merge makes."""
        return Version(self.term, self.number + 1)

    @property
    def name(self) -> str:
        """The name of the version in a file's name."""
        return f"{self.term}-{self.number}"

    @staticmethod
    def named(name: str) -> Version:
        """Return the version of this name."""
        term, number = name.split("-")
        return Version(int(term), int(number))


FIRST_VERSION = Version()
NOTHING = Version(0, 0)
"""Below every version."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared merge: digest and length of its encoded publish, which is on disk."""

    digest: str
    payload_bytes: int
    change: float = 0.0
    """Length of the change that it makes; 0: unknown."""
    stripes: dict[str, str] = {}
    """As in `Sources`; empty: nobody is to have it from another island."""


class Span(NamedTuple):
    """Half-open range of positions in the global shuffled index."""

    start: int
    stop: int


def join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans`, which may overlap."""
    found: list[Span] = []
    for span in sorted(spans):
        if span.start >= span.stop:
            continue
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return tuple(found)


def spans_without(spans: Iterable[Span], taken: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans` and in none of `taken`."""
    left = join_spans(spans)
    for span in join_spans(taken):
        left = tuple(part for kept in left for part in _cut(kept, span))
    return left


def common_spans(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans` and in any of `others`."""
    inside = list(others)
    return join_spans(
        Span(max(a.start, b.start), min(a.stop, b.stop)) for a in spans for b in inside
    )


def _cut(span: Span, taken: Span) -> Iterable[Span]:
    before = Span(span.start, min(span.stop, taken.start))
    after = Span(max(span.start, taken.stop), span.stop)
    return [part for part in (before, after) if part.start < part.stop]


OfFragment = Literal["took", "adopted", "reopened", "dropped", "reset", "carried"]
RecordKind = Literal[OfFragment, "granted", "progress", "restored"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One asynchronous fact about an island, numbered per incarnation by `seq`.

    Kinds and their fields:
    `took` (fragment, tick, start, version, rate_sum): the steps [start, step) entered
    the delta against the anchor of that version; the sum is of their learning rates.
    `adopted` (fragment, version, tick): the version lacks the take of `tick`, whose
    steps stay in the local parameters; an incarnation begins with the versions adopted
    at step 0. `reopened` (fragment, tick): a refused delta's steps are still in the
    local parameters. `dropped` (fragment, tick): they are not. `reset`: as `dropped`,
    and the local parameters are the anchor's. `carried` (fragment, start): an earlier
    term's books settle the steps before `start`. `granted` (start, stop): data
    positions. `progress` (value): the other islands' tokens behind the learning rate;
    negative if those islands lost more in an earlier term than they have computed
    since. `restored`: the incarnation begins with the moments that incarnation `start`
    had after `value` steps, and with its residual of the fragment if one is given; or
    it passes on an `unheard` record from before them.
    """

    seq: Count
    kind: RecordKind
    step: Count
    fragment: CountOrNone = -1
    tick: CountOrNone = -1
    version: Version = FIRST_VERSION
    start: Count = 0
    stop: Count = 0
    value: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    rate_sum: Rate = 0.0
    """Sum of the learning rates of a take's steps; 0: unknown."""
    unheard: Fields | msgspec.UnsetType = msgspec.UNSET
    """Record of an earlier `incarnation` that was not acknowledged; for replay."""


def to_pass_on(incarnation: int, records: Iterable[Record]) -> Iterator[Fields]:
    """Yield an incarnation's records, each as a later one's `unheard`; before them, as
    they are, those that it passes on itself."""
    for record in records:
        if record.unheard:
            yield record.unheard
            record = msgspec.structs.replace(record, unheard=msgspec.UNSET)
        yield {"incarnation": incarnation, **msgspec.to_builtins(record)}


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """A take whose verdict the island does not know; the island still holds the bytes.
    `seq` is the number of its record."""

    fragment: Count
    tick: Count
    start: Count
    end: Count
    base: Version
    seq: Count
    rate_sum: Rate = 0.0
    """Sum of the learning rates of its steps; 0: unknown."""


class DeltaKey(NamedTuple):
    """Identity of a delta."""

    island: str
    incarnation: int
    fragment: int
    tick: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The last final verdict on an island's takes, sent again if it may be lost."""

    tick: int
    verdict: Verdict
    reason: str


class Contribution(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One delta in a merge."""

    island: str
    incarnation: int
    tick: int
    start: int
    end: int
    tokens: int
    base: Version
    norm: float = 0.0
    """Length of the delta; 0: unknown."""
    rate_sum: float = 0.0
    """Sum of the learning rates of its steps, as the island says; 0: unknown."""
    uses: str = ""
    """Digest of its counts of use; empty if it has none."""

    @property
    def steps(self) -> int:
        """Steps whose effect is in the delta."""
        return self.end - self.start

    def key(self, fragment: int) -> DeltaKey:
        """Return the identity of the delta, which is of this fragment."""
        return DeltaKey(self.island, self.incarnation, fragment, self.tick)


EndReason = Literal[
    "finished", "stopped", "preempted", "refused", "failed", "died", "absent"
]
"""Reason for which an incarnation ended with open steps. stopped: it was asked to end,
or the whole run was. refused: it was not let in, or was put out for an impossible
claim or by an operator. died: another incarnation replaced it, and it had said no
goodbye. finished, absent: the run ended first, with the island live or absent."""

FAILURES: Final[frozenset[EndReason]] = frozenset(("failed", "died"))
"""Ends that another attempt may repeat; nobody asked for them."""

RefusalReason = Literal[
    "non_finite",
    "out_of_bounds",
    "miscounted",
    "quarantined",
    "stale",
    "future",
    "overlap",
    "empty",
    "refused",
]
"""Reason for which a delta is not merged; its steps are lost if the island gives them
up. out_of_bounds: it is much longer than the others' deltas. miscounted: its counts of
use are more than its tokens. quarantined: it is within bounds, but too many before it
were not. stale: its base lags the current version too far. future: its base is a
version that no merge has made. overlap: some of its steps are settled. refused: the
island gave the delta up without being told to."""

Refusal = RefusalReason | Literal[""]
"""Reason for which a delta is not merged; empty: it is fit."""

LossReason = EndReason | RefusalReason | Literal["coordinator", "worker", "overwritten"]
"""Reason for lost steps. coordinator: it was killed with deltas that it had not merged.
worker: likewise, of a worker.
overwritten: an adoption undid the steps."""

# ---- messages -------------------------------------------------------------------

MAX_RECORDS = 1000
"""Most records in one report."""
MAX_TEXT = 1000
"""Most characters of a text for people."""
DONOR_RESTS = 60
"""Leases for which an island asks nothing of another of its region that failed it."""
MOST_STEPS = 100
"""Most steps that an operator may have traced at once."""
MAX_SOURCES = 1000
"""Most sources of a mixture."""
MAX_SECONDS = 1e9
MAX_BYTES = 2**56
MAX_TOKENS = 2**56
"""Most tokens of one incarnation: sums over many incarnations still fit in 64 bits."""

# Bounds on single numbers do not bound their products: see `coordinator/service.py`.
Sequences = Annotated[int, Meta(ge=1, le=2**24)]
Tokens = Annotated[int, Meta(ge=1, le=2**40)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
Name = Annotated[str, Meta(pattern=ISLAND_NAME)]
Identifier = Annotated[str, Meta(max_length=128)]
Address = Annotated[str, Meta(pattern=r"\A\S{1,120}:[0-9]{1,5}\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]

# Values copied to the tape unchanged: JSON can express them, and they are shallow.
Fact = (
    Annotated[str, Meta(max_length=16 << 10)]
    | int
    | Annotated[float, Meta(ge=-1e300, le=1e300)]
    | bool
    | None
)
Facts = Annotated[dict[Identifier, Fact], Meta(max_length=64)]
Fields = dict[Identifier, Fact | Facts | list[Fact | list[Fact]]]


Figure = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A number for people, on which no decision depends."""

OWN_DATA = "own_data"
"""Fact of an island's environment: true if its steps use other data than is leased."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all control messages; the class name is the tag. Every message repeats
    the options because type checkers do not inherit them."""


# ---- from an island -------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message on every control stream."""

    run_id: Identifier
    """The run; empty at an island's first join, whose Welcome names it."""
    fingerprint: Identifier
    run: dict[Identifier, Fact | Fields] = msgspec.field(default_factory=dict)
    """`config.shared_fields` of the RunConfig, to name the fields that differ."""
    plan: Identifier = ""
    """`FragmentPlan.digest` of the island's model."""
    island: Name
    island_config: Facts = msgspec.field(default_factory=dict)
    incarnation: Count
    session: Identifier
    environment: Facts = msgspec.field(default_factory=dict)
    """Software versions, device kind, host, thread and process counts: for the tape."""
    tokens_per_step: Tokens
    sequences_per_step: Sequences
    phase: Phase = "joining"
    steps: Count = 0
    step_seconds: Seconds = 0.0
    outstanding: tuple[Outstanding, ...] = ()
    sequences_granted: Count = 0
    records_through: Count = 0
    """Number of the last acknowledged record of this incarnation."""
    term: Term = 0
    """Newest term in which the island was welcomed; 0: in none."""
    versions: tuple[Version, ...] = ()
    """Versions of the island's anchors, by fragment; empty until it has all of them.
    A coordinator without its state relies on this field and the next three."""
    tokens: Count = 0
    """Progress of the run in tokens, as the island last heard."""
    own_tokens: Count = 0
    """Tokens of this incarnation's steps that `tokens` includes. Steps during an outage
    are not among them."""
    next_position: Annotated[int, Meta(ge=0, le=MOST_POSITION)] = 0
    """Position below which data was granted to any island, as the island last heard."""
    term_name: Identifier = ""
    """The random name of that term."""
    changes: Annotated[tuple[Rate, ...], Meta(max_length=MAX_RECORDS)] = ()
    """Median length of the change that a merge makes, by fragment, as far as the island
    has heard of merges; 0: of none."""
    lookahead: Annotated[int, Meta(ge=0, le=LOOKAHEAD)] = 0
    """Boundaries from a request to its take, for the island's hosts to agree on it: see
    `lookahead_of`."""
    gives_at: Annotated[tuple[Address, ...], Meta(max_length=MAX_RECORDS)] = ()
    """HOST:PORT of each of its hosts, at which others of its region have publishes from
    it; empty: nowhere."""


Short = Literal["disk", "memory"]


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of an incarnation since its start; times are in seconds."""

    steps: Count = 0
    skipped_steps: Count = 0
    """Steps that changed nothing because their loss or gradient was not finite."""
    tokens_predicted: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    """Sum of the weights of all predictions; 0 if nobody counted them. Decisions
    go by the tokens of a step, B x T, which are known beforehand."""
    median_step_seconds: Seconds = 0.0
    max_step_gap_seconds: Seconds = 0.0
    step_seconds_total: Seconds = 0.0
    stalled_seconds: Seconds = 0.0
    data_seconds: Seconds = 0.0
    """Part of `stalled_seconds` in which the loop waited for a batch to be read."""
    eval_seconds: Seconds = 0.0
    compile_seconds: Seconds = 0.0
    loss: float = float("nan")
    """Training loss, mean over the last few steps, nats per token."""
    losses_by_source: Annotated[tuple[float, ...], Meta(max_length=MAX_SOURCES)] = ()
    """The same of each source of a mixture, over the last few steps that had rows of
    it; NaN if none had."""
    adoption_loss: float = float("nan")
    """Training loss of the first step after an adoption less that of the step before
    it, mean over the last few adoptions."""
    eval_loss: float = float("nan")
    watched_cycle: Count = 0
    """Cycle of the merged model that was evaluated last; 0: none yet."""
    watched_loss: float = float("nan")
    """Its validation loss, nats per token."""
    learning_rate: Rate = 0.0
    first_step_unix: UnixSeconds = 0.0
    last_step_unix: UnixSeconds = 0.0
    bytes_up: Bytes = 0
    """Bytes of deltas sent, headers included."""
    bytes_down: Bytes = 0
    """Bytes of published fragments received, headers included, joins excluded."""
    bytes_join: Bytes = 0
    microseconds_up: Count = 0
    """Time of the transfers by which `bytes_up` were sent, added up over hosts."""
    transfers_failed: Count = 0
    """Transfers of either direction that broke off, and were made again."""
    trial: Annotated[dict[Identifier, Figure], Meta(max_length=16)] = {}
    """What the island tried before its first step, by name (docs/first_hour.md)."""
    short: Annotated[tuple[Short, ...], Meta(max_length=2)] = ()
    """Resources that run short on the machine of some host."""
    programs_left: Count = 0
    """Programs that are still to be compiled or read before the first step."""
    fragments_left: Count = 0
    """Fragments that are still to be fetched before it."""


class Report(Message, frozen=True, kw_only=True, tag=True):
    """Progress of the island; sent every `Deadlines.report_s` seconds."""

    phase: Phase
    steps: Count
    step_seconds: Seconds
    """Running median of the step time; 0 before the second step."""
    records: Annotated[tuple[Record, ...], Meta(max_length=MAX_RECORDS)] = ()
    measures: Measures = Measures()
    watches: bool = False
    """True if the island can evaluate the merged model, and is not at it."""


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """The island leaves. `text` gives people the reason."""

    reason: EndReason
    text: Text


class DonorFailed(Message, frozen=True, kw_only=True, tag=True):
    """An island of the sender's region did not give what it was asked for, or gave
    something else. Two that say so count for all of it, for `DONOR_RESTS` leases."""

    island: Name


# ---- from an operator -----------------------------------------------------------


class Steer(Message, frozen=True, kw_only=True, tag=True):
    """Change who takes part. admit: let in an island that the config does not name.
    remove: put such an island out. release: end an island's quarantine."""

    how: Literal["admit", "remove", "release"]
    island: Name


class ProfileOrder(Message, frozen=True, kw_only=True, tag=True):
    """Have an island trace its next steps with jax.profiler."""

    island: Name
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1
    """Whole steps to trace."""


# ---- from the coordinator -------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The island is let in. Term 0: the coordinator is gathering anchors; an island
    without any is to give the first ones."""

    run_id: str
    term: int
    resumed: bool
    versions: tuple[Version, ...]
    """Current version of every fragment."""
    workers: tuple[str, ...] = ()
    """HOST:PORT of every worker, for deltas and fragments; empty: the address of the
    coordinator itself."""
    term_name: str = ""
    """Drawn as the term opened: none comes twice with other values."""
    anew: tuple[int, ...] = ()
    """Fragments whose books began anew since the island's term: the log of that one is
    gone."""
    next_position: Count = 0
    """As in `Progress`: where grants go on, for an island that outlives the coordinator
    before any other word of it."""


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """The coordinator ends this session; the island exits with code 3."""

    code: str
    message: str


class TakeRequest(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Take the fragment and send the delta. The island waits for `after` boundaries
    before it takes, a cycle's at most. Asked again with fewer, it takes earlier.
    """

    fragment: int
    tick: int
    after: Count = 0


class ResendRequest(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Send the delta of this take again."""

    fragment: int
    tick: int


class TakeVerdict(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Verdict on a take."""

    fragment: int
    tick: int
    verdict: Verdict
    reason: str
    version: Version


class Donor(msgspec.Struct, frozen=True, kw_only=True):
    """An island that gives a publish to the others of its region."""

    island: str
    addresses: tuple[str, ...]
    """HOST:PORT of each of its hosts."""


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where an island that is in a region with others has a publish from."""

    donors: tuple[Donor, ...]
    """They are asked in this order, and then the coordinator. A donor asks those before
    it alone, and so the first one the coordinator."""
    within_s: float
    """Seconds for which each is asked."""
    stripes: dict[str, str]
    """SHA-256 of a host's part of the publish, by `part_name` of the part."""


class Published(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A fragment has a new version; fetch it. The verdict is on this island's take."""

    fragment: int
    version: Version
    verdict: TakeVerdict | None = None
    change: float = 0.0
    """Length of the change that the merge makes; 0: nobody has measured it."""
    sources: Sources | None = None
    """None: the coordinator."""


class Granted(Message, frozen=True, kw_only=True, tag=True):
    """More data: these positions follow the island's first `offset` sequences."""

    span: Span
    offset: int


class Progress(Message, frozen=True, kw_only=True, tag=True):
    """Progress of the run: tokens of all islands that are not lost, and the tokens of
    this incarnation's steps. Records up to `records_through` need no resending. No
    position from `next_position` on is granted to any island."""

    tokens: int
    own_tokens: int
    records_through: int
    next_position: int


class AnchorRequest(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Send the anchor of this fragment: the coordinator has lost its state, or a worker
    the fragment. With a sample, send a ballot of it, for that of another island."""

    fragment: int
    term: int = 0
    """Term of the fragment that the anchor begins."""
    sample: Count = 0
    """As in `AwaitAnchor`."""
    workers: tuple[str, ...] = ()
    """As in `Welcome`, which may have come before workers were there."""


class Watch(Message, frozen=True, kw_only=True, tag=True):
    """The fragment's version at this cycle: copy that anchor, and evaluate the copies
    of the cycle once all fragments are there."""

    cycle: int
    fragment: int
    version: Version


class ProfileRequest(Message, frozen=True, kw_only=True, tag=True):
    """Trace the next steps of host 0 with jax.profiler."""

    steps: int
    """Whole steps to trace."""
    within_s: float
    """Longest time for them, in seconds."""


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """The run has its tokens: make no more steps, but answer take requests."""


class MayLeave(Message, frozen=True, kw_only=True, tag=True):
    """The coordinator has every delta that it can ask of this leaving island."""


class Finished(Message, frozen=True, kw_only=True, tag=True):
    """The run is over; the island may leave."""


AfterHello = Report | Goodbye | DonorFailed
FromIsland = Hello | AfterHello
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
    | Watch
    | ProfileRequest
    | Stop
    | MayLeave
    | Finished
)
