"""The parts of one host process of an island, whichever host decides for it.

`Parts` do not depend on who makes the steps; `Host` has those of the product's own
loop. `main.py` makes the host that leads (the only one, on most islands),
`hosts/follower.py` the others.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, TypeVar

import jax

from diloco_jax import checkpoint, compilation, restart_time, run_files
from diloco_jax.config import Config
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.data.batches import BatchReader, LeasedStream, ValidationBatches
from diloco_jax.data.loading import load_data
from diloco_jax.faults import Faults
from diloco_jax.island.checkpoints import Checkpoints
from diloco_jax.island.device.build import (
    Later,
    build_exchange,
    build_trainer,
    compile_ahead,
    compile_programs,
    join,
)
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.mesh import require_accelerator
from diloco_jax.island.device.replica import WatchedModel
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.evaluate import Evaluator, Watcher
from diloco_jax.island.hosts.world import Hosts
from diloco_jax.island.loop import Loop, Stepping
from diloco_jax.island.mailbox import Decisions, Mailbox
from diloco_jax.island.network.link import Lanes
from diloco_jax.island.network.offers import PeerAnchors, offer
from diloco_jax.island.network.transfers import Fetcher, Sender
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.island.profiling import Profiler
from diloco_jax.island.timing import Timing
from diloco_jax.machine import give_memory_back
from diloco_jax.models.build import build, build_plan
from diloco_jax.process import uncollected
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Boundary, Watching
from diloco_jax.protocol.messages import AnchorRequest, ProfileRequest
from diloco_jax.protocol.values import Version
from diloco_jax.wire import principal
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.bulk_server import BulkServer
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
        self._offering: BulkServer | None = None
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

    def _send_anchor(self, request: AnchorRequest, version: Version) -> None:
        fragment = request.fragment
        anchor = self._exchange.anchor(fragment)
        self.sender.put_anchor(fragment, version, anchor, request.sample)


class Host(Parts[Loop]):
    """The parts of a host that trains by the product's own loop."""

    _later: Later | None = None

    def __init__(
        self, config: Config, name: str, coordinator_address: str, workdir: Path
    ) -> None:
        """Load the data, and make the plan of the model's fragments; raises
        ConfigError or SecurityError."""
        run, placement = config.run, config.placement
        model = build(run)
        super().__init__(config, name, coordinator_address, build_plan(run, model))
        folder = checkpoint.island_folder(placement, workdir, name)
        self.checkpoints = Checkpoints(config, name, folder)
        compilation.use_cache(compilation.of_run(workdir))
        self._lasted = workdir / run_files.LASTED
        self.traces = workdir / run_files.PROFILES
        data, length = load_data(run), run.sequence_length
        fields, batch_size = model.fields(run.data.arrays), self.island.batch_size
        reader = BatchReader(data.index(run.seed), fields, length)
        self.data = LeasedStream(reader, batch_size)
        self._validation = ValidationBatches(
            data.validation, batch_size, fields, length
        )

    def build(self, identity: Identity, hosts: Hosts | None) -> None:
        """Build everything that needs a device."""
        run, self._hosts = self.config.run, hosts
        require_accelerator(self.island)
        model, self._trainer = build_trainer(run, self.island)
        own = self._trainer.own_rows()
        self.data.read_only(own)
        self._validation.read_only(own)
        self.checkpoints.open(identity, self.plan, hosts)
        exchange, self._zeros = build_exchange(run, model, self._trainer)
        self._connect(identity, exchange)
        placement = self.config.placement
        self._evaluator = self._passes(placement.evaluate_every_steps)
        self._watched: WatchedModel | None = None
        if placement.watch_every:
            dtype = self.island.compute_dtype
            self._watched = WatchedModel(exchange, self._zeros, dtype)

    @uncollected()
    def compile(self) -> None:
        """Compile everything, then run steps and evaluations once.

        No host runs a program before all hosts have compiled theirs: one may find in
        its cache what takes another minutes. On TPUs everything is compiled before
        anything runs. So an error of the compiler, which raises ConfigError, differs
        from a failure of the machine, which another attempt may cure. Elsewhere a host
        without others compiles what is seldom needed while it trains.
        """
        began, trainer = time.monotonic(), self._trainer
        ahead = self._hosts is not None or jax.default_backend() == "tpu"
        if ahead:
            length = self.config.run.sequence_length
            compile_ahead(trainer, self._exchange, length, self._watched)
            self._meet_compiled()
        else:
            compile_programs(self._exchange.lower_all(seldom=False))
        params, self._zeros = self._zeros, {}
        batch = self._validation[0]
        if self.config.placement.evaluate_every_steps:
            float(trainer.eval_step(params, batch)[0])
        if self._watched is not None:
            compile_programs(self._watched.lower_all())
            float(trainer.eval_step(self._watched.params, batch)[0])
        state = TrainState(params, trainer.init_inner(params))
        training = {name: batch[name] for name in trainer.fields}
        _, metrics = trainer.step(state, trainer.put_batch(training), 0.0)
        float(metrics["loss"])
        if not ahead:
            self._later = Later(self._exchange.lower_all())
        # A compiler leaves as much freed memory as a small island needs otherwise.
        give_memory_back()
        self.compile_seconds = time.monotonic() - began

    def loop(
        self, versions: list[Version], decisions: Decisions, faults: Faults
    ) -> Loop:
        """Make the train loop, which begins at the anchors of these versions."""
        run = self.config.run
        anchors = {} if self.gives else self._anchors(versions)
        restored = self.checkpoints.restore(
            self.plan, self._trainer, self._exchange, versions
        )
        # A join moves tiles between hosts, which may have read for unequal times.
        self._meet_to_join("restored")
        if self.gives:
            self._exchange.start_from(self._trainer.first(run.seed))
        replica = join(self.plan, self._trainer, self._exchange, anchors, restored)
        self._meet_to_join("ready")
        self._offer(versions)
        books = Books(versions, ADOPT_RULES.find(run.sync.adopt))
        books.begin()
        if restored is not None:
            books.restored(restored.incarnation, restored.steps, restored.residuals)
        goal = goal_of(run, self.island.batch_size)
        watching = watcher = None
        if (model := self._watched) is not None:
            watching = Watching(len(versions), model.copy)
            watcher = Watcher(watching, model, self._passes(0))
        return Loop(
            config=self.config,
            name=self.name,
            replica=replica,
            boundary=Boundary(
                books,
                goal,
                arrays=replica,
                incoming=self.mailbox.arrivals,
                outgoing=self.sender,
                data=self.data,
                watching=watching,
            ),
            data=self.data,
            mailbox=self.mailbox,
            decisions=decisions,
            pace=Pace(run, goal, warm=restored is not None),
            timing=Timing(self.compile_seconds),
            evaluator=self._evaluator,
            watcher=watcher,
            send_anchor=self._send_anchor,
            patience_s=self._data_s,
            checkpoints=self.checkpoints,
            faults=faults,
            lasts=self._tell_lasting,
        )

    def _tell_lasting(self) -> None:
        """Tell whoever starts this process again that it did train."""
        with contextlib.suppress(OSError):
            self._lasted.touch()

    def _passes(self, every_steps: int) -> Evaluator:
        batches = self.config.placement.evaluate_batches
        return Evaluator(self._trainer, self._validation, every_steps, batches)

    def save_due(self) -> bool:
        """Tell if a checkpoint is to be written now."""
        return self.checkpoints.due()

    def close(self) -> None:
        """Free sockets and threads; wait a while for a checkpoint."""
        self.data.close()
        if self._later is not None:
            self._later.close(self.deadlines.stop_s / 5)
        super().close()
        patience_s = max(self.deadlines.stop_s / 2, self.config.placement.notice_s)
        self.checkpoints.close(patience_s)
