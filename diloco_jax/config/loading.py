"""Read a `Config` by path or name; write and read `config.json`; trust in its code.

A configs file is a Python file with a function `config()` that returns a `Config`.
Wherever a command takes such a file, it takes a run's `config.json` too, or the name of
a config that comes with the package, those of the folder `configs/`.

Opening a folder that somebody else made executes nothing unless the user says so.
Whoever writes a config that names code seals it with a key of their own, which lies in
their home. A folder without that seal, or with another config, is foreign. The code
itself is not sealed: it may change, as it does while somebody works on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import re
import runpy
import secrets
import traceback
import typing
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import config as configs
from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.config.config import require_sections, with_paths
from diloco_jax.config.fields import types_of
from diloco_jax.config.run import RunConfig
from diloco_jax.core.members import find_beside
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.files import (
    absolute,
    expand,
    of_home,
    parse_json,
    write_json,
    write_text,
)

UNKNOWN_FIELD = re.compile(
    r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
)
"""Python's message about a keyword argument that a class does not have."""


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
    user's seal beside them, if they name code (`seal`)."""
    write_json(dataclasses.asdict(config), path)
    seal(config.run, Path(path))


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
    before = config.placement.workdir

    def here(path: str) -> str:
        inside = before and Path(path).is_relative_to(before)
        return str(workdir / Path(path).relative_to(before)) if inside else path

    return with_paths(config, here)


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
    if named_file := find_named(str(path)):
        return named_file
    raise ConfigError(
        f"no config file {str(path)!r}{_suggest_file(path)}; give the path to a .py "
        f"file or to a run's config.json, or one of the names "
        f"{', '.join(named_configs())}"
    )


def _suggest_file(path: Path) -> str:
    if path.suffix == path.name or (path.parent == Path() and not path.suffix):
        return suggest(path.name, named_configs())
    if not path.parent.is_dir():
        return ""
    return suggest(path.name, sorted(p.name for p in path.parent.glob("*.py")))


NAMED_FOLDER = Path(__file__).parents[1] / "configs"
"""A link to the checkout's `configs/`; in a wheel, a copy of it."""


def named_configs() -> list[str]:
    """Return the names, in order."""
    return sorted(path.stem for path in NAMED_FOLDER.glob("*.py"))


def find_named(name: str) -> Path | None:
    """Return the file of the config of this name; None if there is none."""
    path = NAMED_FOLDER / f"{name}.py"
    return path if name in named_configs() else None


def title_of_named(name: str) -> str:
    """Return the first line of a config's docstring, without running its code."""
    text = (NAMED_FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return text.splitlines()[0].strip('"')


SEAL = ".seal"
"""Ending of the file beside a config."""
KEY_BYTES = 32


def named_code(run: RunConfig) -> dict[str, str]:
    """Return the code outside of the package that a config names, by field: as
    "path/to/file.py:name" or "package.module:name"."""
    sections = {name: getattr(run, name) for name in types_of(RunConfig)}
    return {
        f"{name}.{field.name}": value
        for name, section in sections.items()
        if dataclasses.is_dataclass(section)
        for field in dataclasses.fields(section)
        if field.metadata.get("code")
        if ":" in (value := getattr(section, field.name) or "")
    }


def seal(run: RunConfig, path: Path) -> None:
    """Write the seal of a config at `path`, if the config names code.

    If the user has no home folder that can be written, there is no seal, and the run's
    folder counts as foreign.
    """
    if not named_code(run):
        return
    with contextlib.suppress(OSError, ValueError):
        write_text(_digest(_key(make=True), run), path.with_suffix(SEAL))


def require_trust(run: RunConfig, path: Path, *, trust_code: bool) -> None:
    """Raise ConfigError if a config at `path` names code and is foreign.

    trust_code: execute the code all the same; the folder then gets the user's seal.
    """
    if trust_code or not named_code(run):
        seal(run, path)
        return
    with contextlib.suppress(OSError, ValueError):
        wanted = _digest(_key(make=False), run)
        found = path.with_suffix(SEAL).read_bytes()
        if hmac.compare_digest(found, wanted.encode()):
            return
    require_trust_flag(run, f"{path}", trust_code=False)


def require_trust_flag(run: RunConfig, whose: str, *, trust_code: bool) -> None:
    """Raise ConfigError if a foreign config names code, unless `trust_code` is True.
    whose: names the config in the message."""
    code = named_code(run)
    if trust_code or not code:
        return
    named = ", ".join(f"{field} = {value!r}" for field, value in code.items())
    raise ConfigError(
        f"{whose} names code ({named}), and was not written by this user on this "
        f"machine: opening it executes that code; read it, then give --trust-code"
    )


def _digest(key: bytes, run: RunConfig) -> str:
    sealed = json.dumps([named_code(run), run.fingerprint()], sort_keys=True)
    return hmac.new(key, sealed.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return the user's key; make it if there is none. Raises OSError, or ValueError if
    it is damaged."""
    path = of_home("XDG_STATE_HOME", "~/.local/state") / "diloco" / "key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole = path.with_name(f".key-{secrets.token_hex(8)}")
        descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # Another process was faster.
                os.link(whole, path)
        finally:
            whole.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} has {len(key)} bytes, expected {KEY_BYTES}")
    return key
