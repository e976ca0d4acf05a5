"""The start of a coordinator without its state: only the islands' anchors are left of
the run, and the highest version of each fragment begins a new term.

waiting -> fetching -> over. Islands offer their anchors until the deadline, or until
all have offered. Then each fragment is fetched from an island with its highest version,
one fragment at a time per island. A holder may be silent for one lease; after that the
next highest version is fetched. Nothing is initialised: no offer, no term.

An offer fits that is of the coordinator's config and of one run. One that does not is
put off and named, and ends nothing: a single island would otherwise keep all others
from a new term. If none fits, the coordinator may be wrong, and the islands with the
run's anchors must go on.

An island that claims far more than most others is not believed: after the state is
lost, anchors and news of the islands become the run's, so a wrong claim would spoil it.
If two islands differ, nobody can tell which is wrong: it takes three to disbelieve one.

The events that this has in common with the usual half (`Said`, `Disconnected`, `Timer`)
and the effects `Alert` and `Tell` are in `events.py`; its others are here.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import claims, leases, members, schedule
from diloco_jax.protocol.coordinator.events import (
    Alert,
    Disconnected,
    Said,
    Tell,
    Timer,
)
from diloco_jax.protocol.coordinator.state import (
    MergedTokens,
    PolicyConfig,
    State,
    initial,
    with_fragment,
)
from diloco_jax.protocol.messages import (
    MAX_TEXT,
    AnchorRequest,
    Hello,
    Refused,
    Welcome,
)
from diloco_jax.protocol.values import Version

# ---- events -------------------------------------------------------------------


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """An island says hello, with its anchors' versions and its last news of the run.
    `differences`: between its config and the coordinator's, in words."""

    hello: Hello
    differences: tuple[str, ...] = ()


class AnchorArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A whole anchor has arrived."""

    island: str
    incarnation: int
    fragment: int
    version: Version


Event = Offered | Said | Disconnected | AnchorArrived | Timer

# ---- effects ------------------------------------------------------------------


class Postpone(msgspec.Struct, frozen=True, kw_only=True):
    """End a session with this reason; the island is to come again later."""

    session: str
    message: str


class Discard(msgspec.Struct, frozen=True, kw_only=True):
    """Discard the part of an anchor that has arrived; the rest is no longer awaited."""

    island: str
    incarnation: int
    fragment: int


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Begin the new term: all fragments have arrived."""

    run_id: str
    term: int
    versions: tuple[Version, ...]
    sources: tuple[str, ...]
    """The island that each fragment came from."""
    replaced: tuple[Version, ...]
    """Version of each fragment on that island."""
    tokens: int
    next_position: int
    offered: tuple[str, ...] = ()
    """Islands that offered anchors; they come again as the term begins."""


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """End the process with this reason: there will be no new term."""

    message: str


Effect = Alert | Tell | Postpone | Discard | Open | GiveUp


FEWEST_TO_DISBELIEVE = 3
FAR = 2
"""Claims up to this multiple of the median are believed: an island may have been away
for long."""
TERMS_AHEAD = 16
MERGES_AHEAD = 100
POSITIONS_AHEAD = 2**20
SHARE_AHEAD = 0.01
"""Share of the run's tokens. These are believed in any case: a young run's medians are
small."""


class Known(NamedTuple):
    """The highest values of the run that an island knows."""

    term: int = 0
    tokens: int = 0
    next_position: int = 0
    merges: int = 0
    """Number of the highest version of any fragment."""

    def higher(self, other: Known) -> Known:
        """Return the higher value of each."""
        return Known(*map(max, self, other))


def claims_of(offer: Hello) -> Known:
    """Return the values that an island claims to know."""
    return Known(
        term=max([offer.term, *(version.term for version in offer.versions)]),
        tokens=offer.tokens,
        next_position=offer.next_position,
        merges=max((version.number for version in offer.versions), default=0),
    )


