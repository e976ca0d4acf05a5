"""What a launch makes on each engine: made, changed, stopped, deleted and looked at,
against fake commands. Shapes and lines are in `tests/golden/launch`."""

import dataclasses
import json
import tarfile
import time

import pytest
from gke_support import container_script

from diloco_jax.config import ConfigError
from diloco_jax.wire.certificates import add, revoke
from diloco_jax.wire.peers import island

OWNERS = {"coordinator": "coordinator", "v5p": "island.v5p", "v6e-b": "island.v6e.b"}
"""Stems of the certificates' files by the name of the machine that gets them."""
CERTIFICATES = [f"two-{owner}-certificates" for owner in OWNERS]
PLACE = {"coordinator_address": "two.diloco.internal", "dns_zone": "diloco"}
APART = {"workers": 2}
SETTINGS = {"tpu_vm": {}, "gke": {"namespace": "train"}, "sky": PLACE}
SECRETS = {"secret": ["two-coordinator-begin", *CERTIFICATES]}
DISK = {"disk": ["two-coordinator"]}
MADE = {
    "tpu_vm": {
        "firewall rule": ["two-closed", *(f"two-{name}-open" for name in OWNERS)],
        **SECRETS,
        **DISK,
        "instance": ["two-coordinator"],
        "queued resource": ["two-v5p", "two-v6e-b"],
    },
    "gke": {
        "node pool": ["two-coordinator", "two-v5p", "two-v6e-b"],
        "configmap": ["two-config"],
        "job": ["two-coordinator", "two-coordinator-begin"],
        "jobset": ["two-v5p", "two-v6e-b"],
        "namespace": ["train"],
        "networkpolicy": [f"two-{owner}" for owner in OWNERS],
        "persistentvolumeclaim": ["two-coordinator"],
        "poddisruptionbudget": ["two-coordinator"],
        "secret": CERTIFICATES,
        "service": ["two-coordinator"],
        "serviceaccount": [f"two-{owner}" for owner in OWNERS],
    },
    "sky": {**SECRETS, **DISK, "job": ["two-coordinator", "two-v5p", "two-v6e-b"]},
}
KEPT = {
    # Without the permit a disk that got lost would be taken for a new run.
    "tpu_vm": {**DISK, "secret": ["two-coordinator-begin"]},
    "gke": {
        "job": ["two-coordinator-begin"],
        "namespace": ["train"],  # It is not ours alone.
        "persistentvolumeclaim": ["two-coordinator"],
    },
    "sky": {**DISK, "secret": ["two-coordinator-begin"]},
}
"""What is left after `--action delete`."""


def there(cloud):
    """Names of all that there is, by kind."""
    found = {kind: sorted(made) for kind, made in cloud.things.items()}
    for key in cloud.objects:
        kind, name = key.split("/")
        found.setdefault(kind, []).append(name)
    alive = [j["job_name"] for j in cloud.jobs if j["status"] != "CANCELLED"]
    found |= {"job": alive} if alive else {}
    return {kind: sorted(names) for kind, names in found.items()}


@pytest.mark.parametrize("on", MADE)
def test_everything_is_made_once_and_deleted_but_for_the_run(cloud, launch, on):
    settings = SETTINGS[on]
    assert launch(on, **settings) == 0
    assert there(cloud) == MADE[on]
    cloud.changes()
    assert launch(on, **settings) == 0
    assert cloud.changes() == []
    for _ in range(2):  # What is gone already is no failure.
        assert launch(on, "delete", **settings) == 0
        assert there(cloud) == KEPT[on]
    assert launch(on, "delete", disk=True, **settings) == 0
    assert there(cloud) == ({"namespace": ["train"]} if on == "gke" else {})


def test_a_launch_on_tpu_vms_says_what_deletes_it(cloud, launch, capsys):
    assert launch("tpu_vm") == 0
    said = capsys.readouterr().err
    before, asked = said.index("does not come back on tpu_vm"), said.index("\n$ ")
    assert before < asked, "it is told before anything is made"
    told = said.partition("to delete all of it, the run included:\n")[2].splitlines()
    for line in told:
        assert cloud.call(line.split()).returncode == 0
    assert cloud.things == {}


