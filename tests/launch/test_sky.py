"""Managed jobs of SkyPilot, and what SkyPilot itself makes of them: its code
loads the jobs, reads the command lines, and its optimizer chooses machines, from a
catalog of this test's. `.ci/sky` runs that, in an environment with SkyPilot."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from gke_support import changed

from diloco_jax.launch.manifests import yaml_text
from diloco_jax.launch.sky import deployment
from diloco_jax.launch.spec import make_spec

NOW = 1_800_000_000
PLACE = {"coordinator_address": "two.diloco.internal", "dns_zone": "diloco"}


def tasks(config, **settings):
    spec = make_spec(changed(config, **PLACE, **settings), "two.py", "sky")
    files = deployment(spec, "certificates", "folder", NOW).files
    return {name: yaml.safe_load(text) for name, text in files.items()}


# ---- SkyPilot itself, in another Python's environment --------------------------------

VARIABLE = "DILOCO_SKY_PYTHON"
"""Names that Python; `.ci/sky` makes one."""
WAIT_S = 200.0
PROGRAM = Path(__file__).with_name("ask_sky.py")

needs_sky = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"no SkyPilot: {VARIABLE} names no Python"
)


def place(made, folder):
    """Write these jobs; return their files."""
    for name, task in made.items():
        (folder / name).write_text(yaml_text(task))
    return [str(folder / name) for name in made if name.endswith(".yaml")]


def ask(folder, *words):
    """Return what `ask_sky.py` prints; an error of SkyPilot's is an AssertionError."""
    done = subprocess.run(
        [os.environ[VARIABLE], PROGRAM, *words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def chosen(made, folder):
    """Return what SkyPilot makes of these jobs."""
    return ask(folder, "choose", *place(made, folder))


@needs_sky
def test_sky_loads_and_optimizes_every_job(config, tmp_path):
    zones = {"v5p": "us-east5-a,us-central1-a", "v6e.b": "us-east5-b"}
    chose = chosen(tasks(config, zones=zones, subnetwork="inner"), tmp_path)
    v5p, v6e = chose["two-v5p"], chose["two-v6e-b"]
    # The next one is for when the first is full.
    assert (v5p["zones"], v5p["spot"]) == (["us-east5-a", "us-central1-a"], False)
    assert (v6e["zones"], v6e["spot"]) == (["us-east5-b"], True)
    assert (v5p["accelerators"], v5p["instance"]) == ({"tpu-v5p-16": 1}, "TPU-VM")
    assert v5p["args"] == {"runtime_version": "v2-alpha-tpuv5"}
    assert v6e["accelerators"] == {"tpu-v6e-16": 1}
    assert v6e["args"] == {"runtime_version": "v2-alpha-tpuv6e"}
    coordinator = chose["two-coordinator"]
    assert coordinator["instance"] == "n2-highmem-16"
    assert coordinator["volumes"] == ["two-coordinator"]
    for job in chose.values():
        assert job["labels"]["diloco-run"] == "two"
        own = {"vpc_name": "default", "subnet_names": "inner"}
        assert job["config"]["gcp"] == own


@needs_sky
@pytest.mark.parametrize("inside", [False, True])
def test_sky_reads_every_command_line(config, tmp_path, inside):
    placed = changed(config, **PLACE, internal_ips=inside)
    spec = make_spec(placed, "two.py", "sky")
    made = deployment(spec, "certificates", str(tmp_path), NOW)
    place({name: None for name in made.files if name.endswith(".yaml")}, tmp_path)
    jobs = [resource for resource in made.resources if resource.job]
    launches = [job.create[0].arguments for job in jobs]
    others = [job.delete.arguments for job in jobs]
    others += [job.logs.arguments for job in jobs]
    lines = [*launches, *others, jobs[0].find.arguments]
    read = ask(tmp_path, "parse", *map(json.dumps, lines))
    names = ["two-coordinator", "two-v5p", "two-v6e-b"]
    assert [line["name"] for line in read] == [*(3 * names), None]
    assert all(line["inside"] == inside for line in read[:3])


@needs_sky
@pytest.mark.parametrize(
    ("field", "value"),
    [("infra", "gcp/us-east5/us-east5-z"), ("accelerators", {"tpu-v6e-17": 1})],
)
def test_the_check_can_fail(config, tmp_path, field, value):
    task = tasks(config)["two-v6e-b.yaml"]
    task["resources"][field] = value
    with pytest.raises(AssertionError, match=r"ResourcesUnavailable|ValueError"):
        chosen({"wrong.yaml": task}, tmp_path)
