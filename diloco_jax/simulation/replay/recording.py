"""A recorded run: its tape in the form that replay needs.

The tape's chain of hashes finds lines that were changed or moved, and the digests of
merges find lines that lead to other parameters. Gaps remain to be found: a machine that
crashed may have lost lines, and a tape may end early.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from diloco_jax import run_files
from diloco_jax.cluster.cluster import coordinator_environment
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator import journal
from diloco_jax.coordinator.journal import Environment
from diloco_jax.observability.tape import Report, TapeError, brief, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.messages import FIRST_VERSION, Fields, Record, Version
from diloco_jax.protocol.records import from_tape
from diloco_jax.workdir import read_config

SAME_BITS = (
    "diloco_jax",
    "jax",
    "jaxlib",
    "platform",
    "device_kind",
    "cpu",
    "processes",
    "threads",
)
"""Facts of `environment.describe` that must be the same for the same bits."""

VERSIONS = ("diloco_jax", "jax", "jaxlib")
"""Facts of `SAME_BITS` that are known before jax is imported."""


DURABLE = tuple(kind.__struct_config__.tag for kind in get_args(records.Durable))
"""Kinds of the records from which a coordinator comes back."""


class RepeatError(ConfigError):
    """A run cannot be repeated here, or by this version, or at all."""


class Who(NamedTuple):
    """One incarnation of an island."""

    island: str
    incarnation: int

    def __str__(self) -> str:
        return f"island {self.island}, incarnation {self.incarnation}"


class RestoredFrom(NamedTuple):
    """State that an incarnation began with, besides anchors: another's moments after
    `steps` steps, and its residuals of these fragments."""

    who: Who
    steps: int
    fragments: tuple[int, ...]
    unheard: tuple[Fields | msgspec.UnsetType, ...]
    """See `Record.unheard`."""


class TapedRecord(NamedTuple):
    """A record of an island and its line on the tape."""

    line: int
    record: Record


class RecordedMerge(NamedTuple):
    """One merge on the tape; merges are numbered from 1."""

    line: int
    number: int
    made: records.Merged
    parameters: str = ""
    """Digest of the fragment's Theta; "": a coordinator that was killed had not
    computed it."""


class Between(NamedTuple):
    """Another change of the coordinator's state, after `merges` merges: it came back;
    or a fragment did, from a snapshot and its later publishes; or a fragment that a
    worker had lost began a term, with the anchor of an earlier version."""

    merges: int
    record: journal.Recovered | journal.FragmentBack | records.TermBegun


@dataclasses.dataclass(kw_only=True)
class Life:
    """Life of one incarnation on the tape."""

    who: Who
    config: IslandConfig
    environment: Environment
    total_tokens: int
    """Tokens of the run as this incarnation knew it; the learning rate follows them."""
    records: list[TapedRecord] = dataclasses.field(default_factory=list)
    saves: set[int] = dataclasses.field(default_factory=set)
    """Steps after which a later incarnation needs the moments of this one."""

    def begins(self) -> list[Version]:
        """Return the versions that it began with, by fragment: its first records."""
        versions: list[Version] = []
        for _, record in self.records:
            began = record.kind == "adopted" and record.step == 0
            if not began or record.fragment != len(versions):
                break
            versions.append(record.version)
        return versions

    def restored(self) -> RestoredFrom | None:
        """Return the state that it took over from an earlier incarnation.

        The records after its first versions hold it.
        """
        lines = [r for _, r in self.records if r.kind == "restored"]
        if not lines:
            return None
        return RestoredFrom(
            Who(self.who.island, lines[0].start),
            lines[0].value,
            tuple(r.fragment for r in lines if r.fragment >= 0),
            # Of one that was passed on itself only its place is left.
            tuple(r.unheard for r in lines[1:] if r.fragment < 0),
        )

    def cut(self, takes: Mapping[tuple[int, int], RecordedMerge]) -> None:
        """Drop the records after the last of these takes, which are keyed by (fragment,
        tick) and came into those merges, and after the last step in `saves`.

        Raises TapeError if a take is missing.
        """
        missing = dict(takes)
        last = max(self.saves, default=-1)
        count = sum(record.step <= last for _, record in self.records)
        for index, (_, record) in enumerate(self.records, start=1):
            take = (record.fragment, record.tick)
            if record.kind == "took" and missing.pop(take, None) is not None:
                count = max(count, index)
        for (fragment, tick), merge in missing.items():
            raise TapeError(
                f"line {merge.line}: the take of fragment {fragment} at tick {tick} by "
                f"{self.who} is merged, but on no line: a record is missing"
            )
        del self.records[count:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded run, ready to be repeated."""

    workdir: Path
    config: Config
    plan_digest: str
    environment: Environment
    """Environment of the first coordinator."""
    merges: tuple[RecordedMerge, ...]
    merges_on_tape: int
    between: tuple[Between, ...]
    lives: Mapping[Who, Life]
    """Incarnations in these merges, each up to its last take in them."""
    log: tuple[records.Durable, ...] = ()
    """Durable records up to the last of these merges."""

    @property
    def coordinators(self) -> list[Environment]:
        """Environments of the first coordinator and of each that came back."""
        found = [each.record for each in self.between]
        back = [r.environment for r in found if isinstance(r, journal.Recovered)]
        return [self.environment, *back]

    def logged(self, back: Between) -> list[records.Merged]:
        """Return the merges whose publishes came after the snapshot from which a
        fragment is back, in order."""
        assert isinstance(back.record, journal.FragmentBack)
        fragment, start = back.record.fragment, back.record.snapshot
        made = (merge.made for merge in self.merges[: back.merges])
        return [m for m in made if m.fragment == fragment and m.version > start]

    def refuse_other_versions(self) -> None:
        """Raise ConfigError if a process of the run had other versions than this one.

        It must be called before jax is imported, since jax ends a process whose flags
        it does not know.
        """
        here = {package: metadata.version(package) for package in VERSIONS}
        for recorded in self.coordinators:
            refuse_other_bits("the coordinator", recorded, here, VERSIONS)
        for who, life in self.lives.items():
            refuse_other_bits(str(who), life.environment, here, VERSIONS)

    def prepare_environment(self) -> None:
        """Make this process compute like the coordinator's did; call before importing
        jax.
        """
        like = environment_like(self.environment)
        os.environ.update({**coordinator_environment(), **like})


