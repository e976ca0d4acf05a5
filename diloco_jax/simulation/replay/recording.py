"""What a tape recorded, as replay needs it: merges, crashes, incarnations' lives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.cluster.commands import coordinator_environment
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.coordinator.notes import Begun, Environment
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol.records import from_tape
from diloco_jax.protocol.values import Contribution, Record, Version

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
"""Facts of `environment.describe` without which bits need not be the same."""

VERSIONS = ("diloco_jax", "jax", "jaxlib")
"""Those of them that are known before jax is imported."""


class Who(NamedTuple):
    """One incarnation of an island."""

    island: str
    incarnation: int

    def __str__(self) -> str:
        return f"island {self.island}, incarnation {self.incarnation}"


class RestoredFrom(NamedTuple):
    """What an incarnation began with, besides anchors."""

    who: Who
    """Whose moments, after `steps` steps, and residuals of these fragments."""
    steps: int
    fragments: tuple[int, ...]


class TapedRecord(NamedTuple):
    """A record of an island and its line on the tape."""

    line: int
    record: Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedMerge:
    """One merge as the tape has it; merges are numbered from 1."""

    line: int
    number: int
    fragment: int
    version: Version
    final: bool
    contributions: tuple[Contribution, ...]
    share: float
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """The coordinator came back after `merges` merges: from a snapshot that held the
    first `snapshot_merges` of them, and the log."""

    merges: int
    snapshot_merges: int


@dataclasses.dataclass(kw_only=True)
class Life:
    """What the tape tells of one incarnation."""

    who: Who
    config: IslandConfig
    environment: Environment
    records: list[TapedRecord] = dataclasses.field(default_factory=list)
    saves: set[int] = dataclasses.field(default_factory=set)
    """Steps after which a later incarnation needs its moments."""

    def begins(self) -> list[Version]:
        """The versions it began with, by fragment: its first records."""
        versions: list[Version] = []
        for _, record in self.records:
            began = record.kind == "adopted" and record.step == 0
            if not began or record.fragment != len(versions):
                break
            versions.append(record.version)
        return versions

    def restored(self) -> RestoredFrom | None:
        """What it took over of an earlier incarnation: it says so next."""
        told = [r for _, r in self.records if r.kind == "restored"]
        if not told:
            return None
        return RestoredFrom(
            who=Who(self.who.island, told[0].start),
            steps=told[0].value,
            fragments=tuple(r.fragment for r in told[1:]),
        )

    def cut(self, takes: Mapping[tuple[int, int], RecordedMerge]) -> None:
        """Drops what follows the last of these takes, which are named by (fragment,
        tick) and came into those merges, and the last step in `saves`.

        Raises TapeError if one is missing.
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
    """What is to be repeated."""

    workdir: Path
    config: Config
    plan_digest: str
    coordinators: tuple[Environment, ...]
    """Of the first coordinator and of each that came back."""
    merges: tuple[RecordedMerge, ...]
    merges_on_tape: int
    recoveries: tuple[Recovery, ...]
    lives: Mapping[Who, Life]
    """The incarnations in these merges, each up to its last take in them."""

    def refuse_other_versions(self) -> None:
        """Raises ConfigError if a process of the run had another jax than is here:
        before that is imported, since it ends a process whose flags it does not know.
        """
        here = {package: metadata.version(package) for package in VERSIONS}
        for recorded in self.coordinators:
            refuse_other_bits("the coordinator", recorded, here, VERSIONS)
        for who, life in self.lives.items():
            refuse_other_bits(str(who), life.environment, here, VERSIONS)

    def prepare_environment(self) -> None:
        """Makes this process compute as the coordinator's did; call before importing
        jax."""
        like = environment_like(self.coordinators[0])
        os.environ.update({**coordinator_environment(), **like})


def refuse_other_bits(
    whose: str,
    there: Environment,
    here: Mapping[str, Any],
    facts: Sequence[str] = SAME_BITS,
) -> None:
    """Raises ConfigError for the first of these facts that is another one here."""
    for fact in facts:
        if there[fact] != here[fact]:
            raise ConfigError(
                f"{whose} had {fact} = {there[fact]!r}, here it is {here[fact]!r}: a "
                f"comparison of bits would say nothing; replay where it is the same"
            )


def environment_like(recorded: Environment) -> dict[str, str]:
    """What makes a process compute as the recorded one did, if set before it imports
    jax: as many threads and devices, with the same flags."""
    return {
        "JAX_PLATFORMS": "cpu" if recorded["platform"] == "cpu" else "",
        "NPROC": str(recorded["threads"]),
        "XLA_FLAGS": str(recorded["xla_flags"]),
    }


def refuse_term(path: Path, record: Mapping[str, Any]) -> None:
    """Raises ConfigError if the record begins a new term: what its anchors came from is
    on a tape that is gone."""
    if record["kind"] == "term":
        raise ConfigError(
            f"{path} is of term {record['term']} of run {record['run_id']}, which "
            f"began with anchors that islands had when the coordinator had lost its "
            f"state: what made them is not on it, so it cannot be repeated; give the "
            f"workdir of a run that kept its state"
        )


def read_begun(path: Path, record: Mapping[str, Any], config: Config) -> Begun:
    """The tape's first record. Raises ConfigError unless it is of this version and of a
    run with this config."""
    written, here = record["environment"]["diloco_jax"], metadata.version("diloco-jax")
    if written != here:
        raise ConfigError(
            f"{path} was written by diloco_jax {written}, this is {here}; read it with "
            f"the version that wrote it"
        )
    begun, fingerprint = from_tape(record, Begun), config.run.fingerprint()
    if begun.fingerprint != fingerprint:
        raise ConfigError(
            f"{path} is of a run with fingerprint {begun.fingerprint}, the "
            f"config.json beside it has {fingerprint}; bring back the run's own"
        )
    return begun
