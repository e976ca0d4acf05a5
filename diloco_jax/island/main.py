"""One island's process: meet the other hosts, join, train, leave.

`TrainingHost` has the steps of the product's own loop, and `run` is its whole life.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from diloco_jax import before_jax, checkpoint, compilation, machine, run_files
from diloco_jax.before_jax import prepare_island
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import is_open, with_choices_of, with_model_of
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import (
    Batch,
    BatchReader,
    LeasedStream,
    ValidationBatches,
)
from diloco_jax.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import Faults, parse_faults
from diloco_jax.files import StorageAway
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.island.checkpoints import Checkpoints
from diloco_jax.island.device.build import (
    build_exchange,
    build_trainer,
    compile_ahead,
    join,
)
from diloco_jax.island.device.exchange import (
    Exchange,
    LentParams,
    Restored,
    WatchedModel,
)
from diloco_jax.island.device.mesh import memory_here, require_accelerator
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.host import Host
from diloco_jax.island.link import ask_config, ending_of
from diloco_jax.island.loop import Evaluator, Loop, Watcher
from diloco_jax.island.mailbox import NotHereError
from diloco_jax.island.watches import (
    HangWatch,
    ShortageWatch,
    end_hanging,
    ended_by_signals,
    watch_metadata,
)
from diloco_jax.island.world import (
    ALONE,
    Hosts,
    HostsError,
    WorldAddress,
    end_alone,
    join_world,
    leave_world,
)
from diloco_jax.machine import give_memory_back
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.model import Params
from diloco_jax.process import gc_pause, leave_at_once
from diloco_jax.protocol.island.boundary import Ending, Watching
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.errors import Refused, SecurityError, WireError

logger = logging.getLogger(__name__)


def with_model_of_run(config: Config, name: str, address: str) -> Config:
    """Return the config with the run's model, and with what was chosen for the run as
    it began: the coordinator knows both.

    If the run started from weights, only the coordinator has read their config.json. A
    config that names weights or a factory itself keeps its model.
    """
    run = config.run
    own = run.model.weights or run.model.factory
    if own and not (is_open(run.sync) or is_open(run.outer)):
        return config
    asked = ask_config(address, name, config.placement).run
    return with_choices_of(asked, with_model_of(asked, config))


def meet(config: Config, name: str, where: WorldAddress) -> Hosts:
    """Return the hosts of the island, once all have come. Raises ConfigError or
    HostsError."""
    island, placement = config.island(name), config.placement
    prepare_island(island)
    if flags := os.environ.get(before_jax.LIBTPU_VARIABLE):
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
            flags,
            before_jax.libtpu_flags(generation, version),
            f"{generation}, libtpu {version}",
        ):
            logger.warning("island %s: %s", name, clash)
    if island.hosts == 1:
        return ALONE
    return join_world(
        where,
        island.hosts,
        budget_s=placement.time_budget_s,
        meet_s=placement.hosts_budget_s,
    )


def run(
    config: Config,
    name: str,
    address: str,
    workdir: Path,
    incarnation: int,
    where: WorldAddress | None = None,
    cache: str = "",
    serve: str = "",
) -> int:
    """Train island `name` until the run is over; return the process's exit code.

    Args:
      config: resolved: cycle, outer optimizer and corpus digest are filled in.
      address: HOST:PORT of the coordinator.
      workdir: of this process.
      incarnation: number of the attempt of this island, from 1; that of host 0 counts.
      where: address at which the hosts of the island meet, if it has several.
      cache: of compiled programs, which the islands of one owner share; empty = the
        island's own (`compilation.of_island`). One that the environment names is used
        in its place.
      serve: as for `Region`.
    """
    placement = config.placement
    budget_s = placement.hang_budget_s
    with HangWatch(budget_s, lambda text: leave_at_once(EXIT_FAILED)) as hanging:
        prepared_s = placement.hosts_budget_s
        hanging.begin("preparing", prepared_s, "placement.hosts_budget_s")
        try:
            hosts = meet(config, name, where or WorldAddress())
            host = TrainingHost(
                config, name, address, workdir, incarnation, hosts, cache, serve
            )
        except (ConfigError, SecurityError, HostsError, StorageAway) as error:
            logger.error("island %s cannot start: %s", name, error)
            failed = isinstance(error, HostsError | StorageAway)
            return end_alone(EXIT_FAILED if failed else EXIT_CONFIG)
        host.watched = hanging.begin
        hanging.hangs = lambda text: end_hanging(
            host.stop, Ending(EXIT_FAILED, text), host.deadlines.stop_s
        )
        ending = _live(host, hanging, workdir)
    level = logging.INFO if ending.exit_code == EXIT_DONE else logging.ERROR
    counted = compilation.counted()
    logger.log(level, "island %s ends: %s; %s", name, ending.text, counted)
    if hosts.others:
        if host.ended_together:
            # The first host to leave would make the others abort, which hides their
            # exit code.
            leave_world()
        if not host.ended_together or ending.exit_code != EXIT_DONE:
            leave_at_once(ending.exit_code)
    return ending.exit_code


def _live(host: TrainingHost, hanging: HangWatch, workdir: Path) -> Ending:
    """Join, train and leave; return why it ended."""
    mailbox = host.mailbox
    shortage = ShortageWatch(workdir, mailbox.tell_short)

    def asked_to_end(who: str) -> None:
        host.asked_to_end(who)
        end_starting(host)

    with shortage, ended_by_signals(asked_to_end):
        try:
            if host.config.placement.notice_s:
                watch_metadata(asked_to_end)
            host.start()
            ending = hanging.run(host.loop)
        except (ConfigError, SecurityError) as error:
            ending = Ending(EXIT_CONFIG, str(error))
        except Refused as refused:
            ending = ending_of(refused)
        except (WireError, HostsError, NotHereError, TimeoutError) as error:
            # Asked to end, or refused on the control stream, while it was joining.
            ending = mailbox.ending or Ending(EXIT_FAILED, str(error))
        except Exception as error:
            if not (short := machine.thread_shortage(error)):
                logger.exception("island %s failed", host.name)
            text = short or f"{type(error).__name__}: {error}"
            ending = Ending(EXIT_FAILED, text)
        hanging.end()
        host.stop(ending)
        host.close()
    return ending


def end_starting(host: Host[Any]) -> None:
    """End a host without others that was asked to end and still starts after a while: a
    compiler may be at one program for minutes."""
    if host.hosts.others:
        return
    stop_s = host.deadlines.stop_s
    time.sleep(stop_s / 2)
    if host.starts and (ending := host.mailbox.ending) is not None:
        end_hanging(host.stop, ending, stop_s / 4)


class TrainingHost(Host[Loop]):
    """A host that trains by the product's own loop."""

    _watched: WatchedModel | None = None

    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        workdir: Path,
        incarnation: int = 1,
        hosts: Hosts = ALONE,
        cache: str = "",
        serve: str = "",
    ) -> None:
        """Load the data, and make the plan of the model's fragments; raises
        ConfigError or SecurityError. cache: as for `run`."""
        run, placement = config.run, config.placement
        model = build(run)
        plan = build_plan(run, model)
        super().__init__(config, name, address, plan, incarnation, hosts, serve)
        folder = checkpoint.island_folder(placement, workdir, name)
        self.checkpoints = Checkpoints(config, name, folder)
        self._cache = cache or compilation.of_island(placement, workdir, name)
        self._lasted = workdir / run_files.LASTED
        self.traces = workdir / run_files.PROFILES
        data, length = load_data(run), run.sequence_length
        fields, batch_size = model.fields(run.data.arrays), self.island.batch_size
        reader = BatchReader(data.index(run.seed), fields, length)
        self.data: LeasedStream = LeasedStream(reader, batch_size)
        self._validation = ValidationBatches(
            data.validation, batch_size, fields, length
        )

    def build(self, identity: Identity) -> Exchange:
        """Build everything that needs a device."""
        run, placement = self.config.run, self.config.placement
        require_accelerator(self.island)
        # Nothing was compiled before: jax looks for its cache once.
        kind = before_jax.programs_kind(self.island.topology)
        compilation.use_cache(self._cache, kind)
        model, self._trainer = build_trainer(run, self.island)
        own = self._trainer.own_rows()
        self.data.read_only(own)
        self._validation.read_only(own)
        self.checkpoints.open(identity, self.plan, self.hosts)
        exchange, self._zeros = build_exchange(run, model, self._trainer)
        if placement.watch_every:
            dtype = self.island.compute_dtype
            watched = self._watched = WatchedModel(exchange, self._zeros, dtype)
            self.watching = Watching(len(self.plan.fragments), watched.copy)
        return exchange

    @gc_pause()
    def compile(self) -> None:
        """Compile everything, then run steps and evaluations once.

        No host runs a program before all hosts have compiled theirs: one may find in
        its cache what takes another minutes. So an error of a TPU's compiler, which
        raises ConfigError, differs from a failure of the machine, which another attempt
        may cure.
        """
        began, trainer, exchange = time.monotonic(), self._trainer, self.exchange
        placement, watched = self.config.placement, self._watched
        length = self.config.run.sequence_length
        compile_ahead(trainer, exchange, length, watched, self.programs_left)
        self.meet_compiled()
        params, self._zeros = self._zeros, {}
        batch = self._validation[0]
        if placement.evaluate_every_steps:
            float(trainer.eval_step(params, batch)[0])
        if watched is not None:
            float(trainer.eval_step(watched.params, batch)[0])
        if placement.rehearse:
            del params  # There is room for one copy.
            params, batch = self._common()
        state = TrainState(params, trainer.init_inner(params))
        training = {name: batch[name] for name in trainer.fields}
        _, metrics = trainer.step(state, trainer.put_batch(training), 0.0)
        if placement.rehearse:
            self.mailbox.tell_trial(
                loss=float(metrics["loss"]),
                gradient_length=float(metrics["grad_norm"]),
                **memory_here(),
            )
        float(metrics["loss"])
        # A compiler leaves as much freed memory as a small island needs otherwise.
        give_memory_back()
        self.compile_seconds = time.monotonic() - began

    def _common(self) -> tuple[Params, Batch]:
        """Return the parameters and the batch of a step that all islands can make. Of
        unlike batches each has the same rows, as often as they fit."""
        config = self.config
        rows = math.gcd(*(island.batch_size for island in config.islands.values()))
        params = self._trainer.first(config.run.seed)
        faults = parse_faults(config.placement.faults, config.islands)
        own = faults.for_who(self.name, self._incarnation)
        if (factor := own.factor(0)) is not None:
            params = jax.tree.map(lambda x: factor * x, params)
        return params, self._validation.repeated(rows)

    def restore(self, versions: Sequence[Version]) -> Restored | None:
        """Return the newest checkpoint, as far as it holds at these versions."""
        return self.checkpoints.restore(self._trainer, self.exchange, versions)

    def copy(
        self,
        anchors: dict[int, tuple[jax.Array, ...]] | None,
        restored: Restored | None,
    ) -> LentParams:
        """Make the replica."""
        trainer, exchange = self._trainer, self.exchange
        if anchors is None:
            exchange.start_from(trainer.first(self.config.run.seed))
        return join(self.plan, trainer, exchange, anchors or {}, restored)

    def loop_of(self, shared: dict[str, Any], faults: Faults) -> Loop:
        """Make the train loop."""
        watcher = None
        if self._watched is not None:
            assert self.watching is not None
            watcher = Watcher(self.watching, self._watched, self._passes(0))
        return Loop(
            **shared,
            evaluator=self._passes(self.config.placement.evaluate_every_steps),
            watcher=watcher,
            checkpoints=self.checkpoints,
            faults=faults,
            lasts=self._tell_lasting,
        )

    def _passes(self, every_steps: int) -> Evaluator:
        batches = self.config.placement.evaluate_batches
        return Evaluator(self._trainer, self._validation, every_steps, batches)

    def _tell_lasting(self) -> None:
        """Tell whoever starts this process again that it did train."""
        with contextlib.suppress(OSError):
            self._lasted.touch()

    def save_due(self) -> bool:
        """Tell if a checkpoint is to be written now."""
        return self.checkpoints.due()

    def close(self) -> None:
        """Free sockets and threads; wait a while for a checkpoint."""
        self.data.close()
        super().close()
        patience_s = max(self.deadlines.stop_s / 2, self.config.placement.notice_s)
        self.checkpoints.close(patience_s)
