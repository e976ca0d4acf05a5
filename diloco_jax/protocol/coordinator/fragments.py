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
from diloco_jax.protocol.coordinator import ledger, takes
from diloco_jax.protocol.coordinator.islands import donors
from diloco_jax.protocol.coordinator.schedule import LONGER_TRANSFER, Fleet, pace
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    MISSED_MERGES,
    Fragment,
    PolicyConfig,
    Take,
    Turn,
    averaged,
    booked,
    outstanding,
    with_fragment,
)
from diloco_jax.protocol.holding import Commit, Merge, MergePrepared
from diloco_jax.protocol.messages import (
    Contribution,
    Published,
    Sources,
    TakeRequest,
    Verdict,
)

SOLO_MERGES = 3
"""Consecutive merges of one fragment from the same one of several live islands."""

Verdicts = dict[str, tuple[int, Verdict, str]]
"""(tick, verdict, reason) of outstanding takes, by island."""


def open_tick(
    turn: Turn, fragment: Fragment, fleet: Fleet, tick: int, live: tuple[str, ...]
) -> Fragment:
    """Ask every live island without an outstanding take for the fragment.

    Pending deltas do not count towards the quorum, unless fewer than K islands whose
    deltas may be merged can be asked. Then the ready deltas of live islands count: no
    others could fill it.
    """
    asked = tuple(n for n in live if fragment.accounts[n].take is None)
    counting, quorum = asked, turn.config.quorum
    if sum(n not in fleet.quarantined for n in asked) < quorum or fragment.final:
        counting += tuple(
            name
            for name in live
            if (take := fragment.accounts[name].take) is not None
            and (take.ready or fragment.final)
        )
    enough = len(counting) >= quorum
    if fragment.final:
        enough = bool(counting or fragment.left_behind)
    if not enough:
        skip(turn, fragment, tick, "too few islands can be asked")
        return fragment
    fragment = replace(
        fragment,
        phase=FRAGMENT.move(fragment.phase, "tick"),
        tick=tick,
        asked=counting,
        opened_at=turn.now,
        quorum_at=None,
        closes_at=None,
    )
    index, final = fragment.index, fragment.final
    turn.note(records.Tick(tick=tick, fragment=index, asked=asked, final=final))
    return ask(turn, fragment, fleet, asked, tick)


def busy_tick(
    turn: Turn, fragment: Fragment, fleet: Fleet, tick: int, live: tuple[str, ...]
) -> Fragment:
    """Handle a tick whose fragment is busy. If the fragment has been open for a cycle,
    ask the islands without an outstanding take too, and count the deltas that became
    ready meanwhile: one live island that does not deliver must not block the merge."""
    skip(turn, fragment, tick, fragment.phase)
    if fragment.phase != "open":
        return fragment
    fresh = tuple(name for name in live if fragment.accounts[name].take is None)
    fragment = replace(fragment, asked=(*fragment.asked, *_more(fragment, live)))
    return ask(turn, fragment, fleet, fresh, tick)


def _more(fragment: Fragment, live: Iterable[str]) -> tuple[str, ...]:
    """Return the islands that were not asked as the fragment opened, and have a ready
    delta or can be asked now."""
    takes_of = {n: fragment.accounts[n].take for n in live if n not in fragment.asked}
    return tuple(n for n, take in takes_of.items() if take is None or take.ready)


def close_if_due(
    turn: Turn, fragment: Fragment, fleet: Fleet, *, hurry: bool = False
) -> Fragment:
    """Close an open fragment if it is time. `hurry`: nothing more is waited for, as the
    flush's `is_over` says."""
    if fragment.phase != "open":
        return fragment
    quorum = 1 if fragment.final else turn.config.quorum
    # Islands that left are not live; their deltas count only where no quorum is needed.
    ready = len(fragment.left_behind) if fragment.final else 0
    unready, apart = [], fleet.quarantined
    patient = not hurry and _window_is_open(fragment, turn.now)
    for name in fragment.asked:
        take = fragment.accounts[name].take
        if take is None or take.refused or name in apart:
            continue
        if take.ready:
            ready += 1
        else:
            unready.append(name)
        if patient and ready >= quorum and any(map(fleet.is_live, unready)):
            return fragment
    awaited = filter(fleet.is_live, unready)
    if ready < quorum:
        in_sight = ready + len(list(itertools.islice(awaited, quorum - ready)))
        if in_sight == quorum and not hurry:
            return fragment
        return _extend(turn, fragment, fleet, in_sight, hurry=hurry)
    if fragment.quorum_at is None:
        others = frozenset(awaited)
        fragment = _open_window(turn, fragment, fleet, others)
        if others and not hurry and _window_is_open(fragment, turn.now):
            return fragment
    judged = takes.refuse_long(turn, fragment, fleet)
    if judged is not fragment:
        # Without the refused deltas, there may be no quorum.
        return close_if_due(turn, judged, fleet, hurry=hurry)
    return _close(turn, fragment, fleet)


