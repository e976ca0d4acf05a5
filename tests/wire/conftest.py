"""Real gRPC and real TLS on loopback."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from wire_support import ISLAND, Clock, Recorder, deadlines

from diloco_jax.wire import peers
from diloco_jax.wire import tls as tls_files
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.client import Client
from diloco_jax.wire.peers import COORDINATOR, island
from diloco_jax.wire.server import Server
from diloco_jax.wire.tls import TlsFiles


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, [], 1, islands=[ISLAND, "other"])
    return folder


@pytest.fixture
def copy(certificates: Path, tmp_path: Path) -> Path:
    """Certificates of a test's own."""
    return Path(shutil.copytree(certificates, tmp_path / "copy"))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server looks at its list of revoked certificates at every call."""
    monkeypatch.setattr(tls_files, "READ_AGAIN_S", 0.0)


@pytest.fixture
def handlers() -> Recorder:
    return Recorder()


@pytest.fixture
def serve(handlers: Recorder) -> Iterator[Callable[..., tuple[Server, str]]]:
    """Starts a server on a free loopback port; stops it after the test."""
    with contextlib.ExitStack() as stack:

        def start(bind: str = "127.0.0.1:0", **options: Any) -> tuple[Server, str]:
            fields = {
                "tls": None,
                "max_islands": 3,
                "max_hosts": 3,
                "bulk_channels": 4,
            } | options
            server = Server(bind, handlers, **{"deadlines": deadlines()} | fields)
            address = server.start()
            stack.callback(server.stop, 0.1)
            return server, address

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Makes clients; closes them after the test."""
    with contextlib.ExitStack() as stack:

        def make(address: str, **options: Any) -> Client:
            fields = {"tls": None, "bulk_channels": 4} | options
            client = Client(address, **{"deadlines": deadlines()} | fields)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def raw_channel() -> Iterator[Callable[..., grpc.Channel]]:
    """A gRPC channel for peers that break the rules."""
    with contextlib.ExitStack() as stack:

        def make(address: str, credentials: Any = None) -> grpc.Channel:
            options = (("grpc.max_send_message_length", -1),)
            channel = (
                grpc.secure_channel(address, credentials, options)
                if credentials
                else grpc.insecure_channel(address, options)
            )
            return stack.enter_context(channel)

        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of guards and their watches."""
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    return clock


@pytest.fixture
def tls(certificates: Path) -> dict[str, TlsFiles]:
    """Files of a coordinator and an island, of one authority."""
    return {
        "coordinator": TlsFiles.load(certificates, COORDINATOR),
        "island": TlsFiles.load(certificates, island(ISLAND)),
    }
