"""The coordinator says whose certificate is revoked, and nobody is served unchecked."""

from __future__ import annotations

import shutil

import pytest
from cryptography import x509
from wire_support import ISLAND

from diloco_jax.wire import certificates as authority
from diloco_jax.wire import peers, revocation
from diloco_jax.wire.bulk import Revocation, RevocationRequest
from diloco_jax.wire.errors import ConnectionLost, Refused, SecurityError
from diloco_jax.wire.principal import COORDINATOR, island
from diloco_jax.wire.revocation import KEPT_S, Revocations
from diloco_jax.wire.tls import TlsFiles

OTHER = island("other")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    found = Clock()
    monkeypatch.setattr(revocation, "time", found)
    return found


def test_the_coordinator_says_whose_certificate_is_revoked(
    serve, connect, certificates, tmp_path, monkeypatch
):
    monkeypatch.setattr(peers, "READ_AGAIN_S", 0.0)
    folder = tmp_path / "coordinator"
    shutil.copytree(certificates, folder)
    _, address = serve(tls=TlsFiles.load(folder, COORDINATOR))
    asks = connect(address, tls=TlsFiles.load(certificates, island(ISLAND)))
    pem = (folder / f"{OTHER.stem}.pem").read_bytes()
    serial = x509.load_pem_x509_certificate(pem).serial_number

    def is_revoked(number):
        request = RevocationRequest(serial=f"{number:x}")
        return asks.transfers.ask(request, Revocation).revoked

    assert not is_revoked(serial)
    authority.add(folder, [], 1, islands=["other"])
    authority.revoke(folder, OTHER)
    assert is_revoked(serial), "though it was renewed since"
    assert not is_revoked(serial + 1)


def test_without_certificates_nothing_is_revoked(serve, connect):
    _, address = serve()
    request = RevocationRequest(serial="1f")
    assert not connect(address).transfers.ask(request, Revocation).revoked


def test_an_answer_counts_for_seconds_and_then_the_coordinator_is_asked_again(clock):
    answers, asked = [False, True], []

    def ask(serial):
        asked.append(serial)
        return answers.pop(0)

    known = Revocations(ask)
    known.require_valid(7, OTHER)
    clock.now += KEPT_S - 0.1
    known.require_valid(7, OTHER)
    clock.now += 0.1
    for _ in range(2):
        with pytest.raises(SecurityError, match="of island other, serial number 7, is"):
            known.require_valid(7, OTHER)
    assert asked == [7, 7]


def test_without_an_answer_nobody_is_served(clock):
    def ask(serial):
        raise ConnectionLost("nobody listens")

    known = Revocations(ask)
    with pytest.raises(Refused, match=r"whether .* island other is revoked \(nobody l"):
        known.require_valid(7, OTHER)


def test_answers_do_not_grow_without_bound(clock, monkeypatch):
    monkeypatch.setattr(revocation, "MOST_KNOWN", 3)
    known = Revocations(lambda serial: False)
    for serial in range(10):
        known.require_valid(serial, OTHER)
        assert len(known._known) <= 3