def _window_is_open(fragment: Fragment, now: float) -> bool:
    """Tell whether a quorum is ready and the fragment still waits for others."""
    closes_at = fragment.closes_at
    return closes_at is not None and (fragment.final or now < closes_at)


def _open_window(
    turn: Turn, fragment: Fragment, fleet: Fleet, others: AbstractSet[str]
) -> Fragment:
    """Set the time for which the others are awaited, now that a quorum is ready."""
    config, now, step_s = turn.config, turn.now, fleet.step_seconds()
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
    fit = others & fleet.alike().keys()
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


def _book_merge(
    turn: Turn, fragment: Fragment, live: tuple[str, ...]
) -> tuple[Fragment, Verdicts]:
    """Book the finished merge. Return the fragment and the verdicts by island."""
    solo = len({c.island for c in fragment.merging}) == 1 and len(live) > 1
    seconds = averaged(fragment.merge_seconds, turn.now - fragment.closed_at)
    verdicts: Verdicts = {
        c.island: (c.tick, "merged", "")
        for c in fragment.merging
        if fragment.accounts[c.island].incarnation == c.incarnation
    }
    merged = set(verdicts)
    fragment = ledger.merge(fragment, fragment.merging, fragment.version.next())
    fragment = replace(
        fragment,
        phase=FRAGMENT.move(fragment.phase, "commit"),
        asked=(),
        solo_merges=fragment.solo_merges + 1 if solo else 0,
        unfit_deltas=0,
        merge_seconds=seconds,
    )
    fragment = takes.expire_left_behind(turn, fragment)
    for name in sorted(fragment.accounts):
        account = fragment.accounts[name]
        if name in live and name not in merged:
            alive, missed = account.merges_alive + 1, account.missed_merges + 1
            fragment = booked(fragment, name, merges_alive=alive, missed_merges=missed)
        if account.take is None:
            continue
        # An island whose record of the take is missing may have taken by now, and must
        # know the verdict before it adopts.
        if account.take.end is not None:
            fragment = takes.refuse_if_untimely(turn, fragment, name, tell=False)
        take = outstanding(fragment, name)
        verdict: Verdict = "refused" if take.refused else "pending"
        verdicts[name] = (take.tick, verdict, take.refused)
    return fragment, verdicts


def _extend(
    turn: Turn, fragment: Fragment, fleet: Fleet, in_sight: int, *, hurry: bool
) -> Fragment:
    """Ask newcomers, and count pending deltas, because the asked islands cannot make a
    quorum; or give the tick up (ready deltas stay pending)."""
    names = sorted({*fragment.accounts} - {*fleet.quarantined})
    more = _more(fragment, filter(fleet.is_live, names))
    if hurry or fragment.final or in_sight + len(more) < turn.config.quorum:
        skip(turn, fragment, fragment.tick, "quorum is out of reach")
        phase = FRAGMENT.move(fragment.phase, "give up")
        return replace(fragment, phase=phase, asked=())
    fresh = tuple(name for name in more if fragment.accounts[name].take is None)
    fragment = replace(fragment, asked=(*fragment.asked, *more))
    fragment = ask(turn, fragment, fleet, fresh, fragment.tick)
    return close_if_due(turn, fragment, fleet)


def _close(turn: Turn, fragment: Fragment, fleet: Fleet) -> Fragment:
    ready = [takes.ready(fragment, name) for name in fragment.accounts]
    deltas = [*fragment.left_behind, *(delta for delta in ready if delta is not None)]
    # The order of the sum is fixed, whatever the order of arrival.
    merging = tuple(sorted(deltas, key=lambda c: (c.island, c.incarnation)))
    share = 1.0
    if turn.config.partial_merges == "scaled" and not fragment.final:
        share = _share(fragment, merging, fleet)
    merge = Merge(
        fragment=fragment.index,
        version=fragment.version.next(),
        contributions=merging,
        share=share,
        final=fragment.final,
    )
    turn.effects.append(merge)
    return replace(
        fragment,
        phase=FRAGMENT.move(fragment.phase, "close"),
        merging=merging,
        merging_share=share,
        left_behind=(),
        closed_at=turn.now,
    )


