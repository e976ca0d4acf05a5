"""Pools, JobSets and what is around them: made, changed, stopped, deleted and looked
at, against fake commands."""

import dataclasses
import json
import time

import pytest
from gke_support import container_script

from diloco_jax.config import ConfigError
from diloco_jax.wire.certificates import add, revoke
from diloco_jax.wire.principal import island

OWNERS = {"coordinator": "coordinator", "v5p": "island.v5p", "v6e-b": "island.v6e.b"}
"""Stems of the certificates' files by the name of the machine that gets them."""
APART = {"workers": 2, "workers_apart": True}


def test_create_makes_everything_once(cloud, launch):
    assert launch("gke", namespace="train") == 0
    pools = cloud.things["node pool"]
    assert sorted(pools) == ["two-coordinator", "two-v5p", "two-v6e-b"]
    assert sorted(cloud.objects) == [
        "configmap/two-config",
        "job/two-coordinator",
        "job/two-coordinator-begin",
        "jobset/two-v5p",
        "jobset/two-v6e-b",
        "namespace/train",
        *(f"networkpolicy/two-{owner}" for owner in OWNERS),
        "persistentvolumeclaim/two-coordinator",
        "poddisruptionbudget/two-coordinator",
        *(f"secret/two-{owner}-certificates" for owner in OWNERS),
        "service/two-coordinator",
        *(f"serviceaccount/two-{owner}" for owner in OWNERS),
    ]
    for owner, stem in OWNERS.items():
        files = cloud.objects[f"secret/two-{owner}-certificates"]["data"]
        assert sorted(files) == sorted(["ca.pem", f"{stem}.pem", f"{stem}.key"])
    for call in cloud.changes():
        if call[0] == "kubectl":
            assert "--context=gke_my-project_us-east5_tpus" in call
            assert "--namespace=train" in call
    assert launch("gke", namespace="train") == 0
    assert cloud.changes() == []


def test_workers_apart_are_made_and_deleted_with_keys_of_their_own(cloud, launch):
    assert launch("gke", **APART) == 0
    assert cloud.things["node pool"]["two-coordinator"]["--max-nodes"] == "3"
    for number in range(2):
        name, stem = f"two-worker-{number}", f"worker.{number}"
        for kind in ("job", "service", "networkpolicy", "persistentvolumeclaim"):
            assert f"{kind}/{name}" in cloud.objects
        files = cloud.objects[f"secret/{name}-certificates"]["data"]
        assert sorted(files) == sorted(["ca.pem", f"{stem}.pem", f"{stem}.key"])
    assert launch("gke", "delete", **APART) == 0
    left = [name for name in cloud.objects if "worker" in name]
    assert left == [f"persistentvolumeclaim/two-worker-{n}" for n in range(2)]


def test_no_coordinator_comes_before_its_disk_has_the_permit_to_begin(cloud, launch):
    cloud.fail("kubectl wait job/two-coordinator-begin", 1, "timed out")
    for _ in range(2):
        assert launch("gke") == 1
        assert "job/two-coordinator-begin" in cloud.objects
        assert "job/two-coordinator" not in cloud.objects
    cloud.fail()
    cloud.changes()
    assert launch("gke") == 0
    verbs = [call[1:3] for call in cloud.changes() if call[0] == "kubectl"]
    assert verbs[0] == ["wait", "job/two-coordinator-begin"]
    assert "job/two-coordinator" in cloud.objects


def test_stop_ends_the_islands_first_and_run_starts_them_above_all_before(
    cloud, launch, monkeypatch
):
    launch("gke")
    cloud.changes()
    assert launch("gke", "stop") == 0
    verbs = [(call[1], *call[2].split(",")[:1], call[3]) for call in cloud.changes()]
    assert verbs == [
        ("delete", "jobset", "two-v6e-b"),
        ("delete", "jobset", "two-v5p"),
        ("delete", "job", "two-coordinator"),
    ]
    assert len(cloud.things["node pool"]) == 3
    later = int(time.time()) + 1000
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: later)
    assert launch("gke", "run") == 0
    assert "job/two-coordinator" in cloud.objects
    script = container_script(cloud.objects["jobset/two-v5p"])
    assert f"--incarnation $(({later} + RESTART_ATTEMPT))" in script


def test_a_jobset_that_was_given_up_is_made_anew(cloud, launch):
    launch("gke")
    cloud.set_object("jobset/two-v5p", status={"terminalState": "Failed"})
    cloud.set_object("jobset/two-v6e-b", status={"terminalState": "Completed"})
    cloud.changes()
    launch("gke")
    deleted, applied = cloud.changes()
    kinds = "jobset,networkpolicy,serviceaccount"
    assert deleted[1:4] == ["delete", kinds, "two-v5p"]
    assert applied[1:3] == ["apply", "-f"]
    assert "status" not in cloud.objects["jobset/two-v5p"]


