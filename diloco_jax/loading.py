"""From a path and command-line options to a `Config`, and to `config.json` and back.

A configs file is a Python file with a function `config()` that returns a `Config`.
Options override single fields: those of `RunConfig` and `Placement` by their names
(`--sync.quorum 2`, `--workdir runs/x`), an island's as `--islands.NAME.batch-size 4`.
Where a path to a config is asked for, the `config.json` of a run will do as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import runpy
import tempfile
import traceback
import typing
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from diloco_jax import config as configs
from diloco_jax.config import (
    Config,
    ConfigError,
    IslandConfig,
    LaunchConfig,
    OuterConfig,
    Placement,
    RunConfig,
    suggest,
)
from diloco_jax.paths import expand, naming, with_absolute_paths
from diloco_jax.validation import require_sections

if TYPE_CHECKING:
    from diloco_jax.core.outer.presets import OuterPreset

T = TypeVar("T")

# What Python says of a keyword argument that a class does not have.
UNKNOWN_FIELD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword .* '(\w+)'")


# Messages and pages call these fields so; their options have no prefix.
PREFIX = re.compile(r"^--(?:run|placement)\.")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A command without options of its own."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config at `path` with the fields named in `overrides` replaced, validated.

    Raises ConfigError; an unknown or malformed option ends the process with code 2
    and a suggestion on standard error, as argument parsers do.
    """
    return parse_options(
        read_config(path), overrides, NoOptions(), f"diloco run {path}"
    )[0]


def parse_options(
    config: Config,
    arguments: Sequence[str],
    options: T,
    prog: str,
    *,
    launches: bool = False,
) -> tuple[Config, T]:
    """As `load_config`, with a command's own options beside the config's fields.

    options: a dataclass instance whose fields, with their values as defaults, become
    options of the same names. prog: what the help calls the command. launches: the
    command is one for which `LaunchConfig` is of interest; others' help has it not.
    """
    import tyro

    bare = tyro.conf.arg(name="")
    # What is suppressed is not understood either.
    hidden = not launches and not {"-h", "--help"}.isdisjoint(arguments)
    shown = tyro.conf.Suppress[LaunchConfig] if hidden else LaunchConfig
    parsed_type = dataclasses.make_dataclass(
        "Options",
        [
            ("own", Annotated[type(options), bare]),
            ("run", Annotated[RunConfig, bare]),
            ("islands", dict[str, IslandConfig]),
            ("placement", Annotated[Placement, bare]),
            ("launch", shown),
        ],
        frozen=True,
    )
    with warnings.catch_warnings():
        # Of values of a wrong type, which `validate` names.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"tyro\b")
        parsed: Any = tyro.cli(
            parsed_type,
            prog=prog,
            description="Options override what the config says.",
            args=[PREFIX.sub("--", argument) for argument in arguments],
            default=parsed_type(
                options, config.run, config.islands, config.placement, config.launch
            ),
            registry=numbers(),
        )
    config = Config(
        run=parsed.run,
        islands=parsed.islands,
        placement=parsed.placement,
        launch=parsed.launch,
    )
    return config.validate(), parsed.own


