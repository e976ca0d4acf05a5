"""Terms of a plan's arithmetic, and the needs that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from diloco_jax.config import Config
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.hardware.machines import disk_bytes_per_s, machine_of
from diloco_jax.hardware.rates import MachineRates, constants_of
from diloco_jax.planning.changes import Change
from diloco_jax.planning.changes import changed as changed_config
from diloco_jax.planning.coordinator import CoordinatorPlan, plan_coordinator
from diloco_jax.planning.network import IslandNetwork, island_network
from diloco_jax.protocol.coordinator import schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Every input of a plan's arithmetic."""

    config: Config
    """With a resolved outer optimizer."""
    fragments: FragmentPlan
    hosts: Mapping[str, int]
    step_seconds: Mapping[str, float]
    link_gbit_per_s: float
    steps_known: bool = True
    """False: `step_seconds` are made up, and a disk is judged by the bytes that do not
    depend on them."""

    @property
    def rates(self) -> MachineRates:
        """Rates of the coordinator's machine by the config's merge route."""
        return constants_of(self.config.placement.merge_route)

    @property
    def disk_bytes_per_s(self) -> float:
        """Rate of the coordinator's disk, each way: as published."""
        launch = self.config.launch
        return min(
            disk_bytes_per_s(launch.coordinator_disk_gb),
            machine_of(launch.coordinator_machine).disk_bytes_per_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Needs of the coordinator and of each link."""

    pacing_step_seconds: float
    cycle_seconds: float
    coordinator: CoordinatorPlan
    restart_seconds: float
    networks: dict[str, IslandNetwork]


def needs_of(terms: Terms) -> Needs:
    """Do the arithmetic. Raises ConfigError."""
    config, sync = terms.config, terms.config.run.sync
    pace = schedule.pace(sync.quorum, list(terms.step_seconds.values()))
    cycle_s = sync.steps_per_cycle * pace
    coordinator = plan_coordinator(
        config.run,
        config.placement,
        terms.fragments,
        len(terms.hosts),
        cycle_s,
        machine_of(config.launch.coordinator_machine).cores,
        terms.disk_bytes_per_s,
        terms.rates,
        cycles=config.merges_per_fragment(),
        apart=config.launch.workers_apart or bool(config.placement.worker_addresses),
    )
    return Needs(
        pacing_step_seconds=pace,
        cycle_seconds=cycle_s,
        coordinator=coordinator,
        restart_seconds=coordinator.restart_seconds(terms.disk_bytes_per_s),
        networks={
            name: island_network(
                sync, terms.fragments, pace, seconds, terms.link_gbit_per_s
            )
            for name, seconds in terms.step_seconds.items()
        },
    )


def changed(terms: Terms, change: Change) -> Terms:
    """Return the terms with other values of fields of the config."""
    return dataclasses.replace(terms, config=changed_config(terms.config, change))
