"""The life of one fragment: idle -> open -> merging -> idle.

Rules of this file: a function sees one fragment and a view of the islands (by value),
never another fragment, until its holder has prepared the merge. Committing it (record
it, make it visible, tell the islands) changes the books of all.

A fragment closes when the deltas of K asked islands are ready and either all asked live
islands have answered or the grace window is over. A delta that becomes ready later is
`pending` until the next merge. Without a quorum, only the flush at the end merges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import alerts, leases, ledger, quarantine, takes
from diloco_jax.protocol.coordinator.events import Effect, Note, Persist, Tell
from diloco_jax.protocol.coordinator.schedule import LONGER_TRANSFER, Fleet
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    MISSED_MERGES,
    Fragment,
    PolicyConfig,
    State,
    Take,
    averaged,
    ignored,
    with_account,
    with_fragment,
)
from diloco_jax.protocol.holding import Commit, Merge, MergePrepared
from diloco_jax.protocol.messages import Published, TakeRequest
from diloco_jax.protocol.values import Contribution, Verdict

Step = tuple[Fragment, list[Effect]]


StateStep = tuple[State, list[Effect]]


def open_tick(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    tick: int,
    live: tuple[str, ...],
    now: float,
) -> Step:
    """Ask every live island without an outstanding take for the fragment.

    Pending deltas do not count towards the quorum, unless fewer than K islands can be
    asked. Then the ready deltas of live islands count: no others could fill it.
    """
    asked = tuple(n for n in live if fragment.accounts[n].take is None)
    counting = asked
    if len(asked) < config.quorum or fragment.final:
        counting += tuple(
            name
            for name in live
            if (take := fragment.accounts[name].take) is not None
            and (take.ready or fragment.final)
        )
    enough = len(counting) >= config.quorum
    if fragment.final:
        enough = bool(counting or fragment.left_behind)
    if not enough:
        return fragment, [skipped(fragment, tick, "too few islands can be asked")]
    fragment = replace(
        fragment,
        phase=FRAGMENT.move(fragment.phase, "tick"),
        tick=tick,
        asked=counting,
        opened_at=now,
        quorum_at=None,
        closes_at=None,
    )
    effects: list[Effect] = [
        Note(
            record=records.Tick(
                tick=tick, fragment=fragment.index, asked=asked, final=fragment.final
            )
        )
    ]
    fragment, asks = ask(fragment, fleet, asked, tick)
    return fragment, effects + asks


def busy_tick(
    fragment: Fragment, fleet: Fleet, tick: int, live: tuple[str, ...]
) -> Step:
    """Handle a tick whose fragment is busy. If the fragment has been open for a cycle,
    ask the islands without an outstanding take too, and count the deltas that became
    ready meanwhile: one live island that does not deliver must not block the merge."""
    note = skipped(fragment, tick, fragment.phase)
    if fragment.phase != "open":
        return fragment, [note]
    takes_of = {name: fragment.accounts[name].take for name in live}
    fresh = tuple(name for name, take in takes_of.items() if take is None)
    more = tuple(
        name
        for name, take in takes_of.items()
        if name not in fragment.asked and (take is None or take.ready)
    )
    fragment = replace(fragment, asked=(*fragment.asked, *more))
    fragment, asks = ask(fragment, fleet, fresh, tick)
    return fragment, [note, *asks]


def settle(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    now: float,
    *,
    hurry: bool = False,
) -> Step:
    """Close an open fragment if it is time. `hurry`: nothing more is waited for, as the
    flush's `is_over` says."""
    if fragment.phase != "open":
        return fragment, []
    quorum = 1 if fragment.final else config.quorum
    # Islands that left are not live; their deltas count only where no quorum is needed.
    ready = len(fragment.left_behind) if fragment.final else 0
    unready, apart = [], fleet.quarantined
    patient = not hurry and _window_is_open(fragment, now)
    for name in fragment.asked:
        take = fragment.accounts[name].take
        if take is None or take.refused or name in apart:
            continue
        if take.ready:
            ready += 1
        else:
            unready.append(name)
        if patient and ready >= quorum and any(map(fleet.is_live, unready)):
            return fragment, []
    awaited = filter(fleet.is_live, unready)
    if ready < quorum:
        in_sight = ready + len(list(itertools.islice(awaited, quorum - ready)))
        if in_sight == quorum and not hurry:
            return fragment, []
        return _extend(config, fragment, fleet, in_sight, hurry=hurry)
    if fragment.quorum_at is None:
        others = frozenset(awaited)
        fragment = _open_window(config, fragment, fleet, others, now)
        if others and not hurry and _window_is_open(fragment, now):
            return fragment, []
    fragment, refusals = quarantine.refuse_long(config, fragment, fleet)
    if refusals:
        # Without these deltas, there may be no quorum.
        fragment, found = settle(config, fragment, fleet, now, hurry=hurry)
        return fragment, refusals + found
    return _close(config, fragment, fleet, now)


