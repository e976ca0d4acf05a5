"""Launches refused before anything is asked of the cloud, and machines' config."""

import dataclasses
import json
from pathlib import Path

import pytest
from gke_support import changed

from diloco_jax import compilation
from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.config.config import check_name
from diloco_jax.config.loading import read_config_json
from diloco_jax.launch.spec import DATA, make_spec

ZONES = {"v5p": "us-east5-a", "v6e.b": "us-east5-b"}
AWAY = {"v5p": "us-east5-a", "v6e.b": "us-central1-b"}
FAR = {
    "zones": AWAY,
    "clusters": {"v6e.b": "us-central1/far"},
    "coordinator_address": "10.20.0.9",
}
PLACE = {"coordinator_address": "two.diloco.internal", "dns_zone": "diloco"}
APART = {"workers": 2}
REFUSED = [
    (
        "gke",
        {"project": "", "cluster": "", "zones": {}},
        "launch.project, launch.cluster, launch.zones.v5p, launch.zones.v6e.b must be",
    ),
    ("gke", {"zones": {}}, "zones={'v5p': 'us-east5-a', 'v6e.b': 'us-east5-a'} in the"),
    ("tpu_vm", {"project": "My Project"}, "'My Project' is no project id; `gcloud pro"),
    (
        "sky",
        {**PLACE, "zones": {**ZONES, "v6e": "us-east5-a"}},
        "launch.zones.v6e = 'us-east5-a': the run has no such island "
        r"\(did you mean 'v6e.b'\?\); it has v5p, v6e.b",
    ),
    ("tpu_vm", {"purchase": {"v4": "spot"}}, "purchase.v4 = 'spot': the run has no s"),
    *(
        ("tpu_vm", {"zones": {**ZONES, "v5p": zone}}, f"zones.v5p = {zone!r}: .*'us-c")
        for zone in (
            "",
            "us-east5",
            "us-east5-7",
            "east5-a",
            "US-east5-a",
            "gcp/a-b1-c",
        )
    ),
    ("tpu_vm", {"purchase": {"v5p": "cheap"}}, "'cheap'; write 'on_demand', 'spot',"),
    ("tpu_vm", {"purchase": {"v5p": "spot:x"}}, "'spot:x'; write"),
    ("tpu_vm", {"purchase": {"v5p": "reserved:mine"}}, "that fits; write 'reserved'"),
    ("gke", {"purchase": {"v5p": "reserved"}}, "write 'reserved:NAME'"),
    ("sky", {**PLACE, "purchase": {"v5p": "reserved"}}, "SkyPilot buys no reserved T"),
    ("sky", {"dns_zone": "diloco"}, "launch.coordinator_address must be set"),
    ("sky", {"coordinator_address": "c.internal"}, "launch.dns_zone must be set"),
    (
        "tpu_vm",
        {"zones": {**ZONES, "v5p": "us-east5-a,us-east5-b"}},
        "queued resource waits in one",
    ),
    ("sky", {**PLACE, "zones": {**ZONES, "v5p": "a-b1-a,a-b1-a"}}, "up to 9 different"),
    ("sky", {**PLACE, "zones": {**ZONES, "v5p": "a-b1-a,"}}, "'a-b1-a,': '' is no zo"),
    *(
        ("tpu_vm", {"image": image}, f"{image!r} does not .* docker.io/{image} if")
        for image in ("diloco", "diloco:1", "me/diloco:1")
    ),
    *(
        ("tpu_vm", {"data": data}, f"launch.data = {data!r} is no gs://BUCKET/FOLDER")
        for data in ("/data/text", "gs://bucket", "gs://bucket/")
    ),
    ("tpu_vm", {"name": "x" * 40}, "set a shorter launch.name"),
    ("tpu_vm", {"name": "2nd"}, "cannot name machines"),
    (
        "gke",
        {"zones": AWAY},
        "zones.v6e.b = 'us-central1-b' is outside launch.location = 'us-east5', .*"
        r"choose a zone of us-east5 \(v6e is known in us-east5-a, us-east5-b\)",
    ),
    # A zonal cluster has nodes in other zones of its region, too.
    (
        "gke",
        {"zones": AWAY, "location": "us-east5-a"},
        "launch.location = 'us-east5-a'",
    ),
    ("gke", {"coordinator_zone": "us-east4-a"}, "zone = 'us-east4-a' is outside"),
    ("gke", {"coordinator_zone": "us-east5"}, "'us-east5' is no zone; write a re"),
    ("gke", {**FAR, "coordinator_address": ""}, "is empty, and v6e.b run in other clu"),
    ("gke", {**FAR, "clusters": {"v6e.b": "far"}}, "write 'LOCATION/CLUSTER' or"),
    ("gke", {"clusters": {"v6e": "a/b"}}, "clusters.v6e = 'a/b': the run has no such"),
    (
        "gke",
        {**FAR, "clusters": {"v6e.b": "europe-west4/far"}},
        "'us-central1-b' is outside launch.clusters.v6e.b = 'europe-west4/far'",
    ),
    ("tpu_vm", APART, "only --on gke makes machines for workers"),
    ("gke", {**APART, **FAR}, "v6e.b run in other clusters"),
]


