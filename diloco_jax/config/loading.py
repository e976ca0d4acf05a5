"""Read a `Config` from a path; write and read `config.json`.

A configs file is a Python file with a function `config()` that returns a `Config`.
Wherever a command takes such a file, it takes a run's `config.json` too.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
import traceback
import typing
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import config as configs
from diloco_jax import run_files
from diloco_jax.config import Config, named, trust
from diloco_jax.config.fields import types_of
from diloco_jax.config.validation import require_sections
from diloco_jax.core.members import find_beside
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.files import absolute, expand, parse_json, write_json

# Python's message about a keyword argument that a class does not have.
UNKNOWN_FIELD = re.compile(
    r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
)


def read_config(path: str | Path) -> Config:
    """Return the unchanged `Config` of a configs file, of a `config.json`, or of a
    config that comes with the package, by its name.

    Example:
      >>> from diloco_jax import read_config
      >>> sorted(read_config("quickstart").islands)
      ['v5p-a', 'v5p-b', 'v6e']

    Raises:
      ConfigError: there is no such config, or its code fails.
    """
    path = _found(expand(path))
    if path.suffix == ".json":
        return read_config_json(path)
    if path.suffix != ".py":
        raise ConfigError(
            f"{str(path)!r} is neither a .py file nor a config.json; give the path to "
            f"a configs/*.py file"
        )
    find_beside(path)
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be executed{_reason(error, path)}") from error
    make = names.get("config")
    if not callable(make):
        raise ConfigError(
            f"{path} defines no function config(); add `def config() -> Config: ...`"
        )
    try:
        config = make()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config() of {path} failed{_reason(error, path)}") from error
    if not isinstance(config, Config):
        raise ConfigError(
            f"config() of {path} returned {type(config).__name__}; it must return a "
            f"diloco_jax.config.Config"
        )
    require_sections(config)
    return config


def write_config_json(config: Config, path: str | Path) -> None:
    """Write all fields, those local to this machine included, atomically; and the
    user's seal beside them, if they name code (`trust.py`)."""
    write_json(dataclasses.asdict(config), path)
    trust.seal(config.run, config.placement, Path(path))


def read_config_json(path: str | Path) -> Config:
    """Read a file of `write_config_json`; ConfigError if there is no such file, or it
    has unknown fields or wrong types. If the workdir was moved or copied, paths inside
    it are those of where it is now."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no {path}; give the workdir of a run")
    try:
        fields = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); restore it from a copy"
        ) from error
    config = from_builtins(fields, path)
    if not (path.parent / run_files.FACTS).is_file():
        return config
    return _moved(config, Path(absolute(str(path.parent))))


def _moved(config: Config, workdir: Path) -> Config:
    """Return the config of the run in `workdir`, which may have begun elsewhere."""
    placement, data = config.placement, config.run.data
    before = placement.workdir

    def here(path: str) -> str:
        inside = before and Path(path).is_relative_to(before)
        return str(workdir / Path(path).relative_to(before)) if inside else path

    names = ("workdir", "certificates", "checkpoints")
    moved: dict[str, Any] = {name: here(getattr(placement, name)) for name in names}
    data = dataclasses.replace(
        data, paths=tuple(map(here, data.paths)), tokenizer=here(data.tokenizer)
    )
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, data=data),
        placement=dataclasses.replace(placement, **moved),
    )


def from_builtins(fields: Any, source: object) -> Config:
    """Return the config that `dataclasses.asdict` made these fields of; ConfigError,
    which names the source, for unknown fields or wrong types."""
    _refuse_unknown(Config, fields, "", source)
    try:
        return msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def _refuse_unknown(expected: Any, value: Any, where: str, source: object) -> None:
    """Walk dataclasses and dicts of them; msgspec checks the other values."""
    if typing.get_origin(expected) is dict and isinstance(value, dict):
        for name, item in value.items():
            _refuse_unknown(
                typing.get_args(expected)[1], item, f"{where}{name}.", source
            )
    if not dataclasses.is_dataclass(expected) or not isinstance(value, dict):
        return
    known = types_of(expected)
    for name, item in value.items():
        if name not in known:
            raise ConfigError(
                f"{source} has an unknown field {where}{name}"
                f"{suggest(name, known)}; remove or rename it"
            )
        _refuse_unknown(known[name], item, f"{where}{name}.", source)


def _reason(error: BaseException, path: Path) -> str:
    """Name the line of a configs file where an error arose, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f" in line {lines[-1]}" if lines else ""
    misnamed = UNKNOWN_FIELD.match(str(error))
    kind = getattr(configs, misnamed[1], None) if misnamed else None
    if misnamed and dataclasses.is_dataclass(kind):
        near = suggest(misnamed[2], [f.name for f in dataclasses.fields(kind)])
        return f"{where}: {misnamed[1]} has no field {misnamed[2]!r}{near}"
    return f"{where}: {type(error).__name__}: {error}"


def _found(path: Path) -> Path:
    """Return the file itself, or that of the config of this name."""
    if path.is_file():
        return path
    if named_file := named.find(str(path)):
        return named_file
    raise ConfigError(
        f"no config file {str(path)!r}{_suggest_file(path)}; give the path to a .py "
        f"file or to a run's config.json, or one of the names "
        f"{', '.join(named.names())}"
    )


def _suggest_file(path: Path) -> str:
    if path.suffix == path.name or (path.parent == Path() and not path.suffix):
        return suggest(path.name, named.names())
    if not path.parent.is_dir():
        return ""
    return suggest(path.name, sorted(p.name for p in path.parent.glob("*.py")))