def test_an_island_is_deleted_by_itself(cloud, launch, capsys):
    launch("tpu_vm")
    assert launch("tpu_vm", "delete", only=("v5p",)) == 0
    assert list(cloud.things["queued resource"]) == ["two-v6e-b"]
    assert "two-v5p-open" not in cloud.things["firewall rule"]
    assert launch("tpu_vm", "delete") == 0
    assert "kept: disk two-coordinator" in capsys.readouterr().err


def test_what_tpu_vms_run_is_theirs(cloud, launch):
    for action in ("stop", "run", "status", "logs", "results"):
        with pytest.raises(ConfigError, match=f"--action {action} with --on tpu_vm"):
            launch("tpu_vm", action)
    assert cloud.calls == []


@pytest.mark.parametrize(
    ("on", "gone"),
    [
        ("tpu_vm", ["delete two-v5p --zone=us-east5-a --force"]),
        ("gke", ["delete jobset,networkpolicy,serviceaccount two-v5p"]),
        ("sky", []),
    ],
)
def test_what_failed_is_made_anew_by_another_launch(cloud, launch, on, gone):
    launch(on, **SETTINGS[on])
    if on == "tpu_vm":
        cloud.things["queued resource"]["two-v5p"]["state"] = "SUSPENDED"
        cloud.things["queued resource"]["two-v6e-b"]["state"] = "ACTIVE"
    elif on == "gke":
        cloud.objects["jobset/two-v5p"]["status"] = {"terminalState": "Failed"}
        cloud.objects["jobset/two-v6e-b"]["status"] = {"terminalState": "Completed"}
    else:
        ends = {"two-v5p": "FAILED", "two-v6e-b": "RECOVERING"}
        for job in cloud.jobs:
            job["status"] = ends.get(job["job_name"], "SUCCEEDED")
    cloud.changes()
    assert launch(on, **SETTINGS[on]) == 0
    *deleted, made = [" ".join(call) for call in cloud.changes()]
    assert all(text in line for text, line in zip(gone, deleted, strict=True))
    assert "two-v5p" in made
    assert any(verb in made for verb in ("create", "apply", "launch"))


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


def test_jobs_of_sky_are_stopped_run_again_and_shown(cloud, launch, capsys):
    launch("sky", **PLACE)
    assert launch("sky", "stop", **PLACE) == 0
    assert {job["status"] for job in cloud.jobs} == {"CANCELLED"}
    assert launch("sky", "run", **PLACE) == 0
    assert [job["status"] for job in cloud.jobs[3:]] == ["PENDING"] * 3
    assert launch("sky", "logs", only=("v5p",), **PLACE) == 0
    assert "logs of two-v5p" in capsys.readouterr().err
    assert launch("sky", "results", **PLACE) == 1
    assert "on the coordinator's disk" in capsys.readouterr().err


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


def test_results_and_status_are_asked_beside_the_disk(
    cloud, launch, tmp_path, monkeypatch, capsys
):
    launch("gke")
    cloud.changes()
    assert launch("gke", "results") == 0
    apply, wait, copy, delete = cloud.changes()
    assert apply[3].endswith("/reader.yaml")
    assert wait[2:4] == ["pod/two-reader", "--for=condition=Ready"]
    assert copy[2:4] == ["two-reader:/var/lib/diloco/run", f"{tmp_path}/run/results"]
    assert delete[2:4] == ["pod", "two-reader"]
    shown = []
    monkeypatch.setattr("diloco_jax.launch.command._render", shown.append)
    assert launch("gke", "status") == 0
    assert shown == [{"phase": "running"}]
    launch("gke", "stop")
    assert launch("gke", "status") == 1
    assert '"job/two-coordinator" not found' in capsys.readouterr().err


def test_what_a_copy_that_broke_off_left_is_deleted_with_the_disk(cloud, launch):
    """A disk with a pod does not go."""
    launch("gke")
    cloud.fail("kubectl cp", 1, "tar: removed as we read it")
    assert launch("gke", "results") == 1
    assert "pod/two-reader" in cloud.objects
    cloud.fail()
    assert launch("gke", "delete", disk=True) == 0
    assert "pod/two-reader" not in cloud.objects


def test_an_island_by_itself_waits_for_no_permit(cloud, launch):
    """Its machine is the coordinator's, which nobody asks for."""
    assert launch("gke", only=("v5p",)) == 0
    assert "job/two-coordinator-begin" not in cloud.objects
    assert any(key.endswith("/two-v5p") for key in cloud.objects)


