"""`diloco simulate faults`: its options, and its report for people."""

from __future__ import annotations

import dataclasses

from diloco_jax.config import ConfigError
from diloco_jax.config.fields import AT_LEAST_1, NOT_NEGATIVE, check_bounds, setting
from diloco_jax.simulation.faults.play import (
    SHORTENED,
    FaultsReport,
    Found,
    Violation,
    check,
    check_schedule,
)
from diloco_jax.simulation.faults.schedule import from_json
from diloco_jax.simulation.output import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Play random schedules of faults against the protocol, islands, log and recovery
    of the product, and check invariants at every event. Exit code 1 if one fails.
    """

    seeds: int = setting(1000, AT_LEAST_1, help="Schedules, one of each seed.")
    first_seed: int = setting(
        0, NOT_NEGATIVE, help="The first seed; the others follow it."
    )
    schedule: str = setting(
        "", help="Play this one instead, as a violation printed it (JSON)."
    )

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        for field in ("seeds", "first_seed") if self.schedule else ():
            if (value := getattr(self, field)) != getattr(FaultsConfig, field):
                raise ConfigError(
                    f"--{field.replace('_', '-')} {value} with --schedule, which plays "
                    f"that one schedule; leave out one of them"
                )


def check_faults(
    config: FaultsConfig, progress: Progress, found: Found, report: FaultsReport
) -> FaultsReport:
    """Play the schedules that the config asks for. Raises ConfigError if it cannot.

    report: filled and returned, see `play.check`.
    """
    config.validate()
    if config.schedule:
        return check_schedule(from_json(config.schedule), found=found)
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    return check(seeds, progress, found=found, report=report)


def violation_text(found: Violation) -> str:
    """Return a violation as text for people, when it is found."""
    where = "schedule" if found.seed is None else f"seed {found.seed}"
    lines = [f"{where} violates {found.invariant}: {found.what}"]
    if found.shortest is not None:
        lines += [f"  shortest schedule found: {found.shortest.json()}"]
    if found.like_seed is not None:
        lines += [
            f"  shortest schedule: see seed {found.like_seed} (the first {SHORTENED} "
            f"of an invariant are shortened)"
        ]
    return "\n".join([*lines, f"  again: {found.command}"])


def text(report: FaultsReport) -> str:
    """Return the report as text for people, at the end or at an interruption."""
    faults = ", ".join(f"{kind} {n}" for kind, n in sorted(report.faults.items()))
    summary = (
        f"{report.schedules} schedules in {report.seconds:.1f} s "
        f"({report.schedules_per_minute:.0f} a minute), {report.merges} merges, "
        f"{report.crashes} crashes, {report.torn_snapshots} torn snapshots, "
        f"{report.extensions} extensions, "
        f"{report.faults.total()} faults ({faults}): "
        f"{len(report.violations)} violations"
    )
    if report.next_seed is None:
        return summary
    return f"{summary}\nto go on: --first-seed {report.next_seed}"
