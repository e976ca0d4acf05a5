"""The index of the pages, divided into a page of the site for each of its sections."""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INDEX = "docs/index"
RESULTS = "docs/results/raw/index"
MADE = {
    "Reference": (
        ("configuration", "configuration", "every field of a config"),
        ("commands", "commands", "every command and option"),
        ("Python", "api", "every public name"),
        ("wire protocol", "wire", "all that islands and coordinator say"),
        ("tape format", "tape", "every line of a run's tape"),
    )
}
"""Title, name and content of pages that only the site has, by section."""


def sections(index: str) -> tuple[str, dict[str, str]]:
    """Return the text of the index above its sections, and each section by title."""
    head, *found = re.split(r"^## ", index, flags=re.M)
    return head, dict(section.split("\n", 1) for section in found)


def write_sections(index: Path, folder: Path) -> None:
    """Write a page for each section of the index, with its table of contents.

    The index is whole in the repository. On the site its sections are pages of their
    own, so that a reader sees the pages of one section beside the one that is read.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _, found = sections(index.read_text(encoding="utf-8"))
    for title, text in found.items():
        rows = [
            f"| [{name}](../reference/{page}.md) | {about} |\n"
            for name, page, about in MADE.get(title, ())
        ]
        above, line, below = text.partition("|---|---|\n")
        text = "".join([above, line, *rows, below])
        text = re.sub(r"\]\(([^()\s:]+)\)", lambda m: f"]({_moved(m[1])})", text)
        (folder / f"{slug(title)}.md").write_text(
            # These pages have the words of all others.
            f"---\nnosearch: true\n---\n# {title}\n{text}\n{_contents(_pages(text))}",
            encoding="utf-8",
        )


def divide_index(app: Any, page: str, source: list[str]) -> None:
    """Leave of the index what is above its sections, and a line for each of them; lead
    links to a section of it to that section's page. The index of raw results has these
    as its contents."""
    if page == RESULTS:
        source[0] += f"\n{_contents(_pages(source[0]))}"
    if page != INDEX:
        home = posixpath.relpath("guide", posixpath.dirname(page) or ".")
        source[0] = re.sub(
            r"\]\((?:docs/|(?:\.\./)*(?:docs/)?)index\.md#([\w-]+)\)",
            lambda m: f"]({home}/{m[1]}.md)",
            source[0],
        )
        return
    head, found = sections(source[0])
    names = [f"../guide/{slug(title)}.md" for title in found]
    table = ["| section | what is in it |", "|---|---|"]
    for name, (title, text) in zip(names, found.items(), strict=True):
        table.append(f"| [{title}]({name}) | {' '.join(text.split('|')[0].split())} |")
    source[0] = head + "\n".join([*table, "", _contents(names)])


def name_toggles(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give what unfolds a part of the navigation a name that is read aloud."""
    made = context["generate_toctree_html"]

    def named(*args: Any, **options: Any) -> str:
        name = '<summary aria-label="pages of this section">'
        return str(made(*args, **options)).replace("<summary>", name)

    context["generate_toctree_html"] = named


def slug(title: str) -> str:
    """Return a title as the name of a file."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _pages(text: str) -> list[str]:
    """Return the pages that a section names as entries of a table of contents: under
    the name of their row, or else under their own title."""
    found = {}
    for head, name, page in re.findall(
        r"(^\| )?\[([^]]+)\]\(([^()\s#]+\.(?:md|ipynb))\)", text, re.M
    ):
        title = f"{name[0].upper()}{name[1:]} <{page}>" if head else page
        found.setdefault(page, title)
    return list(found.values())


def _moved(link: str) -> str:
    """Return a link of the index as one of a page in another folder beside it."""
    return posixpath.normpath(posixpath.join("../docs", link))


def _contents(pages: Iterable[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *pages, "```", ""])
