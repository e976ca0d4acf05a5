"""A run, its islands and their placement, in one value; rules between its fields.

The rules are beyond each field's own bounds, and need only the values themselves.
`resolving.resolve` checks that the text can be read, and the coordinator that the model
can be built, both before a run writes any file.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diloco_jax.config.family_fields import check_members
from diloco_jax.config.fields import check_fields, types_of
from diloco_jax.config.island import IslandConfig
from diloco_jax.config.launch import LaunchConfig
from diloco_jax.config.placement import Placement
from diloco_jax.config.run import RunConfig
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.files import is_bucket
from diloco_jax.observability.sinks import check_names as check_sinks
from diloco_jax.protocol.values import ISLAND_NAME
from diloco_jax.wire.addresses import LAST_PORT, bulk_address, parse_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, its islands by name, and their placement.

    Example:
      >>> from diloco_jax import Config, IslandConfig
      >>> config = Config(
      ...     islands={"v5p": IslandConfig(batch_size=4), "v6e": IslandConfig()}
      ... )
      >>> quick = config.replace("total_tokens", 50_000).validate()
      >>> round(quick.merges_per_fragment(), 2)
      1.36
    """

    run: RunConfig = RunConfig()
    islands: dict[str, IslandConfig] = dataclasses.field(
        default_factory=lambda: {"a": IslandConfig()}
    )
    placement: Placement = Placement()
    launch: LaunchConfig = dataclasses.field(default_factory=LaunchConfig)

    def validate(self) -> Config:
        """Return self; raise ConfigError naming field, values and remedy."""
        validate(self)
        return self

    def replace(self, name: str, value: Any) -> Config:
        """Return a copy with one field changed, for variations of a config.

        Example:
          >>> from diloco_jax import Config
          >>> config = Config().replace("sync.grace", 0).replace("total_tokens", 5000)
          >>> config.replace("islands.a.batch_size", 4).islands["a"].batch_size
          4

        Args:
          name: of the field, dotted, as an option of the command line has it
            ("sync.grace", "islands.NAME.batch_size"); "run." and "placement." may
            stand in front.
          value: its new value, whose type and bounds are checked. Rules between fields
            are checked where the config is used, so that fields may be changed one
            after the other.

        Raises:
          ConfigError: there is no such field, or the value is not one for it.
        """
        changed: Config = replaced(self, name, value)
        return changed

    def island(self, name: str) -> IslandConfig:
        """Return an island's config; ConfigError with the nearest name if there is
        none."""
        if name not in self.islands:
            raise ConfigError(
                f"no island {name!r} in this config{suggest(name, self.islands)}; "
                f"it has {', '.join(self.islands)}"
            )
        return self.islands[name]

    def merges_per_fragment(self) -> float:
        """Return the merges each fragment will see if all islands are equally fast."""
        per_step = sum(i.batch_size for i in self.islands.values())
        steps = self.run.total_tokens / (per_step * self.run.sequence_length)
        return steps / self.run.sync.steps_per_cycle


URLS = ("https://", "http://")
BUCKETS = ("gs://", "s3://")
LANES = 128
"""Tokens of a block of the attention kernel for TPUs, which needs whole blocks."""


def validate(config: Config) -> None:
    """Raise ConfigError naming field, values and remedy."""
    require_sections(config)
    run, sync, islands = config.run, config.run.sync, config.islands
    if not islands:
        raise ConfigError("islands is empty; name at least one island")
    for name in islands:
        check_name(name)
    parts = {f"islands.{name}.": island for name, island in islands.items()}
    given = {"": run, **parts, "placement.": config.placement, "launch.": config.launch}
    for prefix, part in given.items():
        for inside, section in _sections(part, prefix):
            check_fields(section, inside)
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
    _check_workers(config.placement, sync.fragments)


def require_blocks(sequence_length: int, where: str = "") -> None:
    """Raise ConfigError if the attention kernel cannot divide the sequences into
    blocks.
    """
    if sequence_length % LANES:
        raise ConfigError(
            f"{where}attention = 'splash' with sequence_length = {sequence_length}: "
            f"the kernel needs a multiple of {LANES}; choose one, or attention = "
            f"'dot_product'"
        )


