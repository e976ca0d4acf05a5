"""The part of a config that only `diloco launch` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from diloco_jax.config.fields import AT_LEAST_1, NOT_NEGATIVE, setting

WhenDone = Literal["delete", "keep"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings of diloco launch: places of the run and purchase of its machines."""

    project: str = setting("", help="Project id of the cloud.")
    name: str = setting(
        "",
        help="Beginning of the name of everything that is made; empty = the name of "
        "the configs file.",
    )
    image: str = setting(
        "",
        help="Container image of this package that all machines run: "
        "REGISTRY/PATH:TAG.",
    )
    zones: dict[str, str] = setting(
        {},
        help='Zone by island: "us-east5-a", or several, "us-east5-a,us-east5-b", of '
        "which each is tried if those before it have no machines (not on tpu_vm).",
    )
    purchase: dict[str, str] = setting(
        {},
        help='How an island\'s machines are bought: "on_demand" (if it is not named '
        'here), "spot", "reserved", or "reserved:NAME" of one reservation.',
    )
    network: str = setting("default", help="Network of all machines.")
    subnetwork: str = setting(
        "", help="Subnetwork, of the same name in every region; empty = the network's."
    )
    internal_ips: bool = setting(
        False,
        help="Give machines no external address; needs Cloud NAT or Private Google "
        "Access.",
    )
    service_account: str = setting(
        "",
        help="E-mail address that machines run as; empty = the project's default "
        "account.",
    )
    coordinator_account: str = setting(
        "", help="The same for the coordinator, if it is another one than the islands'."
    )
    when_done: WhenDone = setting(
        "delete",
        help='What becomes of machines whose process has ended for good: "delete" = '
        'they are given back, the coordinator\'s disk excepted, "keep" = they stay '
        "until --action delete.",
    )
    max_hours: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Hours after a create or run at which every process that it started ends "
        "in any case, merged or not; 0 = no end.",
    )
    linger_hours: float = setting(
        24.0,
        NOT_NEGATIVE,
        help="Hours after the end of the run for which the coordinator tells islands "
        "that get their machines then that it is over.",
    )
    data: str = setting(
        "",
        help="gs://BUCKET/FOLDER of text or tokens that every machine copies; empty = "
        "the Python standard library of the image.",
    )
    environment: dict[str, str] = setting(
        {},
        help="Environment variables of every process, such as XLA_FLAGS, "
        "LIBTPU_INIT_ARGS or HF_HOME; ISLAND:NAME is one island's.",
    )
    secrets: dict[str, str] = setting(
        {},
        help="Environment variables whose values are secrets, and the secrets' names: "
        "of Secret Manager, or on GKE of the namespace, with the variable's name as "
        "key.",
    )
    cloud_image: str = setting(
        "gcr.io/google.com/cloudsdktool/google-cloud-cli:slim",
        help="Image with `gcloud`, for what machines ask of the cloud.",
    )
    coordinator_zone: str = setting("", help="Zone of the coordinator.")
    coordinator_machine: str = setting(
        "n2-highmem-16", help="Machine type of the coordinator."
    )
    coordinator_disk_gb: int = setting(
        500, AT_LEAST_1, help="Gigabytes of the disk with the coordinator's workdir."
    )
    coordinator_address: str = setting(
        "",
        help="Host name or internal address at which islands reach the coordinator "
        "from outside its GKE cluster, or on sky; empty = its name in the cluster.",
    )
    dns_zone: str = setting(
        "",
        help="Managed zone of Cloud DNS in which, on sky, the coordinator registers "
        "coordinator_address.",
    )
    cluster: str = setting("", help="GKE cluster of the coordinator, and of islands.")
    location: str = setting("", help="Region or zone of that cluster.")
    clusters: dict[str, str] = setting(
        {},
        help='Other clusters by island: "us-central1/tpus", or with a project before.',
    )
    queue: str = setting(
        "", help="Kueue's local queue in which islands wait; empty = none."
    )
    namespace: str = setting("default", help="Kubernetes namespace.")


class Variables(NamedTuple):
    """The variables of one part of the run. Both are by the variable's name."""

    plain: Mapping[str, str]
    secret: Mapping[str, str]
    """Names of secrets."""


def variables_of(settings: LaunchConfig, owner: str) -> Variables:
    """Return the variables of an island, or of the coordinator: its own, named
    OWNER:NAME, count before those of every process."""
    return Variables(_of(settings.environment, owner), _of(settings.secrets, owner))


def _of(given: Mapping[str, str], owner: str) -> dict[str, str]:
    everybodys = {name: value for name, value in given.items() if ":" not in name}
    own = {
        name.rpartition(":")[2]: value
        for name, value in given.items()
        if name.rpartition(":")[0] == owner
    }
    return everybodys | own
