"""The outpost of a worker on another machine: whom it obeys, and what it refuses."""

from __future__ import annotations

import dataclasses
import queue
import shutil
import socket

import pytest
from msgspec.structs import replace
from outpost_support import (
    NEW,
    asked,
    begin,
    elsewhere,
    placed,
)

from diloco_jax.config import ConfigError
from diloco_jax.coordinator.workers.outpost import dialing
from diloco_jax.coordinator.workers.outpost import outpost as outposts
from diloco_jax.coordinator.workers.outpost.admission import Admission
from diloco_jax.coordinator.workers.outpost.options import WorkerOptions
from diloco_jax.coordinator.workers.outpost.outpost import Outpost
from diloco_jax.coordinator.workers.places import Unreachable
from diloco_jax.protocol.holding import AboutFiles, AskNewest, Newest
from diloco_jax.wire import principal
from diloco_jax.wire.certificates import add, make_certificates
from diloco_jax.wire.errors import Refused, SecurityError
from diloco_jax.wire.tls import TlsFiles

PATIENCE_S = 60.0


def test_another_certificate_than_the_coordinators_is_refused_with_both_names(
    config, serve, tmp_path, monkeypatch
):
    serve(config)
    island = TlsFiles.load(config.placement.certificates, principal.island("a"))
    monkeypatch.setattr(dialing, "own_tls", lambda _: island)
    place = elsewhere(config, tmp_path / "lead")
    why = "this is for the coordinator, .* is that of island a"
    with pytest.raises(Unreachable, match=why):
        place.open(begin(tmp_path), asked(), new=False)


def test_a_dial_between_the_renewal_of_a_key_and_of_its_certificate_gets_through(
    config, serve, tmp_path
):
    serve(config)
    own, new = tmp_path / "certificates", tmp_path / "new"
    shutil.copytree(config.placement.certificates, own)
    shutil.copytree(own, new)
    add(new, [], 1)
    place = elsewhere(placed(config, certificates=str(own)), tmp_path / "lead")
    for name in ("coordinator.key", "coordinator.pem"):
        (own / name).write_bytes((new / name).read_bytes())
        with place._opened() as line:
            assert line.ask(AskNewest(fragment=0), Newest).version is None
    assert place._tls.files.key_pem == (new / "coordinator.key").read_bytes()


def test_a_worker_needs_a_key_of_its_own(config, tmp_path):
    own = tmp_path / "certificates"
    make_certificates(own, [], 1)
    with pytest.raises(SecurityError, match=r"worker\.0\.pem"):
        Outpost(placed(config, certificates=str(own)), 0, tmp_path / "w", "127.0.0.1:0")


def test_no_other_address_than_loopback_without_tls(config, tmp_path):
    with pytest.raises(ConfigError, match="not loopback"):
        Outpost(placed(config, certificates=""), 0, tmp_path / "w", "0.0.0.0:7077")


def test_the_newest_lead_counts_also_after_a_restart(tmp_path):
    Admission(tmp_path, 0).admit(begin(tmp_path, lead=7, dial=2))
    again = Admission(tmp_path, 0)
    for older in (begin(tmp_path, lead=6, dial=9), begin(tmp_path, lead=7, dial=2)):
        with pytest.raises(Refused, match="obeys lead 7 of run r, and this is lead"):
            again.admit(older)
    again.admit(begin(tmp_path, lead=7, dial=3))
    again.admit(AboutFiles(run_id="r", worker=0, lead=8))
    with pytest.raises(Refused, match="obeys lead 8"):
        again.admit(begin(tmp_path, lead=7, dial=4))
    with pytest.raises(Refused, match="obeys lead 8"):
        again.admit(AboutFiles(run_id="r", worker=0, lead=7))
    again.admit(begin(tmp_path, lead=8, dial=1))
    again.require_current(begin(tmp_path, lead=8, dial=1))
    with pytest.raises(Refused, match="lead 8 came meanwhile"):
        again.require_current(begin(tmp_path, lead=7, dial=3))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"worker": 1}, "this is worker 0, and the lead asks for worker 1"),
        ({"run_id": "s"}, "holds fragments of run r, and the lead's run is s"),
    ],
)
def test_another_worker_and_another_run_are_refused(tmp_path, other, why):
    admission = Admission(tmp_path, 0)
    admission.admit(begin(tmp_path))
    with pytest.raises(Refused, match=why):
        admission.admit(begin(tmp_path, lead=99, **other))


