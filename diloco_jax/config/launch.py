"""The part of a config that only `diloco launch` reads."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import AT_LEAST_1, setting


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
    zones: dict[str, str] = setting({}, help='Zone by island: "us-east5-a".')
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
    coordinator_zone: str = setting("", help="Zone of the coordinator.")
    coordinator_machine: str = setting(
        "n2-highmem-16", help="Machine type of the coordinator."
    )
    coordinator_disk_gb: int = setting(
        500, AT_LEAST_1, help="Gigabytes of the disk with the coordinator's workdir."
    )
    cluster: str = setting("", help="GKE cluster.")
    location: str = setting("", help="Region or zone of the GKE cluster.")
    namespace: str = setting("default", help="Kubernetes namespace.")