def require_sections(config: Any, path: str = "") -> None:
    """Raise ConfigError unless the parts of a config are of the classes they should
    be, which every reader of a config relies on."""
    for field in dataclasses.fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        kind = types_of(type(config))[field.name]
        if name == "islands":
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"islands = {value!r}; it must be a dict of IslandConfig by name"
                )
            for island, part in value.items():
                require_section(f"islands[{island!r}]", part, IslandConfig)
                if not isinstance(island, str):
                    raise ConfigError(
                        f"islands has {island!r} as a name; it must be a str"
                    )
        elif dataclasses.is_dataclass(kind):
            require_section(name, value, kind)
            require_sections(value, f"{name}.")


def require_section(name: str, value: Any, kind: Any) -> None:
    """Raise ConfigError unless a part of a config is of its class."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} = {value!r}; it must be a diloco_jax.config.{kind.__name__}"
        )


def _sections(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield a dataclass and those inside it, each with the prefix of its fields."""
    yield prefix, config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _sections(value, f"{prefix}{field.name}.")


def check_name(name: str) -> None:
    if not re.search(ISLAND_NAME, name):
        raise ConfigError(
            f"island name {name!r} has characters outside letters, digits, '-_.', "
            f"begins with neither a letter nor a digit, or is longer than 64 "
            f"characters; rename it"
        )
    if name == COORDINATOR:
        raise ConfigError(
            f"an island is called {name!r}, which is the coordinator's name in logs "
            f"and faults; rename it"
        )


def check_batch(island: IslandConfig, prefix: str = "") -> None:
    """Raise ConfigError if mesh and accumulation rounds do not divide the batch.
    prefix: put before the fields' names in the message."""
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
    if is_bucket(placement.workdir):
        raise ConfigError(
            f"placement.workdir = {placement.workdir!r} is no folder of this machine, "
            f"which the record log needs (it is synced to disk); give a local one, and "
            f"--checkpoints {placement.workdir} for snapshots and checkpoints"
        )
    where = placement.checkpoints
    if is_bucket(where) and not where.startswith(BUCKETS):
        raise ConfigError(
            f"placement.checkpoints = {where!r} is no folder, and a bucket's begins "
            f"with {' or '.join(BUCKETS)}; give one of them"
        )
    for name in placement.admit:
        check_name(name)
    known = (*islands, *placement.admit)
    if placement.first_from and placement.first_from not in known:
        raise ConfigError(
            f"placement.first_from = {placement.first_from!r} (--init from-island:"
            f"NAME): the run has no such island"
            f"{suggest(placement.first_from, known)}; it has {', '.join(known)}"
        )
    _port("bind", placement.bind)
    if placement.advertise and not _port("advertise", placement.advertise):
        raise ConfigError(
            f"placement.advertise = {placement.advertise!r} has port 0, which no "
            f"island can dial; give the port at which islands reach the coordinator"
        )
    check_sinks(placement.sinks)
    if placement.metrics_bind:
        _port("metrics_bind", placement.metrics_bind)
    if placement.alert_url and not placement.alert_url.startswith(URLS):
        raise ConfigError(
            f"placement.alert_url = {placement.alert_url!r} begins with none of "
            f"{', '.join(URLS)}; give the URL of a webhook"
        )
    try:
        shlex.split(placement.alert_command)
    except ValueError as error:
        raise ConfigError(
            f"placement.alert_command = {placement.alert_command!r} is no command "
            f"({error}); close its quotes"
        ) from error
    for fault in parse_faults(placement.faults, islands, placement.workers).faults:
        if fault.step < 1:
            raise ConfigError(
                f"placement.faults has {fault.who}@{fault.step}, but steps and merges "
                f"are counted from 1: it would never strike; give a number above 0"
            )
        hosts = islands[fault.who].hosts if fault.who in islands else 1
        if fault.host >= hosts:
            raise ConfigError(
                f"placement.faults has {fault.who}/{fault.host}@{fault.step}, but "
                f"{fault.who} has {hosts} host{'s' * (hosts > 1)}, counted from 0: it "
                f"would never strike; choose a host below {hosts}"
            )


