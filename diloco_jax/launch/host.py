"""The script of every machine without Kubernetes: `host.sh` with its settings."""

from __future__ import annotations

import shlex
from importlib import resources

from diloco_jax.config.launch import variables_of
from diloco_jax.launch.spec import (
    COORDINATOR,
    PERMIT,
    PLATFORMS,
    PORTS,
    ROOT,
    LaunchSpec,
    PlacedIsland,
)
from diloco_jax.wire import principal

NOTICE_S = 25.0
"""Seconds from the notice to the goodbye. A Spot machine has about 30 s."""
DISK = "/mnt/disks/diloco"
"""Where the coordinator's disk is mounted."""
FOLLOW_S, ISLANDS_FOLLOW_S = 60, 600
"""Seconds after which the coordinator's machine, and each host of an island, looks for
changed certificates. A revocation reaches islands through the coordinator."""
LASTED_S = 600
"""Seconds of progress after which a process may crash as often again."""


def island_script(
    spec: LaunchSpec,
    island: PlacedIsland,
    address: str,
    now_unix: int,
    release: tuple[str, ...],
) -> str:
    """Return the script of the island's hosts.

    release: arguments of `gcloud` that give the machines back; empty = SkyPilot does.
    """
    return _script(
        spec,
        island.name,
        principal.island(island.name).stem,
        spec.island_arguments(island, address, NOTICE_S),
        now_unix,
        release,
        ROLE="island",
        FOLLOW_S=str(ISLANDS_FOLLOW_S),
        PLATFORMS=PLATFORMS,
    )


def coordinator_script(
    spec: LaunchSpec, address: str, now_unix: int, release: tuple[str, ...]
) -> str:
    """Return the script of the coordinator's machine; see `island_script`."""
    return _script(
        spec,
        COORDINATOR,
        COORDINATOR,
        spec.coordinator_arguments(address),
        now_unix,
        release,
        ROLE=COORDINATOR,
        FOLLOW_S=str(FOLLOW_S),
        BEGIN=spec.permit,
        PERMIT=f"{DISK}/{PERMIT}",
        SOURCE=spec.source,
        PORTS=" ".join(map(str, PORTS)),
        DEVICE=f"/dev/disk/by-id/google-{spec.coordinator}",
        DISK=DISK,
        DNS_ZONE=spec.settings.dns_zone if not release else "",
        ADDRESS=spec.settings.coordinator_address,
    )


def _script(
    spec: LaunchSpec,
    owner: str,
    stem: str,
    arguments: tuple[str, ...],
    now_unix: int,
    release: tuple[str, ...],
    **settings: str,
) -> str:
    """Return `host.sh` with its settings before it. owner: whose variables it gives to
    the process. stem: of its certificates."""
    plain, secret = variables_of(spec.settings, owner)
    deletes = spec.settings.when_done == "delete"
    variables = [f"--env={name}={value}" for name, value in plain.items()]
    secrets = [part for pair in secret.items() for part in pair]
    settings |= {
        "ROOT": ROOT,
        "PROJECT": spec.settings.project,
        "IMAGE": spec.settings.image,
        "CLOUD_IMAGE": spec.settings.cloud_image,
        "SECRET": spec.secrets[stem],
        "DATA": spec.settings.data,
        "END": str(spec.end_unix(now_unix)),
        "RUN": spec.name,
        "PART": owner,
        "FRUITLESS_STARTS": str(spec.fruitless_starts),
        "LASTED_S": str(LASTED_S),
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
            f"ARGUMENTS=({shlex.join(arguments)})",
            f"VARIABLES=({shlex.join(variables)})",
            f"SECRETS=({shlex.join(secrets)})",
            f"RELEASE=({shlex.join(release) if deletes else ''})",
            f"CONFIG_JSON={shlex.quote(spec.config_json)}",
            resources.files("diloco_jax.launch").joinpath("host.sh").read_text(),
        ]
    )
