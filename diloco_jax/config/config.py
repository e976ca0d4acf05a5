"""A run, its islands and their placement, in one value; rules between its fields.

The rules are beyond each field's own bounds, and need only the values themselves.
`resolving.resolve` checks that the text can be read, and the coordinator that the model
can be built, both before a run writes any file.

Some fields name a member of an open family. A member from outside the package is tried
on a tiny piece before anything starts. That is done in a separate process on the CPU,
since this process may not have told JAX yet which platform to use.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diloco_jax.config.fields import as_html, check_fields, types_of
from diloco_jax.config.placement import (
    ZONE,
    IslandConfig,
    LaunchConfig,
    Placement,
    region_of,
    zones_of,
)
from diloco_jax.config.run import ModelConfig, RunConfig
from diloco_jax.core.families import (
    ADOPT_RULES,
    CODECS,
    INNER_OPTIMIZERS,
    MERGE_RULES,
    OUTER_OPTIMIZERS,
    WEIGHTINGS,
)
from diloco_jax.core.members import MAIN, Family, importable, refresh
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.files import is_bucket
from diloco_jax.observability.sinks import check_names as check_sinks
from diloco_jax.protocol.messages import ISLAND_NAME
from diloco_jax.wire.addresses import LAST_PORT, bulk_address, parse_address

FIELDS: dict[str, Family[Any]] = {
    "sync.weighting": WEIGHTINGS,
    "sync.merge": MERGE_RULES,
    "sync.adopt": ADOPT_RULES,
    "sync.codec_up": CODECS,
    "sync.codec_down": CODECS,
    "outer.optimizer": OUTER_OPTIMIZERS,
    "inner.optimizer": INNER_OPTIMIZERS,
}
COSTLY = {
    ("int2", "adamw"): "+1.1 % ± 0.5 (3 pairs, 0.04 M parameters, H = 12)",
    ("int2", "muon"): "+0.9 % ± 0.8 (3 pairs, 0.1 M parameters, H = 12)",
}
"""Loss over int8, by codec and inner optimizer, of pairs that no run begins with: its
upper end is above the 0.5 % that a codec may cost (docs/design/codecs.md)."""
TRIAL = "from diloco_jax.config.config import try_members; try_members()"
"""Program of the separate process."""
TRIAL_S = 300.0
"""Longest time for trying the members of a config."""

Named = tuple[tuple[str, str], ...]
"""Pairs of a field and the member's name in it."""


def check_members(run: RunConfig) -> None:
    """Raise ConfigError if a field names no member, or one from outside the package
    that fails on a tiny piece. The error names the field, and the line at fault."""
    outside = []
    for field, family in FIELDS.items():
        section, attribute = field.split(".")
        name = getattr(getattr(run, section), attribute)
        if name is None or name in family.table:
            continue
        if name.startswith(MAIN) or (":" not in name and not family.otherwise):
            check_member(field, family, name)
            continue
        outside.append((field, name))
    for factory in (run.model.factory, run.data.factory):
        refresh(factory)
    stamps = tuple(refresh(name) for _, name in outside)
    if outside and (wrong := _try(tuple(outside), os.getcwd(), stamps)):
        raise ConfigError(wrong)


def require_files(run: RunConfig) -> None:
    """Raise ConfigError if a field names a member that only this process knows."""
    for field in FIELDS:
        section, attribute = field.split(".")
        name = getattr(getattr(run, section), attribute)
        if name is not None and name.startswith(MAIN):
            raise ConfigError(
                f"{field} = {name!r}: only this process can import it, and a run has "
                f"others; write it into a file and give 'path/to/file.py:"
                f"{name.removeprefix(MAIN)}'"
            )


def check_member(field: str, family: Family[Any], name: str) -> None:
    """Raise ConfigError, naming the field, unless the family has that member."""
    try:
        family.check(name)
    except ValueError as error:
        raise ConfigError(f"{field} = {name!r}: {error}") from error


