"""SkyPilot's own code loads the jobs, and its optimizer chooses machines for them, from
a catalog of this test's. Needs a Python with SkyPilot, in an environment of its own."""

import json
import os
import subprocess

import pytest
from test_sky import tasks

from diloco_jax.launch.text import yaml_text

VARIABLE = "DILOCO_SKY_PYTHON"
"""Names that Python."""
WAIT_S = 200.0
PROGRAM = r'''import json
import sys
from pathlib import Path

COLUMNS = (
    "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,"
    "AvailabilityZone,Price,SpotPrice"
)
HOSTS = ("2-highmem-16,16,128,,,", "1-highmem-8,8,52,,,")
TPUS = {
    "tpu-v5p-16": ("us-east5-a", "us-central1-a"),
    "tpu-v6e-16": ("us-east5-b", "us-central1-b"),
}


def write_catalog(folder: Path) -> None:
    """The machines of the test, in the form of SkyPilot's own lists."""
    rows = [COLUMNS]
    for name, zones in TPUS.items():
        rows += [f"TPU-VM,,,{name},1,,{zone[:-2]},{zone},10.0,5.0" for zone in zones]
    rows += [f"n{n},us-east5,us-east5-a,1.0,0.5" for n in HOSTS]
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text("\n".join(rows) + "\n")
    (folder / "images.csv").write_text("Tag,Region,ImageId,CreationDate\n")
    (folder / "accelerator_quota_mapping.csv").write_text("Accelerator,Quota\n")


def main(files: list[str]) -> None:
    """Load and optimize each file."""
    from sky.skylet import constants

    version = constants.CATALOG_SCHEMA_VERSION
    write_catalog(Path.home() / ".sky" / "catalogs" / version / "gcp")
    import sky
    from sky import check, global_user_state
    from sky.clouds import CloudCapability
    from sky.optimizer import Optimizer
    from sky.utils import dag_utils

    enable = global_user_state.set_enabled_clouds
    enable(["GCP"], CloudCapability.COMPUTE, "default")
    allowed = check._get_workspace_allowed_clouds("default")
    global_user_state.set_allowed_clouds(allowed, "default")
    chosen = {}
    for file in files:
        dag = dag_utils.load_chain_dag_from_yaml(file)
        Optimizer.optimize(dag, quiet=True)
        (task,) = dag.tasks
        assert task.num_nodes == 1
        best = task.best_resources
        chosen[task.name] = {
            "asked": len(task.resources),
            "zone": best.zone,
            "instance": best.instance_type,
            "accelerators": best.accelerators,
            "args": best.accelerator_args,
            "spot": best.use_spot,
            "volumes": [volume["name"] for volume in best.volumes or ()],
            "labels": best.labels,
        }
    print(json.dumps(chosen), file=sys.__stdout__)
    assert sky.__version__


if __name__ == "__main__":
    main(sys.argv[1:])
'''


def loaded(made, folder):
    """Run the program on these tasks, with a HOME of its own."""
    files = [folder / name for name in made]
    for file in files:
        file.write_text(yaml_text(made[file.name]))
    return subprocess.run(
        [os.environ[VARIABLE], "-c", PROGRAM, *map(str, files)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


needs_sky = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"no SkyPilot: {VARIABLE} names no Python"
)


@needs_sky
def test_sky_loads_and_optimizes_every_job(config, tmp_path):
    zones = {"v5p": "us-east5-a,us-central1-a", "v6e.b": "us-east5-b"}
    made = tasks(config, zones=zones)
    done = loaded(made, tmp_path)
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout.splitlines()[-1])
    v5p, v6e = chosen["two-v5p"], chosen["two-v6e-b"]
    assert (v5p["asked"], v5p["zone"], v5p["spot"]) == (2, "us-east5-a", False)
    assert (v6e["asked"], v6e["zone"], v6e["spot"]) == (1, "us-east5-b", True)
    assert (v5p["accelerators"], v5p["instance"]) == ({"tpu-v5p-16": 1}, "TPU-VM")
    assert v6e["accelerators"] == {"tpu-v6e-16": 1}
    assert v6e["args"] == {
        "runtime_version": "v2-alpha-tpuv6e",
        "gcp_queued_resource": True,
    }
    coordinator = chosen["two-coordinator"]
    assert coordinator["instance"] == "n2-highmem-16"
    assert coordinator["volumes"] == ["two-coordinator"]
    assert coordinator["labels"]["diloco-run"] == "two"


@needs_sky
@pytest.mark.parametrize(
    ("field", "value"),
    [("infra", "gcp/us-east5/us-east5-z"), ("accelerator_args", {"reserved": True})],
)
def test_the_check_can_fail(config, tmp_path, field, value):
    task = tasks(config)["two-v6e-b.yaml"]
    task["resources"][field] = value
    assert loaded({"wrong.yaml": task}, tmp_path).returncode != 0
