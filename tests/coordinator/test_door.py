"""No message of a peer ends the coordinator: bytes -> service -> decisions -> bytes."""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

import msgspec
import pytest
from door_support import Coordinator, Gathering, Peer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import anchors
from diloco_jax.protocol.coordinator.events import Disconnected, Said
from diloco_jax.protocol.coordinator.search import Offered
from diloco_jax.wire.errors import Refused, WireError

# ---- what peers say ---------------------------------------------------------------

WEIRD_NUMBERS = st.sampled_from(
    (
        -1,
        0,
        1,
        2**24,
        2**31,
        2**40,
        2**48,
        2**48 + 1,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
    )
)
SMALL = st.integers(0, 40)
WEIRD = st.recursive(
    st.one_of(
        WEIRD_NUMBERS,
        st.floats(),
        st.none(),
        st.text(max_size=5),
        st.sampled_from(
            ("x" * 2_000, "../../x", "a\nERROR", "coordinator", "\udcff"[:0])
        ),
        st.binary(max_size=5),
        st.just(msgspec.msgpack.Ext(5, b"x")),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=3), WEIRD_NUMBERS), inner, max_size=3
        ),
    ),
    max_leaves=4,
)
NUMBER = st.one_of(SMALL, SMALL, WEIRD_NUMBERS)
SECONDS = st.one_of(
    st.floats(0, 10), st.floats(), st.sampled_from((5e-324, 1e-300, 1e9, 1e-9))
)
VERSION = st.tuples(st.integers(0, 3), NUMBER)
RECORD = st.fixed_dictionaries(
    {
        "seq": st.integers(1, 50),
        "kind": st.sampled_from(
            ("took", "adopted", "reopened", "dropped", "reset", "carried", "granted")
        ),
        "step": NUMBER,
    },
    optional={
        "fragment": st.integers(-1, 2),
        "tick": NUMBER,
        "version": VERSION,
        "start": NUMBER,
        "stop": NUMBER,
        "value": NUMBER,
    },
)
PHASE = st.sampled_from(("joining", "compiling", "training", "training", "stopped"))
MEASURES = st.dictionaries(
    st.sampled_from(messages.Measures.__struct_fields__),
    st.one_of(NUMBER, SECONDS),
    max_size=6,
)
OUTSTANDING = st.fixed_dictionaries(
    {
        "fragment": st.integers(0, 2),
        "tick": NUMBER,
        "start": NUMBER,
        "end": NUMBER,
        "base": VERSION,
        "seq": st.integers(1, 50),
    }
)
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "Hello": {
        "incarnation": st.one_of(st.integers(1, 3), WEIRD_NUMBERS),
        "session": st.sampled_from(("a", "b", "t")),
        "run_id": st.sampled_from(("", "r", "other")),
        "term": st.integers(0, 2),
        "tokens_per_step": st.sampled_from((8, 16, 12, 2**40)),
        "sequences_per_step": st.sampled_from((2, 4, 3, 2**24)),
        "steps": NUMBER,
        "step_seconds": SECONDS,
        "phase": PHASE,
        "outstanding": st.lists(OUTSTANDING, max_size=2),
        "sequences_granted": NUMBER,
        "records_through": NUMBER,
        "versions": st.lists(VERSION, max_size=2),
        "tokens": NUMBER,
        "own_tokens": NUMBER,
        "next_position": NUMBER,
        "lead": NUMBER,
        "environment": st.dictionaries(st.text(max_size=3), WEIRD, max_size=2),
        "island_config": st.dictionaries(st.text(max_size=3), WEIRD, max_size=2),
        "plan": st.just("other"),
    },
    "Report": {
        "phase": PHASE,
        "steps": NUMBER,
        "step_seconds": SECONDS,
        "records": st.lists(RECORD, max_size=3),
        "measures": MEASURES,
    },
    "Goodbye": {
        "reason": st.sampled_from(("stopped", "preempted", "refused", "failed")),
        "text": st.text(max_size=10),
    },
    "UploadStart": {
        "incarnation": st.integers(0, 2),
        "session": st.sampled_from(("a", "b", "t")),
        "fragment": NUMBER,
        "tick": NUMBER,
        "offset": NUMBER,
        "length": NUMBER,
        "total": NUMBER,
        "version": st.one_of(st.none(), VERSION),
    },
    "FetchRequest": {"fragment": NUMBER, "want": VERSION, "have": VERSION},
    "Take": {"step": NUMBER, "start": NUMBER, "version": VERSION, "seq": SMALL},
}


@st.composite
def said(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """Who says which message, and what of it is not as an honest island says it."""
    island = draw(st.sampled_from(("a", "a", "a", "b", "b", "c", "d")))
    usual = ("Report", "Report", "Take", "Take", "Take")
    kind = draw(st.sampled_from((*usual, *FIELDS, "Cut")))
    if draw(st.booleans()):
        return island, kind, {}
    changed: dict[str, Any] = {}
    if kind in FIELDS:
        names = sorted(FIELDS[kind])
        for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
            strategy = FIELDS[kind][name]
            changed[name] = draw(st.one_of(strategy, strategy, strategy, WEIRD))
    return island, kind, changed


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
    step = anchors.step

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
    known = made.thread.state.heard
    if kind is Said:
        report = peer.decode("Report", peer.report())
        made.handlers.receive(cast(Any, peer.stream), report)
    else:
        peer.say("Hello" if kind is Offered else "Cut", {})
    made.run()
    assert made.thread.state.heard == known
    assert "a bug" in caplog.text
    assert peer.stream is not None
    refused = [error.code for error in peer.stream.refused]
    assert refused == ([] if kind is Disconnected else ["failed"])


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
        made.handlers._sessions._serving.clear()
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
    assert list(made.thread.state.claims) == [0]
