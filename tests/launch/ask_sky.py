"""Answers of SkyPilot: run by a Python that has it, with a HOME of its own.

    ask_sky.py choose FILE...     loads and optimizes jobs, as a failover would
    ask_sky.py load FILE...       loads jobs that are refused
    ask_sky.py parse LINE...      reads command lines of `sky` (JSON), and their config
    ask_sky.py provision          makes slices of a fake Cloud TPU API

Prints one JSON value; what SkyPilot refuses ends it with its error.
"""

import json
import sys
from pathlib import Path
from unittest import mock

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


def load(*files):
    """Return by file why its job is refused; None if it is not."""
    from sky.exceptions import InvalidSkyPilotConfigError
    from sky.utils import dag_utils

    said = dict.fromkeys(Path(file).stem for file in files)
    for file in files:
        try:
            dag_utils.load_chain_dag_from_yaml(file)
        except InvalidSkyPilotConfigError as error:
            said[Path(file).stem] = str(error)
    return said


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


def provision():
    """Return the calls of the Cloud TPU API for a queued slice that does not come, and
    for its end; what becomes of a reserved one; and the account of all machines."""
    from sky.provision.gcp import constants, instance, instance_utils

    api = mock.MagicMock()
    places = api.projects.return_value.locations.return_value
    queued, nodes = places.queuedResources.return_value, places.nodes.return_value
    waiting = {"state": {"state": "WAITING_FOR_RESOURCES"}}
    queued.get.return_value.execute.return_value = waiting
    nodes.list.return_value.execute.return_value = {"nodes": []}
    places.operations.return_value.get.return_value.execute.return_value = {
        "done": True
    }
    tpus = instance_utils.GCPTPUVMInstance
    where = ("two", "my-project", "us-east5-a")
    asked = {"gcp_queued_resource": True}
    account = constants.SKYPILOT_SERVICE_ACCOUNT_EMAIL_TEMPLATE.format(
        account_id=constants.SKYPILOT_SERVICE_ACCOUNT_ID, project_id="my-project"
    )
    roles = (
        constants.DEFAULT_SERVICE_ACCOUNT_ROLES + constants.TPU_SERVICE_ACCOUNT_ROLES
    )
    said, now = {"account": account, "roles": roles}, [0.0]

    def sleep(seconds):
        now[0] += seconds

    replaced = mock.patch.multiple
    with (
        replaced(tpus, load_resource=mock.Mock(return_value=api)),
        replaced(instance_utils.GCPComputeInstance, filter=mock.Mock(return_value={})),
        replaced(instance_utils.time, time=lambda: now[0], sleep=sleep),
    ):
        for _ in range(2):
            try:
                tpus.create_instances(*where, asked, {}, 1, 1, True)
            except instance_utils.common.ProvisionerError as error:
                said["error"] = str(error)
        said["waits"] = now[0] / 2
        provider = {"availability_zone": where[2], "project_id": where[1]}
        instance.terminate_instances("two", {**provider, "_has_tpus": True})
        reserved = {"reservationAffinity": {"values": ["ours"]}}
        try:
            tpus.create_instances(*where, reserved, {}, 1, 1, True)
        except NotImplementedError as error:
            said["reserved"] = str(error)
    made = [call.kwargs["queuedResourceId"] for call in queued.create.call_args_list]
    return {**said, "made": made, "deleted": queued.delete.call_count}


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    verbs = {"choose": choose, "load": load, "parse": parse, "provision": provision}
    print(json.dumps(verbs[verb](*rest)), file=sys.__stdout__)
