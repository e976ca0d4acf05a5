"""Alerts for people: islands that train alone, or whose work is wasted.

Remedies in `sync` are for the next run: a run keeps its own settings, even if resumed.
"""

from __future__ import annotations

import math

from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.coordinator.events import Alert, Effect
from diloco_jax.protocol.coordinator.state import (
    MISSED_MERGES,
    Fragment,
    PolicyConfig,
    State,
)
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
    fragment: Fragment, contributions: tuple[Contribution, ...], live: tuple[str, ...]
) -> list[Effect]:
    """Return the alerts that this merge raises; each is raised once per streak."""
    alerts: list[Effect] = []
    if fragment.solo_merges == SOLO_MERGES:
        alerts.append(
            Alert(
                text=f"fragment {fragment.index} was merged {SOLO_MERGES} times in a "
                f"row from {contributions[0].island!r} alone, with {len(live)} islands "
                f"training: they drift apart; for the next run, raise "
                f"sync.quorum, sync.grace or sync.overlap_steps"
            )
        )
    for name in live:
        account = fragment.accounts[name]
        if account.missed_merges == MISSED_MERGES:
            alerts.append(
                Alert(
                    text=f"island {name!r} is alive, but was in none of the last "
                    f"{MISSED_MERGES} merges of fragment {fragment.index}: its work "
                    f"goes stale; look at its log and its network, or, for the "
                    f"next run, raise sync.grace or sync.max_staleness",
                    island=name,
                )
            )
    return alerts


def after_unfit(fragment: Fragment, name: str) -> list[Effect]:
    """Return the alert for a delta that is not finite; once between two merges."""
    if fragment.unfit_deltas != UNFIT_DELTAS:
        return []
    text = (
        f"{UNFIT_DELTAS} deltas of fragment {fragment.index} in a row were not finite, "
        f"the last one of island {name!r}, and none was merged between them: the run "
        f"diverges, and what it computes is lost; stop it, look at the islands' "
        f"losses, and for the next run lower inner.learning_rate or look at the data"
    )
    return [Alert(text=text, island=name)]


def after_failure(name: str, said: str) -> list[Effect]:
    """Return the alert for an island that said goodbye because it failed: its device,
    its step, its disk."""
    text = (
        f"island {name!r} failed, and says: {said or 'nothing'}; look at its log and "
        f"at its devices (diloco doctor); its supervisor starts it again"
    )
    return [Alert(text=text, island=name)]


def after_ahead(name: str, how: str) -> list[Effect]:
    """Return the alert for an island that knows of a later state of the run."""
    text = (
        f"island {name!r} is {how}: either this coordinator's state is an old one, or "
        f"that island lies; it is told to come again. If other islands say so too, "
        f"start the coordinator that has the newest state; if none does, revoke its key"
    )
    return [Alert(text=text, island=name)]


def in_turns(config: PolicyConfig, state: State, fragment: Fragment) -> list[Effect]:
    """Report islands of about the pacing island's speed that are seldom merged.

    The first fragment stands for all: they are about equally large.
    """
    if fragment.index != 0 or fragment.merges not in WATCHED_MERGES:
        return []
    pace = schedule.pacing_step_seconds(config, state)
    alike = {
        name: fragment.accounts[name]
        for name, island in sorted(schedule.alike(config, state).items())
        if island.step_seconds
    }
    seldom = {
        name: account
        for name, account in alike.items()
        if account.merges_in < MOST_MERGES * account.merges_alive
    }
    if len(alike) < 2 or not seldom:
        return []
    could = sum(account.merges_alive for account in seldom.values())
    were = sum(account.merges_in for account in seldom.values())
    spent = fragment.quorum_seconds + fragment.merge_seconds + fragment.transfer_seconds
    wanted = max(math.ceil(2 * spent / pace), config.overlap_steps + 1)
    remedy = f"raise sync.overlap_steps from {config.overlap_steps} to {wanted}"
    if not config.grace:
        remedy = "raise sync.grace from 0"
    elif config.grace_window == "overlap":
        remedy = 'leave sync.grace_window at "alike"'
    text = (
        f"of {len(alike)} islands of about one speed, {', '.join(seldom)} were in "
        f"{were / could:.0%} of the merges since they joined: they are merged in turns "
        f"with the others, and learn worse for it. "
        f"Quorum, merging and sending take {spent:.3g} s of an overlap of "
        f"{config.overlap_steps} steps of {pace:.3g} s, and what is left is too short "
        f"to wait for the others; for the next run, {remedy}"
    )
    return [Alert(text=text)]


def at_end(config: PolicyConfig, state: State) -> list[Effect]:
    """Report islands that were live when the run ended and have unmerged steps.

    To be called at the end of the flush, before open steps are booked as lost.
    """
    raised: list[Effect] = []
    away = [fragment.index for fragment in state.fragments if fragment.away]
    if away:
        text = (
            f"the run ended without a last merge of fragments {away}: their worker was "
            f"away when {config.flush_s:g} s had passed; look at its log"
        )
        raised.append(Alert(text=text))
    open_steps = {
        name
        for name, island in sorted(state.islands.items())
        if island.status == "live"
        for fragment in state.fragments
        if fragment.accounts[name].start < island.steps
    }
    if not open_steps:
        return raised
    text = (
        f"the run ended without all that {', '.join(sorted(open_steps))} computed: for "
        f"{config.flush_s:g} s no delta came, and the open steps are lost (finished); "
        f"look at their logs and links; a longer placement.time_budget_s waits longer"
    )
    return [*raised, Alert(text=text)]
