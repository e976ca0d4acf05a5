"""A launched run gets changed configs and certificates."""

import dataclasses
import json

from diloco_jax.wire.certificates import add, revoke
from diloco_jax.wire.principal import island


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


def test_a_revocation_reaches_the_coordinators_pod(cloud, launch, tmp_path):
    launch("gke", workers=2, workers_apart=True)
    cloud.changes()
    folder = tmp_path / "run/certificates"
    stolen = (folder / "island.v5p.pem").read_bytes()
    revoke(folder, island("v5p"))
    apart = {"workers": 2, "workers_apart": True}
    assert launch("gke", only=("coordinator",), **apart) == 0
    changed = [call for call in cloud.changes() if call[1] == "create"]
    names = ("coordinator", "v5p", "worker-0", "worker-1")
    assert sorted(c[4] for c in changed) == [f"two-{n}-certificates" for n in names]
    held = {
        name: sorted(cloud.objects[f"secret/two-{name}-certificates"]["data"])
        for name in (*names, "v6e-b")
    }
    for name, files in held.items():
        serves = name.startswith(("coordinator", "worker"))
        assert ("revoked.txt" in files) == serves, "islands ask the coordinator"
    assert (folder / "island.v5p.pem").read_bytes() != stolen, "it has another key"
    assert launch("gke", **apart) == 0
    assert cloud.changes() == []
    revoke(folder, island("v6e.b"))
    assert launch("gke", **apart) == 0
    assert any("two-coordinator-certificates" in c for c in cloud.changes())
