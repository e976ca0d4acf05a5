"""One island's process: build, join, train, leave.

`run` is the whole life. A join is: hello and welcome, build and compile (reports go
on), fetch every fragment in full at its newest version, place the parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import signal
import socket
import threading
import time
import types
import uuid
from collections.abc import Iterator
from pathlib import Path

import jax

from diloco_jax import compilation
from diloco_jax.config import (
    Config,
    ConfigError,
    shared_fields,
)
from diloco_jax.data.corpus import Corpus, load_corpus
from diloco_jax.data.stream import LeasedStream
from diloco_jax.data.validation import ValidationBatches
from diloco_jax.data.windows import Windows
from diloco_jax.deadlines import Deadlines
from diloco_jax.faults import parse_faults
from diloco_jax.island.books import Books
from diloco_jax.island.boundary import Boundary
from diloco_jax.island.build import (
    build_exchange,
    build_plan,
    build_trainer,
    join,
)
from diloco_jax.island.decisions import Decisions, LiveDecisions
from diloco_jax.island.environment import prepare_environment
from diloco_jax.island.evaluate import Evaluator
from diloco_jax.island.exchange import Exchange
from diloco_jax.island.identity import Identity
from diloco_jax.island.inbound import Targets
from diloco_jax.island.link import Link
from diloco_jax.island.loop import Loop
from diloco_jax.island.mailbox import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REFUSED,
    Ending,
    Mailbox,
    Status,
)
from diloco_jax.island.receiver import Receiver
from diloco_jax.island.sender import Sender
from diloco_jax.island.step import Trainer, TrainState
from diloco_jax.island.timing import Timing
from diloco_jax.models.model import Params
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Refused, SecurityError, WireError
from diloco_jax.wire.messages import Hello, Welcome
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

EXIT_BAD_CONFIG = 2


def run(
    config: Config,
    name: str,
    coordinator_address: str,
    workdir: Path,
    incarnation: int,
) -> int:
    """Trains island `name` until the run is over; returns the process's exit code.

    Args:
      config: resolved: outer optimizer and corpus digest are filled in.
      coordinator_address: HOST:PORT.
      workdir: of this process; holds the compilation cache unless the environment
        names another.
      incarnation: counts the processes of this island, from 1.
    """
    try:
        prepare_environment(config.island(name).devices)
        island = Island(config, name, coordinator_address, workdir, incarnation)
    except (ConfigError, SecurityError) as error:
        logger.error("island %s cannot start: %s", name, error)
        return EXIT_BAD_CONFIG
    with _ended_by_sigterm(island):
        try:
            island.start()
            ending = island.run()
        except (ConfigError, SecurityError) as error:
            ending = Ending(EXIT_BAD_CONFIG, str(error))
        except Refused as refused:
            ending = Ending(EXIT_REFUSED, f"{refused.message} ({refused.code})")
        except (WireError, TimeoutError) as error:
            # Asked to end, or refused on the control stream, while it was joining.
            ending = island.mailbox.ending or Ending(EXIT_FAILED, str(error))
        except Exception as error:
            logger.exception("island %s failed", name)
            ending = Ending(EXIT_FAILED, f"{type(error).__name__}: {error}")
        island.stop(ending.reason)
        island.close()
    level = logging.INFO if ending.exit_code == EXIT_DONE else logging.ERROR
    logger.log(level, "island %s ends: %s", name, ending.reason)
    return ending.exit_code


class Island:
    """start, run, stop, close: each is called once, in this order."""

    def __init__(
        self,
        config: Config,
        name: str,
        coordinator_address: str,
        workdir: Path,
        incarnation: int,
    ) -> None:
        """Reads the corpus; raises ConfigError or SecurityError."""
        compilation.use_cache(workdir)
        placement, run = config.placement, config.run
        self._config, self._name, self._incarnation = config, name, incarnation
        self._island = config.island(name)
        self._session = uuid.uuid4().hex
        self._deadlines = Deadlines(placement.time_budget_s)
        self._faults = parse_faults(placement.faults, config.islands)
        self._corpus = _load_checked_corpus(config)
        windows = Windows(self._corpus.train, run.sequence_length, run.seed)
        self._data = LeasedStream(windows, self._island.batch_size)
        self.mailbox = Mailbox()
        folder = placement.certificates
        self._client = Client(
            coordinator_address,
            tls=TlsFiles.load(folder, "island") if folder else None,
            deadlines=self._deadlines,
            bulk_channels=placement.bulk_channels,
            insecure=placement.insecure,
        )
        self._link = Link(self._client, self._hello, self.mailbox, self._deadlines)
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._loop: Loop | None = None

    def start(self, decisions: Decisions | None = None) -> None:
        """Joins: returns when the first step can be made.

        decisions: another source than what comes in, for scripted runs.
        """
        welcome = self._link.connect(self._config.placement.outage_budget_s)
        path = self._client.probe()
        logger.info(
            "island %s, incarnation %d: in run %s, %.1f ms and %.1f MB/s away",
            self._name,
            self._incarnation,
            welcome.run_id,
            path.rtt_s * 1e3,
            path.bytes_per_s / 1e6,
        )
        self._loop = self._build(welcome, decisions or LiveDecisions(self.mailbox))
        if self._sender is not None:
            self._sender.start()
        if self._receiver is not None:
            self._receiver.start()

    def run(self) -> Ending:
        """Trains until the end."""
        assert self._loop is not None
        return self._loop.run()

    def stop(self, reason: str) -> None:
        """Says goodbye, within `stop_s`."""
        timeout_s = self._deadlines.stop_s / 4
        for thread in (self._sender, self._receiver):
            if thread is not None:
                thread.close(timeout_s)
        self._link.close(reason, timeout_s)

    def close(self) -> None:
        """Frees sockets and threads."""
        self._data.close()
        self._client.close()

    # ---- joining ----------------------------------------------------------------

    def _build(self, welcome: Welcome, decisions: Decisions) -> Loop:
        run, island, mailbox = self._config.run, self._island, self.mailbox
        model, trainer = build_trainer(run, island)
        exchange, params = build_exchange(run, model, trainer)
        identity = Identity(
            run_id=welcome.run_id,
            island=self._name,
            incarnation=self._incarnation,
            session=self._session,
        )
        self._receiver = receiver = Receiver(
            self._client, identity, exchange, mailbox, self._deadlines, welcome.versions
        )
        self._sender = sender = Sender(
            self._client, identity, exchange.layouts_up, mailbox, self._deadlines
        )
        mailbox.post(Status(phase="compiling"))
        self._link.start(Targets(want=receiver.want, resend=sender.resend))
        validation = ValidationBatches(
            self._corpus.validation, run.sequence_length, island.batch_size
        )
        placement = self._config.placement
        every, batches = placement.evaluate_every_steps, placement.evaluate_batches
        began = time.monotonic()
        _compile(trainer, exchange, params, validation, evaluates=every > 0)
        compile_seconds = time.monotonic() - began
        arrivals = receiver.fetch_all()
        anchors = {a.fragment: a.anchor or () for a in arrivals}
        replica = join(build_plan(run, model), trainer, exchange, anchors)
        books = Books([a.version for a in arrivals], run.sync.adopt)
        logger.info(
            "compiled in %.1f s, fetched %d fragments in %.1f s",
            compile_seconds,
            len(arrivals),
            time.monotonic() - began - compile_seconds,
        )
        return Loop(
            config=self._config,
            name=self._name,
            replica=replica,
            boundary=Boundary(books, replica, self._data, sender, run.sync.adopt),
            data=self._data,
            mailbox=mailbox,
            decisions=decisions,
            timing=Timing(compile_seconds),
            evaluator=Evaluator(trainer, validation, every, batches),
            faults=self._faults.for_who(self._name, self._incarnation),
        )

    def _hello(self, status: Status, sequences_granted: int) -> Hello:
        run, island = self._config.run, self._island
        return Hello(
            run_id=self._link.run_id,
            fingerprint=run.fingerprint(),
            run=shared_fields(run),
            island=self._name,
            island_config=dataclasses.asdict(island),
            incarnation=self._incarnation,
            session=self._session,
            environment=_environment(),
            tokens_per_step=island.batch_size * run.sequence_length,
            sequences_per_step=island.batch_size,
            phase=status.phase,
            steps=status.steps,
            step_seconds=status.measures.median_step_seconds,
            outstanding=status.outstanding,
            sequences_granted=sequences_granted,
        )


def _compile(
    trainer: Trainer,
    exchange: Exchange,
    params: Params,
    validation: ValidationBatches,
    *,
    evaluates: bool,
) -> None:
    """Runs everything once on `params`, which is used up, so that nothing compiles
    later."""
    params = exchange.warm(params)
    batch = validation[0]
    if evaluates:
        float(trainer.eval_step(params, *batch)[0])
    state = TrainState(params, trainer.init_inner(params))
    _, metrics = trainer.step(state, trainer.put_batch(batch.tokens), 0.0)
    float(metrics["loss"])


def _load_checked_corpus(config: Config) -> Corpus:
    data = config.run.data
    corpus = load_corpus(data.paths, data.validation_fraction)
    if data.digest and corpus.digest != data.digest:
        raise ConfigError(
            f"data.digest = {data.digest} in the run's config, but the corpus here "
            f"({', '.join(data.paths) or 'the Python standard library'}) has "
            f"{corpus.digest}; give this island the run's text (--data.paths), of the "
            f"same Python version if it is the standard library"
        )
    return corpus


def _environment() -> dict[str, str | int]:
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count() or 0,
        "nproc": os.environ.get("NPROC", ""),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


@contextlib.contextmanager
def _ended_by_sigterm(island: Island) -> Iterator[None]:
    """Inside, SIGTERM ends the island at its next step boundary, with a goodbye."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: types.FrameType | None) -> None:
        # Not from the handler itself: the main thread may hold the mailbox's lock.
        ending = (EXIT_DONE, "asked to end by SIGTERM")
        threading.Thread(target=island.mailbox.end, args=ending, daemon=True).start()

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
