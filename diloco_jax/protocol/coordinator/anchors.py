"""Search the islands for anchors that the coordinator's disks do not have.

One search serves three losses, which differ in its `Aim`:

| lost | who is believed | a misfit | the source starts again |
|---|---|---|---|
| the run | islands of the run of most, by what most claim | is put off | its anchor |
| fragments | those at versions that the log goes on from | is put off | its anchor |
| first parameters | the one island that gives them | is refused | all that it gave |

waiting -> fetching -> over. Islands offer their anchors until the deadline, or until
all have offered. Each fragment is then fetched once, the highest version first, one at
a time per island, by the holder that will keep it. Until the search is over nobody is
let in, and nothing counts that was fetched.

Whatever comes is checked. Values that are not finite are refused. Where the log has the
anchor's digest, it decides. Else the others that offer vote with a ballot of their own
anchor (`core/tiles.py`): at the same version by digests, which also confirm it under
its name of another term; at most `MERGES_APART` away by a sample. An anchor counts if
most agree, itself included. With fewer than three that offer, finite is enough, but two
that differ at one version wait for a third.

An island that claims far more of the run than most others is not believed either: after
the state is lost, what islands heard becomes the run's.
"""

from __future__ import annotations

import math
import statistics

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import claims, leases
from diloco_jax.protocol.coordinator.believed import (
    FEWEST_TO_DISBELIEVE,
    Heard,
    Known,
    believed_limits,
    claims_of,
    disbelieved,
    listed,
    may_have_become,
    run_of_most,
    runs_apart,
    too_high,
)
from diloco_jax.protocol.coordinator.events import (
    Alert,
    Disconnected,
    Said,
    Tell,
)
from diloco_jax.protocol.coordinator.search import (
    Aim,
    AwaitedAnchor,
    Claim,
    Effect,
    Event,
    GiveUp,
    Offered,
    Offering,
    Postpone,
    Search,
    Vote,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.coordinator.terms import FoundTerm, Gathered
from diloco_jax.protocol.holding import AnchorCompared, AnchorKept, AwaitAnchor
from diloco_jax.protocol.messages import (
    MAX_TEXT,
    AnchorRequest,
    Hello,
    Refused,
    Welcome,
)
from diloco_jax.protocol.values import FIRST_VERSION, Version

MERGES_APART = 8
"""Merges between two anchors, at most, of which one can tell about the other."""
MOST_CHANGES = 4.0
"""Longest way between two anchors, in median changes for each merge between them."""
LEASES_AWAITED = 2
"""Longest wait for the first offer, and then for the others, in leases."""


Step = tuple[Search, list[Effect]]


def begin(config: PolicyConfig, aim: Aim, now: float) -> Search:
    """Return the state that waits for the first offer.

    The config has a run id if the coordinator knows which run is its own.
    """
    return _awaiting(config, Search(aim=aim, deadline=now), now)


def step(config: PolicyConfig, state: Search, event: Event, now: float) -> Step:
    """Apply one event at time `now` (monotonic seconds)."""
    before, effects = notices(state), list[Effect]()
    match event:
        case Offered():
            state, effects = _offered(config, state, event, now)
        case Said():
            state = _alive(config, state, event, now, connected=True)
        case Disconnected():
            state = _alive(config, state, event, now, connected=False)
        case AnchorKept():
            state, effects = _kept(state, event)
        case AnchorCompared():
            state = _compared(state, event)
    if state.phase == "waiting":
        state, found = _wait(config, state, now)
        effects += found
    if state.phase == "fetching":
        state, found = _fetch(config, state, now)
        effects += found
    effects += [Alert(text=text) for text in notices(state) if text not in before]
    return state, effects


def next_deadline(state: Search, now: float) -> float:
    """Return the next time at which time alone changes something. `now` is the time of
    the last step, which handled everything due until then."""
    times = [asked.until for asked in state.asked.values()]
    times += [member.gone_at for member in state.members.values()]
    for claim in state.claims.values():
        times += [*claim.asked.values(), claim.waits_until]
    if state.phase == "waiting":
        times = [state.deadline] if now < state.deadline else [*times, state.decided_by]
    return min((at for at in times if at > now), default=math.inf)


def notices(state: Search) -> list[str]:
    """List what people have to see, such as islands that do not fit."""
    parted = runs_apart(member.offer for member in state.members.values())
    torn = [claim.torn for claim in state.claims.values() if claim.waits_until]
    return [*([parted] if parted else []), *state.misfits.values(), *torn]


def waits_for(state: Search) -> str:
    """Describe the wait, for people."""
    got = f"{len(state.got)} of {len(state.aim.lacking)} fragments have arrived"
    if state.aim.first:
        (giver,) = state.aim.names
        return f"the run begins with the parameters of island {giver!r}, of which {got}"
    if state.aim.known is not None:
        lost = list(state.aim.lacking)
        return f"fragments {lost} are lost, and gathered from islands: {got}"
    return f"this coordinator has lost its state and gathers anchors of islands: {got}"


def _misfit(config: PolicyConfig, state: Search, event: Offered) -> Refused | None:
    """Explain why an island does not fit; None if it does."""
    offer, ours = event.hello, config.run_id or state.run_id
    code, why = "", ""
    if event.differences:
        text = "; ".join(event.differences)[:MAX_TEXT]
        code = "config"
        why = (
            f"island {offer.island!r} is in run {offer.run_id} with another config: "
            f"{text} (here: this coordinator's)"
        )
        if state.aim.first:
            why = (
                f"island {offer.island!r} is to give the run's first parameters, and "
                f"differs from the coordinator: {text} (here: the coordinator's); "
                f"start both with one config"
            )
    elif ours and offer.run_id not in ("", ours):
        code = "run_id"
        why = (
            f"island {offer.island!r} is in run {offer.run_id}, and this coordinator "
            f"{'begins' if state.aim.first else 'gathers anchors of'} run {ours}; "
            f"check the coordinator's address"
        )
    elif offer.versions and not offer.run_id and not state.aim.first:
        code, why = "run_id", f"island {offer.island!r} offers anchors of no run"
    elif state.aim.known is not None and offer.term >= state.aim.term:
        code = "other_term"
        why = (
            f"island {offer.island!r} is in term {offer.term}, and this coordinator's "
            f"log ends in term {state.aim.term - 1}: its state is an old one"
        )
    return Refused(code=code, message=why) if code else None


def _other_process(before: Offering | None, offer: Hello) -> Refused | None:
    """Explain why a second process of an island that gives first parameters cannot give
    them too; None if it may."""
    if before is None or before.offer.incarnation != offer.incarnation:
        return None
    if before.offer.session == offer.session:
        return None
    return Refused(
        code="name_in_use",
        message=f"the name {offer.island!r} is in use by another process with the same "
        f"incarnation {offer.incarnation}; replace that process by starting "
        f"incarnation {offer.incarnation + 1}",
    )


# ---- offers ----------------------------------------------------------------------


def _offered(config: PolicyConfig, state: Search, event: Offered, now: float) -> Step:
    offer, first = event.hello, state.aim.first
    before = state.members.get(offer.island)
    if first and offer.island not in state.aim.names:
        return _come_again(state, offer, waits_for(state))
    unfit = _misfit(config, state, event)
    if first and (refused := unfit or _other_process(before, offer)):
        return state, [Tell(session=offer.session, message=refused)]
    if unfit is not None and offer.versions:
        return _put_off(state, offer, unfit.message)
    if unfit is None:
        known = claims_of(offer)
        if wrong := too_high(known, state.limits):
            return state, [disbelieved(offer, wrong)]
        state = _hear(state, offer, known)
    if before is not None and before.offer.incarnation > offer.incarnation:
        why = f"incarnation {before.offer.incarnation} of this island has offered"
        return _come_again(state, offer, why)
    if not first and len(offer.versions) != config.fragments:
        why = "this coordinator has no state yet, and the island no anchors to offer"
        return _come_again(state, offer, why)
    if before is not None and before.offer.incarnation < offer.incarnation:
        state = _without(config, state, offer.island, now)
    if not state.members and state.phase == "waiting":
        state = _awaiting(config, state, now)
    misfits = {n: why for n, why in state.misfits.items() if n != offer.island}
    member = Offering(offer=offer, gone_at=now + config.lease_s)
    members = {**state.members, offer.island: member}
    state = replace(state, members=members, misfits=misfits)
    welcome = Welcome(
        run_id=config.run_id if first else offer.run_id,
        term=0,
        resumed=not first,
        versions=(),
    )
    effects: list[Effect] = [Tell(session=offer.session, message=welcome)]
    # Requests may be lost with the old connection.
    for fragment, asked in state.asked.items():
        if asked.island == offer.island:
            effects.append(_request(state, offer, fragment))
    for claim in state.claims.values():
        if offer.island in claim.asked and offer.island not in claim.votes:
            effects.append(_request(state, offer, claim.anchor.fragment, claim))
    return state, effects


def _hear(state: Search, offer: Hello, known: Known) -> Search:
    """Note what an island has heard of the run. If it knows a term as high as the one
    that is to begin, that one gets a higher number, and all anchors come anew."""
    before = state.heard.get(offer.island, Heard("", Known()))
    run_id = offer.run_id or before.run_id
    if before.run_id in ("", run_id):
        known = before.known.higher(known)
    heard = {**state.heard, offer.island: Heard(run_id, known)}
    state = replace(state, heard=heard)
    if state.phase == "fetching" and not state.aim.term and known.term >= state.term:
        state = replace(state, term=known.term + 1, asked={}, claims={}, got={})
    return state


def _without(config: PolicyConfig, state: Search, name: str, now: float) -> Search:
    """Return the state once another process of an island has come: what the one before
    was asked for comes anew, and of first parameters all that it gave."""
    if state.aim.first:
        return begin(config, state.aim, now)
    asked = {f: a for f, a in state.asked.items() if a.island != name}
    claims = {f: c for f, c in state.claims.items() if c.anchor.island != name}
    return replace(state, asked=asked, claims=claims)


def _awaiting(config: PolicyConfig, state: Search, now: float) -> Search:
    """Return the state that waits for offers from now on."""
    wait_s = LEASES_AWAITED * config.lease_s
    if state.aim.first:
        wait_s = config.compile_budget_s
    deadline = now + wait_s
    decided_by = deadline + config.outage_budget_s
    return replace(state, deadline=deadline, decided_by=decided_by)


def _come_again(state: Search, offer: Hello, why: str) -> Step:
    return state, [Postpone(session=offer.session, message=f"{why}; come again")]


def _put_off(state: Search, offer: Hello, unfit: str) -> Step:
    """Go on without an island. It is not refused, since that would end it: it may hold
    the run's anchors, and this coordinator be wrong."""
    state = replace(state, misfits={**state.misfits, offer.island: unfit})
    message = f"{unfit}; the others are gathered without it"
    return state, [Postpone(session=offer.session, message=message)]


def _alive(
    config: PolicyConfig,
    state: Search,
    event: Said | Disconnected,
    now: float,
    *,
    connected: bool,
) -> Search:
    """Return the state with a sign of life of an island that offers."""
    member = state.members.get(event.island)
    if member is None or member.offer.session != event.session:
        return state
    member = replace(member, gone_at=now + config.lease_s, connected=connected)
    return replace(state, members={**state.members, event.island: member})


# ---- the wait --------------------------------------------------------------------


def _wait(config: PolicyConfig, state: Search, now: float) -> Step:
    here = {n for n, m in state.members.items() if m.connected and now < m.gone_at}
    if not state.aim.names <= here and now < state.deadline:
        return state, []
    if not state.members:
        return _give_up(state, _nobody_offers(config, state))
    offers = [m.offer for m in state.members.values() if now < m.gone_at]
    offers = offers or [member.offer for member in state.members.values()]
    run_id = config.run_id or run_of_most(offer.run_id for offer in offers)
    if not run_id and now < state.decided_by:
        return state, []
    if not run_id:
        return _give_up(state, runs_apart(offers))
    state, effects = _choose(config, state, run_id)
    # A member may have said hello again without anchors, and in another run.
    held = [h.known for name, h in state.heard.items() if name in state.members]
    limits = believed_limits(held, config.total_tokens)
    wrong = {n: too_high(h.known, limits) for n, h in state.heard.items()}
    effects += [
        disbelieved(member.offer, wrong[name])
        for name, member in state.members.items()
        if wrong.get(name)
    ]
    heard = {n: heard for n, heard in state.heard.items() if not wrong[n]}
    term = FIRST_VERSION.term
    if not state.aim.first:
        term = 1 + max((h.known.term for h in heard.values()), default=0)
    return replace(
        state,
        phase="fetching",
        limits=limits,
        term=state.aim.term or term,
        heard=heard,
        members={n: m for n, m in state.members.items() if not wrong.get(n)},
    ), effects


def _choose(config: PolicyConfig, state: Search, run_id: str) -> Step:
    """Go on with the islands of one run."""
    state, effects = replace(state, run_id=run_id), list[Effect]()
    for member in state.members.values():
        if unfit := _misfit(config, state, Offered(hello=member.offer)):
            state, put_off = _put_off(state, member.offer, unfit.message)
            effects += put_off
    ours = {n: m for n, m in state.members.items() if m.offer.run_id in ("", run_id)}
    heard = {n: h for n, h in state.heard.items() if h.run_id in ("", run_id)}
    return replace(state, members=ours, heard=heard), effects


def _nobody_offers(config: PolicyConfig, state: Search) -> str:
    """Explain that there is no offer to begin with."""
    if state.aim.first:
        (giver,) = state.aim.names
        return (
            f"island {giver!r}, which is to give the run's first parameters, did not "
            f"come within placement.compile_budget_s = {config.compile_budget_s:g} s"
        )
    seconds = LEASES_AWAITED * config.lease_s
    if not state.misfits:
        return f"no island offered its anchors within {seconds:g} s"
    return (
        f"no island offered anchors that fit within {seconds:g} s: "
        f"{listed(list(state.misfits.values()))}. If the islands are right, it is "
        f"this coordinator that is wrong: start it with their run's config.json"
    )


# ---- who is asked, for what, until when, and who is next --------------------------


def _fetch(config: PolicyConfig, state: Search, now: float) -> Step:
    effects: list[Effect] = []
    if state.aim.first and not any(_may_come(state, n, now) for n in state.members):
        state = begin(config, state.aim, now)  # It may come again, with others.
        return state, effects
    for fragment, asked in state.asked.items():
        if now < asked.until and _may_come(state, asked.island, now):
            continue
        state = _fail(state, asked.island, fragment)
    for fragment in list(state.claims):
        state, found = _judge(config, state, fragment, now)
        effects += found
        if state.phase == "over":
            return state, effects
    busy = {asked.island for asked in state.asked.values()}
    for fragment in state.aim.lacking:
        if fragment in {**state.got, **state.asked, **state.claims}:
            continue
        holders = _holders(state, fragment, now)
        if not holders:
            state, found = _give_up(state, _nobody_left(config, state, fragment))
            return state, effects + found
        highest = max(_version(state, name, fragment) for name in holders)
        for name in holders:
            member = state.members[name]
            free = member.connected and name not in busy
            if free and _version(state, name, fragment) == highest:
                busy.add(name)
                awaited = AwaitedAnchor(name, now + _patience_s(config, state))
                state = replace(state, asked={**state.asked, fragment: awaited})
                effects.append(_await(state, member.offer, fragment))
                effects.append(_request(state, member.offer, fragment))
                break
    if len(state.got) == len(state.aim.lacking):
        effects += _over(config, state)
        state = replace(state, phase="over")
    return state, effects


def _holders(state: Search, fragment: int, now: float) -> list[str]:
    """Return the islands whose anchor of a fragment may be asked for. One that did not
    send another, or not a good one, comes last: it could delay each one."""
    able = [
        name
        for name in sorted(state.members)
        if _may_come(state, name, now)
        and (name, fragment) not in state.failed
        and _counts(state.aim, fragment, _version(state, name, fragment))
    ]
    late = {name for name, _ in state.failed}
    return [name for name in able if name not in late] or able


def _counts(aim: Aim, fragment: int, version: Version) -> bool:
    """Tell whether the log, if there is one, knows all merges after this version."""
    return aim.known is None or version in aim.known[fragment]


def _patience_s(config: PolicyConfig, state: Search) -> float:
    """Return the seconds within which an anchor must come. First parameters come at the
    island's first boundary, after it has compiled."""
    compiles_s = config.compile_budget_s if state.aim.first else 0.0
    return compiles_s + config.outage_budget_s


def _await(
    state: Search, offer: Hello, fragment: int, claim: Claim | None = None
) -> AwaitAnchor:
    return AwaitAnchor(
        fragment=fragment,
        island=offer.island,
        incarnation=offer.incarnation,
        term=state.term,
        sample=state.aim.sample_of(claim),
    )


def _request(
    state: Search, offer: Hello, fragment: int, claim: Claim | None = None
) -> Tell:
    request = AnchorRequest(
        fragment=fragment, term=state.term, sample=state.aim.sample_of(claim)
    )
    return Tell(session=offer.session, message=request)


def _kept(state: Search, event: AnchorKept) -> Step:
    """Note that a holder has an awaited anchor on disk, or that it is not finite."""
    asked = state.asked.get(event.fragment)
    member = state.members.get(event.island)
    if asked is None or member is None or asked.island != event.island:
        return state, []
    if (member.offer.incarnation, state.term) != (
        event.incarnation,
        event.version.term,
    ):
        return state, []
    offered = _version(state, event.island, event.fragment)
    fits = may_have_become(offered, event.replaced)
    fits = fits and _counts(state.aim, event.fragment, event.replaced)
    if event.unfit or not fits:
        what = "is not finite" if event.unfit else f"was offered as {tuple(offered)}"
        text = (
            f"the anchor {tuple(event.replaced)} of fragment {event.fragment} of "
            f"island {event.island!r} {what}: it does not count"
        )
        state = _fail(state, event.island, event.fragment)
        return state, [Alert(text=text, island=event.island)]
    anchor = Gathered(
        event.fragment,
        event.island,
        event.incarnation,
        event.replaced,
        event.version,
        event.digest,
    )
    asked_now = {f: value for f, value in state.asked.items() if f != event.fragment}
    claims = {**state.claims, event.fragment: Claim(anchor=anchor)}
    return replace(state, asked=asked_now, claims=claims), []


def _compared(state: Search, event: AnchorCompared) -> Search:
    """Note how an island's ballot compares with the anchor that is being judged."""
    claim, member = state.claims.get(event.fragment), state.members.get(event.island)
    if claim is None or member is None or event.island not in claim.asked:
        return state
    if member.offer.incarnation != event.incarnation:
        return state
    vote = _vote(state, claim.anchor, event)
    claim = replace(claim, votes={**claim.votes, event.island: vote})
    return replace(state, claims={**state.claims, event.fragment: claim})


def _vote(state: Search, anchor: Gathered, event: AnchorCompared) -> Vote:
    if event.equal and event.version.number == anchor.replaced.number:
        return "agrees"  # Of another term, too: its beginning renames an anchor.
    if event.version == anchor.replaced:
        return "differs"
    merges = abs(event.version.number - anchor.replaced.number)
    if event.version.term != anchor.replaced.term or merges > MERGES_APART:
        return "far"
    offers = (member.offer for member in state.members.values())
    changes = [o.changes[anchor.fragment :][:1] for o in offers]
    reported = [change for few in changes for change in few if change > 0]
    if not reported:
        return "agrees"
    limit = MOST_CHANGES * statistics.median(reported) * merges
    return "agrees" if event.apart <= limit else "apart"


# ---- what counts -----------------------------------------------------------------


def _judge(config: PolicyConfig, state: Search, fragment: int, now: float) -> Step:
    """Take in an anchor, or give it up for the next one, or ask others about it."""
    claim, aim = state.claims[fragment], state.aim
    anchor = claim.anchor
    recorded = (aim.known or {}).get(fragment, {}).get(anchor.replaced, "")
    if recorded and recorded != anchor.digest:
        why = f"its digest is {anchor.digest}, and that of the log {recorded}"
        return _refuse(state, claim, why)
    if aim.first or recorded or anchor.island == aim.trusted:
        return _take(state, claim, checked=True), []
    state, effects = _ask_others(config, state, fragment, now)
    claim = state.claims[fragment]
    waiting = [
        name
        for name, until in claim.asked.items()
        if name not in claim.votes and now < until and _may_come(state, name, now)
    ]
    if waiting:
        return state, effects
    agree, against = 1 + len(claim.by("agrees")), claim.by("differs", "apart", "far")
    if aim.trusted in claim.by("agrees"):
        return _take(state, claim, checked=True), effects
    if aim.trusted in claim.by("differs"):
        return _refuse(state, claim, f"island {aim.trusted!r} has another one")
    if claim.total >= FEWEST_TO_DISBELIEVE:
        if 2 * agree > claim.total:
            return _take(state, claim, checked=True), effects
        names = listed([repr(name) for name in against])
        return _refuse(state, claim, f"it is not confirmed by {names}")
    if not claim.by("differs"):
        return _take(state, claim, checked=False), effects
    if not claim.waits_until:
        until = max(state.decided_by, now + config.outage_budget_s)
        claim = replace(claim, waits_until=until)
        state = replace(state, claims={**state.claims, fragment: claim})
    if now < claim.waits_until:
        return state, effects
    return _give_up(state, claim.torn, torn=True)


def _ask_others(config: PolicyConfig, state: Search, fragment: int, now: float) -> Step:
    """Ask those who offer, and have not been asked, for their ballots."""
    claim, effects = state.claims[fragment], list[Effect]()
    for name, member in sorted(state.members.items()):
        if name == claim.anchor.island or name in claim.asked:
            continue
        if member.connected and now < member.gone_at:
            effects.append(_await(state, member.offer, fragment, claim))
            effects.append(_request(state, member.offer, fragment, claim))
            until = now + _patience_s(config, state)
            claim = replace(claim, asked={**claim.asked, name: until})
    return replace(state, claims={**state.claims, fragment: claim}), effects


def _take(state: Search, claim: Claim, *, checked: bool) -> Search:
    fragment = claim.anchor.fragment
    unchecked = state.unchecked
    if not checked:
        unchecked |= {claim.anchor.island}
    return replace(
        state,
        got={**state.got, fragment: claim.anchor},
        claims={f: c for f, c in state.claims.items() if f != fragment},
        unchecked=unchecked,
    )


def _refuse(state: Search, claim: Claim, why: str) -> Step:
    anchor = claim.anchor
    text = (
        f"the anchor {tuple(anchor.replaced)} of fragment {anchor.fragment} of island "
        f"{anchor.island!r} does not count: {why}; look at that island"
    )
    state = _fail(state, anchor.island, anchor.fragment)
    return state, [Alert(text=text, island=anchor.island)]


def _fail(state: Search, island: str, fragment: int) -> Search:
    """Ask the island no more for a fragment that did not come, or does not count."""
    return replace(
        state,
        failed=state.failed | {(island, fragment)},
        asked={f: value for f, value in state.asked.items() if f != fragment},
        claims={f: value for f, value in state.claims.items() if f != fragment},
    )


def _nobody_left(config: PolicyConfig, state: Search, fragment: int) -> str:
    if state.aim.first:
        (giver,) = state.aim.names
        return (
            f"fragment {fragment} of the run's first parameters did not come from "
            f"island {giver!r} within {_patience_s(config, state):g} s (placement."
            f"compile_budget_s and outage_budget_s), or was not finite"
        )
    text = f"fragment {fragment} did not come from any island that had it"
    if state.aim.known is None:
        return text
    has = [
        f"{name!r} has {tuple(_version(state, name, fragment))}"
        for name in sorted(state.members)
    ]
    known = [tuple(version) for version in sorted(state.aim.known[fragment])]
    return (
        f"{text}, at a version after which the log knows all merges ({known[0]} to "
        f"{known[-1]}): {listed(has)}; bring its disk back, or start the coordinator "
        f"on an empty --workdir: it gathers all fragments, and begins new books"
    )


def _over(config: PolicyConfig, state: Search) -> list[Effect]:
    """Return what ends the search."""
    offers = [member.offer for member in state.members.values()]
    known = Known()
    if not state.aim.first:
        for heard in state.heard.values():
            known = known.higher(heard.known)
        unheard = max(
            leases.most_unheard(
                config, claims.believed_step_s(config, o), o.sequences_per_step
            )
            for o in offers
        )
        islands = len(state.aim.names | state.members.keys())
        position = known.next_position + islands * unheard
        known = known._replace(next_position=position)
    found = FoundTerm(
        run_id=state.run_id,
        term=state.term,
        name=state.aim.name,
        anchors=tuple(state.got[fragment] for fragment in state.aim.lacking),
        tokens=known.tokens,
        next_position=known.next_position,
        offered=tuple(sorted(state.members)),
    )
    if not state.unchecked:
        return [found]
    names = listed([repr(name) for name in sorted(state.unchecked)])
    text = (
        f"the run goes on with values of {names}, which no majority has checked: fewer "
        f"than {FEWEST_TO_DISBELIEVE} islands offer anchors"
    )
    return [Alert(text=text), found]


def _may_come(state: Search, name: str, now: float) -> bool:
    member = state.members.get(name)
    return member is not None and now < member.gone_at


def _version(state: Search, name: str, fragment: int) -> Version:
    """Return the version at which an island offers a fragment."""
    if state.aim.first:
        return FIRST_VERSION
    return state.members[name].offer.versions[fragment]


def _give_up(state: Search, message: str, *, torn: bool = False) -> Step:
    return replace(state, phase="over"), [GiveUp(message=message, torn=torn)]
