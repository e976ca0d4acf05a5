"""No message of a peer ends the coordinator: bytes -> service -> decisions -> bytes."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest
from door_support import Coordinator, Gathering, Peer, said
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diloco_jax.protocol.coordinator.events import Disconnected, Said
from diloco_jax.protocol.new_term import gathering
from diloco_jax.protocol.new_term.events import Offered
from diloco_jax.wire.errors import Refused, WireError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("door")


@given(st.lists(said(), min_size=20, max_size=60))
@settings(max_examples=100, phases=(Phase.generate,))  # It takes minutes to shrink.
def test_whatever_peers_say_the_coordinator_goes_on(folder: Any, all_said: Any) -> None:
    made = Coordinator(folder)
    peers = {name: Peer(name, made) for name in "abcd"}
    with contextlib.closing(made.tape):
        for island, kind, changed in all_said:
            # It is told of that; any other error would end the test.
            with contextlib.suppress(WireError):
                peers[island].say(kind, changed)
            made.run()
            stream = peers[island].stream
            if stream is not None:
                assert "failed" not in [refused.code for refused in stream.refused]


@given(st.lists(said(), min_size=20, max_size=40))
@settings(max_examples=50, phases=(Phase.generate,))
def test_whatever_peers_say_a_gathering_coordinator_goes_on(all_said: Any) -> None:
    made = Gathering()
    peers = {name: Peer(name, made) for name in "abcd"}
    for island, kind, changed in all_said:
        offered = {"term": 1, "run_id": "r", "versions": [(1, 1), (1, 2)]}
        if kind == "Hello":
            changed = {**offered, **changed}
        with contextlib.suppress(WireError):
            peers[island].say(kind, changed)
        made.run()
        stream = peers[island].stream
        if stream is not None:
            assert "failed" not in [refused.code for refused in stream.refused]
        if made.over:
            break


@pytest.mark.parametrize("kind", [Offered, Said, Disconnected])
def test_a_gatherer_that_fails_on_an_event_ends_that_session_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    step = gathering.step

    def fail(config: Any, state: Any, event: Any, now: float) -> Any:
        if isinstance(event, kind):
            raise ArithmeticError("a bug")
        return step(config, state, event, now)

    made = Gathering()
    peer = Peer("a", made)
    if kind is not Offered:
        peer.hello({"term": 1, "run_id": "r", "versions": [(1, 1), (1, 2)]})
        made.run()
    monkeypatch.setattr(made.thread.engine, "_decide", fail)
    known = made.thread.state.known
    if kind is Said:
        report = peer.decode("Report", peer.report())
        made.handlers.receive(cast(Any, peer.stream), report)
    else:
        peer.say("Hello" if kind is Offered else "Cut", {})
    made.run()
    assert made.thread.state.known == known
    assert "a bug" in caplog.text
    assert peer.stream is not None
    refused = [error.code for error in peer.stream.refused]
    assert refused == ([] if kind is Disconnected else ["failed"])


def test_a_gatherer_does_not_wait_for_strangers() -> None:
    made = Gathering()
    with pytest.raises(Refused, match="no island 'd', only 'a', 'b', 'c'; add it"):
        Peer("d", made).hello({})
    made.run()
    assert made.thread.state.members == {}


def test_an_anchor_is_taken_of_the_session_that_was_asked() -> None:
    made = Gathering()
    offered = {"term": 1, "run_id": "r", "versions": [(1, 1), (1, 2)]}
    for name in "abc":
        Peer(name, made).hello(offered)
    made.run()
    peer, anchor = Peer("a", made), {"fragment": 0, "version": (1, 1)}
    assert made.thread.state.asked[0].island == "a"
    with pytest.raises(Refused, match="not asked for"):
        peer.upload({**anchor, "session": "t"})
    peer.upload(anchor)
    made.run()
    assert list(made.thread.state.got) == [0]