def test_delete_leaves_the_disk_unless_told_otherwise(cloud, launch, tmp_path):
    launch("gke", namespace="train")
    assert launch("gke", "delete", namespace="train") == 0
    # The namespace is not ours alone.
    assert sorted(cloud.objects) == [
        # Without it a disk that got lost would be taken for a new run.
        "job/two-coordinator-begin",
        "namespace/train",
        "persistentvolumeclaim/two-coordinator",
    ]
    assert cloud.things == {}
    with pytest.raises(ConfigError, match="launched on gke, not on tpu_vm"):
        launch("tpu_vm")
    assert launch("gke", "delete", namespace="train", disk=True) == 0
    assert sorted(cloud.objects) == ["namespace/train"]
    assert launch("tpu_vm") == 0, "nothing is left of the other launch"


def test_a_pool_without_capacity_names_zones_and_location(cloud, launch, capsys):
    cloud.fail("container node-pools create", 1, "Insufficient quota to satisfy")
    assert launch("gke", only=("v5p",)) == 1
    said = capsys.readouterr().err
    assert "us-central1-a, us-east5-a, europe-west4-b" in said
    assert "launch.location = 'us-east5'" in said


def test_a_cluster_without_jobset_gets_told_so(cloud, launch, capsys):
    said = 'the server doesn\'t have a resource type "jobset"'
    cloud.fail("kubectl get jobset", 1, said)
    assert launch("gke") == 1
    assert "install JobSet" in capsys.readouterr().err


# ---- changes -------------------------------------------------------------------------


def test_pods_get_the_config_as_it_is_now(cloud, launch, config):
    launch("gke")
    cloud.changes()
    config.islands["new"] = dataclasses.replace(config.islands["v5p"], batch_size=8)
    zones = {**config.launch.zones, "new": "us-east5-a"}
    cloud.fail("kubectl apply", 1, "connection refused")
    assert launch("gke", only=("new",), zones=zones) == 1
    cloud.fail()
    assert launch("gke", only=("new",), zones=zones) == 0
    applied = [call[3] for call in cloud.changes() if call[1] == "apply"][-2:]
    assert [file.rpartition("/")[2] for file in applied] == [
        "config.yaml",
        "two-new.yaml",
    ]
    held = json.loads(cloud.objects["configmap/two-config"]["data"]["config.json"])
    assert held["islands"]["new"]["batch_size"] == 8
    assert launch("gke", zones=zones) == 0
    assert cloud.changes() == []


def test_renewed_certificates_reach_the_cluster(cloud, launch, tmp_path):
    launch("gke")
    cloud.changes()
    add(tmp_path / "run/certificates", ["another.name"], 365)
    cloud.fail("kubectl label secret two-coordinator-certificates", 1, "broken off")
    assert launch("gke") == 1
    cloud.fail()
    assert launch("gke") == 0
    changed = [call[1:5] for call in cloud.changes()]
    name = "two-coordinator-certificates"
    again = [
        ["delete", "secret", name, "--ignore-not-found"],
        ["create", "secret", "generic", name],
    ]
    assert [c for c in changed if c[0] != "label"] == 2 * again
    assert launch("gke") == 0
    assert cloud.changes() == []


def test_a_revocation_reaches_the_coordinators_pod(cloud, launch, tmp_path):
    launch("gke", **APART)
    cloud.changes()
    folder = tmp_path / "run/certificates"
    stolen = (folder / "island.v5p.pem").read_bytes()
    revoke(folder, island("v5p"))
    assert launch("gke", only=("coordinator",), **APART) == 0
    changed = [call for call in cloud.changes() if call[1] == "create"]
    names = ("coordinator", "v5p", "worker-0", "worker-1")
    assert sorted(c[4] for c in changed) == [f"two-{n}-certificates" for n in names]
    for name in (*names, "v6e-b"):
        files = cloud.objects[f"secret/two-{name}-certificates"]["data"]
        serves = name.startswith(("coordinator", "worker"))
        assert ("revoked.txt" in files) == serves, "islands ask the coordinator"
    assert (folder / "island.v5p.pem").read_bytes() != stolen, "it has another key"
    assert launch("gke", **APART) == 0
    assert cloud.changes() == []


# ---- looks ---------------------------------------------------------------------------


def test_results_are_copied_from_beside_the_disk(cloud, launch, tmp_path):
    launch("gke")
    cloud.changes()
    assert launch("gke", "results") == 0
    apply, wait, copy, delete = cloud.changes()
    assert apply[3].endswith("/reader.yaml")
    assert wait[2:4] == ["pod/two-reader", "--for=condition=Ready"]
    assert copy[2:4] == ["two-reader:/var/lib/diloco/run", f"{tmp_path}/run/results"]
    assert delete[2:4] == ["pod", "two-reader"]


def test_status_is_asked_beside_the_coordinator(cloud, launch, monkeypatch, capsys):
    launch("gke")
    cloud.changes()
    shown = []
    monkeypatch.setattr("diloco_jax.launch.command._render", shown.append)
    assert launch("gke", "status") == 0
    assert shown == [{"phase": "running"}]
    (call,) = cloud.changes()
    assert call[:3] == ["kubectl", "exec", "job/two-coordinator"]
    asked = call[call.index("--") + 1 :]
    assert asked[:3] == ["diloco", "status", "two-coordinator.default.svc:7077"]
    launch("gke", "stop")
    assert launch("gke", "status") == 1
    assert '"job/two-coordinator" not found' in capsys.readouterr().err
