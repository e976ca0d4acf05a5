"""One incarnation of an island, repeated: the tape decides in place of the network.

Books, boundary, pace and model copy are the runtime's. Each record of the tape is
carried out alone, at its step, and the books must write down that same record again.
What the island fetched is kept as long as the tape needs it (`PublishedVersions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from diloco_jax.config import RunConfig
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragment_merge import Arrays, MergeResult
from diloco_jax.core.payload import Buffer
from diloco_jax.data.batches import BatchReader, LeasedPositions
from diloco_jax.island.mailbox import Arrival
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.observability.logs import log_refused
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Adoption, Boundary, Decision
from diloco_jax.protocol.messages import TakeRequest, TakeVerdict
from diloco_jax.protocol.values import (
    FIRST_VERSION,
    NON_FINITE,
    STALE,
    RecordKind,
    Span,
    Verdict,
    Version,
)
from diloco_jax.simulation.replay.recording import BegunTerm, Life, Recording
from diloco_jax.simulation.replay.worker import RemoteReplica, Worker

Use = tuple[Literal["anchor", "publish"], int, Version]
"""A use of what a version of a fragment has."""


class PublishedVersions:
    """Anchors and encoded publishes by version, each kept for its uses on the tape.

    Incarnations begin with anchors and adopt publishes; a coordinator that comes back
    needs publishes, too.

    first: A of the first version, by fragment. All methods raise KeyError for versions
    that have not been merged yet.
    """

    def __init__(self, recording: Recording, first: Sequence[Arrays]) -> None:
        self._uses = Counter(_uses(recording))
        self._held: dict[Use, Any] = {}
        for fragment, anchor in enumerate(first):
            self.begin(fragment, FIRST_VERSION, anchor)

    def keep(self, fragment: int, version: Version, merged: MergeResult) -> None:
        """Keep a committed merge as far as the tape needs it."""
        self.begin(fragment, version, merged.state.anchor)
        if self._uses["publish", fragment, version]:
            self._held["publish", fragment, version] = merged.payload

    def begin(self, fragment: int, version: Version, anchor: Arrays) -> None:
        """Keep the anchor with which a term of a fragment begins, if it is needed."""
        if self._uses["anchor", fragment, version]:
            self._held["anchor", fragment, version] = anchor

    def anchor(self, fragment: int, version: Version) -> bytes:
        """Return A_v in full, in f32 tiles; once for every use on the tape."""
        arrays = self._use(("anchor", fragment, version))
        return b"".join(array.tobytes() for array in arrays)

    def publish(self, fragment: int, version: Version) -> Buffer:
        """Return the encoded publish of a version; once for every use on the tape."""
        payload: Buffer = self._use(("publish", fragment, version))
        return payload

    def chain(self, fragment: int, have: Version, want: Version) -> list[Buffer]:
        """Return the publishes that lead from one version to another, oldest first."""
        return [self.publish(fragment, version) for version in _between(have, want)]

    def _use(self, use: Use) -> Any:
        self._uses[use] -= 1
        return self._held[use] if self._uses[use] else self._held.pop(use)


def _uses(recording: Recording) -> Iterator[Use]:
    for life in recording.lives.values():
        have = life.begins()
        for fragment, version in enumerate(have):
            yield "anchor", fragment, version
        for _, record in life.records[len(have) :]:
            if record.kind == "adopted":
                fragment, want = record.fragment, record.version
                if have[fragment].term == want.term:
                    for version in _between(have[fragment], want):
                        yield "publish", fragment, version
                else:
                    yield "anchor", fragment, want
                have[fragment] = want
    for event in recording.between:
        if isinstance(event, BegunTerm):
            yield "anchor", event.begun.fragment, event.begun.replaced
        else:
            for merge in event.logged(recording.merges):
                yield "publish", merge.made.fragment, merge.made.version


def _between(have: Version, want: Version) -> Iterator[Version]:
    while have < want:
        have = have.next()
        yield have


class ReplayedIsland:
    """Incarnation that advances only as far as a requested delta needs.

    All methods raise TapeError, naming the first line that cannot be repeated.
    """

    def __init__(
        self,
        life: Life,
        run: RunConfig,
        reader: BatchReader,
        published: PublishedVersions,
        worker: Worker,
        source: ReplayedIsland | None = None,
    ) -> None:
        """source: the incarnation whose moments this one began with."""
        self.steps = 0
        """Inner steps done."""
        versions = life.begins()
        self._life, self._reader, self._published = life, reader, published
        self._moments: dict[int, list[npt.NDArray[Any]]] = {}
        self._books = Books(versions, ADOPT_RULES.find(run.sync.adopt))
        self._books.begin()
        anchors = [self._anchor(f, version) for f, version in enumerate(versions)]
        moments, residuals = None, None
        restored = life.restored()
        if restored is not None:
            assert source is not None
            who, steps, fragments = restored
            self._books.restored(who.incarnation, steps, fragments)
            moments = source.moments(steps)
            residuals = {f: source.replica.residual(f) for f in fragments}
        self._next = len(self._books.drain())
        self.replica: RemoteReplica = RemoteReplica(
            worker, life.who, life.config, anchors, moments, residuals
        )
        """Its model copy."""
        self._positions = LeasedPositions()
        goal = goal_of(run, life.config.batch_size)
        self._boundary = Boundary(
            self._books,
            goal,
            arrays=self.replica,
            incoming=self,
            outgoing=self,
            data=self._positions,
        )
        self._pace = Pace(run, goal, warm=restored is not None)
        self._others_tokens = 0
        self._line = 0
        """Line of the tape with the record that is being repeated."""
        self._deltas: dict[tuple[int, int], bytes] = {}

    def delta(self, fragment: int, tick: int) -> npt.NDArray[np.uint8]:
        """Return the encoded delta of a take that is merged."""
        while (fragment, tick) not in self._deltas:
            self._repeat()
        return np.frombuffer(self._deltas[fragment, tick], np.uint8)

    def moments(self, steps: int) -> list[npt.NDArray[Any]]:
        """Return the inner optimizer's state after `steps` steps: see `Life.saves`."""
        while steps not in self._moments:
            if self._next == len(self._life.records):
                self._train_until(steps, self._life.records[-1].line)
                self._moments[steps] = self.replica.moments()
                break
            self._repeat()
        return self._moments[steps]

    def merged(self, fragment: int, tick: int) -> None:
        """Note that a take is in a merge."""
        here = self._books.version(fragment)
        verdict = _verdict(fragment, tick, "merged", here)
        self._act(Decision(verdicts=(verdict,)), self.steps)

    def put(self, fragment: int, tick: int, encoded: bytes) -> None:
        self._deltas[fragment, tick] = encoded

    def forget(self, fragment: int, tick: int) -> None:
        del self._deltas[fragment, tick]

    def pick(self, fragment: int, version: Version) -> Arrival:
        have = self._books.version(fragment)
        try:
            if have.term != version.term:  # It was fetched in full.
                anchor = self._published.anchor(fragment, version)
                return Arrival(fragment=fragment, version=version, anchor=(anchor,))
            payloads = self._published.chain(fragment, have, version)
        except KeyError as error:
            raise self._unmerged(self._line, fragment, version) from error
        return Arrival(
            fragment=fragment,
            version=version,
            publishes=tuple((payload,) for payload in payloads),
        )

    # ---- one record -------------------------------------------------------------

    def _repeat(self) -> None:
        line, record = self._life.records[self._next]
        self._next += 1
        self._train_until(record.step, line)
        fragment, tick = record.fragment, record.tick
        decision = Decision()
        self._line = line
        match record.kind:
            case "granted":
                decision = Decision(grants=(Span(record.start, record.stop),))
            case "progress":
                self._others_tokens = record.value
            case "took":
                request = TakeRequest(fragment=fragment, tick=tick)
                decision = Decision(takes=(request,))
            case "adopted":
                pending = _verdict(fragment, tick, "pending", record.version)
                decision = Decision(
                    adoptions=(Adoption(fragment, record.version),),
                    verdicts=(pending,) if tick >= 0 else (),
                )
            case "reopened" | "dropped" | "reset":
                verdict = self._refused(fragment, tick, record.kind)
                decision = Decision(verdicts=(verdict,))
        self._act(decision, record.step)
        found = self._books.drain()
        if found != (record,):
            raise TapeError(
                f"line {line}: {self._life.who} noted {record}, but after what it "
                f"noted before comes {found or 'nothing'}; a record was altered or is "
                f"missing"
            )

    def _refused(self, fragment: int, tick: int, kind: RecordKind) -> TakeVerdict:
        """Return a verdict with this outcome; the tape does not have the island's."""
        here, reason = self._books.version(fragment), "refused"
        if kind == "reset":
            reason = NON_FINITE
        elif kind == "dropped":
            # A kept take is dropped only while a newer version is on its way.
            here, reason = Version(here.term, here.number + 1), STALE
        return _verdict(fragment, tick, "refused", here, reason)

    def _train_until(self, steps: int, line: int) -> None:
        while self.steps < steps:
            if self.steps in self._life.saves:  # A later incarnation begins with them.
                self._moments.setdefault(self.steps, self.replica.moments())
            self._train(line)

    def _train(self, line: int) -> None:
        if not self._boundary.may_step(self.steps):
            raise TapeError(
                f"line {line}: {self._life.who} did step {self.steps} although the run "
                f"had its tokens, {self._boundary.others_tokens} of them of other "
                f"islands; a record of progress was altered or is missing"
            )
        positions = self._positions.draw(self._life.config.batch_size)
        if positions is None:
            raise TapeError(
                f"line {line}: {self._life.who} did step {self.steps} without data, "
                f"with {self._positions.granted} sequences granted; a record of a "
                f"grant was altered or is missing"
            )
        rate = self._pace.learning_rate(self.steps, self._boundary.others_tokens)
        self._books.stepped(rate)
        self.replica.step(self._reader.batch(positions), rate)
        self.steps += 1

    def _act(self, decision: Decision, step: int) -> None:
        others = self._others_tokens
        decision = msgspec.structs.replace(decision, others_tokens=others)
        log_refused(self._boundary.act(decision, step))

    def _anchor(self, fragment: int, version: Version) -> bytes:
        try:
            return self._published.anchor(fragment, version)
        except KeyError as error:
            line = self._life.records[fragment].line
            raise self._unmerged(line, fragment, version) from error

    def _unmerged(self, line: int, fragment: int, version: Version) -> TapeError:
        return TapeError(
            f"line {line}: {self._life.who} adopted version {tuple(version)} of "
            f"fragment {fragment} before it was merged; a record is out of order"
        )


def _verdict(
    fragment: int, tick: int, verdict: Verdict, version: Version, reason: str = ""
) -> TakeVerdict:
    return TakeVerdict(
        fragment=fragment, tick=tick, verdict=verdict, reason=reason, version=version
    )
