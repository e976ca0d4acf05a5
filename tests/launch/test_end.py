"""After a run: what is copied, and what is found to be left over."""

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.launch.orphans import Orphan, listed


def test_results_are_copied_from_beside_the_disk(cloud, launch, act, tmp_path):
    launch("gke")
    cloud.complete()
    cloud.changes()
    assert act("gke", "results") == 0
    apply, wait, copy, delete = cloud.changes()
    assert apply[3].endswith("/reader.yaml")
    assert wait[2:4] == ["pod/two-reader", "--for=condition=Ready"]
    assert copy[2:4] == ["two-reader:/var/lib/diloco/run", f"{tmp_path}/run/results"]
    assert delete[2:4] == ["pod", "two-reader"]


def test_what_was_left_over_is_found_without_a_record_and_priced(
    cloud, launch, act, tmp_path, capsys
):
    launch("tpu_vm")
    cloud.set_state("queued resource", "two-v6e-b", "ACTIVE")
    (tmp_path / "run" / "launch.json").unlink()
    capsys.readouterr()
    assert act(None, "list", price="v6e=2.5,coordinator=1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "two v6e-b: TPU VM two-v6e-b in us-east5-b v6e-16 READY, 40.00 per hour" in (
        lines
    )
    coordinator = "two coordinator: machine two-coordinator in us-east5-a"
    assert f"{coordinator} n2-highmem-16 RUNNING, 1.00 per hour" in lines
    assert "two v5p: slice two-v5p in us-east5-a WAITING_FOR_RESOURCES" in " ".join(
        " ".join(line.split()) for line in lines
    )
    assert any("disk two-coordinator" in line for line in lines)
    assert sum("secret two-" in line for line in lines) == 4
    rules = [line for line in lines if "firewall rule" in line]
    assert rules == [
        "two coordinator: firewall rule two-coordinator-open",
        "two shared: firewall rule two-closed",
        "two v5p: firewall rule two-v5p-open",
        "two v6e-b: firewall rule two-v6e-b-open",
    ]
    assert lines[-1] == "13 found: 41.00 per hour"


def test_a_node_of_gke_is_priced_by_its_machine():
    node = Orphan("machine", "gke-1", "r", "v5p", "z", "RUNNING", "ct5p-hightpu-4t")
    assert listed([node], {"v5p": 4.0})[-1] == "1 found: 16.00 per hour"
    assert "1 without a price (--price)" in listed([node], {})[-1]
    # A type counts cores here, and chips with v6e.
    slice_ = Orphan("TPU VM", "a", "r", "v5p", "z", "READY", "v5p-16")
    assert listed([slice_], {"v5p": 4.0})[-1] == "1 found: 32.00 per hour"
    stopped = node._replace(state="TERMINATED")
    assert listed([stopped], {})[-1] == "1 found: 0.00 per hour"


def test_the_price_is_told_before_anything_is_asked(cloud, act, capsys):
    prices = "v5p=4,v6e=2,coordinator=1"
    assert act("gke", "create", price=prices, max_hours=10.0) == 0
    said = capsys.readouterr().err
    # 8 and 16 chips.
    assert "price per hour: 65.00" in said
    assert "launch.max_hours: 10 hours; at the end of the run: delete" in said
    with pytest.raises(ConfigError, match="lacks coordinator, v6e"):
        act("gke", "create", price="v5p=4")
    act("gke", "run")
    assert "price per hour: unknown, give --price" in capsys.readouterr().err


def test_status_is_asked_beside_the_coordinator(cloud, launch, act, monkeypatch):
    launch("gke")
    cloud.changes()
    shown = []
    monkeypatch.setattr("diloco_jax.launch.command._render", shown.append)
    assert act("gke", "status") == 0
    assert shown == [{"phase": "running"}]
    (call,) = cloud.changes()
    assert call[:3] == ["kubectl", "exec", "job/two-coordinator"]
    asked = call[call.index("--") + 1 :]
    assert asked[:3] == ["diloco", "status", "two-coordinator.default.svc:7077"]


def test_a_coordinator_that_does_not_answer_is_said(cloud, launch, act, capsys):
    launch("tpu_vm")
    assert act("tpu_vm", "status") == 1
    assert "is no status" in capsys.readouterr().err
