"""Control streams: order, refusals, broken peers, slow peers, ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from wire_support import BUDGET_S, WAIT_S, deadlines, hello, report

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import bulk
from diloco_jax.wire.client import Client, channel_options
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    LocalProtocolError,
    Refused,
    RemoteProtocolError,
)


def test_messages_arrive_in_order_both_ways(serve, connect, handlers):
    _, address = serve()
    stream = connect(address).open_control(hello())
    assert stream.welcome.run_id == "r"
    island, session = handlers.next("connect")
    assert island == "a"
    assert session.hello == hello()
    for steps in range(100):
        stream.send(report(steps))
        session.send(messages.TakeRequest(fragment=steps, tick=steps))
    for steps in range(100):
        assert handlers.next("receive")[1].steps == steps
        assert stream.receive(WAIT_S).fragment == steps
    assert stream.receive(0.0) is None
    stream.close(WAIT_S)
    assert handlers.next("disconnect")[1] is session


def test_what_is_queued_is_sent_before_the_stream_closes(serve, connect, handlers):
    _, address = serve()
    stream = connect(address).open_control(hello())
    handlers.next("connect")
    for steps in range(50):
        stream.send(report(steps))
    goodbye = messages.Goodbye(reason="preempted", text="by SIGTERM")
    stream.send(goodbye)
    stream.close(WAIT_S)
    for steps in range(50):
        assert handlers.next("receive")[1].steps == steps
    assert handlers.next("receive")[1] == goodbye
    with pytest.raises(ConnectionLost):
        stream.send(report(0))


def test_refusal_at_hello(serve, connect, handlers):
    _, address = serve()
    handlers.refusal = Refused("name-in-use", "island 'a' is alive elsewhere")
    with pytest.raises(Refused, match="alive elsewhere") as refused:
        connect(address).open_control(hello())
    assert refused.value.code == "name-in-use"
    handlers.refusal = None
    connect(address).open_control(hello())  # the first one left nothing behind
    handlers.next("connect")


def test_refusal_in_mid_session_comes_after_what_was_queued(serve, connect, handlers):
    _, address = serve()
    stream = connect(address).open_control(hello())
    _, session = handlers.next("connect")
    session.send(messages.Stop())
    session.close(Refused("fenced", "incarnation 2 is here, this is 1"))
    assert stream.receive(WAIT_S) == messages.Stop()
    with pytest.raises(Refused, match="incarnation 2"):
        stream.receive(WAIT_S)
    handlers.next("disconnect")


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"\xc1", "cannot be understood"),
        (bulk.encode({"type": "Nonsense"}), "Nonsense"),
        (bulk.encode({"type": "Hello", "island": 7}), "Hello|island|field"),
        (bulk.encode(report(1)), "is Report, expected Hello"),
        (bulk.encode(hello(sequences_per_step=2**60)), "sequences_per_step"),
        (bulk.encode(hello(step_seconds=float("inf"))), "step_seconds"),
        (bulk.encode(hello(next_position=-1)), "next_position"),
    ],
)
def test_a_broken_peer_is_told_and_disturbs_nobody(
    serve, connect, raw_channel, handlers, raw, cause
):
    _, address = serve()
    stream = connect(address).open_control(hello())
    _, session = handlers.next("connect")
    call = raw_channel(address).stream_stream("/diloco.Coordinator/Control")
    with pytest.raises(grpc.RpcError, match=cause) as error:
        list(call(iter([raw]), timeout=WAIT_S))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    stream.send(report(5))
    assert handlers.next("receive")[1].steps == 5
    session.send(messages.Stop())
    assert stream.receive(WAIT_S) == messages.Stop()


def test_second_hello_ends_the_session(serve, connect, handlers):
    _, address = serve()
    stream = connect(address).open_control(hello())
    stream.send(hello())
    with pytest.raises(LocalProtocolError, match="second Hello"):
        stream.receive(WAIT_S)
    handlers.next("connect")
    handlers.next("disconnect")


def test_silent_peer_is_dropped_after_the_deadline(serve, raw_channel):
    _, address = serve(deadlines=deadlines(connect_s=0.3))
    never = threading.Event()
    call = raw_channel(address).stream_stream("/diloco.Coordinator/Control")
    with pytest.raises(grpc.RpcError, match=r"no Hello within 0\.3 s"):
        list(call(iter(never.wait, None), timeout=WAIT_S))
    never.set()


def test_oversized_control_message_is_refused_here_and_there(
    serve, connect, raw_channel
):
    _, address = serve()
    stream = connect(address).open_control(hello())
    text = "x" * bulk.MAX_CONTROL_BYTES
    too_large = messages.Goodbye(reason="failed", text=text)
    with pytest.raises(LocalProtocolError, match=r"Goodbye.*262144"):
        stream.send(too_large)
    call = raw_channel(address).stream_stream("/diloco.Coordinator/Control")
    with pytest.raises(grpc.RpcError, match="the limit is 262144"):
        list(call(iter([bulk.encode(too_large)]), timeout=WAIT_S))
    stream.send(report(1))


def test_peer_that_does_not_read_is_put_out_and_memory_stays_bounded(
    serve, raw_channel, handlers
):
    _, address = serve(deadlines=Deadlines(10 * WAIT_S))
    open_end = threading.Event()
    call = raw_channel(address).stream_stream("/diloco.Coordinator/Control")(
        (part for part in [bulk.encode(hello()), None] if part or open_end.wait()),
        timeout=10 * WAIT_S,
    )
    _, session = handlers.next("connect")
    word = messages.TakeVerdict(
        fragment=0,
        tick=0,
        verdict="refused",
        reason="r" * (1 << 20),
        version=Version(),
    )
    began = time.monotonic()
    sent = 0
    while handlers.events.empty() and time.monotonic() - began < WAIT_S:
        session.send(word)
        sent += 1
        assert session._outbox.held_bytes <= bulk.QUEUED_CONTROL_BYTES
    handlers.next("disconnect")  # well before all deadlines
    assert sent >= bulk.QUEUED_CONTROL_BYTES >> 20
    open_end.set()
    call.cancel()


def test_more_sessions_than_places(serve, connect, handlers):
    _, address = serve(max_islands=1, max_hosts=1)
    client = connect(address)
    streams = [client.open_control(hello()) for _ in range(2)]
    with pytest.raises(Busy, match="limit is 2"):
        client.open_control(hello())
    assert client.status(WAIT_S)["islands"]
    streams[0].close(WAIT_S)
    client.open_control(hello())


def test_lost_server_ends_the_stream(serve, connect, handlers):
    server, address = serve()
    stream = connect(address).open_control(hello())
    server.stop(0.1)
    with pytest.raises(ConnectionLost):
        stream.receive(WAIT_S)
    handlers.next("connect")
    handlers.next("disconnect")


def test_first_message_must_be_welcome(serve, connect, handlers, monkeypatch):
    _, address = serve()
    monkeypatch.setattr(
        handlers, "connect", lambda hello, session: session.send(messages.Stop())
    )
    with pytest.raises(RemoteProtocolError, match="Stop, expected Welcome"):
        connect(address).open_control(hello())


def test_no_welcome_within_the_deadline(serve, connect, handlers, monkeypatch):
    _, address = serve()
    monkeypatch.setattr(handlers, "connect", lambda hello, session: None)
    client = connect(address)
    client.status(WAIT_S)  # connects, for which half a second may not be enough
    monkeypatch.setattr(client, "_deadlines", deadlines(connect_s=0.5))
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"did not answer a Hello within 0\.5"):
        client.open_control(hello())
    assert time.monotonic() - began < WAIT_S / 2


def test_handler_that_fails_ends_only_its_session(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    client = connect(address)
    good = client.open_control(hello("good"))
    handlers.next("connect")

    def fail(session, message):
        if session.hello.island == "bad":
            raise KeyError("bug")
        handlers.events.put(("receive", "good", message))

    monkeypatch.setattr(handlers, "receive", fail)
    bad = client.open_control(hello("bad"))
    handlers.next("connect")
    bad.send(report(1))
    with pytest.raises(RemoteProtocolError, match="KeyError"):
        bad.receive(WAIT_S)
    handlers.next("disconnect")
    good.send(report(2))
    handlers.next("receive")


def test_stop_ends_everything_within_its_grace(serve, connect, handlers):
    before = set(threading.enumerate())
    server, address = serve()
    client = connect(address)
    stream = client.open_control(hello())
    _, session = handlers.next("connect")
    session.send(messages.Finished())
    began = time.monotonic()
    server.stop(BUDGET_S)
    assert time.monotonic() - began < WAIT_S
    assert stream.receive(WAIT_S) == messages.Finished()
    client.close()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("diloco") or not thread.daemon:
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name


@pytest.mark.parametrize(
    ("budget_s", "again_ms"), [(2.0, 20), (20.0, 200), (600.0, 500)]
)
def test_a_name_that_moved_is_asked_for_as_often_as_it_is_dialled(budget_s, again_ms):
    """By itself gRPC believes an address for 30 s."""
    options = dict(channel_options(Deadlines(budget_s)))
    assert options["grpc.dns_min_time_between_resolutions_ms"] == again_ms
    assert options["grpc.initial_reconnect_backoff_ms"] == again_ms


STOPPED_BUDGET_S = 4.0
SERVE = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from wire_support import Recorder
from diloco_jax.config.placement import Deadlines
from diloco_jax.wire.server import Server
server = Server(
    "127.0.0.1:0", Recorder(), tls=None, deadlines=Deadlines({STOPPED_BUDGET_S}),
    max_islands=3, max_hosts=3, bulk_channels=1,
)
print(server.start(), flush=True)
time.sleep({WAIT_S})
"""


@pytest.mark.dist
def test_streams_of_a_stopped_coordinator_end_within_a_budget():
    """And not after a minute: it answers nothing, and closes nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True
    )
    with process, contextlib.ExitStack() as opened:
        opened.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        client = Client(
            address, tls=None, deadlines=Deadlines(STOPPED_BUDGET_S), bulk_channels=1
        )
        opened.callback(client.close)
        stream = client.open_control(hello())
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(ConnectionLost):
            stream.receive(WAIT_S)
        assert time.monotonic() - stopped < 3 * STOPPED_BUDGET_S
