"""A run and its faults, as data: drawn from a seed, written as JSON.

What a fault is and does stands in `faults`.
"""

from __future__ import annotations

import msgspec

from diloco_jax.config import ConfigError, GraceWindow, Placement, RunConfig, SyncConfig
from diloco_jax.config.config import check_member
from diloco_jax.config.fields import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    SECONDS,
    SOME_SECONDS,
    Bound,
    within,
)
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.island.boundary import AdoptTraits
from diloco_jax.simulation.faults.faults import (
    LEASE_S,
    AnyFault,
    Drawn,
    Removal,
    StepJump,
    check,
)

RUN_ID = "run"
SEQUENCE_LENGTH = 8
COMPILE_BUDGET_S = 10.0
QUARANTINE_AFTER = 2
"""Unfit deltas in a row after which an island is quarantined; one cycle releases it."""
EXPORT_EVERY = 2
"""Cycles between two that are kept."""
RESTART_S = 1.0
"""Seconds from the end of a refused process to the next process."""
RETRY_S = 0.5
"""Seconds between attempts to connect, to find a disk, or to strike."""
MOST_STEPS = 10_000
"""Steps of all islands, where a second of waiting counts as one step. A run of this
length has far fewer calls than `world.MOST_CALLS`.
"""
BATCH_SIZE = Bound(1, 1000)
LOOKAHEAD = Bound(0, 100)


class DrawnIsland(Drawn, frozen=True, kw_only=True):
    """An island: its batch, its speed and its hosts."""

    step_s: float = 1.0
    batch_size: int = 1
    join_s: float = 1.0
    """Seconds from its welcome to its first step."""
    lookahead: int = 0
    """Boundaries that its hosts need to agree on a decision; 0: it has one host."""
    region: str = ""
    """Islands of one region give each other publishes; empty: it is in none."""


