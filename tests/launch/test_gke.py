"""JobSets and all around them, and what their pods run, against fake commands."""

import base64
import dataclasses
import re
import signal
import subprocess
import time

import pytest
import yaml
from gke_support import NOW, container_script, job_and_pod, jobset, rendered

from diloco_jax.launch import manifests, tpu_vm
from diloco_jax.launch.gke import deployment
from diloco_jax.launch.order import make_order

WAIT_S = 120.0
UNTIL_TERM = (
    "trap 'echo %s; kill $!; exit %d' TERM; echo up; sleep 600 >/dev/null & wait"
)
"""A process that says a word when it is asked to end."""

OWNERS = {
    "coordinator": "coordinator",
    "v5p": "island.v5p",
    "v6e-b": "island.v6e.b",
}
"""Stems of the certificates' files by the name of the machine that gets them."""


# ---- what is rendered ------------------------------------------------------------


def test_an_island_is_one_slice_all_or_nothing(config):
    made = jobset(config)
    _, job, pod = job_and_pod(made)
    assert (job["parallelism"], job["backoffLimit"]) == (4, 0)
    assert "annotations" not in made["metadata"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-nodepool": "two-v6e-b",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    # The machine has 180 vCPUs and 720 GB.
    asked = {"cpu": "144", "memory": "576Gi", "google.com/tpu": "4"}
    assert container["resources"]["requests"] == asked
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    v5p = job_and_pod(jobset(config, "two-v5p"))[2]
    assert "cloud.google.com/gke-spot" not in v5p["nodeSelector"]
    assert v5p["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == (
        "tpu-v5p-slice"
    )


def test_preemptions_are_no_crashes_and_refusals_are_final(config):
    made = jobset(config)
    policy = made["spec"]["failurePolicy"]
    hopeless, preempted = policy["rules"]
    _, job, pod = job_and_pod(made)
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it.
    codes, disruption = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"]["values"] == [2, 3]
    assert disruption["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert policy["maxRestarts"] >= 100
    # What Kubernetes says of a job that the first rule failed.
    message = (
        "Container diloco for pod default/two-v6e-b-hosts-0-0 failed with exit code 3 "
        "matching FailJob rule at index 0"
    )
    (pattern,) = hopeless["onJobFailureMessagePatterns"]
    assert hopeless["action"] == "FailJobSet"
    assert re.fullmatch(pattern, message)
    assert not re.fullmatch(pattern, "Pod x has condition DisruptionTarget matching")
    assert preempted["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert set(preempted["onJobFailureReasons"]) == {"PodFailurePolicy"}


def test_the_notice_is_no_longer_than_the_machine_lives(config):
    for name, lives_s in (("two-v6e-b", 15), ("two-v5p", 60)):
        pod = job_and_pod(jobset(config, name))[2]
        assert pod["terminationGracePeriodSeconds"] == lives_s
        (container,) = pod["containers"]
        notice_s = float(re.search(r"--notice-s (\S+)", container["command"][-1])[1])
        assert 0 < notice_s <= lives_s - 5


def test_text_is_copied_before_a_process_starts(config):
    made = rendered(config, data="gs://bucket/text")
    for key in (("JobSet", "two-v5p"), ("Job", "two-coordinator")):
        pod = made[key]["spec"]
        pod = (
            pod["template"]["spec"] if "template" in pod else job_and_pod(made[key])[2]
        )
        copy, manifests = pod["initContainers"]
        read = f"diloco manifest --missing {copy['command'][-1]} || true"
        assert manifests["command"] == ["/bin/bash", "-c", read]
        assert manifests["image"] == pod["containers"][0]["image"]
        assert manifests["volumeMounts"] == copy["volumeMounts"]
        assert copy["command"][-2] == "gs://bucket/text"
        (mount,) = copy["volumeMounts"]
        assert mount in pod["containers"][0]["volumeMounts"]
        assert copy["command"][-1] == mount["mountPath"]


def test_no_key_is_in_any_file(config):
    order = make_order(config, "two.py", "gke")
    for text in deployment(order, "certificates", "folder", NOW).files.values():
        assert "PRIVATE KEY" not in text
        assert base64.b64encode(b"PRIVATE KEY").decode()[:12] not in text


# ---- what pods run ---------------------------------------------------------------


@pytest.fixture
def shell(tmp_path):
    """Runs a container's script with a `diloco` that tells what it is told."""
    started = []

    def start(script, body):
        tool = tmp_path / "diloco"
        tool.write_text(f"#!/usr/bin/env bash\n{body}\n")
        tool.chmod(0o755)
        script = script.replace("/var/lib/diloco", str(tmp_path))
        process = subprocess.Popen(
            ["/bin/bash", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RESTART_ATTEMPT": "3"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def test_an_island_counts_its_attempts_from_the_launch(config, shell):
    script = container_script(job_and_pod(jobset(config))[2])
    island = shell(script, 'echo "$@"; exit 3')
    said, _ = island.communicate(timeout=WAIT_S)
    assert "island" in said
    assert "--name v6e.b" in said
    assert said.rstrip().endswith(f"--incarnation {NOW + 3}")
    assert island.returncode == 3


def test_sigterm_reaches_the_island_itself(config, shell):
    script = container_script(job_and_pod(jobset(config))[2])
    island = shell(script, UNTIL_TERM % ("goodbye", 1))
    assert island.stdout.readline() == "up\n"
    island.send_signal(signal.SIGTERM)
    assert island.communicate(timeout=WAIT_S)[0] == "goodbye\n"
    assert island.returncode == 1


def coordinator_script(config, now=NOW, source="", max_hours=0.0):
    config = dataclasses.replace(
        config, launch=dataclasses.replace(config.launch, max_hours=max_hours)
    )
    order = make_order(config, "two.py", "gke", source)
    text = deployment(order, "certificates", "folder", now).files["coordinator.yaml"]
    made = {m["kind"]: m for m in yaml.safe_load_all(text)}
    return container_script(made["Job"]["spec"]["template"]["spec"])


@pytest.mark.parametrize(
    ("age_s", "has_log", "begins"),
    [(60, False, True), (60, True, False), (7200, False, False)],
)
def test_only_a_fresh_launch_begins_a_run(
    config, shell, tmp_path, age_s, has_log, begins
):
    if has_log:
        (tmp_path / "run" / "log").mkdir(parents=True)
    source = "hf:gs://bucket/a b"
    script = coordinator_script(config, int(time.time()) - age_s, source)
    said, _ = shell(script, 'echo "$@"; exit 1').communicate(timeout=WAIT_S)
    assert ("--init" in said) == begins
    assert (f"--init {source}" in said) == begins
    assert "--bind 0.0.0.0:7077 --advertise two-coordinator.default.svc:7077" in said


@pytest.mark.parametrize(
    ("workers", "ports"),
    [
        (1, {"control": 7077, "bulk": 7078}),
        (2, {"control": 7077, "bulk": 7078, "worker-0": 7079, "worker-1": 7080}),
    ],
)
def test_islands_reach_every_port_of_a_coordinator(config, workers, ports):
    placement = dataclasses.replace(config.placement, workers=workers)
    order = make_order(
        dataclasses.replace(config, placement=placement), "two.py", "gke"
    )
    _, service, policy, _, pods = manifests.coordinator(order, "address", NOW)
    (rule,) = policy["spec"]["ingress"]
    assert [p["port"] for p in rule["ports"]] == list(ports.values())
    assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == ports
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert [p["containerPort"] for p in container["ports"]] == list(ports.values())
    (rule,) = [
        resource.create
        for resource in tpu_vm.deployment(order, "", "", NOW).resources
        if resource.what.startswith("firewall")
    ]
    allowed = ",".join(f"tcp:{port}" for port in ports.values())
    assert f"--allow={allowed},tcp:8471" in " ".join(rule.arguments)


def test_a_coordinator_that_fails_is_started_again(config, shell):
    process = shell(coordinator_script(config), "exit 7")
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 7


def test_sigterm_reaches_the_coordinator(config, shell):
    process = shell(coordinator_script(config), UNTIL_TERM % ("summary", 0))
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=WAIT_S)[0] == "summary\n"
    assert process.returncode == 0


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_ends_for_good_ends_the_pod(config, shell, code):
    process = shell(coordinator_script(config), f"exit {code}")
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code


def scripts(config, now, max_hours):
    """The coordinator's, and an island's."""
    made = jobset(config, now=now, max_hours=max_hours)
    return (
        coordinator_script(config, now, max_hours=max_hours),
        container_script(job_and_pod(made)[2]),
    )


def test_after_the_last_hour_nothing_starts(config, shell):
    for script in scripts(config, int(time.time()) - 7201, 2.0):
        process = shell(script, "echo started; exit 1")
        said, _ = process.communicate(timeout=WAIT_S)
        assert said == "launch.max_hours are over\n"
        assert process.returncode == 0


def test_the_last_hour_ends_what_runs(config, shell, tmp_path):
    tool = tmp_path / "timeout"
    tool.write_text('#!/bin/bash\necho "$@"; exit 124\n')
    tool.chmod(0o755)
    for script, grace in zip(
        scripts(config, int(time.time()), 2.0), (60, 15), strict=True
    ):
        process = shell(script, "exit 9")
        said, _ = process.communicate(timeout=WAIT_S)
        foreground, kill, left, program, *_ = said.split()
        assert (foreground, kill) == ("--foreground", f"--kill-after={grace}")
        assert 7200 - WAIT_S < int(left) <= 7200
        assert program == "diloco"
        # Neither 2 nor 3: it is started once more, and ends with 0.
        assert process.returncode == 124


def test_signals_and_codes_pass_through_a_limit(config, shell):
    for script in scripts(config, int(time.time()), 2.0):
        process = shell(script, UNTIL_TERM % ("goodbye", 1))
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S)[0] == "goodbye\n"
        assert process.returncode == 1
        process = shell(script, "exit 3")
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 3


def test_an_island_without_tpus_does_not_train_on_the_cpu(config):
    (container,) = job_and_pod(jobset(config))[2]["containers"]
    assert {"name": "JAX_PLATFORMS", "value": "tpu,cpu"} in container["env"]


# ---- what is done ----------------------------------------------------------------


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
    left = ["namespace/train", "persistentvolumeclaim/two-coordinator"]
    assert sorted(cloud.objects) == left
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
