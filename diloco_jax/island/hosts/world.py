"""The hosts of one island: one `jax.distributed` world, and their messages to each
other.

Messages go through the key-value store that the world has anyway, so no collective is
added to the step and no port is opened. Host 0 leads: it alone talks to the coordinator
about decisions, and the others follow (`following.py`). A world never spans islands:
when a host dies, only the others of its island end too.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax

from diloco_jax.before_jax import dial_directly
from diloco_jax.config import ConfigError
from diloco_jax.island.hosts.meeting import WorldAddress, find_meeting
from diloco_jax.island.hosts.roll_call import await_all
from diloco_jax.process import leave_at_once
from diloco_jax.wire.addresses import parse_address

logger = logging.getLogger(__name__)

TOGETHER_S = 60.0
"""Seconds in which hosts that have all come make their world."""
LEAVE_BUDGETS = 3
"""Budgets in which the last host of an island leaves the world after the first; then
jax aborts all of them. A host may need one to stop; heartbeats notice a dead one."""
MEETING_POLL_S = 1.0
"""Seconds between two looks, by a waiting host, if it is to end."""


class HostsError(Exception):
    """The hosts of this island cannot go on together: names the host and the cause."""


class Hosts:
    """One host's view of the key-value store that the hosts of an island share.

    Values are bytes, and a key is set once. folder: prefix of every key, needed if the
    world serves others too.
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
        for host in range(self.count):
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
            getattr(self._client, method)(*arguments)
        except jax.errors.JaxRuntimeError as error:
            raise HostsError(_lost(error)) from error


def join_world(
    where: WorldAddress, count: int, *, budget_s: float, meet_s: float
) -> Hosts:
    """Meet the other hosts; call it before anything else of jax.

    Args:
      where: the meeting place; if empty, it is found (`meeting.py`).
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


def hosts_here(folder: str) -> Hosts | None:
    """Return the hosts of the world that this process is in already; None if it is
    alone. folder: the prefix of the keys under which they exchange values."""
    count = jax.process_count()
    if count == 1:
        return None
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
    return (
        f"host 0 of this island cannot be reached ({_first_line(error)}); all its "
        f"hosts start again together"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
