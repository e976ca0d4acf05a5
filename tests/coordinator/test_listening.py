"""`diloco worker`: whom it obeys, what it refuses, and when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import shutil
import socket
import threading
from types import SimpleNamespace

import pytest
from coordinator_support import begun
from msgspec.structs import replace

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.coordinator import worker, workers
from diloco_jax.coordinator.going_on import WorkerOptions
from diloco_jax.coordinator.worker import HoldingWorker, Listening, facts_of
from diloco_jax.coordinator.workers import LedWorker
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.protocol.holding import (
    AwaitedTakes,
    FragmentsRestored,
    RestoreFragments,
    WorkerServes,
)
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import addresses, peers
from diloco_jax.wire.bulk import BulkConnection, FetchRequest
from diloco_jax.wire.certificates import add, make_certificates
from diloco_jax.wire.errors import Busy, Refused, SecurityError, VersionGone
from diloco_jax.wire.tls import TlsFiles

PATIENCE_S = 60.0
NOTHING = RestoreFragments(fragments=())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, [], 1, islands=["a"], workers=2)
    return folder


@pytest.fixture
def config(certificates):
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    placement = Placement(
        workers=2,
        worker_addresses=addresses,
        certificates=str(certificates),
        outage_budget_s=PATIENCE_S,
        time_budget_s=10.0,
    )
    return Config(islands={"a": IslandConfig()}, placement=placement).validate()


def placed(config: Config, **changes: object) -> Config:
    placement = dataclasses.replace(config.placement, **changes)
    return dataclasses.replace(config, placement=placement)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Gives a function that starts a worker's place; lives there hold nothing."""

    def hold(came, workdir, bind) -> bool:
        came.line.send(FragmentsRestored(fragments=(), discarded=0, environment={}))
        came.line.send(WorkerServes())
        for _ in came.line.messages():
            pass
        came.line.close()
        return False

    monkeypatch.setattr(worker, "serve_lead", hold)
    with contextlib.ExitStack() as stack:

        def start(config: Config, index: int = 0, name: str = "there") -> Listening:
            bind = config.placement.worker_addresses[index]
            made = Listening(config, index, tmp_path / name, bind)
            stack.callback(made.close)
            threading.Thread(target=made.serve, daemon=True).start()
            return made

        yield start


@pytest.fixture
def lead(config):
    """Gives a function that starts a lead's side, and returns it with its errors."""
    with contextlib.ExitStack() as stack:

        def start(config: Config = config, **fields: object) -> LedWorker:
            errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
            made = LedWorker(
                begun(config, **fields), config, lambda _: None, errors.put
            )
            made.errors = errors
            stack.callback(made.end)
            made.start(NOTHING)
            return made

        yield start


def test_the_lead_that_was_started_last_is_obeyed_also_after_a_restart(
    config, serve, lead, tmp_path
):
    made = serve(config)
    first = lead()
    first.restored()
    lead(start=8).restored()
    assert "is gone" in str(first.errors.get(timeout=PATIENCE_S)), "one lead at a time"
    made.close()
    serve(config)
    why = "obeys start 8 of term 1 of run r, and this is start 7 of term 1: another"
    with pytest.raises(Refused, match=why) as refused:
        lead().restored()
    assert refused.value.code == "lead"
    with pytest.raises(Refused, match=r"holds fragments of run r .*lead's run is s"):
        lead(run_id="s", start=99).restored()
    lead(term=2, start=1).restored()
    with pytest.raises(Refused, match=r"start 1 of term 2 .* start 99 of term 1: an"):
        lead(start=99).restored()
    facts = facts_of(tmp_path / "there", 0)
    assert (facts["run_id"], facts["term"], facts["start"]) == ("r", 2, 1)


