"""The addresses of workers, as an island follows them."""

from __future__ import annotations

import contextlib

import pytest

from diloco_jax.deadlines import Deadlines
from diloco_jax.island.network.lanes import Lanes
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import FetchRequest
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import ConnectionLost

FIRST, SECOND = ("127.0.0.1:1", "127.0.0.1:3"), ("127.0.0.1:1", "127.0.0.1:5")


def test_an_island_leaves_the_workers_of_a_lead_that_ended_and_tells_its_hosts():
    moved = []
    coordinator = Client(
        "127.0.0.1:7", tls=None, deadlines=Deadlines(1.0), bulk_channels=1
    )
    with contextlib.closing(coordinator):
        lanes = Lanes(coordinator, (10, 30, 20))
        lanes.moved = moved.append
        lanes.use(())
        assert (moved, lanes.dealt) == ([], ())
        lanes.use(FIRST)
        lanes.use(FIRST)
        assert lanes.dealt == (1, 0, 1)
        stayed, left = (coordinator.transfers_at(a, w) for w, a in enumerate(FIRST))
        lanes.use(SECOND)
        assert moved == [FIRST, SECOND]
        assert coordinator.transfers_at(SECOND[0], 0) is stayed
        with pytest.raises(ConnectionLost, match="closed"):
            left.fetch(
                FetchRequest(
                    run_id="r",
                    island="a",
                    incarnation=1,
                    session="s",
                    fragment=0,
                    want=Version(1, 1),
                    have=None,
                ),
                max_bytes=8,
            )
