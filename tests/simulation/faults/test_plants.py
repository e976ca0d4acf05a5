"""Every invariant can fail: faults planted into the product are found, and by it."""

import pytest
from plants import PLANTS, planted

from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.facts import Facts, ViolationError
from diloco_jax.simulation.faults.invariants import INVARIANTS
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
    names = {*INVARIANTS, liveness.NAME, UNBROKEN}
    assert {plant.invariant for plant in PLANTS.values()} == names


def test_a_violation_says_what_was_seen() -> None:
    facts = Facts(draw(0).configs()[1])
    facts.hold("one", True, "{} after {}:", 2, 1)
    with pytest.raises(ViolationError) as raised:
        facts.hold("one", False, "{} after {}:", 2, {}, "{}", 3)
    assert str(raised.value) == "one: 2 after {}: {} 3"
