"""Queued resources, from creation to deletion, against a fake `gcloud`."""

import dataclasses
import json
import re
import tarfile
from pathlib import Path

import pytest

from diloco_jax.wire.certificates import revoke
from diloco_jax.wire.principal import island

SLICE = "gcloud compute tpus queued-resources"

OWNERS = {
    "coordinator": "coordinator",
    "v5p": "island.v5p",
    "v6e-b": "island.v6e.b",
}
"""Stems of the certificates' files by the name of the machine that gets them."""


def lines(calls):
    return [" ".join(call) for call in calls]


def test_create_makes_everything_once(cloud, launch, capsys):
    assert launch("tpu_vm") == 0
    things = cloud.things
    assert {kind: sorted(made) for kind, made in things.items()} == {
        "firewall rule": [
            "two-closed",
            *(f"two-{name}-open" for name in ("coordinator", "v5p", "v6e-b")),
        ],
        "secret": [
            "two-coordinator-begin",
            *(f"two-{name}-certificates" for name in ("coordinator", "v5p", "v6e-b")),
        ],
        "disk": ["two-coordinator"],
        "instance": ["two-coordinator"],
        "queued resource": ["two-v5p", "two-v6e-b"],
    }
    v5p, v6e = (things["queued resource"][f"two-{n}"] for n in ("v5p", "v6e-b"))
    assert (v5p["--accelerator-type"], v5p["--zone"]) == ("v5p-16", "us-east5-a")
    assert (v6e["--accelerator-type"], v6e["--zone"]) == ("v6e-16", "us-east5-b")
    assert v5p["--runtime-version"] == "v2-alpha-tpuv5"
    assert v6e["--runtime-version"] == "v2-alpha-tpuv6e"
    # One slice per request: more would be joined into one world.
    assert (v5p["--node-id"], v6e["--node-id"]) == ("two-v5p", "two-v6e-b")
    assert ("--spot" in v5p, "--spot" in v6e) == (False, True)
    cloud.changes()
    assert launch("tpu_vm") == 0
    assert cloud.changes() == []
    assert "there: slice two-v5p" in capsys.readouterr().err


def test_slices_are_bought_as_the_config_says(cloud, launch):
    purchase = {"v5p": "reserved", "v6e.b": "on_demand"}
    launch(
        "tpu_vm",
        purchase=purchase,
        network="wide",
        subnetwork="tpus",
        internal_ips=True,
        service_account="me@my-project.iam.gserviceaccount.com",
    )
    v5p, v6e = cloud.things["queued resource"].values()
    assert ("--reserved" in v5p, "--reserved" in v6e) == (True, False)
    machine = cloud.things["instance"]["two-coordinator"]
    for made in (v5p, v6e, machine):
        assert made["--network"] == "wide"
        assert made["--service-account"].startswith("me@")
        assert made["--scopes"] == "cloud-platform"
    assert ("--internal-ips" in v5p, "--no-address" in machine) == (True, True)
    assert (v5p["--subnetwork"], machine["--subnet"]) == ("tpus", "tpus")
    cloud.changes()
    launch("tpu_vm", "stop", purchase=purchase, internal_ips=True)
    assert all("--tunnel-through-iap" in call for call in cloud.changes())


def test_a_shape_without_an_accelerator_type_is_asked_for_by_itself(
    cloud, launch, config
):

    island = dataclasses.replace(
        config.islands["v5p"], topology="v5p:4x4x12", mesh_fsdp=192, batch_size=192
    )
    config.islands["v5p"] = island
    launch("tpu_vm")
    made = cloud.things["queued resource"]["two-v5p"]
    assert (made["--type"], made["--topology"]) == ("v5p", "4x4x12")
    assert "--accelerator-type" not in made


def first_incarnation(cloud, name):
    made = cloud.things["queued resource"][name]
    script = Path(made["--metadata-from-file"].partition("=")[2]).read_text()
    return int(re.search(r"^FIRST_INCARNATION=(\d+)$", script, re.MULTILINE)[1])


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_a_lost_slice_is_made_anew_with_higher_incarnations(
    cloud, launch, monkeypatch, state
):
    launch("tpu_vm")
    before = first_incarnation(cloud, "two-v6e-b")
    cloud.set_state("queued resource", "two-v6e-b", state)
    cloud.set_state("queued resource", "two-v5p", "ACTIVE")
    cloud.changes()
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: before + 3600)
    assert launch("tpu_vm") == 0
    deleted, created = lines(cloud.changes())
    assert deleted.startswith(f"{SLICE} delete two-v6e-b --zone=us-east5-b --force")
    assert created.startswith(f"{SLICE} create two-v6e-b")
    assert first_incarnation(cloud, "two-v6e-b") == before + 3600


