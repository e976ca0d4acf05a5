"""An island's outstanding delta for a fragment: taken, arrived, judged, given up.

The record of a delta's steps comes on the control stream, its bytes on a bulk stream;
the delta can be merged when both have arrived.

Deltas that are much longer than those of the other islands are refused, by the rule of
docs/design/bounds.md, and an island is quarantined after too many unfit ones in a row.
There is no lower bound: a minority of the islands can neither bring in a long delta nor
keep others out. Deltas are judged when the fragment closes, so that those of one tick
are compared. No fragment waits for quarantined islands, so theirs are judged as they
arrive.

Every refusal makes the island restart that fragment from its anchor, so a cycle later
nothing of its old values is left. The coordinator still asks a quarantined island for
its deltas and judges them, but merges none. It releases the island once all deltas of
`sync.release_cycles` cycles in a row were fit, or when an operator asks for it. A new
incarnation of a quarantined island is quarantined too. A majority of the live islands
is never quarantined: if most differ from the rest, nobody can tell who is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    TAKE,
    Account,
    Fragment,
    Note,
    PolicyConfig,
    State,
    Take,
    Turn,
    averaged,
    booked,
    outstanding,
    take_moved,
    take_state,
    with_account,
    with_island,
)
from diloco_jax.protocol.holding import DeltaArrived, Drop, Merge
from diloco_jax.protocol.messages import (
    Contribution,
    DeltaKey,
    Outstanding,
    Record,
    RefusalReason,
    ResendRequest,
    TakeVerdict,
    Told,
    Verdict,
    Version,
)

UNFIT_DELTAS = 10
"""Consecutive deltas of one fragment that are not finite."""


def took(turn: Turn, fragment: Fragment, name: str, record: Record) -> Fragment:
    """Note that the island took the fragment, for steps [record.start, record.step)."""
    account = fragment.accounts[name]
    asked = account.take
    if state := _known_as(account, record.tick):
        turn.ignore("take", state, "record")
        return fragment
    held = Outstanding(
        fragment=fragment.index,
        tick=record.tick,
        start=record.start,
        end=record.step,
        base=record.version,
        seq=record.seq,
        rate_sum=record.rate_sum,
    )
    fragment = known(turn, fragment, name, held)
    take = outstanding(fragment, name)
    if not take.refused:
        pending(turn, fragment, name)
    expected = asked is not None and asked.tick == record.tick
    if not (expected or take.refused or take.arrived):
        # The take was asked for before a crash: bytes that came first were not kept.
        fragment = ask_to_resend(turn, fragment, name)
    return fragment


def known(turn: Turn, fragment: Fragment, name: str, held: Outstanding) -> Fragment:
    """Note the steps of a take; does nothing if they are known already."""
    account = fragment.accounts[name]
    asked = account.take
    if _known_as(account, held.tick):
        return fragment
    # Steps between the settled ones and this take are in no delta: adoption lost them.
    start = max(held.start, account.start)
    account = account.lose(start - account.start, "overwritten")
    if asked is None or asked.tick != held.tick:
        asked = Take(tick=held.tick)
    account = replace(account, start=start, take=asked)
    fragment = take_moved(
        with_account(fragment, name, account),
        name,
        "record",
        start=start,
        end=max(held.end, start),
        base=held.base,
        taken_at=turn.now,
        rate_sum=held.rate_sum,
    )
    if held.start < start:
        return refuse(turn, fragment, name, "overlap")
    if held.end <= start:
        return refuse(turn, fragment, name, "empty")
    fragment = _refuse_miscounted(turn, fragment, name)
    return refuse_if_untimely(turn, fragment, name)


def _known_as(account: Account, tick: int) -> str:
    """Return the state of a take whose steps are known already or have been judged;
    empty if they are new."""
    if account.take is not None and account.take.end is not None:
        return take_state(account.take)
    told = account.told
    return "judged" if told is not None and tick <= told.tick else ""


def is_awaited(fragment: Fragment, name: str, incarnation: int, tick: int) -> bool:
    """Tell whether the coordinator waits for the bytes of this take.

    After a crash it does so only once a hello or a record has told of the take.
    """
    account = fragment.accounts.get(name)
    if account is None or account.incarnation != incarnation:
        return False
    take = account.take
    return take is not None and take.tick == tick and not take.refused


def pending(turn: Turn, fragment: Fragment, name: str) -> None:
    """Tell an island that its outstanding take came too late for the current
    version, which it may be about to adopt."""
    take = outstanding(fragment, name)
    if take.end is not None and take.base < fragment.version:
        verdict = verdict_at(fragment, take.tick, "pending")
        turn.tell(fragment.accounts[name].session, verdict)


def arrived(turn: Turn, fragment: Fragment, event: DeltaArrived) -> Fragment:
    """Note that a delta's bytes have arrived, or proved unfit."""
    name = event.island
    take = fragment.accounts[name].take
    if take is None or take.tick != event.tick:
        drop_unknown(turn, fragment, event)
        turn.ignore("take", "none", "bytes")
        return fragment
    if take.arrived:
        turn.ignore("take", take_state(take), "bytes")
        return fragment
    if take.taken_at and not event.refusal and not take.refused:
        transfer_s = averaged(fragment.transfer_seconds, turn.now - take.taken_at)
        fragment = replace(fragment, transfer_seconds=transfer_s)
    measured = {"norm": event.norm, "used": event.used, "uses": event.uses}
    fragment = take_moved(fragment, name, "bytes", arrived=True, **measured)
    if event.refusal:
        return refuse(turn, fragment, name, event.refusal)
    if take.refused:
        drop(turn, fragment, name)
    return _refuse_miscounted(turn, fragment, name)