def refuse_other_bits(
    whose: str,
    there: Environment,
    here: Mapping[str, Any],
    facts: Sequence[str] = SAME_BITS,
) -> None:
    """Raise ConfigError for the first of these facts that differs here."""
    for fact in facts:
        if there[fact] != here[fact]:
            raise RepeatError(
                f"{whose} had {fact} = {there[fact]!r}, here it is {here[fact]!r}: a "
                f"comparison of bits would say nothing; replay where it is the same"
            )


def environment_like(recorded: Environment) -> dict[str, str]:
    """Return variables that make a process compute like the recorded one.

    Set before jax is imported, they give it the same threads, devices and flags. A flag
    whose value is a path is left out, since the tape's author could use it to have
    files written.
    """
    flags = str(recorded["xla_flags"]).split()
    return {
        "JAX_PLATFORMS": "cpu" if recorded["platform"] == "cpu" else "",
        "NPROC": str(recorded["threads"]),
        "XLA_FLAGS": " ".join(f for f in flags if not re.search("/|dump|file", f)),
    }


def read_recording(
    workdir: Path,
    until: int | None = None,
    text: Sequence[str] | None = None,
    *,
    trust_code: bool = False,
    report: Report = lambda share: None,
    asked: str = "--until",
) -> Recording:
    """Read the files that a run left in its workdir: `config.json` and `tape.jsonl`.

    Args:
      until: the number of the last merge to repeat; None = all of a run that is over.
      text: paths of the run's text; None = the paths that the run had.
      trust_code: execute code that the config names, whoever wrote it.
      report: told the share of the tape that is read.
      asked: the option that names `until`, for messages.

    Raises:
      ConfigError: the files are not of one run or not of this version, the run had
        another jax, or the tape begins with a later term.
      TapeError: names the first line that is altered, missing or out of order.
    """
    config = read_config(workdir, text, trust_code=trust_code).validate()
    path = workdir / run_files.TAPE
    if not path.is_file():
        raise ConfigError(f"{workdir} has no tape.jsonl; give the workdir of a run")
    reader = _Reader(path, config)
    for record in read_tape(path, report):
        reader.read(record)
    recording = reader.recording(until, asked)
    recording.refuse_other_versions()
    return recording