def with_run(config, section, **fields):
    return config.replace({f"{section}.{name}": v for name, v in fields.items()})


@pytest.mark.parametrize(("on", "settings", "said"), REFUSED)
def test_bad_settings_are_refused_with_a_remedy(config, on, settings, said):
    with pytest.raises(ConfigError, match=said):
        make_spec(changed(config, **settings), "configs/two.py", on)


@pytest.mark.parametrize(
    ("on", "island", "said"),
    [
        ("gke", {"topology": ""}, "islands.v5p.topology is empty"),
        ("gke", {"topology": "v5p:2x2x1"}, "8 devices, and v5p:2x2x1 has 4 chips"),
        ("gke", {"topology": "v5p:2x3x1"}, "does not exist"),
        ("gke", {"hosts": 4}, "islands.v5p.hosts = 4, and v5p:2x2x2 has 2"),
        (
            "sky",
            {"topology": "v5p:4x4x12", "mesh_fsdp": 192, "batch_size": 192},
            "SkyPilot asks for slices by accelerator",
        ),
        (
            "sky",
            {"topology": "tpu7x:2x2x1"},
            "the Cloud TPU API, and so --on sky, does not have tpu7x; launch with --on",
        ),
        ("tpu_vm", {"topology": "tpu7x:2x2x1"}, "and so --on tpu_vm, does not have"),
    ],
)
def test_an_island_that_cannot_be_placed_is_refused(config, on, island, said):
    with pytest.raises(ConfigError, match=said):
        make_spec(
            changed(with_run(config, "islands.v5p", **island), **PLACE), "two.py", on
        )


@pytest.mark.parametrize(
    ("name", "made"), [("V6E-B", "'two-v6e-b'"), ("coordinator", "'two-coordinator'")]
)
def test_two_parts_of_a_run_have_two_names(config, name, made):
    config.islands[name] = IslandConfig(topology="v6e:1x1")
    config.launch.zones[name] = "us-east5-a"
    with pytest.raises(ConfigError, match=f"would be called {made}"):
        make_spec(config, "two.py", "gke")


@pytest.mark.parametrize(
    ("on", "settings"),
    [
        ("tpu_vm", {"purchase": {"v5p": "reserved"}}),
        ("gke", {"purchase": {"v5p": "reserved:mine"}}),
        ("tpu_vm", {"image": "docker.io/me/diloco:1"}),
        ("tpu_vm", {"image": "registry.example:5000/diloco"}),
        ("tpu_vm", {"zones": AWAY}),  # Queued resources are in any zone.
        ("gke", {"location": "us-east5-a"}),
        ("tpu_vm", {"zones": {**ZONES, "v5p": "us-central1-ai1a"}}),
        ("tpu_vm", {"zones": {**ZONES, "v5p": "northamerica-northeast12-b"}}),
    ],
)
def test_what_each_engine_can_do_is_not_refused(config, on, settings):
    make_spec(changed(config, **settings), "two.py", on)


