"""Pictures beside text: what a model takes of them, and how they reach it.

A prepared row keeps pictures as the files that they were (PNG, JPEG, ...). The reader
decodes them on the host, as uint8 [N, S, S, 3]: `N` pictures a row at most, each
resized to a square of `S` pixels. In the row's tokens each picture has `K`
placeholders, in the order of the pictures.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from diloco_jax.config import DataConfig
from diloco_jax.data.source import Field, Fields
from diloco_jax.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES, COUNT = "pictures", "picture_count"
FILES = Field("object", None)
"""Files of a row's pictures, `bytes` [N], empty where there is none."""
COUNTED = Field("int32", None)
"""Number of a row's pictures, []."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureInput:
    """The pictures that a model takes (`Model.pictures`).

    Placeholder number k of a row, from 0, stands for part k % tokens of picture
    k // tokens. Whatever the model does to pixels, such as taking off their mean, it
    does itself.
    """

    side: int
    """S: pixels of a picture's side; every picture is resized to that square."""
    tokens: int
    """K: placeholders that one picture takes in a row's tokens."""
    token: int
    """The number of the placeholder's token."""

    def fields(self, most: int) -> dict[str, Field]:
        """Return the arrays for `Model.batch`: "pictures", uint8 [N, S, S, 3], RGB, 0
        from the row's own number of pictures on; and "picture_count", that number,
        int32 []. Data without pictures has neither.

        most: N, the run's `data.pictures`.
        """
        shape = (most, self.side, self.side, 3)
        return {
            PICTURES: Field("uint8", None, shape, optional=True),
            COUNT: COUNTED._replace(optional=True),
        }


