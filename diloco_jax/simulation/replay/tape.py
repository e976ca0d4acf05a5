"""Read a tape for replay.

Its chain of hashes finds lines that were changed or moved, and the digests of merges
find lines that lead to other parameters. Gaps remain to be found: a machine that
crashed may have lost lines, and a tape may end early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator import journal
from diloco_jax.observability.tape import Report, TapeError
from diloco_jax.protocol import records
from diloco_jax.protocol.values import FIRST_VERSION, Version
from diloco_jax.simulation.replay.recording import (
    BegunTerm,
    Digests,
    Life,
    RecordedMerge,
    Recording,
    Recovery,
    TapedRecord,
    Who,
    read_begun,
    read_records,
)
from diloco_jax.workdir import read_config


def read_recording(
    workdir: Path,
    until: int | None = None,
    text: Sequence[str] | None = None,
    *,
    trust_code: bool = False,
    report: Report = lambda share: None,
) -> Recording:
    """Read the files that a run left in its workdir: `config.json` and `tape.jsonl`.

    Args:
      until: the number of the last merge to repeat; None = all of a run that is over.
      text: paths of the run's text; None = the paths that the run had.
      trust_code: execute code that the config names, whoever wrote it.

    Raises:
      ConfigError: the files are not of one run or not of this version, or the run had
        another jax.
      TapeError: names the first line that is altered, missing or out of order.
    """
    config = read_config(workdir, text, trust_code=trust_code).validate()
    path = workdir / run_files.TAPE
    if not path.is_file():
        raise ConfigError(f"{workdir} has no tape.jsonl; give the workdir of a run")
    reader = _Reader(path, config)
    read_records(path, reader.read, report)
    recording = reader.recording(until)
    recording.refuse_other_versions()
    return recording


class _Reader:
    def __init__(self, path: Path, config: Config) -> None:
        self._path, self._config = path, config
        self._line = 0
        self._finished = False
        self._total_tokens = 0
        self._plan_digest = ""
        self._coordinators: list[journal.Environment] = []
        self._merges: list[RecordedMerge] = []
        self._recoveries: list[Recovery] = []
        self._begun: list[BegunTerm] = []
        self._versions: dict[int, Version] = {}
        self._lives: dict[Who, Life] = {}
        self._hellos: dict[str, journal.Hello] = {}

    def read(self, line: int, record: Mapping[str, Any]) -> None:
        """Read the next line."""
        self._line = line
        match record["kind"]:
            case "begun":
                begun = read_begun(self._path, record, self._config)
                self._plan_digest = begun.plan
                self._total_tokens = begun.total_tokens
                self._coordinators.append(begun.environment)
            case "hello":
                hello = records.from_tape(record, journal.Hello)
                self._hellos[hello.island] = hello
            case "joined":
                self._joined(records.from_tape(record, records.Joined))
            case "island":
                self._told(records.from_tape(record, records.Fact))
            case "merged":
                self._merged(records.from_tape(record, records.Merged))
            case "term_begun":
                self._term_begun(records.from_tape(record, records.TermBegun))
            case "digested":
                self._digested(records.from_tape(record, journal.Digested))
            case "recovered":
                self._recovered(records.from_tape(record, journal.Recovered))
            case "worker_recovered":
                back = records.from_tape(record, journal.WorkerRecovered)
                self._recoveries.append(
                    Recovery(
                        merges=len(self._merges),
                        snapshot_versions=back.snapshot_versions,
                        fragments=back.fragments,
                        line=self._line,
                    )
                )
            case "finished":
                self._finished = True
            case "extended":
                extended = records.from_tape(record, records.Extended)
                self._finished, self._total_tokens = False, extended.total_tokens

    def recording(self, until: int | None) -> Recording:
        """Return the recording that repeats the first `until` merges."""
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
        recoveries = tuple(r for r in self._recoveries if r.merges < len(merges))
        return Recording(
            workdir=self._path.parent,
            config=self._config,
            plan_digest=self._plan_digest,
            coordinators=tuple(
                self._coordinators[: 1 + sum(r.fragments is None for r in recoveries)]
            ),
            merges=merges,
            merges_on_tape=count,
            recoveries=recoveries,
            begun=tuple(b for b in self._begun if b.merges < len(merges)),
            lives=self._needed(merges),
        )

    # ---- one kind of record each ------------------------------------------------

    def _joined(self, joined: records.Joined) -> None:
        who = Who(joined.island, joined.incarnation)
        hello = self._hellos[joined.island]
        self._lives[who] = Life(
            who=who,
            config=msgspec.convert(hello.config, IslandConfig),
            environment=hello.environment,
            total_tokens=self._total_tokens,
        )

    def _told(self, line: records.Fact) -> None:
        life, record = self._life(line.island, line.incarnation), line.record
        known = life.records
        if record.seq > len(known) + 1:
            raise self._wrong(
                f"record {record.seq} of {life.who} follows number {len(known)}; one "
                f"is missing"
            )
        # An island repeats unconfirmed records to a coordinator that came back.
        if record.seq == len(known) + 1:
            known.append(TapedRecord(self._line, record))

    def _merged(self, record: records.Merged) -> None:
        fragment, version = record.fragment, record.version
        before = self._versions.get(fragment, FIRST_VERSION)
        if version != before.next():
            raise self._wrong(
                f"fragment {fragment} is merged into version {tuple(version)} after "
                f"{tuple(before)}; a merge is missing"
            )
        self._versions[fragment] = version
        merge = RecordedMerge(
            line=self._line,
            number=len(self._merges) + 1,
            fragment=fragment,
            version=version,
            final=record.final,
            contributions=record.contributions,
            share=record.share,
            digests=Digests(publish=record.digest),
        )
        self._merges.append(merge)

    def _term_begun(self, record: records.TermBegun) -> None:
        fragment, version = record.fragment, record.version
        before = self._versions.get(fragment, FIRST_VERSION)
        known = {m.version for m in self._merges if m.fragment == fragment}
        known |= {b.version for b in self._begun if b.fragment == fragment}
        if version.term != before.term + 1 or (
            record.replaced not in known | {FIRST_VERSION}
        ):
            raise self._wrong(
                f"fragment {fragment} begins at {tuple(version)} with its version "
                f"{tuple(record.replaced)} after {tuple(before)}; a merge is missing"
            )
        self._versions[fragment] = version
        self._begun.append(
            BegunTerm(
                merges=len(self._merges),
                fragment=fragment,
                version=version,
                replaced=record.replaced,
                line=self._line,
            )
        )

    def _digested(self, noted: journal.Digested) -> None:
        for index, merge in enumerate(reversed(self._merges), start=1):
            if (merge.fragment, merge.version) == (noted.fragment, noted.version):
                digests = Digests(
                    publish=merge.digests.publish, parameters=noted.digest
                )
                self._merges[-index] = dataclasses.replace(merge, digests=digests)
                return
        raise self._wrong(
            f"fragment {noted.fragment} has a digest at version "
            f"{tuple(noted.version)}, but no merge made it; a merge is missing"
        )

    def _recovered(self, recovered: journal.Recovered) -> None:
        self._recoveries.append(
            Recovery(
                merges=len(self._merges),
                snapshot_versions=recovered.snapshot_versions,
                line=self._line,
            )
        )
        self._coordinators.append(recovered.environment)

    def _life(self, island: str, incarnation: int) -> Life:
        who = Who(island, incarnation)
        if who not in self._lives:
            raise self._wrong(f"{who} has not joined by then; a record is missing")
        return self._lives[who]

    def _needed(self, merges: tuple[RecordedMerge, ...]) -> dict[Who, Life]:
        """Return the incarnations in these merges, each up to its last take in them."""
        takes: dict[Who, dict[tuple[int, int], RecordedMerge]] = {}
        for merge in merges:
            for part in merge.contributions:
                who = self._life(part.island, part.incarnation).who
                takes.setdefault(who, {})[merge.fragment, part.tick] = merge
        needed = self._with_sources(takes)
        try:
            for who in needed:
                self._lives[who].cut(takes.get(who, {}))
        except TapeError as error:
            raise TapeError(f"{self._path}, {error}") from error
        return {who: self._lives[who] for who in needed}

    def _with_sources(self, needed: Iterable[Who]) -> tuple[Who, ...]:
        """Add the incarnations whose moments these began with, and their sources."""
        found = dict.fromkeys(needed)
        waiting = list(found)
        while waiting:
            life = self._lives[waiting.pop()]
            restored = life.restored()
            if restored is None:
                continue
            self._life(*restored.who).saves.add(restored.steps)
            if restored.who not in found:
                found[restored.who] = None
                waiting.append(restored.who)
        return tuple(found)

    def _wrong(self, what: str) -> TapeError:
        return TapeError(f"{self._path}, line {self._line}: {what}")