def _refuse_miscounted(turn: Turn, fragment: Fragment, name: str) -> Fragment:
    """Refuse a take, both of whose doors have passed, that says more of a piece's rows
    were used than it has tokens: each token uses one row, of data that was leased."""
    account, take = fragment.accounts[name], outstanding(fragment, name)
    if take.end is None:
        return fragment
    tokens = (take.end - take.start) * account.tokens_per_step
    if take.used <= tokens:
        return fragment
    return refuse(turn, fragment, name, "miscounted", tokens)


def gave_up(
    turn: Turn, fragment: Fragment, name: str, tick: int, *, kept: bool
) -> Fragment:
    """Note that the island has heard of a refusal, which ends the take.

    kept: the island's parameters still have the delta's steps, and its next delta will
    have them; otherwise they are lost.
    """
    account = fragment.accounts[name]
    take = account.take
    if take is None or take.tick != tick or take.end is None:
        mine = take is not None and take.tick == tick
        turn.ignore("take", take_state(take) if mine else "none", "give up")
        return fragment
    TAKE.check(take_state(take), "give up", "none")
    reason = take.refused or "refused"
    if not kept:
        account = account.lose(take.end - take.start, reason)
        account = replace(account, start=take.end)
    told = Told(tick=tick, verdict="refused", reason=reason)
    return with_account(fragment, name, replace(account, take=None, told=told))


def leave_behind(fragment: Fragment, name: str) -> Fragment:
    """Keep a leaving island's ready delta for the next merge, unless a delta of an
    earlier incarnation is already kept for it."""
    delta = ready(fragment, name)
    if (
        delta is None
        or fragment.phase == "done"
        or is_merging(fragment, name, delta.tick)
        or any(other.island == name for other in fragment.left_behind)
    ):
        return fragment
    fragment = booked(fragment, name, take=None)
    return replace(fragment, left_behind=(*fragment.left_behind, delta))


def expire_left_behind(turn: Turn, fragment: Fragment) -> Fragment:
    """Drop the deltas left behind that lag the current version too far; their steps
    are lost."""
    for old in fragment.left_behind:
        if not _is_in_time(turn.config, old.base, fragment.version):
            fragment = refuse_left_behind(turn, fragment, old, "stale")
    return fragment


def refuse_left_behind(
    turn: Turn,
    fragment: Fragment,
    old: Contribution,
    reason: RefusalReason,
    most: float = 0.0,
) -> Fragment:
    """Drop a delta that was left behind; its steps are lost. most: as in `refuse`."""
    account = fragment.accounts[old.island].lose_tokens(old.tokens, reason)
    fragment = with_account(fragment, old.island, account)
    _note_refusal(turn, old.key(fragment.index), reason, old.norm, most)
    turn.effects.append(Drop(delta=old.key(fragment.index)))
    others = tuple(c for c in fragment.left_behind if c is not old)
    return replace(fragment, left_behind=others)