class RowPictures(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures of rows of data; without values, there are none."""

    most: int = 0
    """N: most pictures of a row."""
    tokens: int = 0
    """K: placeholders of a picture."""
    token: int = 0
    """The number of the placeholder's token."""
    text: str = ""
    """The text that `diloco data prepare` put in the place of `PLACE`."""

    @property
    def fields(self) -> Fields:
        """Arrays of a row: its pictures as files (`FILES`), and their number."""
        return {PICTURES: FILES._replace(shape=(self.most,)), COUNT: COUNTED}

    def arrays(self, pictures: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Return these arrays of a row; raise ValueError for too many pictures."""
        if len(pictures) > self.most:
            raise ValueError(f"a row has {len(pictures)} pictures, {self.most} at most")
        files = np.empty(self.most, object)
        files[:] = b""
        for place, picture in enumerate(pictures):
            files[place] = picture
        return {PICTURES: files, COUNT: np.array(len(pictures), np.int32)}


def require_pictures(
    taken: PictureInput | None, batch: Collection[str], data: DataConfig
) -> None:
    """Raise ConfigError if a model does not take the pictures of the data.

    taken: `Model.pictures`. batch: names of `Model.batch`.
    """
    if PICTURES not in data.arrays:
        return
    if PICTURES not in batch:
        raise ConfigError(
            f"the data has pictures (data.arrays = {', '.join(data.arrays)}), and the "
            f"model takes none (its batch is {', '.join(sorted(batch))}); use a model "
            f"that does (docs/models.md), or prepare the data without --picture-tokens"
        )
    if taken is None:
        return
    ours, theirs = (
        (data.picture_tokens, data.picture_token),
        (taken.tokens, taken.token),
    )
    if ours != theirs:
        raise ConfigError(
            f"data.picture_tokens = {ours[0]} of data.picture_token = {ours[1]}, and "
            f"the model takes {theirs[0]} of {theirs[1]}: make the data again with "
            f"--picture-tokens {theirs[0]} and the model's own tokenizer"
        )
    if not data.pictures:
        raise ConfigError(
            "data.pictures = 0, and the data has pictures; give the most of a row"
        )


PLACE = "<image>"
"""The place of a picture in a text, as published data has it."""
BYTE_MARK, BYTE_TOKEN = "\0", 255
"""Of the tokenizer of bytes: that place, which is no character of any text, and the
placeholder, which is no byte of UTF-8."""
COLUMNS = ("image", "images")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Kinds that are opened: libraries alone read them, no other program."""
BEGINNINGS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"RIFF": "WEBP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    **dict.fromkeys((b"II*\0", b"MM\0*"), "TIFF"),
    **dict.fromkeys((b"P5", b"P6"), "PPM"),
}
"""How files of these kinds begin, most of them."""
MOST_PIXELS = 1 << 26
"""Pixels of a picture: 67 million, decoded in 0.2 to 1.6 GB (docs/data.md, Memory)."""
LARGE_PIXELS, LARGE_AT_ONCE = 1 << 24, threading.BoundedSemaphore(2)
"""Pictures of more pixels, and how many of them a process decodes at a time."""
MOST_BYTES = 1 << 27
"""Bytes of a picture's file."""
MOST_PICTURES, MOST_BYTES_TOGETHER = 1 << 10, 1 << 30
"""Pictures of one document, and bytes of their files: all are in memory at once."""
SHOWN, LONGEST_PATH = 200, 4096
"""Characters of a path that an error shows, and that a path has."""


class PictureError(ValueError):
    """A picture that is not there, or that cannot be read as one."""


def given(found: Mapping[str, Any]) -> list[Any]:
    """Return the pictures of an object or a row as they stand there, none for null.
    Raise `PictureError` for both fields at once, or something else in them."""
    one, several = (found.get(name) for name in COLUMNS)
    if one is not None and several is not None:
        raise PictureError("it has both 'image' and 'images'; leave one out")
    if several is None:
        several = [] if one is None else [one]
    if not isinstance(several, list) or None in several:
        raise PictureError(
            f"its 'images' are {type(several).__name__}, or one of them is null; they "
            f"are a list of pictures"
        )
    return several


def read_pictures(values: Sequence[Any], folder: Path | None) -> tuple[bytes, ...]:
    """Return the files of a document's pictures, each decoded once on trial.

    Args:
      values: of each its path; or its bytes, in base64 too; or a dict of `bytes` and
        `path`.
      folder: that of the file in which they stand, where their paths begin and which
        they do not leave; None = paths of the user's own, wherever they lead.

    Raises:
      PictureError: one is none of these, or `decoded` refuses it; or there are more
        than `MOST_PICTURES`, or more than `MOST_BYTES_TOGETHER` bytes of them.
    """
    if len(values) > MOST_PICTURES:
        raise PictureError(
            f"it has {len(values):,} pictures, and a document has {MOST_PICTURES:,} at "
            f"most; make several of it"
        )
    found, room = list[bytes](), MOST_BYTES_TOGETHER
    for number, value in enumerate(values):
        try:
            found.append(_read_picture(value, folder, room))
        except PictureError as error:
            raise PictureError(f"its picture {number}: {error}") from error
        room -= len(found[-1])
    return tuple(found)


def _read_picture(value: Any, folder: Path | None, room: int) -> bytes:
    """Return one file of `read_pictures`; room: bytes that it may have."""
    if isinstance(value, dict):
        kept = value.get("bytes")
        if isinstance(kept, str):
            kept = _of_base64(kept) or b""
        value = value.get("path") if kept is None else kept
    if isinstance(value, str):
        head, comma, rest = value.partition(",")
        kept = _of_base64(rest if comma and head.startswith("data:") else value)
        if not kept or not kept.startswith(tuple(BEGINNINGS)):
            kept = _of_file(value, folder, room)
        value = kept
    if not isinstance(value, bytes):
        raise PictureError(
            f"it is {type(value).__name__}, and a picture is a path, bytes, base64, or "
            f"an object of 'bytes' and 'path'"
        )
    if len(value) > MOST_BYTES:
        raise PictureError(f"it has more than {MOST_BYTES:,} bytes; make it smaller")
    if len(value) > room:
        least = MOST_BYTES_TOGETHER - room + len(value)
        raise PictureError(
            f"with it the document has {least:,} bytes of pictures or more, and at "
            f"most {MOST_BYTES_TOGETHER:,} are taken; make them smaller, or several "
            f"documents of it"
        )
    decoded(value, 1)
    return value


def kind_of(data: bytes) -> str:
    """Return a picture's kind, of `FORMATS`, by the beginning of its file, or
    "other"."""
    kinds = (kind for start, kind in BEGINNINGS.items() if data.startswith(start))
    return next(kinds, "other")


def _of_base64(text: str) -> bytes | None:
    """Return the bytes of a text in base64, None if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _of_file(name: str, within: Path | None, room: int) -> bytes:
    """Return the bytes of a file, and of a larger one than is taken one too many."""
    shown = repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")
    if len(name) > LONGEST_PATH:
        raise PictureError(
            f"{shown}, of {len(name):,} characters, is no path, which has "
            f"{LONGEST_PATH:,} at most, and no base64 of {', '.join(FORMATS)}; save it "
            f"as one of these"
        )
    if "://" in name:
        raise PictureError(f"{shown} is an address; fetch it, and give its path")
    folder = within or Path()
    try:
        path = (folder / name).resolve()
        if within is not None and not path.is_relative_to(folder.resolve()):
            raise PictureError(
                f"{shown} leads out of {folder}; copy the file into that folder, and "
                f"give its path there"
            )
        if path.is_file():
            with path.open("rb") as file:
                return file.read(min(MOST_BYTES, room) + 1)
    except PictureError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        # The last is of links in a ring.
        why = getattr(error, "strerror", None) or type(error).__name__
        raise PictureError(f"{shown} in {folder} cannot be read ({why})") from error
    raise PictureError(f"there is no file {shown} in {folder}")


def decodes(rows: Fields, fields: Fields) -> bool:
    """Tell if rows have pictures as files, and a batch, by its fields, takes as many of
    them decoded."""
    theirs, ours = rows.get(PICTURES), fields.get(PICTURES)
    if theirs is None or ours is None or theirs.dtype != FILES.dtype:
        return False
    side = ours.shape[1:2]
    return ours.is_like(Field("uint8", None, (*theirs.shape, *side, *side, 3)))


UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""`Image.Transpose` for each orientation of EXIF but the first, which is upright."""
ORIENTATION = 0x0112


def fill(into: np.ndarray, files: Sequence[bytes]) -> None:
    """Decode pictures into the first places of uint8 [N, S, S, 3]; the others are 0.
    Raise `PictureError`: see `decoded`."""
    for place, data in enumerate(files):
        into[place] = decoded(data, into.shape[1])
    into[len(files) :] = 0


def decoded(data: bytes, side: int) -> np.ndarray:
    """Return a picture as uint8 [side, side, 3], RGB: upright by its EXIF, its first
    frame if it has several, on white where it is transparent.

    Raises:
      PictureError: the bytes are no picture, or end early; or it has more than
        `MOST_PIXELS`, by its header, before a pixel is decoded.
    """
    from PIL import Image

    with contextlib.ExitStack() as kept:
        image = kept.enter_context(_opened(data))
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise PictureError(f"it has {width:,} x {height:,} pixels{TOO_MANY}")
        if width * height > LARGE_PIXELS:
            kept.enter_context(LARGE_AT_ONCE)
        # A JPEG comes out at a half, a quarter, ... where that is twice the square yet.
        image.draft("RGB", (2 * side, 2 * side))
        found = _rgb(image).resize(
            (side, side), Image.Resampling.LANCZOS, reducing_gap=3.0
        )
        with contextlib.suppress(Exception):  # A picture stands as it is without EXIF.
            turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
            found = found if turn is None else found.transpose(Image.Transpose(turn))
        return np.asarray(found)


TOO_MANY = f", and at most {MOST_PIXELS:,} are decoded; make it smaller"


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    """Open a picture by its header; raise `PictureError` for whatever fails within."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except PictureError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"it has too many pixels ({error}){TOO_MANY}") from error
    except Exception as error:  # Decoders raise errors of many kinds.
        what = str(error)
        if isinstance(error, UnidentifiedImageError):
            what = f"it is none of {', '.join(FORMATS)}"
        raise PictureError(f"it cannot be read as a picture: {what}") from error


def _rgb(image: Image) -> Image:
    """Return a picture of any mode as RGB."""
    from PIL import Image

    if image.mode == "F":
        raise PictureError("its pixels are floats, of no known range; save it as PNG")
    if image.mode.startswith("I"):
        # 16 bit, which `convert` would cut off at 255.
        values = np.clip(np.asarray(image), 0, (1 << 16) - 1)
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")
