"""Every input of a plan's arithmetic, as one value, and changes of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from diloco_jax.config import Config, Placement, RunConfig
from diloco_jax.config.resolving import resolve_open
from diloco_jax.coordinator.settings import StateSizes, state_sizes
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.hardware.machines import (
    NOTHING_MEASURED,
    Machine,
    MachineRates,
    MeasuredValue,
    Measurements,
    constants_of,
    disk_bytes_per_s,
    machine_of,
)
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.planning.options import Assumptions
from diloco_jax.protocol.coordinator import schedule

Change = dict[str, Any]
"""Values by field: "sync.steps_per_cycle", "islands.NAME.batch_size"."""


def shown(change: Change) -> str:
    """Format the change as fields and values."""
    return " and ".join(f"{path} = {_value(value)}" for path, value in change.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Every input of a plan's arithmetic."""

    config: Config
    """With a resolved outer optimizer."""
    fragments: FragmentPlan
    hosts: Mapping[str, int]
    step_seconds: Mapping[str, float]
    link_gbit_per_s: float
    """Of each island's link, each way, where `measured` has nothing else."""
    steps_known: bool = True
    """False: `step_seconds` are made up, and a disk is judged by the bytes that do not
    depend on them."""
    hbm_known: bool = False
    """True: a compiler has told what islands take of it, and no check does."""
    measured: Measurements = NOTHING_MEASURED
    """Values that count before constants and published rates."""

    @property
    def run(self) -> RunConfig:
        """What all islands agree on."""
        return self.config.run

    @property
    def placement(self) -> Placement:
        """The run's placement."""
        return self.config.placement

    @property
    def workers(self) -> int:
        """Machines that merge."""
        return self.placement.workers

    @property
    def machine(self) -> Machine:
        """The coordinator's machine, and that of each worker."""
        return machine_of(self.config.launch.coordinator_machine)

    @property
    def pacing_step_seconds(self) -> float:
        """Seconds of a step of the island that sets the pace."""
        return schedule.pace(self.run.sync.quorum, list(self.step_seconds.values()))

    @property
    def cycle_seconds(self) -> float:
        """Seconds in which every fragment is merged once."""
        return self.run.sync.cycle * self.pacing_step_seconds

    @functools.cached_property
    def sizes(self) -> StateSizes:
        """Bytes of the coordinator's state."""
        return state_sizes(self.run, self.fragments)

    @property
    def asks(self) -> list[str]:
        """Islands that have a publish from the coordinator."""
        return one_of_each(self.config, self.hosts)

    @property
    def rates(self) -> MachineRates:
        """Rates of the coordinator's machine by the config's merge route."""
        found = constants_of(self.placement.merge_route)
        if whole := self.measured.merge_core_seconds:
            found = msgspec.structs.replace(found, whole_merge_core_seconds=whole.value)
        return found

    @property
    def link_up(self) -> float:
        """Gbit/s of an island's link to the coordinator."""
        return _or(self.measured.link_up_gbit_per_s, self.link_gbit_per_s)

    @property
    def link_down(self) -> float:
        """Gbit/s of an island's link from the coordinator."""
        return _or(self.measured.link_down_gbit_per_s, self.link_gbit_per_s)

    @property
    def disk_bytes_per_s(self) -> float:
        """Bytes per second that the coordinator's disk writes."""
        return _or(self.measured.disk_write_bytes_per_s, self._published_disk)

    @property
    def disk_read_bytes_per_s(self) -> float:
        """Bytes per second that it reads."""
        return _or(self.measured.disk_read_bytes_per_s, self._published_disk)

    @property
    def _published_disk(self) -> float:
        by_size = disk_bytes_per_s(self.config.launch.coordinator_disk_gb)
        return min(by_size, self.machine.disk_bytes_per_s)

    def changed(self, change: Change) -> Terms:
        """Return the terms with other values of fields of the config. Steps on other
        slices take as much of their peak. Raises ConfigError: see `slice_of`."""
        config = self.config.replace(change)
        hosts, steps = dict(self.hosts), dict(self.step_seconds)
        for name, island in config.islands.items():
            before = self.config.islands[name]
            if island.topology != before.topology:
                found = slice_of(name, island)
                hosts[name] = found.hosts
                slower = slice_of(name, before).flops_per_s / found.flops_per_s
                steps[name] = max(steps[name] * slower, island.step_seconds)
        return dataclasses.replace(self, config=config, hosts=hosts, step_seconds=steps)


def _or(measured: MeasuredValue | None, otherwise: float) -> float:
    return measured.value if measured else otherwise


def terms_of(
    config: Config,
    fragments: FragmentPlan,
    step_seconds: Mapping[str, float],
    link_gbit_per_s: float = Assumptions.link_gbit_per_s,
    measured: Measurements = NOTHING_MEASURED,
) -> Terms:
    """Return the inputs of a plan whose islands' steps take so long."""
    return Terms(
        config=resolve_open(config),
        fragments=fragments,
        hosts={
            name: slice_of(name, island).hosts if island.topology else island.hosts
            for name, island in config.islands.items()
        },
        step_seconds=step_seconds,
        link_gbit_per_s=link_gbit_per_s,
        measured=measured,
    )


def one_of_each(config: Config, names: Iterable[str]) -> list[str]:
    """Return the first of these islands of each region, and those in none: as many have
    a publish from the coordinator."""
    regions, found = config.regions(), dict[tuple[bool, str], str]()
    for name in names:
        found.setdefault((name in regions, regions.get(name, name)), name)
    return list(found.values())
