"""One island's process: ask for the run's config, meet, build, join, train, leave.

`run` is the whole life. A join is: hello and welcome, build and compile (reports go
on), fetch every fragment in full at its newest version, place the parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Generic

import msgspec

from diloco_jax import before_jax, compilation, machine
from diloco_jax.config import Config, ConfigError, shared_fields
from diloco_jax.config.loading import from_builtins
from diloco_jax.config.resolving import with_model_of
from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import parse_faults
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.island.hosts.follower import Follower
from diloco_jax.island.hosts.following import (
    HostsBegin,
    LeadDecisions,
    LeaveWatch,
    Moved,
    Orders,
    Refusal,
)
from diloco_jax.island.hosts.world import (
    Hosts,
    HostsError,
    WorldAddress,
    end_alone,
    join_world,
    leave_world,
)
from diloco_jax.island.loop import Loop
from diloco_jax.island.mailbox import Decisions, LiveDecisions, NotHereError
from diloco_jax.island.network.link import Awaited, Link, Targets, ending_of
from diloco_jax.island.network.transfers import Receiver
from diloco_jax.island.options import prepare_island
from diloco_jax.island.parts import Host, L, Parts
from diloco_jax.island.watches import (
    HangWatch,
    Preemption,
    ShortageWatch,
    end_hanging,
    ended_by_signals,
)
from diloco_jax.process import leave_at_once
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.reporting import Introduction, Status, hello
from diloco_jax.protocol.messages import OWN_DATA, Hello, ResendRequest, Welcome
from diloco_jax.protocol.values import FIRST_VERSION, Version, lead_of
from diloco_jax.wire import principal
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import ConnectionLost, Refused, SecurityError, WireError
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)


def ask_config(
    address: str,
    name: str,
    *,
    certificates: str,
    insecure: bool,
    deadlines: Deadlines,
    patience_s: float = 0.0,
) -> Config:
    """Return the run's config, as the coordinator at HOST:PORT gives it to the island
    of this name.

    patience_s: seconds for which a coordinator that is not there is tried again.

    Raises:
      ConnectionLost: it is not there. SecurityError: it cannot be trusted.
      ConfigError: it is of another version.
    """
    tls = TlsFiles.load_given(certificates, principal.island(name))
    client = Client(
        address, tls=tls, deadlines=deadlines, bulk_channels=1, insecure=insecure
    )
    began, suspicious = time.monotonic(), False
    until, awaited = began + patience_s, Awaited(deadlines, began)
    pauses = Backoff(deadlines)
    try:
        while True:
            try:
                found = client.config(deadlines.connect_s)
                return from_builtins(found, client.address)
            except (ConnectionLost, SecurityError) as error:
                # A coordinator that ends may look like one that cannot be trusted.
                lasting = isinstance(error, SecurityError) and suspicious
                now = time.monotonic()
                if lasting or now >= until:
                    raise
                awaited.tell(error, now, until)
                pause_s = pauses.next_s()
                if isinstance(error, SecurityError):
                    suspicious, pause_s = True, deadlines.retry_max_s
            time.sleep(pause_s)
    finally:
        client.close()


def with_model_of_run(config: Config, name: str, address: str) -> Config:
    """Return the config with the run's model, which the coordinator knows.

    If the run started from weights, only the coordinator has read their config.json. A
    config that names weights or a factory itself is returned unchanged.
    """
    if config.run.model.weights or config.run.model.factory:
        return config
    placement = config.placement
    theirs = ask_config(
        address,
        name,
        certificates=placement.certificates,
        insecure=placement.insecure,
        deadlines=placement.deadlines,
        patience_s=placement.away_s,
    )
    return with_model_of(theirs.run, config)


def meet(config: Config, name: str, where: WorldAddress) -> Hosts | None:
    """Return the hosts of the island, once all have come; None if it has one. Raises
    ConfigError or HostsError."""
    island = config.island(name)
    prepare_island(island)
    if before_jax.LIBTPU_VARIABLE in os.environ:
        # libtpu ends a process whose flags it does not know: the log says which they
        # were.
        logger.info(
            "island %s compiles with %s",
            name,
            before_jax.libtpu_flags_in_force(os.environ),
        )
        generation = before_jax.generation_of(island.topology) or generation_here()
        version = before_jax.libtpu_version()
        for clash in before_jax.flag_clashes(
            os.environ[before_jax.LIBTPU_VARIABLE],
            before_jax.libtpu_flags(generation, version),
            f"{generation}, libtpu {version}",
        ):
            logger.warning("island %s: %s", name, clash)
    if island.hosts == 1:
        return None
    placement = config.placement
    return join_world(
        where,
        island.hosts,
        budget_s=placement.time_budget_s,
        meet_s=placement.hosts_budget_s,
    )


def run(
    config: Config,
    name: str,
    coordinator_address: str,
    workdir: Path,
    incarnation: int,
    where: WorldAddress | None = None,
) -> int:
    """Train island `name` until the run is over; return the process's exit code.

    Args:
      config: resolved: outer optimizer and corpus digest are filled in.
      coordinator_address: HOST:PORT.
      workdir: of this process; holds the compilation cache unless the environment names
        another.
      incarnation: number of the attempt of this island, from 1; that of host 0 counts.
      where: address at which the hosts of the island meet, if it has several.
    """
    placement = config.placement
    budget_s = placement.hang_budget_s
    with HangWatch(budget_s, lambda text: leave_at_once(EXIT_FAILED)) as hanging:
        prepared_s = placement.hosts_budget_s
        hanging.begin("preparing", prepared_s, "placement.hosts_budget_s")
        where = where or WorldAddress()
        return _live(
            config, name, coordinator_address, workdir, incarnation, where, hanging
        )


def _live(
    config: Config,
    name: str,
    coordinator_address: str,
    workdir: Path,
    incarnation: int,
    where: WorldAddress,
    hanging: HangWatch,
) -> int:
    """See `run`. hanging: watches this process from here on."""
    island: LeadingHost[Loop] | Follower[Loop]
    try:
        hosts = meet(config, name, where)
        host = Host(config, name, coordinator_address, workdir)
        if hosts is not None and hosts.index > 0:
            island = Follower(host, hosts)
        else:
            island = LeadingHost(host, incarnation, hosts)
    except (ConfigError, SecurityError) as error:
        logger.error("island %s cannot start: %s", name, error)
        return end_alone(EXIT_CONFIG)
    except HostsError as error:
        logger.error("island %s cannot start: %s", name, error)
        return end_alone(EXIT_FAILED)
    preemption = Preemption(
        island.mailbox,
        config.placement.notice_s,
        island.asked_to_end if isinstance(island, Follower) else None,
    )
    if isinstance(island, LeadingHost) and preemption.expected:
        island.asked_to_end = preemption.notice
    host.watched = hanging.begin
    hanging.hangs = lambda text: end_hanging(island.stop, text, host.deadlines.stop_s)
    shortage = ShortageWatch((workdir,), island.mailbox.tell_short)
    # Later: a follower's and a leader's are other functions.
    with shortage, ended_by_signals(lambda who: island.asked_to_end(who)):
        try:
            preemption.watch()
            island.start()
            ending = hanging.run(island.loop)
        except (ConfigError, SecurityError) as error:
            ending = Ending(EXIT_CONFIG, str(error))
        except Refused as refused:
            ending = ending_of(refused)
        except (WireError, HostsError, NotHereError, TimeoutError) as error:
            # Asked to end, or refused on the control stream, while it was joining.
            ending = island.mailbox.ending or Ending(EXIT_FAILED, str(error))
        except Exception as error:
            if not (short := machine.thread_shortage(error)):
                logger.exception("island %s failed", name)
            text = short or f"{type(error).__name__}: {error}"
            ending = Ending(EXIT_FAILED, text)
        hanging.end()
        island.stop(ending)
        island.close()
    level = logging.INFO if ending.exit_code == EXIT_DONE else logging.ERROR
    counted = compilation.counted()
    logger.log(level, "island %s ends: %s; %s", name, ending.text, counted)
    if hosts is not None:
        if island.ended_together:
            # The first host to leave would make the others abort, which hides their
            # exit code.
            leave_world()
        if not island.ended_together or ending.exit_code != EXIT_DONE:
            leave_at_once(ending.exit_code)
    return ending.exit_code


class LeadingHost(Generic[L]):
    """Lead the hosts: start, stop and close are called once, in this order; between
    the first two, `loop` trains."""

    def __init__(
        self, host: Parts[L], incarnation: int, hosts: Hosts | None = None
    ) -> None:
        """hosts: of this island, if it has several."""
        self._host, self._incarnation = host, incarnation
        self._config, self._name = host.config, host.name
        self._deadlines = host.deadlines
        self._session = uuid.uuid4().hex
        self.mailbox = self._host.mailbox
        self._link = Link(self._host.lanes, self._hello, self.mailbox, self._deadlines)
        self.asked_to_end: Callable[[str], None] = self._end
        """Called with the name of the asker; ends the host at a step boundary, with a
        goodbye."""
        self._hosts = hosts
        self._orders = (
            Orders(hosts, self.mailbox, self._deadlines.pin_s) if hosts else None
        )
        if self._orders is not None:
            give = self._orders.give
            self._host.lanes.moved = lambda workers: give(Moved(workers=workers))
        self._receiver: Receiver | None = None
        self._leaves: LeaveWatch | None = None
        self._loop: L | None = None
        self._refused = False

    def start(self, script: Decisions | None = None) -> None:
        """Join; return when the first step can be made.

        script: another source of decisions than the live one.
        """
        try:
            placement = self._config.placement
            self._host.begin("connecting")
            welcome = self._link.connect(placement.outage_budget_s, placement.away_s)
        except Refused as refused:
            self._tell_refused(refused, "begin")
            raise
        logger.info(
            "island %s, incarnation %d: in run %s",
            self._name,
            self._incarnation,
            welcome.run_id,
        )
        # Without versions it is not to fetch the first ones, but to give them.
        self._host.gives = not welcome.versions
        lead = lead_of(self._host.island.hosts) if script is None else 0
        self._tell_begin(welcome.run_id, lead)
        try:
            versions = self._join(welcome)
        except Refused as refused:
            self._tell_refused(refused, "joined")
            raise
        self._tell_joined(versions)
        faults = parse_faults(placement.faults, self._config.islands, placement.workers)
        self._host.begin("restoring")
        self._loop = self._host.loop(
            versions,
            self._led(script or self._live(), lead),
            faults.for_who(self._name, self._incarnation),
        )
        self._host.sender.start()
        assert self._receiver is not None
        self._receiver.start()
        logger.info("island %s begins to train", self._name)

    @property
    def loop(self) -> L:
        """The boundaries of this incarnation, once it has started."""
        assert self._loop is not None
        return self._loop

    @property
    def ended_together(self) -> bool:
        """True if all hosts ended together, see Loop; also if it was refused and all
        hosts know."""
        of_loop = self._loop is not None and self._loop.ended_together
        return self._refused or of_loop

    def stop(self, ending: Ending) -> None:
        """Say goodbye, within `stop_s`; at once where the machine is taken away: the
        notice gave time to finish what was under way."""
        timeout_s = self._deadlines.stop_s / 4
        patience_s = 0.0 if ending.reason == "preempted" else timeout_s
        if self._loop is not None:
            self._host.sender.close(patience_s)
        if self._receiver is not None:
            self._receiver.close(patience_s)
        self._link.close(ending, timeout_s)
        if self._hosts is not None:
            with contextlib.suppress(HostsError):
                self._hosts.tell("left", b"")
        if self._leaves is not None:
            self._leaves.close(timeout_s)

    def close(self) -> None:
        """Free sockets and threads."""
        self._host.close()

    def _end(self, who: str) -> None:
        logger.info("asked to end by %s: at the next step boundary", who)
        self.mailbox.end(EXIT_DONE, f"asked to end by {who}", "stopped")

    # ---- joining ----------------------------------------------------------------

    def _join(self, welcome: Welcome) -> list[Version]:
        """Build, compile and fetch every fragment, while reports go on. An island that
        gives the first parameters sends them from its loop, when it is asked."""
        host, mailbox = self._host, self.mailbox
        first = (FIRST_VERSION,) * len(host.plan.fragments)
        identity = Identity(
            run_id=welcome.run_id,
            island=self._name,
            incarnation=self._incarnation,
            session=self._session,
        )
        host.begin("compiling")
        host.build(identity, self._hosts)
        self._receiver = receiver = Receiver(
            host.fetcher,
            mailbox,
            self._deadlines,
            welcome.versions or first,
            self._orders,
            host.join_s,
            host.lanes.dealt,
        )
        mailbox.post(Status(phase="compiling"))
        targets = Targets(want=receiver.want, resend=self._resend, profile=host.profile)
        self._link.start(targets)
        host.compile()
        if host.gives:
            logger.info("this island gives the run's first parameters")
            receiver.have_all(first)
            return list(first)
        began = time.monotonic()
        host.begin("fetching")
        versions = receiver.fetch_all()
        seconds = time.monotonic() - began
        logger.info(
            "compiled in %.1f s (%s), fetched %d fragments in %.1f s (%.1f MB/s)",
            host.compile_seconds,
            compilation.counted(),
            len(versions),
            seconds,
            mailbox.traffic()["bytes_join"] / max(seconds, 1e-3) / 1e6,
        )
        return versions

    def _hello(self, status: Status) -> Hello:
        run, island = self._config.run, self._host.island
        return hello(
            Introduction(
                island=self._name,
                incarnation=self._incarnation,
                session=self._session,
                fingerprint=run.fingerprint(),
                run=shared_fields(run),
                plan=self._host.plan.digest(),
                island_config=dataclasses.asdict(island),
                environment={
                    **before_jax.describe_environment(),
                    OWN_DATA: self._host.own_data,
                },
                tokens_per_step=island.batch_size * run.sequence_length,
                sequences_per_step=island.batch_size,
                lead=lead_of(island.hosts),
            ),
            status,
        )

    # ---- the other hosts ----------------------------------------------------------

    def _live(self) -> Decisions:
        host = self._host
        return LiveDecisions(self.mailbox, host.save_due, self._deadlines.stop_s)

    def _led(self, source: Decisions, lead: int) -> Decisions:
        if self._hosts is None:
            return source
        return LeadDecisions(source, self._hosts, lead, self._deadlines.budget_s)

    def _tell_begin(self, run_id: str, lead: int) -> None:
        if self._hosts is None:
            return
        begin = HostsBegin(
            run_id=run_id,
            incarnation=self._incarnation,
            session=self._session,
            fingerprint=self._config.run.fingerprint(),
            plan=self._host.plan.digest(),
            island=dataclasses.asdict(self._host.island),
            lead=lead,
            gives=self._host.gives,
            workers=self._host.lanes.addresses,
        )
        self._hosts.tell("begin", msgspec.msgpack.encode(begin))
        self._leaves = LeaveWatch(
            self._hosts, lambda who: self.asked_to_end(who), self._deadlines
        )
        self._leaves.start()

    def _tell_refused(self, refused: Refused, instead_of: str) -> None:
        """Tell the other hosts of a refusal, so that they end as this host does.
        instead_of: the key that they wait for."""
        if self._hosts is None:
            return
        with contextlib.suppress(HostsError):
            refusal = Refusal(code=refused.code, message=refused.message)
            self._hosts.tell("refusal", msgspec.msgpack.encode(refusal))
            self._hosts.tell(instead_of, b"")
            heard = [
                self._hosts.hear(f"refusal/{host}", self._deadlines.stop_s)
                for host in self._hosts.others
            ]
            self._refused = None not in heard

    def _tell_joined(self, versions: list[Version]) -> None:
        if self._hosts is not None:
            self._hosts.tell("joined", msgspec.msgpack.encode(versions))

    def _resend(self, request: ResendRequest) -> None:
        self._host.sender.resend(request)
        if self._orders is not None:
            self._orders.give(request)
