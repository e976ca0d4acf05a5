"""Limits of SkyPilot that docs/sky.md names, asked of SkyPilot itself: as long as these
pass, queued resources of our own are needed. `.ci/sky` runs it."""

import dataclasses
import json

import pytest
from sky_support import ask, needs_sky, place
from test_sky import PLACE, tasks

from diloco_jax.launch import sky
from diloco_jax.launch.spec import make_spec

pytestmark = needs_sky
LAUNCH = ("sky", "jobs", "launch", "--yes", "--name", "two", "--config")


def test_a_job_cannot_say(config, tmp_path):
    fields = {
        "reserved": ("accelerator_args", True),
        "topology": ("accelerator_args", "4x4x12"),
        "tags": ("accelerator_args", ["two"]),
        "remote_identity": ("config", "islands@p.iam.gserviceaccount.com"),
        "use_internal_ips": ("config", True),
        "specific_reservations": ("config", ["ours"]),
    }
    jobs = {"as_it_is.yaml": tasks(config)["two-v6e-b.yaml"]}
    for field, (section, value) in fields.items():
        task = tasks(config)["two-v6e-b.yaml"]
        of_job = {"config": task["config"]["gcp"], **task["resources"]}
        of_job[section][field] = value
        jobs[f"{field}.yaml"] = task
    said = ask(tmp_path, "load", *place(jobs, tmp_path))
    assert said.pop("as_it_is") is None
    assert said.keys() == fields.keys()
    for field, why in said.items():
        assert f"unsupported field '{field}'" in str(why)


def test_no_machine_acts_as_an_account_of_its_own(tmp_path):
    line = [*LAUNCH, "gcp.remote_identity=islands@p.iam.gserviceaccount.com", "a.yaml"]
    with pytest.raises(AssertionError, match=r"not one of|case_insensitive_enum"):
        ask(tmp_path, "parse", json.dumps(line))


def test_it_leaves_queued_slices_buys_no_reserved_ones_and_has_one_account(
    config, tmp_path
):
    said = ask(tmp_path, "provision")
    assert 5990 < said["waits"] < 6100
    assert "Timed out waiting for queued resource" in said["error"]
    assert len(set(said["made"])) == 2
    assert said["deleted"] == 0
    assert said["reserved"] == "TPU VMs do not support reservations yet."
    launch = dataclasses.replace(config.launch, **PLACE)
    spec = make_spec(dataclasses.replace(config, launch=launch), "two.py", "sky")
    assert said["account"] == sky.account(spec)
    for of in ("compute", "tpu", "storage"):
        assert f"roles/{of}.admin" in said["roles"]
