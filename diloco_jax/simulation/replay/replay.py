"""`diloco replay`: repeat a recorded run from config, text and tape alone.

The tape holds the takes, adoptions and merges, with their order. Everything else is
computed anew by the runtime's own parts: steps, deltas, merges, and the coordinator's
state after a crash. Each merge must have the digest of the tape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_jax import before_jax, checkpoint, compilation, run_files, storage
from diloco_jax.config import ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.holding.anchors import layouts_of, values_of
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import Environment
from diloco_jax.coordinator.snapshots import flat, fragment_path, state_path
from diloco_jax.core.fragment_merge import MergeResult
from diloco_jax.core.fragments import digest_arrays
from diloco_jax.data.batches import BatchReader
from diloco_jax.data.loading import load_data
from diloco_jax.files import require_writable
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import TapeError
from diloco_jax.observability.terminal import bar
from diloco_jax.protocol.values import FIRST_VERSION, Version
from diloco_jax.simulation.replay.island import PublishedVersions, ReplayedIsland
from diloco_jax.simulation.replay.recording import (
    BegunTerm,
    Digests,
    RecordedMerge,
    Recording,
    Recovery,
    Who,
    environment_like,
    passes_like,
    refuse_other_bits,
)
from diloco_jax.simulation.replay.worker import Worker
from diloco_jax.storage import digest_of
from diloco_jax.weights.first import first_pieces, require_repeatable


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

    Raises:
      ConfigError: the text, version or machine is not that of the run.
      TapeError: the tape contradicts itself.
    """
    if save is not None and save.exists():
        raise ConfigError(f"--save {save} exists already; name a new folder")
    if save is not None:
        there = next(path for path in save.absolute().parents if path.exists())
        require_writable(there, f"--save {save}: in")
    began = time.monotonic()
    merges, mismatch = 0, None
    total = len(recording.merges)
    with Replay(recording) as replay, bar(console, f"{total:,} merges") as report:
        try:
            for merge, digests in replay.merges():
                if digests != merge.digests:
                    mismatch = _mismatch(merge, digests)
                    break
                merges = merge.number
                report(merges / total)
        except TapeError as error:
            raise TapeError(f"{recording.workdir / 'tape.jsonl'}, {error}") from error
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

    def __init__(self, recording: Recording) -> None:
        """Raise ConfigError if this is not the text, version or machine of the run."""
        super().__init__()
        self.steps = 0
        """Inner steps done."""
        for recorded in recording.coordinators:
            refuse_other_bits(
                "the coordinator", recorded, before_jax.describe_environment()
            )
        compilation.use_cache(compilation.of_user())
        self._recording = recording
        self._run = run = recording.config.run
        model = build(run)
        model.require_loss()  # Only they know their steps, if loops of users joined.
        rows, fields = load_data(run).index(run.seed), model.fields(run.data.arrays)
        self._reader = BatchReader(rows, fields, run.sequence_length)
        self._store = _new_store(recording)
        # One per life of the coordinator; all, so that none is refused half-way.
        self._passes = [passes_like(c) for c in recording.coordinators]
        self._store.use_passes(self._passes.pop(0))
        self._versions = [FIRST_VERSION] * len(self._store.plan.fragments)
        first = [
            tuple(self._store.arrays(fragment)["anchor"])
            for fragment in range(len(self._versions))
        ]
        self._published = PublishedVersions(recording, first)
        self._workers: dict[str, Worker] = {}
        self._islands: dict[Who, ReplayedIsland] = {}
        self._needs = Counter(
            Who(part.island, part.incarnation)
            for merge in recording.merges
            for part in merge.contributions
        )
        for life in recording.lives.values():
            # A source is needed until the incarnation begins with its moments.
            if (restored := life.restored()) is not None:
                self._needs[restored.who] += 1
        self._starts_left = Counter(
            start
            for recovery in recording.recoveries
            for start in recovery.starts.items()
        )
        self._snapshots: dict[tuple[int, Version], dict[str, list[Any]]] = {}
        for fragment, version in enumerate(self._versions):
            self._keep_snapshot(fragment, version)

    def merges(self) -> Iterator[tuple[RecordedMerge, Digests]]:
        """Yield every merge with its digests in this repetition; that of Theta where
        the tape has one.

        The merge is committed when the next one is asked for. Raises TapeError.
        """
        between: list[Recovery | BegunTerm] = [*self._recording.recoveries]
        between += self._recording.begun
        between.sort(key=lambda event: (event.merges, event.line))
        for merge in self._recording.merges:
            while between and between[0].merges < merge.number:
                match between.pop(0):
                    case Recovery() as recovery:
                        self._recover(recovery)
                    case BegunTerm() as begun:
                        self._begin_term(begun)
            payloads = []
            for part in merge.contributions:
                island = self._island(Who(part.island, part.incarnation))
                steps = island.steps
                payloads.append(island.delta(merge.fragment, part.tick))
                self.steps += island.steps - steps
            merged = self._store.merge(
                merge.fragment,
                merge.contributions,
                payloads,
                share=merge.share,
                final=merge.final,
            )
            yield (
                merge,
                Digests(
                    publish=digest_of(merged.payload),
                    parameters=(
                        digest_arrays(merged.state.theta)
                        if merge.digests.parameters
                        else ""
                    ),
                ),
            )
            self._commit(merge, merged)

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
        config = self._recording.config
        placement = dataclasses.replace(config.placement, checkpoints="")
        config = dataclasses.replace(config, placement=placement)
        write_config_json(config, folder / run_files.CONFIG)
        snapshots = checkpoint.snapshots_folder(placement, folder)
        snapshots.mkdir(parents=True)
        for fragment, version in enumerate(self._versions):
            path = fragment_path(snapshots, fragment, version)
            path.parent.mkdir()
            storage.write_sealed(path, {}, flat(self._store.arrays(fragment)))
        facts = {
            **checkpoint.of_model(self._store.plan),
            **checkpoint.trained(number, self._tokens(number)),
        }
        storage.write_sealed(state_path(snapshots, 0), facts, [])

    def _tokens(self, merges: int) -> int:
        """Return the tokens of the first merges, weighted by fragment size."""
        sizes, tokens = self._store.plan.sizes, 0
        for merge in self._recording.merges[:merges]:
            tokens += sizes[merge.fragment] * sum(c.tokens for c in merge.contributions)
        return tokens // sum(sizes)

    def _island(self, who: Who) -> ReplayedIsland:
        """Return the incarnation; begin it if this is its first merge."""
        if who not in self._islands:
            life = self._recording.lives[who]
            _refuse_absent_hosts(who, life.environment)
            worker = self._worker(life.environment)
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
                life, run, self._reader, self._published, worker, source
            )
            if restored is not None:
                self._release(restored.who)
        return self._islands[who]

    def _release(self, who: Who) -> None:
        """Count one need of the incarnation less; end it if none is left."""
        self._needs[who] -= 1
        if not self._needs[who]:
            self._islands.pop(who).end()

    def _worker(self, recorded: Environment) -> Worker:
        alike = str((environment_like(recorded), recorded["processes"]))
        if alike not in self._workers:
            worker = Worker(self._run, recorded)
            self._workers[alike] = self.enter_context(worker)
        return self._workers[alike]

    def _commit(self, merge: RecordedMerge, merged: MergeResult) -> None:
        self._store.commit(merge.fragment, merge.version, merged)
        self._versions[merge.fragment] = merge.version
        self._published.keep(merge.fragment, merge.version, merged)
        for part in merge.contributions:
            who = Who(part.island, part.incarnation)
            self._islands[who].merged(merge.fragment, part.tick)
            self._release(who)
        self._keep_snapshot(merge.fragment, merge.version)

    def _keep_snapshot(self, fragment: int, version: Version) -> None:
        """Keep a fragment as it is now, if a coordinator comes back with that."""
        if self._starts_left[fragment, version]:
            self._snapshots[fragment, version] = self._store.arrays(fragment)

    def _begin_term(self, begun: BegunTerm) -> None:
        """Begin a term of a fragment with an earlier anchor, like `LostFragments`."""
        fragment, layouts = begun.fragment, layouts_of(self._store.plan.fragments)
        anchor = self._published.anchor(fragment, begun.replaced)
        arrays = self._store.first(fragment, values_of(layouts[fragment], anchor))
        self._store.load(fragment, arrays, begun.version)
        self._versions[fragment] = begun.version
        self._published.begin(fragment, begun.version, tuple(arrays["anchor"]))
        self._keep_snapshot(fragment, begun.version)

    def _recover(self, recovery: Recovery) -> None:
        """Load every fragment from a snapshot and apply its later publishes, like
        `coordinator.origin`."""
        self._store.use_passes(self._passes.pop(0))
        starts = recovery.starts
        logged: dict[int, list[RecordedMerge]] = {}
        for merge in self._recording.merges[: recovery.merges]:
            began = starts.get(merge.fragment)
            if began is not None and merge.version > began:
                logged.setdefault(merge.fragment, []).append(merge)
        for start in starts.items():
            fragment, version = start
            self._store.load(fragment, self._snapshots[start], version)
            for merge in logged.get(fragment, []):
                payload = self._published.publish(fragment, merge.version)
                self._store.replay(fragment, merge.version, payload, final=merge.final)
            self._starts_left[start] -= 1
            if not self._starts_left[start]:
                del self._snapshots[start]
            # A later snapshot may be of this very state.
            self._keep_snapshot(fragment, self._versions[fragment])


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


def _refuse_absent_hosts(who: Who, recorded: Environment) -> None:
    hosts, platform = recorded["processes"], recorded["platform"]
    if hosts != 1 and platform != "cpu":
        raise ConfigError(
            f"{who} computed on {hosts} hosts with {platform} devices each, and replay "
            f"is one host here; it repeats islands of one host, and of several where "
            f"these have CPU devices"
        )


def _mismatch(merge: RecordedMerge, digests: Digests) -> dict[str, Any]:
    what = "publish" if digests.publish != merge.digests.publish else "parameters"
    return {
        "merge": merge.number,
        "line": merge.line,
        "fragment": merge.fragment,
        "version": list(merge.version),
        "digest_on_tape": getattr(merge.digests, what),
        "digest": getattr(digests, what),
    }
