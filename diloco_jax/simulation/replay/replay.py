"""`diloco replay`: repeat a recorded run from config, text and tape alone.

The tape holds the takes, adoptions and merges, with their order. Everything else is
computed anew by the runtime's own parts: steps, deltas, merges, and the coordinator's
state after a crash. Each merge must have the digest of the tape.

In an incarnation of an island the tape decides in place of the network. Books,
boundary, pace and model copy are the runtime's. Each record of the tape is carried out
alone, at its step, and the books must write down that same record again. What the
island fetched is kept as long as the tape needs it (`UsedVersions`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from diloco_jax import before_jax, checkpoint, compilation, files, run_files
from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.holding.anchors import layouts_of, values_of
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import Environment, FragmentBack, Recovered
from diloco_jax.coordinator.snapshots import flat, fragment_path, state_path
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragment_merge import Arrays, MergeResult
from diloco_jax.core.fragments import Buffer
from diloco_jax.core.tiles import Passes
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader, LeasedPositions
from diloco_jax.files import digest_of, require_writable
from diloco_jax.island.device.exchange import Restored
from diloco_jax.island.mailbox import Arrival, log_refused
from diloco_jax.island.timing import Pace, goal_of
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import TapeError
from diloco_jax.observability.terminal import bar
from diloco_jax.protocol.island import boundary
from diloco_jax.protocol.island.boundary import Adoption, Boundary, Decision
from diloco_jax.protocol.messages import (
    RecordKind,
    Span,
    TakeRequest,
    TakeVerdict,
    Verdict,
    Version,
)
from diloco_jax.protocol.records import Merged, TermBegun
from diloco_jax.simulation.replay.recording import (
    Between,
    Life,
    RecordedMerge,
    Recording,
    Who,
    environment_like,
    refuse_other_bits,
)
from diloco_jax.simulation.replay.worker import Worker
from diloco_jax.weights.first import first_pieces, require_repeatable

Digests = tuple[str, str]
"""Digests of a merge's publish and of the fragment's Theta; "" = not on the tape."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result that `diloco replay --json` prints."""

    merges: int
    """Merges repeated with the tape's digest."""
    merges_on_tape: int
    identical: bool
    first_mismatch: dict[str, Any] | None
    """Fields: merge (from 1), line, fragment, version, digest_on_tape, digest."""
    steps: int
    """Inner steps of all islands."""
    seconds: float

    def __str__(self) -> str:
        done = f"{self.merges} of {self.merges_on_tape} merges"
        effort = f"{self.steps} steps in {self.seconds:.1f} s"
        wrong = self.first_mismatch
        if wrong is None:
            return f"{done} repeated, all with the same bits ({effort})"
        return (
            f"{done} repeated with the same bits ({effort}); merge {wrong['merge']} "
            f"(line {wrong['line']}: fragment {wrong['fragment']}, version "
            f"{tuple(wrong['version'])}) has digest {wrong['digest_on_tape']} on the "
            f"tape, {wrong['digest']} here: the tape, the text or the program was "
            f"altered before it"
        )


def run(recording: Recording, console: Console, save: Path | None = None) -> Outcome:
    """Repeat the recording up to the first merge that differs, with a progress bar.

    save: a new folder for the config and the global parameters after the last equal
    merge; `diloco eval` reads it.

    Raises ConfigError if the text, version or machine is not that of the run, and
    TapeError if the tape contradicts itself.
    """
    if save is not None:
        if save.exists():
            raise ConfigError(f"--save {save} exists already; name a new folder")
        there = next(path for path in save.absolute().parents if path.exists())
        require_writable(there, f"--save {save}: in")
    began = time.monotonic()
    with Replay(recording) as replay:
        merges, mismatch = replay.compare(console)
        if save is not None:
            replay.save(save, merges)
    return Outcome(
        merges=merges,
        merges_on_tape=recording.merges_on_tape,
        identical=mismatch is None,
        first_mismatch=mismatch,
        steps=replay.steps,
        seconds=time.monotonic() - began,
    )


