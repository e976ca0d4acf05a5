"""The meeting place of an island's hosts, as the machines around them name it.

`jax.distributed` takes three arguments: host 0's address, the number of hosts and this
host's own. They are read where each environment writes them down: GKE and Slurm in
variables, a TPU VM in its metadata. jax's own detectors are not used:

- The two for TPUs ask the metadata server for other slices, which takes a pod minutes.
- The one for Kubernetes needs another package.
- The one for Slurm takes the hosts of the job, not those of the island.
"""

from __future__ import annotations

import dataclasses
import re
import time
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path

from diloco_jax.config import ConfigError
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.island.metadata import HOST, ask

TPU_PORT = 8482
"""Port of `jax.distributed` on TPUs, which `diloco launch` opens; jax's own default."""
TRIES, AGAIN_S, NOT_FOUND = 6, 0.5, 404
PORT = "JAX_COORDINATOR_PORT"
ADDRESS = "JAX_COORDINATOR_ADDRESS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldAddress:
    """Meeting place of the hosts of an island; empty: it is found."""

    address: str = ""
    """HOST:PORT of host 0, for `jax.distributed`."""
    index: int = 0
    """Number of this host, from 0."""


Lookup = Callable[[str], str]
"""Returns the instance's attribute of that name; OSError where there is none."""


def find_meeting(
    count: int,
    environment: Mapping[str, str],
    metadata: Lookup | None = None,
    root: Path = Path("/"),
) -> WorldAddress:
    """Find the meeting place of `count` hosts, and this host's number.

    The first of these that is there counts: JAX_COORDINATOR_ADDRESS with
    JOB_COMPLETION_INDEX (a JobSet or an indexed Job), TPU_WORKER_HOSTNAMES with
    TPU_WORKER_ID (TPUs on GKE), SLURM_STEP_NODELIST with SLURM_PROCID, the metadata of
    a TPU VM.

    Raises ConfigError, naming the variable and the remedy, if there is none, or if it
    is of another number of hosts.
    """
    hosts = "TPU_PROCESS_ADDRESSES"
    if hosts not in environment:
        hosts = "TPU_WORKER_HOSTNAMES"
    if ADDRESS in environment:
        index = _number(environment, "JOB_COMPLETION_INDEX", count, ADDRESS)
        return WorldAddress(address=environment[ADDRESS], index=index)
    if hosts in environment:
        workers = environment[hosts].split(",")
        _require(count, len(workers), hosts)
        index = _number(environment, "TPU_WORKER_ID", count, hosts)
        return _at(workers[0], index, environment, TPU_PORT)
    if "SLURM_STEP_NODELIST" in environment:
        nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"
        _require(count, _number(environment, tasks, None, nodes), tasks)
        index = _number(environment, "SLURM_PROCID", count, nodes)
        # Ephemeral, and another one for another job on the same machine.
        port = 61440 + _number(environment, "SLURM_JOB_ID", None, nodes) % 4096
        return _at(first_node(environment[nodes]), index, environment, port)
    asks = "TPU_SKIP_MDS_QUERY" not in environment and generation_here(root)
    if asks or metadata is not None:
        return _of_tpu_vm(count, environment, metadata or _attribute(environment))
    raise ConfigError(
        f"hosts = {count} in the island's config, but nothing here says where they "
        f"meet: neither {ADDRESS}, TPU_WORKER_HOSTNAMES nor SLURM_STEP_NODELIST is "
        f"set, and this is no TPU VM; give every host --world HOST:PORT (of host 0) "
        f"and --host-index"
    )


def first_node(nodes: str) -> str:
    """Return the first name of a list in Slurm's notation, as in `node[007-015,20]`."""
    found = re.match(r"([^,\[]*)(?:\[([^],-]*))?", nodes)
    assert found is not None
    return found[1] + (found[2] or "")


def _of_tpu_vm(
    count: int, environment: Mapping[str, str], attribute: Lookup
) -> WorldAddress:
    number, endpoints = "agent-worker-number", "worker-network-endpoints"
    try:
        index, workers = attribute(number), attribute(endpoints).split(",")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"hosts = {count} in the island's config, but this TPU VM's metadata does "
            f"not say where they meet ({number}, {endpoints}: {error}); give every "
            f"host --world HOST:PORT (of host 0) and --host-index"
        ) from error
    _require(count, len(workers), endpoints)
    # Names, or triples of a name, a number and an address.
    first = workers[0].split(":")[-1]
    own = _number({number: index}, number, count, endpoints)
    return _at(first, own, environment, TPU_PORT)


def _at(
    host: str, index: int, environment: Mapping[str, str], port: int
) -> WorldAddress:
    # GKE's TPU_PROCESS_ADDRESSES have a port, which is libtpu's.
    name = host.strip().split(":")[0]
    return WorldAddress(address=f"{name}:{environment.get(PORT, port)}", index=index)


def _number(
    environment: Mapping[str, str], name: str, count: int | None, beside: str
) -> int:
    """Return the number in a variable, below `count` if that is given."""
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name} = {text!r}, but {beside} is set, beside which it is a number; set "
            f"it, or give every host --world HOST:PORT (of host 0) and --host-index"
        )
    if count is not None and int(text) >= count:
        raise ConfigError(
            f"{name} = {text}, but the island's config has hosts = {count}, numbered "
            f"from 0; set islands.NAME.hosts to the hosts of this slice or job"
        )
    return int(text)


def _require(count: int, found: int, name: str) -> None:
    if found != count:
        raise ConfigError(
            f"hosts = {count} in the island's config, but {name} here is of {found}; "
            f"set islands.NAME.hosts = {found}"
        )


def _attribute(environment: Mapping[str, str]) -> Lookup:
    # The names that Google's libraries and jax know.
    known = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
    host = next((environment[n] for n in known if n in environment), HOST)

    def attribute(name: str) -> str:
        # While a machine boots, its server may not answer yet.
        for _ in range(TRIES - 1):
            try:
                return ask(f"attributes/{name}", host)[0]
            except urllib.error.HTTPError as error:
                if error.code == NOT_FOUND:
                    raise
            except OSError:
                pass
            time.sleep(AGAIN_S)
        return ask(f"attributes/{name}", host)[0]

    return attribute
