"""Settings of a coordinator's parts, by the config: those of decisions and of the outer
optimizer, servers, and the bytes of what it writes and sends.

No island is believed that says it is much faster than published peak rates and the
config allow (`least_seconds`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax import compilation
from diloco_jax.config import (
    Config,
    ConfigError,
    InnerConfig,
    IslandConfig,
    Placement,
    RunConfig,
)
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import FragmentPlan, PayloadLayout
from diloco_jax.core.inner import learning_rate
from diloco_jax.core.outer import OuterSettings, make_outer
from diloco_jax.faults import Faults, parse_faults
from diloco_jax.hardware.tpus import find_slice
from diloco_jax.models.flops import least_sequence_flops
from diloco_jax.protocol.coordinator.islands import SHORTEST_STEP_S
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.coordinator.steering import MOST_ADMITTED
from diloco_jax.wire import addresses, peers
from diloco_jax.wire.bulk_server import BulkServer
from diloco_jax.wire.server import Server
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

RATE_POINTS = 100
"""Parts of a run at whose ends its learning rate is known to decisions."""
SPARE_ISLANDS = 8
"""Places for streams of islands that are refused, so that they can be told why."""


def policy_config(
    run: RunConfig,
    placement: Placement,
    run_id: str,
    fragment_sizes: tuple[int, ...],
    **others: Any,
) -> PolicyConfig:
    """Collect the settings that decisions depend on, by name, from a config and its
    deadlines.

    fragment_sizes: parameters by fragment. others: fields of `PolicyConfig` that no
    section of the config has.
    """
    given = {
        "run_id": run_id,
        "fingerprint": run.fingerprint(),
        "fragment_sizes": fragment_sizes,
        "rates": _rates(run.inner),
        "steps_per_cycle": run.sync.cycle,
        "overlap_steps": run.sync.overlap,
        **others,
    }
    named = {
        name: getattr(owner, name)
        for owner in (run.sync, run, placement, placement.deadlines)
        for name in PolicyConfig.__struct_fields__
        if name not in given and hasattr(owner, name)
    }
    return PolicyConfig(**given, **named)


@functools.lru_cache(maxsize=8)  # A simulator asks for those of many runs.
def _rates(inner: InnerConfig) -> tuple[float, ...]:
    """Return the learning rates at the ends of a run's parts."""
    points = range(RATE_POINTS + 1)
    return tuple(learning_rate(inner, point / RATE_POINTS) for point in points)


def policy_of(config: Config, plan: FragmentPlan, run_id: str) -> PolicyConfig:
    """Return the settings of a coordinator's decisions; see `policy_config`. The log
    names islands whose speed nothing bounds: the key of one is enough to end the run.
    """
    least = least_seconds(config, least_sequence_flops(config.run))
    known = admitted(config)
    names = [n for n in known if not least.get(n, least[UNDESCRIBED])]
    if names and config.placement.certificates:
        logger.warning(
            "nothing bounds the speed of islands %s but %g s a step: whoever has the "
            "key of one could claim all steps of the run, and end it; set "
            "islands.NAME.step_seconds of each to a little less than a step takes",
            ", ".join(names),
            SHORTEST_STEP_S,
        )
    return policy_config(
        config.run,
        config.placement,
        run_id,
        plan.sizes,
        admitted=known,
        room_each=room_each(config, plan),
        least_seconds=least,
        hosts={name: island.hosts for name, island in config.islands.items()},
        regions=config.regions(),
    )


def admitted(config: Config) -> dict[str, int | None]:
    """Return the sequences per step of each island that may join, by name.

    None stands for any number: `placement.admit` names the island, and no config
    describes it.
    """
    others = dict.fromkeys(config.placement.admit)
    return {**others, **{name: i.batch_size for name, i in config.islands.items()}}


def server_of(config: Config, handlers: Handlers, tls: TlsFiles | None) -> Server:
    """Return the server of a coordinator, with places for its islands."""
    return Server(
        config.placement.bind,
        handlers,
        tls=tls,
        max_islands=len(admitted(config)) + MOST_ADMITTED + SPARE_ISLANDS,
        insecure=config.placement.insecure,
        config=dataclasses.asdict(config),
        **bulk_places(config),
    )


def bulk_server_of(
    config: Config, handlers: Handlers, tls: TlsFiles | None
) -> BulkServer:
    """Return the server of a worker, with as many places for transfers."""
    return BulkServer(handlers, tls=tls, **bulk_places(config))


def bulk_places(config: Config) -> dict[str, Any]:
    """Return a bulk server's places for islands that may join. One that the config does
    not describe has one host."""
    known = config.islands
    hosts = [known[n].hosts if n in known else 1 for n in admitted(config)]
    return {
        "deadlines": config.placement.deadlines,
        "max_hosts": sum(hosts) + MOST_ADMITTED + SPARE_ISLANDS,
        "max_hosts_each": max(hosts),
        "bulk_channels": config.placement.bulk_channels,
    }


def require_room(config: Config, plan: FragmentPlan) -> None:
    """Raise ConfigError if there is no room for one fragment's deltas from all islands:
    the merge at the end of a run takes all of them."""
    needed, placement = room_needed(config, plan), config.placement
    count = len(admitted(config))
    if placement.merge_buffer_bytes < needed:
        parts = f", and placement.workers = {placement.workers} have equal parts of it"
        raise ConfigError(
            f"placement.merge_buffer_bytes = {placement.merge_buffer_bytes}, "
            f"but deltas of the largest fragment have {largest_delta(config, plan)} "
            f"bytes each (sync.codec_up = {config.run.sync.codec_up!r}), and there are "
            f"{count} islands{parts * (placement.workers > 1)}; give at "
            f"least {needed}, or more sync.fragments"
        )


