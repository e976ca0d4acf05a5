"""`diloco COMMAND --help`: every option has a text, and no sentence is broken."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from goldens import require_golden

from diloco_jax import cli
from diloco_jax.config.fields import setting
from diloco_jax.config.options import parse
from diloco_jax.simulation.commands import KINDS

WIDTHS = (80, 200)
OF_CONFIG = (
    "run",
    "chaos",
    "coordinator",
    "worker",
    "island",
    "emulate",
    "fork",
    "plan",
    "launch",
)
COMMANDS = [
    *([name] for name in cli.COMMANDS if name != "simulate"),
    *(["simulate", kind] for kind in KINDS),
]
MADE: dict[tuple[int, tuple[str, ...]], str] = {}
"""Pages of help, by width and command."""
HINT = re.compile(r"\((?:default: .*|required|repeatable.*)\)$")


class Entry(NamedTuple):
    """An option, or the text above a group's options, as it is shown."""

    group: str
    name: str
    """Empty for the text above."""
    lines: list[str]
    """Lines of the entry's help."""
    width: int
    """Most characters that a line of it may have."""

    @property
    def text(self) -> str:
        """Its help without the default."""
        return HINT.sub("", " ".join(self.lines)).strip()


def entries(shown: str) -> Iterator[Entry]:
    """All entries of all boxes, which may stand side by side."""
    rows = shown.splitlines()
    for top, row in enumerate(rows):
        for corner in re.finditer("╭─ (.*?) ─*╮", row):
            left, right = corner.span()
            inside = []
            for line in rows[top + 1 :]:
                if line[left] == "╰":
                    break
                inside.append(line[left + 2 : right - 2])
            yield from of_box(corner[1], inside)


def of_box(group: str, lines: list[str]) -> Iterator[Entry]:
    name, told, column = "", [], 0
    for line in lines:
        if set(line.strip()) == {"─"}:
            continue
        if line.startswith("-") or (group == "positional arguments" and line[0] != " "):
            if name or told:
                yield Entry(group, name, told, len(line) - column)
            # The help stands behind it in its column, or below.
            name, _, rest = line.rstrip().partition("  ")
            told = [rest.strip()] if rest else []
            column = line.index(rest.strip()) if rest else 0
        else:
            column = len(line) - len(line.lstrip()) if name else 0
            told.append(line.strip())
    yield Entry(group, name, told, len(line) - column)


def breaks(entry: Entry) -> list[str]:
    """Lines that end although the next word would fit on them."""
    return [
        line
        for line, following in zip(entry.lines, entry.lines[1:], strict=False)
        if len(line) + 1 + len(following.split()[0]) <= entry.width
    ]


@pytest.fixture
def shown(monkeypatch):
    """Return a command's output until it exits with 0, on a terminal of this width."""

    def shown(width, show):
        screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with monkeypatch.context() as inside:
            inside.setenv("COLUMNS", str(width))
            inside.setattr(sys, "stdout", screen)
            with pytest.raises(SystemExit) as ended:
                show()
        assert ended.value.code == 0
        screen.seek(0)
        return screen.read()

    return shown


@pytest.fixture
def help_of(shown):
    """The help of a command, which is made once."""

    def help_of(width, *command):
        if (width, command) not in MADE:
            wanted = ["all"] if command[0] in OF_CONFIG else []
            page = shown(width, lambda: cli.main([*command, "--help", *wanted]))
            MADE[width, command] = page
        return MADE[width, command]

    return help_of


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_has_a_text_in_whole_sentences(command, width, help_of):
    text = help_of(width, *command)
    said = text.partition("╭")[0].splitlines()[2:]
    above = Entry("", "", [line for line in said if line], width)
    found = [above, *entries(text)]
    assert len([entry for entry in found if entry.name]) > 1
    assert [entry for entry in found if not entry.text] == []
    assert [(entry.name, breaks(entry)) for entry in found if breaks(entry)] == []


def test_the_islands_of_a_config_are_shown(help_of):
    shown = help_of(80, "run", "configs/quickstart.py")
    assert "--islands.NAME." not in shown
    assert "--islands.v6e-a.batch-size" in shown or "--islands.v6e.batch-size" in shown


def test_entries_of_a_dict_have_a_text(help_of):
    found = entries(help_of(80, "launch", "configs/mixed_12b.py"))
    zones = [entry for entry in found if entry.name.startswith("--launch.zones.")]
    assert zones
    assert all(entry.text.startswith("As above, of ") for entry in zones)


def test_help_is_what_it_was(help_of, capsys):
    """Commands in their order; entries that all of `OF_CONFIG` have stand once, under
    the first of them."""
    pages = {" ".join(c): help_of(max(WIDTHS), *c) for c in COMMANDS}
    told = {
        name: [(entry.group, as_golden(entry)) for entry in entries(page)]
        for name, page in pages.items()
    }
    shared = set.intersection(*(set(told[name]) for name in OF_CONFIG))
    found = []
    for command in ([], ["simulate"]):
        assert cli.main([*command, "--help"]) == 0
        found.append(capsys.readouterr().out)
    for name, page in pages.items():
        lines = page.partition("╭")[0].rstrip().splitlines()
        shown_in = ""
        for group, text in told[name]:
            if name in OF_CONFIG[1:] and (group, text) in shared:
                continue
            if group != shown_in:
                lines.append(f"- {group}")
            shown_in = group
            lines.append(text)
        if name in OF_CONFIG[1:]:
            lines.append(f"- and the options of a config, as of diloco {OF_CONFIG[0]}")
        found.append("\n".join(lines) + "\n")
    require_golden("help.txt", "\n".join(found))


def as_golden(entry):
    """The name, and the help as one line below it."""
    return "\n".join(filter(None, (entry.name, f"    {' '.join(entry.lines)}")))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_check_sees_what_is_missing_or_broken(width, shown):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken:
        silent: int = setting(1, help="")
        torn: int = setting(1, help="A sentence that ends here\n    and goes on there.")
        whole: int = setting(1, help="A sentence of some length. " * 12)

    text = shown(width, lambda: parse([Broken()], ["--help"], "broken", "Breaks."))
    found = {entry.name.partition(" ")[0]: entry for entry in entries(text)}
    assert found["--silent"].text == ""
    assert breaks(found["--torn"]) == ["A sentence that ends here"]
    assert found["--whole"].text
    assert breaks(found["--whole"]) == []
