"""A launch with a standby: made, asked, watched, stopped and deleted; and refused."""

import dataclasses
import shlex

import pytest

from diloco_jax.config import Config, ConfigError
from diloco_jax.launch.order import make_order
from diloco_jax.planning.price import price_per_hour

BESIDE = {"standby_zone": "us-east5-b"}
KEPT = [
    "job/two-coordinator-begin",
    "lease/two-mandate",
    "persistentvolumeclaim/two-coordinator",
    "persistentvolumeclaim/two-standby",
    "role/two-mandate",
    "rolebinding/two-mandate",
]
"""Belongings of the run: both disks, and the object that says which one counts."""


def leads(cloud):
    """As if the coordinator had made the Lease, which a launch does not."""
    cloud.set_object("lease/two-mandate")


def test_a_standby_is_made_and_given_back_with_the_rest(cloud, launch):
    assert launch("gke", **BESIDE) == 0
    pool = cloud.things["node pool"]["two-standby"]
    assert pool["--node-locations"] == "us-east5-b"
    assert pool["--machine-type"] == "n2-highmem-16"
    assert (pool["--max-nodes"], pool["--num-nodes"]) == ("1", "0")
    assert pool["--labels"] == "diloco-run=two,diloco-part=standby"
    for kind in ("job", "service", "networkpolicy", "poddisruptionbudget", "secret"):
        suffix = "-certificates" if kind == "secret" else ""
        assert f"{kind}/two-standby{suffix}" in cloud.objects
    leads(cloud)
    cloud.changes()
    assert launch("gke", **BESIDE) == 0
    assert cloud.changes() == []
    assert launch("gke", "delete", **BESIDE) == 0
    assert cloud.things == {}
    assert sorted(cloud.objects) == KEPT
    assert launch("gke", "delete", disk=True, **BESIDE) == 0
    assert cloud.objects == {}


def test_a_standby_elsewhere_is_made_in_its_cluster(cloud, launch, config):
    mandate = dataclasses.replace(config.placement, mandate="gs://bucket/two.mandate")
    object.__setattr__(config, "placement", mandate)
    there = {
        "standby_zone": "us-central1-b",
        "standby_cluster": "us-central1/far",
        "standby_address": "10.30.0.9",
        "coordinator_address": "10.20.0.9",
        "namespace": "train",
    }
    assert launch("gke", **there) == 0
    far = sorted(name for name in cloud.objects if name.startswith("far:"))
    assert far == [
        "far:configmap/two-config",
        "far:job/two-standby",
        "far:namespace/train",
        "far:networkpolicy/two-standby",
        "far:persistentvolumeclaim/two-standby",
        "far:poddisruptionbudget/two-standby",
        "far:secret/two-standby-certificates",
        "far:service/two-standby",
        "far:serviceaccount/two-standby",
    ]
    pool = cloud.things["node pool"]["two-standby"]
    assert (pool["--cluster"], pool["--location"]) == ("far", "us-central1")
    assert not any("two-mandate" in name for name in cloud.objects)
    assert launch("gke", "delete", disk=True, **there) == 0
    assert {name.rpartition(":")[2] for name in cloud.objects} == {"namespace/train"}


def test_stop_ends_both_and_run_starts_both(cloud, launch):
    launch("gke", **BESIDE)
    cloud.changes()
    assert launch("gke", "stop", **BESIDE) == 0
    assert [call[3] for call in cloud.changes()] == [
        *("two-v6e-b", "two-v5p", "two-standby", "two-coordinator"),
    ]
    assert "lease/two-mandate" not in cloud.objects
    assert "rolebinding/two-mandate" in cloud.objects
    assert launch("gke", "run", **BESIDE) == 0
    assert {"job/two-coordinator", "job/two-standby"} <= set(cloud.objects)


def test_whoever_leads_is_asked(cloud, launch, act, monkeypatch, capsys):
    launch("gke", **BESIDE)
    shown = []
    monkeypatch.setattr("diloco_jax.launch.command._render", shown.append)
    cloud.set_object("job/two-coordinator", follows="two-standby:7077")
    cloud.set_object("job/two-standby", phase="draining")
    cloud.changes()
    assert act("gke", "status", **BESIDE) == 0
    assert shown == [{"phase": "draining"}]
    first, second = cloud.changes()
    assert first[2] == "job/two-coordinator"
    assert second[second.index("--") + 1 :][:3] == [
        *("diloco", "status", "two-standby.default.svc:7077")
    ]
    cloud.set_object("job/two-standby", follows="two-coordinator:7077")
    capsys.readouterr()
    assert act("gke", "status", **BESIDE) == 1
    said = capsys.readouterr().err
    assert said.count("ask the primary") == 2
    assert act("gke", "logs", **BESIDE) == 0
    assert "logs of ['job/two-standby']" in capsys.readouterr().err