def require_merging(placement: Placement) -> None:
    """Raise ConfigError if this machine, or workers, cannot merge as the config
    says."""
    if placement.workers > 1 and not placement.worker_addresses:
        raise ConfigError(
            f"placement.workers = {placement.workers}, and placement.worker_addresses "
            f"is empty: name there where each `diloco worker` runs, or leave "
            f"placement.workers out, and this process merges"
        )
    compilation.require(placement.merge_route)


def own_tls(placement: Placement) -> TlsFiles | None:
    """Load the key of this coordinator; None = no TLS. Raises SecurityError as
    `TlsFiles.load` does."""
    return TlsFiles.load_given(placement.certificates, peers.COORDINATOR)


def room_needed(config: Config, plan: FragmentPlan) -> int:
    """Return the bytes of `placement.merge_buffer_bytes` that all islands need which
    may join."""
    return room_each(config, plan) * len(admitted(config))


def room_each(config: Config, plan: FragmentPlan) -> int:
    """Return the bytes that one island needs of it: the largest fragment's delta, as
    often as there are workers, since each has an equal part of the room and one of them
    takes all these deltas."""
    return largest_delta(config, plan) * config.placement.workers


def largest_delta(config: Config, plan: FragmentPlan) -> int:
    """Return the bytes of the largest fragment's delta."""
    return max(payload_bytes(config.run.sync.codec_up, plan, up=True))


def faults_of(config: Config, who: str, life: int = 1) -> Faults:
    """Return the faults to inject into the lead, or into a worker in one of its lives
    (`faults.worker_name`)."""
    placement = config.placement
    faults = parse_faults(placement.faults, config.islands, placement.workers)
    return faults.for_who(who, life)


def outer_settings(run: RunConfig) -> OuterSettings:
    """Return the outer optimizer's settings in a resolved config."""
    chosen = run.outer
    if chosen.optimizer is None or chosen.learning_rate is None:
        raise ValueError(
            "outer.optimizer and outer.learning_rate are not resolved; use the "
            "config.json of the run"
        )
    return OuterSettings(
        optimizer=chosen.optimizer,
        learning_rate=chosen.learning_rate,
        momentum=chosen.momentum or 0.0,
        warmup_merges=chosen.warmup_merges,
        norm_guard=chosen.norm_guard,
    )


def require_ports(placement: Placement, tls: TlsFiles | None) -> None:
    """Raise ConfigError if a port that is to be served cannot be bound, or must not be
    without TLS."""
    addresses.require_tls(
        placement.bind, tls=tls is not None, insecure=placement.insecure
    )
    addresses.require_free(placement.bind)
    addresses.require_loopback(placement.bind)
    if placement.metrics_bind:
        addresses.require_free(placement.metrics_bind, bulk=False)


ANY_DEVICE_FLOPS_PER_S = 2e16
"""Rate that no device of the islands without a topology is above: four times the peak
of the fastest chips of 2026."""
UNDESCRIBED_DEVICES = 1024
"""Devices, as fast as that, of an island that the config does not describe."""
UNDESCRIBED = ""
"""The key of such islands."""


def least_seconds(config: Config, sequence: float) -> dict[str, float]:
    """Return the least seconds of a sequence by island; 0 if nothing is known.
    sequence: its least FLOPs; 0 if they are not known."""
    described = {
        name: max(
            sequence / _flops_per_s(name, island),
            island.step_seconds / island.batch_size,
        )
        for name, island in config.islands.items()
    }
    others = sequence / (UNDESCRIBED_DEVICES * ANY_DEVICE_FLOPS_PER_S)
    return {**described, UNDESCRIBED: others}


def _flops_per_s(name: str, island: IslandConfig) -> float:
    if not island.topology:
        return island.devices * ANY_DEVICE_FLOPS_PER_S
    found = find_slice(island.topology, f"islands.{name}.topology")
    return max(1.0, island.devices / found.devices) * found.flops_per_s


class StateSizes(NamedTuple):
    """Bytes of a model's state, as the coordinator writes it."""

    state: int
    """All fragments in a snapshot: Theta, anchor and outer state."""
    largest: int
    """The largest of them."""
    publish: int
    """One publish of each fragment."""


def state_sizes(run: RunConfig, plan: FragmentPlan) -> StateSizes:
    """Return the bytes of the state. run: with a resolved outer optimizer."""
    outer, largest = _outer_state_bytes(outer_settings(run), plan), max(plan.sizes)
    return StateSizes(
        state=8 * plan.total + outer,
        largest=8 * largest + math.ceil(outer * largest / plan.total),
        publish=sum(payload_bytes(run.sync.codec_down, plan)),
    )


@functools.lru_cache(maxsize=16)
def payload_bytes(codec: str, plan: FragmentPlan, *, up: bool = False) -> list[int]:
    """Return the bytes of each encoded fragment; up: of a delta, with its counts."""
    layout = PayloadLayout.of_delta if up else PayloadLayout.of
    return [layout(get_codec(codec), pieces).total_bytes for pieces in plan.fragments]


def next_snapshots(placement: Placement, state: int, largest: int, held: int) -> int:
    """Return the bytes of snapshots that a disk must have free for the next round: what
    it lacks of the kept ones, at most one of each fragment, and one that is being
    written. state, largest: see `StateSizes`. held: bytes of snapshots that it has."""
    return min(state, max(0, placement.snapshots_kept * state - held)) + largest


@functools.lru_cache(maxsize=16)
def _outer_state_bytes(settings: OuterSettings, plan: FragmentPlan) -> int:
    outer = make_outer(settings)

    def init() -> Any:
        return outer.init(tuple(jnp.zeros(piece.shape) for piece in plan.pieces))

    state = jax.eval_shape(init)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
