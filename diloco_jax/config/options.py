"""Dataclasses as command-line options: one parser for all commands.

A field becomes an option whose help is the text given to `config.fields.setting`.
Commands that take a config show its fields as well. Those of `RunConfig` and
`Placement` go by their names (`--sync.quorum 2`, `--workdir runs/x`), an island's as
`--islands.NAME.batch-size 4`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Container, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.config.fields import check_bounds, positional, setting, types_of
from diloco_jax.errors import ConfigError, suggest

T = TypeVar("T")


TRUST_CODE = (
    "Execute code that the run's config.json names, although another user, or another "
    "machine, wrote it."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkdirOptions:
    """The options of a command that works on a recorded run."""

    workdir: Path = positional(metavar="WORKDIR", help="Workdir of the run.")
    paths: tuple[str, ...] = setting(
        (),
        option="data.paths",
        help="The run's text, if it is not where the run had it.",
    )
    json: bool = setting(False, help="Print one JSON object to standard output.")
    trust_code: bool = setting(False, help=TRUST_CODE)


HELP = ("-h", "--help")
COMPLETES = "--tyro-print-completion"
"""Option of every parser that has it print what a shell may complete."""
# Messages and pages use these prefixes; the options have none.
PREFIX = re.compile(r"^--(?:run|placement)\.")
ORIGINAL = "_original"
ANY_ISLAND = {"NAME": IslandConfig()}
"""Stand-in, in the help, for the islands of a config that is not given."""


def parse(
    parts: Sequence[Any], arguments: Sequence[str], prog: str, description: str
) -> list[Any]:
    """Read the options of a command that takes no config.

    Unknown or malformed options end the process with code 2 and a suggestion on
    standard error, as argument parsers do. Raises ConfigError for a value out of its
    bounds.

    Args:
      parts: dataclass instances, which together have the options and their defaults.
        Give the class where some fields have no default. Nested fields go by their own
        names.
      prog: the command's name in the help.
      description: what the command does, one paragraph.

    Returns:
      One instance for each of the parts.
    """
    sections = [(f"part_{i}", _section(part)) for i, part in enumerate(parts)]
    parsed = _parse(sections, arguments, prog, description, plain=True)
    found = [_original(values) for values in vars(parsed).values()]
    for options in found:
        check_bounds(options)
    return found


def command(
    kind: type[T], prog: str
) -> Callable[[Callable[[T], int]], Callable[[Sequence[str]], int]]:
    """Make a command of a function of its options, which ends as `parse` does. The
    function's docstring is the help's paragraph. kind, prog: as for `parse`."""

    def made(function: Callable[[T], int]) -> Callable[[Sequence[str]], int]:
        @functools.wraps(function)
        def command(arguments: Sequence[str]) -> int:
            description = " ".join(str(function.__doc__).split())
            (options,) = parse([kind], arguments, prog, description)
            return function(options)

        return command

    return made


def parse_with_config(
    config: Config,
    arguments: Sequence[str],
    options: T,
    prog: str,
    *,
    launches: bool = False,
) -> tuple[Config, T]:
    """Read the options of a command that takes a config, and its own.

    `--help` shows what most runs need, and the others by section: `--help sync`. Raises
    ConfigError if the resulting config cannot run; ends the process as `parse` does.

    Args:
      config: holds the fields that options replace.
      options: a dataclass instance whose fields, with their values as defaults, become
        options of the same names.
      prog: the command's name in the help.
      launches: the command reads `LaunchConfig`; other commands' help leaves it out.
    """
    import tyro

    placement = config.placement
    groups = dict.fromkeys(f.metadata["group"] for f in dataclasses.fields(placement))
    of_run = (f.name for f in dataclasses.fields(config.run))
    nested = (n for n in of_run if dataclasses.is_dataclass(getattr(config.run, n)))
    names = [*nested, "islands", *filter(None, groups), *["launch"] * launches]
    arguments, shown = _shown(arguments, names, launches=launches)

    def visible(name: str, section: Any) -> Any:
        hidden = shown is not None and name not in shown
        return Annotated[section, tyro.conf.Suppress] if hidden else section

    sections = [
        ("own", visible("", _section(options))),
        ("run", _section(config.run, shown=shown)),
        (
            "islands",
            visible("islands", dict[str, IslandConfig]),
            _constant(config.islands),
        ),
        *(
            (f"placement_{name}", visible(name, _section(placement, group=name)))
            for name in groups
        ),
        ("launch", visible("launch", _section(config.launch, name="launch"))),
    ]
    parsed = _parse(
        sections,
        [PREFIX.sub("--", argument) for argument in arguments],
        prog,
        f"Options override what the config says. --help SECTION shows the others, of "
        f"{', '.join(names)}, or all.",
    )
    placed: dict[str, Any] = {}
    for name in groups:
        placed |= vars(getattr(parsed, f"placement_{name}"))
    config = Config(
        run=_original(parsed.run),
        islands=parsed.islands,
        placement=Placement(**placed),
        launch=_original(parsed.launch),
    )
    own = _original(parsed.own)
    check_bounds(own)
    return config.validate(), own


def _shown(
    arguments: Sequence[str], names: Sequence[str], *, launches: bool
) -> tuple[Sequence[str], set[str] | None]:
    """Return the arguments without a section that the help is asked for, and the names
    of the sections that it shows, "" for what has none; None: nobody asks.

    tyro does not parse an option that it does not show, so only help leaves some out.
    """
    at = next((n for n, word in enumerate(arguments) if word in HELP), None)
    if at is None:
        return arguments, None
    wanted = "".join(word for word in arguments[at + 1 : at + 2] if word[:1] != "-")
    if wanted not in ("", "all", *names):
        raise ConfigError(
            f"--help {wanted}: no section of that name{suggest(wanted, names)}; there "
            f"are {', '.join(names)}, and all"
        )
    needed = {"", "launch"} if launches else {""}
    shown = {"": needed, "all": {"", *names}}.get(wanted, {wanted})
    return [*arguments[: at + 1], *arguments[at + 2 :]] if wanted else arguments, shown


def _parse(
    sections: Sequence[Any],
    arguments: Sequence[str],
    prog: str,
    description: str,
    *,
    plain: bool = False,
) -> Any:
    """Have tyro read options; return their values.

    plain: nested fields go by their own names, and flags have no negative.
    """
    import tyro

    kind = dataclasses.make_dataclass("Options", sections, frozen=True, kw_only=True)
    flat = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    with warnings.catch_warnings():
        # These warn of values of a wrong type, which the command's own checks name.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"tyro\b")
        return tyro.cli(
            kind,
            prog=prog,
            description=paragraph(description),
            args=list(arguments),
            config=flat if plain else (),
            registry=_registry(),
        )


def _section(
    part: Any,
    *,
    name: str | None = "",
    group: str | None = None,
    shown: Container[str] | None = None,
) -> Any:
    """Return a type from which tyro makes one option for each field of a dataclass.

    Args:
      part: an instance with the defaults, or a class.
      name: prefix of the options; None = that of the field.
      group: take only the fields of this group, under a heading of this name.
      shown: leave the others out of the help: names of fields that are sections, and ""
        for all that are none.
    """
    import tyro

    kind = part if isinstance(part, type) else type(part)
    hints = types_of(kind)
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        declared, hint = field.metadata, hints[field.name]
        if group is not None and declared["group"] != group:
            continue
        default = field.default if part is kind else getattr(part, field.name)
        text, in_section = declared.get("help"), ""
        if dataclasses.is_dataclass(default):
            in_section = field.name
            text = text or paragraph(default.__doc__)
            # The section's own fields have the defaults.
            hint, default = _section(default, name=None), dataclasses.MISSING
        option: Any = Annotated[
            hint,
            tyro.conf.arg(
                name=declared.get("option"),
                metavar=declared.get("metavar"),
                help=text,
                prefix_name=not group,
            ),
        ]
        if shown is not None and in_section not in shown:
            option = Annotated[option, tyro.conf.Suppress]
        if declared.get("positional"):
            option = Annotated[option, tyro.conf.Positional]
        given = [] if default is dataclasses.MISSING else [_constant(default)]
        fields.append((field.name, option, *given))
    made = dataclasses.make_dataclass(
        kind.__name__, fields, frozen=True, kw_only=True, namespace={ORIGINAL: kind}
    )
    made.__doc__ = "" if group else paragraph(kind.__doc__)
    return Annotated[made, tyro.conf.arg(name=group or name)]


def _original(values: Any) -> Any:
    """Return the original dataclass of a section, with the values read."""
    kind = getattr(type(values), ORIGINAL, None)
    if kind is None:
        return values
    return kind(**{name: _original(value) for name, value in vars(values).items()})


def paragraph(docstring: str | None) -> str:
    """Return a docstring as one line, without its example and its fields."""
    text = re.split(r"\n\s*(?:Example|Attributes):\n", docstring or "")[0]
    return " ".join(text.split())


def _constant(value: Any) -> Any:
    """Declare a default of any type, also of one that dataclasses refuse."""
    return dataclasses.field(default_factory=lambda: value)


def _registry() -> Any:
    """Extend tyro by whole numbers such as 1.2e6, and by help for a dict's entries."""
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

    def entries(info: Any) -> Any:
        if info.type != dict[str, str] or not info.default:
            return None
        return tyro.constructors.StructConstructorSpec(
            instantiate=dict,
            fields=tuple(
                tyro.constructors.StructFieldSpec(
                    name=key, type=str, default=value, helptext=f"As above, of {key}."
                )
                for key, value in info.default.items()
            ),
        )

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(whole)
    registry.struct_rule(entries)
    return registry


def _int(text: str) -> int:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if (value := Fraction(text)).denominator == 1:
            return int(value)
    raise ValueError(f"{text} is not a whole number")