def numbers() -> Any:
    """Lets tyro read 1.2e6 where a whole number is asked for."""
    import tyro

    def whole(info: Any) -> Any:
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda texts: _int(texts[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(whole)
    return registry


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise ValueError(f"{text} is not a whole number") from None
        return int(value)


def read_config(path: str | Path) -> Config:
    """The `Config` of a configs file or `config.json`, as it stands there."""
    path = expand(path)
    if not path.is_file():
        raise ConfigError(
            f"no config file {str(path)!r}{_suggest_file(path)}; give the path to a "
            f"configs/*.py file or to a run's config.json"
        )
    if path.suffix == ".json":
        return read_config_json(path)
    if path.suffix != ".py":
        raise ConfigError(
            f"{str(path)!r} is neither a .py file nor a config.json; give the path to "
            f"a configs/*.py file"
        )
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


def resolve(config: Config, *, text_is_here: bool = False) -> Config:
    """Fills in what a run decides once, the corpus digest and the outer optimizer, and
    makes paths absolute.

    Other fields that are set are left alone, so resolving twice changes nothing. Reads
    the corpus if its digest is not known, or it must be on this machine; raises
    ConfigError if it cannot, if it is another one, or too short for the run.
    """
    config = with_absolute_paths(config)
    run = config.run
    if text_is_here or not run.data.digest:
        from diloco_jax.data import corpus as text

        corpus = text.load_checked_corpus(run.data)
        text.require_window(len(corpus.train), run.sequence_length)
        text.require_prediction(len(corpus.validation))
        text.require_vocabulary(corpus, run.model)
        data = dataclasses.replace(run.data, digest=corpus.digest)
        run = dataclasses.replace(run, data=data)
    return resolve_outer(dataclasses.replace(config, run=run))


def resolve_outer(config: Config) -> Config:
    """Fills in the outer optimizer, from `core.outer.presets`."""
    outer = config.run.outer
    if None not in (outer.optimizer, outer.learning_rate, outer.momentum):
        return config
    from diloco_jax.core.merge import RULES
    from diloco_jax.core.outer.presets import preset

    chosen = preset(
        merges_per_fragment=config.merges_per_fragment(),
        steps_per_cycle=config.run.sync.steps_per_cycle,
        islands=len(config.islands),
        keeps_length=RULES.find(config.run.sync.merge).keeps_length,
        inner=config.run.inner.optimizer,
    )
    run = dataclasses.replace(config.run, outer=filled(outer, chosen))
    return dataclasses.replace(config, run=run)


def filled(outer: OuterConfig, chosen: OuterConfig | OuterPreset) -> OuterConfig:
    """With what it leaves open as in `chosen`."""
    missing = {
        name: getattr(chosen, name)
        for name in ("optimizer", "learning_rate", "momentum")
        if getattr(outer, name) is None
    }
    return dataclasses.replace(outer, **missing)


def write_config_json(config: Config, path: str | Path) -> None:
    """Writes all fields, those local to this machine included, atomically."""
    write_json(dataclasses.asdict(config), path)


def read_config_json(path: str | Path) -> Config:
    """What `write_config_json` wrote; ConfigError if there is no such file, on unknown
    fields or wrong types."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no {path}; give the workdir of a run")
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    _refuse_unknown(Config, fields, "", path)
    try:
        return msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def json_number(value: float | None) -> float | None:
    """None, which is null, for what JSON has no number for: NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


def write_json(value: Mapping[str, Any], path: str | Path) -> None:
    """Writes JSON as `write_text` does."""
    write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", Path(path))


def write_text(text: str, path: Path) -> None:
    """Writes a file so that it is, at any moment, the old one or the new one."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def require_writable(folder: Path, option: str) -> None:
    """Raises ConfigError, naming the option that gave it, unless files can be made in
    this folder: before long work, and not after it."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder} is not a folder; make it first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {folder}: no file can be made there ({error.strerror}); make it "
            f"writable, or give another folder"
        ) from error


def add_text_option(parser: argparse.ArgumentParser) -> None:
    """`--data.paths`, as `paths`, of commands that read the text of a run again."""
    parser.add_argument(
        "--data.paths",
        nargs="+",
        metavar="PATH",
        dest="paths",
        help="the run's text, if it is not where the run had it",
    )


def _refuse_unknown(expected: Any, value: Any, where: str, path: Path) -> None:
    """Walks dataclasses and dicts of them; other values are msgspec's to check."""
    if typing.get_origin(expected) is dict and isinstance(value, dict):
        for name, item in value.items():
            _refuse_unknown(typing.get_args(expected)[1], item, f"{where}{name}.", path)
    if not dataclasses.is_dataclass(expected) or not isinstance(value, dict):
        return
    known = typing.get_type_hints(expected)
    for name, item in value.items():
        if name not in known:
            raise ConfigError(
                f"{path} has an unknown field {where}{name}"
                f"{suggest(name, known)}; remove or rename it"
            )
        _refuse_unknown(known[name], item, f"{where}{name}.", path)


def _reason(error: BaseException, path: Path) -> str:
    """Where in a configs file it came from, and what is wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f" in line {lines[-1]}" if lines else ""
    misnamed = UNKNOWN_FIELD.match(str(error))
    kind = getattr(configs, misnamed[1], None) if misnamed else None
    if misnamed and dataclasses.is_dataclass(kind):
        near = suggest(misnamed[2], [f.name for f in dataclasses.fields(kind)])
        return f"{where}: {misnamed[1]} has no field {misnamed[2]!r}{near}"
    return f"{where}: {type(error).__name__}: {error}"


def _suggest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return suggest(path.name, sorted(p.name for p in path.parent.glob("*.py")))
