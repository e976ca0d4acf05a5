"""A standby of the coordinator on GKE: its objects, and what its pods and the
coordinator's run."""

import dataclasses
import re
import socket
import time

import kubernetes_validate
import pytest
from gke_support import container_script, job_and_pod, rendered

from diloco_jax.wire.certificates import principals
from diloco_jax.wire.principal import STANDBY

WAIT_S = 120.0
BESIDE = {"standby_zone": "us-east5-b"}
MANDATE = "kubernetes:default/two-mandate"
ELSEWHERE = {
    "standby_zone": "us-central1-b",
    "standby_cluster": "us-central1/far",
    "standby_address": "10.30.0.9",
    "coordinator_address": "10.20.0.9",
}
BUCKET = "gs://bucket/two.mandate"
PLACES = pytest.mark.parametrize(
    ("settings", "mandate"), [(BESIDE, ""), (ELSEWHERE, BUCKET)]
)


def with_mandate(config, mandate, **placement):
    placement = dataclasses.replace(config.placement, mandate=mandate, **placement)
    return dataclasses.replace(config, placement=placement)


def pod_of(made, name):
    return made["Job", name]["spec"]["template"]["spec"]


def says(script, option):
    return re.search(rf"{option} (\S+)", script)[1]


@PLACES
def test_every_object_of_a_pair_is_valid_in_kubernetes(config, settings, mandate):
    made = rendered(with_mandate(config, mandate), **settings)
    for version in ("1.33", "1.37"):
        for (kind, _), value in made.items():
            if kind != "JobSet":
                kubernetes_validate.validate(value, version, strict=True)
    lease = {("Role", "two-mandate"), ("RoleBinding", "two-mandate")}
    assert (lease <= set(made)) == (not mandate)
    new = set(made) - set(rendered(config)) - lease
    assert new == {
        *((kind, "two-standby") for kind in ("Job", "Service", "ServiceAccount")),
        *((kind, "two-standby") for kind in ("NetworkPolicy", "PodDisruptionBudget")),
        ("PersistentVolumeClaim", "two-standby"),
        ("Pod", "two-standby-reader"),
    }


