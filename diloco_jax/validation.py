"""What a config may say: a table of bounds, and what must fit together.

Only what the values themselves tell. What it takes to read the text is checked by
`loading.resolve`, and what it takes to build the model by the coordinator, both before
anything of a run is written.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from diloco_jax.config import Config, ConfigError, IslandConfig, Placement, suggest
from diloco_jax.families import check_members
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.wire.addresses import parse_address

LARGEST = 2**63 - 1
"""What a message holds as a whole number."""
LONGEST_S = 1e9
"""Longer than any run, and short enough for every clock."""
LANES = 128
"""The attention kernel for TPUs works on whole blocks of tokens, a multiple of this
long."""


class Bound(NamedTuple):
    """What a number must be; finite in any case."""

    low: float = 0
    high: float = LARGEST
    above: bool = False
    """The lowest value itself is out."""
    below: bool = False
    """So is the highest one."""

    def holds(self, value: float) -> bool:
        """Whether the value is inside; False for NaN."""
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        if self.high == LARGEST:
            return low
        return f"{low}, {'below' if self.below else 'at most'} {self.high:,.15g}"


NOT_NEGATIVE = Bound()
POSITIVE = Bound(above=True)
AT_LEAST_1 = Bound(1)
SHARE = Bound(0, 1)
SOME_SHARE = Bound(0, 1, above=True)
BELOW_1 = Bound(0, 1, below=True)
BETWEEN = Bound(0, 1, above=True, below=True)
SECONDS = Bound(0, LONGEST_S)
SEED = Bound(0, 2**32 - 1)
"""Of keys of jax.random, which takes no more bits of it."""
SOME_SECONDS = Bound(0, LONGEST_S, above=True)

RUN = {
    "model.vocab_size": AT_LEAST_1,
    "model.d_model": AT_LEAST_1,
    "model.num_layers": AT_LEAST_1,
    "model.num_heads": AT_LEAST_1,
    "model.num_kv_heads": AT_LEAST_1,
    "model.head_dim": AT_LEAST_1,
    "model.mlp_dim": AT_LEAST_1,
    "model.rope_base": POSITIVE,
    "data.validation_fraction": BETWEEN,
    "inner.learning_rate": NOT_NEGATIVE,
    "inner.warmup_fraction": SHARE,
    "inner.final_fraction": SHARE,
    "inner.rewarm_steps": NOT_NEGATIVE,
    "inner.beta1": BELOW_1,
    "inner.beta2": BELOW_1,
    "inner.weight_decay": NOT_NEGATIVE,
    "inner.clip_norm": NOT_NEGATIVE,
    "outer.learning_rate": POSITIVE,
    "outer.momentum": BELOW_1,
    "outer.warmup_merges": NOT_NEGATIVE,
    "outer.norm_guard": NOT_NEGATIVE,
    "sync.steps_per_cycle": AT_LEAST_1,
    "sync.fragments": AT_LEAST_1,
    "sync.overlap_steps": NOT_NEGATIVE,
    "sync.quorum": AT_LEAST_1,
    "sync.grace": BELOW_1,
    "sync.max_staleness": NOT_NEGATIVE,
    "sync.blend_alpha": SHARE,
    "sequence_length": AT_LEAST_1,
    "total_tokens": AT_LEAST_1,
    "seed": SEED,
}
ISLAND = {
    "batch_size": AT_LEAST_1,
    "accumulation": AT_LEAST_1,
    "mesh_data": AT_LEAST_1,
    "mesh_fsdp": AT_LEAST_1,
    "mesh_tensor": AT_LEAST_1,
    "hosts": AT_LEAST_1,
    "loss_chunk": NOT_NEGATIVE,
    "step_seconds": SECONDS,
}
PLACEMENT = {
    "bulk_channels": AT_LEAST_1,
    "time_budget_s": SOME_SECONDS,
    "outage_budget_s": SOME_SECONDS,
    "compile_budget_s": SOME_SECONDS,
    "notice_s": SECONDS,
    "merge_buffer_bytes": AT_LEAST_1,
    "snapshot_every_s": SOME_SECONDS,
    "snapshots_kept": AT_LEAST_1,
    "checkpoint_every_s": SECONDS,
    "checkpoints_kept": AT_LEAST_1,
    "evaluate_every_steps": NOT_NEGATIVE,
    "evaluate_batches": AT_LEAST_1,
    "baseline_learning_rate": NOT_NEGATIVE,
    "restarts": NOT_NEGATIVE,
    "restart_delay_s": SECONDS,
}
LAUNCH = {"coordinator_disk_gb": AT_LEAST_1}
"""By field; None, where a field may be it, is always right."""


def require_sections(config: Any, path: str = "") -> None:
    """Raises ConfigError unless the parts of a config are of the classes they are to
    be: whatever reads one relies on it."""
    for field in dataclasses.fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        kind = typing.get_type_hints(type(config))[field.name]
        if name == "islands":
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"islands = {value!r}; it must be a dict of IslandConfig by name"
                )
            for island, part in value.items():
                _require_section(f"islands[{island!r}]", part, IslandConfig)
                if not isinstance(island, str):
                    raise ConfigError(
                        f"islands has {island!r} as a name; it must be a str"
                    )
        elif dataclasses.is_dataclass(kind):
            _require_section(name, value, kind)
            require_sections(value, f"{name}.")


def _require_section(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} = {value!r}; it must be a diloco_jax.config.{kind.__name__}"
        )


def validate(config: Config) -> None:
    """Raises ConfigError naming field, values and remedy."""
    _require_section("config", config, Config)
    require_sections(config)
    run, sync, islands = config.run, config.run.sync, config.islands
    if not islands:
        raise ConfigError("islands is empty; name at least one island")
    _check_values(run, "", RUN)
    for name, island in islands.items():
        _check_name(name)
        _check_values(island, f"islands.{name}.", ISLAND)
    _check_values(config.placement, "placement.", PLACEMENT)
    _check_values(config.launch, "launch.", LAUNCH)
    check_members(run)
    if sync.quorum > len(islands):
        raise ConfigError(
            f"sync.quorum = {sync.quorum}, but there are {len(islands)} "
            f"islands ({', '.join(islands)}): no fragment could ever merge; "
            f"lower sync.quorum or add islands"
        )
    if run.model.num_heads % run.model.num_kv_heads:
        raise ConfigError(
            f"model.num_heads = {run.model.num_heads} is not a multiple of "
            f"model.num_kv_heads = {run.model.num_kv_heads}; choose a multiple"
        )
    for name, island in islands.items():
        _check_island(f"islands.{name}", island)
        if island.attention == "splash" and not run.model.factory:
            require_blocks(run.sequence_length, f"islands.{name}.")
    _check_placement(config.placement, islands)


def require_blocks(sequence_length: int, where: str = "") -> None:
    """Raises ConfigError if the attention kernel cannot work on such sequences."""
    if sequence_length % LANES:
        raise ConfigError(
            f"{where}attention = 'splash' with sequence_length = {sequence_length}: "
            f"the kernel needs a multiple of {LANES}; choose one, or attention = "
            f"'dot_product'"
        )


def _check_values(config: Any, prefix: str, bounds: Mapping[str, Bound]) -> None:
    """Choices, types and numbers, field by field."""
    for field, value, hint in _leaves(config):
        known = _choices(hint)
        if known and value not in known:
            names = list(map(str, known))
            near = suggest(str(value), names)
            raise ConfigError(
                f"{prefix}{field} = {value!r}{near}; choose from {', '.join(names)}"
            )
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            meant = ""
            if isinstance(value, str) and typing.get_origin(hint) is tuple:
                meant = f"; write ({value!r},), which is a tuple of one"
            raise ConfigError(f"{prefix}{field} = {value!r}: {error}{meant}") from error
        bound = bounds.get(field)
        if bound is None or value is None:
            continue
        _require(f"{prefix}{field}", value, bound)


def _choices(hint: Any) -> tuple[Any, ...]:
    """What a field of this type may be, if that can be listed."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found: list[Any] = []
    for member in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(member) is typing.Literal:
            found += typing.get_args(member)
        elif member is type(None):
            found.append(None)
        else:
            return ()
    return tuple(found)


