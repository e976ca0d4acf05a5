"""Pictures: files of all kinds, the rows that have them, and what is none."""

import base64
import contextlib
import dataclasses
import io
import itertools
import json
import re
import struct
import zlib
from pathlib import Path

import make_tokenizers
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from prepare_support import made, recipe, write_lines
from pyarrow import parquet

from diloco_jax import cli, emulate
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.data import pictures
from diloco_jax.data.examples import AROUND, Tokenised, pictures_for, reader_for
from diloco_jax.data.loading import load_data
from diloco_jax.data.pictures import (
    BYTE_TOKEN,
    MOST_PIXELS,
    PLACE,
    PictureError,
    PictureInput,
    RowPictures,
    decoded,
)
from diloco_jax.data.prepare import pack, pieces
from diloco_jax.data.prepared import MANIFEST, PreparedRows, read_manifest
from diloco_jax.data.reader import BatchReader, LeasedStream
from diloco_jax.data.tokenizers import Bytes, open_tokenizer
from diloco_jax.models.build import build
from diloco_jax.protocol.messages import Span

SIDE, EACH, LENGTH, TOKEN, WAIT_S = 8, 4, 64, 7, 60.0
ORANGE = (240, 130, 20)


def file_of(image, kind="PNG", **options):
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


def plain(color=ORANGE, size=(20, 12), mode="RGB"):
    return Image.new("RGB", size, color).convert(mode)


def halves(mode="RGB"):
    """Left red, right blue; above light, below dark."""
    values = np.zeros((40, 60, 3), np.uint8)
    values[:, :30, 0], values[:, 30:, 2] = 250, 250
    values[:20] //= 2
    return Image.fromarray(values).convert(mode)


# ---- files of all kinds ------------------------------------------------------------


def frames(kind):
    others = [plain((0, 0, 200)), plain((0, 200, 0))]
    return file_of(plain(), kind, save_all=True, append_images=others)


def sixteen(value):
    return Image.fromarray(np.full((9, 5), value, np.uint16))