def _note_refusal(
    turn: Turn, delta: DeltaKey, reason: RefusalReason, norm: float, most: float
) -> None:
    turn.note(
        records.DeltaRefused(**delta._asdict(), reason=reason, norm=norm, most=most)
    )


def ready(fragment: Fragment, name: str) -> Contribution | None:
    """Return an island's take as a merge's contribution; None if it is not ready."""
    account = fragment.accounts[name]
    take = account.take
    if take is None or take.end is None or not take.ready:
        return None
    return Contribution(
        island=name,
        incarnation=account.incarnation,
        tick=take.tick,
        start=take.start,
        end=take.end,
        tokens=(take.end - take.start) * account.tokens_per_step,
        base=take.base,
        norm=take.norm,
        rate_sum=take.rate_sum,
        uses=take.uses,
    )


def refuse(
    turn: Turn,
    fragment: Fragment,
    name: str,
    reason: RefusalReason,
    most: float = 0.0,
    *,
    tell: bool = True,
) -> Fragment:
    """Refuse an outstanding take; it stays outstanding until the island knows. most:
    the length that was allowed, or its tokens, if that is the reason. tell: False if a
    publish tells the island."""
    take = outstanding(fragment, name)
    if take.refused:
        return fragment
    fragment = take_moved(fragment, name, "refuse", refused=reason)
    if reason == "non_finite":
        fragment = replace(fragment, unfit_deltas=fragment.unfit_deltas + 1)
        _alert_of_unfit(turn, fragment, name)
    norm = take.used if reason == "miscounted" else take.norm
    _note_refusal(turn, delta_of(fragment, name), reason, norm, most)
    if tell:
        verdict = verdict_at(fragment, take.tick, "refused", reason)
        turn.tell(fragment.accounts[name].session, verdict)
    drop(turn, fragment, name)
    return fragment


def refuse_if_untimely(
    turn: Turn, fragment: Fragment, name: str, *, tell: bool = True
) -> Fragment:
    """Refuse a take that is in no merge yet, if its base lags the current version too
    far, or is above it.

    A merge under way does not count, since it is not durable yet: after a crash during
    it, the island would reopen steps that the next coordinator merges.
    """
    base = outstanding(fragment, name).base
    if _is_in_time(turn.config, base, fragment.version):
        return fragment
    reason: RefusalReason = "future" if base > fragment.version else "stale"
    return refuse(turn, fragment, name, reason, tell=tell)


def verdict_at(
    fragment: Fragment, tick: int, verdict: Verdict, reason: str = ""
) -> TakeVerdict:
    """Return the verdict on an island's take at the fragment's version."""
    return TakeVerdict(
        fragment=fragment.index,
        tick=tick,
        verdict=verdict,
        reason=reason,
        version=fragment.version,
    )


def ask_to_resend(turn: Turn, fragment: Fragment, name: str) -> Fragment:
    """Ask an island to send again a delta that it still holds. Nobody knows then how
    long the delta is under way: outages are no transfer."""
    take = outstanding(fragment, name)
    message = ResendRequest(fragment=fragment.index, tick=take.tick)
    turn.tell(fragment.accounts[name].session, message)
    return booked(fragment, name, take=replace(take, taken_at=0.0))


def is_merging(fragment: Fragment, name: str, tick: int) -> bool:
    """Tell whether the take is in a merge under way."""
    return any(c.island == name and c.tick == tick for c in fragment.merging)


def delta_of(fragment: Fragment, name: str) -> DeltaKey:
    """Return the key of an outstanding take's delta."""
    incarnation = fragment.accounts[name].incarnation
    return DeltaKey(name, incarnation, fragment.index, outstanding(fragment, name).tick)


def drop(turn: Turn, fragment: Fragment, name: str) -> None:
    """Drop the bytes of an outstanding take, which are no longer needed."""
    turn.effects.append(Drop(delta=delta_of(fragment, name)))


def drop_unknown(turn: Turn, fragment: Fragment, event: DeltaArrived) -> None:
    """Drop a delta with no outstanding take, unless it was left behind."""
    delta = DeltaKey(event.island, event.incarnation, event.fragment, event.tick)
    if delta not in [old.key(fragment.index) for old in fragment.left_behind]:
        turn.effects.append(Drop(delta=delta))


