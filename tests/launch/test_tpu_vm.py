"""Queued resources and what is around them, against a fake `gcloud`; who reaches which
port, and who reads which secret. Shapes are in `tests/golden/launch`."""

import dataclasses
import tarfile

import fake_gcloud
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.wire.certificates import add, revoke
from diloco_jax.wire.principal import island

SLICE = "gcloud compute tpus queued-resources"
OWNERS = {"coordinator": "coordinator", "v5p": "island.v5p", "v6e-b": "island.v6e.b"}
"""Stems of the certificates' files by the name of the machine that gets them."""
ISLANDS, COORDINATOR = ("two-v5p", "two-v6e-b"), "two-coordinator"
CONTROL, BULK, LIBTPU, JAX, METRICS = 7077, 7078, 8471, 8482, 8431
KEYLESS = {LIBTPU, JAX, METRICS}
INTERNAL = {"--allow": "all", "--priority": "65534"}
"""Rule that a project's network `default` has: every machine reaches every port."""


def lines(calls):
    return [" ".join(call) for call in calls]


def test_create_makes_everything_once_and_says_what_deletes_it(cloud, launch, capsys):
    assert launch("tpu_vm") == 0
    said = capsys.readouterr().err
    things = cloud.things
    assert {kind: sorted(made) for kind, made in things.items()} == {
        "firewall rule": [
            "two-closed",
            *(f"two-{name}-open" for name in OWNERS),
        ],
        "secret": [
            "two-coordinator-begin",
            *(f"two-{name}-certificates" for name in OWNERS),
        ],
        "disk": ["two-coordinator"],
        "instance": ["two-coordinator"],
        "queued resource": ["two-v5p", "two-v6e-b"],
    }
    before, asked = said.index("does not come back on tpu_vm"), said.index("\n$ ")
    assert before < asked, "it is told before anything is made"
    told = said.partition("to delete all of it, the run included:\n")[2].splitlines()
    cloud.changes()
    assert launch("tpu_vm") == 0
    assert cloud.changes() == []
    assert "there: slice two-v5p" in capsys.readouterr().err
    for line in told:
        assert fake_gcloud.main(line.split()[1:]) == 0
    assert cloud.things == {}


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_a_lost_slice_is_made_anew_by_another_launch(cloud, launch, state):
    launch("tpu_vm")
    cloud.set_state("queued resource", "two-v6e-b", state)
    cloud.set_state("queued resource", "two-v5p", "ACTIVE")
    cloud.changes()
    assert launch("tpu_vm") == 0
    deleted, created = lines(cloud.changes())
    assert deleted.startswith(f"{SLICE} delete two-v6e-b --zone=us-east5-b --force")
    assert created.startswith(f"{SLICE} create two-v6e-b")


@pytest.mark.parametrize("action", ["stop", "run", "status", "logs", "results"])
def test_what_machines_run_is_theirs(cloud, launch, action):
    with pytest.raises(ConfigError, match=f"--action {action} with --on tpu_vm: it"):
        launch("tpu_vm", action)
    assert cloud.calls == []


def test_delete_leaves_the_disk_unless_told_otherwise(cloud, launch, capsys):
    launch("tpu_vm")
    assert launch("tpu_vm", "delete", only=("v5p",)) == 0
    assert list(cloud.things["queued resource"]) == ["two-v6e-b"]
    assert "two-v5p-open" not in cloud.things["firewall rule"]
    assert launch("tpu_vm", "delete") == 0, "what is gone already is no failure"
    assert set(cloud.things) == {"disk", "secret"}
    assert list(cloud.things["secret"]) == ["two-coordinator-begin"]
    assert "kept: disk two-coordinator" in capsys.readouterr().err
    assert launch("tpu_vm", "delete", disk=True) == 0
    assert cloud.things == {}


def test_a_launch_that_broke_off_is_taken_up(cloud, launch, capsys):
    said = "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5pPerProjectPerZone' exceeded"
    cloud.fail("compute tpus queued-resources create", 1, said)
    assert launch("tpu_vm") == 1
    told = capsys.readouterr().err
    assert f"error: {SLICE} create two-v5p --zone=us-east5-a" in told
    assert f"exit code 1: {said}" in told
    assert "offered in us-central1-a, us-east5-a, europe-west4-b" in told
    assert "launch.zones.v5p" in told
    cloud.fail()
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


