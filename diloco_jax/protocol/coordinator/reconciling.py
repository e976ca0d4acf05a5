"""Reconcile what the coordinator and an island that says hello know of its takes.

Verdicts, requests and bytes may be lost with a connection, and a coordinator that was
started again knows no take at all.
"""

from __future__ import annotations

from diloco_jax.protocol.coordinator import early, fragments, takes
from diloco_jax.protocol.coordinator.events import Effect
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig
from diloco_jax.protocol.values import Outstanding

Step = tuple[Fragment, list[Effect]]


def without_take(fragment: Fragment, fleet: Fleet, name: str) -> Step:
    """Repeat the request to an island that holds no take of the fragment: the first
    may be lost."""
    fragment, effects = early.forget(fragment, name)
    take = fragment.accounts[name].take
    if take is None or take.ready:
        return fragment, effects
    if take.end is not None:
        # The island gave the refused take up; the record of it is on its way.
        return fragment, effects
    fragment, asks = fragments.request(fragment, fleet, name)
    return fragment, [*effects, *asks]


def with_take(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    name: str,
    held: Outstanding,
    now: float,
    *,
    recorded: bool,
) -> Step:
    """Reconcile the account with a take whose verdict the island does not know.
    recorded: the take's record is on the tape; otherwise it comes with the next report,
    and the take is not merged before it."""
    told = fragment.accounts[name].told
    if told is not None and told.tick == held.tick:
        verdict = takes.verdict_on(fragment, name, held.tick, told.verdict, told.reason)
        # The next request may be lost together with the verdict.
        fragment, asks = without_take(fragment, fleet, name)
        return fragment, [verdict, *asks]
    effects: list[Effect] = []
    if recorded:
        fragment, effects = takes.known(config, fragment, name, held, now)
    take = fragment.accounts[name].take
    if take is None or take.tick != held.tick:
        if recorded:
            fragment, drops = early.forget(fragment, name)
            effects = effects + drops
        return fragment, effects
    if take.refused:
        return fragment, effects or [
            takes.verdict_on(fragment, name, held.tick, "refused", take.refused)
        ]
    effects = effects or takes.pending(fragment, name)
    if not take.arrived:
        fragment, asks = takes.ask_to_resend(fragment, name, held.tick)
        effects += asks
    return fragment, effects
