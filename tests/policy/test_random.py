"""Random faults: whatever happens, the books balance and the run goes on."""

import dataclasses

import pytest
from world import World

from diloco_jax.policy import ledger

WALKS = 24


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_run_with_random_faults_keeps_its_books_and_ends(seed: int) -> None:
    world = World(seed)
    world.run(90)
    world.heal()
    world.run(30)
    if not world.finished and world.running:
        before = list(world.merge_counts)
        cycle_s = world.config.steps_per_cycle * max(world.speeds.values())
        world.run(4 * cycle_s + 40)
        stuck = [i for i, n in enumerate(before) if world.merge_counts[i] == n]
        assert not (world.running and stuck), f"{stuck} are stuck\n{describe(world)}"
    world.run(3000)
    assert world.finished, describe(world)
    check_end(world)


def check_end(world: World) -> None:
    """After `Finish`: nothing is in flight, and no position was merged twice."""
    assert world.state is not None
    for name in world.state.islands:
        totals = ledger.island_totals(world.config, world.state, name)
        assert 0 <= totals.in_flight <= len(totals.lost) + 1  # Of flooring.
    for fragment in world.state.fragments:
        booked = sum(a.merged_tokens for a in fragment.accounts.values())
        merged = [
            (end - start) * world.sizes[key[0]][0]
            for key, (start, end) in world.merged.items()
            if key[2] == fragment.index
        ]
        assert booked == sum(merged)
    used: set[int] = set()
    for (name, incarnation), spans in world.spans.items():
        positions = [position for span in spans for position in span]
        ends = [
            end
            for key, (_, end) in world.merged.items()
            if key[:2] == (name, incarnation)
        ]
        mine = set(positions[: max(ends, default=0) * world.sizes[name][1]])
        assert not mine & used, "data was merged twice"
        used |= mine


def describe(world: World) -> str:
    """Where a world stands, for the message of a failed test."""
    assert world.state is not None
    islands = [
        f"{i.name}.{i.incarnation} {i.status} {i.phase} step {i.steps}"
        for i in world.state.islands.values()
    ]
    fragments = [
        f"{f.index} {f.phase} {tuple(f.version)} asked {f.asked} takes "
        f"{ {n: dataclasses.astuple(a.take) for n, a in f.accounts.items() if a.take} }"
        for f in world.state.fragments
    ]
    lines = [f"phase {world.state.phase}, tick {world.state.tick}"]
    return "\n".join([*lines, *islands, *fragments])
