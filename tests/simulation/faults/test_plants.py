"""Every invariant can fail: faults planted into the product are found, and by it.

`plants.json` has the seed that found each: it is played first, and where schedules are
drawn in another way now, the others are. REGENERATE=1 writes what was found.
"""

import itertools
import json
from pathlib import Path

import pytest
from goldens import REGENERATE
from plants import PLANTS, planted

from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.facts import Facts, ViolationError
from diloco_jax.simulation.faults.invariants import INVARIANTS
from diloco_jax.simulation.faults.play import UNBROKEN, play_seed

SEEDS = range(500)
TABLE = Path(__file__).with_name("plants.json")
KNOWN: dict[str, int] = json.loads(TABLE.read_text())


def finds(seed: int, invariant: str) -> bool:
    wrong = play_seed(seed).wrong
    return wrong is not None and wrong.invariant == invariant


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found_by_its_invariant(name: str) -> None:
    invariant, known = PLANTS[name].invariant, KNOWN.get(name, 0)
    with planted(name):
        seeds = (s for s in itertools.chain([known], SEEDS) if finds(s, invariant))
        seed = next(seeds, None)
    assert seed is not None
    if REGENERATE:
        KNOWN[name] = seed
        lines = [f"  {json.dumps(each)}: {KNOWN[each]}" for each in PLANTS]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
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