class Schedule(Drawn, frozen=True, kw_only=True):
    """Everything that a played run depends on. Times count from its start."""

    islands: dict[str, DrawnIsland]
    faults: tuple[AnyFault, ...] = ()
    total_tokens: int
    extended_to: tuple[int, ...] = ()
    """Tokens in all to which the run goes on, each time that it is over."""
    fragment_sizes: tuple[int, ...] = (2, 1)
    """Parameters by fragment."""
    workers: int = 1
    """Holders of fragments."""
    room: int = 0
    """Fragments of a worker for whose deltas, of all islands, memory has room; 0:
    nobody counts them."""
    steps_per_cycle: int = 4
    overlap_steps: int = 2
    quorum: int = 1
    grace: float = 0.0
    grace_window: GraceWindow = "alike"
    max_staleness: int = 1
    adopt: str = "rebase"
    outage_s: float = 20.0
    """Seconds of data that an island holds."""
    latency_s: float = 0.05
    transfer_s: float = 0.2
    """Seconds that a delta, or the answer to a fetch, is under way."""
    merge_s: float = 0.1

    def configs(self) -> tuple[RunConfig, PolicyConfig]:
        """Return the configs for the production code."""
        run = RunConfig(
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=self.total_tokens,
            sync=SyncConfig(
                steps_per_cycle=self.steps_per_cycle,
                fragments=len(self.fragment_sizes),
                overlap_steps=self.overlap_steps,
                quorum=self.quorum,
                grace=self.grace,
                grace_window=self.grace_window,
                max_staleness=self.max_staleness,
                adopt=self.adopt,
                quarantine_after=QUARANTINE_AFTER,
                release_cycles=1,
            ),
        )
        placement = Placement(
            time_budget_s=LEASE_S,
            outage_budget_s=self.outage_s,
            compile_budget_s=COMPILE_BUDGET_S,
            export_every=EXPORT_EVERY,
        )
        batches: dict[str, int | None] = {
            name: plan.batch_size
            for name, plan in self.islands.items()
            if name not in self.scavenged
        }
        sizes = self.fragment_sizes
        least = {name: self._least_s(name) for name in self.islands}
        regions = {n: plan.region for n, plan in self.islands.items() if plan.region}
        config = policy_config(
            run,
            placement,
            RUN_ID,
            sizes,
            admitted=batches,
            least_seconds=least,
            regions=regions,
        )
        return run, msgspec.structs.replace(
            config,
            workers=self.workers,
            room_each=1 if self.room else 0,
            merge_buffer_bytes=self.room * len(self.islands),
        )

    def _least_s(self, name: str) -> float:
        """Return the seconds of a sequence in the island's shortest steps."""
        jumps = (
            f.factor
            for f in self.faults
            if isinstance(f, StepJump) and f.island == name
        )
        plan = self.islands[name]
        return plan.step_s * min((1.0, *jumps)) / plan.batch_size

    @property
    def scavenged(self) -> frozenset[str]:
        """Islands that the config does not name: an operator admits and removes
        them."""
        return frozenset(f.island for f in self.faults if isinstance(f, Removal))

    @property
    def rule(self) -> AdoptTraits:
        """Adopt rule of the islands."""
        return ADOPT_RULES.find(self.adopt)

    @property
    def pacing_s(self) -> float:
        """Step time of the K-th fastest island, in seconds."""
        times = sorted(plan.step_s for plan in self.islands.values())
        return times[self.quorum - 1]

    @property
    def slowest_s(self) -> float:
        """Step time of the slowest island, in seconds."""
        return max(plan.step_s for plan in self.islands.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all islands together."""
        return sum(
            plan.batch_size * SEQUENCE_LENGTH / plan.step_s
            for plan in self.islands.values()
        )

    def json(self) -> str:
        """Return one line of JSON without the default values."""
        return msgspec.json.encode(self).decode()


def from_json(text: str) -> Schedule:
    """Read a schedule from JSON. Raises ConfigError if the text is not one."""
    try:
        schedule = msgspec.json.decode(text, type=Schedule)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--schedule is not a schedule of faults: {error}") from error
    unknown = {
        name
        for fault in schedule.faults
        if (name := getattr(fault, "island", None)) is not None
    } - set(schedule.islands)
    if unknown:
        raise ConfigError(
            f"--schedule has faults of islands {sorted(unknown)}, its islands are "
            f"{sorted(schedule.islands)}"
        )
    _check_values(schedule)
    if not 1 <= schedule.quorum <= len(schedule.islands):
        raise ConfigError(
            f"--schedule has quorum {schedule.quorum} and {len(schedule.islands)} "
            f"islands; choose a quorum from 1 to {len(schedule.islands)}"
        )
    return schedule


def _check_values(schedule: Schedule) -> None:
    if not schedule.islands or not schedule.fragment_sizes:
        raise ConfigError(
            f"--schedule has {len(schedule.islands)} islands and "
            f"{len(schedule.fragment_sizes)} fragments; give at least one of each"
        )
    if min(schedule.fragment_sizes) < 1:
        raise ConfigError(
            f"--schedule has fragment_sizes {schedule.fragment_sizes}; each must be at "
            f"least 1"
        )
    check_member("adopt", ADOPT_RULES, schedule.adopt)
    within(schedule, AT_LEAST_1, "total_tokens", "steps_per_cycle", "workers")
    within(schedule, NOT_NEGATIVE, "overlap_steps", "max_staleness")
    within(schedule, BELOW_1, "grace")
    within(schedule, SECONDS, "outage_s", "latency_s", "transfer_s", "merge_s")
    for plan in schedule.islands.values():
        within(plan, SOME_SECONDS, "step_s")
        within(plan, BATCH_SIZE, "batch_size")
        within(plan, SECONDS, "join_s")
        within(plan, LOOKAHEAD, "lookahead")
    _check_length(schedule)
    for fault in schedule.faults:
        check(fault)


def _check_length(schedule: Schedule) -> None:
    """Refuse an overlong schedule: it would look like a violation of liveness."""
    total_tokens = max(schedule.total_tokens, *schedule.extended_to, 0)
    seconds = total_tokens / schedule.tokens_per_s
    rates = (1 / plan.step_s + 1 for plan in schedule.islands.values())
    steps = seconds * sum(rates)
    if not steps <= MOST_STEPS:
        raise ConfigError(
            f"total_tokens = {total_tokens} takes {seconds:.3g} s: "
            f"{steps:.2g} steps and seconds of all islands, more than {MOST_STEPS:,}; "
            f"lower total_tokens or extended_to, or choose other step_s or batch_size"
        )