def within(config: Any, bound: Bound, *fields: str) -> None:
    """Raises ConfigError unless all of these fields are in these bounds."""
    for field in fields:
        _require(field, getattr(config, field), bound)


def _require(name: str, value: float, bound: Bound) -> None:
    if not bound.holds(value):
        finite = "" if math.isfinite(value) else "finite, "
        # Otherwise nobody comes near it, and it is not worth a word.
        most = f", at most {LARGEST:.1e}" if LARGEST < value < math.inf else ""
        raise ConfigError(f"{name} = {value}; it must be {finite}{bound}{most}")


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value, type) of every field, those of nested dataclasses by their path."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, hints[field.name]


def _check_name(name: str) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
    if not name or not set(name.lower()) <= allowed or not name[0].isalnum():
        raise ConfigError(
            f"island name {name!r} has characters outside letters, digits, '-_.', or "
            f"begins with neither a letter nor a digit; rename it"
        )
    if name == COORDINATOR:
        raise ConfigError(
            f"an island is called {name!r}, which is the coordinator's name in logs "
            f"and faults; rename it"
        )


def check_batch(island: IslandConfig, prefix: str = "") -> None:
    """Raises ConfigError if mesh and accumulation rounds do not divide the batch.
    prefix: of the fields' names in the message."""
    if island.batch_size % island.batch_multiple:
        raise ConfigError(
            f"{prefix}batch_size = {island.batch_size} is not divided by mesh_data * "
            f"mesh_fsdp * accumulation = {island.mesh_data} * {island.mesh_fsdp} * "
            f"{island.accumulation} = {island.batch_multiple}; choose a multiple of "
            f"{island.batch_multiple}"
        )


