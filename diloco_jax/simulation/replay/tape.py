"""Reads a tape for replay, and checks what its chain of hashes cannot show.

The chain finds lines that were changed; here it is numbers that skip, facts that
contradict each other, and a tape that ends early.

Who makes the chain anew can leave out what nothing else on the tape follows from, and
exchange lines of which neither follows from the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.coordinator import notes
from diloco_jax.observability.tape import TapeError, brief, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.values import FIRST_VERSION, Span, Version
from diloco_jax.simulation.replay.recording import (
    Life,
    RecordedMerge,
    Recording,
    Recovery,
    Who,
    Written,
    checked,
    read_begun,
    refuse_term,
)
from diloco_jax.workdir import read_config


def read_recording(
    workdir: Path, until: int | None = None, text: Sequence[str] | None = None
) -> Recording:
    """What a run left in its workdir: `config.json` and `tape.jsonl`.

    Args:
      until: the number of the last merge to repeat; None = all of a run that is over.
      text: paths of the run's text; None = those that the run had.

    Raises:
      ConfigError: they are not of one run, or not of this version, or the run's jax
        is another one.
      TapeError: names the first line that is altered, missing or out of order.
    """
    config = read_config(workdir, text).validate()
    path = workdir / run_files.TAPE
    if not path.is_file():
        raise ConfigError(f"{workdir} has no tape.jsonl; give the workdir of a run")
    reader = _Reader(path, config)
    for line, record in enumerate(read_tape(path), start=1):
        reader.read(line, record)
    recording = reader.recording(until)
    recording.refuse_other_versions()
    return recording


class _Reader:
    def __init__(self, path: Path, config: Config) -> None:
        self._path, self._config = path, config
        self._line = 0
        self._finished = False
        self._plan_digest = ""
        self._coordinators: list[notes.Environment] = []
        self._merges: list[RecordedMerge] = []
        self._recoveries: list[Recovery] = []
        self._versions: dict[int, Version] = {}
        self._lives: dict[Who, Life] = {}
        self._hellos: dict[str, notes.Hello] = {}
        self._grants: dict[Who, list[Span]] = {}
        self._left: list[tuple[int, records.Left]] = []
        """With their lines, since a coordinator last came back."""

    def read(self, line: int, record: Mapping[str, Any]) -> None:
        """The next line."""
        self._line = line
        try:
            self._read(record)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            kind = brief(record.get("kind"))
            raise self._wrong(f"not a record {kind} ({brief(error)})") from error

    def recording(self, until: int | None) -> Recording:
        """What is needed to repeat the first `until` merges."""
        count = len(self._merges)
        if not count:
            raise ConfigError(
                f"{self._path} ends after line {self._line} without a merge: there is "
                f"nothing to repeat; give the workdir of a run that has merged"
            )
        if until is not None and not 1 <= until <= count:
            raise ConfigError(
                f"--until {until}: {self._path} has merges 1 to {count}; choose one"
            )
        if until is None and not self._finished:
            raise TapeError(
                f"{self._path} ends after line {self._line} without the end of the run "
                f"('finished'): it was cut off, or the run is not over; --until "
                f"{count} repeats the merges that it has"
            )
        merges = tuple(self._merges[:until])
        if until is None:
            self._require_merges_of_the_settled()
        recoveries = tuple(r for r in self._recoveries if r.merges < len(merges))
        return Recording(
            workdir=self._path.parent,
            config=self._config,
            plan_digest=self._plan_digest,
            coordinators=tuple(self._coordinators[: len(recoveries) + 1]),
            merges=merges,
            merges_on_tape=count,
            recoveries=recoveries,
            lives=self._needed(merges),
        )

    def _read(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        refuse_term(self._path, record)
        if (self._line == 1) != (kind == "begun"):
            raise self._wrong(
                f"{brief(kind)}; 'begun' is the first record and no other"
            )
        match kind:
            case "begun":
                begun = read_begun(self._path, record, self._config)
                self._plan_digest = begun.plan
                self._coordinators.append(checked(begun.environment))
            case "hello":
                hello = records.from_tape(record, notes.Hello)
                self._hellos[hello.island] = hello
            case "joined":
                self._joined(records.from_tape(record, records.Joined))
            case "granted":
                self._granted(records.from_tape(record, records.Granted))
            case "left":
                left = records.from_tape(record, records.Left)
                self._life(left.island, left.incarnation)
                self._left.append((self._line, left))
            case "island":
                self._told(records.from_tape(record, records.Fact))
            case "merged":
                self._merged(records.from_tape(record, records.Merged))
            case "recovered":
                self._recovered(records.from_tape(record, notes.Recovered))
            case "finished":
                self._finished = True

    # ---- one kind of record each ------------------------------------------------

    def _joined(self, joined: records.Joined) -> None:
        who = Who(joined.island, joined.incarnation)
        hello = self._hellos.get(who.island)
        if hello is None or hello.incarnation != who.incarnation:
            raise self._wrong(f"{who} joined without a 'hello' before")
        if who in self._lives:
            raise self._wrong(f"{who} joined for the second time")
        environment = checked(hello.environment)
        island = msgspec.convert(hello.config, IslandConfig)
        try:
            # Its faults name hosts that this island may have had otherwise.
            dataclasses.replace(
                self._config,
                islands={**self._config.islands, who.island: island},
                placement=Placement(),
            ).validate()
        except ConfigError as error:
            raise self._wrong(
                f"no island can have the config with which {who} said hello: {error}"
            ) from error
        if environment["processes"] != island.hosts:
            raise self._wrong(
                f"{who} said hello with hosts = {island.hosts}, but from a world of "
                f"{environment['processes']} processes; one of them was altered"
            )
        self._lives[who] = Life(who=who, config=island, environment=environment)

    def _granted(self, granted: records.Granted) -> None:
        who = self._life(granted.island, granted.incarnation).who
        known = self._grants.setdefault(who, [])
        before = sum(span.stop - span.start for span in known)
        if granted.offset != before:
            raise self._wrong(
                f"{who} is granted data after {granted.offset} sequences, but so far "
                f"it has {before}; a grant is missing or out of order"
            )
        known.append(Span(granted.start, granted.stop))

    def _told(self, line: records.Fact) -> None:
        life, told = self._life(line.island, line.incarnation), line.record
        known, what = life.records, f"record {told.seq} of {life.who}"
        if 1 <= told.seq <= len(known):
            # A coordinator that came back is told again what it had not confirmed.
            first = known[told.seq - 1]
            if first.record != told:
                raise self._wrong(f"{what} is another one on line {first.line}")
            return
        if told.seq != len(known) + 1:
            raise self._wrong(
                f"{what} follows number {len(known)}; one is missing or out of order"
            )
        if known and told.step < known[-1].record.step:
            raise self._wrong(
                f"{what} is of step {told.step}, the one before it of step "
                f"{known[-1].record.step}"
            )
        newest = self._versions.get(told.fragment, FIRST_VERSION)
        if told.kind == "adopted" and told.version > newest:
            raise self._wrong(
                f"{what} is of version {tuple(told.version)} of fragment "
                f"{told.fragment}, but merged so far is {tuple(newest)}"
            )
        span = Span(told.start, told.stop)
        if told.kind == "granted" and span not in self._grants.get(life.who, ()):
            raise self._wrong(
                f"{what} is of data [{told.start}, {told.stop}), which no line before "
                f"grants it; a record was altered or is missing"
            )
        known.append(Written(self._line, told))

    def _merged(self, record: records.Merged) -> None:
        fragment, version = record.fragment, record.version
        before = self._versions.get(fragment, FIRST_VERSION)
        if version != before.next():
            raise self._wrong(
                f"fragment {fragment} is merged into version {tuple(version)} after "
                f"{tuple(before)}; a merge is missing or out of order"
            )
        for part in record.contributions:
            self._life(part.island, part.incarnation)
        if not record.contributions:
            raise self._wrong(f"a merge of fragment {fragment} without a delta")
        if not 0 < record.share <= 1:
            raise self._wrong(f"a merge with share {record.share}, not in (0, 1]")
        tokens = [part.tokens for part in record.contributions]
        if min(tokens) < 0 or sum(tokens) == 0:
            raise self._wrong(f"a merge of deltas of {tokens} tokens")
        self._versions[fragment] = version
        merge = RecordedMerge(
            line=self._line,
            number=len(self._merges) + 1,
            fragment=fragment,
            version=version,
            final=record.final,
            contributions=record.contributions,
            share=record.share,
            digest=record.digest,
        )
        self._merges.append(merge)

    def _recovered(self, recovered: notes.Recovered) -> None:
        for fragment, found in enumerate(recovered.versions):
            before = self._versions.get(fragment, FIRST_VERSION)
            if found != before:
                raise self._wrong(
                    f"the coordinator came back with version {tuple(found)} of "
                    f"fragment {fragment}, but merged so far is {tuple(before)}; a "
                    f"merge is missing or out of order"
                )
        recovery = Recovery(
            merges=len(self._merges), snapshot_merges=recovered.snapshot_merges
        )
        if not 0 <= recovery.snapshot_merges <= recovery.merges:
            raise self._wrong(
                f"a snapshot with {recovery.snapshot_merges} merges, but so far there "
                f"are {recovery.merges}"
            )
        self._recoveries.append(recovery)
        # What they had in a merge under way, or left behind, was lost in the crash.
        self._left.clear()
        self._coordinators.append(checked(recovered.environment))

    def _life(self, island: str, incarnation: int) -> Life:
        who = Who(island, incarnation)
        if who not in self._lives:
            raise self._wrong(f"{who} has not joined by then; a record is missing")
        return self._lives[who]

    def _require_merges_of_the_settled(self) -> None:
        """Raises TapeError where an island's end says that what it took is settled, and
        it is neither given up nor in a merge."""
        merged = {
            (Who(part.island, part.incarnation), merge.fragment, part.tick)
            for merge in self._merges
            for part in merge.contributions
        }
        for at, left in self._left:
            who = Who(left.island, left.incarnation)
            settled = dict(enumerate(left.settled_steps_by_fragment))
            open_still = {(kept.fragment, kept.tick) for kept in left.left_behind}
            open_still |= {
                (record.fragment, record.tick)
                for _, record in self._lives[who].records
                if record.kind in ("reopened", "dropped", "reset")
            }
            for line, took in self._lives[who].records:
                fragment, tick = took.fragment, took.tick
                if (
                    took.kind == "took"
                    and took.start < took.step == settled.get(fragment)
                    and (fragment, tick) not in open_still
                    and (who, fragment, tick) not in merged
                ):
                    self._line = at
                    raise self._wrong(
                        f"{who} ended with its first {took.step} steps settled in "
                        f"fragment {fragment}, but its take at tick {tick} up to there "
                        f"(line {line}) is in no merge; a merge is missing or altered"
                    )

    def _needed(self, merges: tuple[RecordedMerge, ...]) -> dict[Who, Life]:
        """The incarnations in these merges, each up to its last take in them."""
        takes: dict[Who, dict[tuple[int, int], RecordedMerge]] = {}
        for merge in merges:
            for part in merge.contributions:
                mine = takes.setdefault(Who(part.island, part.incarnation), {})
                known = mine.setdefault((merge.fragment, part.tick), merge)
                if known is not merge:
                    self._line = merge.line
                    raise self._wrong(
                        f"the take of fragment {merge.fragment} at tick {part.tick} by "
                        f"{part.island} is merged on line {known.line} already"
                    )
        needed = self._with_sources(takes)
        try:
            for who in needed:
                self._lives[who].cut(takes.get(who, {}))
        except TapeError as error:
            raise TapeError(f"{self._path}, {error}") from error
        return {who: self._lives[who] for who in needed}

    def _with_sources(self, needed: Iterable[Who]) -> tuple[Who, ...]:
        """And the incarnations whose moments these, or those in turn, began with."""
        found = dict.fromkeys(needed)
        waiting = list(found)
        while waiting:
            life = self._lives[waiting.pop()]
            restored = life.restored()
            if restored is None:
                continue
            if restored.who not in self._lives or restored.who >= life.who:
                self._line = life.records[0].line
                raise self._wrong(
                    f"{life.who} begins with moments of {restored.who}, which was not "
                    f"there before; a record was altered or is missing"
                )
            self._lives[restored.who].saves.add(restored.steps)
            if restored.who not in found:
                found[restored.who] = None
                waiting.append(restored.who)
        return tuple(found)

    def _wrong(self, what: str) -> TapeError:
        return TapeError(f"{self._path}, line {self._line}: {what}")
