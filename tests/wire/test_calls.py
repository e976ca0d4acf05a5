"""Calls of control: their places, connections without one, and the status."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from wire_support import WAIT_S, Clock, deadlines, hello, until

from diloco_jax.wire import errors, server
from diloco_jax.wire.errors import Busy, RemoteProtocolError
from diloco_jax.wire.peers import READER
from diloco_jax.wire.server import CALLS_EACH, SERVICE
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import TlsFiles


class Held:
    """A status that waits until a test lets it go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self) -> dict[str, int]:
        self.begun.release()
        assert self.go.wait(WAIT_S)
        return {"merges": 1}


@pytest.fixture
def held(handlers, monkeypatch) -> Held:
    held = Held()
    monkeypatch.setattr(handlers, "status", held)
    yield held
    held.go.set()


def test_a_peer_has_few_calls_at_once_and_the_others_theirs(
    serve, connect, tls, held, certificates
):
    _, address = serve(tls=tls["coordinator"])
    client = connect(address, tls=tls["island"])
    with ThreadPoolExecutor(CALLS_EACH + 1) as pool:
        asked = [pool.submit(client.status, WAIT_S) for _ in range(CALLS_EACH)]
        for _ in asked:
            assert held.begun.acquire(timeout=WAIT_S)
        with pytest.raises(Busy, match="island a has 4 calls under way, the limit is"):
            client.config(WAIT_S)
        reader = connect(address, tls=TlsFiles.load(certificates, READER))
        other = pool.submit(reader.status, WAIT_S)
        assert held.begun.acquire(timeout=WAIT_S), "another peer has its own"
        held.go.set()
        answers = [call.result(WAIT_S) for call in (*asked, other)]
    assert answers == [{"merges": 1}] * (CALLS_EACH + 1)
    assert client.config(WAIT_S) == {}, "they are free again"


def test_all_calls_together_leave_the_streams_their_threads(
    serve, connect, held, monkeypatch
):
    """Without TLS nobody has a share of his own."""
    monkeypatch.setattr(server, "CALLS", 3)
    _, address = serve()
    clients = [connect(address) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client.status, WAIT_S) for client in clients]
        for _ in asked:
            assert held.begun.acquire(timeout=WAIT_S)
        with pytest.raises(Busy, match="all 3 places for calls were taken"):
            clients[0].status(WAIT_S)
        for number in range(3):
            said = hello(session=f"s{number}")
            assert clients[number].open_control(said).alive
        held.go.set()
        assert [call.result(WAIT_S) for call in asked] == [{"merges": 1}] * 3


def test_a_call_without_a_request_holds_a_thread_for_a_while(
    serve, connect, raw_channel, clock: Clock
):
    server, address = serve(max_islands=1)
    never = threading.Event()

    def silence():
        never.wait(WAIT_S)
        yield b""

    channel = raw_channel(address)
    calls = [
        channel.stream_unary(f"/{SERVICE}/Status").future(silence(), timeout=WAIT_S)
        for _ in range(2)
    ]
    assert connect(address).status(WAIT_S)
    until(lambda: len(server._watch._guards) >= len(calls))
    clock.now += 1e6
    connect(address).status(WAIT_S)  # Its guard wakes the watch.
    for call in calls:
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result(WAIT_S)
        assert call.code() is grpc.StatusCode.CANCELLED, "the server ended it"
    never.set()


def test_an_island_that_is_told_busy_may_come_again_on_its_connection(
    serve, connect, handlers, monkeypatch
):
    """A stream that has ended is freed at once, and not as garbage is collected."""
    _, address = serve()
    client = connect(address)

    def busy(hello, session):
        raise Busy("not yet")

    monkeypatch.setattr(handlers, "connect", busy)
    gc.disable()
    try:
        for number in range(3 * server._STREAMS_PER_CONNECTION):
            with pytest.raises(Busy, match="not yet"):
                client.open_control(hello(session=f"s{number}"))
    finally:
        gc.enable()


def test_a_connection_without_calls_is_closed_and_one_with_a_stream_stays(
    serve, connect, raw_channel
):
    brief = deadlines(idle_s=0.5)
    _, address = serve(deadlines=brief)
    stream = connect(address).open_control(hello())
    channel = raw_channel(address)
    states, idle = [], threading.Event()

    def changed(state: grpc.ChannelConnectivity) -> None:
        states.append(state)
        ready = grpc.ChannelConnectivity.READY in states
        if ready and state is grpc.ChannelConnectivity.IDLE:
            idle.set()

    channel.subscribe(changed)
    status = channel.unary_unary(f"/{SERVICE}/Status")
    assert status(b"", timeout=WAIT_S)
    assert idle.wait(WAIT_S), states
    assert status(b"", timeout=WAIT_S), "it comes back when it is needed"
    assert stream.alive


def test_a_status_is_encoded_once_until_it_changes(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    encoded, status = [], {"merges": 1}
    original = json.dumps

    def dumps(value):
        encoded.append(value)
        return original(value)

    monkeypatch.setattr(server, "json", SimpleNamespace(dumps=dumps))
    monkeypatch.setattr(handlers, "status", lambda: status)
    client = connect(address)
    assert [client.status(WAIT_S) for _ in range(3)] == [{"merges": 1}] * 3
    status = {"merges": 2}
    assert client.status(WAIT_S) == {"merges": 2}
    assert encoded == [{"merges": 1}, {"merges": 2}]


def test_failing_status_points_to_the_log(serve, connect, handlers, monkeypatch):
    _, address = serve()
    monkeypatch.setattr(handlers, "status", lambda: {"x": object()})
    with pytest.raises(RemoteProtocolError, match=r"TypeError\); see its log"):
        connect(address).status(WAIT_S)


class Late(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self):
        return "Deadline Exceeded"


def test_answers_that_do_not_come_from_a_port_that_is_there_may_be_too_large(
    serve, connect
):
    """TCP connects with packets of some bytes; an MTU swallows only large ones."""
    _, address = serve()
    late = errors.from_rpc(Late(), address)
    explained = str(connect(address)._explained(late))
    assert explained.startswith(f"{address}: Deadline Exceeded; it can be connected to")
    assert "`ping -M do -s 1472 127.0.0.1`, and lower the MTU" in explained


def test_a_process_that_forgets_to_close_ends_quietly():
    code = """
from diloco_jax.config.placement import Deadlines
from diloco_jax.wire.client import Client
from diloco_jax.wire.server import Server
from diloco_jax.wire.session import Handlers
class Status(Handlers):
    def status(self): return {}
server = Server("127.0.0.1:0", Status(), tls=None, deadlines=Deadlines(60.0),
                max_islands=1, max_hosts=1, bulk_channels=1)
client = Client(server.start(), tls=None, deadlines=Deadlines(60.0), bulk_channels=1)
client.status(60.0)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_what_a_process_does_not_answer_is_refused():
    handlers = Handlers()
    handlers.receive(None, None)
    handlers.disconnect(None)
    calls = {name for name in vars(Handlers) if not name.startswith("_")}
    for name in calls - {"receive", "disconnect"}:
        call = getattr(handlers, name)
        arguments = [None] * (call.__code__.co_argcount - 1)
        with pytest.raises(errors.Refused, match=r"not answer such calls; .* address"):
            call(*arguments)
