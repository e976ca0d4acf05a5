"""Managed jobs of SkyPilot: their fields, and how they are submitted."""

import dataclasses

import pytest
import yaml

from diloco_jax.config import ConfigError
from diloco_jax.launch.order import make_order
from diloco_jax.launch.sky import deployment

NOW = 1_800_000_000
PLACE = {"coordinator_address": "two.diloco.internal", "dns_zone": "diloco"}


def tasks(config, **settings):
    launch = dataclasses.replace(config.launch, **{**PLACE, **settings})
    order = make_order(dataclasses.replace(config, launch=launch), "two.py", "sky")
    files = deployment(order, "certificates", "folder", NOW).files
    return {name: yaml.safe_load(text) for name, text in files.items()}


def test_the_account_that_skypilot_has_reads_the_secrets(cloud, launch, capsys):
    own = {"service_account": "i@p.iam", "coordinator_account": "c@p.iam"}
    assert launch("sky", **PLACE, **own) == 0
    account = "skypilot-v1@my-project.iam.gserviceaccount.com"
    granted = [call for call in cloud.changes() if "add-iam-policy-binding" in call]
    assert len(granted) == 4
    for call in granted:
        assert f"--member=serviceAccount:{account}" in call
    assert f"SkyPilot's machines act as {account}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"purchase": {"v5p": "reserved"}}, "SkyPilot buys no reserved TPUs"),
        ({"coordinator_address": ""}, "launch.coordinator_address must be set"),
        ({"dns_zone": ""}, "launch.dns_zone must be set"),
    ],
)
def test_what_sky_cannot_do_is_said(config, changed, said):
    with pytest.raises(ConfigError) as refused:
        tasks(config, **changed)
    assert said in str(refused.value)


def test_a_shape_without_an_accelerator_type_is_refused(config):
    config.islands["v5p"] = dataclasses.replace(
        config.islands["v5p"], topology="v5p:4x4x12", mesh_fsdp=192, batch_size=192
    )
    with pytest.raises(ConfigError, match="SkyPilot asks for slices by accelerator"):
        tasks(config)


def test_create_submits_every_job_once(cloud, launch):
    assert launch("sky", **PLACE) == 0
    assert [job["job_name"] for job in cloud.jobs] == [
        *("two-coordinator", "two-v5p", "two-v6e-b")
    ]
    assert sorted(cloud.things) == ["disk", "secret"]
    for job in cloud.jobs:
        assert "PRIVATE KEY" not in str(job)
    cloud.changes()
    assert launch("sky", **PLACE) == 0
    assert cloud.changes() == []


def test_a_job_that_failed_is_submitted_anew(cloud, launch):
    launch("sky", **PLACE)
    cloud.set_job("two-v5p", "FAILED")
    cloud.set_job("two-v6e-b", "RECOVERING")
    cloud.set_job("two-coordinator", "SUCCEEDED")
    cloud.changes()
    launch("sky", **PLACE)
    (call,) = cloud.changes()
    assert call[:3] == ["sky", "jobs", "launch"]
    assert call[call.index("--name") + 1] == "two-v5p"


def test_stop_and_delete_cancel_the_jobs(cloud, launch):
    launch("sky", **PLACE)
    assert launch("sky", "stop", **PLACE) == 0
    assert {job["status"] for job in cloud.jobs} == {"CANCELLED"}
    assert launch("sky", "run", **PLACE) == 0
    assert [job["status"] for job in cloud.jobs[3:]] == ["PENDING"] * 3
    assert launch("sky", "delete", **PLACE) == 0
    assert set(cloud.things) == {"disk", "secret"}
    assert launch("sky", "delete", disk=True, **PLACE) == 0
    assert cloud.things == {}


def test_logs_and_results(cloud, launch, capsys):
    launch("sky", **PLACE)
    assert launch("sky", "logs", only=("v5p",), **PLACE) == 0
    assert "logs of two-v5p" in capsys.readouterr().err
    assert launch("sky", "results", **PLACE) == 1
    assert "on the coordinator's disk" in capsys.readouterr().err
