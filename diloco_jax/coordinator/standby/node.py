"""The process of a standby: follow a primary, until it leads or the run is over."""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.mandates.opening import open_store
from diloco_jax.coordinator.mandates.store import MandateStore
from diloco_jax.coordinator.settings import server_of
from diloco_jax.coordinator.standby.machine_thread import MachineThread, timing_of
from diloco_jax.coordinator.standby.mirror import Mirror
from diloco_jax.coordinator.standby.name import adopt, copied_from, node_of
from diloco_jax.coordinator.standby.waiting import Waiting
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.process import heeding_signals
from diloco_jax.protocol.standby import following
from diloco_jax.protocol.standby.events import (
    AnswerPrimary,
    Copied,
    Dial,
    Following,
    HangUp,
    PrimaryHeard,
    PrimaryLost,
    Retire,
    StandbyEffect,
    TakeOver,
)
from diloco_jax.protocol.standby.following import Standby
from diloco_jax.wire import addresses, follow
from diloco_jax.wire.errors import ConnectionLost, Refused, WireError
from diloco_jax.wire.following import FollowStream
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

POLL_S = 0.2


class StandbyOutcome(NamedTuple):
    """How a standby's time ended. by: how it leads now; "" if it does not."""

    by: Literal["", "log", "gathering"]
    run_id: str = ""


