"""A coordinator that gathers: its log stays small."""

from __future__ import annotations

from door_support import Gathering, Peer

from diloco_jax.wire.limits import AT_ONCE

OFFERED = {"term": 1, "run_id": "r", "versions": [(1, 1), (1, 2)]}


def test_offers_that_come_again_and_again_fill_no_log(caplog) -> None:
    """Two processes with one island's name, which belong to two other runs."""
    made = Gathering()
    peer = Peer("a", made)
    for _ in range(100):
        for run_id in ("old", "new"):
            peer.hello({**OFFERED, "run_id": run_id})
            made.run()
    lines = [line for line in caplog.messages if "gathers anchors of run r" in line]
    assert len(lines) == AT_ONCE
    assert "in run old" in lines[0]
    assert "in run new" in lines[1]
    assert any("in run new" in alert for alert in made.handlers.status()["alerts"])