class _Reader:
    def __init__(self, path: Path, config: Config) -> None:
        self._path, self._config = path, config
        self._line = 0
        self._finished = False
        self._log: list[tuple[int, records.Durable]] = []
        """Durable records, with their lines."""
        self._begun: journal.Begun
        self._total_tokens = 0
        self._merges: list[RecordedMerge] = []
        self._between: list[Between] = []
        self._versions: dict[int, list[Version]] = {}
        """All versions that a fragment has had since the first, in order."""
        self._lives: dict[Who, Life] = {}
        self._hellos: dict[str, journal.Hello] = {}

    def read(self, record: Mapping[str, Any]) -> None:
        """Read the next line."""
        self._line += 1
        try:
            if record["kind"] == "term":
                # Its anchors' tape is gone.
                raise RepeatError(
                    f"{self._path} is of term {record['term']} of run "
                    f"{record['run_id']}, which began with islands' anchors after the "
                    f"coordinator had lost its state. Their origin is not on this "
                    f"tape, so it cannot be repeated; give the workdir of a run that "
                    f"kept its state"
                )
            if (self._line == 1) != (record["kind"] == "begun"):
                raise self._wrong(
                    f"{brief(record['kind'])}; 'begun' is the first record and no other"
                )
            if record["kind"] in DURABLE:
                durable = msgspec.convert(record, records.Durable)
                self._log.append((self._line, durable))
            self._take(record)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            what = f"not a record {brief(record.get('kind'))} ({brief(error)})"
            raise self._wrong(what) from error

    def _take(self, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "begun":
                self._begin(record)
            case "hello":
                hello = from_tape(record, journal.Hello)
                self._hellos[hello.island] = hello
            case "joined":
                joined = from_tape(record, records.Joined)
                who = Who(joined.island, joined.incarnation)
                hello = self._hellos[joined.island]
                self._lives[who] = Life(
                    who=who,
                    config=msgspec.convert(hello.config, IslandConfig),
                    environment=hello.environment,
                    total_tokens=self._total_tokens,
                )
            case "island":
                self._told(from_tape(record, records.Fact))
            case "merged":
                self._merged(from_tape(record, records.Merged))
            case "term_begun":
                self._term_begun(from_tape(record, records.TermBegun))
            case "digested":
                self._digested(from_tape(record, journal.Digested))
            case "recovered":
                self._changed(from_tape(record, journal.Recovered))
            case "restored":
                self._changed(from_tape(record, journal.FragmentBack))
            case "finished":
                self._finished = True
            case "extended":
                extended = from_tape(record, records.Extended)
                self._finished, self._total_tokens = False, extended.total_tokens

    def recording(self, until: int | None, asked: str) -> Recording:
        """Return the recording that repeats the first `until` merges."""
        count = len(self._merges)
        if not count:
            raise ConfigError(
                f"{self._path} ends after line {self._line} without a merge: there is "
                f"nothing to repeat; give the workdir of a run that has merged"
            )
        if until is not None and not 1 <= until <= count:
            raise ConfigError(
                f"{asked} {until}: {self._path} has merges 1 to {count}; choose one"
            )
        if until is None and not self._finished:
            raise TapeError(
                f"{self._path} ends after line {self._line} without the end of the run "
                f"('finished'): it was cut off, or the run is not over; --until "
                f"{count} repeats the merges that it has"
            )
        merges = tuple(self._merges[:until])
        return Recording(
            workdir=self._path.parent,
            config=self._config,
            plan_digest=self._begun.plan,
            environment=self._begun.environment,
            merges=merges,
            merges_on_tape=count,
            between=tuple(e for e in self._between if e.merges < len(merges)),
            lives=self._needed(merges),
            log=tuple(record for line, record in self._log if line <= merges[-1].line),
        )

    # ---- one kind of record each ------------------------------------------------

    def _begin(self, record: Mapping[str, Any]) -> None:
        """Raise ConfigError unless it is of this version and of this config's run."""
        here = metadata.version("diloco-jax")
        if (written := record["environment"]["diloco_jax"]) != here:
            raise RepeatError(
                f"{self._path} was written by diloco_jax {written}, this is {here}; "
                f"read it with the version that wrote it"
            )
        self._begun = begun = from_tape(record, journal.Begun)
        self._total_tokens = begun.total_tokens
        # The run may have been extended since.
        run = dataclasses.replace(self._config.run, total_tokens=begun.total_tokens)
        if begun.fingerprint != (fingerprint := run.fingerprint()):
            raise ConfigError(
                f"{self._path} is of a run with fingerprint {begun.fingerprint}, the "
                f"config.json beside it has {fingerprint}; bring back the run's own"
            )

    def _told(self, line: records.Fact) -> None:
        self._note(Who(line.island, line.incarnation), line.record)
        if unheard := line.record.unheard:
            who = Who(line.island, msgspec.convert(unheard["incarnation"], int))
            self._note(who, msgspec.convert(unheard, Record))

    def _note(self, who: Who, record: Record) -> None:
        life = self._life(who)
        known = life.records
        if record.seq > len(known) + 1:
            raise self._wrong(
                f"record {record.seq} of {life.who} follows number {len(known)}; one "
                f"is missing"
            )
        # An island repeats unconfirmed records to a coordinator that came back.
        if record.seq == len(known) + 1:
            known.append(TapedRecord(self._line, record))

    def _merged(self, made: records.Merged) -> None:
        known = self._versions.setdefault(made.fragment, [FIRST_VERSION])
        if made.version != known[-1].next():
            raise self._wrong(
                f"fragment {made.fragment} is merged into version "
                f"{tuple(made.version)} after {tuple(known[-1])}; a merge is missing"
            )
        known.append(made.version)
        self._merges.append(RecordedMerge(self._line, len(self._merges) + 1, made))

    def _term_begun(self, begun: records.TermBegun) -> None:
        known = self._versions.setdefault(begun.fragment, [FIRST_VERSION])
        if begun.version.term != known[-1].term + 1 or begun.replaced not in known:
            raise self._wrong(
                f"fragment {begun.fragment} begins at {tuple(begun.version)} with its "
                f"version {tuple(begun.replaced)} after {tuple(known[-1])}; a merge is "
                f"missing"
            )
        known.append(begun.version)
        self._changed(begun)

    def _changed(
        self, record: journal.Recovered | journal.FragmentBack | records.TermBegun
    ) -> None:
        self._between.append(Between(len(self._merges), record))

    def _digested(self, noted: journal.Digested) -> None:
        for index, merge in enumerate(reversed(self._merges), start=1):
            made = merge.made
            if (made.fragment, made.version) == (noted.fragment, noted.version):
                self._merges[-index] = merge._replace(parameters=noted.digest)
                return
        raise self._wrong(
            f"fragment {noted.fragment} has a digest at version "
            f"{tuple(noted.version)}, but no merge made it; a merge is missing"
        )

    # ---- what the merges need ---------------------------------------------------

    def _life(self, who: Who) -> Life:
        if who not in self._lives:
            raise self._wrong(f"{who} has not joined by then; a record is missing")
        return self._lives[who]

    def _needed(self, merges: tuple[RecordedMerge, ...]) -> dict[Who, Life]:
        """Return the incarnations in these merges, and those whose moments they began
        with, each up to the last record that is needed."""
        takes: dict[Who, dict[tuple[int, int], RecordedMerge]] = {}
        for merge in merges:
            for part in merge.made.contributions:
                who = self._life(Who(part.island, part.incarnation)).who
                takes.setdefault(who, {})[merge.made.fragment, part.tick] = merge
        needed = list(takes)
        for who in needed:  # It grows meanwhile.
            restored = self._lives[who].restored()
            if restored is not None:
                self._life(restored.who).saves.add(restored.steps)
                if restored.who not in needed:
                    needed.append(restored.who)
        try:
            for who in needed:
                self._lives[who].cut(takes.get(who, {}))
        except TapeError as error:
            raise TapeError(f"{self._path}, {error}") from error
        return {who: self._lives[who] for who in needed}

    def _wrong(self, what: str) -> TapeError:
        return TapeError(f"{self._path}, line {self._line}: {what}")