def test_the_services_are_stopped_and_started_on_every_host(cloud, launch):
    launch("tpu_vm")
    for name in ("two-v5p", "two-v6e-b"):
        cloud.set_state("queued resource", name, "ACTIVE")
    cloud.changes()
    assert launch("tpu_vm", "stop") == 0
    stopped = cloud.changes()
    # Islands first: they still have somebody to say goodbye to.
    assert [call[5] for call in stopped[:-1]] == ["two-v6e-b", "two-v5p"]
    assert stopped[-1][:4] == ["gcloud", "compute", "ssh", "two-coordinator"]
    assert all("--worker=all" in call for call in stopped[:-1])
    assert all("--command=sudo systemctl stop diloco" in call for call in stopped)
    assert launch("tpu_vm", "run") == 0
    started = cloud.changes()
    assert len(started) == 3
    assert all("--command=sudo systemctl start diloco" in call for call in started)
    assert cloud.things["queued resource"]["two-v5p"]["state"] == "ACTIVE"


def test_logs_of_one_island(cloud, launch, capsys):
    launch("tpu_vm")
    cloud.changes()
    assert launch("tpu_vm", "logs", only=("v6e.b",)) == 0
    (call,) = cloud.changes()
    assert call[5] == "two-v6e-b"
    assert "two-v6e-b: sudo journalctl --unit diloco" in capsys.readouterr().err


def test_delete_leaves_the_disk_unless_told_otherwise(cloud, launch, capsys, tmp_path):
    launch("tpu_vm")
    assert launch("tpu_vm", "delete") == 0
    assert set(cloud.things) == {"disk", "secret"}
    assert list(cloud.things["secret"]) == ["two-coordinator-begin"]
    assert "kept: disk two-coordinator" in capsys.readouterr().err
    assert launch("tpu_vm", "delete", disk=True) == 0
    assert cloud.things == {}
    record = json.loads((tmp_path / "run" / "launch.json").read_text())
    assert record == {"on": "tpu_vm", "made": []}
    cloud.changes()
    assert launch("tpu_vm", "delete", disk=True) == 0
    assert cloud.changes() == []


def test_what_somebody_else_deleted_is_gone_too(cloud, launch):
    launch("tpu_vm")
    things = cloud.things
    del things["queued resource"]["two-v5p"]
    (cloud._folder / "things.json").write_text(json.dumps(things))
    assert launch("tpu_vm", "delete", disk=True) == 0
    assert cloud.things == {}


def test_a_launch_that_broke_off_is_taken_up(cloud, launch, capsys):
    cloud.fail(
        "compute tpus queued-resources create",
        1,
        "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5pPerProjectPerZone' exceeded",
    )
    assert launch("tpu_vm") == 1
    said = capsys.readouterr().err
    assert f"error: {SLICE} create two-v5p --zone=us-east5-a" in said
    assert "exit code 1: ERROR: RESOURCE_EXHAUSTED" in said
    assert "offered in us-central1-a, us-east5-a, europe-west4-b" in said
    assert "launch.zones.v5p" in said
    cloud.fail("", 0, "")
    cloud.changes()
    assert launch("tpu_vm") == 0
    assert [call[5] for call in cloud.changes()] == ["two-v5p", "two-v6e-b"]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("PERMISSION_DENIED: Permission denied on 'locations/us-x'", "launch.zones"),
        ("PERMISSION_DENIED: tpu.nodes.create denied", "ask for the role"),
        ("Cloud TPU API has not been used in project", "gcloud services enable"),
        ("something else", "run the same `diloco launch` again"),
    ],
)
def test_a_failure_comes_with_its_remedy(cloud, launch, capsys, text, remedy):
    cloud.fail("compute tpus queued-resources create", 1, text)
    assert launch("tpu_vm") == 1
    said = capsys.readouterr().err
    assert text in said
    assert remedy in said.rpartition(text)[2]