OF_TWO = plain().quantize(2)
WHITE, GREY = (255,) * 3, (90,) * 3
KINDS = {
    "png": (file_of(plain()), ORANGE),
    "jpeg": (file_of(plain(), "JPEG", quality=95), ORANGE),
    "webp": (file_of(plain(), "WEBP", lossless=True), ORANGE),
    "bmp": (file_of(plain(), "BMP"), ORANGE),
    "tiff": (file_of(plain(), "TIFF"), ORANGE),
    "ppm": (file_of(plain(), "PPM"), ORANGE),
    "grey": (file_of(plain(GREY, mode="L")), GREY),
    "grey jpeg": (file_of(plain(GREY, mode="L"), "JPEG"), GREY),
    "one bit": (file_of(plain(WHITE, mode="1")), WHITE),
    "palette": (file_of(plain(mode="P")), ORANGE),
    "palette, clear": (file_of(OF_TWO, transparency=OF_TWO.getpixel((0, 0))), WHITE),
    "grey, half clear": (file_of(Image.new("LA", (5, 5), (0, 128))), (127,) * 3),
    "clear": (file_of(Image.new("RGBA", (5, 5), (9, 9, 9, 0))), WHITE),
    "not clear": (file_of(plain(mode="RGBA")), ORANGE),
    "CMYK": (file_of(plain(mode="CMYK"), "JPEG", quality=95), ORANGE),
    "16 bit": (file_of(sixteen(0x8000)), (128,) * 3),
    "16 bit tiff": (file_of(sixteen(0xFF00), "TIFF"), WHITE),
    "animated gif": (frames("GIF"), ORANGE),
    "animated webp": (frames("WEBP"), ORANGE),
    "animated png": (frames("PNG"), ORANGE),
    "a pixel": (file_of(plain(size=(1, 1))), ORANGE),
    "a line": (file_of(plain(size=(3000, 1))), ORANGE),
    "larger": (file_of(plain(size=(700, 900)), "JPEG", quality=95), ORANGE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_any_kind_is_a_square_of_colours(kind):
    data, color = KINDS[kind]
    found = decoded(data, SIDE)
    assert (found.shape, found.dtype) == ((SIDE, SIDE, 3), np.uint8)
    # Palettes have 216 colours, and JPEG is not exact.
    loose = 26 if "palette" in kind or "gif" in kind else 6
    np.testing.assert_allclose(found.astype(int), [[color] * SIDE] * SIDE, atol=loose)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_picture_stands_upright(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(halves(), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    want = decoded(file_of(upright), SIDE).astype(int)
    np.testing.assert_allclose(decoded(data, SIDE).astype(int), want, atol=12)
    turned = decoded(file_of(halves()), SIDE).astype(int)
    assert (np.abs(want - turned).max() < 12) == (orientation == 1)


def test_a_picture_with_a_broken_orientation_stands_as_it_is():
    data = file_of(halves(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    np.testing.assert_array_equal(decoded(data, SIDE), decoded(file_of(halves()), SIDE))


def bomb(width, height):
    """A PNG of that many pixels, by its header alone."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    after = struct.pack(">I", zlib.crc32(chunk))
    end = b"\0\0\0\0IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + after + end


def test_what_would_fill_the_memory_is_refused_by_its_header(monkeypatch):
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    whole = file_of(Image.new("1", (8200, 8200)))
    assert len(whole) < 20_000
    for data, size in (
        (whole, "8,200 x 8,200 pixels"),
        (bomb(9000, 9000), "9,000 x 9,000 pixels"),
        (bomb(60_000, 60_000), "3600000000 pixels"),
    ):
        with pytest.raises(PictureError, match=f"{size}.*at most {MOST_PIXELS:,} are"):
            decoded(data, SIDE)
    monkeypatch.undo()
    monkeypatch.setattr(pictures, "MOST_PIXELS", 240)
    decoded(file_of(plain(size=(20, 12))), SIDE)
    with pytest.raises(PictureError, match="20 x 13 pixels, and at most"):
        decoded(file_of(plain(size=(20, 13))), SIDE)


def test_few_large_pictures_are_decoded_at_a_time(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def gate():
        entered.append(True)
        yield

    monkeypatch.setattr(pictures, "LARGE_PIXELS", 240)
    for width, count in ((20, 0), (21, 1)):
        monkeypatch.setattr(pictures, "LARGE_AT_ONCE", gate())
        decoded(file_of(plain(size=(width, 12))), SIDE)
        assert len(entered) == count


def test_a_document_has_so_many_bytes_of_pictures(tmp_path, monkeypatch):
    """And no more of a file is read than would say so."""
    (tmp_path / "a.png").write_bytes(png(0))
    with (tmp_path / "b.png").open("wb") as sparse:
        sparse.truncate(1 << 26)
    most = 5 * len(png(0)) // 2
    monkeypatch.setattr(pictures, "MOST_BYTES_TOGETHER", most, raising=False)
    assert pictures.read_pictures(["a.png"] * 2, tmp_path) == (png(0),) * 2
    said = f"picture 2: with it .* has {most + 1:,} bytes .* at most {most:,} are taken"
    for third in ("a.png", "b.png"):
        with pytest.raises(PictureError, match=said):
            pictures.read_pictures(["a.png", "a.png", third], tmp_path)


# ---- sources -----------------------------------------------------------------------


def with_pictures(tokenizer=None, each=EACH, length=LENGTH, most=0, **options):
    how = recipe(tokenizer, length, **options)
    pictures = pictures_for(how.tokenizer, each, length, most)
    reader = dataclasses.replace(reader_for(how.tokenizer), pictures=pictures)
    return dataclasses.replace(how, reader=reader)


def color_of(number):
    return number * 5 % 256, 255 - number * 3 % 256, number * 41 % 256


def png(number):
    return file_of(plain(color_of(number), (6 + number % 5, 9)))


def in_base64(data):
    return base64.b64encode(data).decode()


def written(root, count=40):
    """A folder with pictures in all places and forms. Returns for the text of each
    document the numbers of its pictures."""
    (root / "in" / "pics").mkdir(parents=True)
    for number in range(count):
        (root / "in" / "pics" / f"{number}.png").write_bytes(png(number))
    lines, told = [], {}
    for n in range(count):
        paths = [f"pics/{n}.png", {"bytes": in_base64(png(n)), "path": "away.png"}]
        forms = [
            {"text": f"before {n} {PLACE} behind", "image": paths[0]},
            {"text": f"without a place {n}", "images": [in_base64(png(n))]},
            {"text": f"no picture {n}", "image": None},
            {"text": f"two {PLACE}, {PLACE} of {n}", "images": paths},
        ]
        lines.append(forms[n % 4])
        told[lines[-1]["text"].replace(PLACE, "")] = ([n], [n], [], [n, n])[n % 4]
    write_lines(root / "in" / "a.jsonl", lines)
    rows = {
        "prompt": [f"what is {n}" for n in range(count)],
        "completion": [f" it is {n}" for n in range(count)],
        "images": [[{"bytes": png(n), "path": None}] * (n % 3) for n in range(count)],
    }
    table = pyarrow.table(rows)
    parquet.write_table(table, root / "in" / "b.parquet", row_group_size=15)
    for n in range(count):
        told[f"what is {n} it is {n}"] = [n] * (n % 3)
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared folder of `written`, and what it has to say."""
    root = tmp_path_factory.mktemp("pictures")
    told = written(root)
    made(root, with_pictures(), part_bytes=4000)
    return root / "out", told


def whole(path):
    prepared = read_manifest(path)
    splits = prepared.train, prepared.validation
    return [PreparedRows(path, prepared, s, prepared.pictures) for s in splits]


def test_each_document_has_its_pictures_where_they_stand(folder):
    """All documents come back, on one of the sides, with as many pictures as they had,
    each whole, of its color, and unlearned."""
    path, told = folder
    found = {}
    for source in whole(path):
        for number in range(len(source)):
            row = source[number]
            count = int(row["picture_count"])
            assert count * EACH == (row["tokens"] == BYTE_TOKEN).sum()
            assert all(row["pictures"][:count])
            assert not any(row["pictures"][count:])
            assert not row["weights"][row["tokens"][1:] == BYTE_TOKEN].any()
            left = list(row["pictures"][:count])
            for segment in range(1, row["segments"].max() + 1):
                tokens = row["tokens"][row["segments"] == segment]
                runs = re.findall(b"\xff+", bytes(tokens.astype(np.uint8)))
                assert all(len(run) % EACH == 0 for run in runs)
                text = bytes(tokens[(tokens != BYTE_TOKEN) & (tokens != 0)].tolist())
                some = sum(map(len, runs)) // EACH
                found[text.decode()] = [left.pop(0) for _ in range(some)]
            assert not left
    assert found.keys() == told.keys()
    for text, numbers in told.items():
        assert found[text] == [png(number) for number in numbers]


def test_the_manifest_counts_pictures(folder):
    path, told = folder
    prepared = read_manifest(path)
    splits = prepared.train, prepared.validation
    assert prepared.format == 3
    assert sum(split.pictures for split in splits) == sum(map(len, told.values()))
    for split, rows in zip(splits, whole(path), strict=True):
        counts = [int(rows[n]["picture_count"]) for n in range(len(rows))]
        assert split.pictures == sum(counts)
        assert split.with_pictures == sum(map(bool, counts))
        assert split.most_pictures == max(counts) <= prepared.pictures.most
    assert prepared.pictures.most <= LENGTH // EACH


def test_workers_change_no_row(folder, tmp_path):
    written(tmp_path)
    again, *_ = made(tmp_path, with_pictures(), part_bytes=4000, workers=2)
    assert again.digest == read_manifest(folder[0]).digest


def test_copies_of_a_text_with_unlike_pictures_are_apart(tmp_path):
    """Else each question of a kind would be on one side, with all its answers."""
    rows = [{"text": "which colour?", "image": in_base64(png(n))} for n in range(40)]
    write_lines(tmp_path / "in" / "a.jsonl", rows)
    prepared, *_ = made(tmp_path, with_pictures())
    assert 0 < prepared.validation.counts.documents < 25
    assert prepared.train.counts.documents + prepared.validation.counts.documents == 40


def test_text_alone_is_what_it_was_with_and_without(tmp_path):
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": f"{n} " * n} for n in range(50)])
    plain_ones, *_ = made(tmp_path, recipe(length=LENGTH), out="a")
    taken, *_ = made(tmp_path, with_pictures(), out="b")
    assert taken.digest == plain_ones.digest
    assert b"pictures" not in (tmp_path / "b" / MANIFEST).read_bytes()


GOOD = in_base64(png(0))
AVIF = in_base64(b"\0\0\0\x1cftypavif" + bytes(3_000_000))
FLOATS = in_base64(file_of(Image.new("F", (4, 4), 0.5), "TIFF"))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8))
CUT = {"image": in_base64(file_of(NOISE)[:3000])}
CUT_JPEG = {"image": in_base64(file_of(NOISE, "JPEG")[:1500])}
UNREAD, NO_PLACE = "cannot be read as a picture: ", f"the place of one, {PLACE}, 1 ti"
BAD = {
    "a path of nothing": ({"image": "pics/7.png"}, "no file 'pics/7.png' in .*in"),
    "a folder": ({"image": "."}, "no file '.' in"),
    "an address": ({"image": "https://a.b/c.png"}, "is an address; fetch it"),
    "a name of no disk": ({"image": "x" * 300}, r"cannot be read \(File name too lo"),
    "no path": ({"image": "x" * 5000}, "of 5,000 characters, is no path.* of JPEG"),
    "a kind of others": ({"image": AVIF}, "of 4,000,016 characters, is no .* of JPEG"),
    "above": ({"image": "../mine.png"}, "'../mine.png' leads out of .*copy the file"),
    "elsewhere": ({"image": __file__}, "leads out of .*in; copy the file into that f"),
    "a link": ({"image": "link.png"}, "'link.png' leads out of"),
    "links in a ring": ({"image": "ring"}, "'ring' in "),
    "many": ({"images": [GOOD] * 1025}, "1,025 pictures, and a document has 1,024 at"),
    "cut off": (CUT, f"{UNREAD}image file is truncated"),
    "cut off jpeg": (CUT_JPEG, f"{UNREAD}image file is truncated"),
    "text": ({"image": "words.txt"}, "it is none of JPEG, PNG,"),
    "a program's": ({"image": "drawing.eps"}, "it is none of JPEG, PNG,"),
    "too long": ({"image": "long.png"}, "more than 134,217,728 bytes; make it sm"),
    "empty": ({"image": {"bytes": ""}}, "it is none of"),
    "no base64": ({"image": {"bytes": "?" * 90}}, "it is none of"),
    "floats": ({"image": FLOATS}, "floats, of no known range"),
    "a bomb": ({"image": in_base64(bomb(9000, 9000))}, "9,000 x 9,000 pixels"),
    "a number": ({"image": 3}, "it is int, and a picture is a path"),
    "neither of two": ({"image": {"url": "a"}}, "it is NoneType, and a picture"),
    "both": ({"image": GOOD, "images": [GOOD]}, "both 'image' and 'images'"),
    "no list": ({"images": GOOD}, "its 'images' are str"),
    "a hole": ({"images": [GOOD, None]}, "or one of them is null"),
    "the second": ({"images": [GOOD, "a.png"]}, "its picture 1: there is no file"),
    "no place": (
        {"images": [GOOD] * 2, "text": f"one {PLACE}"},
        f"it has 2 pictures, and its text has {NO_PLACE}",
    ),
    "no picture": (
        {"text": f"the word {PLACE}"},
        f"it has 0 pictures, and its text has {NO_PLACE}",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_named_with_file_and_row(kind, tmp_path):
    row, said = BAD[kind]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "words.txt").write_text("words")
    (tmp_path / "in" / "drawing.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n")
    (tmp_path / "mine.png").write_bytes(png(0))
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "mine.png")
    (tmp_path / "in" / "ring").symlink_to(tmp_path / "in" / "ring")
    with (tmp_path / "in" / "long.png").open("wb") as sparse:
        sparse.truncate(1 << 28)
    rows = [{"text": f"{n}", "image": GOOD} for n in range(9)]
    rows.append({"text": "a picture", **row})
    write_lines(path := tmp_path / "in" / "a.jsonl", rows)
    at = sum(len(line) for line in path.read_bytes().splitlines(True)[:-1])
    with pytest.raises(ConfigError) as refused:
        made(tmp_path, with_pictures(), workers=1)
    assert re.search(said, str(refused.value)), refused.value
    assert f"in/a.jsonl, offset {at}: the line there is no doc" in str(refused.value)
    assert str(refused.value).endswith("mend its pictures, or leave it out")
    assert len(str(refused.value)) < 1000
    assert not (tmp_path / "out").exists()


def test_a_bad_picture_of_a_table_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    rows = {"text": ["a", "b", "c"], "image": [png(0), b"none", png(1)]}
    path = tmp_path / "in" / "a.parquet"
    parquet.write_table(pyarrow.table(rows), path)
    with pytest.raises(
        ConfigError, match=r"a.parquet, row 1 of row group 0 .*: its pic"
    ):
        made(tmp_path, with_pictures())
    made(tmp_path, recipe())  # Without the option, the text alone is taken.


# ---- tokenizers and chats ------------------------------------------------------------

CHAT = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""A template that takes contents in parts, as that of Idefics3."""
MARKS = (PLACE, "<fake_token_around_image>", "<global-img>")


def asked(n, **first):
    return {
        "messages": [
            {"role": "user", "content": f"what is {n}?", **first},
            {"role": "assistant", "content": f"it is {n}"},
        ],
        "images": [in_base64(png(n))],
    }


@pytest.mark.parametrize("template", [True, False], ids=["template", "turn"])
@pytest.mark.parametrize("parts", [True, False], ids=["parts", "text"])
def test_a_chat_asks_about_its_picture(template, parts, tmp_path):
    ends = ("<|im_start|>", "<|im_end|>", "<end_of_utterance>")
    path = make_tokenizers.make_json(tmp_path / "words", words=(*MARKS, *ends))
    if template:
        (tmp_path / "words" / "chat_template.jinja").write_text(CHAT)
    tokenizer = open_tokenizer(path)
    said = [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]
    rows = [asked(n, **({"content": said} if parts else {})) for n in range(12)]
    write_lines(tmp_path / "in" / "a.jsonl", rows)
    prepared, train, _ = made(tmp_path, with_pictures(tokenizer, length=96))
    assert prepared.train.counts.cut == 0
    word = {mark: tokenizer.token_of(mark) for mark in MARKS}
    assert prepared.pictures.token == word[PLACE]
    assert prepared.pictures.text == PLACE.join(AROUND)
    tokens, weights = train[0]["tokens"], train[0]["weights"]
    (first, *_) = np.flatnonzero(tokens == word[PLACE])
    fake, around = (
        word["<fake_token_around_image>"],
        tokens[first - 2 : first + EACH + 1],
    )
    assert list(around) == [fake, word["<global-img>"], *[word[PLACE]] * EACH, fake]
    question = tokenizer.decode([int(t) for t in tokens[first + EACH + 1 :][:40]])
    assert question.startswith("what?" if parts else "what is ")
    learned = tokenizer.decode([int(t) for t in tokens[1:][weights > 0]])
    assert "it is" in learned
    assert "what" not in learned


def test_a_tokenizer_needs_a_word_for_a_picture(tokenizers):
    for kind in ("json", "pieces"):
        with pytest.raises(ConfigError, match=f"has no word {PLACE} that is a token"):
            pictures_for(open_tokenizer(tokenizers[kind]), EACH, LENGTH)
    with pytest.raises(ConfigError, match=r"--picture-tokens = 65 .*-length = 64: no"):
        pictures_for(Bytes(), 65, 64)
    assert pictures_for(Bytes(), 64, 64).most == 1
    assert pictures_for(Bytes(), 4, 64, most=3).most == 3
    assert pictures_for(Bytes(), 4, 64, most=99).most == 16


# ---- packing -------------------------------------------------------------------------


@st.composite
def documents(draw, each):
    """Token rows, learned or not, each token and each picture with a number of its own,
    from 10 on; `TOKEN` is the placeholder."""
    found, number = [], itertools.count(10)
    for _ in range(draw(st.integers(1, 8))):
        tokens, places = [next(number)], []
        for shown in draw(st.lists(st.booleans(), max_size=30)):
            if shown:
                places.append((next(number), 0))
            tokens += [TOKEN] * each if shown else [next(number)]
        tokens = np.array(tokens + [next(number)] * bool(places), np.int32)
        learned = (tokens != TOKEN) & draw(st.booleans())
        found.append(Tokenised(tokens, learned, tuple(places)))
    return found


@given(st.data(), st.integers(1, 5), st.integers(0, 9), st.integers(1, 4))
def test_rows_have_whole_pictures_and_predict_each_token_once(data, each, more, most):
    """And each after what it stands behind in its document."""
    length, found = each + more, data.draw(documents(each))
    rows = pack(found, length, RowPictures(most=most, tokens=each, token=TOKEN))
    sizes, predicted, seen = [], [], []
    for row in rows:
        sizes.append([sum(map(len, part)) for part in zip(*row, strict=True)])
        assert sizes[-1][0] <= length + 1
        assert sizes[-1][2] <= most
        for piece in row:
            shown = (piece.tokens == TOKEN).tobytes()
            whole = [len(run) for run in re.findall(b"\1+", shown)]
            assert all(size % each == 0 for size in whole)
            assert sum(whole) == each * len(piece.pictures)
            seen += piece.pictures
            predicted += predictions(piece)
    want = [pair for document in found for pair in predictions(document)]
    assert sorted(predicted) == sorted(want)
    assert len(set(seen)) == len(seen)
    for (one, _, shown), (other, _, more) in itertools.combinations(sizes, 2):
        assert one + other > length + 1 or shown + more > most, "they could be one row"


def predictions(piece):
    """What counts of a document or a piece, each token after what it stands behind."""
    pairs = list(itertools.pairwise(piece.tokens.tolist()))
    return [
        pair for pair, counts in zip(pairs, piece.learned[1:], strict=True) if counts
    ]


def test_a_document_of_more_pictures_than_a_row_may_have_is_cut_before_one():
    tokens = np.array([1, 7, 7, 2, 7, 7, 3, 7, 7, 4], np.int32)
    document = Tokenised(tokens, tokens != TOKEN, ((0, 1), (1, 1), (2, 1)))
    cut = pieces(document, 20, RowPictures(most=2, tokens=2, token=TOKEN))
    assert [list(piece.tokens) for piece in cut] == [[1, 7, 7, 2, 7, 7, 3], [7, 7, 4]]


# ---- reading -------------------------------------------------------------------------


def config_of(*paths, **data):
    run = RunConfig(
        model=ModelConfig(factory=f"{__file__}:sees"),
        data=DataConfig(paths=tuple(map(str, paths)), **data),
        sync=SyncConfig(steps_per_cycle=4, fragments=2),
        sequence_length=LENGTH,
        total_tokens=60 * 8 * LENGTH,
    )
    islands = {
        "a": IslandConfig(batch_size=8, step_seconds=1.0),
        "b": IslandConfig(batch_size=4, step_seconds=1.7),
    }
    return Config(run=run, islands=islands).validate()


def sees(run, island, layout, blind=False, takes=EACH):
    """Predicts a byte from the one before, and from the colour of the row's picture."""
    import jax
    import jax.numpy as jnp

    from diloco_jax.data.source import SEGMENTS, TOKENS
    from diloco_jax.models.model import Model, plain_axes, split_batch, weighted_loss

    taken = PictureInput(side=SIDE, tokens=takes, token=BYTE_TOKEN)

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "bytes": 0.1 * jax.random.normal(keys[0], (256, 24)),
            "seen": 0.1 * jax.random.normal(keys[1], (3, 24)),
            "out": 0.1 * jax.random.normal(keys[2], (24, 256)),
        }

    def loss(params, batch):
        inputs, targets, weights = split_batch(batch)
        x = params["bytes"][inputs]
        if "pictures" in batch and not blind:
            batch_size, most = batch["pictures"].shape[:2]
            pixels = batch["pictures"].astype(jnp.float32) / 255 - 0.5
            colors = pixels.mean((2, 3)) @ params["seen"]
            at = jnp.cumsum(inputs == taken.token, axis=1) - 1
            number = jnp.clip(at // taken.tokens, 0, most - 1)
            own = colors[jnp.arange(batch_size)[:, None], number]
            shown = (at >= 0) & (at // taken.tokens < batch["picture_count"][:, None])
            x = x + jnp.where(shown[..., None], own, 0)
        logits = jax.nn.log_softmax(jax.nn.gelu(x) @ params["out"])
        losses = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return weighted_loss(losses, weights)

    shapes = jax.eval_shape(init, jax.random.key(0))
    fields = {"tokens": TOKENS, "segments": SEGMENTS}
    fields |= taken.fields(run.data.pictures)
    return Model(init, loss, plain_axes(shapes), fields, pictures=taken)


def blinded(run, island, layout):
    return sees(run, island, layout, blind=True)


def takes_more(run, island, layout):
    return sees(run, island, layout, takes=EACH + 1)


def takes_none(run, island, layout):
    taken = sees(run, island, layout)
    fields = {name: taken.batch[name] for name in ("tokens", "segments")}
    return taken._replace(batch=fields, pictures=None)


def reader_of(config):
    run = config.run
    data = load_data(run)
    fields = build(run).fields(run.data.arrays)
    return BatchReader(data.index(run.seed), fields, run.sequence_length)


def test_a_batch_has_pixels_as_the_model_takes_them(folder):
    config = resolve(config_of(folder[0]))
    reader = reader_of(config)
    rows, most = load_data(config.run).index(config.run.seed), config.run.data.pictures
    batch = reader.batch(np.arange(30))
    assert most == read_manifest(folder[0]).pictures.most
    assert batch["pictures"].shape == (30, most, SIDE, SIDE, 3)
    assert batch["pictures"].dtype == np.uint8
    assert batch["picture_count"].dtype == np.int32
    for number, count in enumerate(batch["picture_count"]):
        files = rows[number]["pictures"]
        for place in range(count):
            one = batch["pictures"][number, place]
            np.testing.assert_array_equal(one, decoded(files[place], SIDE))
        assert not batch["pictures"][number, count:].any()
    assert 0 in batch["picture_count"]
    assert len(set(batch["picture_count"])) > 2


def test_batches_are_alike_on_two_hosts_and_after_a_resumption(folder):
    """Two hosts read halves of what one reads whole; who comes back is granted what is
    left, and reads what the first one would have read."""
    config = resolve(config_of(folder[0]))
    one, (a, b) = stream_of(config), (stream_of(config) for _ in range(2))
    a.read_only([(0, 4)])
    b.read_only([(4, 8)])
    for stream in (one, a, b):
        stream.grant(Span(16, 64))
    found = [one.next_batch(WAIT_S) for _ in range(6)]
    for batch in found:
        halves_of = a.next_batch(WAIT_S), b.next_batch(WAIT_S)
        for name, array in batch.items():
            parts = [
                half[name].parts[own]
                for half, own in zip(halves_of, ((0, 4), (4, 8)), strict=True)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), array)
    again = stream_of(config)
    again.grant(Span(40, 64))
    for batch in found[3:]:
        late = again.next_batch(WAIT_S)
        for name, array in batch.items():
            np.testing.assert_array_equal(late[name], array)
    for stream in (one, a, b, again):
        stream.close()


def stream_of(config):
    return LeasedStream(reader_of(config), 8)


def test_a_picture_that_was_spoilt_later_is_named_by_its_row():
    class Spoilt:
        fields = RowPictures(most=1, tokens=1, token=1).fields

        def __getitem__(self, row):
            return RowPictures(most=1).arrays([file_of(NOISE)[:3000]])

    taken = PictureInput(side=SIDE, tokens=1, token=1).fields(1)
    with pytest.raises(ConfigError, match=r"row 5 has a picture that is none: .*copy"):
        BatchReader(Spoilt(), taken, LENGTH).batch(np.array([5]))
    other = PictureInput(side=SIDE, tokens=1, token=1).fields(2)
    with pytest.raises(ConfigError, match=r"rows have object\[1\] as 'pictures', and"):
        BatchReader(Spoilt(), other, LENGTH)


# ---- runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(folder, tmp_path_factory):
    """Three folders: the pictures, text alone, and pictures of more placeholders."""
    root = tmp_path_factory.mktemp("mixture")
    write_lines(root / "in" / "a.jsonl", [{"text": f"text {n}"} for n in range(90)])
    made(root, recipe(length=LENGTH), out="text")
    rows = [{"text": f"text {n}", "image": in_base64(png(n))} for n in range(20)]
    write_lines(root / "in" / "a.jsonl", rows)
    made(root, with_pictures(each=EACH + 1), out="other")
    return folder[0], root / "text", root / "other"


def test_a_mixture_has_rows_with_and_without_pictures(mixture):
    config = resolve(config_of(*mixture[:2], weights=(1.0, 1.0)))
    batch = reader_of(config).batch(np.arange(40))
    with_some = batch["picture_count"] > 0
    assert not with_some[batch["source_number"] == 1].any()
    assert with_some[batch["source_number"] == 0].any()
    text = resolve(config_of(mixture[1]))
    assert text.run.data.pictures == 0
    assert "pictures" not in reader_of(text).fields


@pytest.mark.parametrize(
    ("paths", "data", "factory", "said"),
    [
        (
            (0, 2),
            {},
            "sees",
            r"other has 5 placeholders of token 255, one of .* 4 of 2",
        ),
        ((0,), {"pictures": 1}, "sees", r"data.pictures = 1, and a row of .* raise it"),
        (
            (0,),
            {},
            "takes_more",
            r"picture_tokens = 4 of .* = 255, and the model takes 5 of 255: .*5 and",
        ),
        ((0,), {}, "takes_none", r"has pictures \(data.arrays.*and the model takes no"),
    ],
)
def test_what_does_not_fit_is_refused(mixture, paths, data, factory, said):
    config = config_of(*(mixture[n] for n in paths), **data)
    config = config.replace("run.model.factory", f"{__file__}:{factory}")
    with pytest.raises(ConfigError, match=said):
        build(resolve(config).run)


def test_a_run_may_have_room_for_more_pictures(folder):
    config = resolve(config_of(folder[0], pictures=20))
    assert config.run.data.pictures == 20
    assert reader_of(config).batch(np.arange(2))["pictures"].shape[:2] == (2, 20)
    less = config.replace("data.pictures", 0)
    with pytest.raises(ConfigError, match=r"data.pictures = 0, and the data has pic"):
        build(less.run)


def test_an_emulation_reads_pictures_and_its_books_are_exact(tmp_path):
    """The letter cannot be told from the question: whoever is blind guesses."""
    names = {"r": (230, 20, 20), "g": (20, 220, 20), "b": (20, 20, 230)}
    rows = [
        {
            "prompt": f"{n}?",
            "completion": letter,
            "image": in_base64(file_of(plain(color, (4 + n % 7, 5)))),
        }
        for n in range(60)
        for letter, color in names.items()
    ]
    write_lines(tmp_path / "in" / "a.jsonl", rows)
    made(tmp_path, with_pictures())
    config = config_of(tmp_path / "out")
    config = config.replace("run.inner.learning_rate", 0.03)
    found = emulate(config)
    summary = found.summary
    for part in (summary, *summary["islands"].values()):
        lost = sum(part["tokens_lost"].values()) + part["tokens_in_flight"]
        assert part["tokens_computed"] == part["tokens_merged"] + lost
    assert found.config.run.data.arrays == (
        *("picture_count", "pictures", "segments", "tokens", "weights"),
    )
    blind = emulate(config.replace("run.model.factory", f"{__file__}:blinded"))
    # Of two predictions, the letter and the end, the first is one of three.
    assert summary["eval_loss"] < np.log(3) / 2 < blind.summary["eval_loss"]


def test_the_command_says_how_many_pictures_there_are(tmp_path, capsys):
    rows = [{"text": f"row {n}", "image": in_base64(png(n))} for n in range(30)]
    write_lines(tmp_path / "in" / "a.jsonl", rows)
    Path(tmp_path / "in" / "a.png").write_bytes(png(0))
    out, source = str(tmp_path / "out"), str(tmp_path / "in")
    options = ["--picture-tokens", "4", "--sequence-length", "32", "--workers", "1"]
    more = ["--pictures-per-row", "2", "--validation-fraction", "0.3"]
    assert cli.main(["data", "prepare", out, source, *options, *more]) == 0
    shown = capsys.readouterr().err
    split = read_manifest(out).train
    assert 1 <= split.most_pictures <= 2
    said = f"{split.pictures} pictures in {split.with_pictures} rows, "
    said += f"{split.most_pictures} in one at most, {split.picture_bytes:,} bytes, "
    said += f"{split.largest_picture} the largest ({split.pictures} PNG)"
    assert said in shown
    sizes = [len(png(n)) for n in range(30)]
    assert split.picture_bytes <= sum(sizes)
    assert split.largest_picture in sizes
    assert cli.main(["manifest", out]) == 0
    again = capsys.readouterr().err
    assert said in again
    assert f"{out}: validation: " in again
    assert "left out: 1 .png" in shown
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["pictures"]["most"] > 0
