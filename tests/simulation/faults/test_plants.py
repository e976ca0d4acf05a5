"""Every invariant can fail: faults planted into the product are found, and by it."""

import pytest
from plants import PLANTS, planted

from diloco_jax.protocol.coordinator.events import Note, Persist, Tell
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.invariants import INVARIANTS
from diloco_jax.simulation.faults.observing import Invariant, ViolationError
from diloco_jax.simulation.faults.play import UNBROKEN, play_seed

SEEDS = range(500)


def first_found(invariant: str) -> int | None:
    for seed in SEEDS:
        wrong = play_seed(seed).wrong
        if wrong is not None and wrong.invariant == invariant:
            return seed
    return None


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found_by_its_invariant(name: str) -> None:
    with planted(name):
        seed = first_found(PLANTS[name].invariant)
    assert seed is not None
    assert play_seed(seed).wrong is None, "it is not the plant that was found"


def test_there_is_a_plant_for_every_invariant() -> None:
    names = {invariant.name for invariant in INVARIANTS} | {liveness.NAME, UNBROKEN}
    assert {plant.invariant for plant in PLANTS.values()} == names


def test_a_violation_says_what_was_seen() -> None:
    class One(Invariant):
        name = "one"

    one = One(draw(0).configs()[1])
    one.hold(True, "{} after {}:", 2, 1)
    with pytest.raises(ViolationError) as raised:
        one.hold(False, "{} after {}:", 2, {}, "{}", 3)
    assert str(raised.value) == "one: 2 after {}: {} 3"


def test_no_invariant_looks_at_effects_that_hold_something_else() -> None:
    """It would see none of them: they are known by what they hold."""
    looked_at = {kind for invariant in INVARIANTS for kind in invariant.effects}
    assert looked_at
    assert looked_at.isdisjoint({Tell, Note, Persist})
