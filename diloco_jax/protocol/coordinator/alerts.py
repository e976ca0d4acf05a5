"""Alerts for people: islands that train alone, whose work is wasted, or that stay away.

Remedies in `sync` are for the next run: a run keeps its own settings, even if resumed.

An island that blinks is not told of: people hear of an absence once it has lasted for
a lease. Islands that are cut off together, or return together, are one alert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from diloco_jax.protocol.coordinator.islands import NOBODY, Absences
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import MISSED_MERGES, Fragment, State, Turn
from diloco_jax.protocol.values import Contribution

SOLO_MERGES = 3
"""Consecutive merges of one fragment from the same one of several live islands."""
UNFIT_DELTAS = 10
"""Consecutive deltas of one fragment that are not finite."""
WATCHED_MERGES = (10, 100, 1000)
"""Merge counts of a fragment at which each island's share in them is checked."""
MOST_MERGES = 0.75
"""Share of the merges that should include each island of about the pacing speed."""


def after_merge(
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


def after_unfit(turn: Turn, fragment: Fragment, name: str) -> None:
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


def after_failure(turn: Turn, name: str, said: str) -> None:
    """Raise the alert for an island that said goodbye because it failed: its device,
    its step, its disk."""
    turn.alert(
        f"island {name!r} failed, and says: {said or 'nothing'}; look at its log and "
        f"at its devices (diloco doctor); its supervisor starts it again",
        name,
    )


def after_ahead(turn: Turn, name: str, how: str) -> None:
    """Raise the alert for an island that knows of a later state of the run."""
    turn.alert(
        f"island {name!r} is {how}: either this coordinator's state is an old one, or "
        f"that island lies; it is told to come again. If other islands say so too, "
        f"start the coordinator that has the newest state; if none does, revoke its "
        f"key",
        name,
    )


def in_turns(turn: Turn, fragment: Fragment) -> None:
    """Report islands of about the pacing island's speed that are seldom merged.

    The first fragment stands for all: they are about equally large.
    """
    if fragment.index != 0 or fragment.merges not in WATCHED_MERGES:
        return
    config, fleet = turn.config, Fleet(turn.config, turn.state)
    pace = fleet.step_seconds()
    alike = {
        name: fragment.accounts[name]
        for name, island in sorted(fleet.alike().items())
        if island.step_seconds
    }
    seldom = {
        name: account
        for name, account in alike.items()
        if account.merges_in < MOST_MERGES * account.merges_alive
    }
    if len(alike) < 2 or not seldom:
        return
    could = sum(account.merges_alive for account in seldom.values())
    were = sum(account.merges_in for account in seldom.values())
    spent = fragment.quorum_seconds + fragment.merge_seconds + fragment.transfer_seconds
    wanted = max(math.ceil(2 * spent / pace), config.overlap_steps + 1)
    remedy = f"raise sync.overlap_steps from {config.overlap_steps} to {wanted}"
    if not config.grace:
        remedy = "raise sync.grace from 0"
    elif config.grace_window == "overlap":
        remedy = 'leave sync.grace_window at "alike"'
    turn.alert(
        f"of {len(alike)} islands of about one speed, {', '.join(seldom)} were in "
        f"{were / could:.0%} of the merges since they joined: they are merged in turns "
        f"with the others, and learn worse for it. "
        f"Quorum, merging and sending take {spent:.3g} s of an overlap of "
        f"{config.overlap_steps} steps of {pace:.3g} s, and what is left is too short "
        f"to wait for the others; for the next run, {remedy}"
    )


def at_end(turn: Turn) -> None:
    """Report islands that were live when the run ended and have unmerged steps.

    To be called at the end of the flush, before open steps are booked as lost.
    """
    open_steps = {
        name
        for name, island in turn.state.islands.items()
        if island.status == "live"
        for fragment in turn.state.fragments
        if fragment.accounts[name].start < island.steps
    }
    if open_steps:
        turn.alert(
            f"the run ended without all that {', '.join(sorted(open_steps))} computed: "
            f"for {turn.config.flush_s:g} s no delta came, and the open steps are lost "
            f"(finished); look at their logs and links; a longer "
            f"placement.time_budget_s waits longer"
        )


NAMED = 8
"""Islands that one alert names; it counts those beyond."""


def next_of_absences(state: State, now: float) -> float:
    """Return the next time at which `advance` has something to tell, or infinity."""
    known = state.absences
    if known is NOBODY:
        return math.inf
    times = [at for name, at in known.due.items() if name not in known.told]
    times += [at for at in (known.back_due, known.none_due) if at is not None]
    return min((at for at in times if at > now), default=math.inf)


def of_absences(turn: Turn) -> None:
    """Tell people of absences that have lasted, and of islands that are back."""
    known, islands, now = turn.state.absences, turn.state.islands, turn.now
    live, absent = islands.standing.live, islands.standing.absent
    if turn.state.phase != "running":
        if known is not NOBODY:
            turn.set(absences=NOBODY)
        return
    if known is NOBODY and len(live) == len(islands):
        return
    lasts_s, reunion_s = turn.config.lease_s, turn.config.reunion_s
    due = {name: known.due.get(name, now + lasts_s) for name in absent}
    known = replace(known, due=due)
    left = f"{len(live)} of {len(islands)} islands are left"
    if live and known.none_told:
        assert known.none_due is not None
        away_s = now - known.none_due + lasts_s
        turn.alert(
            f"{_names(live)} {_are(live)} back: for {away_s:.0f} s no island was left; "
            f"{left}"
        )
        # Those that are still absent are told of, if they stay so.
        turn.set(absences=Absences(due=dict.fromkeys(absent, now + lasts_s)))
        return
    if live:
        known = replace(known, none_due=None)
    elif known.none_due is None:
        known = replace(known, none_due=now + lasts_s)
    if known.none_due is not None and now >= known.none_due and not known.none_told:
        known = replace(known, none_told=True, told=tuple(sorted({*known.told, *due})))
        turn.alert(
            f"no island is left: for {lasts_s:g} s each of {_names(islands)} has been "
            f"absent or gone, and nothing is computed; look at their machines and at "
            f"the network between them and the coordinator"
        )
    untold = {name: at for name, at in due.items() if name not in known.told}
    if any(at <= now for at in untold.values()):
        found = [name for name, at in untold.items() if at <= now + reunion_s]
        known = replace(known, told=tuple(sorted({*known.told, *found})))
        turn.alert(
            f"{_names(found)} {_are(found)} absent: no sign of life for {lasts_s:g} s "
            f"or more; {left}; look at the machines, and at the network between them "
            f"and the coordinator; an island that is back goes on where it was",
            found[0],
        )
    back = sorted({*known.told} & {*live})
    back_due = (known.back_due or now + reunion_s) if back else None
    if back_due is not None and (now >= back_due or len(back) == len(known.told)):
        told = tuple(name for name in known.told if name not in back)
        known, back_due = replace(known, told=told), None
        turn.alert(f"{_names(back)} {_are(back)} back; {left}", back[0])
    known = replace(known, back_due=back_due)
    turn.set(absences=NOBODY if known == NOBODY else known)


def _names(islands: Iterable[str]) -> str:
    names = sorted(islands)
    beyond = len(names) - NAMED
    shown = ", ".join(map(repr, names[:NAMED]))
    more = f" and {beyond} more" if beyond > 0 else ""
    return f"island{'s' if len(names) > 1 else ''} {shown}{more}"


def _are(islands: Iterable[str]) -> str:
    return "are" if len(list(islands)) > 1 else "is"
