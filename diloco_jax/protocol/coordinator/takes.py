"""An island's outstanding delta for a fragment: taken, arrived, refused, given up.

The record of a delta's steps comes on the control stream, its bytes on a bulk stream;
the delta can be merged when both have arrived.
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import alerts
from diloco_jax.protocol.coordinator.events import Effect, Note, Tell
from diloco_jax.protocol.coordinator.state import (
    TAKE,
    Account,
    Fragment,
    PolicyConfig,
    Take,
    averaged,
    ignored,
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

Step = tuple[Fragment, list[Effect]]


def took(
    config: PolicyConfig,
    fragment: Fragment,
    name: str,
    record: Record,
    now: float,
) -> Step:
    """Note that the island took the fragment, for steps [record.start, record.step)."""
    asked = fragment.accounts[name].take
    expected = asked is not None and asked.tick == record.tick
    held = Outstanding(
        fragment=fragment.index,
        tick=record.tick,
        start=record.start,
        end=record.step,
        base=record.version,
        seq=record.seq,
        rate_sum=record.rate_sum,
    )
    if state := _known_as(fragment.accounts[name], record.tick):
        return fragment, [ignored("take", state, "record")]
    fragment, effects = known(config, fragment, name, held, now)
    take = fragment.accounts[name].take
    if expected or take is asked or take is None:
        return fragment, effects
    if not (take.refused or take.arrived):
        # The take was asked for before a crash: bytes that came first were not kept.
        fragment, asks = ask_to_resend(fragment, name, record.tick)
        effects = effects + asks
    return fragment, effects


def known(
    config: PolicyConfig,
    fragment: Fragment,
    name: str,
    held: Outstanding,
    now: float,
) -> Step:
    """Note the steps of a take; does nothing if they are known already."""
    account = fragment.accounts[name]
    asked = account.take
    if _known_as(account, held.tick):
        return fragment, []
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
        taken_at=now,
        rate_sum=held.rate_sum,
    )
    TAKE.check(take_state(asked), "record", take_state(take))
    account = replace(account, start=start, take=take)
    fragment = with_account(fragment, name, account)
    if held.start < start:
        fragment, effects = refuse(fragment, name, OVERLAP)
    elif take.end == take.start:
        fragment, effects = refuse(fragment, name, "empty")
    else:
        fragment, effects = refuse_if_untimely(config, fragment, name)
        effects = effects or pending(fragment, name)
    return fragment, effects


def _known_as(account: Account, tick: int) -> str:
    """Return the state of a take whose steps are known already or have been judged;
    empty if they are new."""
    if account.take is not None and account.take.end is not None:
        return take_state(account.take)
    told = account.told
    return "judged" if told is not None and tick <= told.tick else ""


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


def pending(fragment: Fragment, name: str) -> list[Effect]:
    """Tell an island that its outstanding take came too late for the current
    version, which it may be about to adopt."""
    take = fragment.accounts[name].take
    if take is None or take.end is None or take.base >= fragment.version:
        return []
    return [verdict_on(fragment, name, take.tick, "pending", "")]


def arrived(fragment: Fragment, event: DeltaArrived, now: float) -> Step:
    """Note that a delta's bytes have arrived, or proved unfit."""
    name, tick, refusal = event.island, event.tick, event.refusal
    account = fragment.accounts[name]
    take = account.take
    if take is None or take.tick != tick:
        drops = drop_unknown(fragment, name, account.incarnation, tick)
        return fragment, [*drops, ignored("take", "none", "bytes")]
    if take.arrived:
        return fragment, [ignored("take", take_state(take), "bytes")]
    transfer_seconds = fragment.transfer_seconds
    if take.taken_at and not refusal and not take.refused:
        transfer_seconds = averaged(transfer_seconds, now - take.taken_at)
    here = replace(take, arrived=True, norm=event.norm)
    TAKE.check(take_state(take), "bytes", take_state(here))
    take = here
    account = replace(account, take=take)
    fragment = replace(
        fragment,
        accounts={**fragment.accounts, name: account},
        transfer_seconds=transfer_seconds,
    )
    if refusal:
        return refuse(fragment, name, refusal)
    if take.refused:
        return fragment, [drop(fragment, name)]
    return fragment, []


def gave_up(fragment: Fragment, name: str, tick: int, *, kept: bool) -> Step:
    """Note that the island has heard of a refusal, which ends the take.

    kept: the island's parameters still have the delta's steps, and its next delta will
    have them; otherwise they are lost.
    """
    account = fragment.accounts[name]
    take = account.take
    if take is None or take.tick != tick:
        return fragment, [ignored("take", "none", "give up")]
    if take.end is None:
        return fragment, [ignored("take", take_state(take), "give up")]
    TAKE.check(take_state(take), "give up", "none")
    if not kept:
        account = account.lose(take.end - take.start, take.refused or "refused")
        account = replace(account, start=take.end)
    told = Told(tick=tick, verdict="refused", reason=take.refused or "refused")
    account = replace(account, take=None, told=told)
    return with_account(fragment, name, account), []


def leave_behind(fragment: Fragment, name: str) -> Fragment:
    """Keep a leaving island's ready delta for the next merge, unless a delta of an
    earlier incarnation is already kept for it."""
    account = fragment.accounts[name]
    take = account.take
    if take is None or not take.ready or fragment.phase == "done":
        return fragment
    if is_merging(fragment, name, take.tick):
        return fragment
    if any(kept.island == name for kept in fragment.left_behind):
        return fragment
    kept = contribution(name, account, take)
    fragment = with_account(fragment, name, replace(account, take=None))
    return replace(fragment, left_behind=(*fragment.left_behind, kept))


