"""Every block of code on the pages is run or parsed, and every `diloco ...` line of
README, docs, configs and notebooks is taken by the real parsers; none is run. (Pages
about clouds have a test of their own.)"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import tyro
import yaml

from diloco_jax import cli
from diloco_jax.config import LaunchConfig, options
from diloco_jax.config.loading import read_config, write_config_json
from diloco_jax.models.model import Model
from diloco_jax.run_files import METRICS
from diloco_jax.workdir import RunFacts

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "launch").rglob("*.md")),
]
RUN_BY = {
    "README.md": "runtime/test_python_page.py",
    "docs/data.md": "data/test_data_page.py",
    "docs/embed.md": "runtime/example_support.py",
    "docs/embed_more.md": "runtime/example_support.py",
    "docs/extending.md": "test_extending.py",
    "docs/finetune.md": "test_blocks_in_docs.py",
    "docs/mixtures.md": "weights/test_mixtures_page.py",
    "docs/models.md": "models/test_own_model.py",
    "docs/pictures.md": "weights/test_picture_models.py",
    "docs/python.md": "runtime/test_python_page.py",
    "docs/replay.md": "simulation/test_fork.py",
    "docs/tpu.md": "launch/test_tpu_page.py",
    "docs/watching.md": "test_blocks_in_docs.py",
}
"""The test that runs a page's Python."""
COMMANDS = ("diloco ", "bash ", "python ", "source .venv/bin/activate")
SHOWN = ("text", "mermaid")
"""Languages of blocks that nobody runs."""


class Block(NamedTuple):
    page: str
    language: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    name = page.relative_to(ROOT).as_posix()
    found = re.findall(r"^(`{3,})([^`\n]*)\n(.*?)^\1$", page.read_text(), re.M | re.S)
    return [Block(name, language, code) for _, language, code in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def one(page: str, language: str = "python") -> str:
    (code,) = [b.code for b in BLOCKS if (b.page, b.language) == (page, language)]
    return code


def named(block: Block) -> str:
    return f"{block.page}: {block.code.splitlines()[0][:40]}"


def test_every_language_is_one_that_is_checked():
    checked = {"", "python", "python fragment", "json", "yaml", "toml", "bash", *SHOWN}
    others = {b.language for b in BLOCKS if not b.language.startswith("python file=")}
    assert others <= checked
    assert len(BLOCKS) > 90


def test_every_page_with_python_has_a_test_that_runs_it():
    with_python = {
        b.page for b in BLOCKS if re.fullmatch(r"python( file=.*)?", b.language)
    }
    assert with_python == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(), page


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language.startswith("python")], ids=named
)
def test_python_compiles(block):
    compile(block.code, block.page, "exec")


@pytest.mark.parametrize(
    "block", [b for b in of("python fragment") if "with " not in b.code], ids=named
)
def test_a_fragment_of_python_is_executed(block):
    names = dict.fromkeys(("init", "loss", "axes"), dict)
    exec(block.code, {"LaunchConfig": LaunchConfig, "Model": Model, **names})


@pytest.mark.parametrize("block", of("json", "yaml", "toml"), ids=named)
def test_data_is_parsed(block):
    loads = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    assert loads[block.language](block.code)


@pytest.mark.parametrize("block", of("bash"), ids=named)
def test_bash_is_parsed(block):
    found = subprocess.run(
        ["bash", "-n"], input=block.code, text=True, capture_output=True, timeout=60
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("block", of(""), ids=named)
def test_lines_without_a_language_are_commands_that_exist(block):
    files = {
        b.language.removeprefix("python file=") for b in BLOCKS if b.page == block.page
    }
    for line in re.sub(r"\\\n", "", block.code).splitlines():
        assert line.startswith(COMMANDS), f"{line}: give the block a language"
        if (words := line.split())[0] in ("bash", "python"):
            assert words[1] in files or (ROOT / words[1]).is_file(), line


def test_the_fine_tune_is_a_config(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(one("docs/finetune.md"))
    config = read_config(path)
    assert (
        config.run.total_tokens
        % sum(
            island.batch_size * config.run.sequence_length
            for island in config.islands.values()
        )
        == 0
    )


def test_the_recipe_for_slow_islands_reads_metrics(tmp_path, capsys):
    """The script of docs/watching.md."""
    islands = [
        {
            "kind": "island",
            "island": name,
            "step": 10,
            "median_step_seconds": median,
            "stalled_seconds": 1.0,
        }
        for name, median in (("a", 0.5), ("b", 2.0))
    ]
    merges = [{"kind": "merge", "islands": names} for names in (["a"], ["a", "b"])]
    lines = [json.dumps(line) for line in (*islands, *merges)]
    (tmp_path / METRICS).write_text("".join(f"{line}\n" for line in lines))
    code = one("docs/watching.md").replace("sys.argv[1]", repr(str(tmp_path)))
    exec(code, {})
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "a: 0.500 s a step, 0.100 s of it stalled; in 2 of the last 2 merges",
        "b: 2.000 s a step, 0.100 s of it stalled; in 1 of the last 2 merges",
    ]


WITH_COMMANDS = [
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
        for page in WITH_COMMANDS
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
