"""The coordinator's process: start, run, stop.

Files in the workdir: `config.json` (resolved), `run.json` (run id), `log/` (durable
records), `checkpoints/` (snapshots), `tape.jsonl`, `metrics.jsonl`, `roster.msgpack`,
`coordinator.address`, at the end `summary.json`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

# The coordinator computes on the CPU, whatever the machine has.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import msgspec

from diloco_jax import checkpoint, compilation, environment, loading
from diloco_jax.config import Config, ConfigError, differences, shared_fields
from diloco_jax.coordinator import durable, summary
from diloco_jax.coordinator.engine import Engine
from diloco_jax.coordinator.inbox import Inbox
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.service import Service
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.store import Store
from diloco_jax.core.fragments import FragmentPlan, plan_fragments
from diloco_jax.deadlines import Deadlines
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.models.model import Model
from diloco_jax.models.transformer import build
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape, not_on_tape
from diloco_jax.policy import state as policy_state
from diloco_jax.policy.events import Version
from diloco_jax.policy.recovery import recover
from diloco_jax.wire import addresses
from diloco_jax.wire.server import Server
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

SPARE_ISLANDS = 8
"""Places for islands that the config does not name."""
REFRESH_S = 0.5
"""Age of what `diloco status` shows."""


def run(config: Config, workdir: Path, *, init: bool) -> int:
    """Serves one run until it is over; returns the exit code.

    Args:
      config: resolved and validated.
      workdir: where the run lives.
      init: begin a new run there; otherwise the run there goes on.

    Raises:
      ConfigError: no run to go on with, another run in the workdir, an address that
        cannot be bound.
    """
    coordinator = Coordinator(config, workdir, init=init)
    coordinator.start()
    try:
        code = coordinator.run()
        coordinator.conclude()
        return code
    finally:
        coordinator.close()


class Coordinator:
    """One life of the coordinator: make, `start`, `run`, `conclude`, `close`."""

    def __init__(self, config: Config, workdir: Path, *, init: bool) -> None:
        """Prepares or finds the run in `workdir`, once it is sure to be served."""
        self._config, self._workdir, self._init = config, workdir, init
        placement = config.placement
        self._tls = (
            TlsFiles.load(placement.certificates, "coordinator")
            if placement.certificates
            else None
        )
        addresses.require_tls(
            placement.bind, tls=self._tls is not None, insecure=placement.insecure
        )
        addresses.require_free(placement.bind)
        self._facts = _run_facts(config, workdir, init=init)
        self._deadlines = Deadlines(config.placement.time_budget_s)
        self._begun = float(self._facts["begun_unix"])
        self._snapshot_thread: threading.Thread | None = None
        self._snapshot_due = time.monotonic() + config.placement.snapshot_every_s
        self._refreshed = 0.0
        self._end_by: float | None = None
        self._status: dict[str, Any] = {}
        self._interrupted = False

    def start(self) -> None:
        """Loads or makes the state, and serves."""
        config, workdir = self._config, self._workdir
        run, placement = config.run, config.placement
        compilation.use_cache(workdir)
        model = build(run.model)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        plan = plan_fragments(shapes, model.axes, run.sync.fragments)
        self.policy_config = policy_config(
            run, placement, self._facts["run_id"], plan.sizes
        )
        self._manager = checkpoint.open_folder(
            workdir / "checkpoints", placement.snapshots_kept
        )
        found = checkpoint.newest(self._manager)
        if found is None and not self._init:
            self._manager.close()
            raise ConfigError(
                f"{workdir} holds run {self._facts['run_id']} but no snapshot of it in "
                f"checkpoints/, and without --init nothing is initialised; bring that "
                f"folder back, or begin a new run with --init in another --workdir"
            )
        self._tape = Tape(workdir / "tape.jsonl")
        if found is None:
            state = self._initialise(model, plan)
        else:
            state = self._recover(plan, shapes, found)
        self._metrics = Metrics(workdir)
        self._roster = Roster(workdir / "roster.msgpack")
        inbox = Inbox(self.store.layouts_up, placement.merge_buffer_bytes)
        sessions = Sessions()
        self.engine = Engine(
            self.policy_config,
            state,
            store=self.store,
            inbox=inbox,
            log=self._log,
            tape=self._tape,
            metrics=self._metrics,
            sessions=sessions,
            faults=parse_faults(placement.faults, config.islands).for_who(COORDINATOR),
            housekeeping=self._keep_house,
        )
        self._sessions = sessions
        self._refresh(self.engine)
        service = Service(
            run,
            engine=self.engine,
            store=self.store,
            inbox=inbox,
            sessions=sessions,
            roster=self._roster,
            metrics=self._metrics,
            status=lambda: self._status,
        )
        self._server = Server(
            placement.bind,
            service,
            tls=self._tls,
            deadlines=self._deadlines,
            max_islands=len(config.islands) + SPARE_ISLANDS,
            bulk_channels=placement.bulk_channels,
            insecure=placement.insecure,
        )
        bound = self._server.start()
        self.address = placement.advertise or bound
        addresses.parse_address(self.address)
        _write_text(workdir / "coordinator.address", self.address)
        logger.info("run %s is served at %s", self._facts["run_id"], self.address)

    def run(self) -> int:
        """Decides until the run is over or the process is asked to end."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._asked_to_end)
        self.engine.run()
        return 0 if self.engine.finished or self._interrupted else 1

    def conclude(self) -> None:
        """Writes the last snapshot and the summary. Not after a failure: then only
        what was durable counts."""
        self._server.stop(self._deadlines.stop_s / 5)
        if self._snapshot_thread is not None:
            self._snapshot_thread.join(self._deadlines.stop_s)
        self._save(self._log.rotate(), self.engine.state, self.store.arrays())
        self._roster.save()
        now = time.time()
        result = summary.summary(
            self.policy_config,
            self.engine.state,
            self._roster,
            wall_seconds=now - self._begun,
            now=now,
        )
        loading.write_json(result, self._workdir / "summary.json")

    def close(self) -> None:
        """Ends service and closes the files."""
        (self._workdir / "coordinator.address").unlink(missing_ok=True)
        self._server.stop(0.0)
        self._log.close()
        self._tape.close()
        self._metrics.close()
        self._manager.close()

    def _initialise(self, model: Model, plan: FragmentPlan) -> policy_state.State:
        """A new run: draws the parameters, and makes them durable before anyone
        can ask for them."""
        seed = self._config.run.seed
        params = jax.jit(model.init)(jax.random.key(seed))
        self.store = Store(self._config.run, plan, params, self._deadlines.pin_s)
        state = policy_state.initial(self.policy_config)
        # First, since a run with a snapshot goes on after a crash.
        self._tape.append(
            {
                "kind": "begun",
                "run_id": self._facts["run_id"],
                "fingerprint": self.policy_config.fingerprint,
                "plan": plan.digest(),
                "environment": environment.describe(),
                "time": time.time(),
            }
        )
        self._log = durable.RecordLog(self._workdir / "log")
        self._save(self._log.rotate(), state, self.store.arrays())
        return state

    def _recover(
        self, plan: FragmentPlan, shapes: Any, found: int
    ) -> policy_state.State:
        """The run goes on: the newest snapshot, and the log after it."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        self.store = Store(self._config.run, plan, zeros, self._deadlines.pin_s)
        arrays, facts = checkpoint.restore(self._manager, found, self.store.arrays())
        snapshot = msgspec.convert(facts["state"], policy_state.State)
        self.store.load(arrays, [f.version for f in snapshot.fragments])
        records = []
        folder = self._workdir / "log"
        for record, payload in durable.read(folder, after=found):
            records.append(record)
            if record["kind"] == "merged":
                version = Version(*record["version"])
                self.store.replay(
                    record["fragment"], version, payload, final=record["final"]
                )
        self._log = durable.RecordLog(folder)
        state = recover(self.policy_config, snapshot, records, time.monotonic())
        logger.info(
            "recovered from snapshot %d and %d records after it", found, len(records)
        )
        for record in not_on_tape(self._tape.path, records):
            self._tape.append({**record, "time": time.time()})
        self._tape.append(
            {
                "kind": "recovered",
                "snapshot": found,
                "snapshot_merges": sum(f.merges for f in snapshot.fragments),
                "records": len(records),
                "versions": [list(f.version) for f in state.fragments],
                "environment": environment.describe(),
                "time": time.time(),
            }
        )
        return state

    def _keep_house(self, engine: Engine) -> None:
        now = time.monotonic()
        if now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._refresh(engine)
            self._roster.save()
        running = self._snapshot_thread is not None and self._snapshot_thread.is_alive()
        if now >= self._snapshot_due and not running:
            self._snapshot_due = now + self._config.placement.snapshot_every_s
            number = self._log.rotate()
            self._snapshot_thread = threading.Thread(
                target=self._snapshot,
                args=(number, engine.state, self.store.arrays()),
                name="diloco-snapshot",
            )
            self._snapshot_thread.start()
        if engine.finished or self._interrupted:
            if self._end_by is None:
                self._end_by = now + self._deadlines.stop_s
            if not self._sessions.connected() or now >= self._end_by:
                engine.stop()

    def _refresh(self, engine: Engine) -> None:
        now = time.time()
        self._status = summary.status(
            engine.config,
            engine.state,
            self._roster,
            seconds=now - self._begun,
            alerts=engine.alerts,
            now=now,
        )

    def _snapshot(
        self, number: int, state: policy_state.State, arrays: dict[str, Any]
    ) -> None:
        """As `_save`, beside the run. A failure costs nothing: the log stays."""
        try:
            self._save(number, state, arrays)
        except Exception:
            logger.exception("snapshot %d failed; the log keeps what it holds", number)

    def _save(
        self, number: int, state: policy_state.State, arrays: dict[str, Any]
    ) -> None:
        """Writes snapshot `number`, then deletes the log it makes superfluous. State
        and arrays are those of the moment at which the log was rotated."""
        facts = {"state": msgspec.to_builtins(state)}
        checkpoint.save(self._manager, number, arrays, facts)
        self._log.forget(number)

    def _asked_to_end(self, number: int, frame: Any) -> None:
        logger.info("%s: ending", signal.Signals(number).name)
        self._interrupted = True


def _run_facts(config: Config, workdir: Path, *, init: bool) -> dict[str, Any]:
    """run.json of the workdir: made with --init, found otherwise."""
    path = workdir / "run.json"
    if path.exists():
        facts: dict[str, Any] = json.loads(path.read_text())
        written = loading.read_config_json(workdir / "config.json")
        if written.run.fingerprint() != config.run.fingerprint():
            lines = differences(shared_fields(written.run), shared_fields(config.run))
            raise ConfigError(
                f"{workdir} holds run {facts['run_id']} with another config: "
                f"{'; '.join(lines)} (here: the workdir's). Choose another --workdir, "
                f"or go on with its config.json"
            )
        if init and (workdir / "log").exists():
            raise ConfigError(
                f"{workdir} holds run {facts['run_id']} already; choose another "
                f"--workdir, or leave --init out to go on with it"
            )
        return facts
    if not init:
        raise ConfigError(
            f"{workdir} holds no run (there is no run.json), and without --init "
            f"nothing is initialised; give the workdir of the run, or --init for a "
            f"new one"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    loading.write_config_json(config, workdir / "config.json")
    facts = {"run_id": uuid.uuid4().hex[:16], "begun_unix": time.time()}
    loading.write_json(facts, path)
    return facts


def _write_text(path: Path, text: str) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)
