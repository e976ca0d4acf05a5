"""A launch whose coordinator cannot carry the run is refused before it costs; configs
of this project that are planned can be launched as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from config_support import load_config

from diloco_jax import cli
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.launch.command import LaunchOptions, require_planned, run
from diloco_jax.models.presets import preset

CONFIGS = Path(__file__).parents[2] / "configs"
MIXED = CONFIGS / "mixed_12b.py"
GIVEN = (
    "--launch.project my-project --launch.image r.example/image:1 "
    "--launch.coordinator-zone us-east5-b --dry-run --on "
)
SKY = "sky --launch.coordinator-address c.example --launch.dns-zone z"
GKE = "gke --launch.cluster c --launch.location us-east5"


@pytest.mark.parametrize(
    ("name", "on", "code", "said"),
    [
        ("mixed_toy", SKY, 0, "mixed-toy"),
        ("mixed_toy", GKE, 0, "mixed-toy"),
        ("mixed_12b", SKY, 0, "mixed-12b"),
        # A thousand kilometres apart, and so not of one cluster.
        ("mixed_12b", GKE, 2, "launch.zones.v6e = 'us-central1-b'"),
    ],
)
def test_a_planned_config_is_launchable(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    on: str,
    code: int,
    said: str,
) -> None:
    command = ["launch", str(CONFIGS / f"{name}.py"), "--workdir", str(tmp_path)]
    assert cli.main([*command, *(GIVEN + on).split()]) == code
    shown = capsys.readouterr()
    assert said in (shown.err if code else shown.out)


def mixed(config: Config, **launch: Any) -> Config:
    """The config of 12 B parameters on a launch of this project."""
    found = load_config(MIXED)
    launch |= {"project": "my-project", "image": config.launch.image}
    launch |= {"zones": dict.fromkeys(found.islands, "us-east5-a")}
    launch |= {"coordinator_zone": "us-east5-a"}
    return found.replace("workdir", config.placement.workdir).replace(
        {f"launch.{name}": value for name, value in launch.items()}
    )


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (
            {"coordinator_machine": "n2-highmem-2"},
            r"185 GB of memory.*n2-highmem-2.*--unplan",
        ),
        ({"coordinator_disk_gb": 200}, r"disk of 200 GB.*disk_gb = \d+.*--unplan"),
    ],
)
def test_what_is_too_small_is_refused_unless_somebody_says_so(
    config: Config, cloud: Any, launch: dict[str, Any], said: str
) -> None:
    small, options = mixed(config, **launch), LaunchOptions(on="tpu_vm", yes=True)
    with pytest.raises(ConfigError, match=said):
        run(small, "configs/two.py", options)
    assert cloud.calls == []
    unplanned = dataclasses.replace(options, unplanned=True)
    assert run(small, "configs/two.py", unplanned) == 0
    assert cloud.calls


def test_a_slice_whose_hbm_cannot_hold_the_model_is_refused(config: Config) -> None:
    one = {"topology": "v6e:1x1", "mesh_data": 1, "mesh_fsdp": 1}
    alone = mixed(config).replace({f"islands.v6e.{f}": v for f, v in one.items()})
    said = r"239 GB of each device's HBM.*v6e:1x1 has 33\.6 GB.*'v6e:2x4'.*--unplanned"
    with pytest.raises(ConfigError, match=said):
        require_planned(alone)


def test_a_disk_is_not_judged_by_a_step_that_nobody_knows(config: Config) -> None:
    """Reports of a long run would fill it, if steps were as slow as those here."""
    enough = mixed(config, coordinator_disk_gb=500)
    require_planned(enough.replace("total_tokens", 10**13))


def test_what_arithmetic_refuses_at_peak_rates_is_a_note(
    config: Config, cloud: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    island = IslandConfig(
        topology="v6e:2x2", mesh_fsdp=4, batch_size=64, compute_dtype="bfloat16"
    )
    fast = config.replace(
        {
            "model": preset("100m"),
            "sequence_length": 1024,
            "islands": dict.fromkeys(config.islands, island),
            # A restart of 30 s and more is too long for it.
            "outage_budget_s": 20.0,
        }
    )
    options = LaunchOptions(on="tpu_vm", yes=True, dry_run=True)
    assert run(fast, "configs/two.py", options) == 0
    notes = [n for n in capsys.readouterr().err.splitlines() if "REFUSED" in n]
    assert notes == [note for note in require_planned(fast) if "REFUSED" in note]
    assert len(notes) >= 2
