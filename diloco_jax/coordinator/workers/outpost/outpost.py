"""An outpost: the process on another machine that lets a lead in, and starts a worker.

To the lead it is the worker: it listens at the worker's address, proves with the
worker's key which one it is, and obeys the coordinator's key alone. Messages of a lead
go to the worker's process on this machine and back, as they are. That process outlives
a lead, a line that breaks, and the outpost (`rendezvous.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, Placement
from diloco_jax.config.loading import from_builtins, named_code
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.coordinator.workers.outpost.admission import Admission
from diloco_jax.coordinator.workers.outpost.files import (
    FragmentFiles,
    hang_up,
    receive_file,
    send_file,
)
from diloco_jax.coordinator.workers.outpost.patience import Patience
from diloco_jax.coordinator.workers.outpost.relay import cut, relay
from diloco_jax.coordinator.workers.places import Here
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.files import is_bucket
from diloco_jax.protocol.holding import (
    AboutFiles,
    AskNewest,
    AtWork,
    BeginWorker,
    DropKept,
    EndWorker,
    FileComes,
    FilesAsked,
    FirstWord,
    GetKept,
    GetSnapshot,
    Newest,
    OutpostEnds,
    OutpostReady,
    PutFile,
    RunOver,
    Stored,
    WorkerRefused,
    files_asked,
    first_word,
)
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

PAUSE_S = 0.05
"""Pause after a connection that could not be accepted, in seconds."""
LOOK_S = 0.5
"""Interval between two looks at whether to wait for a lead any longer, in seconds."""
CONNECTIONS = 16
"""Most connections at a time: one of messages, few of files, and those of strangers."""


class Outpost:
    """The outpost of one worker. `serve` returns once nobody needs it."""

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
        self._admission = Admission(workdir, index)
        self._here = Here(workdir, index, self._deadlines.stop_s)
        numeric = addresses.resolve(bind)
        # The next port may be that of a worker that has outlived its outpost.
        self._bulk = addresses.bulk_address(numeric)
        self._listener = addresses.listen(numeric)
        self._places = threading.Semaphore(CONNECTIONS)
        self._watch = IdleWatch("diloco-outpost-watch")
        self._begins = threading.Lock()
        """Held while the worker's process gets a line."""
        self._line: End | None = None
        self._over, self._closing = threading.Event(), threading.Event()
        self._lines = RateLimitedLog(at_once=1)
        self.patience = Patience()
        self.address = addresses.format_address(*self._listener.getsockname()[:2])
        """Where it listens."""

    def serve(self) -> bool:
        """Let leads in until the run is over, and the worker has ended. Return False if
        no lead is here, and none has come for too long."""
        threading.Thread(target=self._accept, daemon=True).start()
        while (left_s := self.patience.left_s()) > 0 and not self._closing.is_set():
            if self._over.wait(min(left_s, LOOK_S)):
                return True
        return self._over.is_set()

    def close(self) -> None:
        """Stop listening, and end the worker that was begun here."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._here.end(kill=not self._over.is_set())
        self._open.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._closing.wait(PAUSE_S):
                    return
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
        """Answer one connection to its end."""
        ends: list[End] = [connection]
        try:
            with self._watch.guard(self._deadlines.connect_s, lambda: cut(connection)):
                prepare(connection, self._deadlines)
                connection.settimeout(self._deadlines.connect_s)
                if self._contexts is not None and _is_probe(connection):
                    return
                end = self._secured(connection)
                ends[:] = [end]
                word = self._greeted(end, peer)
            if word is not None:
                self._obey(end, word, peer)
        except OSError as error:
            self._warn("the connection from %s broke: %s", peer, error)
        except Exception:
            logger.exception("the connection from %s failed", peer)
        finally:
            hang_up(ends[0])
            self._places.release()

    def _secured(self, connection: socket.socket) -> End:
        if self._contexts is None:
            return connection
        end = TlsEnd(connection, self._contexts())
        end.shake_hands()
        return end

    def _greeted(self, end: End, peer: str) -> FirstWord | None:
        """Return the first word of a lead that is let in."""
        with self._telling(end, peer):
            self._require_lead(end)
            write_frame(end, OutpostReady(worker=self._index))
            if (frame := read_frame(end)) is not None:
                word: FirstWord = first_word(frame)
                return word
        return None

    def _obey(self, end: End, word: FirstWord, peer: str) -> None:
        with self._telling(end, peer):
            self._admission.admit(word)
            end.settimeout(self._deadlines.idle_s)
            if isinstance(word, BeginWorker):
                self._lead(end, word, peer)
            else:
                with self.patience.led(self.patience.within_s):
                    self._move_files(end, word)

    @contextlib.contextmanager
    def _telling(self, end: End, peer: str) -> Iterator[None]:
        """Tell the other end why it is refused in the block."""
        try:
            yield
        except (Refused, SecurityError, ConfigError, msgspec.DecodeError) as error:
            self._warn("%s is refused: %s", peer, error)
            write_frame(end, WorkerRefused(text=str(error)))

    def _warn(self, text: str, *facts: object) -> None:
        """Log what strangers can bring about, now and then."""
        self._lines.log(logger, logging.WARNING, "strangers", text % facts)

    def _require_lead(self, end: End) -> None:
        """Raise Refused or SecurityError unless the other end is a coordinator."""
        if self._peers is None:
            return
        assert isinstance(end, TlsEnd)
        pem = ssl.DER_cert_to_PEM_cert(end.certificate()).encode()
        principal.require(self._peers.identify(pem), principal.COORDINATOR)

    # ---- messages -------------------------------------------------------------------

    def _lead(self, end: End, begin: BeginWorker, peer: str) -> None:
        """Have the worker's process go on with this lead, or start one, until the line
        breaks."""
        own = self._fitted(begin)
        with self._begins:
            self._admission.require_current(begin)
            if self._line is not None:
                hang_up(self._line)  # An older one: the newest lead alone counts.
            there = self._here.reach()
            how = "goes on"
            if there is None:
                self._here.end(kill=True)
                there, how = self._here.start(), "begins"
            self._line = end
        logger.info("worker %d %s with the lead at %s", self._index, how, peer)
        theirs = _placement_of(own)
        try:
            write_frame(there, replace(own, life=self._here.life))
            with self.patience.led(theirs.alone_s):
                gone = functools.partial(self._await_end, end)
                relay(end, there, theirs.deadlines, gone)
        finally:
            hang_up(there)
            with self._begins:
                if self._line is end:
                    self._line = None

    def _await_end(self, end: End, hung: bool) -> None:
        """Wait for the process that has failed, before the lead at this end dials
        again: it would find one that ends. Kill it if it hangs."""
        with self._begins:
            if self._line is not end:
                return  # A newer lead may have another process.
            if hung:
                logger.error(
                    "worker %d says nothing any more: it is killed", self._index
                )
            self._here.end(kill=hung)

    def _finish(self) -> None:
        """End the worker. A lead that has a line says so there as well, and the worker
        ends in order."""
        with self._begins:
            there = self._here.reach() if self._line is None else None
        if there is not None:
            with contextlib.suppress(OSError):
                write_frame(there, EndWorker())
            hang_up(there)
        self._here.end(kill=False)
        self._over.set()

    def _fitted(self, begin: BeginWorker) -> BeginWorker:
        """Return the lead's first message with what is of this machine. Raises
        ConfigError for a config that must not, or cannot, be followed here."""
        config = from_builtins(begin.config, "the lead's config")
        own, theirs = self._config.placement, config.placement
        code = named_code(config.run)
        if code != named_code(self._config.run):
            raise ConfigError(
                f"the lead's config names code ({code or 'none'}), and CONFIG of this "
                f"worker other code ({named_code(self._config.run) or 'none'}); "
                f"give both the same CONFIG"
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
        fitted = dataclasses.replace(config, placement=placement)
        return replace(
            begin,
            config=dataclasses.asdict(fitted),
            workdir=str(self._workdir),
            bind=self._bulk,
        )

    # ---- files ----------------------------------------------------------------------

    def _move_files(self, end: End, about: AboutFiles) -> None:
        files = FragmentFiles(self._config.placement, self._workdir)
        while (frame := read_frame(end)) is not None:
            asked = files_asked(frame)
            try:
                self._move(end, files, asked)
            except OSError as error:
                text = f"{type(asked).__name__} of lead {about.lead} failed: {error}"
                logger.error("%s", text)
                write_frame(end, WorkerRefused(text=text, passing=True))
                return

    def _move(self, end: End, files: FragmentFiles, asked: FilesAsked) -> None:
        match asked:
            case AskNewest(fragment=fragment):
                newest = files.newest(fragment)
                seal = files.seal(fragment, newest) if newest is not None else ""
                write_frame(end, Newest(version=newest, seal=seal))
            case PutFile():
                path = files.path(asked.kind, asked.fragment, asked.version)
                receive_file(end, path, asked.size, self._deadlines, _nothing)
                write_frame(end, Stored())
            case GetSnapshot(fragment=fragment):
                version = files.newest(fragment)
                if version is None:
                    raise FileNotFoundError(f"fragment {fragment} has no snapshot here")
                path = files.path("snapshot", fragment, version)
                _send(end, path, version=version)
            case GetKept(cycle=cycle, fragment=fragment):
                _send(end, files.kept_path(cycle, fragment))
            case DropKept(cycle=cycle, fragment=fragment):
                files.drop_kept(cycle, fragment)
                write_frame(end, Stored())
            case AtWork():
                pass
            case RunOver():
                try:
                    write_frame(end, OutpostEnds())
                finally:
                    self._finish()


def _is_probe(connection: socket.socket) -> bool:
    """Tell whether the other end has hung up without a byte, as one does that asks only
    whether this process listens: Kubernetes, every few seconds. With TLS a lead speaks
    first. Raises OSError."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except ConnectionResetError:
        return True


def _send(end: End, path: Path, **facts: Any) -> None:
    size = path.stat().st_size
    write_frame(end, FileComes(size=size, **facts))
    send_file(end, path, size, _nothing)


def _placement_of(begin: BeginWorker) -> Placement:
    return from_builtins(begin.config, "the lead's config").placement


def _nothing() -> None:
    pass


def run(config: Config, index: int, workdir: Path, bind: str) -> int:
    """Serve as this worker until the run is over, or no coordinator comes; return the
    exit code."""
    outpost = Outpost(config, index, workdir, bind)
    with contextlib.closing(outpost):
        logger.info("worker %d awaits the coordinator at %s", index, outpost.address)
        if outpost.serve():
            logger.info("the run is over")
            return EXIT_DONE
        logger.error(
            "no coordinator came for %g s: this worker ends, and what it has stays in "
            "%s; start it again with the coordinator",
            outpost.patience.within_s,
            workdir,
        )
        return EXIT_FAILED
