"""The site's pages that are made of the code agree with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from diloco_jax.coordinator import journal
from diloco_jax.protocol import messages, records
from diloco_jax.wire import bulk, errors
from diloco_jax.wire.server import Server

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import site_formats  # noqa: E402
import site_sections  # noqa: E402

PAGES = {"wire": site_formats.wire(), "tape": site_formats.tape()}


BEHIND_THE_LEAD = ("diloco_jax.protocol.holding",)
"""Messages that no page shows: lead and workers run one version."""


def leaves(kind: type) -> Iterator[type]:
    """Yield the subclasses of a class that have none themselves, as far as they are
    shown; other tests may have imported the rest."""
    below = kind.__subclasses__()
    if not below and kind.__module__ not in BEHIND_THE_LEAD:
        yield kind
    for each in below:
        yield from leaves(each)


def section(page: str, title: str) -> str:
    (found,) = re.findall(rf"^### {title}\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    return found


def rows(text: str) -> list[list[str]]:
    """Cells of each row of a table that names a field."""
    return [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]


def shown(kind: type[msgspec.Struct]) -> list[str]:
    return [f"| `{f.encode_name}`" for f in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("kind", leaves(messages.Message), ids=lambda k: k.__name__)
def test_every_message_is_on_the_page_of_the_wire(kind):
    told = section(PAGES["wire"], kind.__struct_config__.tag)
    assert [row[0] for row in rows(told)] == shown(kind)


@pytest.mark.parametrize("kind", leaves(records.Written), ids=lambda k: k.__name__)
def test_every_line_of_a_tape_is_on_its_page(kind):
    told = section(PAGES["tape"], kind.__struct_config__.tag)
    assert [row[0] for row in rows(told)] == shown(kind)


@pytest.mark.parametrize("page", PAGES)
def test_every_field_has_a_text(page):
    without = [row for row in rows(PAGES[page]) if row[-1].strip(" |") == ""]
    assert not without


@pytest.mark.parametrize("page", PAGES)
def test_every_value_that_a_field_names_is_explained(page):
    for name in set(re.findall(r"\]\(#(\w+)\)", PAGES[page])):
        assert re.search(rf"^### {name}$", PAGES[page], re.M | re.I), name


def test_the_life_of_an_island_is_told_in_messages_that_exist():
    told = set(re.findall(r"\b[A-Z][a-z]+[A-Za-z]*\b", site_formats.LIFE))
    tags = {kind.__struct_config__.tag for kind in leaves(messages.Message)}
    assert told <= tags
    assert len(told) >= 12
    assert site_formats.LIFE in PAGES["wire"]


def test_bounds_are_those_of_the_decoder():
    told = section(PAGES["wire"], "UploadStart")
    assert "| `incarnation` | int, 0 to 2^48 |" in told
    start = bulk.UploadStart(
        run_id="r",
        island="a",
        incarnation=2**48 + 1,
        session="s",
        fragment=0,
        tick=0,
        offset=0,
        length=0,
        total=0,
    )
    with pytest.raises(msgspec.ValidationError, match="281474976710656"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=bulk.Request)


def test_the_methods_are_those_of_the_server():
    class Named:
        def __getattr__(self, name):
            return lambda *arguments: None

    assert set(site_formats.METHODS) == set(Server._methods(Named()))


def test_every_error_of_the_wire_is_listed_or_a_base():
    listed = set(re.findall(r"^\| `(\w+)` \| `[A-Z_]+` \|", PAGES["wire"], re.M))
    answered = {kind.__name__ for kind, _, _ in errors._STATUS}
    assert listed == answered - {"WireError"}


def test_notes_are_a_part_of_what_is_written():
    assert set(site_formats.structs_of(journal.Note)) < set(leaves(records.Written))


@pytest.fixture(scope="module")
def guide(tmp_path_factory) -> Path:
    """The pages of the index's sections, as in a checkout."""
    folder = tmp_path_factory.mktemp("checkout") / "guide"
    site_sections.write_sections(ROOT / "docs" / "index.md", folder)
    return folder


def test_every_section_of_the_index_is_a_page(guide):
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert len(titles) >= 8
    assert {page.stem for page in guide.iterdir()} == set(
        map(site_sections.slug, titles)
    )


def test_pages_of_sections_lead_to_files(guide):
    made = {"configuration", "commands", "api", "wire", "tape"}
    for page in guide.iterdir():
        for link in re.findall(r"\]\(([^()\s:]+)\)", page.read_text()):
            there = (ROOT / "guide" / link).resolve()
            is_made = there.parent == ROOT / "reference" and there.stem in made
            assert is_made or there.is_file(), f"{page.name}: {link}"


def test_what_the_code_makes_is_in_the_reference(guide):
    contents = (guide / "reference.md").read_text().split("{toctree}")[1]
    for page in ("configuration", "commands", "api", "wire", "tape"):
        assert f"<../reference/{page}.md>" in contents


def test_pages_stand_in_the_contents_under_the_names_of_their_rows(guide):
    contents = (guide / "tutorials.md").read_text().split("{toctree}")[1]
    assert "\nOn a laptop <../docs/laptop.md>\n" in contents
    assert "\n../launch/gke/README.md\n" in contents


def test_the_index_keeps_its_head_and_leads_to_its_sections():
    source = [(ROOT / "docs" / "index.md").read_text()]
    site_sections.divide_index(None, "docs/index", source)
    assert source[0].startswith("# Documentation")
    assert "| [How-to](../guide/how-to.md) | One task, start to end. |" in source[0]
    assert "running.md" not in source[0]


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("docs/python", "index.md#tutorials", "../guide/tutorials.md"),
        ("docs/results/wire", "../index.md#design", "../../guide/design.md"),
        ("README", "docs/index.md#tutorials", "guide/tutorials.md"),
        ("docs/python", "index.md", "index.md"),
    ],
)
def test_links_to_sections_of_the_index_lead_to_their_pages(page, link, becomes):
    source = [f"see [it]({link})."]
    site_sections.divide_index(None, page, source)
    assert source[0] == f"see [it]({becomes})."