class Replay(contextlib.ExitStack):
    """The coordinator's state in this process, and the islands in worker processes."""

    def __init__(self, recording: Recording, kept: Iterable[Who] = ()) -> None:
        """kept: incarnations that stay after their last merge, for `state`. Raises
        ConfigError if this is not the text, version or machine of the run."""
        super().__init__()
        self.steps = 0
        """Inner steps done."""
        here = before_jax.describe_environment()
        for recorded in recording.coordinators:
            refuse_other_bits("the coordinator", recorded, here)
        compilation.use_cache(compilation.of_user())
        self._recording = recording
        self._run = run = recording.config.run
        model = build(run)
        model.require_loss()  # Only they know their steps, if loops of users joined.
        rows, fields = load_data(run).index(run.seed), model.fields(run.data.arrays)
        self._reader = BatchReader(rows, fields, run.sequence_length)
        self._store = _new_store(recording)
        # All lives of the coordinator, so that none is refused half-way.
        first, *_ = [passes_like(recorded) for recorded in recording.coordinators]
        self._store.use_passes(first)
        self._fragments = range(len(self._store.plan.fragments))
        self._used = UsedVersions(recording)
        for fragment in self._fragments:
            self._keep(fragment)
        self._workers: dict[str, Worker] = {}
        self._islands: dict[Who, ReplayedIsland] = {}
        self._needs = Counter(
            Who(part.island, part.incarnation)
            for merge in recording.merges
            for part in merge.made.contributions
        )
        self._needs.update(kept)
        for life in recording.lives.values():
            # A source is needed until the incarnation begins with its moments.
            if (restored := life.restored()) is not None:
                self._needs[restored.who] += 1

    def merges(self) -> Iterator[tuple[RecordedMerge, Digests]]:
        """Yield every merge with its digests in this repetition.

        The merge is committed when the next one is asked for. Raises TapeError.
        """
        between = list(self._recording.between)
        for merge in self._recording.merges:
            while between and between[0].merges < merge.number:
                self._follow(between.pop(0))
            made, payloads = merge.made, []
            for part in made.contributions:
                island = self._island(Who(part.island, part.incarnation))
                steps = island.steps
                payloads.append(island.delta(made.fragment, part.tick))
                uses = self._store.uses(made.fragment, payloads[-1]).digest
                if uses != part.uses:
                    raise TapeError(
                        f"line {merge.line}: the delta of {part.island} has counts of "
                        f"use of digest {part.uses!r}, and counted again they have "
                        f"{uses!r}: the tape, the text or the program was altered "
                        f"before it"
                    )
                self.steps += island.steps - steps
            merged = self._store.merge(
                made.fragment,
                made.contributions,
                payloads,
                share=made.share,
                final=made.final,
            )
            theta = merged.digest if merge.parameters else ""
            yield merge, (digest_of(merged.payload), theta)
            self._commit(merge, merged)

    def compare(self, console: Console) -> tuple[int, dict[str, Any] | None]:
        """Repeat merges up to the first that differs, with a progress bar; return the
        number of equal ones, and what differs. Raises TapeError."""
        merges, total = 0, len(self._recording.merges)
        with bar(console, f"{total:,} merges") as report:
            try:
                for merge, digests in self.merges():
                    on_tape = (merge.made.digest, merge.parameters)
                    for taped, found in zip(on_tape, digests, strict=True):
                        if found != taped:
                            return merges, {
                                "merge": merge.number,
                                "line": merge.line,
                                "fragment": merge.made.fragment,
                                "version": list(merge.made.version),
                                "digest_on_tape": taped,
                                "digest": found,
                            }
                    merges = merge.number
                    report(merges / total)
            except TapeError as error:
                tape = self._recording.workdir / run_files.TAPE
                raise TapeError(f"{tape}, {error}") from error
        return merges, None

    def fragments(self) -> list[tuple[Version, dict[str, list[Any]]]]:
        """Return the version of every fragment, and its arrays."""
        return [self._store.current(f) for f in self._fragments]

    def state(self, who: Who) -> Restored:
        """Return what a later incarnation may begin with: of one that is kept."""
        ask, steps = self._islands[who].ask, self._islands[who].steps
        some = self._fragments if self._run.sync.error_feedback else ()
        residuals = {f: ask("residual", f) for f in some}
        return Restored(who.incarnation, steps, ask("moments"), residuals)

    def save(self, folder: Path, number: int) -> None:
        """Write config and global parameters in the form of a run's workdir.

        The folder appears once it is complete.
        """
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)  # Of a process that was killed.
        try:
            self._write(scratch, number)
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def _write(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True)
        config, plan = self._recording.config, self._store.plan
        placement = dataclasses.replace(config.placement, checkpoints="")
        config = dataclasses.replace(config, placement=placement)
        write_config_json(config, folder / run_files.CONFIG)
        snapshots = checkpoint.snapshots_folder(placement, folder)
        snapshots.mkdir(parents=True)
        for fragment, (version, arrays) in enumerate(self.fragments()):
            path = fragment_path(snapshots, fragment, version)
            path.parent.mkdir()
            files.write_sealed(path, {}, flat(arrays))
        tokens = sum(  # Weighted by fragment size.
            plan.sizes[merge.made.fragment] * part.tokens
            for merge in self._recording.merges[:number]
            for part in merge.made.contributions
        )
        facts = {
            **checkpoint.of_model(plan),
            **checkpoint.trained(number, tokens // sum(plan.sizes)),
        }
        files.write_sealed(state_path(snapshots, 0), facts, [])

    def _island(self, who: Who) -> ReplayedIsland:
        """Return the incarnation; begin it if this is its first merge."""
        if who in self._islands:
            return self._islands[who]
        life = self._recording.lives[who]
        worker = self._worker(who, life.environment)
        refuse_other_bits(str(who), life.environment, worker.environment)
        devices = worker.environment["devices"]
        if devices < life.config.devices:
            raise ConfigError(
                f"{who} computed on {life.config.devices} devices, here are "
                f"{devices}; replay on a machine with as many"
            )
        restored = life.restored()
        source = self._island(restored.who) if restored else None
        run = dataclasses.replace(self._run, total_tokens=life.total_tokens)
        self._islands[who] = ReplayedIsland(
            life, run, self._reader, self._used, worker, source
        )
        if restored is not None:
            self._release(restored.who)
        return self._islands[who]

    def _release(self, who: Who) -> None:
        """Count one need of the incarnation less; end it if none is left."""
        self._needs[who] -= 1
        if not self._needs[who]:
            self._islands.pop(who).send("end")

    def _worker(self, who: Who, recorded: Environment) -> Worker:
        """Return the processes that are like the recorded ones."""
        hosts, platform = recorded["processes"], recorded["platform"]
        if hosts != 1 and platform != "cpu":
            raise ConfigError(
                f"{who} computed on {hosts} hosts with {platform} devices each, and "
                f"replay is one host here; it repeats islands of one host, and of "
                f"several where these have CPU devices"
            )
        alike = str((environment_like(recorded), hosts))
        if alike not in self._workers:
            worker = Worker(self._run, recorded)
            self._workers[alike] = self.enter_context(worker)
        return self._workers[alike]

    def _commit(self, merge: RecordedMerge, merged: MergeResult) -> None:
        fragment, version = merge.made.fragment, merge.made.version
        self._store.commit(fragment, version, merged)
        made = KeptPublish(merged.payload, merged.unused)
        self._used.keep(("publish", fragment, version), made)
        for part in merge.made.contributions:
            who = Who(part.island, part.incarnation)
            self._islands[who].merged(fragment, part.tick)
            self._release(who)
        self._keep(fragment)

    def _keep(self, fragment: int) -> None:
        """Keep the fragment as it is now, as far as the tape needs it."""
        version, arrays = self._store.current(fragment)
        self._used.keep(("anchor", fragment, version), tuple(arrays["anchor"]))
        self._used.keep(("snapshot", fragment, version), arrays)

    def _follow(self, event: Between) -> None:
        match event.record:
            case Recovered(environment=environment):
                self._store.use_passes(passes_like(environment))
            case FragmentBack() as back:
                self._restore(back, self._recording.logged(event))
            case TermBegun() as begun:
                self._begin_term(begun)

    def _begin_term(self, begun: TermBegun) -> None:
        """Begin a term of a fragment with an earlier anchor, like `LostFragments`."""
        fragment, version = begun.fragment, begun.version
        anchor = self._used.anchor(fragment, begun.replaced)
        layout = layouts_of(self._store.plan.fragments)[fragment]
        arrays = self._store.first(fragment, values_of(layout, anchor))
        self._store.load(fragment, arrays, version)
        self._keep(fragment)

    def _restore(self, back: FragmentBack, logged: list[Merged]) -> None:
        """Load a fragment from a snapshot and apply its later publishes, like
        `fragment_snapshots.restored`."""
        fragment, start = back.fragment, back.snapshot
        snapshot = self._used.take(("snapshot", fragment, start))
        self._store.load(fragment, snapshot, start)
        for made in logged:
            payload, unused = self._used.take(("publish", fragment, made.version))
            self._store.replay(
                fragment, made.version, payload, final=made.final, unused=unused
            )
        self._keep(fragment)  # A later snapshot may be of this very state.


def _new_store(recording: Recording) -> Store:
    """Begin a run like `coordinator.origin`."""
    run, placement = recording.config.run, recording.config.placement
    require_repeatable(placement, "replay")
    model = build(run)
    plan = build_plan(run, model)
    if plan.digest() != recording.plan_digest:
        raise ConfigError(
            f"the run's plan of fragments has digest {recording.plan_digest}, here it "
            f"is {plan.digest()}; replay it with the version that made it"
        )
    return Store(run, plan, first_pieces(run, model), placement.deadlines.pin_s)


def passes_like(recorded: Environment) -> Passes | None:
    """Return the passes of the route by which the recorded coordinator merged.

    Raises ConfigError if that route is not available here.
    """
    route, why = recorded.get("merge_route"), "it is not known here"
    try:
        if route in ("xla", "native"):
            return compilation.passes_of(route)
    except ConfigError as error:
        why = str(error)
    raise ConfigError(
        f'the coordinator merged by the route {route!r}, here it would be "xla" '
        f"({why}): a comparison of bits would say nothing; replay where it is the same"
    )


# ---- islands -----------------------------------------------------------------------

Use = tuple[Literal["anchor", "publish", "snapshot"], int, Version]
"""A use of what there is of a version of a fragment."""


class KeptPublish(NamedTuple):
    """What a merge leaves for islands, and for a coordinator that comes back."""

    payload: Buffer
    unused: Mapping[int, bytes]
    """As of `MergeResult`."""


class UsedVersions:
    """Anchors, encoded publishes and snapshots by version, each kept for its uses on
    the tape.

    Incarnations begin with anchors and adopt publishes; a coordinator that comes back
    needs snapshots and publishes.
    """

    def __init__(self, recording: Recording) -> None:
        self._uses = Counter(_uses(recording))
        self._held: dict[Use, Any] = {}

    def keep(self, use: Use, value: Any) -> None:
        """Keep the value if the tape has this use, and it is still to come."""
        if self._uses[use]:
            self._held[use] = value

    def take(self, use: Use) -> Any:
        """Return the value; once for every use on the tape. Raises KeyError for a
        version that has not been merged yet."""
        self._uses[use] -= 1
        return self._held[use] if self._uses[use] else self._held.pop(use)

    def anchor(self, fragment: int, version: Version) -> bytes:
        """Return A_v in full, in f32 tiles; as `take`."""
        arrays: Arrays = self.take(("anchor", fragment, version))
        return b"".join(array.tobytes() for array in arrays)

    def chain(self, fragment: int, have: Version, want: Version) -> list[Buffer]:
        """Return the publishes that lead from one version to another, oldest first; as
        `take`."""
        versions = _between(have, want)
        found = [self.take(("publish", fragment, version)) for version in versions]
        return [made.payload for made in found]


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
        match event.record:
            case TermBegun() as begun:
                yield "anchor", begun.fragment, begun.replaced
            case FragmentBack() as back:
                yield "snapshot", back.fragment, back.snapshot
                for made in recording.logged(event):
                    yield "publish", made.fragment, made.version


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
        used: UsedVersions,
        worker: Worker,
        source: ReplayedIsland | None = None,
    ) -> None:
        """source: the incarnation whose moments this one began with."""
        self.steps = 0
        """Inner steps done."""
        self.send = functools.partial(worker.send, life.who)
        """Sends a call to its model copy; `ask` waits for the answer, too."""
        self.ask = functools.partial(worker.ask, life.who)
        versions = life.begins()
        self._life, self._reader, self._used = life, reader, used
        self._moments: dict[int, list[npt.NDArray[Any]]] = {}
        self._books = boundary.Books(versions, ADOPT_RULES.find(run.sync.adopt))
        self._books.begin()
        anchors = [self._anchor(f, version) for f, version in enumerate(versions)]
        moments, residuals = None, None
        restored = life.restored()
        if restored is not None:
            assert source is not None
            who, steps, fragments, unheard = restored
            self._books.restored(who.incarnation, steps, fragments, unheard)
            moments = source.moments(steps)
            residuals = {f: source.ask("residual", f) for f in fragments}
        self._next = len(self._books.drain())
        self.send("begin", life.config, anchors, moments, residuals)
        self._positions = LeasedPositions()
        goal = goal_of(run, life.config.batch_size)
        self._boundary = Boundary(
            self._books,
            goal,
            arrays=self,
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
                self._moments[steps] = self.ask("moments")
                break
            self._repeat()
        return self._moments[steps]

    def merged(self, fragment: int, tick: int) -> None:
        """Note that a take is in a merge."""
        verdict = _verdict(fragment, tick, "merged", self._books.version(fragment))
        self._act(Decision(verdicts=(verdict,)), self.steps)

    # ---- of its boundary: arrays, outgoing and incoming ------------------------------

    def take(self, fragment: int) -> bytes:
        delta: bytes = self.ask("take", fragment)
        return delta

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        payloads = [bytes(payload) for (payload,) in arrival.publishes]
        whole = arrival.anchor and arrival.anchor[0]
        fragment, version = arrival.fragment, arrival.version
        self.send("adopt", fragment, version, payloads, whole, keep)

    def judge(self, fragment: int, outcome: boundary.TakeOutcome) -> None:
        self.send("judge", fragment, outcome)

    def put(self, fragment: int, tick: int, encoded: bytes) -> None:
        self._deltas[fragment, tick] = encoded

    def forget(self, fragment: int, tick: int) -> None:
        del self._deltas[fragment, tick]

    def pick(self, fragment: int, version: Version) -> Arrival:
        have = self._books.version(fragment)
        try:
            if have.term != version.term:  # It was fetched in full.
                anchor = self._used.anchor(fragment, version)
                return Arrival(fragment=fragment, version=version, anchor=(anchor,))
            payloads = self._used.chain(fragment, have, version)
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
                decision = Decision(takes=(TakeRequest(fragment=fragment, tick=tick),))
            case "adopted":
                pending = _verdict(fragment, tick, "pending", record.version)
                decision = Decision(
                    adoptions=(Adoption(fragment, record.version),),
                    verdicts=(pending,) if tick >= 0 else (),
                )
            case "reopened" | "dropped" | "reset":
                refused = self._refused(fragment, tick, record.kind)
                decision = Decision(verdicts=(refused,))
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
            reason = "non_finite"
        elif kind == "dropped":
            # A kept take is dropped only while a newer version is on its way.
            here, reason = Version(here.term, here.number + 1), "stale"
        return _verdict(fragment, tick, "refused", here, reason)

    def _train_until(self, steps: int, line: int) -> None:
        while self.steps < steps:
            if self.steps in self._life.saves:  # A later incarnation begins with them.
                self._moments.setdefault(self.steps, self.ask("moments"))
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
        self.send("step", self._reader.batch(positions), rate)
        self.steps += 1

    def _act(self, decision: Decision, step: int) -> None:
        others = self._others_tokens
        decision = msgspec.structs.replace(decision, others_tokens=others)
        log_refused(self._boundary.act(decision, step))

    def _anchor(self, fragment: int, version: Version) -> bytes:
        try:
            return self._used.anchor(fragment, version)
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