def test_both_disks_are_copied(cloud, launch, act, tmp_path):
    launch("gke", **BESIDE)
    cloud.changes()
    assert act("gke", "results", **BESIDE) == 0
    copied = [call[2:4] for call in cloud.changes() if call[1] == "cp"]
    assert copied == [
        ["two-reader:/var/lib/diloco/run", f"{tmp_path}/run/results"],
        ["two-standby-reader:/var/lib/diloco/run", f"{tmp_path}/run/results-standby"],
    ]
    assert not any(name.startswith("pod/") for name in cloud.objects)


def condition(cloud, name, type_):
    conditions = [{"type": type_, "status": "True"}]
    cloud.set_object(f"job/{name}", status={"conditions": conditions})


def test_a_watch_ends_once_neither_goes_on(cloud, launch, act, capsys):
    """The one that follows ends at once, the one that leads tells late islands."""
    launch("gke", **BESIDE)
    leads(cloud)

    def standby_takes_over():
        cloud.set_object("job/two-coordinator", follows="two-standby:7077")

    def follower_is_told():
        # By a mandate that is over; its run may have been given more tokens since.
        condition(cloud, "two-coordinator", "Complete")
        cloud.fail("kubectl exec job/two-standby", 1, "no route to host")

    def over():
        assert cloud.things, "nothing is released while one goes on"
        condition(cloud, "two-standby", "Complete")

    then = [standby_takes_over, follower_is_told, over]
    assert act("gke", "watch", then=then, **BESIDE) == 0
    assert cloud.things == {}
    assert sorted(cloud.objects) == KEPT


def test_a_watch_says_what_is_lost_and_goes_on_while_one_leads(
    cloud, launch, act, capsys
):
    launch("gke", **BESIDE)

    def lost():
        cloud.set_object("job/two-coordinator", follows="nobody")
        condition(cloud, "two-standby", "Failed")

    def both():
        said = capsys.readouterr().err
        assert "job,service" in said
        assert "two-standby is two-standby Failed" in said
        assert "the run has one coordinator less" in said
        condition(cloud, "two-coordinator", "Failed")

    def done():
        said = capsys.readouterr().err
        assert "nobody leads it" in said
        assert cloud.things
        cloud.set_object("job/two-coordinator", status={}, phase="done", follows="")

    assert act("gke", "watch", then=[lost, both, done], **BESIDE) == 0
    assert cloud.things == {}


def test_the_second_machine_is_in_the_price(cloud, act, capsys, config):
    prices = "v5p=4,v6e=2,coordinator=1"
    assert act("gke", "create", price=prices, **BESIDE) == 0
    # 8 and 16 chips, and two machines.
    assert "price per hour: 66.00" in capsys.readouterr().err
    paired = dataclasses.replace(
        config, launch=dataclasses.replace(config.launch, **BESIDE)
    )
    prices = {"v5p": 4.0, "v6e": 2.0, "coordinator": 1.5}
    found = price_per_hour(paired, prices)
    assert (found["coordinator"], found["standby"]) == (1.5, 1.5)
    assert "standby" not in price_per_hour(config, prices)


def test_one_zone_for_both_is_remarked(cloud, launch, capsys):
    assert launch("gke", standby_zone="us-east5-a") == 0
    said = capsys.readouterr().err
    assert "note: launch.standby_zone = 'us-east5-a' is the coordinator's too" in said
    launch("gke", **BESIDE)
    assert "is the coordinator's too" not in capsys.readouterr().err


def test_a_dry_run_shows_the_commands_of_both(config, cloud, capsys):
    order = make_order(changed(config, **BESIDE), "two.py", "gke")
    from diloco_jax.launch.gke import deployment

    made = deployment(order, "certificates", "folder", 0)
    lines = [shlex.join(r.create.arguments) for r in made.resources]
    at = [n for n, line in enumerate(lines) if "standby" in line]
    assert at
    (begins,) = [n for n, line in enumerate(lines) if "folder/coordinator.yaml" in line]
    (follows,) = [n for n, line in enumerate(lines) if "folder/standby.yaml" in line]
    assert begins < follows


