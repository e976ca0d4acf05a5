"""Which worker has a fragment, and what a worker that begins hears of islands."""

import pytest
from kit import Driver

from diloco_jax.protocol.coordinator.members import fences
from diloco_jax.protocol.holding import deal


@pytest.mark.parametrize(
    ("sizes", "workers", "dealt"),
    [
        ((5, 5, 5, 5), 2, (0, 1, 0, 1)),
        ((1, 9, 4, 4), 2, (1, 0, 1, 1)),
        ((3, 2), 1, (0, 0)),
        ((3, 2), 3, (0, 1)),
    ],
)
def test_fragments_are_dealt_evenly_by_size(sizes, workers, dealt) -> None:
    assert deal(sizes, workers) == dealt


def test_incarnations_that_have_ended_are_fenced() -> None:
    d = Driver(workers=2)
    d.join("a", "b")
    d.hello("b", 3)
    d.goodbye("a", "preempted")
    assert [(fence.island, fence.before) for fence in fences(d.state)] == [
        ("a", 2),
        ("b", 3),
    ]
