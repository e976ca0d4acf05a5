"""One host process of an island: its parts, whichever host decides for it.

`main.py` makes the host that leads (the only one, on most islands), `follower.py` the
others.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import jax

from diloco_jax import checkpoint, compilation, run_files
from diloco_jax.config import Config
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.data.batches import BatchReader, LeasedStream, ValidationBatches
from diloco_jax.data.loading import load_data
from diloco_jax.faults import Faults
from diloco_jax.island.checkpoints import Checkpoints
from diloco_jax.island.device.build import (
    build_exchange,
    build_trainer,
    compile_ahead,
    join,
)
from diloco_jax.island.device.later import Later
from diloco_jax.island.device.mesh import require_accelerator
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.device.watched import WatchedModel
from diloco_jax.island.evaluate import Evaluator, Watcher
from diloco_jax.island.hosts.world import Hosts
from diloco_jax.island.loop import Loop
from diloco_jax.island.mailbox import Decisions
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.island.parts import Parts
from diloco_jax.island.timing import Timing
from diloco_jax.machine import give_memory_back
from diloco_jax.models.build import build, build_plan
from diloco_jax.process import uncollected
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Boundary, Watching
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import Identity


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
        """Compile everything, then run it once.

        No host runs a program before all hosts have compiled theirs: one may find in
        its cache what takes another minutes. On TPUs everything is compiled before
        anything runs. So an error of the compiler, which raises ConfigError, differs
        from a failure of the machine, which another attempt may cure. Elsewhere a host
        without others compiles what is seldom needed while it trains.
        """
        began, trainer = time.monotonic(), self._trainer
        ahead = self._hosts is not None or jax.default_backend() == "tpu"
        if ahead:
            compile_ahead(
                trainer,
                self._exchange,
                self._zeros,
                self.config.run.sequence_length,
                self._watched,
            )
            self._meet_compiled()
        params = self._exchange.warm(self._zeros, seldom=ahead)
        self._zeros = {}
        batch = self._validation[0]
        if self.config.placement.evaluate_every_steps:
            float(trainer.eval_step(params, batch)[0])
        if self._watched is not None:
            self._watched.warm()
            float(trainer.eval_step(self._watched.params, batch)[0])
        state = TrainState(params, trainer.init_inner(params))
        training = {name: batch[name] for name in trainer.fields}
        _, metrics = trainer.step(state, trainer.put_batch(training), 0.0)
        float(metrics["loss"])
        if not ahead:
            like = trainer.abstract_state().params
            self._later = Later(self._exchange.lower_all(like))
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
            permit=self.sender.permit,
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