# ---- refused ------------------------------------------------------------------


def changed(config: Config, placement=None, **settings):
    return dataclasses.replace(
        config,
        launch=dataclasses.replace(config.launch, **settings),
        placement=dataclasses.replace(config.placement, **(placement or {})),
    )


FAR = {
    "standby_zone": "us-central1-b",
    "standby_cluster": "us-central1/far",
    "standby_address": "10.30.0.9",
    "coordinator_address": "10.20.0.9",
}
OBJECT = {"mandate": "gs://bucket/two.mandate"}


@pytest.mark.parametrize(
    ("settings", "placement", "said"),
    [
        (
            BESIDE,
            {"checkpoints": "gs://bucket/run"},
            "placement.checkpoints = 'gs://bucket/run' and launch.standby_zone = "
            "'us-east5-b'",
        ),
        (BESIDE, {"first_from": "v5p"}, "placement.first_from = 'v5p' and launch.stan"),
        (
            BESIDE,
            {"standby": "two.example:7000", **OBJECT},
            "placement.standby = 'two.example:7000' and launch.standby_zone",
        ),
        (BESIDE, {"mandate": "/shared/mandate"}, "pods share no folder"),
        (BESIDE, {"mandate": "kubernetes:a/b"}, "makes a Lease of its own"),
        ({"standby_cluster": "a/b"}, {}, "launch.standby_cluster = 'a/b' and launch."),
        (
            {"standby_address": "10.0.0.9"},
            {},
            "set its zone, or leave launch.standby_a",
        ),
        (
            {"standby_zone": "us-central1-b"},
            {},
            "launch.standby_zone = 'us-central1-b' is outside launch.location = "
            "'us-east5'",
        ),
        ({"standby_zone": "us-east5"}, {}, "such as 'us-east5-a'"),
        (FAR, {}, "a Lease is in one cluster, and goes with it"),
        (
            {**FAR, "standby_zone": "us-east5-b"},
            OBJECT,
            "is outside launch.standby_cluster = 'us-central1/far'",
        ),
        ({**FAR, "standby_cluster": "far"}, OBJECT, "launch.standby_cluster = 'far';"),
        (
            {**FAR, "standby_address": ""},
            OBJECT,
            "launch.standby_address is empty, and v5p, v6e.b, coordinator run in other "
            "clusters than the standby",
        ),
        (
            {**FAR, "coordinator_address": ""},
            OBJECT,
            "launch.coordinator_address is empty, and standby run in other clusters",
        ),
        (
            {**FAR, "workers_apart": True},
            {"workers": 2, **OBJECT},
            "the workers' pods are not reached from another cluster",
        ),
        ({**BESIDE, "name": "x" * 31}, {}, "set a shorter launch.name"),
    ],
)
def test_a_standby_that_cannot_be_is_refused(config, settings, placement, said):
    with pytest.raises(ConfigError) as refused:
        make_order(changed(config, placement, **settings), "two.py", "gke")
    assert said in str(refused.value)


@pytest.mark.parametrize("on", ["sky", "tpu_vm"])
def test_only_gke_makes_one(config, on):
    settings = {**BESIDE, "coordinator_address": "two.internal", "dns_zone": "diloco"}
    with pytest.raises(ConfigError) as refused:
        make_order(changed(config, **settings), "two.py", on)
    said = f"launch.standby_zone = 'us-east5-b' with --on {on}: only --on gke makes"
    assert said in str(refused.value)


def test_a_run_that_an_island_begins_has_no_standby(config):
    with pytest.raises(
        ConfigError, match=r"--init from-island:v5p and launch\.standby"
    ):
        make_order(changed(config, **BESIDE), "two.py", "gke", "from-island:v5p")


def test_an_island_may_not_take_the_standbys_name(config):
    islands = {"standby": config.islands["v5p"]}
    config = dataclasses.replace(config, islands=islands)
    zones = {"standby": "us-east5-a"}
    with pytest.raises(ConfigError, match=r"two parts.* would be called 'two-standby'"):
        make_order(changed(config, zones=zones, purchase={}, **BESIDE), "two.py", "gke")
