"""After a run: what watches it, what is copied, and what is found to be left over."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.launch.command import LaunchOptions, run
from diloco_jax.launch.orphans import Orphan, listed


@pytest.fixture
def act(config, monkeypatch):
    """`act("gke", "watch", then=[...])`; functions run instead of waits."""

    def act(on, action, *, then=(), price="", **settings):
        steps = iter(then)
        monkeypatch.setattr(
            "diloco_jax.launch.submit.time.sleep", lambda seconds: next(steps)()
        )
        changed = dataclasses.replace(config.launch, **settings)
        options = LaunchOptions(on=on, action=action, yes=True, price=price)
        return run(dataclasses.replace(config, launch=changed), "two.py", options)

    return act


def complete(cloud):
    condition = {"type": "Complete", "status": "True"}
    cloud.set_object("job/two-coordinator", status={"conditions": [condition]})


def test_watch_deletes_all_but_the_run_once_it_is_done(cloud, launch, act):
    launch("gke")

    def done():
        cloud.set_object("job/two-coordinator", phase="done")

    assert act("gke", "watch", then=[lambda: None, done]) == 0
    assert list(cloud.objects) == ["persistentvolumeclaim/two-coordinator"]
    assert cloud.things == {}


def test_watch_sees_that_the_coordinator_has_ended(cloud, launch, act):
    launch("gke")
    assert act("gke", "watch", then=[lambda: complete(cloud)]) == 0
    assert cloud.things == {}


def test_watch_makes_anew_what_was_taken_and_leaves_what_was_given_back(
    cloud, launch, act
):
    launch("tpu_vm")
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")
    things = cloud.things
    # It ended with 2, say.
    del things["queued resource"]["two-v6e-b"]
    (cloud._folder / "things.json").write_text(json.dumps(things))
    cloud.changes()
    seen = []

    def after_a_round():
        seen.extend(call for call in cloud.changes() if "ssh" not in call)
        # Both end, and the coordinator's machine deletes itself at last.
        things = cloud.things
        things["queued resource"].clear()
        things["instance"].clear()
        (cloud._folder / "things.json").write_text(json.dumps(things))

    assert act("tpu_vm", "watch", then=[after_a_round]) == 0
    assert [call[4:6] for call in seen] == [
        ["delete", "two-v5p"],
        ["create", "two-v5p"],
    ]
    made = [call for call in cloud.changes() if "create" in call]
    assert made == []
    assert set(cloud.things) == {"disk"}


def test_what_watch_makes_anew_begins_above_all_before(cloud, launch, act, monkeypatch):
    launch("tpu_vm")
    before = first_incarnation(cloud)
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")
    later = before + 5000
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: later)

    def end():
        things = cloud.things
        assert first_incarnation(cloud) == later
        things["instance"].clear()
        (cloud._folder / "things.json").write_text(json.dumps(things))

    assert act("tpu_vm", "watch", then=[end]) == 0


def first_incarnation(cloud):
    made = cloud.things["queued resource"]["two-v5p"]
    script = Path(made["--metadata-from-file"].partition("=")[2]).read_text()
    return int(re.search(r"^FIRST_INCARNATION=(\d+)$", script, re.MULTILINE)[1])


def test_watch_ends_at_the_last_hour(cloud, launch, act, monkeypatch):
    launch("gke")
    now = [1_800_000_000.0]
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: now[0])

    def later():
        now[0] += 7200

    assert act("gke", "watch", then=[later], max_hours=1.5) == 0
    assert cloud.things == {}


def test_a_failure_does_not_end_the_watch(cloud, launch, act, capsys):
    launch("tpu_vm")
    find = "compute tpus queued-resources describe"
    cloud.fail(find, 1, "internal error")

    def put_right():
        cloud.fail("", 0, "")
        things = cloud.things
        things["instance"].clear()
        (cloud._folder / "things.json").write_text(json.dumps(things))

    assert act("tpu_vm", "watch", then=[put_right]) == 0
    assert "internal error" in capsys.readouterr().err
    assert set(cloud.things) == {"disk"}


def test_results_are_copied_from_beside_the_disk(cloud, launch, act, tmp_path):
    launch("gke")
    complete(cloud)
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
    assert sum("secret two-" in line for line in lines) == 3
    assert lines[-1] == "8 found: 41.00 per hour"


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
