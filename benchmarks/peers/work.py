"""The work that every system is given, and what is known of each once it is done.

Replicas train one decoder on bytes. Each takes `step_seconds` for a step, so that two
cores are no limit and what remains is waiting. Nothing here imports jax or torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

Scenario = Literal["undisturbed", "killed", "slow", "coordinator lost"]
SCENARIOS: tuple[Scenario, ...] = ("undisturbed", "killed", "slow", "coordinator lost")
RESTART_S = 1.0
"""Seconds after which a supervisor starts a replica again that has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One run: how many train for how long, and what happens to them."""

    scenario: Scenario
    replicas: int
    seconds: float
    """Time of training, after all have begun."""
    step_seconds: float = 0.1
    slow_factor: float = 4.0
    """Factor by which the last replica's steps are longer where one is slow."""
    outage_s: float = 8.0
    """Time for which the coordinator is away where it is lost."""
    batch: int = 2
    sequence: int = 64
    steps_per_cycle: int = 12
    fragments: int = 4
    learning_rate: float = 1e-3
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replicas; a fault is the last one's."""
        return tuple(f"r{number}" for number in range(self.replicas))

    @property
    def victim(self) -> str:
        """The replica that is killed or slow."""
        return self.names[-1]

    @property
    def survivors(self) -> tuple[str, ...]:
        """The replicas to which nothing is done."""
        return self.names[:-1] if self.scenario in ("killed", "slow") else self.names

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of one replica."""
        return self.batch * self.sequence

    @property
    def fault_step(self) -> int:
        """Step of a replica at which the fault strikes: a quarter of the run."""
        return round(self.seconds / self.step_seconds / 4)

    def pace(self, name: str) -> float:
        """Seconds of a step of this replica."""
        slow = self.scenario == "slow" and name == self.victim
        return self.step_seconds * (self.slow_factor if slow else 1.0)

    @property
    def capacity(self) -> float:
        """Tokens per second of all replicas together, if nobody waits or dies."""
        return sum(self.tokens_per_step / self.pace(name) for name in self.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one system in a run."""

    system: str
    version: str
    scenario: str
    replicas: int
    parameters: int
    useful_per_second: float
    """Tokens per second that reached the common model, while all trained."""
    capacity: float
    """The same, if nobody had waited or died."""
    longest_gap_steps: float
    """Longest time between two steps of a replica to which nothing was done, in steps
    of the undisturbed length."""
    went_on: bool
    """Whether every survivor trained to the end without a restart, and merges went
    on."""
    ended: int
    """Processes that ended with an error and were not killed by the benchmark."""
    tokens_lost: float
    bytes_loopback: int | None
    """All that the run's processes sent to each other; None where it was not
    measured."""
    tokens_useful: float
    """Tokens in the common model at the end of the run."""
    loss: float
    """Loss of the last steps or of the evaluation in nats: a sign that it trains."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes on the network for each useful token."""
        if self.bytes_loopback is None or not self.tokens_useful:
            return float("nan")
        return self.bytes_loopback / self.tokens_useful


@dataclasses.dataclass(frozen=True)
class Merge:
    """A merge into the common model: when, and tokens of each replica in it, weighted
    by the fragment's share of the parameters."""

    time: float
    tokens: Mapping[str, float]


def useful_tokens(merges: Sequence[Merge], began: float, ended: float) -> float:
    """Return the tokens that were merged between two times."""
    return sum(
        sum(merge.tokens.values()) for merge in merges if began < merge.time <= ended
    )


def longest_gap(times: Sequence[float], ended: float) -> float:
    """Return the longest time between two of these steps, and to the end."""
    steps = [*sorted(times), ended]
    return max(b - a for a, b in itertools.pairwise(steps))