def test_a_lead_that_is_refused_does_not_dial_again(config, serve, tmp_path):
    serve(config)
    Admission(tmp_path / "there", 0).admit(begin(tmp_path, lead=9))
    place = elsewhere(config, tmp_path / "lead")
    first = place._files.path("snapshot", 0, NEW)
    first.parent.mkdir(parents=True)
    first.write_bytes(b"x")
    with pytest.raises(Unreachable, match="obeys lead 9 of run r, and this is lead 7"):
        place.open(begin(tmp_path), asked(0), new=False)
    assert first.exists()


def test_a_lead_dials_for_the_outage_budget_and_says_so(config, tmp_path):
    place = elsewhere(config, tmp_path / "lead")
    with pytest.raises(Unreachable, match=r"dialled for 1 s \(placement\.outage"):
        place.open(begin(tmp_path), asked(), new=False)
    place._ending.set()
    with pytest.raises(Unreachable, match="the coordinator ends"):
        place.open(begin(tmp_path), asked(), new=False)


def test_strangers_that_say_nothing_hold_nobody_up(config, serve, monkeypatch):
    monkeypatch.setattr(outposts, "CONNECTIONS", 2)
    quick = placed(config, time_budget_s=1.0)
    made = serve(quick)
    host, _, port = made.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(2)]
    for connection in silent:
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b"", "it was given up"
        connection.close()


def test_a_probe_of_kubernetes_is_not_told_and_a_stranger_is(
    config, serve, caplog, monkeypatch
):
    """The log has one line a minute about strangers, which probes would take."""
    made = serve(placed(config, time_budget_s=PATIENCE_S))
    attend, ended = made._attend, queue.SimpleQueue[str]()
    monkeypatch.setattr(
        made, "_attend", lambda end, peer: (attend(end, peer), ended.put(peer))
    )
    host, _, port = made.address.rpartition(":")
    for word, told in ((b"", 0), (b"GET / HTTP/1.1\r\n\r\n", 1)):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(word)
        peer = ended.get(timeout=PATIENCE_S)
        assert caplog.text.count(f"the connection from {peer} ") == told


def test_code_that_the_workers_own_config_does_not_name_is_not_executed(
    config, serve, tmp_path
):
    made = serve(config)
    model = dataclasses.replace(config.run.model, factory="mine.py:model")
    run = dataclasses.replace(config.run, model=model)
    theirs = dataclasses.asdict(dataclasses.replace(config, run=run))
    with pytest.raises(ConfigError, match=r"model\.factory.*give both the same CONFIG"):
        made._fitted(begin(tmp_path, config=theirs))


def test_what_is_of_a_machine_is_that_of_the_workers(config, serve, tmp_path):
    made = serve(config)
    lead = placed(config, certificates="/lead", workdir="/lead", snapshot_every_s=9.0)
    own = made._fitted(begin("/lead", config=dataclasses.asdict(lead)))
    placement = own.config["placement"]
    assert placement["certificates"] == config.placement.certificates
    assert own.workdir == placement["workdir"] == str(tmp_path / "there")
    assert placement["snapshot_every_s"] == 9.0
    elsewhere = placed(config, checkpoints="gs://b/o")
    with pytest.raises(ConfigError, match="give both the same bucket"):
        made._fitted(begin("/lead", config=dataclasses.asdict(elsewhere)))


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"index": 2}, {}, "--index 2, but placement.worker_addresses has 2"),
        ({"index": -1}, {}, "give a number from 0 to 1"),
        ({"index": 0, "listen": "0.0.0.0:1"}, {}, "give the same port"),
        ({"index": 0}, {"worker_addresses": ()}, "starts its workers itself"),
    ],
)
def test_options_that_do_not_fit_are_refused(config, options, changes, why):
    with pytest.raises(ConfigError, match=why):
        WorkerOptions(**options).address(placed(config, **changes).placement)


def test_two_processes_never_have_one_workdir(config, serve, tmp_path):
    serve(config)
    with pytest.raises(ConfigError, match="in use by a coordinator or a worker"):
        serve(config, index=1)
    serve(config, index=1, name="other")


def test_a_begin_is_like_one_of_another_line():
    one = begin("/w")
    assert one.is_like(replace(one, dial=3, lead=9))
