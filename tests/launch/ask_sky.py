"""Answers of SkyPilot: run by a Python that has it, with a HOME of its own.

    ask_sky.py choose FILE...     loads and optimizes jobs, as a failover would
    ask_sky.py parse LINE...      reads command lines of `sky` (JSON), and their config

Prints one JSON value; what SkyPilot refuses ends it with its error.
"""

import json
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


def write_catalog(folder):
    """Write the machines of the tests in the form of SkyPilot's own lists."""
    rows = [COLUMNS]
    for name, zones in TPUS.items():
        rows += [f"TPU-VM,,,{name},1,,{zone[:-2]},{zone},10.0,5.0" for zone in zones]
    rows += [f"n{n},us-east5,us-east5-a,1.0,0.5" for n in HOSTS]
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text("\n".join(rows) + "\n")
    (folder / "images.csv").write_text("Tag,Region,ImageId,CreationDate\n")
    (folder / "accelerator_quota_mapping.csv").write_text("Accelerator,Quota\n")


def choose(*files):
    """Return by job what the optimizer chooses, and where it goes if a zone is full."""
    from sky.skylet import constants

    version = constants.CATALOG_SCHEMA_VERSION
    write_catalog(Path.home() / ".sky" / "catalogs" / version / "gcp")
    from sky import check, exceptions, global_user_state
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
        (task,) = dag.tasks
        assert task.num_nodes == 1
        Optimizer.optimize(dag, quiet=True)
        best, full = task.best_resources, []
        said = {
            "instance": best.instance_type,
            "accelerators": best.accelerators,
            "args": best.accelerator_args,
            "spot": best.use_spot,
            "volumes": [volume["name"] for volume in best.volumes or ()],
            "labels": best.labels,
            "config": best.cluster_config_overrides,
            "zones": [],
        }
        while best is not None:
            said["zones"].append(best.zone)
            full.append(best)
            try:
                Optimizer.optimize(dag, blocked_resources=full, quiet=True)
            except exceptions.ResourcesUnavailableError:
                break
            best = task.best_resources
        chosen[task.name] = said
    return chosen


def parse(*lines):
    """Return by line the options that SkyPilot's own command line reads, and whether
    machines will have internal addresses alone."""
    from sky import skypilot_config
    from sky.client.cli import command

    read = []
    for line in lines:
        tool, *words = json.loads(line)
        assert tool == "sky"
        group, verb, *rest = words
        found = command.cli.get_command(None, group).get_command(None, verb)
        options = found.make_context(verb, rest).params
        inside = skypilot_config.get_effective_region_config(
            cloud="gcp", region=None, keys=("use_internal_ips",), default_value=False
        )
        read.append({"name": options.get("name"), "inside": inside})
    return read


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    verbs = {"choose": choose, "parse": parse}
    print(json.dumps(verbs[verb](*rest)), file=sys.__stdout__)