@functools.cache
def _try(named: Named, folder: str, stamps: tuple[object, ...]) -> str:
    """Try these members; return the message about the first that fails, or "".

    folder: the folder that relative paths start from. stamps: what changes with their
    files, which are tried again then."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL, json.dumps(named)],
            env={**os.environ, **importable(), "JAX_PLATFORMS": "cpu"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{_brief(named)}: trying it on a tiny piece took over {TRIAL_S:g} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return (
            f"{_brief(named)}: trying it on a tiny piece ended with exit code "
            f"{done.returncode} ({last})"
        )
    # Output of the member itself comes before this line.
    wrong: str = json.loads(done.stdout.splitlines()[-1])
    return wrong


def _brief(named: Named) -> str:
    return ", ".join(f"{field} = {name!r}" for field, name in named)


def try_members() -> None:
    """Try the members of the command line; print the message about the first that
    fails, or "", as JSON."""
    try:
        for field, name in json.loads(sys.argv[1]):
            check_member(field, FIELDS[field], name)
    except ConfigError as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps(""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, its islands by name, and their placement.

    Example:
      >>> from diloco_jax import Config, IslandConfig
      >>> config = Config(
      ...     islands={"v5p": IslandConfig(batch_size=4), "v6e": IslandConfig()}
      ... )
      >>> quick = config.replace("total_tokens", 50_000).validate()
      >>> round(quick.steps(), 2)
      32.55
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

    def replace(self, name: str | Mapping[str, Any], value: Any = None) -> Config:
        """Return a copy with a field changed, or several, for variations of a config.

        Example:
          >>> from diloco_jax import Config
          >>> config = Config().replace({"sync.grace": 0, "total_tokens": 5000})
          >>> config.replace("islands.a.batch_size", 4).islands["a"].batch_size
          4

        Args:
          name: of the field, dotted, as an option of the command line has it
            ("sync.grace", "islands.NAME.batch_size"); "run." and "placement." may
            stand in front. Or a dict of values by such names.
          value: its new value, whose type and bounds are checked. Rules between fields
            are checked where the config is used, so that fields may be changed one
            after the other.

        Raises:
          ConfigError: there is no such field, or the value is not one for it.
        """
        changed = self
        for one, new in (name if isinstance(name, Mapping) else {name: value}).items():
            changed = replaced(changed, one, new)
        return changed

    def _repr_html_(self) -> str:
        """Show a notebook what differs from the defaults."""
        usual = dict(
            _named(Config(islands=dict.fromkeys(self.islands, IslandConfig())))
        )
        given = {"islands": ", ".join(self.islands)}
        for name, value in _named(self):
            if not _entries(value) and value != usual.get(name, {}):
                given[name] = repr(value)
        return as_html(given)

    def island(self, name: str) -> IslandConfig:
        """Return an island's config; ConfigError with the nearest name if there is
        none."""
        if name not in self.islands:
            raise ConfigError(
                f"no island {name!r} in this config{suggest(name, self.islands)}; "
                f"it has {', '.join(self.islands)}"
            )
        return self.islands[name]

    def regions(self) -> dict[str, str]:
        """Return the region of each island that is in one with others: its own field,
        or else that of all its zones in `launch.zones`."""
        found = {}
        for name, island in self.islands.items():
            of_zones = {*map(region_of, zones_of(self.launch.zones.get(name, "")))}
            zones_say = of_zones.pop() if len(of_zones) == 1 else ""
            found[name] = island.region or zones_say
        known = collections.Counter(found.values())
        return {name: r for name, r in found.items() if r and known[r] > 1}

    def steps(self) -> float:
        """Return the steps that each island makes if all are equally fast."""
        per_step = sum(i.batch_size for i in self.islands.values())
        return self.run.total_tokens / (per_step * self.run.sequence_length)

    def merges_per_fragment(self) -> float:
        """Return the merges each fragment will see then."""
        return self.steps() / self.run.sync.cycle


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
    require_switches(run.model)
    for name, island in islands.items():
        _check_island(f"islands.{name}", island)
        if not run.model.factory:
            _check_experts(f"islands.{name}", island, run.model.experts)
        if island.attention == "splash" and not run.model.factory:
            require_blocks(run.sequence_length, f"islands.{name}.")
    _check_placement(config.placement, islands)
    _check_places(config.launch, islands)
    _check_workers(config.placement, sync.fragments)


def require_worth(run: RunConfig) -> None:
    """Raise ConfigError if a codec is known to cost too much of the loss; emulations
    still measure it."""
    optimizer = run.inner.optimizer
    for field in ("codec_up", "codec_down"):
        codec = getattr(run.sync, field)
        if cost := COSTLY.get((codec, optimizer)):
            raise ConfigError(
                f"sync.{field} = {codec!r} with inner.optimizer = {optimizer!r}: "
                f"over int8 they cost {cost} of the loss, and a codec may cost 0.5 %; "
                f"set sync.{field} = 'int4'"
            )


def require_switches(model: ModelConfig) -> None:
    """Raise ConfigError if switches of the model do not go together."""
    if model.experts and model.experts_per_token > model.experts:
        raise ConfigError(
            f"model.experts_per_token = {model.experts_per_token}, but model.experts "
            f"= {model.experts}; choose at most as many"
        )
    if model.experts and model.mlp_bias:
        raise ConfigError(
            f"model.mlp_bias = True with model.experts = {model.experts}: experts have "
            f"no biases; set one of both to its default"
        )
    if model.qk_norm_whole and not model.qk_norm:
        raise ConfigError(
            "model.qk_norm_whole = True with model.qk_norm = False; set "
            "model.qk_norm = True, or leave both"
        )


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
            f"mesh_fsdp * mesh_expert * accumulation = "
            f"{' * '.join(map(str, (*island.mesh[:3], island.accumulation)))} = "
            f"{island.batch_multiple}; choose a multiple of {island.batch_multiple}"
        )


def _check_island(where: str, island: IslandConfig) -> None:
    check_batch(island, f"{where}.")
    if island.devices % island.hosts:
        raise ConfigError(
            f"{where}.hosts = {island.hosts} does not divide {island.devices}, the "
            f"number of its devices (mesh_data * mesh_fsdp * mesh_expert * "
            f"mesh_tensor = {' * '.join(map(str, island.mesh))}), of which each host "
            f"has an equal share; choose a divisor of {island.devices}, or a larger "
            f"mesh"
        )


def _check_experts(where: str, island: IslandConfig, experts: int) -> None:
    if island.mesh_expert > 1 and (not experts or experts % island.mesh_expert):
        raise ConfigError(
            f"{where}.mesh_expert = {island.mesh_expert} does not divide "
            f"model.experts = {experts} into equal parts; choose a divisor, or spread "
            f"by mesh_data or mesh_fsdp"
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
    for fault in parse_faults(placement.faults, islands, placement.workers).faults:
        if fault.step < (1 if fault.factor is None else 0):
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


def _check_places(launch: LaunchConfig, islands: Mapping[str, IslandConfig]) -> None:
    for field in ("zones", "purchase", "clusters"):
        for name, value in getattr(launch, field).items():
            if name not in islands:
                raise ConfigError(
                    f"launch.{field}.{name} = {value!r}: the run has no such island"
                    f"{suggest(name, islands)}; it has {', '.join(islands)}"
                )
    written = {f"zones.{name}": zones_of(text) for name, text in launch.zones.items()}
    if launch.coordinator_zone:
        written["coordinator_zone"] = (launch.coordinator_zone,)
    for field, zones in written.items():
        for zone in zones:
            if not ZONE.fullmatch(zone):
                raise ConfigError(
                    f"launch.{field} = {','.join(zones)!r}: {zone!r} is no zone; write "
                    f"a region and a letter, such as 'us-central1-a'"
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
    path = name.split(".")
    for section in SECTIONS:
        if path[0] in _entries(getattr(config, section)):
            path = [section, *path]
    if path[0] not in _entries(config):
        known = [path for path, _ in _named(config)]
        raise ConfigError(
            f"no field {name!r} in this config{suggest(name, known)}; the help of any "
            f"command that takes a config lists them all (diloco run --help all)"
        )
    return _with(config, path, value, name)


def _with(section: Any, path: list[str], value: Any, name: str) -> Any:
    """Return the section or dict with the value at `path`; `name` is for messages."""
    (head, *rest), own = path, _entries(section)
    if isinstance(section, dict):  # A name may have dots.
        whole = ".".join(path)
        named = (n for n in own if f"{whole}.".startswith(f"{n}."))
        head = max(named, key=len, default=head)
        rest = path[head.count(".") + 1 :]
    before = ".".join(name.split(".")[: -len(path)])
    if head not in own:
        raise ConfigError(
            f"no field {'.'.join(filter(None, (before, head)))!r} in this config"
            f"{suggest(head, own)}; there are {', '.join(own)}"
        )
    if rest:
        if not _entries(own[head]) and not isinstance(own[head], dict):
            raise ConfigError(
                f"{name}: {name.removesuffix('.' + '.'.join(rest))} is a value, "
                f"{own[head]!r}, and has no fields"
            )
        value = _with(own[head], rest, value, name)
    elif dataclasses.is_dataclass(own[head]) and type(own[head]) is not type(value):
        raise ConfigError(f"{name} = {value!r}: give a {type(own[head]).__name__}")
    if isinstance(section, dict):
        return section | {head: value}
    made = dataclasses.replace(section, **{head: value})
    if not rest and not isinstance(section, Config):
        # Rules of a whole section are checked where the config is used.
        check_fields(made, name.removesuffix(head))
    return made


def _entries(section: Any) -> dict[str, Any]:
    """Return the fields of a section, or the entries of a dict; {} of a value."""
    if isinstance(section, dict):
        return section
    if not dataclasses.is_dataclass(section):
        return {}
    fields = dataclasses.fields(section)
    return {field.name: getattr(section, field.name) for field in fields}


def _named(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field and section with its name, as `replace` takes it: sections of
    `SECTIONS` have none."""
    for head, own in _entries(section).items():
        yield f"{prefix}{head}", own
        inner = "" if not prefix and head in SECTIONS else f"{prefix}{head}."
        yield from _named(own, inner)
