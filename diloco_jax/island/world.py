"""The hosts of one island: where they meet and who has come, their `jax.distributed`
world, and their messages to each other.

`jax.distributed` takes three arguments: host 0's address, the number of hosts and this
host's own. They are read where each environment writes them down: GKE and Slurm in
variables, a TPU VM in its metadata. jax's own detectors are not used:

- The two for TPUs ask the metadata server for other slices, which takes a pod minutes.
- The one for Kubernetes needs another package.
- The one for Slurm takes the hosts of the job, not those of the island.

jax 0.10.2 aborts every process of a world that is not complete in time, and names no
host. So host 0 listens at the meeting place first, until each of the others has said
its number and is still there; then all begin together, within seconds.

Messages go through the key-value store that the world has anyway, so no collective is
added to the step and no port is opened. Host 0 decides: it alone talks to the
coordinator about decisions, and the others follow (`hosts.py`). A world never spans
islands: when a host dies, only the others of its island end too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import jax

from diloco_jax.before_jax import dial_directly
from diloco_jax.config import ConfigError
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.process import leave_at_once
from diloco_jax.wire.addresses import is_loopback, parse_address

logger = logging.getLogger(__name__)

METADATA_HOST = "metadata.google.internal"
METADATA_ANSWER_S = 5.0
"""Longest wait for an answer of the metadata server, in seconds."""
TPU_PORT = 8482
"""Port of `jax.distributed` on TPUs, which `diloco launch` opens; jax's own default."""
TRIES, METADATA_AGAIN_S, NOT_FOUND = 6, 0.5, 404
PORT = "JAX_COORDINATOR_PORT"
ADDRESS = "JAX_COORDINATOR_ADDRESS"
HERE = struct.Struct("!8sI")
"""A greeting, and the host's number."""
GREETING, GO = b"diloco-h", b"go"
ANSWER_S = 5.0
AGAIN_S = 1.0
"""Pause before host 0 is tried again, and between two looks at the time."""
TOGETHER_S = 60.0
"""Seconds in which hosts that have all come make their world."""
LEAVE_BUDGETS = 3
"""Budgets in which the last host of an island leaves the world after the first; then
jax aborts all of them. A host may need one to stop; heartbeats notice a dead one."""
MEETING_POLL_S = 1.0
"""Seconds between two looks, by a waiting host, if it is to end."""