def _window_is_open(fragment: Fragment, now: float) -> bool:
    """Tell whether a quorum is ready and the fragment still waits for others."""
    closes_at = fragment.closes_at
    return closes_at is not None and (fragment.final or now < closes_at)


def _open_window(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    others: AbstractSet[str],
    now: float,
) -> Fragment:
    """Set the time for which the others are awaited, now that a quorum is ready."""
    step_s = fleet.step_seconds()
    # Slow islands are not awaited beyond the overlap anyway, and a fragment that was
    # stuck for minutes must not cost later merges their grace.
    waited = min(now - _first_take(fragment), config.overlap_steps * step_s)
    quorum_s = averaged(fragment.quorum_seconds, waited)
    closes_at = now + grace_seconds(config, fragment, quorum_s, step_s)
    if config.grace and config.grace_window == "alike":
        # Takes may lie a whole step apart, and the slack may be shorter: a late
        # adoption costs less than a merge without these islands (docs/design/grace.md).
        closes_at = max(closes_at, _answered_at(fragment, fleet, others))
    return replace(
        fragment, quorum_at=now, quorum_seconds=quorum_s, closes_at=closes_at
    )


def grace_seconds(
    config: PolicyConfig, fragment: Fragment, quorum_s: float, step_seconds: float
) -> float:
    """Return gamma * slack, never negative. The slack is the overlap, which begins with
    the first take, minus the time for quorum, merge and both transfers."""
    spent = quorum_s + fragment.merge_seconds + fragment.transfer_seconds
    return config.grace * max(0.0, config.overlap_steps * step_seconds - spent)


def _answered_at(fragment: Fragment, fleet: Fleet, others: AbstractSet[str]) -> float:
    """Return the time by which others of about the pacing speed can have answered; 0 if
    there are none. Those that took later than they were expected to are waited for as
    long as their deltas may be on their way."""
    fit = fleet.alike(others)
    take_s = fleet.take_seconds(fit)
    if not take_s:
        return 0.0
    sent_at = max(_taken_at(fragment, fit), default=0.0)
    return max(
        fragment.opened_at + take_s + fragment.transfer_seconds,
        sent_at + LONGER_TRANSFER * fragment.transfer_seconds,
    )


def _first_take(fragment: Fragment) -> float:
    """Return the time of the first take asked for when the fragment opened: the start
    of the overlap. Islands of several hosts take some steps after the request."""
    return min(_taken_at(fragment, fragment.asked), default=fragment.opened_at)


def _taken_at(fragment: Fragment, names: Iterable[str]) -> list[float]:
    """Return the times, where known, of takes asked for when the fragment opened."""
    takes = (fragment.accounts[name].take for name in names)
    return [
        take.taken_at
        for take in takes
        if take is not None and take.tick >= fragment.tick and take.taken_at
    ]


