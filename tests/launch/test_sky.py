"""Managed jobs of SkyPilot: their fields, and how they are submitted."""

import dataclasses

import pytest
import yaml

from diloco_jax.config import ConfigError
from diloco_jax.launch.sky import deployment
from diloco_jax.launch.spec import make_spec

NOW = 1_800_000_000
PLACE = {"coordinator_address": "two.diloco.internal", "dns_zone": "diloco"}


def tasks(config, **settings):
    launch = dataclasses.replace(config.launch, **{**PLACE, **settings})
    spec = make_spec(dataclasses.replace(config, launch=launch), "two.py", "sky")
    files = deployment(spec, "certificates", "folder", NOW).files
    return {name: yaml.safe_load(text) for name, text in files.items()}


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
