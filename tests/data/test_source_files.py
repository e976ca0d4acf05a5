"""The contents of a file are known by its name and its beginning, and said."""

import gzip
import json

import numpy as np
import pytest
from prepare_support import documents_of, made, recipe, write_lines

from diloco_jax.config import ConfigError
from diloco_jax.data.corpus import load_corpus
from diloco_jax.data.documents import find_documents, inventory

LINES = '{"text": "a"}\n{"text": "b"}\n'
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{'4d7a' * 16}\nsize 269060552\n"
)


def write(folder, **contents):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.JSONL", LINES, "lines"),
        ("a.Ndjson.GZ", gzip.compress(LINES.encode(), mtime=0), "lines"),
        ("a.json", LINES, "lines"),
        ("a.json", "\ufeff\n " + LINES, "lines"),
        ("a.json", '{"text": "a"}', "lines"),
        ("a.json", POINTER, "lines"),
        ("a.json", '[{"text": "a"}]', "list"),
        ("a.json.gz", gzip.compress(b" \n[1]", mtime=0), "list"),
        ("a.json", '{\n  "text": "a"\n}', "left out"),
        ("a.PARQUET", b"PAR1", "table"),
        ("a.NPY", b"tokens", "tokens"),
        ("a.Csv", "a,b\n", "left out"),
        ("a.tsv.gz", b"packed", "left out"),
        ("a.HTML", "<p>", "left out"),
        ("a.ipynb", "{}", "left out"),
        ("dataset_infos.json", '{"default": {}}', "left out"),
        ("README.md", "text", "text"),
        ("a.py", "text", "text"),
        ("a", "text", "text"),
    ],
)
def test_a_kind_is_known_by_name_and_beginning(name, content, kind, tmp_path):
    write(tmp_path / "in", **{name: content, "z.txt": "text"})
    (found, _) = find_documents((str(tmp_path / "in"),))
    assert (found.name, found.kind) == (name, kind)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.html", "<p>", "text"),
        ("README.md", "# a", "text"),
        ("dataset_infos.json", '{"default": {}}', "lines"),
        ("a.csv", "a,b\n", r"a.csv is a table .*name it .txt"),
        ("a.PNG", "png", r"a.PNG is a picture, which a document names"),
        ("a.json", '{\n"a": 1}', r"a.json has neither a JSON list nor .* a line"),
    ],
)
def test_a_file_that_is_named_is_read_or_refused(name, content, kind, tmp_path):
    write(tmp_path / "in", **{name: content, "z.jsonl": LINES})
    paths = (str(tmp_path / "in" / name), str(tmp_path / "in" / "z.jsonl"))
    if " " in kind:
        with pytest.raises(ConfigError, match=kind):
            find_documents(paths)
    else:
        assert {f.name: f.kind for f in find_documents(paths)}[name] == kind


def test_files_about_the_data_beside_them_are_left_out_and_told(tmp_path):
    write(
        tmp_path / "in",
        README__md="# About",
        LICENSE="MIT",
        notes__txt="a note",
        page__htm="<p>",
        dataset_infos__json='{"default": {}}',
    )
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": f"{n}"} for n in range(40)])
    prepared, *splits = made(tmp_path)
    assert len(documents_of(*splits)) == 41
    kinds = {source.name: source.kind for source in prepared.sources}
    assert [name for name, kind in kinds.items() if kind == "left out"] == [
        *("LICENSE", "README.md", "dataset_infos.json", "page.htm")
    ]
    assert inventory((n, None, k) for n, k in kinds.items()) == (
        "left out: 1 license, 1 readme.md, 1 dataset_infos.json, 1 .htm; "
        "lines: 1 .jsonl; text: 1 .txt"
    )
    for path in (tmp_path / "in").glob("[an]*"):
        path.unlink()
    found = find_documents((str(tmp_path / "in"),))
    assert [f.name for f in found if f.kind == "text"] == ["LICENSE", "README.md"]


def test_endings_beyond_the_shown_ones_are_counted_together():
    assert inventory((f"a.{n}", None, "text") for n in range(99)).endswith("and others")


def test_a_folder_without_documents_says_what_it_has(tmp_path):
    write(tmp_path / "in", a__csv="1", b__csv="2", c__html="3")
    with pytest.raises(ConfigError, match=r"in has no documents: left out: 2 \.csv, 1"):
        made(tmp_path)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_a_list_has_the_documents_of_its_lines(packed, tmp_path):
    objects = [{"text": f"{n} " + "word " * n} for n in range(40)]
    (tmp_path / "in").mkdir()
    opened = gzip.open if packed else open
    rows = []
    for text in (json.dumps(objects, indent=1), "\n".join(map(json.dumps, objects))):
        with opened(tmp_path / "in" / f"a.json{'.gz' * packed}", "wt") as file:
            file.write("\ufeff" + text)
        _, train, validation = made(tmp_path, out=f"out{len(rows)}")
        rows.append([bytes(t) for t, _ in documents_of(train, validation)])
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 40


def test_a_list_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_jax.data.prepare_sources.MOST_LIST_BYTES", 9)
    write(tmp_path / "in", a__json='[{"text": "a"}]')
    with pytest.raises(ConfigError, match=r"a.json is a JSON list of 15 bytes, .* 9 "):
        made(tmp_path)


