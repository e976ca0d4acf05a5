"""A coordinator that gathers: its memory and its log stay small."""

from __future__ import annotations

import gc
import weakref

from door_support import PLAN, Gathering, Peer

from diloco_jax.wire.limits import AT_ONCE

OFFERED = {"term": 1, "run_id": "r", "versions": [(1, 1), (1, 2)]}


def test_a_gatherer_gives_up_what_it_holds_once_the_parameters_are_made() -> None:
    made = Gathering()
    peers = {name: Peer(name, made) for name in "abc"}
    for peer in peers.values():
        peer.hello(OFFERED)
    made.run()
    while not made.over:
        for fragment, asked in dict(made.thread.state.asked).items():
            version = OFFERED["versions"][fragment]
            peers[asked.island].upload({"fragment": fragment, "version": version})
        made.run()
    gatherer = made.handlers
    arrays = [weakref.ref(array) for array in gatherer._arrays.values()]
    inbox = weakref.ref(gatherer._inbox)
    assert len(arrays) == len(PLAN.pieces)
    params = gatherer.gather().params
    params.clear()  # As `origin.begin` does, which makes Theta of them.
    gc.collect()
    # The gatherer itself stays: the server has its handlers until the term begins.
    assert not any(array() is not None for array in arrays)
    assert inbox() is None
    assert gatherer.status()["phase"] == "gathering"


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