def test_everything_is_named_after_the_run(config):
    spec = make_spec(config, "configs/two.py", "gke")
    assert [i.resource for i in spec.islands] == ["two-v5p", "two-v6e-b"]
    unnamed = changed(config, name="")
    assert make_spec(unnamed, "configs/my_run.py", "gke").name == "my-run"
    with pytest.raises(ConfigError, match="name is empty"):
        make_spec(unnamed, "runs/x/config.json", "gke")


def test_workers_are_told_their_addresses(config):
    spec = make_spec(changed(config, **APART), "two.py", "gke")
    hosts = json.loads(spec.config_json)["placement"]
    assert hosts["worker_addresses"] == [
        "two-worker-0.default.svc:7077",
        "two-worker-1.default.svc:7077",
    ]
    placed = config.replace({"workers": 2, "worker_addresses": ("a:1", "b:1")})
    with pytest.raises(ConfigError, match="a launch places workers itself"):
        make_spec(placed, "two.py", "gke")


def test_machines_read_the_config_without_what_is_of_this_machine(config, tmp_path):
    here = {"certificates": "here", "advertise": "here:1", "time_budget_s": 7.0}
    config = config.replace(here)
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


TOKENIZER = "/me/words/tokenizer.json"


@pytest.mark.parametrize(
    ("copied", "data", "read"),
    [
        ("gs://b/text", {"paths": ("/home/me/text",)}, {"paths": [DATA]}),
        (
            "gs://b/all",
            {
                "paths": ("/me/code", "/me/prose"),
                "weights": (3.0, 1.0),
                "tokenizer": TOKENIZER,
            },
            {
                "paths": [f"{DATA}/code", f"{DATA}/prose"],
                "weights": [3.0, 1.0],
                "tokenizer": f"{DATA}/tokenizer.json",
            },
        ),
        ("", {"paths": ("gs://b/code",)}, {"paths": ["gs://b/code"]}),
        (
            "gs://b/all",
            {"paths": ("gs://b/code", "/me/prose"), "weights": (3.0, 1.0)},
            {"paths": ["gs://b/code", f"{DATA}/prose"]},
        ),
    ],
)
def test_machines_find_text_in_the_bucket(config, copied, data, read):
    given = with_run(changed(config, data=copied), "data", digest="d", **data)
    found = json.loads(make_spec(given, "two.py", "tpu_vm").config_json)["run"]["data"]
    assert found["digest"] == "d"
    assert {field: found[field] for field in read} == read


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("data", {"paths": ("/me/text",)}, "launch.data = 'gs://BUCKET/FOLDER'"),
        ("data", {"tokenizer": TOKENIZER}, "data.tokenizer = "),
        ("model", {"factory": __file__ + ":model"}, "'package.module:name'"),
    ],
)
def test_files_that_are_here_only_are_refused(config, section, fields, said):
    with pytest.raises(ConfigError, match=said):
        make_spec(with_run(config, section, **fields), "two.py", "tpu_vm")
    # It may be one of the image.
    make_spec(with_run(config, "model", factory="/no/such.py:model"), "two.py", "gke")


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


def test_islands_of_a_launch_share_a_cache_and_others_have_their_own(config):
    """An entry is code. The coordinator's arguments name no cache at all."""
    config = config.replace("checkpoints", "gs://b/run")
    placement = config.placement
    spec = make_spec(changed(config), "two.py", "gke")
    shared = "gs://b/run/islands/_jax-cache/_shared"
    for island in spec.islands:
        arguments = spec.island_arguments(island, "c:1", 10.0)
        assert arguments[-2:] == ("--cache", shared)
    assert "--cache" not in spec.coordinator_arguments("c:1")
    own = [compilation.of_island(placement, Path("w"), name) for name in ("a", "b")]
    assert own == [f"gs://b/run/islands/_jax-cache/{name}" for name in ("a", "b")]
    with pytest.raises(ConfigError, match="island name '_shared'"):
        check_name("_shared")
    for checkpoints in ("", "s3://b/run"):
        none = dataclasses.replace(placement, checkpoints=checkpoints)
        assert compilation.of_launch(none) == ""
        assert compilation.of_island(none, Path("w"), "a") == "w/jax-cache"
