"""JobSets and all around them, against the published schema and fake commands."""

import base64
import dataclasses
import re
import signal
import subprocess
import time

import jobset_schema
import jsonschema
import pytest
import yaml

from diloco_jax.launch import manifests, tpu_vm
from diloco_jax.launch.gke import deployment
from diloco_jax.launch.order import make_order

NOW = 1_800_000_000
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


def rendered(config, **settings):
    """All objects of a launch by kind and name, read back from its files."""
    launch = dataclasses.replace(config.launch, **settings)
    order = make_order(dataclasses.replace(config, launch=launch), "two.py", "gke")
    files = deployment(order, "certificates", "folder", NOW).files
    return {
        (made["kind"], made["metadata"]["name"]): made
        for text in files.values()
        for made in yaml.safe_load_all(text)
    }


def jobset(config, name="two-v6e-b", **settings):
    return rendered(config, **settings)["JobSet", name]


def job_and_pod(made):
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated, job, job["template"]["spec"]


# ---- what is rendered ------------------------------------------------------------


SETTINGS = [
    {},
    {"data": "gs://bucket/text"},
    {"purchase": {"v5p": "reserved:mine", "v6e.b": "spot"}, "namespace": "train"},
]


@pytest.mark.skipif(
    not jobset_schema.path().is_file(),
    reason=f"no JobSet schema at {jobset_schema.path()}; {jobset_schema.VARIABLE} "
    f"names one",
)
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_jobset_is_valid_against_the_published_schema(config, settings):
    validator = jsonschema.Draft202012Validator(jobset_schema.load())
    made = [v for (kind, _), v in rendered(config, **settings).items()]
    jobsets = [value for value in made if value["kind"] == "JobSet"]
    assert len(jobsets) == 2
    for value in jobsets:
        validator.validate(value)
        # The check can fail: on an unknown field, and on a missing one.
        pod = job_and_pod(value)[2]
        pod["nodeSelectors"] = {}
        assert not validator.is_valid(value)
        del pod["nodeSelectors"], value["spec"]["failurePolicy"]["rules"][0]["name"]
        assert not validator.is_valid(value)


@pytest.mark.parametrize("settings", SETTINGS)
def test_jobsets_keep_the_rules_that_no_schema_holds(config, settings):
    made = rendered(config, **settings)
    for (_, name), value in made.items():
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        if value["kind"] != "JobSet":
            continue
        replicated, job, pod = job_and_pod(value)
        chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
        shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        product = 1
        for axis in shape:
            product *= int(axis)
        assert job["parallelism"] == job["completions"] == product // chips
        assert replicated["replicas"] == 1
        longest = f"{name}-{replicated['name']}-0-{job['completions'] - 1}-abcde"
        assert len(longest) <= 63
        labels = {**pod["nodeSelector"], **value["metadata"]["labels"]}
        assert all(isinstance(label, str) for label in labels.values())


def test_an_island_is_one_slice_all_or_nothing(config):
    made = jobset(config)
    _, job, pod = job_and_pod(made)
    assert (job["parallelism"], job["backoffLimit"]) == (4, 0)
    assert made["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-nodepool": "two-v6e-b",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == {"google.com/tpu": "4"}
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
    for key in (("JobSet", "two-v5p"), ("StatefulSet", "two-coordinator")):
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


def container_script(pod):
    (container,) = pod["containers"]
    assert container["command"][:2] == ["/bin/bash", "-c"]
    return container["command"][2]


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


def coordinator_script(config, now=NOW, source=""):
    order = make_order(config, "two.py", "gke", source)
    text = deployment(order, "certificates", "folder", now).files["coordinator.yaml"]
    made = {m["kind"]: m for m in yaml.safe_load_all(text)}
    return container_script(made["StatefulSet"]["spec"]["template"]["spec"])


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
    service, _, pods = manifests.coordinator(order, "address", NOW)
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


def test_after_the_run_the_pod_stays_with_its_results(config, shell):
    process = shell(coordinator_script(config), "exit 0")
    assert "the run is over" in process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)


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
    # Bought when the pods ask for it.
    assert (v6e["--num-nodes"], v6e["--min-nodes"]) == ("0", "0")
    assert ("--spot" in v6e, "--spot" in pools["two-v5p"]) == (True, False)
    assert sorted(cloud.objects) == [
        "configmap/two-config",
        "jobset/two-v5p",
        "jobset/two-v6e-b",
        "namespace/train",
        "persistentvolumeclaim/two-coordinator",
        "poddisruptionbudget/two-coordinator",
        "secret/two-coordinator-certificates",
        "secret/two-v5p-certificates",
        "secret/two-v6e-b-certificates",
        "service/two-coordinator",
        "statefulset/two-coordinator",
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
    verbs = [call[1:4] for call in cloud.changes()]
    assert verbs == [
        ["delete", "jobset", "two-v6e-b"],
        ["delete", "jobset", "two-v5p"],
        ["scale", "statefulset", "two-coordinator"],
    ]
    assert cloud.objects["statefulset/two-coordinator"]["spec"]["replicas"] == 0
    assert len(cloud.things["node pool"]) == 3
    later = int(time.time()) + 1000
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: later)
    assert launch("gke", "run") == 0
    assert cloud.objects["statefulset/two-coordinator"]["spec"]["replicas"] == 1
    script = container_script(job_and_pod(cloud.objects["jobset/two-v5p"])[2])
    assert f"--incarnation $(({later} + RESTART_ATTEMPT))" in script


def test_a_jobset_that_was_given_up_is_made_anew(cloud, launch):
    launch("gke")
    cloud.set_object("jobset/two-v5p", status={"terminalState": "Failed"})
    cloud.set_object("jobset/two-v6e-b", status={"terminalState": "Completed"})
    cloud.changes()
    launch("gke")
    deleted, applied = cloud.changes()
    assert deleted[1:4] == ["delete", "jobset", "two-v5p"]
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
    assert "logs of ['statefulset/two-coordinator']" in said
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
