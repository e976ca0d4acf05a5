"""Launches refused before anything is asked of the cloud, and machines' arguments."""

import dataclasses
import json

import pytest

from diloco_jax.config import ConfigError, DataConfig, IslandConfig
from diloco_jax.config.loading import read_config_json
from diloco_jax.launch.spec import DATA, make_spec


def changed(config, **settings):
    launch = dataclasses.replace(config.launch, **settings)
    return dataclasses.replace(config, launch=launch)


def with_island(config, name="v5p", **fields):
    island = dataclasses.replace(config.islands.get(name, IslandConfig()), **fields)
    return dataclasses.replace(config, islands={**config.islands, name: island})


def refusal(config, on="tpu_vm", path="configs/two.py"):
    with pytest.raises(ConfigError) as error:
        make_spec(config, path, on)
    return str(error.value)


def test_everything_is_named_after_the_run(config):
    spec = make_spec(config, "configs/two.py", "gke")
    assert [i.resource for i in spec.islands] == ["two-v5p", "two-v6e-b"]
    assert [i.name for i in spec.islands] == ["v5p", "v6e.b"]
    assert spec.coordinator == "two-coordinator"
    unnamed = make_spec(changed(config, name=""), "configs/my_run.py", "gke")
    assert unnamed.name == "my-run"


def test_all_settings_that_are_missing_are_named_at_once(config):
    lacking = changed(config, project="", cluster="", zones={})
    said = refusal(lacking, on="gke")
    fields = "project, launch.cluster, launch.zones.v5p, launch.zones.v6e.b"
    assert f"launch.{fields} must be set" in said
    assert "--launch.project, --launch.cluster, zones={'v5p': 'us-east5-a'," in said


def test_bad_settings_are_refused_with_a_remedy(config):
    assert "gcloud projects list" in refusal(changed(config, project="My Project"))
    assert "zones={'v5p'" in refusal(changed(config, zones={"v6e.b": "us-east5-b"}))
    zones = {**config.launch.zones, "v4": "x"}
    assert "the islands are v5p, v6e.b" in refusal(changed(config, zones=zones))
    assert "'reserved:NAME'" in refusal(changed(config, purchase={"v5p": "cheap"}))
    assert "'spot:x'; write" in refusal(changed(config, purchase={"v5p": "spot:x"}))
    reserved = changed(config, purchase={"v5p": "reserved"})
    make_spec(reserved, "two.py", "tpu_vm")
    assert "write 'reserved:NAME'" in refusal(reserved, on="gke")
    named = changed(config, purchase={"v5p": "reserved:mine"})
    assert "write 'reserved'" in refusal(named, on="tpu_vm")
    make_spec(named, "two.py", "gke")
    for image in ("diloco", "diloco:1", "me/diloco:1"):
        said = refusal(changed(config, image=image))
        assert f"launch.image = {image!r}" in said
        assert f"docker.io/{image}" in said
    for image in ("docker.io/me/diloco:1", "registry.example:5000/diloco"):
        make_spec(changed(config, image=image), "two.py", "tpu_vm")
    for data in ("/data/text", "gs://bucket", "gs://bucket/"):
        assert "gs://BUCKET/FOLDER" in refusal(changed(config, data=data))
    assert "launch.name is empty" in refusal(
        changed(config, name=""), path="runs/x/config.json"
    )
    assert "set a shorter launch.name" in refusal(changed(config, name="x" * 40))
    assert "cannot name machines" in refusal(changed(config, name="2nd"))


@pytest.mark.parametrize("location", ["us-east5", "us-east5-a"])
def test_zones_are_those_of_the_clusters_region(config, location):
    # A zonal cluster has nodes in other zones of its region, too.
    config = changed(config, location=location)
    make_spec(config, "two.py", "gke")
    zones = {**config.launch.zones, "v6e.b": "us-central1-b"}
    elsewhere = changed(config, zones=zones)
    said = refusal(elsewhere, on="gke")
    assert "launch.zones.v6e.b = 'us-central1-b'" in said
    assert f"launch.location = {location!r}" in said
    assert "choose a zone of us-east5 (v6e is known in us-east5-a, us-east5-b)" in said
    # Queued resources are in any zone.
    make_spec(elsewhere, "two.py", "tpu_vm")
    said = refusal(changed(config, coordinator_zone="us-east4-a"), on="gke")
    assert "launch.coordinator_zone = 'us-east4-a' is outside" in said
    said = refusal(changed(config, coordinator_zone="us-east5"), on="gke")
    assert "is a region" in said
    assert "such as 'us-east5-a'" in said


def test_an_islands_slice_must_fit_its_mesh(config):
    said = refusal(with_island(config, topology=""))
    assert "islands.v5p.topology is empty" in said
    said = refusal(with_island(config, topology="v5p:2x2x1"))
    assert "8 devices" in said
    assert "v5p:2x2x1 has 4 chips" in said
    assert "does not exist" in refusal(with_island(config, topology="v5p:2x3x1"))
    said = refusal(with_island(config, hosts=4))
    assert "islands.v5p.hosts = 4, and v5p:2x2x2 has 2" in said
    make_spec(with_island(config, hosts=2), "two.py", "gke")


