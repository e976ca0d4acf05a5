"""Every `diloco ...` line of README, docs, configs and notebooks is one that exists:
the real parsers take it. None is run. (Pages about
clouds have a test of their own.)"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import tyro

from diloco_jax import cli
from diloco_jax.config import options
from diloco_jax.config.loading import read_config, write_config_json
from diloco_jax.workdir import RunFacts

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").glob("*.py")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
CONFIG = "configs/quickstart.py"
OF_CLOUDS = ("tpu.md", "gke.md", "sky.md")
STANDS_FOR = {
    "CONFIG": CONFIG,
    "WORKDIR": "runs/a",
    "run.py": CONFIG,
    "HOST:PORT": "localhost:7000",
}


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def lines_of(text: str) -> list[str]:
    """Commands in blocks, and those quoted in a sentence with arguments. A line that
    ends with a backslash goes on in the next one."""
    text = re.sub(r"\\\n *", "", text)
    found = re.findall(r"^diloco .*$", text, re.MULTILINE)
    quoted = [" ".join(q.split()) for q in re.findall(r"`(diloco [^`]+)`", text)]
    return found + [
        q
        for q in quoted
        if len(q.split()) > (3 if "simulate" in q else 2) and "..." not in q
    ]


LINES = sorted(
    {
        (page.relative_to(ROOT).as_posix(), line)
        for page in PAGES
        if page.name not in OF_CLOUDS
        for line in lines_of(text_of(page))
    }
)


class ParsedError(Exception):
    """The command line is a good one."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the configs, and a workdir wherever a line has one."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / CONFIG, tmp_path / "configs" / "b.py")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def wrong(folder, monkeypatch, capsys):
    """Return the parser's complaint about a line; empty if there is none."""

    def found(line: str) -> str:
        try:
            code = parse(line, monkeypatch)
        except ParsedError:
            return ""
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return said.err if code else ""  # Help ends with 0.

    return found


def parse(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Raises ParsedError once it is; otherwise as `cli.main`."""
    _, *arguments = shlex.split(line, comments=True)
    arguments = [STANDS_FOR.get(a, a) for a in arguments]
    for workdir in (a for a in arguments if a.startswith("runs/")):
        Path(workdir).mkdir(parents=True, exist_ok=True)
        write_config_json(read_config(CONFIG), Path(workdir) / "config.json")
        RunFacts(run_id="r", begun_unix=0.0).write(Path(workdir))

    def parsed(real):
        def wrapped(*arguments, **options):
            with monkeypatch.context() as inside:
                for where, name, function in REAL:
                    inside.setattr(where, name, function)
                found = real(*arguments, **options)
            if options.get("return_unknown_args"):
                return found  # Another parser takes the rest.
            raise ParsedError

        return wrapped

    for where, name, function in REAL:
        monkeypatch.setattr(where, name, parsed(function))
    return cli.main(arguments)


REAL = [
    (tyro, "cli", tyro.cli),
    (options, "parse_with_config", options.parse_with_config),
]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_the_line_is_one_that_exists(page, line, wrong):
    assert wrong(line) == "", f"{page}: {line}"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"diloco run {CONFIG} --total-token 7", "--total-token"),
        ("diloco eval runs/a --jason", "--jason"),
        ("diloco simulate goodput --json DIR", "DIR"),
        ("diloco island CONFIG --nam v6e", "--nam"),
        ("diloco certify DIR", "certify"),
    ],
)
def test_a_line_that_is_none_is_found(line, shown, wrong):
    assert shown in wrong(line)


def test_lines_are_found():
    pages = {page for page, _ in LINES}
    assert {"docs/start.md", "docs/replay.md", "docs/planning.md"} <= pages
    for page in ("docs/running.md", "docs/laptop.md"):
        assert len([line for named, line in LINES if named == page]) >= 10
