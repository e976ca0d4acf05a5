"""50,000 hostile messages: bytes -> service -> decisions -> bytes. See `fuzz_support`.

A failure prints its seed and the move that brought it about: the same again fails
likewise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from door_support import PLAN, RUN, SHAPES
from fuzz_hostile import Hostile
from fuzz_steady import Steady
from fuzz_support import Scenario, World

from diloco_jax.coordinator.holding.store import Store
from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.coordinator.islands import Island

MOVES, MORE_MOVES = 2_000, 5_000
"""Messages of an episode; of one at night (100,000 in all), or of one that begins with
a gathering, which takes the first thousands."""
EPISODES = 20
MOVES_PER_MERGE = 100
"""At most, of the honest island."""
STEADY_EVERY = 8
"""Moves of hostile peers between two turns of the honest island."""


@pytest.fixture(scope="module")
def store() -> Store:
    """Its parameters stay from world to world: no decision depends on them."""
    return Store(
        RUN, PLAN, {n: np.zeros(s, np.float32) for n, s in SHAPES.items()}, 60.0
    )


def scenario(seed: int) -> Scenario:
    return Scenario(
        secure=seed % 4 != 3,
        gathers=seed % 5 == 4,
        total_tokens=20_000 if seed % 5 == 2 else 10**12,
    )


def fuzz(seed: int, moves: int, store: Store, folder: Path) -> tuple[World, Steady]:
    """Make so many moves in one world."""
    made = 0
    with World(scenario(seed), store, folder).open() as world:
        hostile, steady = Hostile(world, seed), Steady(world)
        while made < moves:
            due = made % STEADY_EVERY == 0
            for move in steady.moves() if due else hostile.moves():
                made += 1
                try:
                    world.do(move)
                except Exception as error:
                    told = f"seed {seed}, move {made}: {move}"
                    raise AssertionError(told) from error
            made += due
        return world, steady


@pytest.mark.parametrize(
    "moves", [MOVES, pytest.param(MORE_MOVES, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("seed", range(EPISODES))
def test_whatever_peers_send_the_coordinator_goes_on(
    seed: int, moves: int, store: Store, tmp_path: Path
) -> None:
    if scenario(seed).gathers:
        moves = MORE_MOVES
    world, steady = fuzz(seed, moves, store, tmp_path)
    if world.scenario.secure:
        refused = [r for r in steady.refusals if r.code != "finished"]
        assert refused == [], "the honest island was turned away"
        least = moves // MOVES_PER_MERGE
        assert steady.merged >= least or world.state.phase == "done"


def test_a_failure_is_found_and_told_with_its_move(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = schedule.restart

    def fail(island: Island) -> Island:
        if island.name == "c":
            raise ZeroDivisionError("planted")
        return restart(island)

    monkeypatch.setattr(schedule, "restart", fail)
    with pytest.raises(AssertionError, match=r"seed 1, move \d+: say c"):
        fuzz(1, MORE_MOVES, store, tmp_path)
