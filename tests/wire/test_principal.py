"""Who a peer is, is what its certificate says: at hello, upload, fetch, and after."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from wire_support import (
    ISLAND,
    WAIT_S,
    fetch_request,
    hello,
    report,
    upload_start,
)

from diloco_jax.protocol.messages import ProfileOrder, Steer
from diloco_jax.wire import certificates as authority
from diloco_jax.wire import tls as tls_files
from diloco_jax.wire.errors import (
    ProtocolError,
    Refused,
    SecurityError,
    WireError,
)
from diloco_jax.wire.peers import (
    COORDINATOR,
    OPERATOR,
    READER,
    Principal,
    island,
    mismatch,
    of_stem,
    of_uri,
    require,
    worker,
)
from diloco_jax.wire.tls import TlsFiles

OTHER = island("other")


@pytest.mark.parametrize(
    "who", [COORDINATOR, worker(12), READER, OPERATOR, island("v6e.b-1_x")]
)
def test_names_of_files_and_in_certificates_lead_back(who):
    assert of_uri(who.uri) == who
    assert of_stem(who.stem) == who


@pytest.mark.parametrize(
    "uri",
    [
        "diloco:island",
        "diloco:island:",
        "diloco:island:a:b",
        "diloco:island:../a",
        "diloco:reader:a",
        "diloco:worker",
        "diloco:worker:a",
        "diloco:king",
        "other:island:a",
        "https://example.com",
    ],
)
def test_other_uris_name_nobody(uri):
    assert of_uri(uri) is None


@pytest.mark.parametrize("wanted", [island("a"), COORDINATOR, OPERATOR])
def test_a_call_is_for_one_principal_alone(wanted):
    require(wanted, wanted)
    require(None, wanted)
    for who in {island("b"), worker(0), READER, OPERATOR, COORDINATOR} - {wanted}:
        refused = rf"certificate is that of {who};.*{wanted.stem}\.pem"
        with pytest.raises(Refused, match=refused):
            require(who, wanted)


def test_what_answers_is_one_of_those_that_were_dialled():
    wanted = worker(1), COORDINATOR
    assert {mismatch(who, "field", *wanted) for who in wanted} == {""}
    for who in (worker(2), island("1"), READER, None):
        assert mismatch(who, "placement.advertise", *wanted) == (
            f"that is the certificate of {who or 'nobody'}, and has to be that of "
            f"worker 1 or of the coordinator; check placement.advertise, and what "
            f"listens there"
        )


@pytest.mark.parametrize("who", [OTHER, READER, OPERATOR, COORDINATOR])
def test_nobody_speaks_for_another_island(
    serve, connect, handlers, certificates, tls, who
):
    _, address = serve(tls=tls["coordinator"])
    client = connect(address, tls=TlsFiles.load(certificates, who))
    for call in (
        lambda: client.open_control(hello()),
        lambda: client.transfers.upload(upload_start(8), b"12345678"),
        lambda: client.transfers.fetch(fetch_request(), max_bytes=1 << 20),
    ):
        with pytest.raises(Refused, match=f"certificate is that of {who}") as refused:
            call()
        assert refused.value.code == "identity"
    assert handlers.events.empty()
    assert client.status(WAIT_S)["islands"]


@pytest.fixture
def of(serve, connect, handlers, certificates, tls):
    """Makes the client of a principal; the handlers note what they are ordered."""
    handlers.orders = []
    for call in ("steer", "profile", "keep"):
        setattr(
            handlers, call, lambda order: handlers.orders.append(order) or {"did": "it"}
        )
    _, address = serve(tls=tls["coordinator"])
    return lambda who: connect(address, tls=TlsFiles.load(certificates, who))


def only_the_operator(of, handlers, call, order, nonsense=None):
    for who in (island("a"), READER, COORDINATOR):
        client = of(who)
        with pytest.raises(Refused, match=f"for the operator.* of {who}") as refused:
            getattr(client, call)(order, WAIT_S)
        assert refused.value.code == "identity"
    operator = of(OPERATOR)
    assert getattr(operator, call)(order, WAIT_S) == {"did": "it"}
    if nonsense is not None:
        with pytest.raises(ProtocolError, match="cannot be understood"):
            getattr(operator, call)(nonsense, WAIT_S)
    assert handlers.orders == [order]


def test_only_the_operator_steers(of, handlers):
    nonsense = Steer(how="crown", island="c")
    only_the_operator(of, handlers, "steer", Steer(how="admit", island="c"), nonsense)


def test_only_the_operator_has_steps_traced(of, handlers):
    order, nonsense = (ProfileOrder(island="a", steps=n) for n in (2, 10**6))
    only_the_operator(of, handlers, "profile", order, nonsense)


def test_only_the_operator_takes_parameters_out(of, handlers):
    only_the_operator(of, handlers, "keep", 6)
    payload = bytes(range(256)) * 9000
    handlers.kept = lambda cycle, name: memoryview(payload)
    for who in (island("a"), READER, COORDINATOR):
        with pytest.raises(Refused, match=f"for the operator.* of {who}"):
            list(of(who).kept(7, "a"))
    assert b"".join(of(OPERATOR).kept(7, "a")) == payload


def test_without_tls_nobody_proves_anything(serve, connect):
    _, address = serve()
    assert connect(address).open_control(hello("anybody")).welcome.run_id == "r"


def test_a_certificate_that_names_nobody_gets_nothing(
    serve, connect, tls, copy, monkeypatch
):
    """As those of versions before: signed by the authority, and no more."""
    nobody = Principal(role="island", name="x")
    monkeypatch.setattr(Principal, "uri", property(lambda who: "urn:something"))
    authority.add(copy, [], 1, islands=["x"])
    monkeypatch.undo()
    with pytest.raises(
        SecurityError, match=r"island\.x\.pem is the certificate of nob"
    ):
        TlsFiles.load(copy, nobody)
    names = ("ca.pem", "island.x.pem", "island.x.key")
    files = TlsFiles(copy, nobody, *((copy / name).read_bytes() for name in names))
    _, address = serve(tls=tls["coordinator"])
    client = connect(address, tls=files)
    with pytest.raises(SecurityError, match="names no role and no island"):
        client.open_control(hello("x"))
    with pytest.raises(SecurityError, match="names no role and no island"):
        client.status(WAIT_S)


def test_a_file_under_another_name_is_refused_before_it_is_used(copy):
    for suffix in ("pem", "key"):
        shutil.copy(copy / f"island.other.{suffix}", copy / f"island.a.{suffix}")
    with pytest.raises(SecurityError, match=r"of island other, .* island a"):
        TlsFiles.load(copy, island("a"))


def test_a_revoked_certificate_is_shut_out_while_the_server_runs(
    serve, connect, copy, at_once
):
    """Its open session, too. Another certificate of the same island is let in."""
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    client = connect(address, tls=TlsFiles.load(copy, island(ISLAND)))
    stream = client.open_control(hello())
    authority.revoke(copy, island(ISLAND))
    for call in (
        lambda: client.transfers.upload(upload_start(8), b"12345678"),
        lambda: client.status(WAIT_S),
    ):
        with pytest.raises(Refused, match=r"of island a, .* is revoked"):
            call()
    stream.send(report(1))
    with pytest.raises(Refused, match="revoked"):
        stream.receive(WAIT_S)
    authority.add(copy, [], 1, islands=[ISLAND])
    again = connect(address, tls=TlsFiles.load(copy, island(ISLAND)))
    assert again.open_control(hello()).welcome.run_id == "r"


def test_a_list_that_cannot_be_read_lets_nobody_back(
    serve, connect, copy, at_once, caplog
):
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    files = TlsFiles.load(copy, island(ISLAND))
    authority.revoke(copy, island(ISLAND))
    with pytest.raises(Refused, match="revoked"):
        connect(address, tls=files).status(WAIT_S)
    (copy / authority.REVOKED).write_text("no number\n")
    with pytest.raises(Refused, match="revoked"):
        connect(address, tls=files).status(WAIT_S)
    assert "'no' is no hex number" in caplog.text
    with pytest.raises(SecurityError, match="so nobody knows who is shut out; mend it"):
        serve(tls=TlsFiles.load(copy, COORDINATOR))


def test_a_server_with_a_revoked_key_is_not_spoken_with(serve, copy):
    """Where the list lies: beside the files of leads, workers and people."""
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    authority.revoke(copy, COORDINATOR)
    made = tls_files.Renewed(
        TlsFiles.load(copy, island(ISLAND)), TlsFiles.client_context
    )
    with pytest.raises(SecurityError, match="coordinator there, serial number"):
        tls_files.dial(address, made, WAIT_S)


def test_a_list_that_was_copied_with_its_old_time_is_read_again(copy, at_once):
    """As an archive's files may be."""
    known, list_of = tls_files.Peers(copy), copy / authority.REVOKED
    list_of.write_text("1\n")
    os.utime(list_of, (0, 0))
    assert known.is_revoked(1)
    list_of.write_text("1\n2\n")
    os.utime(list_of, (0, 0))
    assert known.is_revoked(2)