def _check_workers(placement: Placement, fragments: int) -> None:
    if placement.workers > fragments:
        raise ConfigError(
            f"placement.workers = {placement.workers}, but there are {fragments} "
            f"fragments; give at most as many, or more sync.fragments"
        )
    given = placement.worker_addresses
    if not given:
        return
    if len(given) != placement.workers or placement.workers < 2:
        raise ConfigError(
            f"placement.worker_addresses has {len(given)} addresses, and "
            f"placement.workers = {placement.workers}; give one address for each of at "
            f"least 2 workers, or none"
        )
    for number, address in enumerate(given):
        if not 0 < _port(f"worker_addresses[{number}]", address) < LAST_PORT:
            raise ConfigError(
                f"placement.worker_addresses has {address!r}: the coordinator dials "
                f"that port, and islands the next one; give a port from 1 to "
                f"{LAST_PORT - 1}"
            )
    ports = [port for own in given for port in (own, bulk_address(own))]
    if len(set(ports)) < len(ports):
        raise ConfigError(
            f"placement.worker_addresses = {', '.join(given)} has a port twice; each "
            f"worker needs its own two, that of its address and the next one"
        )


def _port(field: str, address: str) -> int:
    return parse_address(address, f"placement.{field}")[1]


def with_paths(config: Config, changed: Callable[[str], str]) -> Config:
    """Return the config with each of its folders and files changed; empty ones stay."""
    placement, data = config.placement, config.run.data
    folders: dict[str, Any] = {
        name: changed(getattr(placement, name))
        for name in ("workdir", "certificates", "checkpoints")
    }
    paths, tokenizer = tuple(map(changed, data.paths)), changed(data.tokenizer)
    data = dataclasses.replace(data, paths=paths, tokenizer=tokenizer)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, data=data),
        placement=dataclasses.replace(placement, **folders),
    )


SECTIONS = ("run", "placement")
"""Sections whose fields go by their own names, as on the command line."""


def replaced(config: Any, name: str, value: Any) -> Any:
    """Return a copy of a config in which the field of this dotted name has this value.

    Raises ConfigError if there is no such field, or the value is not one for it. Rules
    between several fields are not checked.
    """
    head, _, rest = name.partition(".")
    for section in SECTIONS:
        if head in _names(getattr(config, section)):
            head, rest = section, name
    if head not in _names(config):
        known = list(_paths(config))
        raise ConfigError(
            f"no field {name!r} in this config{suggest(name, known)}; the help of any "
            f"command that takes a config lists them all (diloco run --help)"
        )
    if not rest:
        # Rules of a whole section are checked where the config is used.
        return dataclasses.replace(config, **{head: value})
    own = _with(getattr(config, head), rest, value, name)
    return dataclasses.replace(config, **{head: own})


def _with(section: Any, path: str, value: Any, name: str) -> Any:
    """Return the section or dict with the value at `path`; `name` is for messages."""
    head, _, rest = path.partition(".")
    known = list(section) if isinstance(section, dict) else _names(section)
    if head not in known:
        found = f"{name.removesuffix(path)}{head}"
        raise ConfigError(
            f"no field {found!r} in this config{suggest(head, known)}; "
            f"there are {', '.join(known)}"
        )
    own = section[head] if isinstance(section, dict) else getattr(section, head)
    if rest:
        if not isinstance(own, dict) and not dataclasses.is_dataclass(own):
            raise ConfigError(
                f"{name}: {name.removesuffix(f'.{rest}')} is a value, {own!r}, and has "
                f"no fields"
            )
        value = _with(own, rest, value, name)
    elif type(own) is not type(value) and dataclasses.is_dataclass(own):
        raise ConfigError(f"{name} = {value!r}: give a {type(own).__name__}")
    if isinstance(section, dict):
        return section | {head: value}
    made = dataclasses.replace(section, **{head: value})
    if not rest:
        check_fields(made, name.removesuffix(head))
    return made


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the name of every field, sections of `SECTIONS` without their own."""
    for head in _names(config):
        own = getattr(config, head)
        yield f"{prefix}{head}"
        inner = "" if not prefix and head in SECTIONS else f"{prefix}{head}."
        if dataclasses.is_dataclass(own):
            yield from _paths(own, inner)
        elif isinstance(own, dict):
            for key, value in own.items():
                if dataclasses.is_dataclass(value):
                    yield from _paths(value, f"{inner}{key}.")


def _names(section: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]
