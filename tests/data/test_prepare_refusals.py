"""Refusals of `diloco data prepare`: by name, with nothing half-written."""

import json
import os

import pyarrow
import pytest
from prepare_support import documents_of, made, recipe, write_lines
from pyarrow import parquet

from diloco_jax.config import ConfigError
from diloco_jax.data import prepare_sources

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 26906\n"
DEEP = b"[" * 200_000 + b"]" * 200_000
CHAT = b'{"messages": [{"role": "user", "content": "a"}], "tools": %s}'
CHAT_0 = r"a.json, item 1 is no document: its text has a NUL character \(U\+0000\)"


@pytest.mark.parametrize(
    ("name", "data", "shown"),
    [
        ("a.txt", b"good\xff", r"a.txt is not text: .* not UTF-8 at offset 4"),
        ("a.txt", b"go\0od", r"a NUL byte at offset 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"a.jsonl, offset 14: .*Expecting"),
        ("a.jsonl", b"[1]\n", r"it is no object"),
        ("a.jsonl", b'{"txt": "a"}\n', r"its fields are txt; it needs 'text'"),
        ("a.jsonl", b'{"text": 3}\n', r"its fields are text \(int\); it needs 'text'"),
        ("a.jsonl", b'{"messages": [{"role": 1}]}', r"needs a role and a content"),
        ("a.jsonl.gz", b"none", r"a.jsonl.gz cannot be read"),
        ("a.parquet", b"none", r"a.parquet cannot be read as Parquet"),
        ("a.parquet", POINTER, r"a.parquet cannot be .*`git lfs pull`"),
        ("a.jsonl", POINTER, r"a.jsonl, offset 0: .*`git lfs pull`"),
        ("a.JSONL.GZ", POINTER, r"a.JSONL.GZ cannot be .*`git lfs pull`"),
        ("a.json", POINTER, r"a.json, offset 0: .*`git lfs pull`"),
        ("a.jsonl", b'{"text": "a\\u0000"}', r"a.jsonl, offset 0: .*U\+0000"),
        ("a.json", b'[{"text": "a"}, {"prompt": "", "completion": "\\u0000"}]', CHAT_0),
        ("a.json", b"[{},", r"a.json is no document: Expecting"),
        ("a.jsonl", b'{"text": "a"}\n' + DEEP, r"offset 14: .*nested too deeply"),
        ("a.json", DEEP, r"a.json is no document: its brackets are nested"),
        ("a.jsonl", CHAT % json.dumps(DEEP.decode()).encode(), r"offset 0: .*nested"),
        ("a.jsonl", b'\xff\xfe{\0"\0', r"offset 0: .*it is UTF-16"),
        ("a.jsonl", b'{"text": "\xff"}', r"a byte that is not UTF-8 at offset 10"),
        ("a.jsonl", b'{"text": null, "messages": [3]}', r"needs a role and a content"),
        ("a.jsonl", b'{"prompt": "a"}', r"its fields are prompt; it needs"),
    ],
)
def test_what_cannot_be_read_is_named(name, data, shown, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    with pytest.raises(ConfigError, match=shown):
        made(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "in" / name).unlink()
    for number in range(40):
        (tmp_path / "in" / f"{number}.txt").write_text("text")
    made(tmp_path)


def test_a_folder_of_somebody_elses_where_the_work_would_lie_stays(tmp_path):
    mine = tmp_path / "out.partial" / "mine.jsonl"
    mine.parent.mkdir()
    mine.touch()
    write_lines(tmp_path / "in" / "a.jsonl", [{"body": "text"}])
    with pytest.raises(ConfigError, match=r"out\.partial, .* has other files \(mine"):
        made(tmp_path)
    assert mine.exists()


def test_an_option_that_fits_no_document_is_refused_before_the_work(
    texts, tmp_path, monkeypatch
):
    write_lines(tmp_path / "in" / "z.jsonl", [{"body": "text"}] * 9)
    work = "diloco_jax.data.prepare.do_parts"
    monkeypatch.setattr(work, lambda *arguments: pytest.fail("the work began"))
    with pytest.raises(ConfigError, match=r"z.jsonl, offset 0: .*fields are body"):
        made(tmp_path)


def test_a_table_without_text_names_its_columns(tmp_path):
    (tmp_path / "in").mkdir()
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "in" / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"its columns are body\) .*give --text-field"
    ):
        made(tmp_path)
    how = recipe(text_field="body", fraction=0.5)
    with pytest.raises(ConfigError, match=r"1 documents with one text, which"):
        made(tmp_path, how)
    assert not (tmp_path / "out.partial").exists()


def test_a_table_with_a_text_that_is_none_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    data = pyarrow.array([b"text", b"caf\xe9 au lait"] * 200, pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(data), data.buffers())
    path = tmp_path / "in" / "a.parquet"
    parquet.write_table(pyarrow.table({"text": text}), path, row_group_size=300)
    with pytest.raises(
        ConfigError, match=r"a.parquet .*group 0, rows 0 to 255: 'utf-8"
    ):
        made(tmp_path)
    parquet.write_table(pyarrow.table({"text": ["a\0b"]}), path)
    with pytest.raises(ConfigError, match=r"row 0 of row group 0 .*U\+0000"):
        made(tmp_path)
    assert not (tmp_path / "out.partial").exists()


ROLES = "'assistant' says is learned, and their messages have the roles "


@pytest.mark.parametrize(
    ("objects", "shown"),
    [
        ([("user", "q"), ("gpt", "a")], ROLES + "'gpt', 'user'; rename it"),
        ([("user", "q"), ("Assistant", "a")], ROLES + "'Assistant', 'user'"),
        ([("user", "q")], ROLES + "'user'"),
        ({"text": None}, "nothing to learn: each is empty, or null where"),
        ({"text": ""}, "nothing to learn: each is empty"),
        ({"prompt": "a", "completion": None}, "nothing to learn: each is empty"),
        ({"messages": []}, "nothing to learn: each is empty"),
        ({"text": "one"}, " with one text, which cannot be on both sides"),
    ],
)
def test_what_cannot_be_used_says_why_before_the_work(
    objects, shown, tmp_path, monkeypatch
):
    work = "diloco_jax.data.prepare.do_parts"
    monkeypatch.setattr(work, lambda *arguments: pytest.fail("the work began"))
    if isinstance(objects, list):
        objects = {"messages": [{"role": r, "content": c} for r, c in objects]}
    write_lines(tmp_path / "in" / "a.jsonl", [objects] * 9)
    with pytest.raises(ConfigError, match=rf"SOURCES: 9 documents.*{shown}"):
        made(tmp_path)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_any_failure_before_a_part_is_done_leaves_nothing(
    error, texts, tmp_path, monkeypatch
):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("diloco_jax.data.prepare.do_parts", fail)
    with pytest.raises(error):
        made(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_half_a_character_of_json_is_replaced(tmp_path):
    (tmp_path / "in").mkdir()
    lines = "".join(f'{{"text": "{n} \\ud800"}}\n' for n in range(40))
    (tmp_path / "in" / "a.jsonl").write_text(lines)
    _, train, validation = made(tmp_path)
    assert len(documents_of(train, validation)) == 40


def test_other_options_do_not_go_on(texts, tmp_path, monkeypatch):
    with monkeypatch.context() as inside:
        finish = "diloco_jax.data.prepare._finish"
        inside.setattr(finish, lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made(tmp_path)
    with pytest.raises(ConfigError, match="sequence_length = 32, now it is 16; give"):
        made(tmp_path, recipe(length=16))
    path = tmp_path / "in" / "t003.txt"
    path.write_text(path.read_text() + "more")
    with pytest.raises(ConfigError, match=r"began with sources = .*t003.txt"):
        made(tmp_path)
    path.write_text("back"[:0])
    path.unlink()
    with pytest.raises(ConfigError, match=r"began with sources"):
        made(tmp_path)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (os.unlink, r"t005.txt cannot be read \(No such file"),
        (lambda path: os.utime(path, (1, 1)), r"t005.txt has changed since the work"),
    ],
)
def test_a_source_that_changes_meanwhile_is_named(
    change, shown, texts, tmp_path, monkeypatch
):
    real = prepare_sources.make_parts

    def late(*arguments):
        found = real(*arguments)
        change(tmp_path / "in" / "t005.txt")
        return found

    monkeypatch.setattr("diloco_jax.data.prepare.make_parts", late)
    with pytest.raises(ConfigError, match=shown):
        made(tmp_path)


def test_what_is_refused_after_a_part_is_done_keeps_the_part(tmp_path):
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": f"{n}"} for n in range(40)])
    write_lines(tmp_path / "in" / "b.jsonl", [{"text": "b"}, {"body": "late"}])
    with pytest.raises(ConfigError, match=r"b.jsonl, offset 14: .*fields are body"):
        made(tmp_path, part_bytes=200)
    parts = tmp_path / "out.partial" / "parts"
    assert any(parts.glob("*.json"))


@pytest.mark.parametrize(
    ("out", "said"),
    [("x", "x.partial, where the work lies until it is"), ("no/y", "there is no fold")],
)
def test_a_folder_that_cannot_be_made_changes_nothing(out, said, texts, tmp_path):
    (tmp_path / "x.partial").write_text("mine")
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, out=out)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "x.partial"}
    assert (tmp_path / "x.partial").read_text() == "mine"
