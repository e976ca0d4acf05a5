"""A host that follows host 0 of its island: it computes, sends and fetches its part.

It has no control stream. Host 0 tells it what to do at every boundary, so its
parameters are those of every other host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Generic

import msgspec

from diloco_jax.config import ConfigError, differences
from diloco_jax.faults import parse_faults
from diloco_jax.island.hosts.following import (
    FollowDecisions,
    HostsBegin,
    OrderThread,
    Refusal,
)
from diloco_jax.island.hosts.world import Hosts, HostsError
from diloco_jax.island.parts import L, Parts
from diloco_jax.models.build import other_model
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.errors import Refused

logger = logging.getLogger(__name__)


class Follower(Generic[L]):
    """Run one follower. Call `start`, `stop` and `close` once each, in this order;
    `loop` trains between the first two."""

    def __init__(self, host: Parts[L], hosts: Hosts) -> None:
        self._host, self._hosts = host, hosts
        self._orders: OrderThread | None = None
        self._loop: L | None = None
        self._refused = False
        self.mailbox = self._host.mailbox

    def start(self) -> None:
        """Join with host 0. Raises HostsError if host 0 says nothing in time, Refused
        if host 0 was refused, and ConfigError if host 0 has another config."""
        host, hosts = self._host, self._hosts
        config, deadlines = host.config, host.deadlines
        host.begin("connecting")
        patience_s = config.placement.away_s + deadlines.pin_s
        heard = self._hear_unless_refused("begin", patience_s)
        begin = msgspec.msgpack.decode(heard, type=HostsBegin)
        self._check(begin)
        host.gives = begin.gives
        host.lanes.use(begin.workers)
        host.begin("compiling")
        host.build(
            Identity(
                run_id=begin.run_id,
                island=host.name,
                incarnation=begin.incarnation,
                session=begin.session,
            ),
            hosts,
        )
        self._orders = OrderThread(
            hosts,
            self.mailbox,
            host.fetcher.fetch,
            host.sender.resend,
            host.lanes.use,
            deadlines,
        )
        self._orders.start()
        host.compile()
        host.begin("fetching")
        joined = self._hear_unless_refused("joined", host.join_s)
        versions = msgspec.msgpack.decode(joined, type=list[Version])
        decisions = FollowDecisions(hosts, self.mailbox, begin.lead, deadlines.budget_s)
        placement = config.placement
        faults = parse_faults(placement.faults, config.islands, placement.workers)
        host.begin("restoring")
        self._loop = host.loop(
            versions,
            decisions,
            faults.for_who(host.name, begin.incarnation, hosts.index),
        )
        host.sender.start()

    @property
    def loop(self) -> L:
        """The train loop, which host 0 ends, once it has started."""
        assert self._loop is not None
        return self._loop

    @property
    def ended_together(self) -> bool:
        """True if all hosts ended together, see Loop; also if host 0 was refused and
        said so."""
        of_loop = self._loop is not None and self._loop.ended_together
        return self._refused or of_loop

    def asked_to_end(self, reason: str) -> None:
        """Tell host 0, which decides when the island ends."""
        with contextlib.suppress(HostsError):
            self._hosts.tell("leave", f"host {self._hosts.index}: {reason}".encode())

    def stop(self, ending: Ending) -> None:
        """End the threads, within `stop_s`."""
        timeout_s = self._host.deadlines.stop_s / 4
        if self.ended_together:
            # Host 0 may still need what this host has not sent.
            patience_s = self._host.config.placement.notice_s + 2 * timeout_s
            with contextlib.suppress(HostsError):
                self._hosts.hear("left", patience_s)
        if self._loop is not None:
            self._host.sender.close(timeout_s)
        if self._orders is not None:
            self._orders.close(timeout_s)

    def close(self) -> None:
        """Free sockets and threads."""
        self._host.close()

    def _check(self, begin: HostsBegin) -> None:
        run, island = self._host.config.run, dataclasses.asdict(self._host.island)
        lines = differences(island, begin.island)
        if run.fingerprint() != begin.fingerprint:
            lines.append(
                f"run: fingerprint {run.fingerprint()} here, {begin.fingerprint} there"
            )
        lines = lines or other_model(self._host.plan.digest(), begin.plan)
        if lines:
            raise ConfigError(
                f"host {self._hosts.index} of island {self._host.name!r} has another "
                f"config or model than host 0: {'; '.join(lines)}; give all hosts one "
                f"config, and one model"
            )

    def _hear_unless_refused(self, key: str, timeout_s: float) -> bytes:
        heard = self._hear(key, timeout_s)
        if heard:
            return heard
        heard = self._hear("refusal", self._host.deadlines.pin_s)
        refusal = msgspec.msgpack.decode(heard, type=Refusal)
        with contextlib.suppress(HostsError):
            # Host 0 waits for this key, and then for this host to leave.
            self._hosts.tell(f"refusal/{self._hosts.index}", b"")
            self._refused = True
        raise Refused(refusal.code, refusal.message)

    def _hear(self, key: str, timeout_s: float) -> bytes:
        heard = self._hosts.hear(key, timeout_s)
        if heard is None:
            raise HostsError(
                f"host 0 of island {self._host.name!r} did not say {key!r} within "
                f"{timeout_s:g} s; is the coordinator reachable from it?"
            )
        return heard
