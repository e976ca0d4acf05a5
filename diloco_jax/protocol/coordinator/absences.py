"""Alerts about islands that stay away: which are absent, that none is left, who is
back.

An island that blinks is not told of: people hear of an absence once it has lasted for
a lease. Islands that are cut off together, or return together, are one alert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.events import Alert, Effect

if TYPE_CHECKING:  # The state holds an `Absences`.
    from diloco_jax.protocol.coordinator.state import PolicyConfig, State

NAMED = 8
"""Islands that one alert names; it counts those beyond."""


class Absences(msgspec.Struct, frozen=True, kw_only=True):
    """Absences in a running run. Times are those of the events."""

    due: dict[str, float] = msgspec.field(default_factory=dict)
    """When people are told of each island that is absent; when they were, if it is in
    `told`."""
    told: tuple[str, ...] = ()
    """Islands whose absence people were told, and whose return they were not."""
    back_due: float | None = None
    """When people are told of those of them that are back."""
    none_due: float | None = None
    """When people are told that no island is left; None while one is live."""
    none_told: bool = False


NOBODY = Absences()
"""Nobody is absent: every state in which that is so holds this one."""


def soonest(state: State, now: float) -> float:
    """Return the next time at which `advance` has something to tell, or infinity."""
    known = state.absences
    if known is NOBODY:
        return math.inf
    times = [at for name, at in known.due.items() if name not in known.told]
    times += [at for at in (known.back_due, known.none_due) if at is not None]
    return min((at for at in times if at > now), default=math.inf)


def advance(
    config: PolicyConfig, state: State, now: float
) -> tuple[State, list[Effect]]:
    """Tell people of absences that have lasted, and of islands that are back."""
    known, islands = state.absences, state.islands
    if state.phase != "running":
        return replace(state, absences=NOBODY) if known is not NOBODY else state, []
    fleet = islands.standing
    live, absent = fleet.live, fleet.absent
    if known is NOBODY and len(live) == len(islands):
        return state, []
    lasts_s = config.lease_s
    due = {name: known.due.get(name, now + lasts_s) for name in absent}
    known = replace(known, due=due)
    left = f"{len(live)} of {len(islands)} islands are left"
    if live and known.none_told:
        assert known.none_due is not None
        away_s = now - known.none_due + lasts_s
        # Those that are still absent are told of, if they stay so.
        due = dict.fromkeys(absent, now + lasts_s)
        text = (
            f"{_names(live)} {_are(live)} back: for {away_s:.0f} s no island was left; "
            f"{left}"
        )
        return replace(state, absences=Absences(due=due)), [Alert(text=text)]
    if live:
        known = replace(known, none_due=None)
    elif known.none_due is None:
        known = replace(known, none_due=now + lasts_s)
    effects: list[Effect] = []
    if known.none_due is not None and now >= known.none_due and not known.none_told:
        known = replace(known, none_told=True, told=tuple(sorted({*known.told, *due})))
        text = (
            f"no island is left: for {lasts_s:g} s each of {_names(islands)} has been "
            f"absent or gone, and nothing is computed; look at their machines and at "
            f"the network between them and the coordinator"
        )
        effects.append(Alert(text=text))
    untold = {name: at for name, at in due.items() if name not in known.told}
    if any(at <= now for at in untold.values()):
        found = [n for n, at in untold.items() if at <= now + config.reunion_s]
        known = replace(known, told=tuple(sorted({*known.told, *found})))
        text = (
            f"{_names(found)} {_are(found)} absent: no sign of life for {lasts_s:g} s "
            f"or more; {left}; look at the machines, and at the network between them "
            f"and the coordinator; an island that is back goes on where it was"
        )
        effects.append(Alert(text=text, island=found[0]))
    known, returns = _returned(config, known, live, left, now)
    known = NOBODY if known == NOBODY else known
    return replace(state, absences=known), effects + returns


def _returned(
    config: PolicyConfig, known: Absences, live: tuple[str, ...], left: str, now: float
) -> tuple[Absences, list[Effect]]:
    """Tell of islands that are back: those that return soon after the first together
    with it."""
    back = sorted({*known.told} & {*live})
    if not back:
        return replace(known, back_due=None), []
    if known.back_due is None:
        known = replace(known, back_due=now + config.reunion_s)
    assert known.back_due is not None
    if now < known.back_due and len(back) < len(known.told):
        return known, []
    told = tuple(name for name in known.told if name not in back)
    text = f"{_names(back)} {_are(back)} back; {left}"
    alert = Alert(text=text, island=back[0])
    return replace(known, told=told, back_due=None), [alert]


def _names(islands: Iterable[str]) -> str:
    names = sorted(islands)
    beyond = len(names) - NAMED
    shown = ", ".join(map(repr, names[:NAMED]))
    more = f" and {beyond} more" if beyond > 0 else ""
    return f"island{'s' if len(names) > 1 else ''} {shown}{more}"


def _are(islands: Iterable[str]) -> str:
    return "are" if len(list(islands)) > 1 else "is"
