"""Quarantine: no delta of an island is merged after too many unfit ones in a row.

Every refusal makes the island restart that fragment from its anchor, so a cycle later
nothing of its old values is left. The coordinator still asks for its deltas and judges
them, but merges none. It releases the island once all deltas of `sync.release_cycles`
cycles in a row were fit, or when an operator asks for it. A new incarnation of a
quarantined island is quarantined too.

A majority of the live islands is never quarantined: if most differ from the rest,
nobody can tell who is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import bounds
from diloco_jax.protocol.coordinator.events import Alert, Effect, Note, Persist
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    PolicyConfig,
    State,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.reasons import NON_FINITE, OUT_OF_BOUNDS, QUARANTINED

Step = tuple[State, list[Effect]]


def advance(config: PolicyConfig, state: State, effects: Sequence[Effect]) -> Step:
    """Count the deltas that one step has judged; quarantine and release islands."""
    found: list[Effect] = []
    if not config.quarantine_after:
        return state, found
    for effect in effects:
        match effect:
            case Note(record=records.DeltaRefused() as refused):
                if refused.reason in (NON_FINITE, OUT_OF_BOUNDS):
                    state, more = _unfit(config, state, refused)
                elif refused.reason == QUARANTINED:
                    state, more = _fit(config, state, refused)
                else:
                    continue
                found += more
            case Merge(contributions=contributions):
                for contribution in contributions:
                    island = state.islands[contribution.island]
                    if island.streak and not island.quarantined:
                        state = with_island(state, replace(island, streak=0))
    return state, found


def turn_away(config: PolicyConfig, state: State) -> Step:
    """Refuse the deltas that have arrived from quarantined islands, in every phase of
    their fragments.

    Nobody waits for these deltas, so they may come too late for a merge.
    """
    effects: list[Effect] = []
    for name in state.islands.standing.quarantined:
        fleet = Fleet(config, state)
        for before in state.fragments:
            take = before.accounts[name].take
            if not (before.left_behind or (take is not None and take.ready)):
                continue  # This is asked for each fragment after each event.
            fragment, found = bounds.turn_away(config, before, fleet, name)
            if found:
                state = with_fragment(state, fragment)
                effects += found
    return state, effects


def moved(state: State, name: str, *, quarantined: bool) -> State:
    """Return the state with the island in quarantine, or out of it; recovery applies
    this too.
    """
    island = replace(state.islands[name], quarantined=quarantined, streak=0)
    return with_island(state, island)


def _unfit(config: PolicyConfig, state: State, refused: records.DeltaRefused) -> Step:
    name = refused.island
    island = state.islands[name]
    if island.quarantined:
        return with_island(state, replace(island, streak=0)), []
    island = replace(island, streak=island.streak + 1)
    state = with_island(state, island)
    if island.streak < config.quarantine_after or not _may_lack(state):
        return state, []
    record = records.Quarantined(
        island=name, incarnation=island.incarnation, refused=island.streak
    )
    what = "is not finite"
    if refused.reason == OUT_OF_BOUNDS:
        what = f"has a length of {refused.norm:.3g}, but {refused.most:.3g} is allowed"
    text = (
        f"island {name!r} is quarantined: {island.streak} of its deltas in a row were "
        f"unfit, and the last one, of fragment {refused.fragment}, {what}; it restarts "
        f"from the global parameters, and is merged again once its deltas are within "
        f"bounds for {config.release_cycles} cycles; look at its log, its data and its "
        f"machine"
    )
    state = moved(state, name, quarantined=True)
    return state, [Persist(record=record), Alert(text=text, island=name)]


def _fit(config: PolicyConfig, state: State, refused: records.DeltaRefused) -> Step:
    name = refused.island
    island = state.islands[name]
    if not island.quarantined or _is_untold(config, state, refused):
        return state, []
    island = replace(island, streak=island.streak + 1)
    state = with_island(state, island)
    if island.streak < config.release_cycles * config.fragments:
        return state, []
    return release(state, island)


def release(state: State, island: Island, *, asked: bool = False) -> Step:
    """End an island's quarantine. asked: an operator wants it."""
    name, fit = island.name, island.streak
    record = records.Released(
        island=name, incarnation=island.incarnation, fit=fit, asked=asked
    )
    why = ", as an operator wanted" if asked else ""
    text = (
        f"island {name!r} is out of quarantine after {fit} deltas in a row that were "
        f"within bounds{why}; its deltas are merged again"
    )
    state = moved(state, name, quarantined=False)
    return state, [Persist(record=record), Alert(text=text, island=name)]


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
    return len(others) >= bounds.FEWEST


def _may_lack(state: State) -> bool:
    """Tell whether one more island in quarantine leaves most of the live ones."""
    fleet = state.islands.standing
    apart = {*fleet.live} & {*fleet.quarantined}
    return 2 * (len(apart) + 1) < len(fleet.live)
