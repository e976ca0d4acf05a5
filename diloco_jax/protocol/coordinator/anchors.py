"""Search the islands for anchors that the coordinator's disks do not have.

One search serves three losses, which differ in its `Aim`:

| lost | who is believed | a misfit | the source restarts: anew is |
|---|---|---|---|
| the run | islands of the run of most, by what most claim | is put off | what lacks |
| fragments | those at versions that the log goes on from | is put off | what lacks |
| first parameters | the one island that gives them | is refused | all that it gave |

waiting -> fetching -> over. Islands offer their anchors until the deadline, or until
all have offered. Each fragment is then fetched once, the highest version first, one at
a time per island, by the holder that will keep it. Until the search is over nobody is
let in, and nothing counts that was fetched.

Whatever comes is checked, as docs/design/state.md says: by the digest that the log has,
by ballots of the others that offer, or by the one of them that a person trusts.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import claims, leases
from diloco_jax.protocol.coordinator.search import (
    FEWEST_TO_DISBELIEVE,
    Aim,
    Claim,
    Effect,
    Event,
    FoundTerm,
    GiveUp,
    Heard,
    Known,
    Offered,
    Offering,
    Postpone,
    Search,
    Vote,
    believed_limits,
    claims_of,
    listed,
    may_have_become,
    misfit,
    other_process,
    run_of_most,
    runs_apart,
    too_high,
)
from diloco_jax.protocol.coordinator.state import (
    Disconnected,
    OneStep,
    PolicyConfig,
    Said,
)
from diloco_jax.protocol.holding import AnchorCompared, AnchorKept, AwaitAnchor
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    AnchorRequest,
    Hello,
    Refused,
    Version,
    Welcome,
)

MERGES_APART = 8
"""Merges between two anchors, at most, of which one can tell about the other."""
MOST_CHANGES = 4.0
"""Longest way between two anchors, in median changes for each merge between them."""
LEASES_AWAITED = 2
"""Longest wait for the first offer, and then for the others, in leases."""


def begin(config: PolicyConfig, aim: Aim, now: float) -> Search:
    """Return the state that waits for the first offer.

    The config has a run id if the coordinator knows which run is its own.
    """
    return _awaiting(config, Search(aim=aim, deadline=now), now)


def step(
    config: PolicyConfig, state: Search, event: Event, now: float
) -> tuple[Search, list[Effect]]:
    """Apply one event at time `now` (monotonic seconds)."""
    before, turn = notices(state), _Turn(config, state, now)
    match event:
        case Offered():
            turn.offered(event)
        case Said() | Disconnected():
            turn.heard(event)
        case AnchorKept():
            turn.kept(event)
        case AnchorCompared():
            turn.compared(event)
    if turn.state.phase == "waiting":
        turn.wait()
    if turn.state.phase == "fetching":
        turn.fetch()
    for text in notices(turn.state):
        if text not in before:
            turn.alert(text)
    return turn.state, turn.effects


def next_deadline(state: Search, now: float) -> float:
    """Return the next time at which time alone changes something. `now` is the time of
    the last step, which handled everything due until then."""
    times = [member.gone_at for member in state.members.values()]
    for claim in state.claims.values():
        times += claim.deadlines
    if state.phase == "waiting":
        times = [state.deadline] if now < state.deadline else [*times, state.decided_by]
    return min((at for at in times if at > now), default=math.inf)


def notices(state: Search) -> list[str]:
    """List what people have to see, such as islands that do not fit."""
    parted = runs_apart(member.offer for member in state.members.values())
    torn = [claim.torn for claim in state.claims.values() if claim.torn]
    return [*([parted] if parted else []), *state.misfits.values(), *torn]


def waits_for(state: Search) -> str:
    """Describe the wait, for people."""
    got = f"{len(state.got)} of {len(state.aim.lost)} fragments have arrived"
    if state.aim.first:
        giver = state.aim.giver
        return f"the run begins with the parameters of island {giver!r}, of which {got}"
    if state.aim.known is not None:
        lost = list(state.aim.lost)
        return f"fragments {lost} are lost, and gathered from islands: {got}"
    return f"this coordinator has lost its state and gathers anchors of islands: {got}"


def _awaiting(config: PolicyConfig, state: Search, now: float) -> Search:
    """Return the state that waits for offers from now on."""
    wait_s = LEASES_AWAITED * config.lease_s
    if state.aim.first:
        wait_s = config.compile_budget_s
    decided_by = now + wait_s + config.outage_budget_s
    return replace(state, deadline=now + wait_s, decided_by=decided_by)


def _version(state: Search, name: str, fragment: int) -> Version:
    """Return the version at which an island offers a fragment."""
    if state.aim.first:
        return FIRST_VERSION
    return state.members[name].offer.versions[fragment]


def _highest(heard: Mapping[str, Heard]) -> Known:
    """Return the highest values of which any island has heard."""
    return functools.reduce(Known.higher, (h.known for h in heard.values()), Known())


def _vote(state: Search, anchor: AnchorKept, event: AnchorCompared) -> Vote:
    if event.equal and event.version.number == anchor.replaced.number:
        return "agrees"  # Of another term, too: its beginning renames an anchor.
    if event.version == anchor.replaced:
        return "differs"
    merges = abs(event.version.number - anchor.replaced.number)
    if event.version.term != anchor.replaced.term or merges > MERGES_APART:
        return "far"
    # Whose anchor it is would say that changes are as long as its own way.
    offers = (m.offer for n, m in state.members.items() if n != anchor.island)
    changes = [o.changes[anchor.fragment :][:1] for o in offers]
    reported = [change for few in changes for change in few if change > 0]
    if not reported:
        return "agrees"
    limit = MOST_CHANGES * statistics.median_high(reported) * merges
    return "agrees" if event.apart <= limit else "apart"


class _Turn(OneStep[Search]):
    """One step of a search."""

    # ---- offers ------------------------------------------------------------------

    def offered(self, event: Offered) -> None:
        """Take in an island's offer, refuse it, or tell it to come again."""
        offer, first = event.hello, self.state.aim.first
        name, before = offer.island, self.state.members.get(offer.island)
        if first and name not in self.state.aim.names:
            self._come_again(offer, waits_for(self.state))
            return
        unfit = misfit(self.config, self.state, event)
        if first and (refused := unfit or other_process(before, offer)):
            self.tell(offer.session, refused)
            return
        if unfit is not None and offer.versions:
            self._put_off(offer, unfit.message)
            return
        if unfit is None:
            known = claims_of(offer)
            wrong = too_high(known, self.state.limits)
            if wrong := wrong or self._hear(offer, known):
                self._disbelieve(offer, wrong)
                return
        if before is not None and before.offer.incarnation > offer.incarnation:
            why = f"incarnation {before.offer.incarnation} of this island has offered"
            self._come_again(offer, why)
            return
        if not first and len(offer.versions) != self.config.fragments:
            why = "this coordinator has no state yet, and the island no anchors to "
            self._come_again(offer, f"{why}offer")
            return
        anew = before is not None and before.offer.incarnation < offer.incarnation
        if anew:
            self._forget(name)
        if not self.state.members and self.state.phase == "waiting":
            self.state = _awaiting(self.config, self.state, self.now)
        member = Offering(offer=offer, gone_at=self.now + self.config.lease_s)
        misfits = self.state.misfits.items()
        self.set(
            members={**self.state.members, name: member},
            misfits={n: why for n, why in misfits if n != name},
        )
        run_id = self.config.run_id if first else offer.run_id
        welcome = Welcome(run_id=run_id, term=0, resumed=not first, versions=())
        self.tell(offer.session, welcome)
        # Requests may be lost with the old connection.
        for claim in self.state.claims.values():
            if (claim.anchor is None and claim.island == name) or (
                name in claim.asked and (anew or name not in claim.votes)
            ):
                self._ask(offer, claim, awaited=not anew)

    def heard(self, event: Said | Disconnected) -> None:
        """Note a sign of life of an island that offers, or that it lost its
        connection."""
        member = self.state.members.get(event.island)
        if member is not None and member.offer.session == event.session:
            member = replace(
                member,
                gone_at=self.now + self.config.lease_s,
                connected=isinstance(event, Said),
            )
            self.set(members={**self.state.members, event.island: member})

    def _hear(self, offer: Hello, known: Known) -> str:
        """Note what an island has heard of the run. If it knows a term as high as the
        one that is to begin, that one gets a higher number, and all anchors come anew.
        Explain why it is not believed if it says so again: it could hold all up."""
        state, name = self.state, offer.island
        fetching = state.phase == "fetching" and not state.aim.term
        raises = fetching and known.term >= state.term
        if raises and name in state.raised:
            return (
                f"it claims term = {known.term}, and has made the new one's number "
                f"{state.term} by such a claim before"
            )
        before = state.heard.get(name, Heard("", Known()))
        run_id = offer.run_id or before.run_id
        if before.run_id in ("", run_id):
            known = before.known.higher(known)
        self.set(heard={**state.heard, name: Heard(run_id, known)})
        if raises:
            raised = state.raised | {name}
            self.set(term=known.term + 1, claims={}, got={}, raised=raised)
        return ""

    def _forget(self, name: str) -> None:
        """Forget how an island voted, since another process of it has come: it is asked
        anew, and for first parameters for all that it gave. An anchor that has come
        whole stays, and so do the deadlines of what has not: one that came again and
        again would hold all up."""
        if self.state.aim.first:
            self.state = begin(self.config, self.state.aim, self.now)
            return
        found = self.state.claims.items()
        self.set(claims={f: claim.without(name) for f, claim in found})

    def _come_again(self, offer: Hello, why: str) -> None:
        again = Postpone(session=offer.session, message=f"{why}; come again")
        self.effects.append(again)

    def _put_off(self, offer: Hello, unfit: str) -> None:
        """Go on without an island. It is not refused, since that would end it: it may
        hold the run's anchors, and this coordinator be wrong."""
        self.set(misfits={**self.state.misfits, offer.island: unfit})
        message = f"{unfit}; the others are gathered without it"
        self.effects.append(Postpone(session=offer.session, message=message))

    def _disbelieve(self, offer: Hello, wrong: str) -> None:
        """Refuse an island whose claims are not believed, for this reason."""
        message = (
            f"island {offer.island!r} is not believed as a new term begins: {wrong}; "
            f"start it again with incarnation {offer.incarnation + 1}"
        )
        self.tell(offer.session, Refused(code="claims", message=message))

    # ---- the wait ----------------------------------------------------------------

    def wait(self) -> None:
        """Begin to fetch once all have offered, or at the deadline."""
        state, now = self.state, self.now
        here = {n for n, m in state.members.items() if m.connected and now < m.gone_at}
        all_here = bool(state.aim.names) and state.aim.names <= here
        if not all_here and now < state.deadline:
            return
        if not state.members:
            unfit = bool(state.misfits) and not state.aim.first
            self._give_up(self._nobody_offers(), unfit=unfit)
            return
        offers = [m.offer for m in state.members.values() if now < m.gone_at]
        offers = offers or [member.offer for member in state.members.values()]
        run_id = self.config.run_id or run_of_most(offer.run_id for offer in offers)
        if not run_id:
            if now >= state.decided_by:
                self._give_up(runs_apart(offers))
            return
        self.set(run_id=run_id)
        for member in state.members.values():
            offered = Offered(hello=member.offer)
            if other := misfit(self.config, self.state, offered):
                self._put_off(member.offer, other.message)
        ours = ("", run_id)
        members = {n: m for n, m in state.members.items() if m.offer.run_id in ours}
        # A member may have said hello again without anchors, and in another run.
        heard = {n: Heard(run_id, claims_of(m.offer)) for n, m in members.items()}
        heard |= {n: h for n, h in state.heard.items() if h.run_id in ours}
        claimed = [heard[name].known for name in members]
        limits = believed_limits(claimed, self.config.total_tokens)
        for name in [n for n, h in heard.items() if too_high(h.known, limits)]:
            wrong = too_high(heard.pop(name).known, limits)
            if name in members:
                self._disbelieve(members.pop(name).offer, wrong)
        term = FIRST_VERSION.term
        if not state.aim.first:
            term = 1 + _highest(heard).term
        self.set(
            phase="fetching",
            limits=limits,
            term=state.aim.term or term,
            heard=heard,
            members=members,
        )

    def _nobody_offers(self) -> str:
        """Explain that there is no offer to begin with."""
        if self.state.aim.first:
            return (
                f"island {self.state.aim.giver!r}, which is to give the run's first "
                f"parameters, did not come within placement.compile_budget_s = "
                f"{self.config.compile_budget_s:g} s"
            )
        seconds = LEASES_AWAITED * self.config.lease_s
        if not self.state.misfits:
            return f"no island offered its anchors within {seconds:g} s"
        return (
            f"no island offered anchors that fit within {seconds:g} s: "
            f"{listed(list(self.state.misfits.values()))}. If the islands are right, "
            f"it is this coordinator that is wrong: start it with their run's "
            f"config.json"
        )

    # ---- who is asked, for what, until when, and who is next ------------------------

    def fetch(self) -> None:
        """Judge what has come, ask for what lacks, and end the search with the last."""
        aim = self.state.aim
        if aim.first and not any(map(self._may_come, self.state.members)):
            # It may come again, with others.
            self.state = begin(self.config, aim, self.now)
            return
        for fragment, claim in self.state.claims.items():
            if claim.anchor is not None:
                self._judge(claim, claim.anchor)
            elif self.now >= claim.until or not self._may_come(claim.island):
                self._fail(claim.island, fragment)
            if self.state.phase == "over":
                return
        for fragment in aim.lost:
            if fragment in self.state.got or fragment in self.state.claims:
                continue
            holders = self._holders(fragment)
            if not holders:
                self._nobody_left(fragment)
                return
            self._ask_one(fragment, holders)
        if len(self.state.got) == len(aim.lost):
            self._end()

    def _holders(self, fragment: int) -> list[str]:
        """Return the islands whose anchor of a fragment may be asked for. One that did
        not send another, or not a good one, comes last: it could delay each one."""
        state = self.state
        able = [
            name
            for name in sorted(state.members)
            if self._may_come(name)
            and (name, fragment) not in state.failed
            and state.aim.counts(fragment, _version(state, name, fragment))
        ]
        late = {name for name, _ in state.failed}
        return [name for name in able if name not in late] or able

    def _ask_one(self, fragment: int, holders: list[str]) -> None:
        """Ask an island with the highest version that is asked for nothing else."""
        state = self.state
        highest = max(_version(state, name, fragment) for name in holders)
        busy = {c.island for c in state.claims.values() if c.anchor is None}
        for name in holders:
            member = state.members[name]
            free = member.connected and name not in busy
            if free and _version(state, name, fragment) == highest:
                until = self.now + self._patience_s
                claim = Claim(fragment=fragment, island=name, until=until)
                self._put(claim)
                self._ask(member.offer, claim)
                return

    def _may_come(self, name: str) -> bool:
        member = self.state.members.get(name)
        return member is not None and self.now < member.gone_at

    @property
    def _patience_s(self) -> float:
        """Seconds within which an anchor must come. First parameters come at the
        island's first boundary, after it has compiled."""
        compiles_s = self.config.compile_budget_s if self.state.aim.first else 0.0
        return compiles_s + self.config.outage_budget_s

    def _ask(self, offer: Hello, claim: Claim, *, awaited: bool = False) -> None:
        """Ask an island for the anchor or, if that has come, for its ballot. awaited:
        the holder awaits it already."""
        sample = self.state.aim.sample_of(claim)
        term, fragment = self.state.term, claim.fragment
        if not awaited:
            awaits = AwaitAnchor(
                fragment=fragment,
                island=offer.island,
                incarnation=offer.incarnation,
                term=term,
                sample=sample,
            )
            self.effects.append(awaits)
        request = AnchorRequest(fragment=fragment, term=term, sample=sample)
        self.tell(offer.session, request)

    def kept(self, event: AnchorKept) -> None:
        """Note that a holder has an awaited anchor on disk, or that it is not
        finite."""
        state, fragment = self.state, event.fragment
        claim, member = state.claims.get(fragment), state.members.get(event.island)
        if claim is None or claim.anchor is not None or member is None:
            return
        asked = (claim.island, member.offer.incarnation, state.term)
        if asked != (event.island, event.incarnation, event.version.term):
            return
        offered = _version(state, event.island, fragment)
        fits = may_have_become(offered, event.replaced)
        if fits and state.aim.counts(fragment, event.replaced) and not event.unfit:
            self._put(replace(claim, anchor=event))
            return
        what = "is not finite" if event.unfit else f"was offered as {tuple(offered)}"
        self._fail(event.island, fragment)
        self.alert(
            f"the anchor {tuple(event.replaced)} of fragment {fragment} of island "
            f"{event.island!r} {what}: it does not count",
            event.island,
        )

    def compared(self, event: AnchorCompared) -> None:
        """Note how an island's ballot compares with the anchor that is being judged."""
        member = self.state.members.get(event.island)
        claim = self.state.claims.get(event.fragment)
        if member is None or claim is None or claim.anchor is None:
            return
        mine = member.offer.incarnation == event.incarnation
        if mine and event.island in claim.asked:
            vote = _vote(self.state, claim.anchor, event)
            self._put(replace(claim, votes={**claim.votes, event.island: vote}))

    # ---- what counts --------------------------------------------------------------

    def _judge(self, claim: Claim, anchor: AnchorKept) -> None:
        """Take in an anchor, or give it up for the next one, or ask others about it."""
        aim = self.state.aim
        recorded = (aim.known or {}).get(anchor.fragment, {}).get(anchor.replaced, "")
        if recorded and recorded != anchor.digest:
            self._refuse(
                anchor, f"its digest is {anchor.digest}, and that of the log {recorded}"
            )
            return
        if aim.first or recorded or anchor.island == aim.trusted:
            self._take(anchor)
            return
        claim = self._ask_others(claim)
        if any(self._may_vote(name, claim) for name in self.state.members):
            return
        agree, against = claim.by("agrees"), claim.by("differs", "apart", "far")
        if aim.trusted in claim.votes:
            if aim.trusted in agree:
                self._take(anchor)
            else:
                self._refuse(anchor, f"it is not confirmed by {aim.trusted!r}")
        elif claim.total >= FEWEST_TO_DISBELIEVE:
            if 2 * (1 + len(agree)) > claim.total:
                self._take(anchor)
            else:
                names = listed([repr(name) for name in against])
                self._refuse(anchor, f"it is not confirmed by {names}")
        elif not claim.by("differs"):
            self.set(unchecked=self.state.unchecked | {anchor.island})
            self._take(anchor)
        else:
            self._wait_for_a_third(claim)

    def _ask_others(self, claim: Claim) -> Claim:
        """Ask those who offer, and have not been asked, for their ballots."""
        for name, member in sorted(self.state.members.items()):
            able = member.connected and self._may_come(name)
            if able and name != claim.island and name not in claim.asked:
                self._ask(member.offer, claim)
                until = self.now + self._patience_s
                claim = replace(claim, asked={**claim.asked, name: until})
        self._put(claim)
        return claim

    def _may_vote(self, name: str, claim: Claim) -> bool:
        """Tell whether the ballot of an island is still to come: it may have lost its
        connection before it was asked."""
        if name == claim.island or name in claim.votes or not self._may_come(name):
            return False
        return self.now < claim.asked.get(name, math.inf)

    def _wait_for_a_third(self, claim: Claim) -> None:
        """Wait until a third island decides between two, and give up in the end."""
        if not claim.waits_until:
            until = max(self.state.decided_by, self.now + self.config.outage_budget_s)
            claim = replace(claim, waits_until=until)
            self._put(claim)
        if self.now >= claim.waits_until:
            self._give_up(claim.torn)

    def _put(self, claim: Claim) -> None:
        self.set(claims={**self.state.claims, claim.fragment: claim})

    def _drop(self, fragment: int) -> None:
        claims = self.state.claims.items()
        self.set(claims={f: claim for f, claim in claims if f != fragment})

    def _take(self, anchor: AnchorKept) -> None:
        self._drop(anchor.fragment)
        self.set(got={**self.state.got, anchor.fragment: anchor})

    def _refuse(self, anchor: AnchorKept, why: str) -> None:
        self._fail(anchor.island, anchor.fragment, why)
        self.alert(
            f"the anchor {tuple(anchor.replaced)} of fragment {anchor.fragment} of "
            f"island {anchor.island!r} does not count: {why}; look at that island",
            anchor.island,
        )

    def _fail(self, island: str, fragment: int, why: str = "") -> None:
        """Ask the island no more for a fragment that did not come, or does not
        count."""
        self._drop(fragment)
        self.set(failed={**self.state.failed, (island, fragment): why})

    # ---- the end -------------------------------------------------------------------

    def _nobody_left(self, fragment: int) -> None:
        """Give up, since no island is left whose anchor of a fragment may count."""
        state = self.state
        if state.aim.first:
            self._give_up(
                f"fragment {fragment} of the run's first parameters did not come from "
                f"island {state.aim.giver!r} within {self._patience_s:g} s (placement."
                f"compile_budget_s and outage_budget_s), or was not finite"
            )
            return
        versions = {n: tuple(_version(state, n, fragment)) for n in state.members}
        refused = [
            f"that of {name!r} at {versions[name]}: {why}"
            for (name, of), why in state.failed.items()
            if why and of == fragment and name in versions
        ]
        text, remedies = "did not come from any island that had it", list[str]()
        if refused:
            text = f"has no anchor that counts ({listed(refused)})"
            remedies.append(
                "start the coordinator again with --trust and the island whose values "
                "the run is to go on with"
            )
        if state.aim.known is not None:
            has = sorted(f"{name!r} has {value}" for name, value in versions.items())
            known = [tuple(version) for version in sorted(state.aim.known[fragment])]
            text += (
                f", at a version after which the log knows all merges ({known[0]} to "
                f"{known[-1]}): {listed(has)}"
            )
            remedies.append("bring its disk back")
            remedies.append(
                "start the coordinator on an empty --workdir: it gathers all "
                "fragments, and begins new books"
            )
        if remedies:
            text += f"; {', or '.join(remedies)}"
        self._give_up(f"fragment {fragment} {text}")

    def _end(self) -> None:
        """End the search, with all anchors."""
        state, config = self.state, self.config
        known = Known()
        if not state.aim.first:
            known = _highest(state.heard)
            unheard = max(
                leases.most_unheard(
                    config, claims.believed_step_s(config, o), o.sequences_per_step
                )
                for o in (member.offer for member in state.members.values())
            )
            islands = len(state.aim.names | state.members.keys())
            position = known.next_position + islands * unheard
            known = known._replace(next_position=position)
        if state.unchecked:
            names = listed([repr(name) for name in sorted(state.unchecked)])
            self.alert(
                f"the run goes on with values of {names}, which no majority has "
                f"checked: fewer than {FEWEST_TO_DISBELIEVE} islands said what they "
                f"have"
            )
        found = FoundTerm(
            run_id=state.run_id,
            term=state.term,
            name=state.aim.name,
            anchors=tuple(state.got[fragment] for fragment in state.aim.lost),
            tokens=known.tokens,
            next_position=known.next_position,
            offered=tuple(sorted(state.members)),
        )
        self.effects.append(found)
        self.set(phase="over")

    def _give_up(self, message: str, *, unfit: bool = False) -> None:
        self.effects.append(GiveUp(message=message, unfit=unfit))
        self.set(phase="over")
