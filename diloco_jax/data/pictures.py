"""Pictures beside text: what a model takes of them, and how they reach it.

A prepared row keeps pictures as the files that they were (PNG, JPEG, ...). The reader
decodes them on the host, as uint8 [N, S, S, 3]: `N` pictures a row at most, each resized
to a square of `S` pixels. In the row's tokens each picture has its placeholders, `K`
in a row, in the order of the pictures.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.data.source import Field

PICTURES, COUNT = "pictures", "picture_count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureInput:
    """The pictures that a model takes (`Model.pictures`).

    Placeholder number k of a row, from 0, stands for part k % tokens of picture
    k // tokens. Whatever the model does to pixels, such as their mean and deviation, it
    does itself.
    """

    side: int
    """S: pixels of a picture's side; every picture is resized to that square."""
    tokens: int
    """Placeholders that one picture takes in a row's tokens."""
    token: int
    """The number of the placeholder."""

    def fields(self, most: int) -> dict[str, Field]:
        """Return the arrays for `Model.batch`: "pictures", uint8 [N, S, S, 3], RGB, 0
        from the row's own number of pictures on; and "picture_count", that number,
        int32 []. Data without pictures has neither.

        most: N, the run's `data.pictures`.
        """
        shape = (most, self.side, self.side, 3)
        return {
            PICTURES: Field("uint8", None, shape, optional=True),
            COUNT: Field("int32", None, optional=True),
        }
