"""The parts of one host process that do not depend on who makes its steps."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, TypeVar

import jax

from diloco_jax import restart_time, run_files
from diloco_jax.config import Config
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.faults import Faults
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.hosts.world import Hosts
from diloco_jax.island.mailbox import Decisions, Mailbox
from diloco_jax.island.network.link import Lanes
from diloco_jax.island.network.offers import PeerAnchors, offer
from diloco_jax.island.network.transfers import Fetcher, Sender
from diloco_jax.island.profiling import Profiler
from diloco_jax.island.stepping import Stepping
from diloco_jax.protocol.messages import ProfileRequest
from diloco_jax.protocol.values import Version
from diloco_jax.wire import principal
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.bulk_server import OfferServer
from diloco_jax.wire.client import Client
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Stepping)
PartOfStart = Literal["connecting", "compiling", "fetching", "restoring"]


class Parts(abc.ABC, Generic[L]):
    """The parts of one host. Call `build`, `compile`, `loop` and at the end `close`."""

    compile_seconds = 0.0
    gives = False
    """True if it begins with parameters of its own, which become the run's first."""
    awaits_last = False
    """True if it is to have the run's result, as for `Conversation`."""
    own_data = False
    """True if its steps use other data than the rows that are leased to it."""
    traces = Path(run_files.PROFILES)
    """Folder of the traces that an operator asks for."""

    def __init__(
        self, config: Config, name: str, coordinator_address: str, plan: FragmentPlan
    ) -> None:
        """Raise ConfigError or SecurityError."""
        config = restart_time.lasting(config, plan.total)
        placement = config.placement
        self.config, self.name, self.island = config, name, config.island(name)
        self.plan, self.deadlines = plan, placement.deadlines
        self.watched: Callable[[str, float, str], None] = lambda *part: None
        """Called as each part of the start begins; see `HangWatch.begin`."""
        self._hosts: Hosts | None = None
        self._offering: OfferServer | None = None
        self._peers: PeerAnchors | None = None
        self.mailbox = Mailbox(awaits_last=self.awaits_last)
        tls = TlsFiles.load_given(placement.certificates, principal.island(name))

        def client(address: str) -> Client:
            return Client(
                address,
                tls=tls,
                deadlines=self.deadlines,
                bulk_channels=placement.bulk_channels,
                insecure=placement.insecure,
            )

        self.lanes = Lanes(client(coordinator_address), plan.sizes)

    @property
    def join_s(self) -> float:
        """Longest time that hosts wait for each other in a join, after compilation.

        The coordinator may start again in that time.
        """
        fetched_s = self.deadlines.join_s(4 * self.plan.total)
        return self.config.placement.outage_budget_s + fetched_s

    def begin(self, part: PartOfStart) -> None:
        """Have the watch over hanging processes watch a part of the start."""
        placement = self.config.placement
        lasts_s, field = {
            # A host may wait for host 0.
            "connecting": (placement.away_s + self.deadlines.pin_s, "compile"),
            # A host that has compiled waits as long for the others.
            "compiling": (2 * placement.compile_budget_s, "compile"),
            "fetching": (self.join_s, "outage"),
            "restoring": (2 * self.join_s, "outage"),
        }[part]
        self.watched(part, lasts_s, f"placement.{field}_budget_s")

    @abc.abstractmethod
    def build(self, identity: Identity, hosts: Hosts | None) -> None:
        """Build everything that needs a device. hosts: those of the island, if it has
        several; all of them must call it."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Run everything once, so that nothing compiles later. All hosts of an island
        must call it. Raises ConfigError for what does not compile."""

    @abc.abstractmethod
    def loop(self, versions: list[Version], decisions: Decisions, faults: Faults) -> L:
        """Begin at the anchors of these versions, by fragment; they have arrived in
        full."""

    def save_due(self) -> bool:
        """Tell if a checkpoint is to be written now."""
        return False

    def close(self) -> None:
        """Free sockets and threads."""
        if self._offering is not None:
            self._offering.stop(0.0)
        if self._peers is not None:
            self._peers.close()
        self.lanes.close()

    def _meet(self, what: str, timeout_s: float, field: str) -> None:
        """Meet the other hosts. field: setting to raise if that takes too long."""
        if self._hosts is not None:
            mailbox = self.mailbox
            self._hosts.meet(what, timeout_s, lambda: mailbox.ending is not None, field)

    def _meet_to_join(self, what: str) -> None:
        self._meet(what, self.join_s, "placement.outage_budget_s")

    def _meet_compiled(self) -> None:
        budget_s = self.config.placement.compile_budget_s
        self._meet("compiled", budget_s, "placement.compile_budget_s")

    @property
    def _data_s(self) -> float:
        """Longest wait for data. What the island gives must arrive before it has
        any."""
        given_s = self.join_s if self.gives else 0.0
        return self.config.placement.patience_s + given_s

    def _connect(self, identity: Identity, exchange: Exchange) -> None:
        self._exchange, self._identity = exchange, identity
        if any(
            island.offers and name != self.name
            for name, island in self.config.islands.items()
        ):
            self._peers = PeerAnchors(
                self.config, self.name, identity, self.lanes, self.deadlines
            )
        self.fetcher = Fetcher(
            self.lanes, identity, exchange, self.mailbox, self._peers
        )
        self.sender = Sender(
            self.lanes,
            identity,
            exchange.layouts_up,
            exchange.layouts_whole,
            self.mailbox,
            self.deadlines,
            self.lanes.dealt,
        )

    def profile(self, request: ProfileRequest) -> None:
        """Trace the next steps; return at once."""
        Profiler(self.mailbox, self.name, self.traces).ask(request)

    def _anchors(self, versions: list[Version]) -> dict[int, tuple[jax.Array, ...]]:
        """Return the anchors of these versions, which have arrived in full."""
        incoming = self.mailbox.arrivals
        return {
            fragment: incoming.pick(fragment, version).anchor or ()
            for fragment, version in enumerate(versions)
        }

    def _offer(self, versions: list[Version]) -> None:
        """Offer the anchors at these versions, which are in place."""
        host = self._hosts.index if self._hosts is not None else 0
        self._offering = offer(
            self.config,
            self._identity,
            host,
            self._exchange,
            versions,
            self.deadlines,
            self.lanes.is_revoked,
        )

    def _send_anchor(self, fragment: int, version: Version, ticket: bytes) -> None:
        anchor = self._exchange.anchor(fragment)
        self.sender.put_anchor(fragment, version, anchor, ticket)
