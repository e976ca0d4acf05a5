"""The lead's side of an outpost: dial it, and move files to it and from it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from diloco_jax.config import Config
from diloco_jax.coordinator.settings import own_tls
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.coordinator.workers.outpost.files import (
    FragmentFiles,
    Moved,
    at_work,
    hang_up,
    receive_file,
    send_file,
)
from diloco_jax.coordinator.workers.places import OpenLine, Unreachable
from diloco_jax.deadlines import Backoff
from diloco_jax.protocol.holding import (
    AboutFiles,
    AskNewest,
    AtWork,
    BeginWorker,
    Committed,
    DropKept,
    FileComes,
    FromOutpost,
    GetKept,
    GetSnapshot,
    Kind,
    Newest,
    OutpostEnds,
    OutpostReady,
    PutFile,
    RestoreFragments,
    RunOver,
    Stored,
    WorkerRefused,
    from_outpost,
)
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses
from diloco_jax.wire.duplex import End, dial_worker
from diloco_jax.wire.errors import ConnectionLost, Refused, SecurityError, WireError
from diloco_jax.wire.tls import Renewed, TlsFiles

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Elsewhere:
    """The place of a worker on another machine; see `places.Place`."""

    pid = 0
    ends_with_line = False

    def __init__(
        self, begin: BeginWorker, config: Config, ending: threading.Event
    ) -> None:
        """ending: set once the lead ends, and nobody is to be dialled any more."""
        self._config, self._ending = config, ending
        self._worker, placement = begin.worker, config.placement
        self._about = AboutFiles(
            run_id=begin.run_id, worker=begin.worker, lead=begin.lead
        )
        self._dialled = placement.worker_addresses[begin.worker]
        self._deadlines = placement.deadlines
        self.patience_s = placement.outage_budget_s
        self._dials, self._moved = 0, 0.0
        self._futile = 0
        """Attempts in a row that moved bytes and no whole fragment."""
        self._doubted = False
        """Whether files of this machine are checked before they move, since an attempt
        failed: a damaged one comes nowhere."""
        self._files = FragmentFiles(placement, Path(begin.workdir))
        tls = own_tls(placement)
        # A dial between the renewal of a key and that of its certificate has the pair.
        self._tls = Renewed(tls, TlsFiles.client_context) if tls is not None else None

    def open(self, begin: BeginWorker, asked: RestoreFragments, new: bool) -> OpenLine:
        """Dial until the outpost answers; see `places.Place`. It knows itself whether
        the process of before is alive."""
        self._touch()
        pauses = Backoff(self._deadlines)
        self._futile, self._doubted = 0, False
        while True:
            began = time.monotonic()
            try:
                self._hand_over(asked.fragments)
                self._dials += 1
                return OpenLine(self._dial(), replace(begin, dial=self._dials), True)
            except (SecurityError, Refused) as error:
                raise Unreachable(str(error)) from error
            except (ConnectionLost, OSError) as error:
                self._futile += self._moved > began
                self._doubted = self._doubted or self._moved > began
                if self._futile > self._config.placement.restarts:
                    raise Unreachable(
                        f"{error}; no fragment has come there whole in "
                        f"{self._futile} attempts"
                    ) from error
                if self.silent_s() > self.patience_s:
                    raise Unreachable(
                        f"{error}; it was dialled for {self.patience_s:g} s "
                        f"(placement.outage_budget_s)"
                    ) from error
            if self._ending.wait(pauses.next_s()):
                raise Unreachable("the coordinator ends")

    def silent_s(self) -> float:
        """Return the seconds since dialling began, or bytes of files moved last."""
        return time.monotonic() - self._moved

    def address_of(self, bound: str) -> str:
        """Return the address at which islands reach the worker."""
        return addresses.bulk_address(self._dialled)

    def end(self, *, kill: bool) -> None:
        """Do nothing: the worker ends when it is told to, or nobody leads it."""

    def say_over(self) -> None:
        """Tell the outpost that the run is over; try for as long as it is dialled
        otherwise. It learns so even while it has no line."""
        pauses, until = Backoff(self._deadlines), time.monotonic() + self.patience_s
        while True:
            try:
                with self._opened() as line:
                    line.ask(RunOver(), OutpostEnds)
                return
            except (WireError, OSError) as error:
                hopeless = isinstance(error, SecurityError | Refused)
                if hopeless or time.monotonic() >= until:
                    logger.error(
                        "worker %d cannot be told that the run is over: %s; end "
                        "`diloco worker` there, if it does not end by itself",
                        self._worker,
                        error,
                    )
                    return
            time.sleep(pauses.next_s())

    def bring_home(self, fragment: int) -> None:
        """Copy the newest snapshot of a fragment to this machine, unless it is where
        every machine finds it. Raises WireError, OSError."""
        if self._files.in_bucket:
            return
        with self._opened() as line:
            comes = line.ask(GetSnapshot(fragment=fragment), FileComes)
            path = self._files.path("snapshot", fragment, comes.version)
            self._receive(line, path, comes)
        self._files.leave_only(fragment, comes.version)

    def fetch_kept(self, cycle: int, fragment: int) -> None:
        """Move a fragment of a kept cycle here. Raises WireError, OSError."""
        path = self._files.kept_path(cycle, fragment)
        with self._opened() as line:
            comes = line.ask(GetKept(cycle=cycle, fragment=fragment), FileComes)
            self._receive(line, path, comes)
            # If it says nothing any more, what is left there goes with a later cycle.
            with contextlib.suppress(WireError, OSError):
                line.ask(DropKept(cycle=cycle, fragment=fragment), Stored)

    def _receive(self, line: _Files, path: Path, comes: FileComes) -> None:
        receive_file(line.end, path, comes.size, self._deadlines, self._touch)

    def _hand_over(self, committed: tuple[Committed, ...]) -> None:
        """Move the files that this machine has of fragments to the worker: those of the
        beginning of a run or a term, or of a time when fragments were here. Files of
        merges that never were are deleted."""
        here = [c for c in committed if self._has(c.fragment)]
        if not here:
            return
        with self._opened() as line:
            for one in here:
                self._put(line, one, line.ask(AskNewest(fragment=one.fragment), Newest))
                self._files.remove(one.fragment)
                self._futile = -1

    def _has(self, fragment: int) -> bool:
        files = self._files
        own = not files.in_bucket and files.newest(fragment) is not None
        return own or bool(files.publishes(fragment, Version(sys.maxsize)))

    def _put(self, line: _Files, committed: Committed, there: Newest) -> None:
        """Move the files of a fragment that are not there: publishes first, since a
        snapshot that is there stands for all before it."""
        fragment, through = committed.fragment, committed.version
        newest, begins = self._newest(line, fragment, through), there.version
        if begins is not None and begins > through:
            begins = None  # Of merges that never were.
        files: list[tuple[Kind, Version]] = []
        if newest is not None and not self._files.in_bucket:
            same = begins == newest and there.seal == self._files.seal(fragment, newest)
            if begins is None or newest > begins or (newest == begins and not same):
                begins = newest
                files.append(("snapshot", newest))
        publishes = self._files.publishes(fragment, through)
        publishes = [v for v in publishes if begins is None or v > begins]
        for kind, version in [*(("publish", v) for v in publishes), *files]:
            self._put_file(line, kind, fragment, version)

    def _newest(self, line: _Files, fragment: int, through: Version) -> Version | None:
        """Return the version of the snapshot here that moves, if any does."""
        files = self._files
        if not self._doubted:
            return files.newest(fragment, through)
        octets = files.checked_bytes(fragment, through)
        with at_work(line.end, self._deadlines, octets, self._touch):
            return files.newest_whole(fragment, through)

    def _put_file(
        self, line: _Files, kind: Kind, fragment: int, version: Version
    ) -> None:
        path = self._files.path(kind, fragment, version)
        size = path.stat().st_size
        put = PutFile(kind=kind, fragment=fragment, version=version, size=size)
        write_frame(line.end, put)
        try:
            send_file(line.end, path, size, self._touch)
        except OSError:
            # It may have said why it takes no more.
            with contextlib.suppress(OSError):
                line.answer(Stored)
            raise
        line.answer(Stored)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Files]:
        """Yield a connection for files."""
        end = self._dial()
        try:
            write_frame(end, self._about)
            yield self._files_at(end)
        finally:
            hang_up(end)

    def _dial(self) -> End:
        """Return a connection whose outpost is ready. Raises WireError."""
        end = dial_worker(self._dialled, self._worker, self._tls, self._deadlines)
        try:
            self._files_at(end).answer(OutpostReady)
            end.settimeout(self._deadlines.idle_s)
        except BaseException:
            hang_up(end)
            raise
        return end

    def _files_at(self, end: End) -> _Files:
        return _Files(end, self._dialled, self._touch)

    def _touch(self) -> None:
        self._moved = time.monotonic()


class _Files(NamedTuple):
    """A connection on which an outpost answers questions."""

    end: End
    address: str
    moved: Moved

    def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Return the answer of this kind. Raises ConnectionLost; Refused if the outpost
        does not do it."""
        write_frame(self.end, message)
        return self.answer(kind)

    def answer(self, kind: type[Answer]) -> Answer:
        """Return the next answer, as `ask` does."""
        while isinstance(found := self._next(), AtWork):
            self.moved()
        if isinstance(found, WorkerRefused):
            text = f"{self.address}: {found.text}"
            raise ConnectionLost(text) if found.passing else Refused("worker", text)
        if not isinstance(found, kind):
            raise ConnectionLost(
                f"{self.address} answers with {type(found).__name__}, and not with "
                f"{kind.__name__}; both ends must run the same version of diloco"
            )
        return found

    def _next(self) -> FromOutpost:
        frame = read_frame(self.end)
        if frame is None:
            raise ConnectionLost(
                f"{self.address} ended the connection; see the log of `diloco worker` "
                f"there"
            )
        try:
            found: FromOutpost = from_outpost(frame)
        except msgspec.DecodeError as error:
            raise ConnectionLost(f"{self.address} is no outpost: {error}") from error
        return found
