"""The part of a config that only `diloco launch` reads. Imports nothing of the package,
since `config.py` has it as a field."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Where `diloco launch` puts the run, and how its machines are bought."""

    project: str = ""
    """Project id of the cloud."""
    name: str = ""
    """Begins the name of everything that is made; empty = the config file's name."""
    image: str = ""
    """Container image of this package that all machines run: REGISTRY/PATH:TAG."""
    zones: dict[str, str] = dataclasses.field(default_factory=dict)
    """By island: "us-east5-a"."""
    purchase: dict[str, str] = dataclasses.field(default_factory=dict)
    """By island: "on_demand" (if not named here), "spot", "reserved", or
    "reserved:NAME" of one reservation."""
    network: str = "default"
    subnetwork: str = ""
    """Of the same name in every region; empty = the network's own."""
    internal_ips: bool = False
    """Machines have no external address; needs Cloud NAT or Private Google Access."""
    service_account: str = ""
    """E-mail address that machines run as; empty = the project's default one."""
    data: str = ""
    """gs://BUCKET/FOLDER of text that every machine copies; empty = the Python
    standard library of the image."""
    coordinator_zone: str = ""
    coordinator_machine: str = "n2-highmem-16"
    coordinator_disk_gb: int = 500
    cluster: str = ""
    """GKE cluster."""
    location: str = ""
    """Region or zone of the GKE cluster."""
    namespace: str = "default"
