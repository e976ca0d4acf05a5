"""The anchors of a new term are in memory once while its coordinator starts."""

from __future__ import annotations

import gc
import weakref

from door_support import PLAN, Gathering, Peer

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
    params.clear()  # As `term.begin` does, which makes Theta of them.
    gc.collect()
    # The gatherer itself stays: the server has its handlers until the term begins.
    assert not any(array() is not None for array in arrays)
    assert inbox() is None
    assert gatherer.status()["phase"] == "gathering"
