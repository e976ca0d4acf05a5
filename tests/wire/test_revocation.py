"""The coordinator says whose certificate is revoked, and nobody is served unchecked."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography import x509
from wire_support import ISLAND, WAIT_S

from diloco_jax.wire import certificates as authority
from diloco_jax.wire import principal
from diloco_jax.wire.bulk import Revocation, RevocationRequest
from diloco_jax.wire.errors import REVOKED_CODE, ConnectionLost, Refused
from diloco_jax.wire.principal import COORDINATOR, KEPT_S, Revocations, island
from diloco_jax.wire.tls import TlsFiles

OTHER = island("other")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def __init__(self):
            self.read = threading.Semaphore(0)
            """Released at each look at it."""

        def monotonic(self):
            self.read.release()
            return self.now

    found = Clock()
    monkeypatch.setattr(principal, "time", found)
    return found


def test_the_coordinator_says_whose_certificate_is_revoked(
    serve, connect, certificates, tmp_path, monkeypatch
):
    monkeypatch.setattr(principal, "READ_AGAIN_S", 0.0)
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
        with pytest.raises(Refused, match="of island other, serial number 7, is"):
            known.require_valid(7, OTHER)
    assert asked == [7, 7]


@pytest.mark.parametrize("answer", [False, True, None])
def test_stripes_that_come_at_once_ask_once(clock, answer):
    """None: the coordinator does not answer."""
    asked, asks, may_answer = [], threading.Event(), threading.Event()

    def ask(serial):
        asked.append(serial)
        asks.set()
        assert may_answer.wait(WAIT_S)
        if answer is None:
            raise ConnectionLost("nobody listens")
        return answer

    known = Revocations(ask)

    def outcome():
        try:
            known.require_valid(7, OTHER)
        except Refused as error:
            return error.code
        return None

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(outcome)
        assert asks.wait(WAIT_S)
        others = [pool.submit(outcome) for _ in range(7)]
        for _ in range(8):
            assert clock.read.acquire(timeout=WAIT_S), "it has come"
        may_answer.set()
        found = {future.result(WAIT_S) for future in (first, *others)}
    assert found == {{False: None, True: REVOKED_CODE, None: "unchecked"}[answer]}
    assert asked == [7]
    if answer is None:
        assert outcome() == "unchecked"
        assert asked == [7, 7], "no answer does not count"


def test_an_answer_that_is_long_in_coming_counts_from_the_question(clock):
    answers = iter([False, True])

    def ask(serial):
        found = next(answers)
        if not found:
            clock.now += KEPT_S
            with pytest.raises(Refused):
                known.require_valid(7, OTHER)  # As another thread does meanwhile.
        return found

    known = Revocations(ask)
    known.require_valid(7, OTHER)
    with pytest.raises(Refused):
        known.require_valid(7, OTHER)


def test_without_an_answer_nobody_is_served(clock):
    def ask(serial):
        raise ConnectionLost("nobody listens")

    known = Revocations(ask)
    with pytest.raises(Refused, match=r"whether .* island other is revoked \(nobody l"):
        known.require_valid(7, OTHER)


def test_answers_do_not_grow_without_bound(clock, monkeypatch):
    monkeypatch.setattr(principal, "MOST_KNOWN", 3)
    known = Revocations(lambda serial: False)
    for serial in range(10):
        known.require_valid(serial, OTHER)
        assert len(known._known) <= 3
