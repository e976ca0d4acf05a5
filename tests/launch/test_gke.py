"""JobSets and all around them, and what their pods run, against fake commands."""

import base64
import dataclasses
import re
import signal
import time

import pytest
import yaml
from gke_support import NOW, container_script, job_and_pod, jobset, rendered

from diloco_jax.launch import manifests, tpu_vm
from diloco_jax.launch.gke import deployment
from diloco_jax.launch.order import FRUITLESS_STARTS, make_order
from diloco_jax.launch.pod_scripts import LASTED_CODE

WAIT_S = 120.0
UNTIL_TERM = (
    "trap 'echo %s; kill $!; exit %d' TERM; echo up; sleep 600 >/dev/null & wait"
)
"""A process that says a word when it is asked to end."""
KNOWN = "until [[ $(<\"/proc/$PPID/stat\") == *') S '* ]]; do sleep 0.01; done\n"
"""Wait until the parent sleeps. A `timeout` that has not yet stored its child's number
ends at SIGTERM by itself: in a pod the child dies with it, here it would stay."""


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
    hopeless, uncounted = policy["rules"]
    _, job, pod = job_and_pod(made)
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it.
    codes, disruption, lasted = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"]["values"] == [2, 3]
    assert disruption["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert lasted["onExitCodes"]["values"] == [LASTED_CODE]
    for rule in (codes, disruption, lasted):
        assert rule["action"] == "FailJob", "so its reason is PodFailurePolicy"
    assert policy["maxRestarts"] + 1 == FRUITLESS_STARTS == 20
    # What Kubernetes says of a job that the first rule failed, or the last one.
    message = (
        "Container diloco for pod default/two-v6e-b-hosts-0-0 failed with exit code %d "
        "matching FailJob rule at index %d"
    )
    (pattern,) = hopeless["onJobFailureMessagePatterns"]
    assert hopeless["action"] == "FailJobSet"
    assert re.fullmatch(pattern, message % (3, 0))
    assert not re.fullmatch(pattern, message % (LASTED_CODE, 2))
    assert not re.fullmatch(pattern, "Pod x has condition DisruptionTarget matching")
    assert uncounted["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert set(uncounted["onJobFailureReasons"]) == {"PodFailurePolicy"}


def test_crashes_without_lasting_progress_are_counted_on_every_pod(config):
    placement = dataclasses.replace(config.placement, workers=2, fruitless_starts=7)
    made = rendered(
        dataclasses.replace(config, placement=placement), workers_apart=True
    )
    jobset = made["JobSet", "two-v5p"]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 6
    for name in ("coordinator", "worker-0", "worker-1"):
        job = made["Job", f"two-{name}"]["spec"]
        assert job["backoffLimit"] == 6
        hopeless, *uncounted = job["podFailurePolicy"]["rules"]
        assert hopeless["action"] == "FailJob"
        assert [rule["action"] for rule in uncounted] == ["Ignore", "Ignore"]
        assert uncounted[1]["onExitCodes"]["values"] == [LASTED_CODE]
        script = container_script(job["template"]["spec"])
        assert "after 7" in script


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


def coordinator_script(config, now=NOW, source="", max_hours=0.0, job="coordinator"):
    config = dataclasses.replace(
        config, launch=dataclasses.replace(config.launch, max_hours=max_hours)
    )
    order = make_order(config, "two.py", "gke", source)
    text = deployment(order, "certificates", "folder", now).files[f"{job}.yaml"]
    made = {m["kind"]: m for m in yaml.safe_load_all(text)}
    return container_script(made["Job"]["spec"]["template"]["spec"])


def test_a_run_begins_once_on_the_disk_that_it_was_launched_with(
    config, shell, tmp_path
):
    source, run = "hf:gs://bucket/a b", tmp_path / "run"
    run.mkdir()
    permit = coordinator_script(config, job="begin")
    script = coordinator_script(config, source=source)

    def begins():
        said, _ = shell(script, 'echo "$@"; exit 1').communicate(timeout=WAIT_S)
        assert "--bind 0.0.0.0:7077 --advertise two-coordinator.default.svc" in said
        assert ("--init" in said) == (f"--init {source}" in said)
        return "--init" in said

    assert not begins(), "a disk that replaces a lost one"
    shell(permit, "").communicate(timeout=WAIT_S)
    assert begins()
    assert begins(), "the first process ended before it had begun the run"
    (run / "log").mkdir()
    assert not begins()
    (run / "log").rmdir()
    assert not begins(), "what is left of a run"
    # As of a run that an earlier version launched.
    (run / "log").mkdir()
    shell(permit, "").communicate(timeout=WAIT_S)
    (run / "log").rmdir()
    assert not begins()


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
    _, service, policy, _, pods = manifests.coordinator(order, order.nodes[0], NOW)
    (rule,) = policy["spec"]["ingress"]
    assert [p["port"] for p in rule["ports"]] == list(ports.values())
    assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == ports
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert [p["containerPort"] for p in container["ports"]] == list(ports.values())
    (rule,) = [
        resource.create
        for resource in tpu_vm.deployment(order, "", "", NOW).resources
        if resource.what == "firewall rule two-coordinator-open"
    ]
    allowed = ",".join(f"tcp:{port}" for port in ports.values())
    assert f"--allow={allowed}" in rule.arguments


def test_a_coordinator_that_fails_is_started_again(config, shell):
    process = shell(coordinator_script(config), "exit 7")
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 7


@pytest.mark.parametrize(("own", "code"), [(0, 1), (1, 1), (3, 3)])
def test_sigterm_reaches_the_coordinator_and_does_not_complete_its_job(
    config, shell, own, code
):
    """A node that is drained is not the end of the run."""
    process = shell(coordinator_script(config), UNTIL_TERM % ("summary", own))
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=WAIT_S)[0] == "summary\n"
    assert process.returncode == code


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
        process = shell(script, KNOWN + UNTIL_TERM % ("goodbye", 1))
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
