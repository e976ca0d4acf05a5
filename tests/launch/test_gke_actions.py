"""JobSets made, stopped, deleted and asked for logs, against fake commands."""

import dataclasses
import time

from gke_support import container_script, job_and_pod

OWNERS = {
    "coordinator": "coordinator",
    "v5p": "island.v5p",
    "v6e-b": "island.v6e.b",
}
"""Stems of the certificates' files by the name of the machine that gets them."""


def test_create_makes_everything_once(cloud, launch):
    assert launch("gke", namespace="train") == 0
    pools = cloud.things["node pool"]
    assert sorted(pools) == ["two-coordinator", "two-v5p", "two-v6e-b"]
    v6e = pools["two-v6e-b"]
    assert v6e["--machine-type"] == "ct6e-standard-4t"
    assert (v6e["--tpu-topology"], v6e["--max-nodes"]) == ("4x4", "4")
    # Bought when the pods ask for it, and given back after them.
    for pool in pools.values():
        assert (pool["--num-nodes"], pool["--min-nodes"]) == ("0", "0")
    taint = pools["two-coordinator"]["--node-taints"]
    assert taint == "diloco-part=coordinator:NoSchedule"
    assert ("--spot" in v6e, "--spot" in pools["two-v5p"]) == (True, False)
    assert sorted(cloud.objects) == [
        "configmap/two-config",
        "job/two-coordinator",
        "job/two-coordinator-begin",
        "jobset/two-v5p",
        "jobset/two-v6e-b",
        "namespace/train",
        "networkpolicy/two-coordinator",
        "networkpolicy/two-v5p",
        "networkpolicy/two-v6e-b",
        "persistentvolumeclaim/two-coordinator",
        "poddisruptionbudget/two-coordinator",
        "secret/two-coordinator-certificates",
        "secret/two-v5p-certificates",
        "secret/two-v6e-b-certificates",
        "service/two-coordinator",
        "serviceaccount/two-coordinator",
        "serviceaccount/two-v5p",
        "serviceaccount/two-v6e-b",
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
    assert launch("gke", workers=2, workers_apart=True) == 0
    assert cloud.things["node pool"]["two-coordinator"]["--max-nodes"] == "3"
    for number in range(2):
        name = f"two-worker-{number}"
        for kind in ("job", "service", "networkpolicy", "persistentvolumeclaim"):
            assert f"{kind}/{name}" in cloud.objects
        files = cloud.objects[f"secret/{name}-certificates"]["data"]
        stem = f"worker.{number}"
        assert sorted(files) == sorted(["ca.pem", f"{stem}.pem", f"{stem}.key"])
    assert launch("gke", "delete", workers=2, workers_apart=True) == 0
    left = [name for name in cloud.objects if "worker" in name]
    assert left == [f"persistentvolumeclaim/two-worker-{n}" for n in range(2)]


def test_no_coordinator_comes_before_its_disk_has_the_permit_to_begin(cloud, launch):
    cloud.fail("kubectl wait job/two-coordinator-begin", 1, "timed out")
    for _ in range(2):
        assert launch("gke") == 1
        assert "job/two-coordinator-begin" in cloud.objects
        assert "job/two-coordinator" not in cloud.objects
    cloud.fail("", 0, "")
    cloud.changes()
    assert launch("gke") == 0
    verbs = [call[1:3] for call in cloud.changes() if call[0] == "kubectl"]
    assert verbs[0] == ["wait", "job/two-coordinator-begin"]
    assert "job/two-coordinator" in cloud.objects
    assert launch("gke") == 0
    assert cloud.changes() == []


def test_a_reserved_slice_of_one_host(cloud, launch, config):
    config.islands["v5p"] = dataclasses.replace(
        config.islands["v5p"], topology="v5p:2x2x1", mesh_fsdp=4
    )
    launch("gke", purchase={"v5p": "reserved:mine"})
    pool = cloud.things["node pool"]["two-v5p"]
    assert pool["--reservation"] == "mine"
    assert pool["--reservation-affinity"] == "specific"
    assert "--tpu-topology" not in pool


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
    script = container_script(job_and_pod(cloud.objects["jobset/two-v5p"])[2])
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


def test_delete_leaves_the_disk_unless_told_otherwise(cloud, launch):
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
    assert launch("gke", "delete", namespace="train", disk=True) == 0
    assert sorted(cloud.objects) == ["namespace/train"]


def test_logs_are_of_all_hosts(cloud, launch, capsys):
    launch("gke")
    assert launch("gke", "logs") == 0
    said = capsys.readouterr().err
    assert "logs of ['job/two-coordinator']" in said
    assert "jobset.sigs.k8s.io/jobset-name=two-v6e-b" in said
    assert "--max-log-requests=4" in said


def test_a_cluster_without_jobset_gets_told_so(cloud, launch, capsys):
    cloud.fail(
        "kubectl get jobset", 1, 'the server doesn\'t have a resource type "jobset"'
    )
    assert launch("gke") == 1
    assert "install JobSet" in capsys.readouterr().err


def test_a_pool_without_capacity_names_zones_and_location(cloud, launch, capsys):
    cloud.fail("container node-pools create", 1, "Insufficient quota to satisfy")
    assert launch("gke", only=("v5p",)) == 1
    said = capsys.readouterr().err
    assert "us-central1-a, us-east5-a, europe-west4-b" in said
    assert "launch.location = 'us-east5'" in said