def computed(
    config: PolicyConfig, fragment: Fragment, live: tuple[str, ...], now: float
) -> tuple[Fragment, dict[str, tuple[int, Verdict, str]], list[Effect]]:
    """Book the finished merge. Return the fragment, the verdicts by island, and the
    effects for deltas that have become too old."""
    solo = len({c.island for c in fragment.merging}) == 1 and len(live) > 1
    seconds = averaged(fragment.merge_seconds, now - fragment.closed_at)
    verdicts: dict[str, tuple[int, Verdict, str]] = {}
    merged_tokens = ledger.merged_into(fragment)
    for contribution in fragment.merging:
        fragment = ledger.book(fragment, contribution, merged_tokens)
        account = fragment.accounts[contribution.island]
        if account.incarnation == contribution.incarnation:
            verdicts[contribution.island] = (contribution.tick, "merged", "")
    merged = set(verdicts)
    version = fragment.version.next()
    fragment = replace(
        fragment,
        version=version,
        newest=ledger.newest(fragment, version, fragment.merging),
        phase=FRAGMENT.move(fragment.phase, "commit"),
        merging=(),
        asked=(),
        merges=fragment.merges + 1,
        solo_merges=fragment.solo_merges + 1 if solo else 0,
        unfit_deltas=0,
        merge_seconds=seconds,
    )
    fragment, effects = takes.expire_left_behind(config, fragment)
    for name in sorted(fragment.accounts):
        account = fragment.accounts[name]
        if name in live and name not in merged:
            account = replace(
                account,
                merges_alive=account.merges_alive + 1,
                missed_merges=account.missed_merges + 1,
            )
            fragment = with_account(fragment, name, account)
        fragment, verdict, refusals = outstanding(config, fragment, name)
        effects += refusals
        if verdict is not None:
            verdicts[name] = verdict
    return fragment, verdicts, effects


def outstanding(
    config: PolicyConfig, fragment: Fragment, name: str
) -> tuple[Fragment, tuple[int, Verdict, str] | None, list[Effect]]:
    """Judge an island's outstanding take, which is not in the fragment's new version.
    Return the verdict (tick, verdict, reason), if there is such a take, and the effects
    of a refusal, without the message that the publish takes the place of."""
    take = fragment.accounts[name].take
    if take is None:
        return fragment, None, []
    effects: list[Effect] = []
    # An island whose record of the take is missing may have taken by now, and must know
    # the verdict before it adopts.
    if take.end is not None:
        fragment, refusals = takes.refuse_if_untimely(config, fragment, name)
        effects = [e for e in refusals if not isinstance(e, Tell)]
        take = fragment.accounts[name].take
        assert take is not None
    if take.refused:
        return fragment, (take.tick, "refused", take.refused), effects
    return fragment, (take.tick, "pending", ""), effects


def _extend(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    in_sight: int,
    *,
    hurry: bool,
) -> Step:
    """Ask newcomers because the asked islands cannot make a quorum, or give the tick
    up (ready deltas stay pending)."""
    fresh = tuple(
        name
        for name, account in sorted(fragment.accounts.items())
        if fleet.is_live(name) and name not in fragment.asked and account.take is None
    )
    if hurry or fragment.final or in_sight + len(fresh) < config.quorum:
        note = skipped(fragment, fragment.tick, "quorum is out of reach")
        phase = FRAGMENT.move(fragment.phase, "give up")
        return replace(fragment, phase=phase, asked=()), [note]
    fragment = replace(fragment, asked=(*fragment.asked, *fresh))
    return ask(fragment, fleet, fresh, fragment.tick)


def _close(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    now: float,
) -> Step:
    contributions = list(fragment.left_behind)
    for name, account in fragment.accounts.items():
        take = account.take
        if take is not None and take.ready:
            contributions.append(takes.contribution(name, account, take))
    merging = tuple(sorted(contributions, key=_order))
    share = 1.0
    if config.partial_merges == "scaled" and not fragment.final:
        share = _share(fragment, merging, fleet)
    fragment = replace(
        fragment,
        phase=FRAGMENT.move(fragment.phase, "close"),
        merging=merging,
        merging_share=share,
        left_behind=(),
        closed_at=now,
    )
    merge = Merge(
        fragment=fragment.index,
        version=fragment.version.next(),
        contributions=merging,
        share=share,
        final=fragment.final,
    )
    return fragment, [merge]


def _share(
    fragment: Fragment,
    merging: tuple[Contribution, ...],
    fleet: Fleet,
) -> float:
    """Return the merged islands' share of the tokens per second of these islands and
    of the live islands whose deltas will be in a later merge.

    Without it, a merge of half the islands would go as far as a merge of all: islands
    that are merged in turns would move the parameters twice as fast as they learn.
    """
    present = {contribution.island for contribution in merging}
    absent = (
        name
        for name, account in fragment.accounts.items()
        if name not in present
        and account.missed_merges < MISSED_MERGES
        and fleet.is_live(name)
        and name not in fleet.quarantined
    )
    known = [rate for rate in map(fleet.token_rate, present) if rate]
    if not known:
        return 1.0
    # An island that left a delta and now compiles has no speed: use the others' mean.
    inside = math.fsum(known) * len(present) / len(known)
    return inside / (inside + math.fsum(map(fleet.token_rate, absent)))