def test_a_life_that_begins_forgets_no_newer_lead(config, serve, tmp_path, monkeypatch):
    """One comes while the file is being written for the life before it."""
    made, write, ends = serve(config), worker.write_json, socket.socketpair()
    connection = BulkConnection(ends[0], "peer")
    coming = threading.Thread(target=made._obey, args=(connection, begun(config)))

    def slowly(facts, path):
        if "life" in facts and coming.ident is None:
            coming.start()
            coming.join(0.2)
        write(facts, path)

    monkeypatch.setattr(worker, "write_json", slowly)
    assert worker._next_life(tmp_path / "there", 0) == 1
    coming.join(PATIENCE_S)
    for end in (*ends, connection):
        end.close()
    facts = facts_of(tmp_path / "there", 0)
    assert (facts["life"], facts["start"]) == (1, 7)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"worker": 1}, "this is worker 0, and the lead asks for worker 1"),
        ({"config": {"run": {"nothing": 1}}}, "nothing"),
    ],
)
def test_what_is_for_another_worker_or_cannot_be_read_is_refused(
    config, serve, fields, why
):
    begin = replace(begun(config), **fields)
    with pytest.raises((Refused, ConfigError), match=why):
        serve(config)._obey(None, begin)


def test_another_certificate_than_the_coordinators_is_refused_with_both_names(
    config, serve, lead, monkeypatch
):
    serve(config)
    island = TlsFiles.load(config.placement.certificates, peers.island("a"))
    monkeypatch.setattr(workers, "own_tls", lambda _: island)
    why = "this is for the coordinator, .* is that of island a"
    with pytest.raises(Refused, match=why):
        lead().restored()


def test_a_dial_between_the_renewal_of_a_key_and_of_its_certificate_gets_through(
    config, serve, lead, tmp_path
):
    serve(config)
    own, new = tmp_path / "certificates", tmp_path / "new"
    shutil.copytree(config.placement.certificates, own)
    shutil.copytree(own, new)
    add(new, [], 1)
    made = lead(placed(config, certificates=str(own)))
    made.restored()
    (own / "coordinator.key").write_bytes((new / "coordinator.key").read_bytes())
    address = config.placement.worker_addresses[0]
    workers.dial_worker(address, 0, made._tls, config.placement.deadlines).close()


def test_a_worker_needs_a_key_of_its_own_and_tls_beyond_loopback(config, tmp_path):
    own = tmp_path / "certificates"
    make_certificates(own, [], 1)
    with pytest.raises(SecurityError, match=r"worker\.0\.pem"):
        Listening(
            placed(config, certificates=str(own)), 0, tmp_path / "w", "127.0.0.1:0"
        )
    with pytest.raises(ConfigError, match="not loopback"):
        Listening(placed(config, certificates=""), 0, tmp_path / "w", "0.0.0.0:7077")


def test_two_processes_never_have_one_workdir(config, serve):
    serve(config)
    with pytest.raises(ConfigError, match="in use by a coordinator or a worker"):
        serve(config, index=1)
    serve(config, index=1, name="other")


@pytest.mark.parametrize("says", [None, b"", b"\x08"], ids=["no TLS", "TLS", "a byte"])
def test_strangers_that_say_nothing_hold_nobody_up(config, serve, says):
    made = serve(placed(config, time_budget_s=1.0))
    host, _, port = made.address.rpartition(":")
    files = TlsFiles.load(config.placement.certificates, peers.COORDINATOR)
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        if says is not None:
            context = files.client_context()
            connection = context.wrap_socket(connection, server_hostname=host)
            connection.sendall(says)
        assert connection.recv(1) == b"", "it was given up"
        connection.close()


def test_strangers_that_say_nothing_make_room_for_the_lead(
    config, serve, lead, monkeypatch
):
    monkeypatch.setattr(worker, "CONNECTIONS", 2)
    made = serve(placed(config, time_budget_s=100 * PATIENCE_S))
    host, _, port = made.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            for _ in range(4)
        ]
        lead().restored()
        assert silent[0].recv(1) == b"", "the oldest was closed"


def test_a_probe_of_kubernetes_is_not_told_and_a_stranger_is(config, serve, caplog):
    """The log has one line a minute about strangers, which probes would take."""
    made = serve(placed(config, time_budget_s=PATIENCE_S))
    host, _, port = made.address.rpartition(":")
    for word, told in ((b"", 0), (b"GET / HTTP/1.1\r\n\r\n", 1)):
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            peer = addresses.format_address(*connection.getsockname())
            connection.sendall(word)
            with contextlib.suppress(OSError):  # It may have been closed already.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 10):
                    pass
        assert caplog.text.count(f"a TLS handshake failed: {peer}: ") == told


