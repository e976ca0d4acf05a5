"""Status, and what the package leaves to gRPC."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import grpc
import pytest
from wire_support import WAIT_S

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import client as clients
from diloco_jax.wire import errors, server
from diloco_jax.wire.errors import ConnectionLost, RemoteProtocolError


def test_status(serve, connect):
    _, address = serve()
    assert connect(address).status(WAIT_S) == {"islands": {"a": {"state": "training"}}}


def test_a_status_is_encoded_once_until_it_changes(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    encoded, status = [], {"merges": 1}
    original = json.dumps

    def dumps(value):
        encoded.append(value)
        return original(value)

    monkeypatch.setattr(server, "json", types.SimpleNamespace(dumps=dumps))
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


class TooLate(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self):
        return "Deadline Exceeded"


def test_answers_that_do_not_come_from_a_port_that_is_there_may_be_too_large(
    serve, connect
):
    """TCP connects with packets of some bytes; an MTU swallows only large ones."""
    _, address = serve()
    late = errors.from_rpc(TooLate(), address)
    explained = str(connect(address)._explained(late))
    assert explained.startswith(f"{address}: Deadline Exceeded; it can be connected to")
    assert "`ping -M do -s 1472 127.0.0.1`, and lower the MTU" in explained


def test_a_peer_that_does_not_shake_hands_may_send_too_large_packets(monkeypatch):
    monkeypatch.setattr(clients, "explain", lambda *_: None)
    assert "ping -M do" in clients.large_lost("10.0.0.1:7000")
    lost = ConnectionLost("gone")
    client = clients.Client.__new__(clients.Client)
    client.address, client._secured = "10.0.0.1:7000", None
    client._deadlines = Deadlines(60.0)
    assert client._explained(lost) is lost


def test_a_process_that_forgets_to_close_ends_quietly():
    code = """
from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.client import Client
from diloco_jax.wire.server import Server
class Handlers:
    def status(self): return {}
server = Server("127.0.0.1:0", Handlers(), tls=None, deadlines=Deadlines(60.0),
                max_islands=1, max_hosts=1, bulk_channels=1)
client = Client(server.start(), tls=None, deadlines=Deadlines(60.0), bulk_channels=1)
client.status(60.0)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
