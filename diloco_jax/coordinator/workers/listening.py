"""`diloco worker`: listen for leads on another machine, and serve the newest one.

It proves with the worker's key which worker it is, and obeys the coordinator's key
alone. Of two leads it obeys the one that was started later, across its own restarts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import socket
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import from_builtins, named_code
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.coordinator.workers.process import (
    Speaking,
    facts_of,
    facts_path,
    serve_lead,
)
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.files import is_bucket, write_json
from diloco_jax.protocol.holding import BeginWorker, Obeyed, WorkerRefused, to_worker
from diloco_jax.wire import addresses, principal
from diloco_jax.wire.duplex import End, TlsEnd
from diloco_jax.wire.errors import Refused, SecurityError
from diloco_jax.wire.frames import prepare
from diloco_jax.wire.limits import RateLimitedLog
from diloco_jax.wire.principal import Peers
from diloco_jax.wire.threads import IdleWatch
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import held, make_workdir

logger = logging.getLogger(__name__)

FIRST_S = 86400.0
"""Longest wait for the first lead, in seconds: the coordinator may queue for a
machine."""
PAUSE_S = 0.05
"""Pause after a connection that could not be accepted, in seconds."""
CONNECTIONS = 16
"""Most connections at a time that have not said who they are."""


class Came(NamedTuple):
    """A lead that is obeyed. config: its own, with what is of this machine."""

    speaking: Speaking
    begin: BeginWorker
    config: Config
    peer: str


class Listening:
    """The place of one worker, where leads come."""

    def __init__(self, config: Config, index: int, workdir: Path, bind: str) -> None:
        """Listen at `bind`. Raises ConfigError, SecurityError."""
        placement = config.placement
        self._config, self._index, self._workdir = config, index, workdir
        self._deadlines = placement.deadlines
        who = principal.worker(index)
        tls = TlsFiles.load_given(placement.certificates, who)
        addresses.require_tls(bind, tls=tls is not None, insecure=placement.insecure)
        self._contexts = tls.server_contexts() if tls is not None else None
        self._peers = Peers(tls.folder) if tls is not None else None
        self._open = contextlib.ExitStack()
        make_workdir(workdir)
        lock = held(workdir / run_files.LOCK, "a coordinator or a worker")
        self._open.enter_context(lock)
        (workdir / run_files.WORKERS).mkdir(exist_ok=True)
        numeric = addresses.resolve(bind)
        # Islands reach it at the next port, from its first lead on.
        self._bulk = addresses.bulk_address(numeric)
        self._listener = addresses.listen(numeric)
        self._places = threading.Semaphore(CONNECTIONS)
        self._watch = IdleWatch("diloco-worker-watch")
        self._admitting = threading.Lock()
        self._newest: Speaking | None = None
        self._came: queue.SimpleQueue[Came] = queue.SimpleQueue()
        self._closing, self._lines = threading.Event(), RateLimitedLog(at_once=1)
        self.within_s = FIRST_S
        """Longest wait for a lead; later as the last one's config says."""
        self.address = addresses.format_address(*self._listener.getsockname()[:2])
        """Where it listens."""

    def serve(self) -> bool:
        """Serve one lead after another until the run is over. Return False if none has
        come for too long."""
        threading.Thread(target=self._accept, daemon=True).start()
        while True:
            try:
                came = self._came.get(timeout=self.within_s)
            except queue.Empty:
                return False
            self.within_s = came.config.placement.alone_s
            if came.speaking is not self._newest:
                came.speaking.line.close()
                continue
            logger.info("worker %d serves the lead at %s", self._index, came.peer)
            if serve_lead(came.speaking, came.begin, came.config, self._workdir):
                return True
            logger.warning(
                "the lead at %s is gone: worker %d dropped what it had in memory, and "
                "awaits the next one for %g s",
                came.peer,
                self._index,
                self.within_s,
            )

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        with contextlib.suppress(OSError):  # Wakes the thread.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._watch.close(1.0)
        self._open.close()

    # ---- connections ----------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(PAUSE_S):
                    self._warn("a connection could not be accepted: %s", error)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            whose = addresses.format_address(peer[0], peer[1])
            threading.Thread(
                target=self._attend, args=(connection, whose), daemon=True
            ).start()

    def _attend(self, connection: socket.socket, peer: str) -> None:
        """Let a lead in, or tell it why not."""
        end: End = connection
        obeyed = False
        try:
            with self._watch.guard(self._deadlines.connect_s, lambda: cut(connection)):
                prepare(connection, self._deadlines)
                connection.settimeout(self._deadlines.connect_s)
                if self._contexts is not None:
                    if _is_probe(connection):
                        return
                    end = TlsEnd(connection, self._contexts())
                    end.shake_hands()
                obeyed = self._admit(end, peer)
        except OSError as error:
            self._warn("the connection from %s broke: %s", peer, error)
        except Exception:
            logger.exception("the connection from %s failed", peer)
        finally:
            if not obeyed:
                cut(end)
                end.close()
            self._places.release()

    def _admit(self, end: End, peer: str) -> bool:
        """Read who leads; obey it, or say why not."""
        try:
            if isinstance(end, TlsEnd) and self._peers is not None:
                pem = ssl.DER_cert_to_PEM_cert(end.certificate()).encode()
                principal.require(self._peers.identify(pem), principal.COORDINATOR)
            frame = read_frame(end)
            if frame is None:
                return False
            begin = to_worker(frame)
            if not isinstance(begin, BeginWorker):
                raise Refused("protocol", f"a lead began with {type(begin).__name__}")
            self._obey(end, begin, peer)
        except (Refused, SecurityError, ConfigError, msgspec.DecodeError) as error:
            self._warn("%s is refused: %s", peer, error)
            code = error.code if isinstance(error, Refused) else "config"
            write_frame(end, WorkerRefused(code=code, text=str(error)))
            return False
        return True

    def _obey(self, end: End, begin: BeginWorker, peer: str) -> None:
        """Leave the lead before for a newer one. Raises Refused for an older one, for
        another worker or run, and ConfigError for a config that is not fit here."""
        if begin.worker != self._index:
            raise Refused(
                "worker",
                f"this is worker {self._index}, and the lead asks for worker "
                f"{begin.worker}; check placement.worker_addresses, and --index",
            )
        config = self._fitted(begin)
        path = facts_path(self._workdir, self._index)
        with self._admitting:
            facts = facts_of(self._workdir, self._index)
            own = {field: facts[field] for field in Obeyed._fields if field in facts}
            obeyed = Obeyed(**own)
            if refusal := obeyed.refusal(begin, str(path)):
                raise Refused(*refusal)
            now = Obeyed(begin.run_id, begin.term, begin.start)
            write_json({**facts, **now._asdict()}, path)
            before, self._newest = self._newest, Speaking(end, config)
            begin = replace(begin, bind=self._bulk)
            self._came.put(Came(self._newest, begin, config, peer))
            if before is not None:
                before.line.part()

    def _fitted(self, begin: BeginWorker) -> Config:
        """Return the lead's config with what is of this machine."""
        config = from_builtins(begin.config, "the lead's config")
        own, theirs = self._config.placement, config.placement
        code, ours = named_code(config.run), named_code(self._config.run)
        if code != ours:
            raise ConfigError(
                f"the lead's config names code ({code or 'none'}), and CONFIG of this "
                f"worker other code ({ours or 'none'}); give both the same CONFIG"
            )
        buckets = is_bucket(own.checkpoints), is_bucket(theirs.checkpoints)
        if any(buckets) and own.checkpoints != theirs.checkpoints:
            raise ConfigError(
                f"placement.checkpoints = {theirs.checkpoints!r} at the lead, and "
                f"{own.checkpoints!r} here; give both the same bucket, or each a folder"
            )
        placement = dataclasses.replace(
            theirs,
            workdir=str(self._workdir),
            certificates=own.certificates,
            checkpoints=own.checkpoints,
            insecure=own.insecure,
        )
        return dataclasses.replace(config, placement=placement)

    def _warn(self, text: str, *facts: object) -> None:
        """Log what strangers can bring about, now and then."""
        self._lines.log(logger, logging.WARNING, "strangers", text % facts)


def cut(end: End) -> None:
    """End what other threads send and receive."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _is_probe(connection: socket.socket) -> bool:
    """Tell whether the other end has hung up without a byte, as one does that asks only
    whether this process listens: Kubernetes, every few seconds. With TLS a lead speaks
    first. Raises OSError."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except ConnectionResetError:
        return True


def run(config: Config, index: int, workdir: Path, bind: str) -> int:
    """Serve as this worker until the run is over, or no coordinator comes; return the
    exit code."""
    listening = Listening(config, index, workdir, bind)
    with contextlib.closing(listening):
        logger.info("worker %d awaits the coordinator at %s", index, listening.address)
        if listening.serve():
            logger.info("the run is over")
            return EXIT_DONE
        logger.error(
            "no coordinator came for %g s: this worker ends, and what it has stays in "
            "%s; start it again with the coordinator",
            listening.within_s,
            workdir,
        )
        return EXIT_FAILED