def test_serial_numbers_are_read_with_remarks_and_empty_lines():
    assert authority.serials("1f # island a\n\n# nothing\n2A\n") == [0x1F, 0x2A]
    with pytest.raises(ValueError, match="line 2: 'x'"):
        authority.serials("1\nx\n")


def test_renewed_certificates_serve_new_connections_without_a_restart(
    serve, connect, copy
):
    """One that an island trusts because it knows both authorities."""
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    island_files = TlsFiles.load(copy, island(ISLAND))
    assert connect(address, tls=island_files).status(WAIT_S)
    before = (copy / "ca.pem").read_bytes()
    authority.make_certificates(copy, [], 1, islands=[ISLAND], replace=True)
    both = (copy / "ca.pem").read_bytes() + before
    (copy / "ca.pem").write_bytes(both)
    renewed = TlsFiles.load(copy, island(ISLAND))
    assert renewed.authority_pem == both
    assert connect(address, tls=renewed).open_control(hello()).welcome.run_id == "r"
    # The certificate from before is of an authority that still counts.
    old = TlsFiles(
        copy, island_files.who, both, island_files.certificate_pem, island_files.key_pem
    )
    assert connect(address, tls=old).status(WAIT_S)


def test_an_island_renews_its_key_without_a_restart(
    serve, connect, handlers, copy, at_once
):
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    client = connect(address, tls=TlsFiles.load(copy, island(ISLAND)))
    stream = client.open_control(hello())
    client.transfers.upload(upload_start(8), b"12345678")
    old = authority.certificate_of(copy, island(ISLAND)).serial_number
    authority.add(copy, [], 1, islands=[ISLAND])
    stream.send(report(1))
    # The old certificate counts until it is revoked.
    while handlers.events.get(timeout=WAIT_S)[0] != "receive":
        pass
    (copy / authority.REVOKED).write_text(f"{old:x}\n")
    # No transfer goes over a connection of the old one, not even over an idle one.
    client.transfers.upload(upload_start(8), b"12345678")
    assert client.status(WAIT_S)
    stream.send(report(1))
    with pytest.raises(WireError):
        list(iter(lambda: stream.receive(WAIT_S), None))
    assert client.open_control(hello()).welcome.run_id == "r"


def test_a_key_without_its_new_certificate_is_left_alone(
    serve, connect, copy, tmp_path
):
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    client = connect(address, tls=TlsFiles.load(copy, island(ISLAND)))
    made = Path(shutil.copytree(copy, tmp_path / "made"))
    authority.add(made, [], 1, islands=[ISLAND])
    stem = island(ISLAND).stem
    shutil.copy(made / f"{stem}.key", copy)
    assert client.status(WAIT_S)
    client.transfers.upload(upload_start(8), b"12345678")
    shutil.copy(made / f"{stem}.pem", copy)
    assert client.status(WAIT_S)
    assert client._secured.files.certificate_pem == (made / f"{stem}.pem").read_bytes()


def test_files_that_are_not_fit_leave_a_server_as_it_was(serve, connect, copy, caplog):
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR))
    (copy / "coordinator.pem").write_text("garbled")
    client = connect(address, tls=TlsFiles.load(copy, island(ISLAND)))
    assert client.status(WAIT_S)
    assert "stay as they were" in caplog.text