def test_a_standby_has_a_disk_a_key_a_machine_and_an_address_of_its_own(config):
    made = rendered(config, **BESIDE)
    for name, part in (("two-coordinator", "coordinator"), ("two-standby", "standby")):
        pod, labels = pod_of(made, name), made["Job", name]["metadata"]["labels"]
        assert labels == {"app": "diloco", "diloco-run": "two", "diloco-part": part}
        assert pod["nodeSelector"] == {"cloud.google.com/gke-nodepool": name}
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert volumes["run"]["persistentVolumeClaim"]["claimName"] == name
        secret = volumes["certificates"]["secret"]["secretName"]
        assert secret == f"{name}-certificates"
        assert pod["serviceAccountName"] == name
        service = made["Service", name]["spec"]
        assert service["selector"] == labels
        policy = made["NetworkPolicy", name]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        # The other one carries that label, as islands do.
        (rule,) = policy["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": {"diloco-run": "two"}}}]
        script = container_script(pod)
        advertised = f"{name}.default.svc:7077"
        assert says(script, "--advertise") == advertised
        reader = "two-reader" if part == "coordinator" else "two-standby-reader"
        reader = made["Pod", reader]
        (volume,) = reader["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == name


def test_only_the_two_may_write_who_leads(config):
    made = rendered(config, **BESIDE)
    for name in ("two-coordinator", "two-standby"):
        assert pod_of(made, name)["automountServiceAccountToken"] is True
    island = job_and_pod(made["JobSet", "two-v5p"])[2]
    assert island["automountServiceAccountToken"] is False
    bound = made["RoleBinding", "two-mandate"]
    assert [s["name"] for s in bound["subjects"]] == ["two-coordinator", "two-standby"]
    held = made["ConfigMap", "two-config"]["data"]["config.json"]
    assert f'"mandate": "{MANDATE}"' in held
    assert bound["roleRef"]["name"] == "two-mandate"
    (named, create) = made["Role", "two-mandate"]["rules"]
    assert (named["verbs"], named["resourceNames"]) == (
        ["get", "update"],
        ["two-mandate"],
    )
    assert create["verbs"] == ["create"]
    away = rendered(with_mandate(config, BUCKET), **BESIDE)
    assert pod_of(away, "two-standby")["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("settings", "mandate", "dialled"),
    [
        (BESIDE, "", ("two-coordinator.default.svc", "two-standby.default.svc")),
        (ELSEWHERE, BUCKET, ("two-coordinator.default.svc", "10.30.0.9")),
    ],
)
def test_islands_know_both_addresses(config, settings, mandate, dialled):
    made = rendered(with_mandate(config, mandate), **settings)
    for name in ("two-v5p", "two-v6e-b"):
        script = container_script(job_and_pod(made["JobSet", name])[2])
        found = (says(script, "--coordinator"), says(script, "--standby"))
        assert found == tuple(f"{host}:7077" for host in dialled)
    alone = container_script(job_and_pod(rendered(config)["JobSet", "two-v5p"])[2])
    assert "--standby" not in alone


def test_in_another_cluster_each_is_dialled_where_the_other_reaches_it(config):
    made = rendered(with_mandate(config, BUCKET), **ELSEWHERE)
    first = container_script(pod_of(made, "two-coordinator"))
    second = container_script(pod_of(made, "two-standby"))
    assert says(first, "--standby-of") == "10.30.0.9:7077"
    assert says(second, "--standby-of") == "10.20.0.9:7077"
    for name, number in (
        ("two-coordinator", "10.20.0.9"),
        ("two-standby", "10.30.0.9"),
    ):
        assert made["Service", name]["spec"]["loadBalancerIP"] == number
        (rule,) = made["NetworkPolicy", name]["spec"]["ingress"]
        assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in rule["from"]


def test_workers_apart_obey_whoever_leads(config):
    config = with_mandate(config, "", workers=2)
    made = rendered(config, workers_apart=True, **BESIDE)
    lead, _ = made["NetworkPolicy", "two-worker-1"]["spec"]["ingress"]
    parts = [p["podSelector"]["matchLabels"]["diloco-part"] for p in lead["from"]]
    assert parts == ["coordinator", "standby"]
    pod = pod_of(made, "two-worker-1")
    assert pod["nodeSelector"]["cloud.google.com/gke-nodepool"] == "two-coordinator"
    assert pod["automountServiceAccountToken"] is False


# ---- what pods run ---------------------------------------------------------------


@pytest.fixture
def coordinator(config):
    return container_script(pod_of(rendered(config, **BESIDE), "two-coordinator"))


@pytest.fixture
def standby(config):
    return container_script(pod_of(rendered(config, **BESIDE), "two-standby"))


def test_a_coordinator_that_comes_back_follows_its_standby(
    coordinator, shell, tmp_path
):
    run = tmp_path / "run"
    run.mkdir()

    def starts():
        said, _ = shell(coordinator, 'echo "$@"; exit 1').communicate(timeout=WAIT_S)
        assert said.count("--workdir") == 1
        return said.rstrip()

    follows = "--standby-of two-standby.default.svc:7077"
    assert starts().endswith(follows), "a disk that replaces a lost one"
    (run / "begin").touch()
    assert starts().endswith("--init")
    assert starts().endswith("--init"), "it ended before it had begun the run"
    (run / "node").touch()
    assert starts().endswith("--init"), "it held the mandate, and began no run"
    (run / "log").mkdir()
    assert starts().endswith(follows), "its own log, if the mandate still names it"
    (run / "log").rmdir()
    assert starts().endswith(follows), "a copy of the other's run, cut off"
    # A run that was launched without a standby: nobody has led by a mandate yet.
    (run / "node").unlink()
    (run / "log").mkdir()
    assert starts().endswith("/certificates")


def test_a_coordinator_without_its_standby_does_not_go_on_from_an_older_disk(
    config, shell, tmp_path
):
    run = tmp_path / "run"
    (run / "log").mkdir(parents=True)
    alone = container_script(pod_of(rendered(config), "two-coordinator"))
    started = shell(alone, "echo started")
    assert started.communicate(timeout=WAIT_S)[0] == "started\n"
    (run / "node").touch()
    refused = shell(alone, "echo started")
    said, _ = refused.communicate(timeout=WAIT_S)
    assert "launch.standby_zone is empty, and this run has had a standby" in said
    assert "started" not in said
    assert refused.returncode == 2
    by_hand = with_mandate(config, BUCKET)
    given = container_script(pod_of(rendered(by_hand), "two-coordinator"))
    assert shell(given, "echo started").communicate(timeout=WAIT_S)[0] == "started\n"


@pytest.mark.parametrize(
    ("begun", "own", "code"),
    [("log", 3, 1), ("log", 2, 2), ("begin", 3, 3), ("node", 3, 3), ("log", 0, 0)],
)
def test_a_coordinator_that_lost_its_first_mandate_is_started_again(
    coordinator, shell, tmp_path, begun, own, code
):
    """Refused for good is only what is refused as a standby, too."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "begin").touch()
    made = f"mkdir -p {run}/log" if begun == "log" else ":"
    if begun == "node":
        (run / "begin").unlink()
        made = f"mkdir -p {run}/log"
    process = shell(coordinator, f"{made}; exit {own}")
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code


def test_a_standby_waits_for_the_run_to_begin_and_never_again(standby, shell, tmp_path):
    """Before that it would gather from islands which have nothing."""
    run, asked = tmp_path / "run", tmp_path / "asked"
    run.mkdir()
    pause = tmp_path / "sleep"
    pause.write_text(f"#!/bin/bash\ntouch {asked}\nexec /bin/sleep 0.05\n")
    pause.chmod(0o755)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        script = standby.replace("two-coordinator.default.svc:7077", here)
        process = shell(script, 'echo "$@"; exit 7')
        until = time.monotonic() + WAIT_S
        while not asked.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert process.poll() is None
        listener.listen()
        said, _ = process.communicate(timeout=WAIT_S)
    assert says(said, "--standby-of") == here
    assert process.returncode == 7
    # Nobody listens any more, and a standby has been here.
    (run / "node").touch()
    asked.unlink()
    again, _ = shell(script, 'echo "$@"; exit 7').communicate(timeout=WAIT_S)
    assert again == said
    assert not asked.exists()


def test_the_wait_for_the_run_has_an_end(standby, shell, tmp_path):
    clock = tmp_path / "date"
    clock.write_text(
        f"#!/bin/bash\necho x >>{tmp_path}/asked\n"
        f"echo $(($(wc -l <{tmp_path}/asked) * 1000))\n"
    )
    clock.chmod(0o755)
    pause = tmp_path / "sleep"
    pause.write_text("#!/bin/bash\n")
    pause.chmod(0o755)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{nobody.getsockname()[1]}"
        script = standby.replace("two-coordinator.default.svc:7077", here)
        said, _ = shell(script, 'echo "$@"').communicate(timeout=WAIT_S)
    assert says(said, "--standby-of") == here
    assert (tmp_path / "asked").read_text().count("x") == 3


def test_a_standby_that_is_asked_to_end_does_not_complete_its_job(
    standby, shell, tmp_path
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "node").touch()
    body = "trap 'exit 0' TERM; echo up; sleep 600 >/dev/null & wait"
    process = shell(standby, body)
    assert process.stdout.readline() == "up\n"
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 1


def test_a_standbys_key_is_made_for_a_launch_that_had_none(cloud, launch, tmp_path):
    folder = tmp_path / "run" / "certificates"
    launch("gke")
    assert STANDBY not in principals(folder)
    before = (folder / "island.v5p.pem").read_bytes()
    launch("gke", **BESIDE)
    assert STANDBY in principals(folder)
    assert (folder / "island.v5p.pem").read_bytes() == before
    files = cloud.objects["secret/two-standby-certificates"]["data"]
    assert sorted(files) == ["ca.pem", "standby.key", "standby.pem"]
