"""Prepared folders: rows that give their documents back, whoever made them."""

import gzip
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import make_tokenizers
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_support import LENGTH, documents_of, made, many, recipe, write_lines
from pyarrow import parquet

from diloco_jax.data import prepare, prepare_sources
from diloco_jax.data.corpus import is_validation, place
from diloco_jax.data.examples import Reader
from diloco_jax.data.prepare_sources import SourceKind, find_sources, make_parts, read
from diloco_jax.data.prepared import RecordFormat
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.errors import ConfigError

# ---- rows ------------------------------------------------------------------------


@given(st.data(), st.integers(1, 40), st.sampled_from([256, 65536, 65537, 1 << 20]))
def test_a_record_gives_its_row_back(data, length, vocabulary):
    sizes, left = [], length + 1
    while left and (size := data.draw(st.integers(0, left))):
        sizes.append(size)
        left -= size
    draw = np.random.default_rng(length)
    parts = [
        (draw.integers(0, vocabulary, size), draw.integers(0, 2, size) > 0)
        for size in sizes
    ]
    form = RecordFormat(length, vocabulary)
    pictures = data.draw(st.lists(st.binary(), max_size=3))
    record = form.encode(parts, pictures)
    assert len(record) == form.nbytes + sum(4 + len(p) for p in pictures)
    row, found = form.decode(record)
    assert found == pictures
    used = sum(sizes)
    tokens = np.concatenate([np.zeros(0, int), *(t for t, _ in parts)])
    np.testing.assert_array_equal(row["tokens"][:used], tokens)
    segments = np.repeat(np.arange(len(sizes)) + 1, sizes)
    np.testing.assert_array_equal(row["segments"][:used], segments)
    assert not row["segments"][used:].any()
    assert not row["tokens"][used:].any()
    flags = [np.concatenate([[False], learned[1:]]) for _, learned in parts]
    want = np.zeros(length + 1)
    want[:used] = np.concatenate([np.zeros(0), *flags])
    np.testing.assert_array_equal(row["weights"], want[1:])
    with pytest.raises(ValueError, match=f"{len(record) - 1} bytes, {len(record)}"):
        form.decode(record[:-1])


# ---- text ------------------------------------------------------------------------


def test_texts_come_back_on_their_side(texts, tmp_path):
    prepared, train, validation = made(tmp_path)
    for split, held in ((train, False), (validation, True)):
        want = [t for name, t in texts.items() if is_validation(name, 0.25) == held]
        assert want
        found = b"".join(
            bytes(part[1:].astype(np.uint8)) for part, _ in documents_of(split)
        )
        assert sorted(found) == sorted("".join(t + "\0" for t in want).encode())
        short = [t for t in want if len(t) <= LENGTH - 1]
        whole = {bytes(p.astype(np.uint8)) for p, _ in documents_of(split)}
        assert {f"\0{t}\0".encode() for t in short} <= whole
    counts = prepared.train.counts
    sizes = [len(t) for name, t in texts.items() if not is_validation(name, 0.25)]
    assert counts.documents == len(sizes)
    assert counts.text_bytes == sum(sizes)
    assert counts.predicted == sum(sizes) + len(sizes)
    assert counts.rows == len(train)
    assert counts.tokens > 0.9 * (LENGTH + 1) * counts.rows


@pytest.mark.parametrize("kind", [*make_tokenizers.KINDS])
def test_other_tokens_give_the_text_back(kind, tokenizers, tmp_path):
    (tmp_path / "in").mkdir()
    text = make_tokenizers.library_text(30_000)
    halves = text[:15_000], text[15_000:]
    for number, half in enumerate(halves):
        (tmp_path / "in" / f"{number}.txt").write_text(half, newline="")
    tokenizer = open_tokenizer(tokenizers[kind])
    fraction = next(
        f
        for f in np.linspace(0.01, 0.99, 99)
        if is_validation("0.txt", f) != is_validation("1.txt", f)
    )
    how = recipe(tokenizer, length=20_000, fraction=float(fraction))
    prepared, train, validation = made(tmp_path, how)
    found = set()
    for part, learned in documents_of(train, validation):
        assert (part[0], part[-1]) == (tokenizer.start[0], tokenizer.end)
        assert learned[1:].all()
        found.add(tokenizer.decode(part[1:-1]))
    assert found == set(halves)
    assert prepared.tokenizer.digest == tokenizer.digest
    assert open_tokenizer(tmp_path / "out").digest == tokenizer.digest


