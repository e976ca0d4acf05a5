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
BEGINNINGS = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF8", b"BM", b"II*\0"),
    *(b"MM\0*", b"P5", b"P6"),
)
MOST_PIXELS = 1 << 26
"""Pixels of a picture: 67 million, which are 270 MB once they are decoded."""
MOST_BYTES = 1 << 27
"""Bytes of a picture's file."""
SHOWN = 200
"""Characters of a path that an error shows."""


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


def read_picture(value: Any, folder: Path) -> bytes:
    """Return the file of a picture, which is decoded once on trial.

    Args:
      value: its path; or its bytes, in base64 too; or a dict of `bytes` and `path`.
      folder: that of the file in which it stands, where its path begins.

    Raises:
      PictureError: it is none of these, or `decoded` refuses it.
    """
    if isinstance(value, dict):
        kept = value.get("bytes")
        if isinstance(kept, str):
            kept = _of_base64(kept) or b""
        value = value.get("path") if kept is None else kept
    if isinstance(value, str):
        head, comma, rest = value.partition(",")
        kept = _of_base64(rest if comma and head.startswith("data:") else value)
        if not kept or not kept.startswith(BEGINNINGS):
            kept = _of_file(value, folder)
        value = kept
    if not isinstance(value, bytes):
        raise PictureError(
            f"it is {type(value).__name__}, and a picture is a path, bytes, base64, or "
            f"an object of 'bytes' and 'path'"
        )
    if len(value) > MOST_BYTES:
        raise PictureError(f"it has more than {MOST_BYTES:,} bytes; make it smaller")
    decoded(value, 1)
    return value


def _of_base64(text: str) -> bytes | None:
    """Return the bytes of a text in base64, None if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _of_file(name: str, folder: Path) -> bytes:
    shown = repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")
    if "://" in name:
        raise PictureError(f"{shown} is an address; fetch it, and give its path")
    try:
        if (path := folder / name).is_file():
            with path.open("rb") as file:
                return file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PictureError(f"{shown} in {folder} cannot be read ({error})") from error
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

    with _opened(data) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise PictureError(f"it has {width:,} x {height:,} pixels{TOO_MANY}")
        # A JPEG comes out at a half, a quarter, ... where that is twice the square yet.
        image.draft("RGB", (2 * side, 2 * side))
        size, lanczos = (side, side), Image.Resampling.LANCZOS
        found = _rgb(image).resize(size, lanczos, reducing_gap=3.0)
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
    return image.convert("RGB")
