"""What a person should look at: islands that are alive, but train alone."""

from __future__ import annotations

from diloco_jax.policy.events import Alert, Contribution, Effect
from diloco_jax.policy.state import Fragment

SOLO_MERGES = 3
"""Merges of one fragment in a row by one of several live islands."""
MISSED_MERGES = 10
"""Merges of one fragment in a row that a live island was not part of."""


def after_merge(
    fragment: Fragment, contributions: tuple[Contribution, ...], live: tuple[str, ...]
) -> list[Effect]:
    """Alerts that this merge raises; each is raised once per row of merges."""
    alerts: list[Effect] = []
    if fragment.solo_merges == SOLO_MERGES:
        alerts.append(
            Alert(
                text=f"fragment {fragment.index} was merged {SOLO_MERGES} times in a "
                f"row from {contributions[0].island!r} alone, with {len(live)} islands "
                f"training: they drift apart; raise sync.quorum, sync.grace or "
                f"sync.overlap_steps"
            )
        )
    for name in live:
        account = fragment.accounts[name]
        if account.missed_merges == MISSED_MERGES:
            alerts.append(
                Alert(
                    text=f"island {name!r} is alive, but was in none of the last "
                    f"{MISSED_MERGES} merges of fragment {fragment.index}: its work "
                    f"goes stale; look at its log and its network, or raise "
                    f"sync.grace or sync.max_staleness"
                )
            )
    return alerts