def expire_left_behind(config: PolicyConfig, fragment: Fragment) -> Step:
    """Drop the deltas left behind that lag the current version too far; their steps
    are lost."""
    if not fragment.left_behind:
        return fragment, []
    effects: list[Effect] = []
    for old in fragment.left_behind:
        if not _is_in_time(config, old.base, fragment.version):
            fragment, found = refuse_left_behind(fragment, old, STALE)
            effects += found
    return fragment, effects


def refuse_left_behind(
    fragment: Fragment, old: Contribution, reason: RefusalReason, most: float = 0.0
) -> Step:
    """Drop a delta that was left behind; its steps are lost. most: as in `refuse`."""
    account = fragment.accounts[old.island].lose_tokens(old.tokens, reason)
    fragment = with_account(fragment, old.island, account)
    kept = tuple(c for c in fragment.left_behind if c is not old)
    key = (fragment.index, old.island, old.incarnation, old.tick)
    note = _refusal(*key, reason, old.norm, most)
    return replace(fragment, left_behind=kept), [note, _drop(*key)]


def contribution(name: str, account: Account, take: Take) -> Contribution:
    """Return a ready take as a merge's contribution."""
    assert take.end is not None
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
    fragment: Fragment, name: str, reason: RefusalReason, most: float = 0.0
) -> Step:
    """Refuse an outstanding take; it stays outstanding until the island knows. most:
    the length that was allowed, if that is the reason."""
    account = fragment.accounts[name]
    if account.take is None or account.take.refused:
        return fragment, []
    take = replace(account.take, refused=reason)
    TAKE.check(take_state(account.take), "refuse", take_state(take))
    fragment = with_account(fragment, name, replace(account, take=take))
    raised: list[Effect] = []
    if reason == NON_FINITE:
        fragment = replace(fragment, unfit_deltas=fragment.unfit_deltas + 1)
        raised = alerts.after_unfit(fragment, name)
    return fragment, [
        *raised,
        _refusal(
            fragment.index,
            name,
            account.incarnation,
            take.tick,
            reason,
            take.norm,
            most,
        ),
        verdict_on(fragment, name, take.tick, "refused", reason),
        drop(fragment, name),
    ]


def refuse_if_untimely(config: PolicyConfig, fragment: Fragment, name: str) -> Step:
    """Refuse a take that is in no merge yet, if its base lags the current version too
    far, or is above it.

    A merge under way does not count, since it is not durable yet: after a crash during
    it, the island would reopen steps that the next coordinator merges.
    """
    take = fragment.accounts[name].take
    assert take is not None
    if _is_in_time(config, take.base, fragment.version):
        return fragment, []
    return refuse(fragment, name, FUTURE if take.base > fragment.version else STALE)


def verdict_on(
    fragment: Fragment, name: str, tick: int, verdict: Verdict, reason: str
) -> Tell:
    """Tell an island the verdict on its take."""
    return Tell(
        session=fragment.accounts[name].session,
        message=TakeVerdict(
            fragment=fragment.index,
            tick=tick,
            verdict=verdict,
            reason=reason,
            version=fragment.version,
        ),
    )


def ask_to_resend(fragment: Fragment, name: str, tick: int) -> Step:
    """Ask an island to send again a delta that it still holds."""
    message = ResendRequest(fragment=fragment.index, tick=tick)
    ask = Tell(session=fragment.accounts[name].session, message=message)
    return _untimed(fragment, name), [ask]


def _untimed(fragment: Fragment, name: str) -> Fragment:
    """Note that nobody knows how long a delta is under way: outages are no transfer."""
    account = fragment.accounts[name]
    assert account.take is not None
    account = replace(account, take=replace(account.take, taken_at=0.0))
    return with_account(fragment, name, account)


def is_merging(fragment: Fragment, name: str, tick: int) -> bool:
    """Tell whether the take is in a merge under way."""
    return any(c.island == name and c.tick == tick for c in fragment.merging)


def drop(fragment: Fragment, name: str) -> Drop:
    """Drop the bytes of an outstanding take, which are no longer needed."""
    account = fragment.accounts[name]
    assert account.take is not None
    return _drop(fragment.index, name, account.incarnation, account.take.tick)


def drop_unknown(
    fragment: Fragment, name: str, incarnation: int, tick: int
) -> list[Effect]:
    """Drop a delta with no outstanding take, unless it was left behind."""
    kept = {(c.island, c.incarnation, c.tick) for c in fragment.left_behind}
    is_kept = (name, incarnation, tick) in kept
    return [] if is_kept else [_drop(fragment.index, name, incarnation, tick)]


def _is_in_time(config: PolicyConfig, base: Version, current: Version) -> bool:
    lag = current.number - base.number
    return base.term == current.term and 0 <= lag <= config.max_staleness


def _refusal(
    fragment: int,
    name: str,
    incarnation: int,
    tick: int,
    reason: RefusalReason,
    norm: float = 0.0,
    most: float = 0.0,
) -> Note:
    return Note(
        record=records.DeltaRefused(
            island=name,
            incarnation=incarnation,
            fragment=fragment,
            tick=tick,
            reason=reason,
            norm=norm,
            most=most,
        )
    )


def _drop(fragment: int, name: str, incarnation: int, tick: int) -> Drop:
    return Drop(delta=DeltaKey(name, incarnation, fragment, tick))
