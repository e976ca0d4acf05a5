"""Contents of a tape in the form that replay needs: merges, crashes, lives."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from diloco_jax.cluster.cluster import coordinator_environment
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator.journal import Begun, Environment
from diloco_jax.observability.tape import Report, TapeError, brief, read_tape
from diloco_jax.protocol.records import from_tape
from diloco_jax.protocol.values import Contribution, Record, Version

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
    """Return of the coordinator, or of one of its workers, after `merges` merges.

    Each fragment came from a snapshot and its later publishes.
    """

    merges: int
    snapshot_versions: tuple[Version, ...]
    fragments: tuple[int, ...] | None = None
    """Those of a worker, in the same order; None: all, of the coordinator."""
    line: int = 0

    @property
    def starts(self) -> dict[int, Version]:
        """Version of the snapshot of each fragment that came back."""
        fragments = self.fragments or range(len(self.snapshot_versions))
        return dict(zip(fragments, self.snapshot_versions, strict=True))


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
