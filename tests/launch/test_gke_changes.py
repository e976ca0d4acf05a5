"""A launched run gets changed configs and certificates."""

import dataclasses
import json

from diloco_jax.wire.certificates import add


def test_pods_get_the_config_as_it_is_now(cloud, launch, config):
    launch("gke")
    cloud.changes()
    config.islands["new"] = dataclasses.replace(config.islands["v5p"], batch_size=8)
    zones = {**config.launch.zones, "new": "us-east5-a"}
    assert launch("gke", only=("new",), zones=zones) == 0
    made, first, *others = [call for call in cloud.changes() if call[0] == "kubectl"]
    assert made[1:5] == ["create", "secret", "generic", "two-new-certificates"]
    assert first[1] == "apply"
    assert first[3].endswith("/config.yaml")
    assert [call[3].rpartition("/")[2] for call in others] == ["two-new.yaml"]
    held = json.loads(cloud.objects["configmap/two-config"]["data"]["config.json"])
    assert held["islands"]["new"]["batch_size"] == 8
    assert launch("gke", zones=zones) == 0
    assert cloud.changes() == []


def test_a_failed_update_is_made_up_for(cloud, launch, config):
    launch("gke")
    config.islands["v5p"] = dataclasses.replace(config.islands["v5p"], batch_size=8)
    cloud.fail("kubectl apply", 1, "connection refused")
    assert launch("gke", "run") == 1
    cloud.fail("", 0, "")
    cloud.changes()
    assert launch("gke", "run") == 0
    assert cloud.changes()[0][3].endswith("/config.yaml")


def test_renewed_certificates_reach_the_cluster(cloud, launch, tmp_path):
    launch("gke")
    cloud.changes()
    pem = tmp_path / "run/certificates/coordinator.pem"
    before = pem.read_bytes()
    add(pem.parent, ["another.name"], 365)
    assert pem.read_bytes() != before
    assert launch("gke") == 0
    assert [call[1:5] for call in cloud.changes()] == [
        ["delete", "secret", "two-coordinator-certificates", "--ignore-not-found"],
        ["create", "secret", "generic", "two-coordinator-certificates"],
    ]