def _is_in_time(config: PolicyConfig, base: Version, current: Version) -> bool:
    lag = current.number - base.number
    return base.term == current.term and 0 <= lag <= config.max_staleness


FEWEST = 2
"""Lengths without which nothing is usual."""


def refuse_long(turn: Turn, fragment: Fragment, fleet: Fleet) -> Fragment:
    """Refuse the ready deltas that are out of bounds."""
    if not turn.config.delta_bound:
        return fragment
    before, usual = fragment, Usual(turn.config, fragment, fleet)
    for name in before.accounts:
        for delta in _ready_deltas(before, name):
            most = usual.most(name, delta)
            if delta.norm > most:
                fragment = _refuse(turn, fragment, delta, "out_of_bounds", most)
    return fragment


def _ready_deltas(fragment: Fragment, name: str) -> Iterator[Contribution]:
    """Yield the island's deltas that can be merged: its own, and one that an earlier
    incarnation left behind."""
    delta = ready(fragment, name)
    if delta is not None and not is_merging(fragment, name, delta.tick):
        yield delta
    yield from (old for old in fragment.left_behind if old.island == name)


def _refuse(
    turn: Turn,
    fragment: Fragment,
    delta: Contribution,
    reason: RefusalReason,
    most: float,
) -> Fragment:
    """most: the length that is allowed."""
    most = 0.0 if most == math.inf else most
    if any(delta is old for old in fragment.left_behind):
        return refuse_left_behind(turn, fragment, delta, reason, most)
    return refuse(turn, fragment, delta.island, reason, most)


class Usual:
    """The lengths of one fragment's deltas, to which others are held."""

    def __init__(self, config: PolicyConfig, fragment: Fragment, fleet: Fleet) -> None:
        self._config, self._fragment, self._fleet = config, fragment, fleet

    @functools.cached_property
    def _measures(self) -> dict[str, Contribution]:
        """The islands' deltas whose lengths count, by name."""
        found, fleet = {}, self._fleet
        for name, account in self._fragment.accounts.items():
            # An absent island's delta that is ready is merged with the others.
            here = account.take is not None and account.take.ready
            if name in fleet.quarantined or not (here or fleet.is_live(name)):
                continue
            for delta in (account.last, ready(self._fragment, name)):
                if _has_length(delta):
                    found[name] = delta
        return found

    def most(self, name: str, delta: Contribution) -> float:
        """Return the length allowed to a delta of the island; infinity if too little is
        known of the others."""
        bound, account = self._config.delta_bound, self._fragment.accounts[name]
        if not bound or not delta.norm:
            return math.inf
        usual = [known for other, known in self._measures.items() if other != name]
        if _has_length(account.last):
            usual.append(account.last)
        if len(usual) < FEWEST:
            return math.inf
        norm = _upper_median(known.norm for known in usual)
        per_rate = _upper_median(known.norm / known.rate_sum for known in usual)
        # What is open began after the base of the last delta, or with the run.
        highest = self._fleet.highest_rate(account.base_tokens)
        return bound * max(norm, per_rate * min(delta.rate_sum, delta.steps * highest))


def _has_length(delta: Contribution | None) -> TypeGuard[Contribution]:
    return delta is not None and delta.norm > 0 and delta.rate_sum > 0


def _upper_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def advance_quarantine(turn: Turn) -> None:
    """Count the deltas that the step has judged; quarantine and release islands."""
    if not turn.config.quarantine_after:
        return
    for effect in tuple(turn.effects):
        match effect:
            case Note(record=records.DeltaRefused(reason=reason) as refused):
                if reason in ("non_finite", "out_of_bounds", "miscounted"):
                    _unfit(turn, refused)
                elif reason == "quarantined":
                    _fit(turn, refused)
            case Merge(contributions=contributions):
                for contribution in contributions:
                    island = turn.state.islands[contribution.island]
                    if island.streak and not island.quarantined:
                        turn.put(replace(island, streak=0))


