"""Objects of a launch on GKE against published schemas, the rules that no schema holds,
and what their pods run, with a `diloco` that tells what it is told.

Shapes are in `tests/golden/launch`.
"""

import re
import signal
import time

import kubernetes_validate
import pytest
from fake_cloud import parse_gcloud
from gke_support import NOW, container_script, job_and_pod, rendered
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from test_rendered import LAUNCHES

from diloco_jax.launch.gke import deployment
from diloco_jax.launch.spec import make_spec

WAIT_S = 120.0
UNTIL_TERM = (
    "trap 'echo %s; kill $!; exit %d' TERM; echo up; sleep 600 >/dev/null & wait"
)
"""A process that says a word when it is asked to end."""
KNOWN = "until [[ $(<\"/proc/$PPID/stat\") == *') S '* ]]; do sleep 0.01; done\n"
"""Wait until the parent sleeps. A `timeout` that has not yet stored its child's number
ends at SIGTERM by itself: in a pod the child dies with it, here it would stay."""
KUBERNETES = ("1.33", "1.37")
"""Versions of Kubernetes whose schemas hold; GKE has these and those between."""
SETTINGS = [settings for on, settings in LAUNCHES.values() if on == "gke"]
ELSEWHERE = {
    "zones": {"v5p": "us-east5-a", "v6e.b": "us-central1-b"},
    "clusters": {"v6e.b": "us-central1/far"},
    "coordinator_address": "10.20.0.9",
}
settings = pytest.mark.parametrize("settings", SETTINGS)


def jobsets(config, **settings):
    made = rendered(config, **settings)
    return [value for (kind, _), value in made.items() if kind == "JobSet"]


# ---- schemas, and rules that none holds ----------------------------------------------


def dropped(given, kept, path=""):
    """Paths of what a model did not know, and therefore left out."""
    if isinstance(given, dict):
        for name, value in given.items():
            here = f"{path}.{name}"
            if name not in kept:
                yield here
            else:
                yield from dropped(value, kept[name], here)
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from dropped(one, other, f"{path}[{number}]")


@settings
def test_every_object_is_valid_in_kubernetes(config, settings):
    made = rendered(config, **settings)
    assert {kind for kind, _ in made} == {
        *("ConfigMap", "PersistentVolumeClaim", "Service", "Job", "Pod"),
        *("NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "JobSet"),
    }
    for version in KUBERNETES:
        for (kind, _), value in made.items():
            if kind == "JobSet":  # A JobSet's template is a Job's.
                job, pod = job_and_pod(value)
                value = {"apiVersion": "batch/v1", "kind": "Job", "spec": job}
            kubernetes_validate.validate(value, version, strict=True)
    pod["nodeSelectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(value, version, strict=True)


@settings
def test_every_jobset_has_only_fields_of_a_jobset(config, settings):
    for value in jobsets(config, **settings):
        read = JobsetV1alpha2JobSet.from_dict(value).to_dict()
        assert list(dropped(value, read)) == []
        value["spec"]["failurePolicy"]["restartStrategies"] = "Recreate"
        read = JobsetV1alpha2JobSet.from_dict(value).to_dict()
        assert list(dropped(value, read)) == [".spec.failurePolicy.restartStrategies"]


@settings
def test_jobsets_keep_the_rules_that_no_schema_holds(config, settings):
    for value in jobsets(config, **settings):
        job, pod = job_and_pod(value)
        (replicated,) = value["spec"]["replicatedJobs"]
        chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
        shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        product = 1
        for axis in shape:
            product *= int(axis)
        assert job["parallelism"] == job["completions"] == product // chips
        name = f"{value['metadata']['name']}-{replicated['name']}"
        assert len(f"{name}-0-{job['completions'] - 1}-abcde") <= 63
        labels = {**pod["nodeSelector"], **value["metadata"]["labels"]}
        assert all(isinstance(label, str) for label in labels.values())
        (container,) = pod["containers"]
        notice_s = float(re.search(r"--notice-s (\S+)", container["command"][-1])[1])
        assert 0 < notice_s <= pod["terminationGracePeriodSeconds"] - 5


def test_preemptions_are_no_crashes_and_refusals_are_final(config):
    """What Kubernetes says of a job that the first rule failed, or the last one."""
    made = rendered(config.replace("fruitless_starts", 7))
    policy = made["JobSet", "two-v5p"]["spec"]["failurePolicy"]
    served, _ = job_and_pod(made["Job", "two-coordinator"])
    assert (policy["maxRestarts"], served["backoffLimit"]) == (6, 6)
    hopeless, preempted = policy["rules"]
    message = (
        "Container diloco for pod default/two-v5p-hosts-0-0 failed with exit code 3 "
        "matching FailJob rule at index 0"
    )
    (pattern,) = hopeless["onJobFailureMessagePatterns"]
    assert hopeless["action"] == "FailJobSet"
    assert re.fullmatch(pattern, message)
    assert not re.fullmatch(pattern, "Pod x has condition DisruptionTarget matching")
    assert preempted["action"] == "RestartJobSetAndIgnoreMaxRestarts"


@settings
def test_a_policy_lets_in_the_pods_that_it_names(config, settings):
    """Labels of pods, of selectors and of policies are the same everywhere."""
    made = rendered(config, **settings)
    parts = {}
    for (kind, name), value in made.items():
        if kind in ("Job", "JobSet") and not name.endswith("-begin"):
            job, pod = job_and_pod(value)
            parts[name] = job["template"]["metadata"]["labels"]
            assert pod["serviceAccountName"] == name
            assert pod["automountServiceAccountToken"] is False
            secrets = [v["secret"] for v in pod["volumes"] if "secret" in v]
            assert [s["secretName"] for s in secrets] == [f"{name}-certificates"]
    for name, labels in parts.items():
        policy = made["NetworkPolicy", name]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        if ("Service", name) in made:
            assert made["Service", name]["spec"]["selector"] == labels
        else:
            own = policy["ingress"][0]["from"]
            assert own == [{"podSelector": {"matchLabels": labels}}]
    (own,) = made["NetworkPolicy", "two-coordinator"]["spec"]["ingress"]
    assert own["from"][0] == {"podSelector": {"matchLabels": {"diloco-run": "two"}}}


# ---- what pods run -------------------------------------------------------------------


def scripts(config, now=NOW, **settings):
    """The coordinator's, and an island's."""
    made = rendered(config, now=now, **settings)
    return [
        container_script(made[key])
        for key in (("Job", "two-coordinator"), ("JobSet", "two-v6e-b"))
    ]


def test_an_island_counts_its_attempts_from_the_launch(config, shell):
    island = shell(scripts(config)[1], 'echo "$@"; exit 3')
    said, _ = island.communicate(timeout=WAIT_S)
    assert said.startswith("island ")
    assert said.rstrip().endswith(f"--incarnation {NOW + 3}")
    assert island.returncode == 3


def test_a_run_begins_once_on_the_disk_that_it_was_launched_with(
    config, shell, tmp_path
):
    source, run = "hf:gs://bucket/a b", tmp_path / "run"
    run.mkdir()
    made = rendered(config, source=source)
    permit = container_script(made["Job", "two-coordinator-begin"])
    script = container_script(made["Job", "two-coordinator"])

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


@pytest.mark.parametrize("max_hours", [0.0, 2.0])
def test_a_pod_ends_as_its_process_and_passes_signals_on(config, shell, max_hours):
    """Also with a last hour, by `timeout`."""
    for script in scripts(config, int(time.time()), max_hours=max_hours):
        for code in (0, 1, 2, 3, 137):
            process = shell(script, f"exit {code}")
            process.communicate(timeout=WAIT_S)
            assert process.returncode == code
        known = KNOWN if max_hours else ""
        process = shell(script, known + UNTIL_TERM % ("goodbye", 1))
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S)[0] == "goodbye\n"
        assert process.returncode == 1


@pytest.mark.parametrize("part", ["coordinator", "worker-1"])
@pytest.mark.parametrize(("own", "code"), [(0, 1), (1, 1), (3, 3)])
def test_sigterm_reaches_what_serves_and_does_not_complete_its_job(
    config, shell, part, own, code
):
    """A node that is drained is not the end of the run."""
    made = rendered(config, workers=2)
    script = container_script(made["Job", f"two-{part}"])
    process = shell(script, UNTIL_TERM % ("summary", own))
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=WAIT_S)[0] == "summary\n"
    assert process.returncode == code