def test_code_that_the_workers_own_config_does_not_name_is_not_executed(config, serve):
    made = serve(config)
    model = dataclasses.replace(config.run.model, factory="mine.py:model")
    run = dataclasses.replace(config.run, model=model)
    theirs = dataclasses.replace(config, run=run)
    with pytest.raises(ConfigError, match=r"model\.factory.*give both the same CONFIG"):
        made._fitted(begun(theirs))


def test_what_is_of_a_machine_is_that_of_the_workers(config, serve, tmp_path):
    made = serve(config)
    theirs = placed(config, certificates="/lead", workdir="/lead", snapshot_every_s=9.0)
    placement = made._fitted(begun(theirs)).placement
    assert placement.certificates == config.placement.certificates
    assert placement.workdir == str(tmp_path / "there")
    assert placement.snapshot_every_s == 9.0
    with pytest.raises(ConfigError, match="give both the same bucket"):
        made._fitted(begun(placed(config, checkpoints="gs://b/o")))


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"index": 2}, {}, "--index 2, but placement.worker_addresses has 2"),
        ({"index": -1}, {}, "give a number from 0 to 1"),
        ({"index": 0, "listen": "0.0.0.0:1"}, {}, "give the same port"),
        ({"index": 0}, {"worker_addresses": ()}, "name there where each worker"),
    ],
)
def test_options_that_do_not_fit_are_refused(config, options, changes, why):
    with pytest.raises(ConfigError, match=why):
        WorkerOptions(**options).address(placed(config, **changes).placement)


def test_a_worker_to_which_no_lead_comes_ends_and_says_so(
    config, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(worker, "FIRST_S", 0.1)
    bind = config.placement.worker_addresses[0]
    assert worker.run(config, 0, tmp_path / "w", bind) == EXIT_FAILED
    assert "no coordinator came for 0.1 s" in caplog.text


def test_the_lead_gets_the_last_version_beside_one_of_a_kept_cycle(config):
    """A slow disk holds the kept one back until the end of the run."""
    worker = holding(config)
    worker._pinned = {0: (FIRST, "kept")}
    assert worker.fetch(wanted(FIRST, theta=True)) == (FIRST, "kept")
    assert worker.fetch(wanted(LAST, theta=True)) == (LAST, "newest")
    with pytest.raises(VersionGone, match=r"\(1, 4\) of fragment 0 is not kept here"):
        worker.fetch(wanted(Version(1, 4), theta=True))


def test_islands_that_are_not_in_the_run_get_nothing(config):
    """Whatever they are certified for."""
    worker = holding(config)
    worker.holder = SimpleNamespace(fetch=lambda request: "given")
    with pytest.raises(Busy, match="not heard that island 'x' is in the run"):
        worker.fetch(wanted(LAST))
    worker._awaited.forget("x", 1)
    assert worker.fetch(wanted(LAST)) == "given"
    worker._awaited.forget("x", 2)
    with pytest.raises(Refused, match="incarnation 1 of island 'x' has ended"):
        worker.fetch(wanted(LAST))


FIRST, LAST = Version(1, 3), Version(1, 5)


def holding(config) -> HoldingWorker:
    """A worker of the last version of fragment 0, without processes."""
    worker = object.__new__(HoldingWorker)
    worker._begin, worker._awaited = begun(config), AwaitedTakes()
    worker._awaiting = threading.Lock()
    worker._store = SimpleNamespace(
        current=lambda fragment: (LAST, {"theta": "newest"}),
        values=lambda fragment, version, theta, part: (version, theta),
    )
    return worker


def wanted(version: Version, *, theta: bool = False) -> FetchRequest:
    fields = {"incarnation": 1, "session": "s", "fragment": 0, "have": None}
    return FetchRequest(run_id="r", island="x", want=version, theta=theta, **fields)


@pytest.mark.parametrize("ends", [True, False])
def test_a_life_ends_after_its_snapshot_or_with_its_process(config, monkeypatch, ends):
    """Otherwise the next one would read the folder while this one changes it."""
    done = []
    life = object.__new__(HoldingWorker)
    life._config, life._closing, life._server = config, threading.Event(), None
    life.holder = SimpleNamespace(
        close=lambda: done.append("closed"),
        wait=lambda patience: done.append(patience()) or ends,
    )
    monkeypatch.setattr(life, "fail", lambda error: done.append(str(error)[:10]))
    life.close()
    assert done == ["closed", PATIENCE_S, *([] if ends else ["a snapshot"])]