def _check_island(where: str, island: IslandConfig) -> None:
    check_batch(island, f"{where}.")
    if island.devices % island.hosts:
        raise ConfigError(
            f"{where}.hosts = {island.hosts} does not divide {island.devices}, the "
            f"number of its devices (mesh_data * mesh_fsdp * mesh_tensor = "
            f"{island.mesh_data} * {island.mesh_fsdp} * {island.mesh_tensor}), of "
            f"which each host has an equal share; choose a divisor of "
            f"{island.devices}, or a larger mesh"
        )


def _check_placement(placement: Placement, islands: Mapping[str, IslandConfig]) -> None:
    if "://" in placement.workdir:
        raise ConfigError(
            f"placement.workdir = {placement.workdir!r} is no folder of this machine, "
            f"which the record log needs (it is synced to disk); give a local one, and "
            f"--checkpoints {placement.workdir} for snapshots and checkpoints"
        )
    _port("bind", placement.bind)
    if placement.advertise and not _port("advertise", placement.advertise):
        raise ConfigError(
            f"placement.advertise = {placement.advertise!r} has port 0, which nobody "
            f"can dial; give the port at which islands reach the coordinator"
        )
    for fault in parse_faults(placement.faults, islands).faults:
        if fault.step < 1:
            raise ConfigError(
                f"placement.faults has {fault.who}@{fault.step}, but steps and merges "
                f"are counted from 1: it would never strike; give a number above 0"
            )
        hosts = 1 if fault.who == COORDINATOR else islands[fault.who].hosts
        if fault.host >= hosts:
            raise ConfigError(
                f"placement.faults has {fault.who}/{fault.host}@{fault.step}, but "
                f"{fault.who} has {hosts} host{'s' * (hosts > 1)}, counted from 0: it "
                f"would never strike; choose a host below {hosts}"
            )


def _port(field: str, address: str) -> int:
    return parse_address(address, f"placement.{field}")[1]