def ask_metadata(path: str, waits_s: float = 0.0) -> tuple[str, str]:
    """Return the value at `computeMetadata/v1/instance/PATH`, and its tag.

    waits_s: seconds for which the server may hold the answer back.

    Raises:
      OSError: no server, or no such value.
      ValueError: another kind of server.
    """
    # The names that Google's libraries and jax know.
    named = os.environ.get("GCE_METADATA_IP", METADATA_HOST)
    host = os.environ.get("GCE_METADATA_HOST", named)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}",
        headers={"Metadata-Flavor": "Google"},
    )
    # Never by way of a proxy: the server is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=METADATA_ANSWER_S + waits_s) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                raise ValueError("it answers, but is no metadata server")
            text = answer.read().decode(errors="replace")
            return text, answer.headers.get("ETag", "")
    except HTTPException as error:
        raise OSError(f"its answer is none, or broke off: {error!r}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldAddress:
    """Meeting place of the hosts of an island; empty: it is found."""

    address: str = ""
    """HOST:PORT of host 0, for `jax.distributed`."""
    index: int = 0
    """Number of this host, from 0."""


def find_meeting(
    count: int, environment: Mapping[str, str], root: Path = Path("/")
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
        index = _number_in(environment, "JOB_COMPLETION_INDEX", count, ADDRESS)
        return WorldAddress(address=environment[ADDRESS], index=index)
    if hosts in environment:
        workers = environment[hosts].split(",")
        _require(count, len(workers), hosts)
        index = _number_in(environment, "TPU_WORKER_ID", count, hosts)
        return _at(workers[0], index, environment, TPU_PORT)
    if "SLURM_STEP_NODELIST" in environment:
        nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"
        _require(count, _number_in(environment, tasks, None, nodes), tasks)
        index = _number_in(environment, "SLURM_PROCID", count, nodes)
        # Ephemeral, and another one for another job on the same machine.
        port = 61440 + _number_in(environment, "SLURM_JOB_ID", None, nodes) % 4096
        return _at(first_node(environment[nodes]), index, environment, port)
    if "TPU_SKIP_MDS_QUERY" not in environment and generation_here(root):
        return _of_tpu_vm(count, environment)
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


def _of_tpu_vm(count: int, environment: Mapping[str, str]) -> WorldAddress:
    number, endpoints = "agent-worker-number", "worker-network-endpoints"
    try:
        index, workers = _attribute(number), _attribute(endpoints).split(",")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"hosts = {count} in the island's config, but this TPU VM's metadata does "
            f"not say where they meet ({number}, {endpoints}: {error}); give every "
            f"host --world HOST:PORT (of host 0) and --host-index"
        ) from error
    _require(count, len(workers), endpoints)
    # Names, or triples of a name, a number and an address.
    first = workers[0].split(":")[-1]
    own = _number_in({number: index}, number, count, endpoints)
    return _at(first, own, environment, TPU_PORT)


def _at(
    host: str, index: int, environment: Mapping[str, str], port: int
) -> WorldAddress:
    # GKE's TPU_PROCESS_ADDRESSES have a port, which is libtpu's.
    name = host.strip().split(":")[0]
    return WorldAddress(address=f"{name}:{environment.get(PORT, port)}", index=index)


def _number_in(
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


def _attribute(name: str) -> str:
    """Return the instance's attribute of that name; raise OSError if there is none."""
    for _ in range(TRIES - 1):
        try:
            return ask_metadata(f"attributes/{name}")[0]
        except OSError as error:
            if getattr(error, "code", None) == NOT_FOUND:
                raise
        # While a machine boots, its server may not answer yet.
        time.sleep(METADATA_AGAIN_S)
    return ask_metadata(f"attributes/{name}")[0]


def await_all(place: WorldAddress, count: int, patience_s: float) -> str:
    """Return, once all `count` hosts are here, the address at which this host met them.
    Raise TimeoutError with the names of the missing ones if that takes longer; OSError
    if host 0 cannot listen there."""
    host, port = parse_address(place.address, "the meeting place of the hosts")
    deadline = time.monotonic() + patience_s
    try:
        if place.index:
            return _come(host, port, place.index, deadline)
        return _wait(port, count, deadline)
    except TimeoutError as missing:
        raise TimeoutError(
            f"{missing} at {place.address} within {patience_s:g} s; look into the log "
            f"of the host that is missing, or raise placement.hosts_budget_s"
        ) from None


def _wait(port: int, count: int, deadline: float) -> str:
    """Listen as host 0 until all have come; return the address at which they reached
    it. Raise TimeoutError with those that did not."""
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(_listen(port))
        server.settimeout(AGAIN_S)
        while len(came) < count - 1:
            if time.monotonic() >= deadline:
                absent = [str(n) for n in range(1, count) if n not in came]
                raise TimeoutError(
                    f"hosts {', '.join(absent)} of this island did not come"
                )
            with contextlib.suppress(TimeoutError):
                peer = opened.enter_context(server.accept()[0])
                index = _number_of(peer)
                if index is not None and 0 < index < count:
                    came[index] = peer
                else:
                    peer.close()
            # One that is gone comes again.
            came = {n: peer for n, peer in came.items() if _is_there(peer)}
        for peer in came.values():
            with contextlib.suppress(OSError):
                peer.sendall(GO)
        for peer in came.values():
            with contextlib.suppress(OSError):
                # The end that closes first keeps the port for a while, and host 0
                # needs it.
                peer.recv(1)
        return _address_here(*came.values())


def _is_there(peer: socket.socket) -> bool:
    """Tell if a host that has said its number still waits. It says nothing more."""
    peer.setblocking(False)
    try:
        peer.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        peer.settimeout(ANSWER_S)
    return False


def _address_here(*peers: socket.socket) -> str:
    """Return this end's address, of several one that other machines reach."""
    found = [str(peer.getsockname()[0]).removeprefix("::ffff:") for peer in peers]
    return min(found, key=is_loopback)


def _listen(port: int) -> socket.socket:
    """Listen on every address, as jax will."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _number_of(peer: socket.socket) -> int | None:
    """Return the number that a host says; None for anything else that connects."""
    peer.settimeout(ANSWER_S)
    try:
        greeting, index = HERE.unpack(peer.recv(HERE.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return int(index) if greeting == GREETING else None


def _come(host: str, port: int, index: int, deadline: float) -> str:
    """Say this host's number to host 0 until it says go; return the address from which
    it was reached. Raise TimeoutError that says why it did not."""
    why = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left_s, ANSWER_S)) as peer:
                peer.sendall(HERE.pack(GREETING, index))
                peer.settimeout(left_s)
                if peer.recv(len(GO), socket.MSG_WAITALL) == GO:
                    return _address_here(peer)
        except OSError as error:
            why = str(error)
        time.sleep(min(AGAIN_S, max(0.0, deadline - time.monotonic())))
    raise TimeoutError(f"host 0 of this island did not let host {index} in ({why})")


class HostsError(Exception):
    """The hosts of this island cannot go on together: names the host and the cause."""


class Hosts:
    """One host's view of the key-value store that the hosts of an island share.

    Values are bytes, and a key is set once. folder: prefix of every key, needed if the
    world serves others too. client: None for a host that is alone, whose words go
    nowhere.
    """

    def __init__(self, client: Any, index: int, count: int, folder: str = "") -> None:
        self.index, self.count = index, count
        self._client, self._folder = client, folder

    @property
    def others(self) -> range:
        """Hosts that follow host 0."""
        return range(1, self.count)

    def tell(self, key: str, value: bytes) -> None:
        """Set a key for all hosts to see."""
        self._call("key_value_set_bytes", self._folder + key, value)

    def hear(self, key: str, timeout_s: float) -> bytes | None:
        """Return the value of a key once it is set; None if that takes longer."""
        try:
            heard: bytes = self._client.blocking_key_value_get_bytes(
                self._folder + key, int(timeout_s * 1000)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise HostsError(_lost(error)) from error
        return heard

    def look(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set. For keys that may never be:
        the store keeps what waits for one in `hear`."""
        try:
            found: bytes = self._client.key_value_try_get_bytes(self._folder + key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise HostsError(_lost(error)) from error
        return found

    def require(self, key: str, timeout_s: float, missing: str) -> bytes:
        """Return the value of a key; raise HostsError with this text if it is not set
        in time."""
        heard = self.hear(key, timeout_s)
        if heard is None:
            raise HostsError(missing)
        return heard

    def meet(
        self, what: str, timeout_s: float, given_up: Callable[[], bool], field: str
    ) -> None:
        """Wait until every host of the island has called this.

        A collective would not do: it waits for a late host only as long as its
        transport allows, and no setting changes that.

        Args:
          what: a part of the key; each meeting needs its own.
          given_up: asked now and then whether to stop waiting.
          field: the setting from which `timeout_s` follows, for the message.

        Raises:
          HostsError: names the host that did not come in time.
        """
        self.tell(f"{what}/{self.index}", b"")
        deadline = time.monotonic() + timeout_s
        for host in set(range(self.count)) - {self.index}:
            while self.hear(f"{what}/{host}", MEETING_POLL_S) is None:
                if time.monotonic() >= deadline or given_up():
                    raise HostsError(
                        f"host {host} of this island was not {what!r} within "
                        f"{timeout_s:g} s of host {self.index}; look into its log, or "
                        f"raise {field}"
                    )

    def forget(self, key: str) -> None:
        """Free a key that no host needs any more."""
        self._call("key_value_delete", self._folder + key)

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            if self._client is not None:
                getattr(self._client, method)(*arguments)
        except jax.errors.JaxRuntimeError as error:
            raise HostsError(_lost(error)) from error


ALONE = Hosts(None, 0, 1)
"""The only host of its island."""


def join_world(
    where: WorldAddress, count: int, *, budget_s: float, meet_s: float
) -> Hosts:
    """Meet the other hosts; call it before anything else of jax.

    Args:
      where: the meeting place; if empty, it is found (`find_meeting`).
      count: hosts of the island, by its config.
      budget_s: seconds of silence after which a host is lost.
      meet_s: seconds that the first host waits for the last one.

    Raises:
      ConfigError: there is no meeting place, or one for another number of hosts.
      HostsError: the others do not come.
    """
    place = where if where.address else find_meeting(count, os.environ)
    try:
        _have_gloo_listen(await_all(place, count, meet_s))
    except (OSError, TimeoutError) as error:
        raise HostsError(
            f"the {count} hosts of this island did not meet: {error}"
        ) from error
    dial_directly(parse_address(place.address)[0], os.environ)
    # jax's handler swallows SIGTERM, with which an island is asked to say goodbye.
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]
    jax.distributed.initialize(
        coordinator_address=place.address,
        num_processes=count,
        process_id=place.index,
        # With it jax asks its own detectors in spite of these three, and on TPUs
        # those join slices that an inherited MEGASCALE_ variable names.
        cluster_detection_method="deactivate",
        initialization_timeout=int(TOGETHER_S),
        heartbeat_timeout_seconds=max(1, int(budget_s)),
        shutdown_timeout_seconds=max(1, int(LEAVE_BUDGETS * budget_s)),
    )
    found = jax.process_count()
    if found != count:
        raise ConfigError(
            f"hosts = {count} in the island's config, but this slice has {found}; "
            f"set islands.NAME.hosts = {found}"
        )
    return Hosts(_store(), jax.process_index(), count)


def _have_gloo_listen(address: str) -> None:
    """Have gloo, which carries what hosts compute on CPUs, listen at this address.

    jax lets it take the one of this machine's name, which on Debian is 127.0.1.1 and
    elsewhere may be none, and has no setting for it."""
    from jax._src import xla_bridge

    module: Any = xla_bridge._jax  # type: ignore[attr-defined]
    make = module.make_gloo_tcp_collectives
    if "hostname" in str(make.__doc__):
        module.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def hosts_here(folder: str) -> Hosts:
    """Return the hosts of the world that this process is in already. folder: the prefix
    of the keys under which they exchange values."""
    count = jax.process_count()
    if count == 1:
        return ALONE
    return Hosts(_store(), jax.process_index(), count, folder)


def leave_world() -> None:
    """End the membership; wait for the others within their budget."""
    try:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        logger.debug("leaving the world of hosts: %s", error)


def end_alone(exit_code: int) -> int:
    """Return the exit code of a process that cannot go on. It does not return if the
    process has met the others already."""
    if jax.distributed.is_initialized():
        leave_at_once(exit_code)
    return exit_code


def _store() -> Any:
    # It has no public name; multihost_utils and orbax use this one too.
    from jax._src import distributed

    return distributed.global_state.client


def _lost(error: Exception) -> str:
    why, *_ = str(error).splitlines() or [type(error).__name__]
    return (
        f"host 0 of this island cannot be reached ({why}); all its hosts start again "
        f"together"
    )
