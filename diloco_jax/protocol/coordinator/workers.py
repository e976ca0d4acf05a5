"""Decide what a worker's absence and its return change; deal fragments to workers.

A worker holds its fragments' deltas and what it has prepared in memory or unnamed
files: when it dies, they are gone. Only what the lead's log has committed comes back.
So an open request or an ordered merge is given up, and the deltas of outstanding takes
count as unsent: islands hold them until a verdict. Nobody holds the deltas that
goodbyes left behind any more: they are lost.
"""

from __future__ import annotations

import functools

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import cycles, ledger, lost_fragments, takes
from diloco_jax.protocol.coordinator.events import (
    Alert,
    Effect,
    WorkerAway,
    WorkerBack,
)
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    TAKE,
    Fragment,
    PolicyConfig,
    State,
    take_state,
    with_account,
    with_fragment,
)
from diloco_jax.protocol.holding import Forget
from diloco_jax.protocol.values import WORKER

Step = tuple[State, list[Effect]]


@functools.lru_cache(maxsize=8)
def deal(sizes: tuple[int, ...], workers: int) -> tuple[int, ...]:
    """Return the worker of each fragment: the largest fragment first, each to the
    worker with the fewest parameters. sizes: parameters by fragment."""
    held, dealt = [0] * workers, [0] * len(sizes)
    for fragment in sorted(range(len(sizes)), key=lambda f: (-sizes[f], f)):
        worker = min(range(workers), key=lambda w: (held[w], w))
        held[worker] += sizes[fragment]
        dealt[fragment] = worker
    return tuple(dealt)


def fences(state: State) -> tuple[Forget, ...]:
    """Return which incarnations of each island have ended, for a worker that begins."""
    return tuple(
        Forget(
            island=name,
            before=island.incarnation + (island.status == "gone"),
            kept=(),
        )
        for name, island in sorted(state.islands.items())
    )


def away(config: PolicyConfig, state: State, event: WorkerAway) -> Step:
    """Note that a worker is away, with all that it had not committed."""
    gone = []
    for fragment in _of_worker(config, state, event.worker):
        if fragment.lost is not None:
            state = lost_fragments.found(state, fragment)
        if not fragment.away:
            gone.append(fragment.index)
            fragment = _unheld(fragment)
            state = with_fragment(state, ledger.lose_missing(state, fragment, WORKER))
    if not gone:
        return state, []
    text = (
        f"worker {event.worker} is away: its fragments {gone} are not merged until it "
        f"is back; look at its log"
    )
    if state.keeping:
        text += f". Cycle {state.kept_cycle} is not kept"
        state = cycles.forgotten(state)
    return state, [Alert(text=text)]


def back(config: PolicyConfig, state: State, event: WorkerBack, now: float) -> Step:
    """Note that a worker is back with what is committed; ask for the deltas that it
    lost. Fragments that it does not have any more stay away, until they are gathered.

    It may have lost the bytes of a take before the take's record came.
    """
    effects: list[Effect] = []
    if event.lost:
        text = (
            f"worker {event.worker} has lost its fragments {list(event.lost)}: their "
            f"files are gone or damaged, see its log. They are gathered from islands"
        )
        effects.append(Alert(text=text))
    for fragment in _of_worker(config, state, event.worker):
        if fragment.index in event.lost:
            # At a start of the lead, they have not been away before.
            fragment = fragment if fragment.away else _unheld(fragment)
            state = lost_fragments.lose(config, state, fragment, now)
            continue
        if not fragment.away:
            continue
        fragment = replace(fragment, away=False)
        for name, account in sorted(fragment.accounts.items()):
            if account.take is not None and not account.take.refused:
                tick = account.take.tick
                fragment, asks = takes.ask_to_resend(fragment, name, tick)
                effects += asks
        state = with_fragment(state, fragment)
    return state, effects


def _of_worker(config: PolicyConfig, state: State, worker: int) -> list[Fragment]:
    dealt = deal(config.fragment_sizes, config.workers)
    return [f for f in state.fragments if dealt[f.index] == worker]


def _unheld(fragment: Fragment) -> Fragment:
    """Return the fragment without everything that only its worker held."""
    fragment = replace(
        fragment,
        phase=FRAGMENT.move(fragment.phase, "recover"),
        asked=(),
        merging=(),
        left_behind=(),
        early=(),
        away=True,
    )
    for name, account in fragment.accounts.items():
        take = account.take
        if take is not None and take.arrived and not take.refused:
            unsent = replace(take, arrived=False)
            TAKE.check(take_state(take), "lose", take_state(unsent))
            fragment = with_account(fragment, name, replace(account, take=unsent))
    return fragment
