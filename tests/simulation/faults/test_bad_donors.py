"""Donors that die, are cut off, give nothing or lie: copies, and what holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.faults import (
    BadDonor,
    IslandCrash,
    Partition,
    ScheduledFault,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule
from diloco_jax.simulation.faults.world import FaultyIsland
from diloco_jax.simulation.island import VirtualFetch

FRAGMENTS, TAU = 2, 4
FAULTS = (
    BadDonor(at_s=30, island="a", for_s=20, lies=True),
    BadDonor(at_s=30, island="a", for_s=20),
    IslandCrash(at_s=30, island="a", down_s=5),
    IslandCrash(at_s=30, island="a", down_s=15, noticed=False),
    Partition(at_s=30, island="a", for_s=10),
)


@pytest.fixture
def copies(monkeypatch) -> Counter[tuple[int, Version]]:
    """Publishes that islands have from the coordinator, without joins."""
    found = Counter[tuple[int, Version]]()
    fetch = FaultyCoordinator.fetch

    def counted(
        self: Any, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        fetched = fetch(self, fragment, want, have)
        if have is not None and fetched is not None:
            found[fragment, fetched.version] += 1
        return fetched

    monkeypatch.setattr(FaultyCoordinator, "fetch", counted)
    return found


def schedule(*faults: ScheduledFault, region: str = "near") -> Schedule:
    return Schedule(
        islands={name: DrawnIsland(region=region) for name in "abcd"},
        total_tokens=8 * 4 * 120,
        steps_per_cycle=8,
        overlap_steps=TAU,
        quorum=4,
        fragment_sizes=(2, 1),
        faults=faults,
    )


def test_a_region_has_one_copy_of_each_publish(copies) -> None:
    played = play(schedule())
    assert played.wrong is None
    assert set(copies.values()) == {1}
    assert len(copies) > 20


def test_without_regions_each_island_has_its_own(copies) -> None:
    assert play(schedule(region="")).wrong is None
    assert set(copies.values()) == {4}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_donor_costs_one_more_copy_of_what_is_under_way(copies, fault) -> None:
    played = play(schedule(fault))
    assert played.wrong is None
    assert played.world.struck[fault.kind] == 1
    beyond = {what: count for what, count in copies.items() if count > 1}
    assert set(beyond.values()) <= {2}
    assert len(beyond) <= FRAGMENTS


class Forged(bytes):
    """Another publish with the digest that was announced."""

    announced = ""

    def hex(self, *separators: Any) -> str:
        return self.announced


def test_whoever_trusts_a_liar_is_found(monkeypatch) -> None:
    """What is adopted then is no version of the run."""
    gives = FaultyIsland.gives

    def trusted(self: Any, fetch: Any) -> VirtualFetch | None:
        found = gives(self, fetch)
        if found is None or self.gives_how != "lies":
            return found
        forged = Forged(b"something else")
        forged.announced = fetch.sources.stripes[""]
        return found._replace(data=[forged])

    monkeypatch.setattr(FaultyIsland, "gives", trusted)
    wrong = play(schedule(FAULTS[0])).wrong
    assert wrong is not None
    assert wrong.invariant == "anchors"
