"""An island's conversation with the coordinator: messages in, decisions out.

The state is bounded: one take request and one adoption per fragment, verdicts on
outstanding takes, and records until the coordinator has them (while it is away, few new
ones arise).

A join fetches every fragment in full, JOIN_FETCHES at a time. After it, fetches run one
at a time, the fragment that lags most first, each from the island's version on, or in
full if the coordinator no longer keeps that chain. Every host fetches its part. In a
region with others (docs/design/regions.md), an island has publishes one by one from
their donors, and those first that it gives itself: islands that awaited each other's
publishes would wait in vain.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence, Set
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol import messages
from diloco_jax.protocol.island.boundary import Adoption, Decision, Ending
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import NOTHING, Record, Span, Version

CHANGES_KEPT = 9
"""Merges of a fragment whose changes an island remembers."""
MAX_CHAIN = 8
"""Most publishes of one fragment that may wait for the loop."""


class Wanted(NamedTuple):
    """A version to fetch if the island does not have it."""

    fragment: int
    version: Version
    sources: messages.Sources | None = None


Errand = Wanted | messages.ResendRequest | messages.ProfileRequest
"""Bulk work that a message asks the shell to do."""


def goes_back(term: int, welcome: messages.Welcome) -> bool:
    """Tell whether this welcome is of a term before the newest one of an island, which
    does not go back to it. In term 0 a coordinator has no state, and gathers."""
    return 0 < welcome.term < term


def gave_up_late(sources: messages.Sources, waited_s: float) -> bool:
    """Tell whether a donor that says after this time that it has given a publish up has
    failed all the same: it made the publish late."""
    return waited_s > sources.within_s / 2


class Conversation:
    """The state of one incarnation's conversation with the coordinator. Not
    thread-safe.

    awaits_last: the island needs the run's result. For such an island the run is over
    only once all publishes from before the end have arrived, or `give_up` was called.
    """

    def __init__(self, *, awaits_last: bool = False) -> None:
        self._awaits_last = awaits_last
        self.has_news = False
        """True if a message for the loop arrived since the last decision."""
        self.stop = self.leaving = self.may_leave = self.finished = False
        self._gave_up = False
        self.ending: Ending | None = None
        self._run_id, self._term, self._new_term = "", 0, 0
        self._term_name = ""
        self._changes: dict[int, tuple[float, ...]] = {}
        """Lengths of the last changes that merges made, by fragment."""
        self._median_changes: tuple[float, ...] = ()
        self._takes: dict[int, messages.TakeRequest] = {}
        self._newest_tick: dict[int, int] = {}
        self._adoptions: dict[int, Version] = {}
        self._waiting: dict[int, int] = {}
        """Publishes that wait for the loop, by fragment."""
        self._arrived: dict[int, Version] = {}
        self._published: dict[int, Version] = {}
        self._verdicts: list[messages.TakeVerdict] = []
        self._grants: list[Span] = []
        self._granted = self._next_position = 0
        self._anchors: dict[int, messages.AnchorRequest] = {}
        self._watches: dict[int, messages.Watch] = {}
        self._others_tokens = self._tokens = self._heard = 0
        self.posted = Status()
        """The loop's last status."""
        self._records: list[Record] = []
        self._records_through = 0
        self._failed_donors: dict[str, None] = {}

    # ---- what comes in ----------------------------------------------------------

    def receive(self, message: messages.FromCoordinator) -> tuple[Errand, ...]:
        """Note a message, in the order received; return the bulk work it asks for.

        Raises ValueError if a grant before this one is missing.
        """
        match message:  # Most messages tell of progress.
            case messages.Progress():
                self._progress(message)
            case messages.Welcome():
                return self._welcome(message)
            case messages.TakeRequest():
                self._request(message)
            case messages.ResendRequest() | messages.ProfileRequest():
                return (message,)
            case messages.Published(fragment=fragment, version=version):
                self._note_change(fragment, message.change)
                # The verdict comes first: a refusal resets the base before an adoption.
                if message.verdict is not None:
                    self._judge(message.verdict)
                return (self._want(fragment, version, message.sources),)
            case messages.TakeVerdict():
                self._judge(message)
                return (self._want(message.fragment, message.version),)
            case messages.Granted():
                self._grant(message.offset, message.span)
            case messages.AnchorRequest(fragment=fragment):
                self._anchors[fragment] = message
                self.has_news = True
            case messages.Watch(fragment=fragment):
                self._watches[fragment] = message  # No news: it concerns no step.
            case messages.Stop():
                self.stop = self.has_news = True
            case messages.MayLeave():
                self.may_leave = self.leaving
            case messages.Finished():
                self.stop = self.finished = self.has_news = True
        return ()

    def has_room(self, fragment: int, publishes: int | None) -> bool:
        """Tell whether that many publishes, or with None a full anchor, may arrive."""
        waiting = self._waiting.get(fragment, 0)
        return not waiting or publishes is None or waiting + publishes <= MAX_CHAIN

    def arrived(self, fragment: int, version: Version, publishes: int | None) -> None:
        """Note a version that all hosts have and that is ready to be adopted."""
        before = self._waiting.get(fragment, 0)
        self._waiting[fragment] = 0 if publishes is None else before + publishes
        self._adoptions[fragment] = self._arrived[fragment] = version
        self.has_news = True

    def leave(self) -> None:
        """Note that the island is about to leave: it makes no more steps, but answers
        take requests."""
        self.leaving = self.has_news = True

    def end(self, ending: Ending) -> None:
        """End the loop at its next boundary; the first reason stands."""
        self.ending = self.ending or ending
        self.has_news = True

    def give_up(self) -> None:
        """Note that publishes before the run's end are not to be awaited any more."""
        self._gave_up = self.has_news = True

    # ---- the loop ---------------------------------------------------------------

    def decide(self) -> Decision:
        """Return the decision for the next boundary, each part of it only once."""
        lacking = self._lacking() if self.finished and self._awaits_last else ()
        finished = self.finished and (not lacking or self._gave_up)
        decision = Decision(
            takes=tuple(self._takes.values()),
            adoptions=tuple(Adoption(f, v) for f, v in self._adoptions.items()),
            verdicts=tuple(self._verdicts),
            grants=tuple(self._grants),
            anchors=tuple(self._anchors.values()),
            watches=tuple(self._watches.values()),
            term=self._new_term,
            others_tokens=self._others_tokens,
            heard=self._heard,
            stop=self.stop or self.leaving,
            leaving=self.leaving,
            finished=finished,
            lacking=lacking if finished else (),
            ending=self.ending,
        )
        self._takes, self._adoptions, self._waiting = {}, {}, {}
        self._verdicts, self._grants, self._anchors = [], [], {}
        self._watches, self._new_term, self.has_news = {}, 0, False
        return decision

    def post(self, status: Status, records: tuple[Record, ...] = ()) -> None:
        """Note the loop's status and its new records."""
        self.posted = status
        self._records.extend(records)

    # ---- what goes out ----------------------------------------------------------

    def status(self) -> Status:
        """Return the last posted status, with versions that wait for the next boundary
        included."""
        current = self.current()
        versions = [
            max(version, self._arrived.get(fragment, version))
            for fragment, version in enumerate(current.versions)
        ]
        return replace(current, versions=tuple(versions))

    def current(self) -> Status:
        """Return `status` without the waiting versions; called at every boundary."""
        return replace(
            self.posted,
            run_id=self._run_id,
            term=self._term,
            term_name=self._term_name,
            changes=self._median_changes,
            sequences_granted=self._granted,
            records_through=self._records_through,
            tokens=self._tokens,
            own_tokens=self._tokens - self._others_tokens,
            next_position=self._next_position,
        )

    @property
    def newest_record(self) -> int:
        """Number of the newest unacknowledged record; 0: there is none."""
        return self._records[-1].seq if self._records else 0

    def unsent(self, sent_through: int) -> tuple[Record, ...]:
        """Return the records after that number."""
        return tuple(r for r in self._records if r.seq > sent_through)

    def donor_failed(self, name: str) -> None:
        """Note that an island of the region failed this one, for the coordinator."""
        self._failed_donors[name] = None

    def failed_donors(self) -> tuple[messages.DonorFailed, ...]:
        """Return what is to be said of such islands, once."""
        said = tuple(messages.DonorFailed(island=n) for n in self._failed_donors)
        self._failed_donors = {}
        return said

    def forget_records(self) -> None:
        """Drop the records: another host of the island reports them."""
        self._records = []

    def _lacking(self) -> tuple[int, ...]:
        """Return the fragments of which a version was published that has not come."""
        have, published = self.status().versions, sorted(self._published.items())
        return tuple(f for f, newest in published if have[f] < newest)

    # ---- one message ------------------------------------------------------------

    def _welcome(self, welcome: messages.Welcome) -> tuple[Errand, ...]:
        if 0 < self._term < welcome.term and welcome.anew:
            # The coordinator lost its log and began anew from anchors: earlier requests
            # and verdicts that are not decided yet no longer count.
            self._new_term = welcome.term
            self._takes, self._verdicts = {}, []
            self.stop, self.has_news = False, True
        self._run_id = welcome.run_id
        if welcome.term >= self._term and welcome.term:
            self._term, self._term_name = welcome.term, welcome.term_name
        self._next_position = max(self._next_position, welcome.next_position)
        return tuple(
            self._want(f, version) for f, version in enumerate(welcome.versions)
        )

    def _note_change(self, fragment: int, change: float) -> None:
        if change <= 0:
            return
        last = (*self._changes.get(fragment, ()), change)[-CHANGES_KEPT:]
        self._changes[fragment] = last
        medians = [*self._median_changes]
        medians += [0.0] * (fragment + 1 - len(medians))
        medians[fragment] = statistics.median(last)
        self._median_changes = tuple(medians)

    def _want(
        self, fragment: int, version: Version, sources: messages.Sources | None = None
    ) -> Wanted:
        self._published[fragment] = max(version, self._published.get(fragment, version))
        return Wanted(fragment, version, sources)

    def _request(self, request: messages.TakeRequest) -> None:
        """Note a take request unless a newer one for its fragment came before: requests
        may come late, and twice."""
        fragment, tick = request.fragment, request.tick
        if tick >= self._newest_tick.get(fragment, tick):
            self._takes[fragment] = request
            self._newest_tick[fragment] = tick
            self.has_news = True

    def _judge(self, verdict: messages.TakeVerdict) -> None:
        if verdict not in self._verdicts:
            self._verdicts.append(verdict)
        self.has_news = True

    def _grant(self, offset: int, span: Span) -> None:
        """Note a grant; positions of a repeated grant are skipped."""
        if offset > self._granted:
            raise ValueError(
                f"data was granted from sequence {offset} on, but only "
                f"{self._granted} have arrived; a grant is missing, ask again from "
                f"{self._granted}"
            )
        fresh = Span(span.start + self._granted - offset, span.stop)
        if fresh.start < fresh.stop:
            self._granted += fresh.stop - fresh.start
            self._grants.append(fresh)
            self._next_position = max(self._next_position, fresh.stop)
            self.has_news = True

    def _progress(self, message: messages.Progress) -> None:
        """Note the progress, which is no news: the learning rate follows it at the next
        boundary, whenever that is."""
        through = message.records_through
        self._heard += 1
        self._others_tokens = message.tokens - message.own_tokens
        self._tokens = message.tokens
        self._next_position = max(self._next_position, message.next_position)
        self._records = [r for r in self._records if r.seq > through]
        self._records_through = max(self._records_through, through)