def _share(
    fragment: Fragment, merging: tuple[Contribution, ...], fleet: Fleet
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


def ask(
    turn: Turn, fragment: Fragment, fleet: Fleet, names: tuple[str, ...], tick: int
) -> Fragment:
    """Ask islands without an outstanding take for a take with this tick number."""
    accounts = dict(fragment.accounts)
    for name in names:
        accounts[name] = replace(accounts[name], take=Take(tick=tick))
    fragment = replace(fragment, accounts=accounts)
    for name in names:
        fragment = request(turn, fragment, fleet, name)
    return fragment


def request(turn: Turn, fragment: Fragment, fleet: Fleet, name: str) -> Fragment:
    """Tell an island to make its outstanding take, now or some boundaries later."""
    take, after = outstanding(fragment, name), fleet.boundaries_after(name)
    message = TakeRequest(fragment=fragment.index, tick=take.tick, after=after)
    turn.tell(fragment.accounts[name].session, message)
    if after != take.after:
        fragment = booked(fragment, name, take=replace(take, after=after))
    if after and not fragment.put_off:
        fragment = replace(fragment, put_off=True)
    return fragment


def hasten(turn: Turn, fragment: Fragment, fleet: Fleet) -> Fragment:
    """Ask again for takes that were put off for longer than they would be now: the
    islands that they wait for are gone, or faster than they seemed."""
    waits = False
    for name, account in fragment.accounts.items():
        take = account.take
        if take is None or take.end is not None or not take.after:
            continue
        if fleet.boundaries_after(name) < take.after:
            fragment = request(turn, fragment, fleet, name)
        waits = True
    return replace(fragment, put_off=waits)


def skip(turn: Turn, fragment: Fragment, tick: int, why: records.Why) -> None:
    """Note that a tick asks no island, or that its request is given up."""
    turn.note(records.Skipped(tick=tick, fragment=fragment.index, why=why))


def prepared(turn: Turn, event: MergePrepared) -> None:
    """Commit the merge under way of a fragment, now that it is prepared: record it,
    make it visible, and tell every island of it and of the verdict on its take. The
    order is that of durability."""
    before = turn.state.fragments[event.fragment]
    if before.phase != "merging" or event.version != before.version.next():
        turn.ignore("fragment", before.phase, "merge")
        return
    live, merged = turn.state.islands.standing.counted, before.merging
    first = len(turn.effects)
    fragment, verdicts = _book_merge(turn, before, live)
    refusals = turn.effects[first:]
    del turn.effects[first:]
    turn.state = ledger.contributed(with_fragment(turn.state, fragment), merged)
    turn.persist(
        records.Merged(
            fragment=event.fragment,
            version=event.version,
            tick=before.tick,
            final=fragment.final,
            contributions=merged,
            share=before.merging_share,
            verdicts=verdicts,
            digest=event.prepared.digest,
            payload_bytes=event.prepared.payload_bytes,
        )
    )
    turn.effects.append(Commit(fragment=fragment.index, version=fragment.version))
    sources = _sources(turn, fragment, event.prepared.stripes)
    for name, island in turn.state.islands.items():
        if island.status != "gone":
            own = verdicts.get(name)
            published = Published(
                fragment=fragment.index,
                version=fragment.version,
                verdict=takes.verdict_at(fragment, *own) if own else None,
                change=event.prepared.change,
                sources=sources.get(turn.config.regions.get(name, "")),
            )
            turn.tell(island.session, published)
    turn.effects += refusals
    alert_of_merge(turn, fragment, merged, live)


def _sources(
    turn: Turn, fragment: Fragment, stripes: dict[str, str]
) -> dict[str, Sources]:
    """Return where the islands of each region have the new version from; none while
    nobody knows how long a step takes. A donor has a quarter of the overlap: with two
    that fail, half of it is left for the coordinator, as plans have it for a fetch."""
    config, islands = turn.config, turn.state.islands
    if not (config.regions and stripes):
        return {}
    times = (islands[name].believed_step_s for name in islands.standing.answering)
    within_s = config.overlap_steps * pace(config.quorum, times) / 4
    what = f"{fragment.index}/{fragment.version.name}"
    found = donors(islands, config.regions, what, turn.now) if within_s else {}
    return {
        region: Sources(donors=chosen, within_s=within_s, stripes=stripes)
        for region, chosen in found.items()
    }


def alert_of_merge(
    turn: Turn,
    fragment: Fragment,
    contributions: tuple[Contribution, ...],
    live: tuple[str, ...],
) -> None:
    """Raise the alerts of this merge; each is raised once per streak."""
    if fragment.solo_merges == SOLO_MERGES:
        turn.alert(
            f"fragment {fragment.index} was merged {SOLO_MERGES} times in a row from "
            f"{contributions[0].island!r} alone, with {len(live)} islands training: "
            f"they drift apart; for the next run, raise sync.quorum, sync.grace or "
            f"sync.overlap_steps"
        )
    for name in live:
        if fragment.accounts[name].missed_merges == MISSED_MERGES:
            turn.alert(
                f"island {name!r} is alive, but was in none of the last "
                f"{MISSED_MERGES} merges of fragment {fragment.index}: its work goes "
                f"stale; look at its log and its network, or, for the next run, raise "
                f"sync.grace or sync.max_staleness",
                name,
            )
