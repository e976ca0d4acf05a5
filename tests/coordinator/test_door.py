"""Who is let in, whose session it is, and what a failed decision costs: one session."""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

import pytest
from door_support import Coordinator, Gathering, Peer

from diloco_jax.coordinator.journal import ALERTS_KEPT
from diloco_jax.protocol.coordinator import anchors
from diloco_jax.protocol.coordinator.search import Offered
from diloco_jax.protocol.holding import HolderTroubled
from diloco_jax.wire.errors import Busy, Refused
from diloco_jax.wire.peers import AT_ONCE

OFFERED = {"term": 1, "run_id": "r", "versions": [(1, 1), (1, 2)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("door")


def test_a_gatherer_that_fails_on_an_offer_ends_that_session_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other events as in `test_engine.py`: the thread is the same."""
    step = anchors.step

    def fail(config: Any, state: Any, event: Any, now: float) -> Any:
        if isinstance(event, Offered):
            raise ArithmeticError("a bug")
        return step(config, state, event, now)

    made = Gathering()
    peer = Peer("a", made)
    monkeypatch.setattr(made.thread.engine, "_decide", fail)
    peer.hello({})
    made.run()
    assert made.thread.state.heard == {}
    assert "a bug" in caplog.text
    assert peer.stream is not None
    assert [error.code for error in peer.stream.refused] == ["failed"]


def test_a_session_of_another_island_is_refused(folder: Any) -> None:
    """Otherwise an island would get what the other is told, also the reason to end."""
    made = Coordinator(folder)
    with contextlib.closing(made.tape):
        Peer("a", made).hello({})
        with pytest.raises(Refused, match="island 'b' is that of another island"):
            Peer("b", made).hello({"session": "a"})  # It is on its way.
        made.run()
        with pytest.raises(Refused, match="island 'b' is that of another island"):
            Peer("b", made).hello({"session": "a"})  # It is served.
        made.sessions._serving.clear()
        with pytest.raises(Refused, match="island 'b' is that of another island"):
            Peer("b", made).hello({"session": "a"})  # It is away, and may return.
        Peer("a", made).hello({})


def test_a_name_is_never_used_up_by_a_high_incarnation(folder: Any) -> None:
    now = int(time.time())
    made = Coordinator(folder)
    with contextlib.closing(made.tape):
        peer = Peer("a", made)
        for high in (2**48, now + 86_400, now + 660):
            with pytest.raises(Refused, match=f"{high} of island 'a' is too high: its"):
                peer.hello({"incarnation": high})
        for plausible in (3, now, now + 540, now + 541):
            peer.hello({"incarnation": plausible, "session": f"{plausible}"})
            made.run()
            assert made.state.islands["a"].incarnation == plausible
    with pytest.raises(Refused, match="start it with --incarnation 1"):
        Peer("a", Gathering()).hello({"incarnation": 2**48})


def test_a_gatherer_does_not_wait_for_strangers() -> None:
    made = Gathering()
    with pytest.raises(Refused, match="no island 'd', only 'a', 'b', 'c'; let it"):
        Peer("d", made).hello({})
    made.run()
    assert made.thread.state.members == {}
    made = Gathering(admitted=("d",))  # By an operator, as the log knows.
    Peer("d", made).hello(OFFERED)
    made.run()
    assert list(made.thread.state.members) == ["d"]


@pytest.mark.parametrize("call", ["fetch", "keep", "kept", "profile", "steer"])
def test_a_gatherer_answers_nothing_that_needs_a_state(call: str) -> None:
    made = Gathering()
    Peer("a", made).hello(OFFERED)
    made.run()
    asked = (0, "a file") if call == "kept" else (cast(Any, None),)
    with pytest.raises(Busy, match=r"has lost its state .* come again"):
        getattr(made.handlers, call)(*asked)


def test_an_anchor_is_taken_of_the_session_that_was_asked() -> None:
    made = Gathering()
    for name in "abc":
        Peer(name, made).hello(OFFERED)
    made.run()
    peer, anchor = Peer("a", made), {"fragment": 0, "version": (1, 1)}
    assert made.thread.state.claims[0].island == "a"
    with pytest.raises(Refused, match="not asked for"):
        peer.upload({**anchor, "session": "t"})
    peer.upload(anchor)
    made.run()
    assert made.thread.state.claims[0].anchor is not None


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


def test_what_a_search_tells_people_reaches_status_and_the_runs_alerts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Gathering()
    text = "the anchor (1, 5) of fragment 0 of island 'a' does not count"
    made.handlers.alert(text, "a")
    assert text in made.handlers.status()["alerts"]
    for number in range(100):
        made.handlers.alert(str(number))
    monkeypatch.setattr(made.thread, "run", lambda: None)
    made.handlers._found = made.handlers._holder = cast(Any, object())
    heard = made.handlers.search().unheard
    assert heard[-1] == HolderTroubled(text="99")
    assert len(heard) == ALERTS_KEPT