# ---- failures ------------------------------------------------------------------------

SLICE = "compute tpus queued-resources create"
POOL = "container node-pools create two-v5p"
QUOTA = "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5pPerProjectPerZone' exceeded"
NO_JOBSET = 'the server doesn\'t have a resource type "jobset"'


@pytest.mark.parametrize(
    ("on", "command", "text", "remedies"),
    [
        ("tpu_vm", SLICE, QUOTA, ["us-east5-a, europe-west4-b", "launch.zones.v5p"]),
        ("tpu_vm", SLICE, "Permission denied on 'locations/us-x'", ["launch.zones"]),
        ("tpu_vm", SLICE, "PERMISSION_DENIED: tpu.nodes.create", ["ask for the role"]),
        ("tpu_vm", SLICE, "API has not been used in project", ["services enable"]),
        ("tpu_vm", SLICE, "something else", ["run the same `diloco launch` again"]),
        # It is not taken for missing.
        ("tpu_vm", "compute firewall-rules describe", "Required 'get' permission", []),
        (
            "gke",
            POOL,
            "Insufficient quota to satisfy",
            ["launch.location = 'us-east5'"],
        ),
        ("gke", "kubectl get jobset", NO_JOBSET, ["install JobSet"]),
    ],
)
def test_a_failure_comes_with_its_remedy_and_is_taken_up(
    cloud, launch, capsys, on, command, text, remedies
):
    cloud.fail(command, 1, text)
    assert launch(on) == 1
    said = capsys.readouterr().err
    assert f"exit code 1: {text}" in said
    assert command in said.rpartition("error: ")[2]
    for remedy in remedies:
        assert remedy in said.rpartition(text)[2]
    cloud.fail()
    assert launch(on) == 0


# ---- changes -------------------------------------------------------------------------


def test_pods_get_the_config_as_it_is_now(cloud, launch, config):
    launch("gke")
    cloud.changes()
    config.islands["new"] = dataclasses.replace(config.islands["v5p"], batch_size=8)
    zones = {**config.launch.zones, "new": "us-east5-a"}
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


@pytest.mark.parametrize(
    ("on", "settings", "broken"),
    [
        ("tpu_vm", {}, "secrets update"),
        ("gke", APART, "kubectl label secret two-coordinator-certificates"),
    ],
)
def test_changed_certificates_reach_the_machines_they_are_of(
    cloud, launch, tmp_path, on, settings, broken
):
    """Also after one that broke off. Only who serves gets a list of revoked ones."""
    launch(on, **settings)
    folder = tmp_path / "run/certificates"

    def changed():
        words = {"tpu_vm": ("versions", 4), "gke": ("create", 4)}[on]
        return {c[words[1]] for c in cloud.changes() if words[0] in c}

    add(folder, ["another.name"], 365)
    cloud.changes()
    cloud.fail(broken, 1, "broken off")
    assert launch(on, **settings) == 1
    cloud.fail()
    cloud.changes()
    assert launch(on, **settings) == 0
    workers = [f"worker-{n}" for n in range(settings.get("workers", 0))]
    serving = ["coordinator", *workers]
    assert changed() == {f"two-{name}-certificates" for name in serving}
    stolen = (folder / "island.v5p.pem").read_bytes()
    revoke(folder, island("v5p"))
    assert launch(on, only=("coordinator",), **settings) == 0
    assert changed() == {f"two-{n}-certificates" for n in [*serving, "v5p"]}
    for stem in ("coordinator", "island.v5p", *(f"worker.{w[-1]}" for w in workers)):
        with tarfile.open(folder / f"{stem}.tar") as tar:
            lists = {n for n in tar.getnames() if n.endswith(".txt")}
        assert lists == (set() if stem.startswith("island") else {"revoked.txt"})
    assert (folder / "island.v5p.pem").read_bytes() != stolen, "it has another key"
    assert launch(on, **settings) == 0
    assert cloud.changes() == []


# ---- secrets and ports ---------------------------------------------------------------