def test_a_long_text_is_cut_at_ends_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_sources, "DOCUMENT_BYTES", 1000)
    monkeypatch.setattr("diloco_jax.data.prepare_sources.DOCUMENT_BYTES", 1000)
    (tmp_path / "in").mkdir()
    lines = "".join(f"line {i} of ünïcode\n" for i in range(400)) + "ü" * 2500
    (tmp_path / "in" / "long.txt").write_text(lines)
    (tmp_path / "in" / "short.txt").write_text("short")
    sources = find_sources((str(tmp_path / "in"),))
    for part_bytes in (1000, 3000, 1 << 20):
        found = [
            document
            for part in make_parts(sources, part_bytes)
            for piece in part
            for document in read(sources[piece.source], piece, Reader())
        ]
        texts = [d.example.spans[0].text for d in found]
        assert "".join(texts) == lines + "short"
        assert len(texts) == 1 + -(-len(lines.encode()) // 1000)
        assert all(text.endswith("\n") for text in texts[:7])
        assert len({d.key for d in found}) == len(found)
        assert {"long.txt", "long.txt#1", "short.txt"} <= {d.key for d in found}


# ---- JSON lines and tables -------------------------------------------------------

CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six."},
]
OBJECTS = [
    {"text": "Plain text.", "other": 1},
    {"prompt": "Capital of France? ", "completion": "Paris"},
    {"messages": CHAT},
]


