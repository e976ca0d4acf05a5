"""An island of many hosts is asked for its anchors in few round trips."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from diloco_jax.config import Config, IslandConfig
from diloco_jax.deadlines import Deadlines
from diloco_jax.island.network.peer_anchors import PeerAnchors
from diloco_jax.protocol.island.fetching import Fetch
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import Holdings, HoldingsRequest, Identity

HOSTS = 8


class Host:
    """Answers once all hosts have been asked."""

    def __init__(self, asked: threading.Barrier, **said: Any) -> None:
        self._asked, self._said = asked, said

    def ask(self, request: HoldingsRequest, answer: type[Holdings]) -> Holdings:
        self._asked.wait(5.0)
        return answer(**self._said)

    def cancel(self) -> None: ...

    def close(self, within_s: float) -> None: ...


def test_all_hosts_of_an_island_are_asked_at_once() -> None:
    config = Config(islands={"a": IslandConfig(), "b": IslandConfig()})
    identity = Identity(run_id="r", island="a", incarnation=1, session="s")
    deadlines = Deadlines(5.0)
    coordinator: Any = None  # It is asked for digests only after the hosts.
    peers = PeerAnchors(config, "a", identity, coordinator, deadlines)
    asked = threading.Barrier(HOSTS)
    hosts: list[Any] = [
        Host(asked, version=Version(1, 7), part=()) for _ in range(HOSTS)
    ]
    peers._hosts["b"] = hosts
    fetch = Fetch(fragment=0, want=Version(1, 8), have=None, accepted=None, ticket=b"t")
    layout: Any = SimpleNamespace(boxes=lambda part: [])
    assert peers.fetch(fetch, (), layout) is None, "they are at another version"
    assert not asked.broken
    assert not peers._failed
    peers.close()