JOIN_FETCHES = 4
"""Most fragments that a join fetches at a time."""


class Fetch(NamedTuple):
    """One fetch, for every host of the island."""

    fragment: int
    want: Version
    have: Version | None
    """The version to continue from; None: in full."""
    accepted: Version | None
    """The newest version that all hosts have; publishes after it must not be used."""
    sources: messages.Sources | None = None
    """Donors that are asked, in this order, before the coordinator is."""
    gives: bool = False
    """Others of the region have a part of it from this island."""


FetchOutcome = Literal["done", "gone", "lost"]
"""gone: the version is not kept any more; lost: the connection is lost."""


class HostFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a fetch on one host."""

    outcome: FetchOutcome
    chain: int | None = None
    """Publishes that came, if it is done; None: the anchor in full."""


def agreed(parts: Sequence[HostFetch]) -> FetchOutcome:
    """Return what became of a fetch on the island, whose hosts adopt together.

    If the coordinator drops publishes while hosts fetch them, some get the anchor in
    their place. These forms of a version are adopted by different programs, so it is
    gone: all hosts fetch again, in full.
    """
    outcomes = {part.outcome for part in parts}
    if "gone" in outcomes:
        return "gone"
    if "lost" in outcomes:
        return "lost"
    return "done" if len({part.chain for part in parts}) <= 1 else "gone"


class Fetching:
    """The versions that are wanted, under way and received. Not thread-safe."""

    def __init__(self, versions: Sequence[Version], name: str = "") -> None:
        """versions: the versions to join with, or newer ones. name: the island's own,
        among those of donors."""
        self._name = name
        self._sources: list[dict[Version, messages.Sources]] = [{} for _ in versions]
        """Of versions that the island has not, by fragment: the last MAX_CHAIN."""
        self._rests: dict[str, float] = {}
        """Time until which a donor is not asked, since it failed this island."""
        self._wanted = list(versions)
        self._have: list[Version | None] = [None] * len(versions)
        self._accepted: dict[int, Version] = {}
        self._under_way: set[int] = set()

    @property
    def lacking(self) -> int:
        """Number of fragments of which nothing was received."""
        return len(self._wanted) - len(self._accepted)

    @property
    def joined(self) -> bool:
        """True once every fragment was received."""
        return not self.lacking

    @property
    def lags(self) -> bool:
        """True if a newer version is wanted than the island has, or any; its fetch may
        be under way."""
        return bool(self._behind())

    def want(
        self, fragment: int, version: Version, sources: messages.Sources | None = None
    ) -> None:
        """Note a published version; versions older than a known one are ignored."""
        if version >= self._wanted[fragment]:
            self._wanted[fragment] = version
            if sources is not None:
                known = self._sources[fragment]
                known[version] = sources
                if len(known) > MAX_CHAIN:
                    del known[min(known)]

    def rest(self, donor: str, until: float) -> None:
        """Note that a donor failed, and is not asked until that time."""
        self._rests[donor] = until

    def next(self, away: Set[int] = frozenset(), now: float = 0.0) -> Fetch | None:
        """Begin the next fetch; None if nothing lags or no more fetches may run at a
        time. Each fetch ends with `got`, `failed` or `gone`. away: fragments that
        cannot be fetched now, or belong to another lane, whose fetches do not count.
        now: on the clock of `rest`."""
        joined = self.joined
        lagging = [
            fragment
            for fragment in self._behind()
            if fragment not in {*self._under_way, *away}
            and (joined or self._have[fragment] is None)
        ]
        limit = 1 if joined else JOIN_FETCHES
        if not lagging or len(self._under_way - away) >= limit:
            return None
        first = min(lagging, key=lambda f: (not self._gives(f), self.order(f), f))
        return self._begin(first, now)

    def again(self, fragment: int) -> Fetch:
        """Begin a failed fetch of a join anew."""
        return self._begin(fragment)

    def order(self, fragment: int) -> Version:
        """Return the sort key of a lagging fragment: the lowest goes first."""
        return self._have[fragment] or NOTHING

    def got(self, fragment: int, version: Version) -> None:
        """Note a version that all hosts have now."""
        self._under_way.discard(fragment)
        self._have[fragment] = self._accepted[fragment] = version
        if known := self._sources[fragment]:
            self._sources[fragment] = {v: s for v, s in known.items() if v > version}

    def failed(self, fragment: int) -> None:
        """Note that a fetch brought nothing."""
        self._under_way.discard(fragment)

    def gone(self, fragment: int) -> None:
        """Note that the chain is no longer kept, or the version was overtaken: the next
        fetch is in full."""
        self._under_way.discard(fragment)
        self._have[fragment] = None

    def disconnected(self) -> None:
        """Note that all fetches under way are lost."""
        self._under_way.clear()

    def _begin(self, fragment: int, now: float = 0.0) -> Fetch:
        self._under_way.add(fragment)
        want, have = self._wanted[fragment], self._have[fragment]
        known, sources = self._sources[fragment], None
        if have is not None and (found := known.get(have.next())) is not None:
            donors = self._to_ask(found, now)
            if donors:
                want, sources = have.next(), replace(found, donors=donors)
        return Fetch(
            fragment=fragment,
            want=want,
            have=have,
            accepted=self._accepted.get(fragment),
            sources=sources,
            gives=self._gives(fragment),
        )

    def _gives(self, fragment: int) -> bool:
        """Tell whether some publish of the fragment is given to others from here."""
        known = self._sources[fragment].values()
        return any(d.island == self._name for s in known for d in s.donors)

    def _to_ask(
        self, sources: messages.Sources, now: float
    ) -> tuple[messages.Donor, ...]:
        """Return the donors before this island that do not rest."""
        others = itertools.takewhile(lambda d: d.island != self._name, sources.donors)
        return tuple(d for d in others if self._rests.get(d.island, 0.0) <= now)

    def _behind(self) -> list[int]:
        """Return the fragments of which a newer version is wanted than the island has,
        or any."""
        both = enumerate(zip(self._have, self._wanted, strict=True))
        return [f for f, (have, wanted) in both if have is None or have < wanted]