def test_what_cannot_be_looked_at_is_not_taken_for_missing(cloud, launch, capsys):
    cloud.fail("compute firewall-rules describe", 1, "Required 'get' permission")
    assert launch("tpu_vm") == 1
    assert "ask for the role" in capsys.readouterr().err
    assert cloud.things == {}


@pytest.mark.parametrize("flag", ["--max-run-duration=1h", "--provisioning-model=x"])
def test_the_fake_refuses_what_the_released_command_does_not_know(cloud, flag):
    line = "compute tpus queued-resources create a --zone=z --node-id=a "
    line += "--runtime-version=r --accelerator-type=v5p-8 --project=p"
    assert fake_gcloud.main([*line.split(), flag]) == 2
    assert fake_gcloud.main(line.split()) == 0


# ---- secrets -------------------------------------------------------------------------


def test_scripts_hold_no_key_and_secrets_no_authority(cloud, launch, tmp_path):
    launch("tpu_vm")
    for script in (tmp_path / "run/launch").iterdir():
        assert "PRIVATE KEY" not in script.read_text()
    for owner, stem in OWNERS.items():
        given = cloud.things["secret"][f"two-{owner}-certificates"]["--data-file"]
        with tarfile.open(given) as tar:
            assert tar.getnames() == ["ca.pem", f"{stem}.pem", f"{stem}.key"]
        assert (tmp_path / given).stat().st_mode & 0o077 == 0


def test_changed_certificates_reach_the_machines_they_are_of(cloud, launch, tmp_path):
    launch("tpu_vm")
    cloud.changes()
    folder = tmp_path / "run/certificates"
    add(folder, ["another.name"], 365)
    assert launch("tpu_vm") == 0
    added = [call for call in cloud.changes() if "versions" in call]
    assert [call[4] for call in added] == ["two-coordinator-certificates"]
    revoke(folder, island("v5p"))
    assert launch("tpu_vm", only=("coordinator",)) == 0
    added = [call for call in cloud.changes() if "versions" in call]
    owners = ("coordinator", "v5p")
    assert [c[4] for c in added] == [f"two-{owner}-certificates" for owner in owners]
    for owner, lists in zip(owners, ({"revoked.txt"}, set()), strict=True):
        with tarfile.open(folder / f"{OWNERS[owner]}.tar") as tar:
            assert {n for n in tar.getnames() if n.endswith(".txt")} == lists
    assert launch("tpu_vm") == 0
    assert cloud.changes() == []


def test_a_secret_whose_reader_could_not_be_bound_is_bound_later(cloud, launch):
    account = {"service_account": "i@p.iam"}
    cloud.fail("secrets add-iam-policy-binding", 1, "no route to host")
    assert launch("tpu_vm", **account) == 1
    cloud.fail()
    assert launch("tpu_vm", **account) == 0
    for made in cloud.things["secret"].values():
        assert made["readers"] == ["serviceAccount:i@p.iam"]


# ---- ports ---------------------------------------------------------------------------


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
    for port in (CONTROL, BULK, BULK + 1, BULK + 2, *KEYLESS):
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


def test_every_island_reaches_the_coordinators_ports_and_no_more(cloud, launch):
    assert launch("tpu_vm", workers=2) == 0
    for name in ISLANDS:
        ports = {CONTROL, BULK, BULK + 1, BULK + 2}
        assert reached(cloud, name, COORDINATOR) == ports


def test_an_island_of_one_host_has_no_rule(cloud, launch, config):
    config.islands["v5p"] = dataclasses.replace(
        config.islands["v5p"], topology="v5p:2x2x1", mesh_fsdp=4
    )
    assert launch("tpu_vm") == 0
    rules = ["two-closed", "two-coordinator-open", "two-v6e-b-open"]
    assert sorted(cloud.things["firewall rule"]) == rules
