"""An island's outstanding delta for a fragment: taken, arrived, refused, given up.

The record of a delta's steps comes on the control stream, its bytes on a bulk stream;
the delta can be merged when both have arrived.
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import alerts
from diloco_jax.protocol.coordinator.state import (
    TAKE,
    Account,
    Fragment,
    PolicyConfig,
    Take,
    Turn,
    averaged,
    take_state,
    with_account,
)
from diloco_jax.protocol.holding import DeltaArrived, Drop
from diloco_jax.protocol.messages import ResendRequest, TakeVerdict
from diloco_jax.protocol.values import (
    FUTURE,
    NON_FINITE,
    OVERLAP,
    STALE,
    Contribution,
    DeltaKey,
    Outstanding,
    Record,
    RefusalReason,
    Told,
    Verdict,
    Version,
)


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
    take = replace(
        asked,
        start=start,
        end=max(held.end, start),
        base=held.base,
        taken_at=turn.now,
        rate_sum=held.rate_sum,
    )
    TAKE.check(take_state(asked), "record", take_state(take))
    account = replace(account, start=start, take=take)
    fragment = with_account(fragment, name, account)
    if held.start < start:
        return refuse(turn, fragment, name, OVERLAP)
    if take.end == take.start:
        return refuse(turn, fragment, name, "empty")
    return refuse_if_untimely(turn, fragment, name)


def _known_as(account: Account, tick: int) -> str:
    """Return the state of a take whose steps are known already or have been judged;
    empty if they are new."""
    if account.take is not None and account.take.end is not None:
        return take_state(account.take)
    told = account.told
    return "judged" if told is not None and tick <= told.tick else ""


def outstanding(fragment: Fragment, name: str) -> Take:
    """Return the take of an island that has one."""
    take = fragment.accounts[name].take
    assert take is not None
    return take


def adopted(fragment: Fragment, name: str, version: Version) -> Fragment:
    """Note the version of an island's anchor, from which it takes; none that no merge
    has made."""
    account = fragment.accounts[name]
    if not account.adopted < version <= fragment.version:
        return fragment
    return with_account(fragment, name, replace(account, adopted=version))


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
    account = fragment.accounts[name]
    take = account.take
    if take is None or take.tick != event.tick:
        drop_unknown(turn, fragment, name, account.incarnation, event.tick)
        turn.ignore("take", "none", "bytes")
        return fragment
    if take.arrived:
        turn.ignore("take", take_state(take), "bytes")
        return fragment
    if take.taken_at and not event.refusal and not take.refused:
        transfer_s = averaged(fragment.transfer_seconds, turn.now - take.taken_at)
        fragment = replace(fragment, transfer_seconds=transfer_s)
    here = replace(take, arrived=True, norm=event.norm)
    TAKE.check(take_state(take), "bytes", take_state(here))
    fragment = with_account(fragment, name, replace(account, take=here))
    if event.refusal:
        return refuse(turn, fragment, name, event.refusal)
    if here.refused:
        drop(turn, fragment, name)
    return fragment


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
    kept = ready(fragment, name)
    if kept is None or fragment.phase == "done":
        return fragment
    if is_merging(fragment, name, kept.tick):
        return fragment
    if any(other.island == name for other in fragment.left_behind):
        return fragment
    account = replace(fragment.accounts[name], take=None)
    fragment = with_account(fragment, name, account)
    return replace(fragment, left_behind=(*fragment.left_behind, kept))


def expire_left_behind(turn: Turn, fragment: Fragment) -> Fragment:
    """Drop the deltas left behind that lag the current version too far; their steps
    are lost."""
    for old in fragment.left_behind:
        if not _is_in_time(turn.config, old.base, fragment.version):
            fragment = refuse_left_behind(turn, fragment, old, STALE)
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
    delta = DeltaKey(old.island, old.incarnation, fragment.index, old.tick)
    _note_refusal(turn, delta, reason, old.norm, most)
    turn.effects.append(Drop(delta=delta))
    kept = tuple(c for c in fragment.left_behind if c is not old)
    return replace(fragment, left_behind=kept)


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
    the length that was allowed, if that is the reason. tell: False if a publish tells
    the island."""
    account, before = fragment.accounts[name], outstanding(fragment, name)
    if before.refused:
        return fragment
    take = replace(before, refused=reason)
    TAKE.check(take_state(before), "refuse", take_state(take))
    fragment = with_account(fragment, name, replace(account, take=take))
    if reason == NON_FINITE:
        fragment = replace(fragment, unfit_deltas=fragment.unfit_deltas + 1)
        alerts.after_unfit(turn, fragment, name)
    _note_refusal(turn, delta_of(fragment, name), reason, take.norm, most)
    if tell:
        verdict = verdict_at(fragment, take.tick, "refused", reason)
        turn.tell(account.session, verdict)
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
    reason: RefusalReason = FUTURE if base > fragment.version else STALE
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
    account, take = fragment.accounts[name], outstanding(fragment, name)
    message = ResendRequest(fragment=fragment.index, tick=take.tick)
    turn.tell(account.session, message)
    account = replace(account, take=replace(take, taken_at=0.0))
    return with_account(fragment, name, account)


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


def drop_unknown(
    turn: Turn, fragment: Fragment, name: str, incarnation: int, tick: int
) -> None:
    """Drop a delta with no outstanding take, unless it was left behind."""
    kept = {(c.island, c.incarnation, c.tick) for c in fragment.left_behind}
    if (name, incarnation, tick) not in kept:
        delta = DeltaKey(name, incarnation, fragment.index, tick)
        turn.effects.append(Drop(delta=delta))


def _is_in_time(config: PolicyConfig, base: Version, current: Version) -> bool:
    lag = current.number - base.number
    return base.term == current.term and 0 <= lag <= config.max_staleness


def _note_refusal(
    turn: Turn, delta: DeltaKey, reason: RefusalReason, norm: float, most: float
) -> None:
    refused = records.DeltaRefused(
        island=delta.island,
        incarnation=delta.incarnation,
        fragment=delta.fragment,
        tick=delta.tick,
        reason=reason,
        norm=norm,
        most=most,
    )
    turn.note(refused)