def refuse_quarantined(turn: Turn) -> None:
    """Refuse the deltas that have arrived from quarantined islands, in every phase of
    their fragments.

    Nobody waits for these deltas, so they may come too late for a merge. The reason
    says whether a delta is within bounds; enough of those in a row release the island.
    """
    for name in turn.state.islands.standing.quarantined:
        for before in turn.state.fragments:
            take = before.accounts[name].take
            if not (before.left_behind or (take is not None and take.ready)):
                continue  # This is asked for each fragment after each event.
            usual = Usual(turn.config, before, Fleet(turn.config, turn.state))
            fragment = before
            for delta in _ready_deltas(before, name):
                most = usual.most(name, delta)
                fits = delta.norm <= most
                reason: RefusalReason = "quarantined" if fits else "out_of_bounds"
                fragment = _refuse(turn, fragment, delta, reason, most)
            if fragment is not before:
                turn.put(fragment)


def quarantine_moved(state: State, name: str, *, quarantined: bool) -> State:
    """Return the state with the island in quarantine, or out of it; recovery applies
    this too.
    """
    island = replace(state.islands[name], quarantined=quarantined, streak=0)
    return with_island(state, island)


def _unfit(turn: Turn, refused: records.DeltaRefused) -> None:
    name, config = refused.island, turn.config
    island = turn.state.islands[name]
    if island.quarantined:
        turn.put(replace(island, streak=0))
        return
    island = replace(island, streak=island.streak + 1)
    turn.put(island)
    if island.streak < config.quarantine_after or not _may_lack(turn.state):
        return
    turn.state = quarantine_moved(turn.state, name, quarantined=True)
    turn.persist(records.Quarantined(**island.who, refused=island.streak))
    what = "is not finite"
    if refused.reason == "out_of_bounds":
        what = f"has a length of {refused.norm:.3g}, but {refused.most:.3g} is allowed"
    if refused.reason == "miscounted":
        what = (
            f"says that {refused.norm:.0f} of its tokens used a row, but it has "
            f"{refused.most:.0f}"
        )
    turn.alert(
        f"island {name!r} is quarantined: {island.streak} of its deltas in a row were "
        f"unfit, and the last one, of fragment {refused.fragment}, {what}; it restarts "
        f"from the global parameters, and is merged again once its deltas are within "
        f"bounds for {config.release_cycles} cycles; look at its log, its data and its "
        f"machine",
        name,
    )


def _fit(turn: Turn, refused: records.DeltaRefused) -> None:
    island = turn.state.islands[refused.island]
    if not island.quarantined or _is_untold(turn.config, turn.state, refused):
        return
    island = replace(island, streak=island.streak + 1)
    turn.put(island)
    if island.streak >= turn.config.release_cycles * turn.config.fragments:
        release(turn, island)


def release(turn: Turn, island: Island, *, asked: bool = False) -> None:
    """End an island's quarantine. asked: an operator wants it."""
    name, fit = island.name, island.streak
    turn.state = quarantine_moved(turn.state, name, quarantined=False)
    turn.persist(records.Released(**island.who, fit=fit, asked=asked))
    why = ", as an operator wanted" if asked else ""
    turn.alert(
        f"island {name!r} is out of quarantine after {fit} deltas in a row that were "
        f"within bounds{why}; its deltas are merged again",
        name,
    )


def _is_untold(
    config: PolicyConfig, state: State, refused: records.DeltaRefused
) -> bool:
    """Tell whether the delta cannot be judged yet: it came first, and the lengths of
    the others' deltas are still to come.
    """
    if not (config.delta_bound and refused.norm) or refused.most:
        return False
    fleet = state.islands.standing
    others = {*fleet.counted} - {*fleet.quarantined}
    return len(others) >= FEWEST


def _may_lack(state: State) -> bool:
    """Tell whether one more island in quarantine leaves most of the live ones."""
    fleet = state.islands.standing
    apart = {*fleet.live} & {*fleet.quarantined}
    return 2 * (len(apart) + 1) < len(fleet.live)


def _alert_of_unfit(turn: Turn, fragment: Fragment, name: str) -> None:
    """Raise the alert for a delta that is not finite; once between two merges."""
    if fragment.unfit_deltas == UNFIT_DELTAS:
        turn.alert(
            f"{UNFIT_DELTAS} deltas of fragment {fragment.index} in a row were not "
            f"finite, the last one of island {name!r}, and none was merged between "
            f"them: the run diverges, and what it computes is lost; stop it, look at "
            f"the islands' losses, and for the next run lower inner.learning_rate or "
            f"look at the data",
            name,
        )