def test_after_the_last_hour_nothing_starts(config, shell):
    for script in scripts(config, int(time.time()) - 7201, max_hours=2.0):
        process = shell(script, "echo started; exit 1")
        said, _ = process.communicate(timeout=WAIT_S)
        assert said == "launch.max_hours are over\n"
        assert process.returncode == 0


def test_the_last_hour_ends_what_runs(config, shell, tmp_path):
    tool = tmp_path / "timeout"
    tool.write_text('#!/bin/bash\necho "$@"; exit 124\n')
    tool.chmod(0o755)
    made = scripts(config, int(time.time()), max_hours=2.0)
    for script, grace in zip(made, (60, 15), strict=True):
        process = shell(script, "exit 9")
        said, _ = process.communicate(timeout=WAIT_S)
        foreground, kill, left, program, *_ = said.split()
        assert (foreground, kill) == ("--foreground", f"--kill-after={grace}")
        assert 7200 - WAIT_S < int(left) <= 7200
        assert program == "diloco"
        # Neither 2 nor 3: it is started once more, and ends with 0.
        assert process.returncode == 124


def test_a_host_name_of_a_coordinator_is_no_address_of_its_balancer(config):
    named = rendered(config, **{**ELSEWHERE, "coordinator_address": "here.example"})
    service = named["Service", "two-coordinator"]["spec"]
    assert service["type"] == "LoadBalancer"
    assert "loadBalancerIP" not in service


@pytest.mark.parametrize(
    ("topology", "devices", "policy", "placed"),
    [
        ("tpu7x:2x2x2", 16, ["--accelerator-topology=2x2x2"], "--placement-policy"),
        ("tpu7x:2x2x1", 8, [], ""),
        # By its topology, as the cloud calls it.
        ("v4:2x2x2", 8, [], "--tpu-topology=2x2x2"),
    ],
)
def test_a_tpu7x_is_placed_by_a_policy_where_it_has_several_hosts(
    config, topology, devices, policy, placed
):
    fields = {"topology": topology, "mesh_fsdp": devices, "batch_size": devices}
    config = config.replace({f"islands.v5p.{name}": v for name, v in fields.items()})
    spec = make_spec(config, "two.py", "gke")
    resources = deployment(spec, "certificates", "folder", NOW).resources
    commands = [c for r in resources if r.owner == "v5p" for c in r.create]
    *policies, pool = (
        parse_gcloud(c.arguments[1:]) for c in commands if c.arguments[0] == "gcloud"
    )
    shapes = [flags["--accelerator-topology"] for _, _, _, flags in policies]
    assert [f"--accelerator-topology={shape}" for shape in shapes] == policy
    by = {"--placement-policy", "--tpu-topology"} & pool[3].keys()
    assert by == {placed.partition("=")[0]} - {""}
    # The cloud counts chips, and jax two devices of each of a TPU7x.
    _, pod = job_and_pod(rendered(config)["JobSet", "two-v5p"])
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == "4"
