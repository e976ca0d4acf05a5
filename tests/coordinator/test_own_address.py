"""A coordinator dials the address that islands are given, and says what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.config import Placement
from diloco_jax.coordinator import own_address
from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import principal
from diloco_jax.wire.addresses import bulk_address, parse_address
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.server import Server
from diloco_jax.wire.tls import TlsFiles

DEADLINES = Deadlines(30.0)


class Handlers:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def status(self):
        return {"run_id": self.run_id}


@contextlib.contextmanager
def serving(run_id: str, tls: TlsFiles | None = None) -> Iterator[str]:
    """The address of a coordinator of which only the status is asked."""
    server = Server(
        "127.0.0.1:0",
        Handlers(run_id),
        tls=tls,
        deadlines=DEADLINES,
        max_islands=1,
        max_hosts=1,
        bulk_channels=1,
        config={},
    )
    try:
        yield server.start()
    finally:
        server.stop(0.0)


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def own(tmp_path: Path) -> TlsFiles:
    make_certificates(tmp_path, ["127.0.0.1"], 1, islands=["a"])
    return TlsFiles.load(tmp_path, principal.COORDINATOR)


def obstacle(address: str, run_id: str = "r", tls: TlsFiles | None = None) -> str:
    return own_address.obstacle(address, run_id, tls, DEADLINES, insecure=False)


def test_the_own_run_is_no_obstacle_with_certificates_or_without(own):
    with serving("r") as address:
        assert obstacle(address) == ""
    with serving("r", own) as address:
        assert obstacle(address, tls=own) == ""


def test_another_run_and_nobody_are_named(nobody):
    with serving("q") as address:
        assert "run 'q' answers there, and this one is 'r'" in obstacle(address)
    assert f"{nobody}: nothing listens there" in obstacle(nobody)


def test_a_port_for_bulk_that_is_not_forwarded_is_named():
    """A relay of the first port alone."""
    with serving("r") as address, relay(address) as relayed:
        assert f"{bulk_address(relayed)}: nothing listens there" in obstacle(relayed)


@contextlib.contextmanager
def relay(address: str) -> Iterator[str]:
    """Another port at which one finds what is served at this address."""

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                ends.append(near)
                far = socket.create_connection(parse_address(address))
                ends.append(far)
                for way in ((near, far), (far, near)):
                    carrying = threading.Thread(target=carry, args=way)
                    threads.append(carrying)
                    carrying.start()

    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        threads = [accepting]
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in ends:
                end.close()


def join_dials() -> None:
    """Wait for the thread that dials, which may have ended by now."""
    for thread in threading.enumerate():
        if thread.name == "own-address":
            thread.join(60.0)


def test_a_wrong_address_is_said_once_with_both_and_the_remedy(nobody, caplog):
    placement = Placement(advertise=nobody, time_budget_s=0.2)
    with own_address.dialled(placement, "r", None, "127.0.0.1:7000"):
        join_dials()
    (said,) = [r for r in caplog.records if "own_address" in r.name]
    assert said.levelname == "WARNING"
    for part in (
        "bound to 127.0.0.1:7000",
        f"at {nobody}, placement.advertise",
        "nothing listens there",
        "correct placement.advertise, or forward it",
    ):
        assert part in said.getMessage()


def test_an_address_that_is_right_is_said_too_and_none_is_not_dialled(caplog):
    caplog.set_level("INFO")
    with serving("r") as address:
        placement = Placement(advertise=address)
        with own_address.dialled(placement, "r", None, address):
            join_dials()
        own = dataclasses.replace(placement, advertise="")
        with own_address.dialled(own, "r", None, address):
            pass
    (said,) = [r for r in caplog.records if "own_address" in r.name]
    assert said.getMessage() == f"this run answers at {address}, as islands dial it"
