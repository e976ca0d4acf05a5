"""Who reaches which port of a launch on TPU VMs, and how long its requests wait."""

import dataclasses
import json

import fake_gcloud
import pytest

ISLANDS = ("two-v5p", "two-v6e-b")
COORDINATOR = "two-coordinator"
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
    for island in ISLANDS:
        assert reached(cloud, island, island, *others) & KEYLESS == {LIBTPU, JAX}
        (other,) = set(ISLANDS) - {island}
        assert reached(cloud, island, other, *others).isdisjoint(KEYLESS)
        assert reached(cloud, COORDINATOR, island, *others).isdisjoint(KEYLESS)
        assert others or not reached(cloud, island, other)


def test_every_island_reaches_the_coordinators_ports_and_no_more(cloud, launch):
    assert launch("tpu_vm", workers=2) == 0
    for island in ISLANDS:
        ports = {CONTROL, BULK, BULK + 1, BULK + 2}
        assert reached(cloud, island, COORDINATOR) == ports


def test_an_island_of_one_host_has_no_rule(cloud, launch, config):
    alone = dataclasses.replace(
        config.islands["v5p"], topology="v5p:2x2x1", mesh_fsdp=4
    )
    config.islands["v5p"] = alone
    assert launch("tpu_vm") == 0
    assert sorted(cloud.things["firewall rule"]) == [
        "two-closed",
        "two-coordinator-open",
        "two-v6e-b-open",
    ]


def test_rules_go_with_their_part_of_the_run(cloud, launch):
    launch("tpu_vm")
    assert launch("tpu_vm", "delete", only=("v5p",)) == 0
    assert sorted(cloud.things["firewall rule"]) == [
        "two-closed",
        "two-coordinator-open",
        "two-v6e-b-open",
    ]
    assert launch("tpu_vm", "delete") == 0
    assert "firewall rule" not in cloud.things


def test_the_rule_of_an_earlier_version_is_named_and_deleted(
    cloud, launch, tmp_path, capsys
):
    """It was one for all machines, under the run's name."""
    launch("tpu_vm")
    record = tmp_path / "run/launch.json"
    fields = json.loads(record.read_text())
    (rule,) = [e for e in fields["made"] if e["what"] == "firewall rule two-v5p-open"]
    old = json.loads(json.dumps(rule).replace("two-v5p-open", "two"))
    record.write_text(json.dumps({**fields, "made": [old, *fields["made"]]}))
    words = "compute firewall-rules create two --allow=tcp:1 --project=p"
    assert fake_gcloud.main(words.split()) == 0
    capsys.readouterr()
    assert launch("tpu_vm") == 0
    assert "# left over: firewall rule two, which this" in capsys.readouterr().err
    assert launch("tpu_vm", "delete") == 0
    assert "firewall rule" not in cloud.things


def test_no_request_waits_longer_than_the_run_may_last(cloud, launch, act, monkeypatch):
    now = [1_800_000_000.0]
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: now[0])
    assert launch("tpu_vm", max_hours=1.5) == 0
    for made in cloud.things["queued resource"].values():
        assert made["--valid-until-duration"] == "5400s"
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")

    def later():
        now[0] += 1800

    def look():
        made = cloud.things["queued resource"]["two-v5p"]
        assert made["--valid-until-duration"] == "3600s"
        cloud.say_last("done")

    cloud.fail("compute tpus queued-resources create", 1, "STOCKOUT")

    def again():
        later()
        cloud.fail("", 0, "")

    assert act("tpu_vm", "watch", then=[again, look], max_hours=1.5) == 0


def test_a_launch_without_an_end_waits_for_its_slices(cloud, launch):
    assert launch("tpu_vm") == 0
    for made in cloud.things["queued resource"].values():
        assert "--valid-until-duration" not in made


@pytest.mark.parametrize("flag", ["--max-run-duration=1h", "--provisioning-model=x"])
def test_the_fake_refuses_what_the_released_command_does_not_know(cloud, flag):
    line = "compute tpus queued-resources create a --zone=z --node-id=a "
    line += "--runtime-version=r --accelerator-type=v5p-8 --project=p"
    assert fake_gcloud.main([*line.split(), flag]) == 2
    assert fake_gcloud.main(line.split()) == 0