def learned_of(part, learned):
    return bytes(part[learned].astype(np.uint8)).decode()


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_answers_alone_are_learned(ending, tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / f"data.{ending}"
    if ending == "parquet":
        columns = {
            name: [found.get(name) for found in OBJECTS * 9]
            for name in ("text", "other", "prompt", "completion", "messages")
        }
        parquet.write_table(pyarrow.table(columns), path, row_group_size=5)
    else:
        write_lines(path, OBJECTS * 9, gzip.open if "gz" in ending else open)
    prepared, *splits = made(tmp_path, recipe(length=200, fraction=0.2))
    found = {
        (bytes(part.astype(np.uint8)).decode(), learned_of(part, learned))
        for part, learned in documents_of(*splits)
    }
    chat = (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n"
        "<|im_start|>assistant\nSix.<|im_end|>\n"
    )
    assert found == {
        ("\0Plain text.\0", "Plain text.\0"),
        ("Capital of France? Paris\0", "Paris\0"),
        (chat, "Four.<|im_end|>\nSix.<|im_end|>\n"),
    }
    counts = prepared.train.counts + prepared.validation.counts
    assert counts.documents == 27
    # Copies are on one side.
    assert prepared.train.counts.documents % 9 == 0


def test_turns_are_as_their_models_write_them():
    def said(turn):
        return Reader(turn=turn).read({"messages": CHAT[:2]})

    assert not said("gemma3").ends
    llama = "".join(span.text for span in said("llama3").spans)
    assert llama.startswith("<|start_header_id|>user<|end_header_id|>\n\nWhat is")
    own = said("[{role}: {content}]")
    assert "".join(s.text for s in own.spans if s.learned) == "Four.]"


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 5))
def test_lines_are_read_once_wherever_parts_end(tmp_path_factory, sizes, limit):
    folder = tmp_path_factory.mktemp("lines")
    path = folder / "data.jsonl"
    objects = [{"text": f"{n}:" + "x" * size} for n, size in enumerate(sizes)]
    write_lines(path, [{"text": ""}, *objects])
    (source,) = find_sources((str(path),))
    assert source.kind is SourceKind.LINES
    cuts = sorted({0, source.size, *(source.size * i // limit for i in range(limit))})
    found = []
    for start, stop in itertools.pairwise(cuts):
        piece = prepare_sources.SourceSlice(0, start, stop, stop - start)
        found += [d.example.spans[0].text for d in read(source, piece, Reader())]
    assert found == ["", *(o["text"] for o in objects)]


def test_rows_without_a_text_are_left_out_and_counted(tmp_path):
    objects = [{"text": f"{n}", "messages": None} for n in range(40)]
    nulls = [
        {"text": None, "messages": None},
        {"text": ""},
        {"prompt": "a", "completion": None},
    ]
    write_lines(tmp_path / "in" / "a.jsonl", [*objects, *nulls])
    names = ("text", "prompt", "completion", "messages")
    columns = {name: [o.get(name) for o in [*objects, *nulls]] for name in names}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in" / "b.parquet")
    prepared, *splits = made(tmp_path)
    counts = prepared.train.counts + prepared.validation.counts
    assert (counts.documents, counts.left_out) == (86, 6)
    assert len(documents_of(*splits)) == 80


@pytest.mark.parametrize(("fraction", "sides"), [(1e-6, (11, 1)), (0.999999, (1, 11))])
@pytest.mark.parametrize("part_bytes", [100, 1 << 20])
def test_few_documents_are_on_both_sides(fraction, sides, part_bytes, tmp_path):
    write_lines(
        tmp_path / "in" / "a.jsonl", [{"text": f"document {n}"} for n in range(12)]
    )
    prepared, *_ = made(tmp_path, recipe(fraction=fraction), part_bytes=part_bytes)
    counts = prepared.train.counts, prepared.validation.counts
    assert tuple(count.documents for count in counts) == sides
    (source,) = find_sources((str(tmp_path / "in"),))
    ((piece,),) = make_parts([source])
    keys = {document.key for document in read(source, piece, Reader())}
    held = {key for key in keys if is_validation(key, prepared.validation_fraction)}
    assert len(held) == sides[1]
    # The nearest one was moved.
    assert max(map(place, held)) < min(map(place, keys - held))


def test_work_among_its_sources_is_none_of_them(tmp_path, monkeypatch):
    many(tmp_path, 40)
    with monkeypatch.context() as inside:
        inside.setattr("diloco_jax.data.prepare._finish", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made(tmp_path, out="in/out")
    assert (tmp_path / "in" / "out.partial" / "parts").exists()
    prepared, *_ = made(tmp_path, out="in/out")
    assert [source.name for source in prepared.sources] == [
        f"{n}.jsonl" for n in range(4)
    ]


# ---- the same files, whoever makes them ------------------------------------------


def content(folder: Path):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.dist
def test_any_number_of_workers_makes_the_same_files(tmp_path, tokenizers, monkeypatch):
    many(tmp_path)
    # Workers import what is installed, whatever the current folder holds.
    (tmp_path / "socket.py").write_text("raise RuntimeError('of the folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    how = recipe(open_tokenizer(tokenizers["json"]))
    shares = []
    one, *_ = made(tmp_path, how, "one", part_bytes=20_000, report=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    two, *_ = made(tmp_path, how, "two", part_bytes=20_000, workers=2)
    assert "PYTHONSAFEPATH" not in os.environ, "as it was"
    assert len(one.train.shards) > 8
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert one.digest == two.digest


def test_a_command_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    """Parts that are done stay; what another process left half written goes."""
    many(tmp_path)
    made(tmp_path, out="whole", part_bytes=20_000)
    write_part, folder = prepare.write_part, tmp_path / "out.partial"

    def killed(at, number, *rest):
        if number == 3:
            raise KeyboardInterrupt
        write_part(at, number, *rest)

    with monkeypatch.context() as inside:
        inside.setattr(prepare, "write_part", killed)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path, part_bytes=20_000)
    torn = folder / "train-00099.arrayrecord.1.tmp"
    torn.write_bytes(b"half")
    kept = {path.name: path.stat().st_ino for path in folder.glob("*.arrayrecord")}
    assert len(list((folder / "parts").glob("*.json"))) == 3
    made(tmp_path, part_bytes=20_000)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    for name, inode in kept.items():
        assert (tmp_path / "out" / name).stat().st_ino == inode
    assert not folder.exists()


def test_work_that_is_done_stays_if_out_has_appeared(tmp_path, monkeypatch):
    many(tmp_path, 40)
    finish, out = prepare._finish, tmp_path / "out"

    def appears(*arguments):
        (out / "of another").mkdir(parents=True)
        return finish(*arguments)

    with monkeypatch.context() as inside:
        inside.setattr(prepare, "_finish", appears)
        with pytest.raises(ConfigError, match=r"is done and .*out \(Directory not emp"):
            made(tmp_path)
    out.rename(tmp_path / "away")
    with monkeypatch.context() as inside:
        inside.setattr(prepare, "write_part", lambda *a: 1 / 0)
        made(tmp_path)
    assert not (tmp_path / "out.partial").exists()
    assert not (out / "parts").exists()


@pytest.mark.dist
def test_a_command_whose_process_was_killed_goes_on(tmp_path):
    many(tmp_path)
    program = (
        "import sys, time; from diloco_jax import cli; "
        "from diloco_jax.data import prepare; "
        # It is killed before its end, however late that is.
        "finish = prepare._finish; held = sys.argv.pop(1) == 'held'; "
        "prepare._finish = lambda *a: time.sleep(600) if held else finish(*a); "
        "prepare.PART_BYTES = 30_000; "
        "sys.exit(cli.main(sys.argv[1:]))"
    )

    def command(how, out, workers="2"):
        line = ["data", "prepare", str(out), str(tmp_path / "in"), "--workers", workers]
        return [sys.executable, "-c", program, how, *line, "--sequence-length", "64"]

    out, again = tmp_path / "out", tmp_path / "again"
    folder, deadline = tmp_path / "out.partial", time.monotonic() + 60
    process = subprocess.Popen(command("held", out))
    while len(list((folder / "parts").glob("*.json"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    before = {path.stem for path in (folder / "parts").glob("*.json")}
    kept = {
        path.name: path.stat().st_ino
        for path in folder.glob("*.arrayrecord")
        if path.stem.split("-")[1] in before
    }
    assert kept
    assert subprocess.run(command("", out), timeout=120, check=False).returncode == 0
    for name, inode in kept.items():
        assert (out / name).stat().st_ino == inode
    fresh = command("", again, "1")
    assert subprocess.run(fresh, timeout=120, check=False).returncode == 0
    assert content(again) == content(out)
    assert not list(out.rglob("*.tmp"))
    assert not (out / "parts").exists()
