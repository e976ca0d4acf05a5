"""A TLS connection on which both ends speak at once, and who may answer there."""

from __future__ import annotations

import errno
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from wire_support import WAIT_S, deadlines

from diloco_jax.wire.certificates import add, make_certificates
from diloco_jax.wire.duplex import TlsEnd, dial_worker
from diloco_jax.wire.errors import SecurityError
from diloco_jax.wire.peers import COORDINATOR, worker
from diloco_jax.wire.tls import Renewed, TlsFiles

MANY = 8 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("certificates")
    make_certificates(made, [], 1, islands=["a"], workers=2)
    return made


@pytest.fixture
def served(folder):
    """The address of a server with the key of worker 0, and its next end."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(WAIT_S)
    ends = []

    def accept() -> TlsEnd:
        connection, _ = listener.accept()
        connection.settimeout(WAIT_S)
        context = TlsFiles.load(folder, worker(0)).server_contexts()()
        ends.append(context.wrap_socket(connection, server_side=True))
        return TlsEnd(ends[0])

    with ThreadPoolExecutor(1) as pool:
        yield f"127.0.0.1:{listener.getsockname()[1]}", pool.submit(accept)
    for end in (*ends, listener):
        end.close()


def of_lead(folder) -> Renewed:
    return Renewed(TlsFiles.load(folder, COORDINATOR), TlsFiles.client_context)


def test_a_renewed_key_that_cannot_be_read_once_is_read_again(copy, monkeypatch):
    known = of_lead(copy)
    before = known.current()
    add(copy, [], 2)

    def fails(*arguments):
        raise SecurityError("too many open files") from OSError(errno.EMFILE, "many")

    with monkeypatch.context() as inside:
        inside.setattr(TlsFiles, "load", fails)
        assert known.current() is before
    assert known.current() is not before


def read(end, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        part = end.recv(size - len(got))
        assert part
        got += part
    return bytes(got)


def test_both_ends_send_at_once(served, folder):
    """More than a socket holds, so that neither could send first and then receive."""
    address, accepted = served
    lead = of_lead(folder)
    ours = dial_worker(address, 0, lead, deadlines())
    theirs = accepted.result(WAIT_S)
    there, back = bytes(MANY), b"x" * MANY
    senders = [
        threading.Thread(target=ours.sendall, args=(there,)),
        threading.Thread(target=theirs.sendall, args=(back,)),
    ]
    with ThreadPoolExecutor(2) as pool:
        for sender in senders:
            sender.start()
        found = pool.submit(read, theirs, MANY), pool.submit(read, ours, MANY)
        assert [one.result(WAIT_S) for one in found] == [there, back]
        # A thread that waits for bytes notices that the other end is gone.
        waiting = pool.submit(theirs.recv, 1)
        ours.shutdown(socket.SHUT_RDWR)
        assert waiting.result(WAIT_S) == b""
    ours.close()


def test_another_workers_certificate_is_refused_with_both_names(served, folder):
    address, _ = served
    lead = of_lead(folder)
    wrong = r"of worker 0, and has to be that of worker 1.*placement\.worker_addresses"
    with pytest.raises(SecurityError, match=wrong):
        dial_worker(address, 1, lead, deadlines())