@pytest.mark.parametrize("on", SETTINGS)
def test_files_hold_no_key_and_secrets_no_authority(cloud, launch, tmp_path, on):
    assert launch(on, **SETTINGS[on]) == 0
    for file in (tmp_path / "run/launch").iterdir():
        assert "PRIVATE KEY" not in file.read_text()
    assert "PRIVATE KEY" not in str(cloud.jobs)
    for owner, stem in OWNERS.items():
        names, secret = ["ca.pem", f"{stem}.pem", f"{stem}.key"], f"two-{owner}"
        if on == "gke":
            files = cloud.objects[f"secret/{secret}-certificates"]["data"]
            assert sorted(files) == sorted(names)
            continue
        given = cloud.things["secret"][f"{secret}-certificates"]["--data-file"]
        with tarfile.open(given) as tar:
            assert tar.getnames() == names
        assert (tmp_path / given).stat().st_mode & 0o077 == 0


def test_a_secret_whose_reader_could_not_be_bound_is_bound_later(cloud, launch):
    account = {"service_account": "i@p.iam"}
    cloud.fail("secrets add-iam-policy-binding", 1, "no route to host")
    assert launch("tpu_vm", **account) == 1
    cloud.fail()
    assert launch("tpu_vm", **account) == 0
    for made in cloud.things["secret"].values():
        assert made["readers"] == ["serviceAccount:i@p.iam"]


@pytest.mark.parametrize("on", ["tpu_vm", "sky"])
def test_each_account_reads_its_own_secrets(cloud, launch, on):
    """SkyPilot has one for all of its machines."""
    own = {"service_account": "i@p.iam", "coordinator_account": "c@p.iam"}
    assert launch(on, **SETTINGS[on], **own) == 0
    one = "skypilot-v1@my-project.iam.gserviceaccount.com"
    lead, islands = ("c@p.iam", "i@p.iam") if on == "tpu_vm" else (one, one)
    assert {n: made["readers"] for n, made in cloud.things["secret"].items()} == {
        "two-coordinator-begin": [f"serviceAccount:{lead}"],
        "two-coordinator-certificates": [f"serviceAccount:{lead}"],
        "two-v5p-certificates": [f"serviceAccount:{islands}"],
        "two-v6e-b-certificates": [f"serviceAccount:{islands}"],
    }


ISLANDS, COORDINATOR = ("two-v5p", "two-v6e-b"), "two-coordinator"
CONTROL, BULK, LIBTPU, JAX, METRICS = 7077, 7078, 8471, 8482, 8431
KEYLESS = {LIBTPU, JAX, METRICS}
INTERNAL = {"--allow": "all", "--priority": "65534"}
"""Rule that a project's network `default` has: every machine reaches every port."""


def reached(cloud, source, target, *others):
    """The ports of a machine that another one reaches, by rules and tags alone."""
    things = cloud.things
    machines = things["queued resource"] | things["instance"]
    tags = {name: set(made["--tags"].split(",")) for name, made in machines.items()}

    def counts(rule):
        sources, targets = rule.get("--source-tags"), rule.get("--target-tags")
        return (sources is None or sources in tags[source]) and (
            targets is None or targets in tags[target]
        )

    rules = [*filter(counts, [*things["firewall rule"].values(), *others])]
    rules.sort(key=lambda rule: int(rule.get("--priority", 1000)))
    ports = set()
    for port in (CONTROL, BULK, *KEYLESS):
        for rule in rules:
            named = rule.get("--allow") or rule["--rules"]
            if named == "all" or f"tcp:{port}" in named.split(","):
                ports |= {port} if "--allow" in rule else set()
                break
    return ports


@pytest.mark.parametrize("others", [(), (INTERNAL,)])
def test_an_islands_hosts_reach_each_other_and_no_other_island(cloud, launch, others):
    assert launch("tpu_vm") == 0
    for name in ISLANDS:
        assert reached(cloud, name, name, *others) & KEYLESS == {LIBTPU, JAX}
        (other,) = set(ISLANDS) - {name}
        assert reached(cloud, name, other, *others).isdisjoint(KEYLESS)
        assert reached(cloud, COORDINATOR, name, *others).isdisjoint(KEYLESS)
        assert others or not reached(cloud, name, other)
        ports = {CONTROL, BULK}
        assert reached(cloud, name, COORDINATOR, *others) - KEYLESS == ports
        assert others or reached(cloud, name, COORDINATOR) == ports