class StandbyNode:
    """One life of a standby: make, `run`, `close`."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        primary: str,
        tls: TlsFiles | None,
        store: MandateStore | None = None,
    ) -> None:
        """primary: HOST:PORT. Raises ConfigError."""
        placement = config.placement
        if not placement.mandate:
            raise ConfigError(
                f"--standby-of {primary} needs placement.mandate: without an object "
                f"that says who leads, two coordinators could; set it for both"
            )
        # Workers of the time when this node led have their ports, and may go on.
        left = rendezvous.are_left(workdir)
        addresses.require_free(placement.bind, 2 if left else placement.ports)
        self._config, self._primary, self._tls = config, primary, tls
        self._deadlines = placement.deadlines
        self.node = node_of(workdir)
        if copied := copied_from(workdir):
            # Another node may have that name. A run that is here may be the last one.
            if workdirs.holds_run(workdir):
                raise ConfigError(
                    f"{workdir} is a copy of {copied}, and has its run: if that one is "
                    f"gone for good, write {self.node} alone into the file "
                    f"{run_files.NODE} of {workdir}; if it is not, give a new workdir, "
                    f"which this standby fills"
                )
            adopt(workdir, uuid.uuid4().hex[:8])
            logger.warning("the workdir is a copy of %s: it is a new node", copied)
            self.node = node_of(workdir)
        self._fingerprint = config.run.fingerprint()
        self._mirror = Mirror(workdir, placement)
        self._lock = workdirs.held(workdir / run_files.LOCK, "a coordinator")
        self._dials = 0
        """Streams that were asked for; each belongs to the newest or is over."""
        self._changed = threading.Condition()
        self._stream: FollowStream | None = None
        self._closing = False
        self._outcome: StandbyOutcome | None = None
        self._failure: BaseException | None = None
        self._interrupted = False
        self._heard_at, self._told = 0.0, ""
        self._thread = threading.Thread(
            target=self._follow, name="diloco-follow", daemon=True
        )
        timing = timing_of(self._deadlines)
        self._every_s = timing.patience_s / 8
        self._machine: MachineThread[Standby] = MachineThread(
            following.step,
            following.next_deadline,
            following.begin(
                timing,
                self.node,
                empty=not workdirs.holds_run(workdir),
                led=rendezvous.last_reign(workdir),
            ),
            store or open_store(placement.mandate),
            timing,
            self._act,
        )
        self._server = server_of(config, Waiting(self.shown), tls)

    def run(self) -> StandbyOutcome:
        """Follow until this node leads, or there is nothing to follow, or until it is
        asked to end by a signal, which is heeded if this is the main thread.

        Raises Refused if the primary does not take this standby, and ConfigError if
        the workdir is in use or hangs.
        """
        # Afterwards signals end the coordinator that is starting then.
        with heeding_signals(self._asked_to_end), self._lock:
            bound = self._server.start()
            logger.info("standby %s of %s, at %s", self.node, self._primary, bound)
            try:
                self._machine.start()
                self._thread.start()
                self._wait()
            finally:
                self._close()
            outcome = self._outcome or StandbyOutcome("")
            if outcome.by == "gathering":
                self._mirror.clear(outcome.run_id)
        # Who asks it to end while it takes over does not want it to lead.
        return StandbyOutcome("") if self._interrupted else outcome

    def _wait(self) -> None:
        with self._changed:
            while self._outcome is None and not self._interrupted:
                # A handler of signals can notify nobody.
                self._changed.wait(POLL_S)
                if self._failure is not None:
                    raise self._failure

    def _close(self) -> None:
        """End everything that could touch the workdir."""
        self._server.stop(0.0)
        self._machine.close(self._deadlines.stop_s / 4)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.cancel()
        if self._thread.ident is not None:
            self._thread.join(self._deadlines.stop_s)
        if self._thread.is_alive():
            raise ConfigError(
                "the disk of the workdir hangs, so this standby cannot lead; look at "
                "it, and start the standby again"
            )
        self._mirror.close()

    def shown(self) -> dict[str, Any]:
        """Return what people are told of this standby."""
        state = self._machine.state
        return {
            "node": self.node,
            "primary": self._primary,
            "state": state.phase,
            "in_step": following.in_step(state),
            "have": state.have,
        }

    # ---- effects, under the machine's lock ------------------------------------------

    def _act(self, effect: StandbyEffect) -> None:
        match effect:
            case AnswerPrimary(number=number):
                if (stream := self._stream) is not None:
                    stream.answer(number)
            case Dial():
                with self._changed:
                    self._dials += 1
                    self._changed.notify_all()
            case HangUp():
                with self._changed:
                    if self._stream is not None:
                        self._stream.cancel()
            case TakeOver(by=by):
                mandate = self._machine.state.mandate
                run_id = "" if mandate is None else mandate.run_id
                logger.warning("node %s takes over, from %s", self.node, by)
                self._end(StandbyOutcome(by, run_id))
            case Retire():
                logger.info("the run is over: nothing is left to follow")
                self._end(StandbyOutcome(""))

    def _end(self, outcome: StandbyOutcome) -> None:
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    # ---- the stream, on its own thread ----------------------------------------------

    def _follow(self) -> None:
        """Open one stream after the other, each until its end."""
        opened = 0
        while True:
            with self._changed:
                while self._dials == opened and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                opened = dial = self._dials
            try:
                self._follow_once()
            except (Refused, ConfigError) as error:
                self._fail(error)
                return
            except (WireError, OSError) as error:
                self._tell(error)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                with self._changed:
                    self._stream = None
                newest = functools.partial(self._is_newest, dial)
                self._machine.give(PrimaryLost(), newest)

    def _is_newest(self, dial: int) -> bool:
        return self._dials == dial

    def _follow_once(self) -> None:
        stream = FollowStream(
            self._primary,
            follow.FollowRequest(
                node=self.node,
                fingerprint=self._fingerprint,
                sealed=self._mirror.sealed(),
            ),
            tls=self._tls,
            insecure=self._config.placement.insecure,
            deadlines=self._deadlines,
        )
        with self._changed:
            self._stream = stream
            if self._closing:
                stream.cancel()
        stream.run(self._got)

    def _got(self, message: follow.FromPrimary) -> None:
        """Put on the disk what the primary says, then let the machine know."""
        give, mirror, number = self._machine.give, self._mirror, -1
        match message:
            case follow.CopyBegins(run_id=run_id, keep=keep):
                give(Following())
                if self._machine.state.phase != "copying":
                    raise ConnectionLost("this standby does not follow any more")
                mirror.clear(run_id, keep)
                return
            case follow.CopyWhole(number=number):
                mirror.whole()
                logger.info("the copy is whole; everything is here up to %d", number)
                give(Copied(number=number))
                return
            case follow.FileChunk(path=path, first=first, last=last, data=data):
                mirror.chunk(path, data, first=first, last=last)
                if time.monotonic() - self._heard_at < self._every_s:
                    return  # A sign of life for each of many chunks is too much.
            case follow.AppendedTo(number=number, path=path, sync=sync, data=data):
                mirror.append(path, data, sync=sync)
            case follow.PutAside(number=number, path=path):
                mirror.put_aside(path)
        self._heard_at = time.monotonic()
        give(PrimaryHeard(number=number))

    def _tell(self, error: Exception) -> None:
        told = f"{type(error).__name__}: {error}"
        if told != self._told:
            self._told = told
            logger.warning("the primary is not followed: %s", error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _asked_to_end(self, number: int, frame: Any) -> None:
        # Nothing else here: a handler may find any lock held.
        self._interrupted = True
