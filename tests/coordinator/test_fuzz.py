"""100,000 hostile messages: bytes -> service -> decisions -> bytes. See `fuzz_support`.

A failure prints the moves that bring it about, without those that are not needed.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from door_support import PLAN, RUN, SHAPES
from fuzz_hostile import Hostile
from fuzz_shrinking import shrink
from fuzz_steady import Steady
from fuzz_support import Move, Scenario, World

from diloco_jax.coordinator.holding.store import Store
from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.coordinator.islands import Island

MOVES = 5_000
EPISODES = 20
"""5,000 messages each, 100,000 in all."""
LEAST_MERGES = 50
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


def failure(error: BaseException) -> tuple[str, str]:
    """The marks of a failure: its kind, and where it was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, f"{last.filename}:{last.lineno}"


def fails(
    found: tuple[str, str],
    seed: int,
    store: Store,
    folder: Path,
    moves: Sequence[Move],
) -> bool:
    """Tell if these moves fail likewise in a new world."""
    try:
        with World(scenario(seed), store, folder).open() as world:
            for move in moves:
                world.do(move)
    except Exception as error:
        return failure(error) == found
    return False


def fuzz(seed: int, moves: int, store: Store, folder: Path) -> tuple[World, Steady]:
    """Make so many moves in one world."""
    made, done = 0, list[Move]()
    with World(scenario(seed), store, folder).open() as world:
        hostile, steady = Hostile(world, seed), Steady(world)
        while made < moves:
            due = made % STEADY_EVERY == 0
            for move in steady.moves() if due else hostile.moves():
                done.append(move)
                made += 1
                try:
                    world.do(move)
                except Exception as error:
                    raise told(seed, done, error, store, folder) from error
            made += due
        return world, steady


def told(
    seed: int, done: list[Move], error: Exception, store: Store, folder: Path
) -> AssertionError:
    """Return an error that names the moves which bring another one about."""
    found = failure(error)
    few = shrink(done, functools.partial(fails, found, seed, store, folder))
    return AssertionError(f"seed {seed}: {found} after\n" + "\n".join(map(str, few)))


@pytest.mark.parametrize("seed", range(EPISODES))
def test_whatever_peers_send_the_coordinator_goes_on(
    seed: int, store: Store, tmp_path: Path
) -> None:
    world, steady = fuzz(seed, MOVES, store, tmp_path)
    if world.scenario.secure:
        refused = [r for r in steady.refusals if r.code != "finished"]
        assert refused == [], "the honest island was turned away"
        assert steady.merged >= LEAST_MERGES or world.state.phase == "done"


def test_a_failure_is_found_and_told_in_few_moves(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = schedule.restart

    def fail(island: Island) -> Island:
        if island.name == "c":
            raise ZeroDivisionError("planted")
        return restart(island)

    monkeypatch.setattr(schedule, "restart", fail)
    with pytest.raises(AssertionError, match="ZeroDivisionError") as caught:
        fuzz(1, MOVES, store, tmp_path)
    told = str(caught.value).splitlines()
    assert 2 <= len(told) <= 4, told
    assert "say c" in told[-1]