@pytest.mark.parametrize(
    ("begin", "why"),
    [(b"[", "is a longer JSON list"), (b"{", "has a longer line at offset 0")],
)
def test_what_a_packed_file_unpacks_to_is_bounded(begin, why, tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_jax.data.prepare_sources.MOST_LIST_BYTES", 100)
    write(tmp_path / "in", **{"a.json.gz": gzip.compress(begin + b" " * 1000)})
    with pytest.raises(ConfigError, match=f"{why}.* more than 100 bytes is not read"):
        made(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", LINES), ("a.json", LINES), ("a.JSON", "[1]"), ("a.parquet", b"PAR1")],
)
def test_raw_text_is_no_place_for_data_to_prepare(name, content, tmp_path):
    write(tmp_path / "in", **{name: content, "b.txt": "text"})
    with pytest.raises(ConfigError, match=f"{name} is no file of text; make rows of"):
        load_corpus((str(tmp_path / "in"),), 0.5)


def test_raw_text_leaves_out_markup_and_says_so(tmp_path, caplog):
    write(tmp_path / "in", a__html="<p>", b__ipynb="{}", c__txt="text of c")
    assert load_corpus((str(tmp_path / "in"),), 0.5).names == ("c.txt",)
    assert "data.paths: left out: 1 .html, 1 .ipynb; text: 1 .txt" in caplog.text
    whole = load_corpus((str(tmp_path / "in" / "a.html"),), 0.5)
    assert whole.names == ("a.html",)


def test_tokens_may_have_a_page_about_them(tmp_path):
    write(tmp_path / "in", README__md="# About")
    np.save(tmp_path / "in" / "a.npy", np.arange(40, dtype=np.uint16))
    (tmp_path / "in" / "a.npy").rename(tmp_path / "in" / "a.NPY")
    assert load_corpus((str(tmp_path / "in"),), 0.5).names == ("a.NPY",)


# ---- text ------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("name", ["0.txt", "a.jsonl", "a.jsonl.gz", "a.JSON"])
def test_the_mark_before_a_text_is_no_part_of_it(name, tmp_path):
    lines = b"".join(b'{"text": "text %d"}\n' % n for n in range(40))
    if name == "0.txt":
        for number in range(40):
            write(tmp_path / "in", **{f"{number}.txt": BOM + b"text %d" % number})
    elif name == "a.jsonl.gz":  # Files that were joined have a mark each.
        members = (b"\n" + BOM + b"\n", BOM + lines, BOM)
        data = b"".join(gzip.compress(part, mtime=0) for part in members)
        write(tmp_path / "in", **{name: data})
    else:
        write(tmp_path / "in", **{name: BOM + b"\r\n" + lines})
    _, *splits = made(tmp_path)
    found = {bytes(part.astype(np.uint8)) for part, _ in documents_of(*splits)}
    assert found == {b"\0text %d\0" % number for number in range(40)}


def test_raw_text_begins_after_its_mark(tmp_path, monkeypatch):
    text = "é".encode() * 500
    for name, data in (("bare", text), ("marked", BOM + text)):
        write(tmp_path / name, a__txt=data)
    bare, marked = (load_corpus((str(tmp_path / n),), 0.5) for n in ("bare", "marked"))
    assert marked.digest == bare.digest
    monkeypatch.setattr("diloco_jax.data.documents.MAPPED_FROM", 100)
    unmarked, marked = (
        load_corpus((str(tmp_path / n),), 0.5) for n in ("bare", "marked")
    )
    for one in (marked, unmarked):
        for side in ("train", "validation"):
            row, want = getattr(one, side), getattr(bare, side)
            np.testing.assert_array_equal(row[: len(row)], want[: len(want)])
    # An older version had the mark in its rows, under the digest of the whole file.
    assert len({bare.digest, marked.digest, unmarked.digest}) == 3


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (POINTER.encode(), "pointer of Git LFS, and `git lfs pull` in its clone"),
        ("text".encode("utf-16"), "it is UTF-16; convert it to UTF-8"),
        ("text".encode("utf-16-be"), "a NUL byte at offset 0; convert"),
        ("\ufefftext".encode("utf-32-be"), "it is UTF-32; convert it"),
        (gzip.compress(b"text", mtime=0), "it is compressed; unpack it"),
        (b"\x93NUMPY\1\0v\0", "it has tokens; give it as data.paths"),
        (b"PAR1\xff", "it is Parquet; name it .parquet"),
    ],
)
def test_a_file_that_is_no_text_says_what_it_is(data, shown, tmp_path):
    write(tmp_path / "in", a__bin=data)
    for read in (made, lambda path: load_corpus((str(path / "in"),), 0.5)):
        with pytest.raises(ConfigError, match=rf"in/a.bin is not text: .*{shown}"):
            read(tmp_path)
    assert not (tmp_path / "out.partial").exists()


def test_what_begins_like_a_pointer_may_be_a_text(tmp_path):
    about = (POINTER + "is what a pointer looks like. ") * 10
    write(tmp_path / "in", a__txt=about, b__txt="BZh is a name")
    assert len(load_corpus((str(tmp_path / "in"),), 0.5).names) == 2
    _, *splits = made(tmp_path, recipe(fraction=0.5))
    assert documents_of(*splits)
