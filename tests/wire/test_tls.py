"""Certificates: made, checked before use, and asked for on every connection."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import socket
import ssl
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from wire_support import BUDGET_S, ISLAND, WAIT_S, deadlines, hello

from diloco_jax.wire.certificates import add, make_certificates
from diloco_jax.wire.errors import ConnectionLost, SecurityError
from diloco_jax.wire.peers import COORDINATOR, READER, island
from diloco_jax.wire.tls import TlsFiles, explain

ME = island(ISLAND)
STEM = ME.stem


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_certificates(folder, [], 1, islands=[ISLAND])
    return folder


def test_certificates_are_good_enough_for_the_strictest(serve, tls):
    """As Python is from 3.13 on by default."""
    _, address = serve(tls=tls["coordinator"])
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cadata=tls["island"].authority_pem.decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2"])
    folder = tls["island"].folder
    context.load_cert_chain(folder / f"{STEM}.pem", folder / f"{STEM}.key")
    with (
        socket.create_connection((host, int(port)), WAIT_S) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        assert secured.selected_alpn_protocol() == "h2"


def test_the_coordinators_certificate_asks_for_status(
    serve, connect, certificates, tmp_path
):
    """On its machine there is no other."""
    for name in ("ca.pem", "coordinator.pem", "coordinator.key"):
        shutil.copy(certificates / name, tmp_path)
    _, address = serve(tls=TlsFiles.load(tmp_path, COORDINATOR))
    visitor = TlsFiles.load_any(tmp_path)
    assert visitor.who == COORDINATOR
    assert "islands" in connect(address, tls=visitor).status(WAIT_S)
    assert TlsFiles.load_any(certificates).who == READER


def test_names_added_later_serve_islands_with_old_certificates(
    serve, connect, copy, tls
):
    add(copy, ["127.0.0.2", "coordinator.example"], 1)
    add(copy, ["127.0.0.3"], 1)
    _, address = serve(bind="127.0.0.2:0", tls=TlsFiles.load(copy, COORDINATOR))
    client = connect(address, tls=tls["island"])
    assert client.status(WAIT_S)["islands"]


@pytest.mark.parametrize("name", ["ca.pem", f"{STEM}.pem", f"{STEM}.key"])
def test_missing_and_garbled_files_are_named(copy, name):
    (copy / name).write_bytes(b"nonsense")
    with pytest.raises(SecurityError, match=rf"{name}.*diloco certs"):
        TlsFiles.load(copy, ME)
    (copy / name).unlink()
    with pytest.raises(SecurityError, match=rf"{name}.*No such file.*diloco certs"):
        TlsFiles.load(copy, ME)


def test_files_of_different_authorities_are_refused(copy, other):
    shutil.copy(other / f"{STEM}.key", copy)
    with pytest.raises(SecurityError, match=r"island\.a\.key does not belong"):
        TlsFiles.load(copy, ME)
    shutil.copy(other / f"{STEM}.pem", copy)
    with pytest.raises(SecurityError, match=r"a\.pem is not signed by .*ca\.pem"):
        TlsFiles.load(copy, ME)


@pytest.mark.parametrize("days", [-2, 2])
def test_certificate_is_refused_outside_its_dates(certificates, monkeypatch, days):
    real = datetime.datetime

    class Shifted(real):
        @classmethod
        def now(cls, tz=None):
            return real.now(tz) + datetime.timedelta(days=days)

    monkeypatch.setattr("diloco_jax.wire.tls.datetime.datetime", Shifted)
    with pytest.raises(SecurityError, match=r"\.pem is valid from .* renew"):
        TlsFiles.load(certificates, ME)


@pytest.mark.parametrize(
    ("server", "client", "cause"),
    [
        ("ours", "other", "does not fit .*ca.pem"),
        ("ours", "other-but-trusting", "does not accept .*island.a.pem"),
        ("ours", None, "speaks TLS and this process has no certificates"),
        (None, "ours", "does not answer with TLS"),
    ],
)
def test_mismatch_names_the_cause_in_time(
    serve, connect, certificates, other, server, client, cause
):
    ours, theirs = TlsFiles.load(certificates, ME), TlsFiles.load(other, ME)
    trusting = dataclasses.replace(theirs, authority_pem=ours.authority_pem)
    tls = {"ours": ours, "other": theirs, "other-but-trusting": trusting}.get(client)
    _, address = serve(tls=TlsFiles.load(certificates, COORDINATOR) if server else None)
    began = time.monotonic()
    island = connect(address, tls=tls)
    for call in (lambda: island.open_control(hello()), lambda: island.status(WAIT_S)):
        with pytest.raises(SecurityError, match=cause):
            call()
    assert time.monotonic() - began < 2 * BUDGET_S


def test_address_that_the_certificate_does_not_name(serve, connect, tls):
    _, address = serve(bind="127.0.0.2:0", tls=tls["coordinator"])
    with pytest.raises(SecurityError, match=r"not valid for '127\.0\.0\.2'.*--add"):
        connect(address, tls=tls["island"]).open_control(hello())


def test_peer_without_a_certificate_gets_nothing(serve, raw_channel, certificates):
    _, address = serve(tls=TlsFiles.load(certificates, COORDINATOR))
    credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
    call = raw_channel(address, credentials).unary_unary("/diloco.Coordinator/Status")
    with pytest.raises(grpc.RpcError) as error:
        call(b"", timeout=WAIT_S)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("127.0.0.1:1", "nothing listens there"),
        ("no-such-host.invalid:7077", "host name 'no-such-host.invalid' is not known"),
    ],
)
def test_wrong_address_names_the_cause_in_time(connect, address, cause):
    client = connect(address, deadlines=deadlines(connect_s=5.0), insecure=True)
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=cause):
        client.open_control(hello())
    assert time.monotonic() - began < WAIT_S


@pytest.mark.parametrize(
    ("secured", "cause"),
    [(False, "did not answer|timed out"), (True, r"no TLS handshake within 0\.125 s")],
)
def test_listener_that_never_answers_is_bounded(connect, tls, secured, cause):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        client = connect(
            address,
            deadlines=deadlines(connect_s=0.5),
            tls=tls["island"] if secured else None,
        )
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=cause):
            client.open_control(hello())
        assert time.monotonic() - began < WAIT_S / 2


def test_however_a_handshake_ends_early_it_is_no_breach(tls, monkeypatch):
    """As at a relay whose coordinator is away. Which error it is depends on what has
    been read by then."""
    for ended in (ssl.SSLZeroReturnError, ssl.SSLEOFError, ConnectionResetError):
        monkeypatch.setattr(ssl.SSLContext, "wrap_socket", Mock(side_effect=ended))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            cause = explain(address, tls["island"], WAIT_S)
        assert isinstance(cause, ConnectionLost)
        assert "the connection ended before an answer" in str(cause)


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_folder_for_temporary_files_is_needed(tls, monkeypatch, tmp_path, in_memory):
    """Unless the system has no files in memory."""
    if in_memory:
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", None)
    else:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tls["island"].client_context().get_ca_certs()
    assert tls["coordinator"].server_contexts()().verify_mode == ssl.CERT_REQUIRED
    assert list(tmp_path.iterdir()) == []
