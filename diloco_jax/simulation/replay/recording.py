"""A recorded run: its tape in the form that replay needs.

The tape's chain of hashes finds lines that were changed or moved, and the digests of
merges find lines that lead to other parameters. Gaps remain to be found: a machine that
crashed may have lost lines, and a tape may end early.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from diloco_jax import run_files
from diloco_jax.cluster.cluster import coordinator_environment
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator import journal
from diloco_jax.coordinator.journal import Begun, Environment
from diloco_jax.observability.tape import Report, TapeError, brief, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.records import from_tape
from diloco_jax.protocol.values import FIRST_VERSION, Contribution, Record, Version
from diloco_jax.workdir import read_config

if TYPE_CHECKING:
    from diloco_jax.core.kernels import Passes


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


class Who(NamedTuple):
    """One incarnation of an island."""

    island: str
    incarnation: int

    def __str__(self) -> str:
        return f"island {self.island}, incarnation {self.incarnation}"


class RestoredFrom(NamedTuple):
    """State that an incarnation began with, besides anchors."""

    who: Who
    """Incarnation with the moments, after `steps` steps, and these fragments'
    residuals.
    """
    steps: int
    fragments: tuple[int, ...]


class TapedRecord(NamedTuple):
    """A record of an island and its line on the tape."""

    line: int
    record: Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digests:
    """Digests of a merge's publish and of the fragment's Theta; "" where the tape has
    none: a coordinator that was killed had not computed it."""

    publish: str
    parameters: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedMerge:
    """One merge on the tape; merges are numbered from 1."""

    line: int
    number: int
    fragment: int
    version: Version
    final: bool
    contributions: tuple[Contribution, ...]
    share: float
    digests: Digests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """Return of the coordinator after `merges` merges.

    Each fragment came from a snapshot and its later publishes.
    """

    merges: int
    snapshot_versions: tuple[Version, ...]
    line: int = 0

    @property
    def starts(self) -> dict[int, Version]:
        """Version of the snapshot of each fragment."""
        return dict(enumerate(self.snapshot_versions))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BegunTerm:
    """After `merges` merges, a fragment that a worker had lost began a term: with the
    anchor of an earlier version."""

    merges: int
    fragment: int
    version: Version
    replaced: Version
    """That version."""
    line: int = 0


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
            who=Who(self.who.island, lines[0].start),
            steps=lines[0].value,
            fragments=tuple(r.fragment for r in lines[1:]),
        )

    def cut(self, takes: Mapping[tuple[int, int], RecordedMerge]) -> None:
        """Drop the records after the last needed one.

        Needed are records up to the last of these takes, which are keyed by (fragment,
        tick) and came into those merges, and up to the last step in `saves`.

        Raises TapeError if a take is missing.
        """
        missing = dict(takes)
        count = 0
        for index, (_, record) in enumerate(self.records, start=1):
            key = (record.fragment, record.tick)
            if record.kind == "took" and key in missing:
                del missing[key]
                count = index
        for (fragment, tick), merge in missing.items():
            raise TapeError(
                f"line {merge.line}: the take of fragment {fragment} at tick {tick} by "
                f"{self.who} is merged, but on no line: a record is missing"
            )
        last = max(self.saves, default=-1)
        saved = sum(record.step <= last for _, record in self.records)
        del self.records[max(count, saved) :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded run, ready to be repeated."""

    workdir: Path
    config: Config
    plan_digest: str
    coordinators: tuple[Environment, ...]
    """Environments of the first coordinator and of each that came back."""
    merges: tuple[RecordedMerge, ...]
    merges_on_tape: int
    recoveries: tuple[Recovery, ...]
    begun: tuple[BegunTerm, ...] = ()
    lives: Mapping[Who, Life]
    """Incarnations in these merges, each up to its last take in them."""

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
        like = environment_like(self.coordinators[0])
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
            raise ConfigError(
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


def passes_like(recorded: Environment) -> Passes | None:
    """Return the passes of the route by which the recorded coordinator merged.

    Raises ConfigError if that route is not available here.
    """
    from diloco_jax import merge_route

    route = recorded.get("merge_route")
    if route == "xla":
        return merge_route.passes_of("xla")
    try:
        if route == "native":
            return merge_route.passes_of("native")
        why = "it is not known here"
    except ConfigError as error:
        why = str(error)
    raise ConfigError(
        f'the coordinator merged by the route {route!r}, here it would be "xla" '
        f"({why}): a comparison of bits would say nothing; replay where it is the same"
    )


def read_records(
    path: Path, take: Callable[[int, Mapping[str, Any]], None], report: Report
) -> None:
    """Give every record of a tape to the function, with the number of its line. report:
    told the share that is read.

    Raises TapeError that names the first line that is no record, or is out of order;
    ConfigError for a tape that begins with a later term.
    """
    for line, record in enumerate(read_tape(path, report), start=1):
        try:
            _refuse_term(path, record)
            if (line == 1) != (record["kind"] == "begun"):
                raise TapeError(
                    f"{path}, line {line}: {brief(record['kind'])}; 'begun' is the "
                    f"first record and no other"
                )
            take(line, record)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise TapeError(
                f"{path}, line {line}: not a record {brief(record.get('kind'))} "
                f"({brief(error)})"
            ) from error


def _refuse_term(path: Path, record: Mapping[str, Any]) -> None:
    """Raise ConfigError if the record begins a new term: its anchors' tape is gone."""
    if record["kind"] == "term":
        raise ConfigError(
            f"{path} is of term {record['term']} of run {record['run_id']}, which "
            f"began with islands' anchors after the coordinator had lost its state. "
            f"Their origin is not on this tape, so it cannot be repeated; give the "
            f"workdir of a run that kept its state"
        )


def read_begun(path: Path, record: Mapping[str, Any], config: Config) -> Begun:
    """Return the tape's first record.

    Raises ConfigError unless it is of this version and of a run with this config.
    """
    written, here = record["environment"]["diloco_jax"], metadata.version("diloco-jax")
    if written != here:
        raise ConfigError(
            f"{path} was written by diloco_jax {written}, this is {here}; read it with "
            f"the version that wrote it"
        )
    begun = from_tape(record, Begun)
    # The run may have been extended since.
    run = dataclasses.replace(config.run, total_tokens=begun.total_tokens)
    fingerprint = run.fingerprint()
    if begun.fingerprint != fingerprint:
        raise ConfigError(
            f"{path} is of a run with fingerprint {begun.fingerprint}, the "
            f"config.json beside it has {fingerprint}; bring back the run's own"
        )
    return begun


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
            coordinators=tuple(self._coordinators[: 1 + len(recoveries)]),
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