def believed_limits(claims: Collection[Known], total_tokens: int) -> Known | None:
    """Return the highest values that are believed; None if too few islands claim any.

    claims: those of the islands that offer anchors.
    """
    if len(claims) < FEWEST_TO_DISBELIEVE:
        return None
    medians = map(statistics.median_low, zip(*claims, strict=True))
    ahead = (
        TERMS_AHEAD,
        int(SHARE_AHEAD * total_tokens),
        POSITIONS_AHEAD,
        MERGES_AHEAD,
    )
    return Known(*(FAR * m + a for m, a in zip(medians, ahead, strict=True)))


def too_high(known: Known, most: Known | None) -> str:
    """Explain why claims are not believed; empty if they are."""
    if most is None:
        return ""
    for what, value, limit in zip(Known._fields, known, most, strict=True):
        if value > limit:
            return (
                f"it claims {what} = {value}, and at most {limit} is believed, by what "
                f"most islands claim"
            )
    return ""


def disbelieved(offer: Hello, wrong: str) -> Tell:
    """Return the message to an island whose claims are not believed, for this
    reason."""
    return Tell(
        session=offer.session,
        message=Refused(
            code="claims",
            message=f"island {offer.island!r} is not believed as a new term begins: "
            f"{wrong}; start it again with incarnation {offer.incarnation + 1}",
        ),
    )


def may_have_become(offered: Version, arrived: Version) -> bool:
    """Tell whether an anchor that was offered at one version may arrive at another.

    The island may have adopted a publish that was on its way.
    """
    ahead = arrived.number - offered.number
    return arrived.term == offered.term and 0 <= ahead <= MERGES_AHEAD


MOST_NAMED = 8
"""Islands that one message names; the number of the others follows."""


def misfit(ours: str, event: Offered) -> str:
    """Explain why an island does not fit; empty if it does.

    ours: the coordinator's run id; empty if it does not know it.
    """
    offer = event.hello
    if event.differences:
        text = "; ".join(event.differences)[:MAX_TEXT]
        return (
            f"island {offer.island!r} is in run {offer.run_id} with another config: "
            f"{text} (here: this coordinator's)"
        )
    if offer.versions and not offer.run_id:
        return f"island {offer.island!r} offers anchors of no run"
    if ours and offer.run_id not in ("", ours):
        return (
            f"island {offer.island!r} is in run {offer.run_id}, and this coordinator "
            f"gathers anchors of run {ours}"
        )
    return ""


def run_of_most(run_ids: Iterable[str]) -> str:
    """Return the run of most islands; empty if two have as many."""
    ranked = Counter(run_ids).most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        return ""
    return ranked[0][0] if ranked else ""


def runs_apart(offers: Iterable[Hello]) -> str:
    """Describe islands of several runs; empty if there is one run."""
    by_run: dict[str, list[str]] = {}
    for offer in offers:
        by_run.setdefault(offer.run_id, []).append(offer.island)
    if len(by_run) < 2:
        return ""
    sides = [
        f"{_listed([repr(name) for name in sorted(names)])} in run {run_id}"
        for run_id, names in sorted(by_run.items())
    ]
    return (
        f"islands of {len(sides)} runs offer anchors: {_listed(sides)}; the run of "
        f"most islands goes on, and among as many each nobody can tell which is the "
        f"coordinator's: start it again with --run-id and its own run, or end the "
        f"islands of the other one, or revoke their keys"
    )


def nobody_fits(misfits: Mapping[str, str], seconds: float) -> str:
    """Explain that there is no offer to begin with."""
    if not misfits:
        return f"no island offered its anchors within {seconds:g} s"
    return (
        f"no island offered anchors that fit within {seconds:g} s: "
        f"{_listed(list(misfits.values()))}. If the islands are right, it is this "
        f"coordinator that is wrong: start it with their run's config.json"
    )