def test_a_certificate_of_another_name_reaches_the_machines(cloud, launch):
    launch("tpu_vm")
    cloud.changes()
    zones = {"coordinator_zone": "us-east5-c"}
    assert launch("tpu_vm", **zones) == 0
    added = [call for call in cloud.changes() if "versions" in call]
    assert [call[4] for call in added] == ["two-coordinator-certificates"]
    secrets = cloud.things["secret"]
    assert secrets["two-coordinator-certificates"]["versions"] == 2
    assert "versions" not in secrets["two-v5p-certificates"]
    assert launch("tpu_vm", **zones) == 0
    assert cloud.changes() == []


def test_a_revocation_is_in_the_coordinators_secret(cloud, launch, tmp_path):
    launch("tpu_vm")
    cloud.changes()
    folder = tmp_path / "run/certificates"
    revoke(folder, island("v5p"))
    assert launch("tpu_vm", only=("coordinator",)) == 0
    added = [call for call in cloud.changes() if "versions" in call]
    owners = ("coordinator", "v5p")
    assert [c[4] for c in added] == [f"two-{owner}-certificates" for owner in owners]
    for owner, lists in zip(owners, ({"revoked.txt"}, set()), strict=True):
        with tarfile.open(folder / f"{OWNERS[owner]}.tar") as tar:
            assert {n for n in tar.getnames() if n.endswith(".txt")} == lists
            if lists:
                (text,) = (tar.extractfile(name).read() for name in lists)
                assert text == (folder / "revoked.txt").read_bytes()


@pytest.mark.parametrize("action", ["logs", "stop"])
def test_a_slice_that_ssh_leaves_out_is_told(cloud, launch, capsys, action):
    launch("tpu_vm")
    left_out = "WARNING: Could not prepare all 1 nodes, attempting to ssh into the rest"
    cloud.fail("compute tpus queued-resources ssh", 0, left_out)
    assert launch("tpu_vm", action) == 1
    said = capsys.readouterr().err
    assert left_out in said
    assert "--only leaves it out" in said


def test_what_cannot_be_looked_at_is_not_taken_for_missing(cloud, launch, capsys):
    cloud.fail("compute firewall-rules describe", 1, "Required 'get' permission")
    assert launch("tpu_vm") == 1
    assert "ask for the role" in capsys.readouterr().err
    assert cloud.things == {}


def test_scripts_hold_no_key_and_secrets_no_authority(cloud, launch, tmp_path):

    launch("tpu_vm")
    folder = tmp_path / "run"
    for script in (folder / "launch").iterdir():
        assert "PRIVATE KEY" not in script.read_text()
    for owner, stem in OWNERS.items():
        given = cloud.things["secret"][f"two-{owner}-certificates"]["--data-file"]
        with tarfile.open(given) as tar:
            assert tar.getnames() == ["ca.pem", f"{stem}.pem", f"{stem}.key"]
        assert (tmp_path / given).stat().st_mode & 0o077 == 0


def test_a_secret_whose_reader_could_not_be_bound_is_bound_later(cloud, launch):
    account = {"service_account": "i@p.iam"}
    cloud.fail("secrets add-iam-policy-binding", 1, "no route to host")
    assert launch("tpu_vm", **account) == 1
    cloud.fail("", 0, "")
    assert launch("tpu_vm", **account) == 0
    for made in cloud.things["secret"].values():
        assert made["readers"] == ["serviceAccount:i@p.iam"]


def test_each_account_reads_its_own_secrets(cloud, launch):
    accounts = {"service_account": "i@p.iam", "coordinator_account": "c@p.iam"}
    assert launch("tpu_vm", **accounts) == 0
    readers = {name: made["readers"] for name, made in cloud.things["secret"].items()}
    assert readers == {
        "two-coordinator-begin": ["serviceAccount:c@p.iam"],
        "two-coordinator-certificates": ["serviceAccount:c@p.iam"],
        "two-v5p-certificates": ["serviceAccount:i@p.iam"],
        "two-v6e-b-certificates": ["serviceAccount:i@p.iam"],
    }
    machine = cloud.things["instance"]["two-coordinator"]
    assert machine["--service-account"] == "c@p.iam"
    slice_ = cloud.things["queued resource"]["two-v5p"]
    assert slice_["--service-account"] == "i@p.iam"
    assert slice_["--labels"] == "diloco-run=two,diloco-part=v5p"