def test_workers_have_machines_of_their_own_only_where_that_is_made(config):
    apart = placed(config, workers=2)
    spec = make_spec(apart, "two.py", "gke")
    hosts = json.loads(spec.config_json)["placement"]
    assert hosts["worker_addresses"] == [
        "two-worker-0.default.svc:7077",
        "two-worker-1.default.svc:7077",
    ]
    assert "only --on gke makes" in refusal(apart, on="tpu_vm")
    far = changed(
        apart,
        zones={"v5p": "us-east5-a", "v6e.b": "us-central1-b"},
        clusters={"v6e.b": "us-central1/far"},
        coordinator_address="10.20.0.9",
    )
    assert "v6e.b run in other clusters" in refusal(far, on="gke")
    by_hand = placed(config, workers=2, worker_addresses=("a:1", "b:1"))
    assert "a launch places workers itself" in refusal(by_hand, on="gke")


def placed(config, **changes):
    placement = dataclasses.replace(config.placement, **changes)
    return dataclasses.replace(config, placement=placement)


def test_two_parts_of_one_name_are_refused(config):
    twin = with_island(config, "V6E-B", topology="v6e:1x1")
    zones = {**config.launch.zones, "V6E-B": "us-east5-a"}
    assert "would be called 'two-v6e-b'" in refusal(changed(twin, zones=zones))
    namesake = with_island(config, "coordinator", topology="v6e:1x1")
    zones = {**config.launch.zones, "coordinator": "us-east5-a"}
    assert "'two-coordinator'" in refusal(changed(namesake, zones=zones))


def test_machines_read_the_config_without_what_is_of_this_machine(config, tmp_path):
    placement = dataclasses.replace(
        config.placement, certificates="here", advertise="here:1", time_budget_s=7.0
    )
    config = dataclasses.replace(config, placement=placement)
    spec = make_spec(config, "two.py", "tpu_vm")
    path = tmp_path / "config.json"
    path.write_text(spec.config_json)
    read = read_config_json(path)
    assert read.run.fingerprint() == config.run.fingerprint()
    assert [island.hosts for island in read.islands.values()] == [2, 4]
    assert read.islands["v5p"] == dataclasses.replace(config.islands["v5p"], hosts=2)
    assert read.placement.time_budget_s == 7.0
    assert (read.placement.workdir, read.placement.certificates) == ("", "")
    assert str(tmp_path) not in spec.config_json


def test_text_of_this_machine_must_be_in_a_bucket(config):
    data = DataConfig(paths=("/home/me/text",), digest="d")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, data=data))
    assert "launch.data = 'gs://BUCKET/FOLDER'" in refusal(config)
    spec = make_spec(changed(config, data="gs://b/text"), "two.py", "tpu_vm")
    assert json.loads(spec.config_json)["run"]["data"]["paths"] == [DATA]
    assert json.loads(spec.config_json)["run"]["data"]["digest"] == "d"


def test_machines_find_a_mixture_and_a_tokenizer_in_the_bucket(config):
    def with_data(**fields):
        data = DataConfig(digest="d", **fields)
        run = dataclasses.replace(config.run, data=data)
        return dataclasses.replace(config, run=run)

    paths, tokenizer = ("/me/code", "/me/prose"), "/me/words/tokenizer.json"
    mixed = with_data(paths=paths, weights=(3.0, 1.0), tokenizer=tokenizer)
    spec = make_spec(changed(mixed, data="gs://b/all"), "two.py", "tpu_vm")
    data = json.loads(spec.config_json)["run"]["data"]
    assert data["paths"] == [f"{DATA}/code", f"{DATA}/prose"]
    assert data["weights"] == [3.0, 1.0]
    assert data["tokenizer"] == f"{DATA}/tokenizer.json"
    assert "data.tokenizer = " in refusal(with_data(tokenizer=tokenizer))


def test_machines_read_a_bucket_where_it_is(config):
    def paths(settings, *given, **fields):
        data = DataConfig(paths=given, digest="d", **fields)
        run = dataclasses.replace(settings.run, data=data)
        spec = make_spec(dataclasses.replace(settings, run=run), "two.py", "tpu_vm")
        return json.loads(spec.config_json)["run"]["data"]["paths"]

    assert paths(config, "gs://b/code") == ["gs://b/code"]
    copied, weights = changed(config, data="gs://b/all"), (3.0, 1.0)
    mixed = paths(copied, "gs://b/code", "/me/prose", weights=weights)
    assert mixed == ["gs://b/code", f"{DATA}/prose"]


def test_a_model_in_a_file_that_is_here_only_is_refused(config, tmp_path):
    file = tmp_path / "mine.py"

    def with_factory(name):
        model = dataclasses.replace(config.run.model, factory=name)
        run = dataclasses.replace(config.run, model=model)
        return dataclasses.replace(config, run=run)

    # It may be one of the image.
    make_spec(with_factory(f"{file}:model"), "configs/two.py", "gke")
    file.touch()
    found = refusal(with_factory(f"{file}:model"))
    assert f"model.factory = '{file}:model'" in found
    assert "'package.module:name'" in found


def test_weights_are_read_where_the_coordinator_is(config):
    assert make_spec(config, "two.py", "gke").init_arguments() == ("--init",)
    source = "hf:gs://bucket/weights"
    spec = make_spec(config, "two.py", "tpu_vm", source)
    assert spec.init_arguments() == ("--init", source)
    for kind in ("hf", "run"):
        here = f"{kind}:/home/me/folder"
        with pytest.raises(ConfigError) as refused:
            make_spec(config, "two.py", "gke", here)
        said = str(refused.value)
        assert f"--init {here}: /home/me/folder is a folder of this machine" in said
        assert "gcloud storage rsync -r /home/me/folder gs://" in said
        assert f"--init {kind}:gs://BUCKET/FOLDER" in said
    with pytest.raises(ConfigError, match="write hf:DIR"):
        make_spec(config, "two.py", "gke", "gs://bucket/weights")