def _listed(texts: list[str]) -> str:
    more = len(texts) - MOST_NAMED
    return "; ".join([*texts[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


LEASES_AWAITED = 2
"""Longest wait for the first offer, and then for the others, in leases."""


class AwaitedAnchor(NamedTuple):
    """The island that is to send a fragment, and the deadline."""

    island: str
    until: float


class Got(NamedTuple):
    """An anchor that has arrived."""

    island: str
    version: Version


class Offering(msgspec.Struct, frozen=True, kw_only=True):
    """An island's offer. gone_at: when it is awaited no longer, unless heard before."""

    offer: Hello
    gone_at: float
    connected: bool = True


class Heard(NamedTuple):
    """The highest values that an island heard of, and in which run."""

    run_id: str
    known: Known


class Gathering(msgspec.Struct, frozen=True, kw_only=True):
    """State of the gathering. names: the islands of the config."""

    names: frozenset[str]
    deadline: float
    decided_by: float = math.inf
    """The time by which most islands must be of one run."""
    phase: Literal["waiting", "fetching", "over"] = "waiting"
    run_id: str = ""
    """The run that goes on, once there is no more waiting."""
    misfits: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why the last offer of an island does not fit."""
    heard: Mapping[str, Heard] = msgspec.field(default_factory=dict)
    """Claims by island; one that joins may alone know of a term, and count."""
    limits: Known | None = None
    """The highest values that are believed, once there is no more waiting."""
    members: Mapping[str, Offering] = msgspec.field(default_factory=dict)
    asked: Mapping[int, AwaitedAnchor] = msgspec.field(default_factory=dict)
    failed: frozenset[tuple[str, int]] = frozenset()
    """Each (island, fragment) that did not arrive in time."""
    got: Mapping[int, Got] = msgspec.field(default_factory=dict)


Step = tuple[Gathering, list[Effect]]


def begin(config: PolicyConfig, names: frozenset[str], now: float) -> Gathering:
    """Return the state that waits for the first offer.

    The config has a run id if the coordinator knows which run is its own.
    """
    return _awaiting(config, Gathering(names=names, deadline=now), now)


def notices(state: Gathering) -> list[str]:
    """List what people have to see, such as islands that do not fit."""
    parted = runs_apart(member.offer for member in state.members.values())
    return [*([parted] if parted else []), *state.misfits.values()]


def step(config: PolicyConfig, state: Gathering, event: Event, now: float) -> Step:
    """Apply one event at time `now` (monotonic seconds)."""
    before, effects = notices(state), list[Effect]()
    match event:
        case Offered():
            state, effects = _offered(config, state, event, now)
        case Said():
            state = alive(config, state, event, now, connected=True)
        case Disconnected():
            state = alive(config, state, event, now, connected=False)
        case AnchorArrived():
            state, effects = _arrived(state, event)
    if state.phase == "waiting":
        state, found = _wait(config, state, now)
        effects += found
    if state.phase == "fetching":
        state, found = _fetch(config, state, now)
        effects += found
    effects += [Alert(text=text) for text in notices(state) if text not in before]
    return state, effects


def next_deadline(state: Gathering, now: float) -> float:
    """Return the next time at which time alone changes something. `now` is the time of
    the last step, which handled everything due until then."""
    times = [asked.until for asked in state.asked.values()]
    times += [member.gone_at for member in state.members.values()]
    if state.phase == "waiting":
        times = [state.deadline] if now < state.deadline else [*times, state.decided_by]
    return min((at for at in times if at > now), default=math.inf)


def first_state(config: PolicyConfig, opened: Open) -> State:
    """Return the state of the run at the beginning of the term."""
    state = initial(config)
    for fragment, version in zip(state.fragments, opened.versions, strict=True):
        newest = (MergedTokens(version=version),)
        begun = replace(fragment, version=version, newest=newest)
        state = with_fragment(state, begun)
    state = schedule.begin_term(config, state, opened.term)
    let_in = [n for n in opened.offered if not members.unknown(config, n)]
    return replace(
        state,
        returning=tuple(let_in),
        term=opened.term,
        progress_tokens=opened.tokens,
        carried_progress=opened.tokens,
        next_position=opened.next_position,
    )


def _offered(
    config: PolicyConfig, state: Gathering, event: Offered, now: float
) -> Step:
    offer = event.hello
    unfit = misfit(config.run_id or state.run_id, event)
    if unfit and offer.versions:
        return _put_off(state, offer, unfit)
    if not unfit:
        known = claims_of(offer)
        if wrong := too_high(known, state.limits):
            return state, [disbelieved(offer, wrong)]
        before = state.heard.get(offer.island, Heard("", Known()))
        run_id = offer.run_id or before.run_id
        if before.run_id in ("", run_id):
            known = before.known.higher(known)
        heard = {**state.heard, offer.island: Heard(run_id, known)}
        state = replace(state, heard=heard)
    member = state.members.get(offer.island)
    why = ""
    if len(offer.versions) != config.fragments:
        why = "this coordinator has no state yet, and the island no anchors to offer"
    elif member is not None and member.offer.incarnation > offer.incarnation:
        why = f"incarnation {member.offer.incarnation} of this island has offered"
    elif state.phase != "waiting" and (
        member is None or member.offer.session != offer.session
    ):
        why = "a new term is about to begin"
    if why:
        postpone = Postpone(session=offer.session, message=f"{why}; come again")
        return state, [postpone]
    if not state.members:
        state = _awaiting(config, state, now)
    misfits = {n: why for n, why in state.misfits.items() if n != offer.island}
    member = Offering(offer=offer, gone_at=now + config.lease_s)
    members = {**state.members, offer.island: member}
    welcome = Welcome(run_id=offer.run_id, term=0, resumed=True, versions=())
    effects: list[Effect] = [Tell(session=offer.session, message=welcome)]
    # The request for an anchor may be lost with the old connection.
    effects += [
        Tell(session=offer.session, message=AnchorRequest(fragment=fragment))
        for fragment, asked in state.asked.items()
        if asked.island == offer.island
    ]
    return replace(state, members=members, misfits=misfits), effects


def _awaiting(config: PolicyConfig, state: Gathering, now: float) -> Gathering:
    """Return the state that waits for offers from now on."""
    deadline = now + LEASES_AWAITED * config.lease_s
    decided_by = deadline + config.outage_budget_s
    return replace(state, deadline=deadline, decided_by=decided_by)


def _put_off(state: Gathering, offer: Hello, unfit: str) -> Step:
    """Go on without an island. It is not refused, since that would end it: it may hold
    the run's anchors, and this coordinator be wrong."""
    state = replace(state, misfits={**state.misfits, offer.island: unfit})
    message = f"{unfit}; the others are gathered without it"
    return state, [Postpone(session=offer.session, message=message)]


def alive(
    config: PolicyConfig,
    state: Gathering,
    event: Said | Disconnected,
    now: float,
    *,
    connected: bool,
) -> Gathering:
    """Return the state with a sign of life of an island that offers."""
    member = state.members.get(event.island)
    if member is None or member.offer.session != event.session:
        return state
    member = replace(member, gone_at=now + config.lease_s, connected=connected)
    return replace(state, members={**state.members, event.island: member})


def _arrived(state: Gathering, event: AnchorArrived) -> Step:
    asked = state.asked.get(event.fragment)
    member = state.members.get(event.island)
    if asked is None or member is None or asked.island != event.island:
        return state, []
    if member.offer.incarnation != event.incarnation:
        return state, []
    offered = member.offer.versions[event.fragment]
    if not may_have_become(offered, event.version):
        return _fail(state, event.fragment)
    got = Got(event.island, event.version)
    state = replace(state, got={**state.got, event.fragment: got})
    return _unasked(state, event.fragment), []


def _wait(config: PolicyConfig, state: Gathering, now: float) -> Step:
    here = {n for n, m in state.members.items() if m.connected and _may_come(m, now)}
    if not state.names <= here and now < state.deadline:
        return state, []
    if not state.members:
        patience_s = LEASES_AWAITED * config.lease_s
        return _give_up(state, nobody_fits(state.misfits, patience_s))
    offers = [m.offer for m in state.members.values() if _may_come(m, now)]
    offers = offers or [member.offer for member in state.members.values()]
    run_id = run_of_most(offer.run_id for offer in offers)
    if not run_id and now < state.decided_by:
        return state, []
    if not run_id:
        return _give_up(state, runs_apart(offers))
    state, effects = _choose(state, run_id)
    # A member may have said hello again without anchors, and in another run.
    held = [h.known for name, h in state.heard.items() if name in state.members]
    limits = believed_limits(held, config.total_tokens)
    wrong = {n: too_high(h.known, limits) for n, h in state.heard.items()}
    effects += [
        disbelieved(member.offer, wrong[name])
        for name, member in state.members.items()
        if wrong.get(name)
    ]
    return replace(
        state,
        phase="fetching",
        limits=limits,
        heard={n: heard for n, heard in state.heard.items() if not wrong[n]},
        members={n: m for n, m in state.members.items() if not wrong.get(n)},
    ), effects


def _choose(state: Gathering, run_id: str) -> Step:
    """Go on with the islands of one run."""
    effects = list[Effect]()
    for member in state.members.values():
        if unfit := misfit(run_id, Offered(hello=member.offer)):
            state, put_off = _put_off(state, member.offer, unfit)
            effects += put_off
    ours = {n: m for n, m in state.members.items() if m.offer.run_id == run_id}
    heard = {n: h for n, h in state.heard.items() if h.run_id in ("", run_id)}
    return replace(state, run_id=run_id, members=ours, heard=heard), effects


def _fetch(config: PolicyConfig, state: Gathering, now: float) -> Step:
    effects: list[Effect] = []
    for fragment, asked in state.asked.items():
        member = state.members[asked.island]
        if now < asked.until and _may_come(member, now):
            continue
        state, found = _fail(state, fragment)
        effects += found
    busy = {asked.island for asked in state.asked.values()}
    late = {name for name, _ in state.failed}
    for fragment in range(config.fragments):
        if fragment in state.got or fragment in state.asked:
            continue
        able = [
            name
            for name, member in sorted(state.members.items())
            if _may_come(member, now) and (name, fragment) not in state.failed
        ]
        # One that did not send is asked last: a single island could delay each one.
        holders = [name for name in able if name not in late] or able
        if not holders:
            state, found = _give_up(
                state, f"fragment {fragment} did not come from any island that had it"
            )
            return state, effects + found
        highest = max(_version(state, name, fragment) for name in holders)
        for name in holders:
            member = state.members[name]
            free = member.connected and name not in busy
            if free and _version(state, name, fragment) == highest:
                busy.add(name)
                awaited = AwaitedAnchor(name, now + config.outage_budget_s)
                state = replace(state, asked={**state.asked, fragment: awaited})
                request = AnchorRequest(fragment=fragment)
                effects.append(Tell(session=member.offer.session, message=request))
                break
    if len(state.got) == config.fragments:
        effects.append(_open(config, state))
        state = replace(state, phase="over")
    return state, effects


def _fail(state: Gathering, fragment: int) -> Step:
    """Ask the island no more for a fragment that did not come from it."""
    island = state.asked[fragment].island
    incarnation = state.members[island].offer.incarnation
    discard = Discard(island=island, incarnation=incarnation, fragment=fragment)
    state = replace(state, failed=state.failed | {(island, fragment)})
    return _unasked(state, fragment), [discard]


def _open(config: PolicyConfig, state: Gathering) -> Open:
    offers = [member.offer for member in state.members.values()]
    got = [state.got[fragment] for fragment in range(config.fragments)]
    known = Known()
    for heard in state.heard.values():
        known = known.higher(heard.known)
    unheard = max(
        leases.most_unheard(
            config, claims.believed_step_s(config, o), o.sequences_per_step
        )
        for o in offers
    )
    islands, term = len(state.names | state.members.keys()), 1 + known.term
    return Open(
        run_id=state.run_id,
        term=term,
        versions=tuple(Version(term, version.number) for _, version in got),
        sources=tuple(island for island, _ in got),
        replaced=tuple(version for _, version in got),
        tokens=known.tokens,
        next_position=known.next_position + islands * unheard,
        offered=tuple(sorted(state.members)),
    )


def _may_come(member: Offering, now: float) -> bool:
    return now < member.gone_at


def _version(state: Gathering, name: str, fragment: int) -> Version:
    return state.members[name].offer.versions[fragment]


def _unasked(state: Gathering, fragment: int) -> Gathering:
    asked = {f: value for f, value in state.asked.items() if f != fragment}
    return replace(state, asked=asked)


def _give_up(state: Gathering, message: str) -> Step:
    return replace(state, phase="over"), [GiveUp(message=message)]
