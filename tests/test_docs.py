"""The pages lead to each other, fit a screen, and name what exists; figures that are
made of committed numbers can be made again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
README = ROOT / "README.md"
WORDS = DOCS / "design" / "words.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "launch").rglob("*.md")),
]
BY_BENCHMARKS = re.compile(r"results/raw/")
MAX_COLUMNS = 100
MAX_ROW = 160


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links_of(page: Path) -> list[tuple[str, str]]:
    """Path (empty: the page itself) and heading of each link into the repository."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"\]\(([^()\s#]*)#?([^()\s]*)\)", text)
    return [(path, head) for path, head in found if ":" not in path]


def headings_of(page: Path) -> set[str]:
    """Names under which a link reaches a heading."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def reachable(start: Path) -> set[Path]:
    found, todo = {start}, [start]
    while todo:
        page = todo.pop()
        for path, _ in links_of(page):
            target = (page.parent / path).resolve()
            if target.suffix == ".md" and target.is_file() and target not in found:
                found.add(target)
                todo.append(target)
    return found


def test_every_page_is_reachable_from_the_index():
    orphans = set(DOCS.rglob("*.md")) - reachable(DOCS / "index.md")
    assert not orphans, [name_of(page) for page in orphans]


def test_the_readme_links_the_index():
    assert ("docs/index.md", "") in links_of(README)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    for path, heading in links_of(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if heading and target.suffix == ".md":
            assert heading in headings_of(target), f"{path}#{heading}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if not BY_BENCHMARKS.search(name_of(p))], ids=name_of
)
def test_prose_is_wrapped(page):
    """Rows of a table may be wider than prose. Code and pages that a benchmark writes
    may have any width."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    wide = [
        line
        for line in text.splitlines()
        if len(line) > (MAX_ROW if line.lstrip()[:1] == "|" else MAX_COLUMNS)
    ]
    assert not wide


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_is_a_comment_on_the_site(page):
    """As the rest of a sentence is that begins with a percent sign."""
    assert not re.findall(r"^ *%.*", page.read_text(), flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page):
    for name, path in re.findall(
        r"`(\w+)`\s+in\s+`(tests/[\w/]+\.py)", page.read_text()
    ):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_one_title(page):
    """The site names a page after it."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.M | re.S)
    assert len(re.findall(r"^# ", text, re.M)) == 1


GUIDES = sorted(set(DOCS.glob("*.md")) - {DOCS / "index.md"})
WITHOUT_A_NEXT = {"dependencies.md"}


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_page_begins_with_what_it_is_good_for(page):
    """A sentence or two below the title: no table, code, picture or heading."""
    title, blank, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert not blank
    assert re.match(r"(\*\*)?[A-Z`][a-z]", first), first


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_page_leads_on_to_the_next(page):
    last = page.read_text().rstrip().split("\n\n")[-1]
    assert page.name in WITHOUT_A_NEXT or re.match(r"\*\*Next:\*\*.*\]\(", last, re.S)


def test_the_index_lists_every_page_once():
    listed = re.findall(r"^\| \[.*?\]\(([^()\s]+)\) \|", INDEX.read_text(), re.M)
    assert len(listed) == len(set(listed))
    found = {(DOCS / path).resolve() for path in listed}
    pages = {page for page in DOCS.rglob("*.md") if page != INDEX}
    raw = {page for page in pages if BY_BENCHMARKS.search(name_of(page))}
    assert pages - found == raw - found
    assert raw & found == {DOCS / "results" / "raw" / "index.md"}


def test_the_readme_is_one_screen():
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= MAX_COLUMNS


def test_the_glossary_names_modules_that_exist():
    named = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", WORDS.read_text())
    assert len(named) > 30
    for path in named:
        if path != "diloco_jax/":
            assert (ROOT / "diloco_jax" / path).exists(), path


@pytest.mark.parametrize("part", ["on the island", "at the coordinator"])
def test_the_path_of_the_data_has_as_many_files_as_it_says(part):
    page = (DOCS / "design" / "architecture.md").read_text()
    text = page.split(f"## The path of the data {part}\n")[1].split("\n\n")
    told = re.search(r"opens (\d+) files", text[0])
    rows = [line.split("|")[2] for line in text[1].splitlines()[2:]]
    files = [file for row in rows for file in re.findall(r"`([\w/]+(?:\.py|/))`", row)]
    assert int(told[1]) == len(files) == len(set(files))
    names = {path.as_posix() for path in (ROOT / "diloco_jax").rglob("*")}
    for file in files:
        assert any(f"{name}/".endswith(f"/{file.rstrip('/')}/") for name in names), file


def test_a_class_name_that_stands_twice_is_explained():
    found = subprocess.run(
        ["git", "grep", "-hoE", "^class [A-Z][A-Za-z0-9]+", "--", "diloco_jax/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    counts: dict[str, int] = defaultdict(int)
    for line in found.stdout.splitlines():
        counts[line.removeprefix("class ")] += 1
    _, _, section = WORDS.read_text().partition("## Class names that stand for two")
    explained = set(re.findall(r"^\| ([A-Z][A-Za-z0-9]*) \|", section, re.M))
    assert {name for name, count in counts.items() if count > 1} == explained


FIGURES = Path(__file__).parents[1] / "docs" / "figures"
OF_NUMBERS = ("bandwidth", "finetune", "goodput", "limits", "unequal_islands")


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_figure_is_made_and_is_the_same_each_time(name, tmp_path):
    pictures = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, str(FIGURES / f"{name}.py"), str(folder)],
            env={**os.environ, "PYTHONPATH": str(FIGURES.parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        (picture,) = folder.iterdir()
        assert picture.name == f"{name}.svg"
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1]


def test_every_figure_has_a_script_and_a_page_that_shows_it():
    pages = [FIGURES.parents[1] / "README.md", *FIGURES.parent.rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    for picture in FIGURES.glob("*.svg"):
        assert picture.with_suffix(".py").is_file()
        assert f"figures/{picture.name})" in text
