"""Checks of the environment variables that a launch gives to its processes.

`launch.environment` has values, `launch.secrets` names of secrets. A variable named
NAME goes to every process. A variable named ISLAND:NAME goes to that island alone, and
overcomes NAME there. "coordinator" may stand in the place of ISLAND.
"""

from __future__ import annotations

import re

from diloco_jax import before_jax
from diloco_jax.before_jax import FLAG_LISTS, HOST_DEVICES, MULTI_SLICE
from diloco_jax.config import Config, ConfigError, suggest
from diloco_jax.config.placement import variables_of
from diloco_jax.faults import COORDINATOR

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"[A-Za-z0-9][-_.A-Za-z0-9]*")
CREDENTIAL = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|_KEY)$", re.I)
OF_THE_LAUNCH = frozenset(
    (
        *("JAX_PLATFORMS", "RESTART_ATTEMPT", "PATH", "DOCKER_CONFIG"),
        *("ROLE", "ROOT", "PROJECT", "IMAGE", "CLOUD_IMAGE", "SECRET", "DATA"),
        *("PLATFORMS", "BEGIN", "PERMIT", "DEVICE", "DISK"),
        *("PORTS", "SOURCE", "END", "RUN", "PART", "FRUITLESS_STARTS", "RELEASE"),
        *("DNS_ZONE", "ADDRESS", "FOLLOW_S", "LASTED_S", "CLOUD_LOG"),
        *("ARGUMENTS", "CONFIG_JSON", "VARIABLES", "SECRETS"),
    )
)
"""Names that the launch sets, or that `host.sh` uses: it exports secrets."""
OF_THE_MACHINE = (
    *(MULTI_SLICE, "TPU_WORKER_", "TPU_PROCESS_", "JAX_COORDINATOR_"),
    *("JOB_COMPLETION_INDEX", "KUBERNETES_", "SLURM_"),
)
"""Beginnings of the names that tell each host its own place in its slice."""


def check_variables(config: Config) -> None:
    """Raise ConfigError, naming field, value and remedy, for a variable that a process
    must not have, or that would tell a secret."""
    settings, owners = config.launch, (COORDINATOR, *config.islands)
    for field in ("environment", "secrets"):
        for key, value in getattr(settings, field).items():
            owner, _, name = key.rpartition(":")
            if owner and owner not in owners:
                raise ConfigError(
                    f"launch.{field} names {owner!r}{suggest(owner, owners)}, but the "
                    f"parts of the run are {', '.join(owners)}"
                )
            _check_name(f"launch.{field}", name)
            if field == "environment":
                _check_value(f"launch.environment {key}", name, value)
            elif not SECRET.fullmatch(value):
                raise ConfigError(
                    f"launch.secrets {key}: its value cannot be the name of a secret; "
                    f"make one with `gcloud secrets create` (on GKE `kubectl create "
                    f"secret generic`) and write its name, never what is in it"
                )
    for owner in owners:
        plain, secret = variables_of(settings, owner)
        if both := sorted(plain.keys() & secret.keys()):
            raise ConfigError(
                f"launch.environment and launch.secrets both have {both[0]} for "
                f"{owner}; leave out one"
            )


def flag_notes(config: Config) -> list[str]:
    """Return a note for every flag that a launch sets against the table of its
    islands' generations (`before_jax.py`)."""
    notes = []
    for name, island in config.islands.items():
        given = variables_of(config.launch, name).plain.get(
            before_jax.LIBTPU_VARIABLE, ""
        )
        generation = before_jax.generation_of(island.topology)
        tried = f"{generation}, {'.'.join(map(str, before_jax.TRIED))}"
        flags = before_jax.LIBTPU_FLAGS.get(generation, ())
        clashes = before_jax.flag_clashes(given, flags, tried) if flags else []
        notes += [f"note: island {name}: {clash}" for clash in clashes]
    return notes


def _check_name(field: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{field} has {name!r}, which names no variable: letters, digits and '_', "
            f"no digit first; write NAME, or ISLAND:NAME for one island"
        )
    if name in OF_THE_LAUNCH:
        raise ConfigError(
            f"{field} has {name}, which `diloco launch` sets itself; leave it out"
        )
    if name.startswith(OF_THE_MACHINE):
        raise ConfigError(
            f"{field} has {name}, which is another one on every host: the machines "
            f"know it, and an island is one slice; leave it out"
        )


def _check_value(field: str, name: str, value: str) -> None:
    if "\n" in value or "\0" in value:
        raise ConfigError(f"{field} = {value!r} has more than one line; write one")
    if CREDENTIAL.search(name) and not value.startswith("/"):
        # The value itself stays out of the message, which logs keep.
        raise ConfigError(
            f"{field} looks like a credential, and scripts, manifests and config.json "
            f"would show it; put it into a secret, and its name into launch.secrets"
        )
    if name not in FLAG_LISTS:
        return
    values: dict[str, str] = {}
    for flag in value.split():
        if not flag.startswith("--"):
            raise ConfigError(
                f"{field} has {flag!r}, which is no flag: --NAME or --NAME=VALUE, with "
                f"spaces between"
            )
        before = values.setdefault(flag.split("=")[0], flag)
        if before != flag:
            raise ConfigError(f"{field} has {before} and {flag}; leave out one")
    if HOST_DEVICES in values:
        raise ConfigError(
            f"{field} has {values[HOST_DEVICES]}, and an island's devices are those of "
            f"its mesh (islands.NAME.mesh_*); leave it out"
        )
