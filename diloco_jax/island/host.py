"""One host process of an island: how it starts, what it is made of, how it ends.

`Host` is the same whoever makes the steps and wherever decisions come from. Host 0,
which is the only one on most islands, has them from the coordinator. The others follow
it: they have no control stream, fetch and send their part as host 0 orders, and act on
its decisions, so their parameters are those of every other host. A subclass has the
steps: `main.TrainingHost` those of the product's own loop, `joined.JoinedHost` those of
a user's.

A join is: hello and welcome, build, compile and beside it fetch every fragment in full
at its newest version (reports go on), place the parameters.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import jax
import msgspec
from msgspec.structs import replace

from diloco_jax import before_jax, compilation, run_files
from diloco_jax.config import Config, ConfigError, differences, shared_fields
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import Faults, parse_faults
from diloco_jax.hardware.machines import lasting
from diloco_jax.island.device.exchange import Exchange, LentParams, Restored
from diloco_jax.island.hosts import (
    Begin,
    FollowDecisions,
    JoinVersions,
    LeaveWatch,
    Moved,
    Orders,
    OrderThread,
    SharedDecisions,
)
from diloco_jax.island.link import Link, ending_of
from diloco_jax.island.loop import Stepping
from diloco_jax.island.mailbox import Decisions, LiveDecisions, Mailbox, NetworkThreads
from diloco_jax.island.region import Region
from diloco_jax.island.timing import Pace, Timing, goal_of
from diloco_jax.island.transfers import Fetcher, Lanes, Receiver, Sender
from diloco_jax.island.watches import leave, trace_steps
from diloco_jax.island.world import Hosts, HostsError
from diloco_jax.models.build import other_model
from diloco_jax.protocol.island.boundary import (
    Books,
    Boundary,
    Ending,
    LeasedData,
    Watching,
)
from diloco_jax.protocol.island.conversation import Wanted
from diloco_jax.protocol.island.reporting import Introduction, Status, hello
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    OWN_DATA,
    AnchorRequest,
    DonorFailed,
    ProfileRequest,
    ResendRequest,
    Version,
    lookahead_of,
)
from diloco_jax.wire import peers
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import ConnectionLost, Refused, WireError
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Stepping)
Heard = TypeVar("Heard")
TELL_S = 10.0
"""Seconds between two lines of the log about what is left of a start."""
PartOfStart = Literal["connecting", "compiling", "fetching", "restoring"]


def introduction(
    config: Config,
    name: str,
    plan: FragmentPlan,
    incarnation: int,
    session: str,
    *,
    own_data: bool,
) -> Introduction:
    """Return what an island of this config says of itself at every hello."""
    run, island = config.run, config.island(name)
    return Introduction(
        island=name,
        incarnation=incarnation,
        session=session,
        fingerprint=run.fingerprint(),
        run=shared_fields(run),
        plan=plan.digest(),
        island_config=dataclasses.asdict(island),
        environment={**before_jax.describe_environment(), OWN_DATA: own_data},
        tokens_per_step=island.batch_size * run.sequence_length,
        sequences_per_step=island.batch_size,
        lookahead=lookahead_of(island.hosts),
    )


class Host(abc.ABC, Generic[L]):
    """Call `start`, train by `loop`, then call `stop` and `close`, once each."""

    awaits_last = False
    """True if it is to have the run's result, as for `Conversation`."""
    own_data = False
    """True if its steps use other data than the rows that are leased to it."""
    gives = False
    """True if it begins with parameters of its own, which become the run's first."""
    compile_seconds = 0.0
    data: LeasedData
    watching: Watching | None = None
    """Of an island that can evaluate the merged model."""
    exchange: Exchange
    fetcher: Fetcher
    sender: Sender

    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        plan: FragmentPlan,
        incarnation: int,
        hosts: Hosts,
        serve: str = "",
    ) -> None:
        """Raise ConfigError or SecurityError.

        Args:
          address: HOST:PORT of the coordinator.
          incarnation: number of the attempt, from 1; that of host 0 counts.
          hosts: those of the island, of which this is one.
          serve: HOST:PORT at which others of its region reach it; see `Region`.
        """
        config = lasting(config, plan.total)
        placement = config.placement
        self.config, self.name, self.island = config, name, config.island(name)
        self.plan, self.deadlines = plan, placement.deadlines
        self.hosts = hosts
        self._incarnation = incarnation
        self.watched: Callable[[str, float, str], None] = lambda *part: None
        """Called as each part of the start begins; see `HangWatch.begin`."""
        self.traces = Path(run_files.PROFILES)
        """Folder of the traces that an operator asks for."""
        self.mailbox = Mailbox(awaits_last=self.awaits_last)
        self.region = (
            Region(config, name, hosts.index, address, serve)
            if name in config.regions()
            else None
        )
        client = Client(
            address,
            tls=TlsFiles.load_given(placement.certificates, peers.island(name)),
            deadlines=self.deadlines,
            bulk_channels=placement.bulk_channels,
            insecure=placement.insecure,
        )
        self.lanes = Lanes(client, plan.sizes, self._moved)
        self._orders = (
            Orders(hosts, self.mailbox, self.deadlines.pin_s)
            if hosts.others and not self.follows
            else None
        )
        self._noticed = threading.Lock()
        self._link: Link | None = None
        self._receiver: Receiver | None = None
        self._network: list[NetworkThreads] = []
        """To be closed as it ends, first to last."""
        self._loop: L | None = None
        self._told = False
        """True if all hosts know that the island ends before it trains."""
        self._tell_at = time.monotonic() + TELL_S

    @functools.cached_property
    def _who(self) -> Introduction:
        """Introduction of this host; jax finds its devices for it."""
        return introduction(
            self.config,
            self.name,
            self.plan,
            self._incarnation,
            uuid.uuid4().hex,
            own_data=self.own_data,
        )

    def _gives_at(self) -> tuple[str, ...]:
        """Return where all hosts of the island give publishes; empty if one does not,
        or does not say so in time."""
        if self.region is None:
            return ()
        others = [
            self.hosts.hear(f"gives/{host}", self.deadlines.pin_s)
            for host in self.hosts.others
        ]
        found = (self.region.address.encode(), *(other or b"" for other in others))
        return tuple(map(bytes.decode, found)) if all(found) else ()

    # ---- the steps --------------------------------------------------------------

    @abc.abstractmethod
    def build(self, identity: Identity) -> Exchange:
        """Build everything that needs a device. All hosts of the island call it."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Run everything once, so that nothing compiles later. All hosts of an island
        must call it. Raises ConfigError for what does not compile."""

    @abc.abstractmethod
    def restore(self, versions: Sequence[Version]) -> Restored | None:
        """Return what an earlier attempt has left that holds at these versions."""

    @abc.abstractmethod
    def copy(
        self,
        anchors: dict[int, tuple[jax.Array, ...]] | None,
        restored: Restored | None,
    ) -> LentParams:
        """Make the model copy, which begins at these anchors, by fragment. None: at
        parameters of the island's own, which it gives."""

    @abc.abstractmethod
    def loop_of(self, shared: dict[str, Any], faults: Faults) -> L:
        """Make the loop. shared: the fields that every `Stepping` has."""

    def save_due(self) -> bool:
        """Tell if a checkpoint is to be written now."""
        return False

    # ---- the start --------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """True if host 0, another one, decides."""
        return self.hosts.index > 0

    def programs_left(self, count: int) -> None:
        """Tell how many programs are still to be compiled or read from the cache.

        Raises ConnectionLost if the island is to end before that, and this is its only
        host: several end together, after they have met. One that is to have the run's
        result still starts once the run is over.
        """
        self._tell_left(programs_left=count)
        ending = self.mailbox.ending
        if ending is None or self.hosts.others:
            return
        if not (self.awaits_last and ending.reason == "finished"):
            raise ConnectionLost(f"the island ends while it compiles: {ending.text}")

    def _tell_left(self, **left: int) -> None:
        """Tell that, or how many fragments are still to come; from any thread."""
        both, now = self.mailbox.tell_left(**left), time.monotonic()
        if now >= self._tell_at and any(both.values()):
            self._tell_at = now + TELL_S
            logger.info(
                "island %s: %d programs are left to compile or read, and %d fragments "
                "to fetch",
                self.name,
                *both.values(),
            )

    @property
    def starts(self) -> bool:
        """True until the first step can be made."""
        return self._loop is None

    @property
    def loop(self) -> L:
        """The boundaries of this incarnation, once it has started."""
        assert self._loop is not None
        return self._loop

    def start(self, script: Decisions | None = None) -> None:
        """Join; return when the first step can be made.

        script: another source of decisions for host 0 than the live one.

        Raises Refused if the coordinator refuses the island; HostsError if host 0 says
        nothing in time, or the mailbox's ending; ConfigError if hosts have different
        configs; and any error of the wire.
        """
        config, placement = self.config, self.config.placement
        self._begin("connecting")
        begin = self._hear_begin() if self.follows else self._connect(script is None)
        self.gives = begin.gives
        incarnation = begin.who.incarnation
        identity = Identity(
            run_id=begin.run_id,
            island=self.name,
            incarnation=incarnation,
            session=begin.who.session,
        )
        self._begin("compiling")
        exchange = self.exchange = self.build(identity)
        if self.region is not None:
            self.region.begin(begin.run_id)
        self.fetcher = Fetcher(
            self.lanes, identity, exchange, self.mailbox, self.region
        )
        self.fetcher.lands = False
        self.sender = Sender(
            self.lanes,
            identity,
            exchange.layouts_up,
            exchange.layouts_whole,
            self.mailbox,
            self.deadlines,
        )
        self._network.append(self.sender)
        versions = self._follow() if self.follows else self._join(begin.versions)
        faults = parse_faults(placement.faults, config.islands, placement.workers)
        self._begin("restoring")
        self._loop = self._place(
            versions,
            self._decisions(script, begin.lookahead),
            faults.for_who(self.name, incarnation, self.hosts.index),
        )
        self.sender.start()
        if self._receiver is not None:
            self._receiver.start()
        logger.info("island %s begins to train", self.name)

    def _begin(self, part: PartOfStart) -> None:
        """Have the watch over hanging processes watch a part of the start."""
        placement = self.config.placement
        lasts_s, field = {
            # A host may wait for host 0.
            "connecting": (placement.away_s + self.deadlines.pin_s, "compile"),
            # A host that has compiled waits as long for the others.
            "compiling": (2 * placement.compile_budget_s, "compile"),
            "fetching": (self._join_s, "outage"),
            "restoring": (2 * self._join_s, "outage"),
        }[part]
        self.watched(part, lasts_s, f"placement.{field}_budget_s")

    @property
    def _join_s(self) -> float:
        """Longest time that hosts wait for each other in a join, after compilation;
        also that of each fetch.

        The coordinator may start again in that time.
        """
        fetched_s = self.deadlines.join_s(4 * self.plan.total)
        return self.config.placement.outage_budget_s + fetched_s

    def _place(
        self, versions: Sequence[Version], decisions: Decisions, faults: Faults
    ) -> L:
        """Make the loop, which begins at the anchors of these versions."""
        run = self.config.run
        restored = self.restore(versions)
        # A join moves tiles between hosts, which may have read for unequal times.
        self._meet("restored", self._join_s, "outage")
        arrivals, landed = self.mailbox.arrivals, self.fetcher.landed
        anchors = None
        if not self.gives:
            anchors = {
                fragment: landed(arrivals.pick(fragment, version)).anchor or ()
                for fragment, version in enumerate(versions)
            }
        copy = self.copy(anchors, restored)
        self._meet("ready", self._join_s, "outage")
        books = Books(versions, ADOPT_RULES.find(run.sync.adopt))
        books.begin()
        if restored is not None:
            incarnation, steps, _, residuals, unheard = restored
            books.restored(incarnation, steps, residuals, unheard)
        goal = goal_of(run, self.island.batch_size)
        # What the island gives must arrive before it has any data.
        given_s = self._join_s if self.gives else 0.0
        shared = {
            "config": self.config,
            "name": self.name,
            "replica": copy,
            "boundary": Boundary(
                books,
                goal,
                arrays=copy,
                incoming=arrivals,
                outgoing=self.sender,
                data=self.data,
                watching=self.watching,
            ),
            "data": self.data,
            "mailbox": self.mailbox,
            "decisions": decisions,
            "pace": Pace(run, goal, warm=restored is not None),
            "timing": Timing(self.compile_seconds),
            "send_anchor": self._send_anchor,
            "patience_s": self.config.placement.patience_s + given_s,
        }
        return self.loop_of(shared, faults)

    def meet_compiled(self) -> None:
        """Meet the other hosts once all programs are compiled here."""
        self._meet("compiled", self.config.placement.compile_budget_s, "compile")

    def _meet(self, what: str, timeout_s: float, field: str) -> None:
        """Meet the other hosts. field: setting to raise if that takes too long.

        Host 0 meets them although the island is to end: they end by a decision of its
        loop, and its exit would abort those that still come. One that is preempted has
        no time for that.
        """

        def ends() -> bool:
            ending = self.mailbox.ending
            return ending is not None and (self.follows or ending.reason == "preempted")

        self.hosts.meet(what, timeout_s, ends, f"placement.{field}_budget_s")

    def _decisions(self, script: Decisions | None, lookahead: int) -> Decisions:
        budget_s = self.deadlines.budget_s
        if self.follows:
            return FollowDecisions(self.hosts, self.mailbox, lookahead, budget_s)
        source = script or LiveDecisions(
            self.mailbox, self.save_due, self.deadlines.stop_s
        )
        if not self.hosts.others:
            return source
        return SharedDecisions(source, self.hosts, lookahead, budget_s)

    def _send_anchor(self, request: AnchorRequest, version: Version) -> None:
        fragment = request.fragment
        anchor = self.exchange.anchor(fragment)
        self.sender.put_anchor(fragment, version, anchor, request.sample)

    # ---- host 0 -----------------------------------------------------------------

    def _connect(self, live: bool) -> Begin:
        """Say hello to the coordinator, and tell the others what they have to know."""
        placement = self.config.placement
        who = replace(self._who, gives_at=self._gives_at())
        self._link = Link(
            self.lanes,
            lambda status: hello(who, status),
            self.mailbox,
            self.deadlines,
        )
        with self._telling("begin"):
            welcome = self._link.connect(placement.outage_budget_s, placement.away_s)
        logger.info(
            "island %s, incarnation %d: in run %s",
            self.name,
            self._who.incarnation,
            welcome.run_id,
        )
        begin = Begin(
            who=self._who,
            run_id=welcome.run_id,
            lookahead=self._who.lookahead if live else 0,
            # Without versions it is not to fetch the first ones, but to give them.
            gives=not welcome.versions,
            versions=welcome.versions or (FIRST_VERSION,) * len(self.plan.fragments),
            workers=self.lanes.addresses,
        )
        self.hosts.tell("begin", msgspec.msgpack.encode(begin))
        if self.hosts.others:
            watch = LeaveWatch(self.hosts, self.mailbox, self.asked_to_end)
            self._network.append(watch)
            watch.start()
        return begin

    def _join(self, versions: Sequence[Version]) -> Sequence[Version]:
        """Compile, and beside it fetch every fragment, while reports go on; return the
        versions. An island that gives the first parameters sends them from its loop,
        when it is asked."""
        assert self._link is not None
        mailbox = self.mailbox
        receiver = self._receiver = Receiver(
            self.fetcher,
            mailbox,
            self.deadlines,
            versions,
            self._orders,
            self._join_s,
            lambda left: self._tell_left(fragments_left=left),
            self.name,
        )
        self._network.append(receiver)
        mailbox.post(Status(phase="compiling"))
        mailbox.errands = {
            Wanted: receiver.want,
            ResendRequest: self._resend,
            ProfileRequest: self._profile,
            DonorFailed: receiver.rest,
        }
        self._link.start()
        if self.gives:
            logger.info("this island gives the run's first parameters")
            receiver.have_all(versions)
            self._compile()
        else:
            joined = receiver.begin_join()
            self._compile()
            with self._telling("joined"):
                versions = joined()
            seconds = receiver.join_seconds
            logger.info(
                "compiled in %.1f s (%s), fetched %d fragments in %.1f s (%.1f MB/s) "
                "beside it",
                self.compile_seconds,
                compilation.counted(),
                len(versions),
                seconds,
                mailbox.counted()[0]["bytes_join"] / max(seconds, 1e-3) / 1e6,
            )
            if self.config.placement.rehearse:
                mailbox.tell_trial(
                    join_bytes=mailbox.counted()[0]["bytes_join"],
                    join_seconds=seconds,
                    round_trip_seconds=self.lanes.round_trip_s(
                        self.deadlines.connect_s
                    ),
                )
        self.hosts.tell(
            "joined", msgspec.msgpack.encode(JoinVersions(versions=tuple(versions)))
        )
        return versions

    def _compile(self) -> None:
        """Compile, after which whatever comes goes to the devices at once."""
        self.compile()
        self.programs_left(0)
        self.fetcher.lands = True
        self._begin("fetching")

    @contextlib.contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        """Tell the other hosts if the island is refused, or asked to end, under the key
        that they wait for, so that they end as this host does."""
        try:
            yield
        except WireError as error:
            ending, hosts = self.mailbox.ending, self.hosts
            if isinstance(error, Refused):
                ending = ending_of(error)
            with contextlib.suppress(HostsError):
                if ending is not None:
                    hosts.tell(key, msgspec.msgpack.encode(ending))
                    until = time.monotonic() + self.deadlines.stop_s
                    told = [
                        hosts.hear(f"told/{host}", max(0.0, until - time.monotonic()))
                        for host in hosts.others
                    ]
                    self._told = None not in told
            raise

    def _resend(self, request: ResendRequest) -> None:
        self.sender.resend(request)
        if self._orders is not None:
            self._orders.give(request)

    def _moved(self, workers: tuple[str, ...]) -> None:
        if self._orders is not None:
            self._orders.give(Moved(workers=workers))

    def _profile(self, request: ProfileRequest) -> None:
        trace_steps(self.mailbox, self.name, self.traces, request)

    # ---- the other hosts ----------------------------------------------------------

    def _hear_begin(self) -> Begin:
        """Hear from host 0 what to build. Raises ConfigError if host 0 has another
        config."""
        timeout_s = self.config.placement.away_s + self.deadlines.pin_s
        if self.region is not None:
            self.hosts.tell(f"gives/{self.hosts.index}", self.region.address.encode())
        begin = self._hear("begin", Begin, timeout_s)
        here, there = self._who, begin.who
        lines = differences(here.island_config, there.island_config)
        if here.fingerprint != there.fingerprint:
            lines.append(
                f"run: fingerprint {here.fingerprint} here, {there.fingerprint} there"
            )
        lines = lines or other_model(here.plan, there.plan)
        if lines:
            raise ConfigError(
                f"host {self.hosts.index} of island {self.name!r} has another config "
                f"or model than host 0: {'; '.join(lines)}; give all hosts one config, "
                f"and one model"
            )
        self.lanes.use(begin.workers)
        return begin

    def _follow(self) -> Sequence[Version]:
        """Compile, and do what host 0 orders; return the versions of the join."""
        orders = OrderThread(
            self.hosts,
            self.mailbox,
            self.fetcher.fetch,
            self.sender.resend,
            self.lanes.use,
            self.deadlines,
        )
        orders.start()
        self._network.append(orders)
        self._compile()
        return self._hear("joined", JoinVersions, self._join_s).versions

    def _hear(self, key: str, kind: type[Heard], timeout_s: float) -> Heard:
        heard = self.hosts.require(
            key,
            timeout_s,
            f"host 0 of island {self.name!r} did not say {key!r} within "
            f"{timeout_s:g} s; is the coordinator reachable from it?",
        )
        said: Heard | Ending = msgspec.msgpack.decode(heard, type=kind | Ending)
        if not isinstance(said, Ending):
            return said
        with contextlib.suppress(HostsError):
            # Host 0 waits for this key, and then for this host to leave.
            self.hosts.tell(f"told/{self.hosts.index}", b"")
            self._told = True
        self.mailbox.end(*said)
        raise HostsError(said.text)

    # ---- the end ----------------------------------------------------------------

    def asked_to_end(self, who: str) -> None:
        """End the island at a step boundary, with a goodbye. If this machine may be
        taken away, that is a notice: the open takes are sent first, and the process
        exits with the code of a failure, so that its supervisor starts it again."""
        notice_s = self.config.placement.notice_s
        if self.follows:  # Host 0 decides.
            with contextlib.suppress(HostsError):
                text = f"host {self.hosts.index}: {who}"
                self.hosts.tell("leave", text.encode())
        elif notice_s and self._noticed.acquire(blocking=False):
            logger.warning("notice by %s: this island leaves", who)
            ending = Ending(EXIT_FAILED, f"preempted ({who})", "preempted")
            leave(self.mailbox, notice_s, ending)
        elif not notice_s:  # Else two sources tell of one notice.
            logger.info("asked to end by %s: at the next step boundary", who)
            self.mailbox.end(EXIT_DONE, f"asked to end by {who}", "stopped")

    @property
    def ended_together(self) -> bool:
        """True if all hosts ended together, see `Stepping`; also if all were told so
        before it trained."""
        of_loop = self._loop is not None and self._loop.ended_together
        return self._told or of_loop

    def stop(self, ending: Ending) -> None:
        """Say goodbye, within `stop_s`; at once where the machine is taken away: the
        notice gave time to finish what was under way."""
        timeout_s = self.deadlines.stop_s / 4
        if self.follows and self.ended_together:
            # Host 0 may still need what this host has not sent.
            patience_s = self.config.placement.notice_s + 2 * timeout_s
            with contextlib.suppress(HostsError):
                self.hosts.hear("left", patience_s)
        at_once = ending.reason == "preempted" and not self.follows
        for threads in self._network:
            threads.close(0.0 if at_once else timeout_s)
        if self._link is not None:
            self._link.leave(ending, timeout_s)
            with contextlib.suppress(HostsError):
                self.hosts.tell("left", b"")

    def close(self) -> None:
        """Free sockets and threads."""
        self.lanes.close()
        if self.region is not None:
            self.region.close()