def _order(contribution: Contribution) -> tuple[str, int]:
    """Sort key that fixes the order of the sum, whatever the order of arrival."""
    return contribution.island, contribution.incarnation


def ask(fragment: Fragment, fleet: Fleet, names: tuple[str, ...], tick: int) -> Step:
    """Ask islands without an outstanding take for a take with this tick number."""
    accounts = dict(fragment.accounts)
    for name in names:
        accounts[name] = replace(accounts[name], take=Take(tick=tick))
    fragment, asks = replace(fragment, accounts=accounts), list[Effect]()
    for name in names:
        fragment, told = request(fragment, fleet, name)
        asks += told
    return fragment, asks


def request(fragment: Fragment, fleet: Fleet, name: str) -> Step:
    """Tell an island to make its outstanding take, now or some boundaries later."""
    account, after = fragment.accounts[name], fleet.boundaries_after(name)
    take = account.take
    assert take is not None
    if after != take.after:
        account = replace(account, take=replace(take, after=after))
        fragment = with_account(fragment, name, account)
    if after and not fragment.put_off:
        fragment = replace(fragment, put_off=True)
    message = TakeRequest(fragment=fragment.index, tick=take.tick, after=after)
    return fragment, [Tell(session=account.session, message=message)]


def hasten(fragment: Fragment, fleet: Fleet) -> Step:
    """Ask again for takes that were put off for longer than they would be now: the
    islands that they wait for are gone, or faster than they seemed."""
    effects, waits = list[Effect](), False
    for name, account in fragment.accounts.items():
        take = account.take
        if take is None or take.end is not None or not take.after:
            continue
        if fleet.boundaries_after(name) < take.after:
            fragment, asks = request(fragment, fleet, name)
            effects += asks
        waits = True
    return replace(fragment, put_off=waits), effects


def skipped(fragment: Fragment, tick: int, why: records.Why) -> Note:
    """Note that a tick asks no island, or that its request is given up."""
    return Note(record=records.Skipped(tick=tick, fragment=fragment.index, why=why))


def prepared(
    config: PolicyConfig, state: State, event: MergePrepared, now: float
) -> StateStep:
    """Commit the merge under way of a fragment, now that it is prepared."""
    fragment = state.fragments[event.fragment]
    if fragment.phase != "merging" or event.version != fragment.version.next():
        return state, [ignored("fragment", fragment.phase, "merge")]
    contributions, tick = fragment.merging, fragment.tick
    share = fragment.merging_share
    fragment, verdicts, effects = computed(
        config, fragment, state.islands.standing.counted, now
    )
    state = leases.contributed(with_fragment(state, fragment), contributions)
    record = records.Merged(
        fragment=event.fragment,
        version=event.version,
        tick=tick,
        final=fragment.final,
        contributions=contributions,
        share=share,
        verdicts=verdicts,
        digest=event.prepared.digest,
        payload_bytes=event.prepared.payload_bytes,
    )
    raised = alerts.after_merge(fragment, contributions, state.islands.standing.counted)
    raised += alerts.in_turns(config, state, fragment)
    visible = _committed(state, fragment, record, event.prepared.change)
    return state, visible + effects + raised


def _committed(
    state: State, fragment: Fragment, record: records.Merged, change: float
) -> list[Effect]:
    """Record the fragment's new version, make it visible, and tell every island of it
    and of the verdict on its take. The order is that of durability."""
    effects: list[Effect] = [
        Persist(record=record),
        Commit(fragment=fragment.index, version=fragment.version),
    ]
    for name, island in state.islands.items():
        if island.status == "gone":
            continue
        tick, verdict, reason = record.verdicts.get(name, (-1, "none", ""))
        published = Published(
            fragment=fragment.index,
            version=fragment.version,
            tick=tick,
            verdict=verdict,
            reason=reason,
            change=change,
        )
        effects.append(Tell(session=island.session, message=published))
    return effects
