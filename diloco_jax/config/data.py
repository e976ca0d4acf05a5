"""The data of a run."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import BETWEEN, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, tokens or prepared rows that the run trains on.

    Example:
      >>> from diloco_jax import Config, DataConfig, RunConfig
      >>> text = DataConfig(paths=("books/",))  # files and folders of this machine
      >>> Config(run=RunConfig(data=text)).run.data.paths
      ('books/',)
    """

    paths: tuple[str, ...] = setting(
        (),
        local=True,
        help="Text files or folders; or .npy files of tokens; or folders that `diloco "
        "data prepare` made, also gs://BUCKET/FOLDER; empty = the sources of the "
        "Python standard library.",
    )
    weights: tuple[float, ...] = setting(
        (),
        help="Shares of the prepared folders in data.paths, one number for each, in "
        "any scale; empty = by their rows.",
    )
    factory: str = setting(
        "",
        code=True,
        help='Function that makes your own data, "package.module:function" or '
        '"path/to/file.py:function" (docs/data.md); empty = that of data.paths.',
    )
    tokenizer: str = setting(
        "",
        local=True,
        help="The tokenizer that the data was made with: tokenizer.json, a *.model of "
        "SentencePiece, or a folder that has one; empty = bytes, or tokens of an "
        "unknown one.",
    )
    validation_fraction: float = setting(
        0.02, BETWEEN, help="Share of the documents held out for validation."
    )
    digest: str = setting(
        "",
        help="Digest of the corpus; empty = computed when the run is created. A corpus "
        "with another digest is refused.",
    )
    arrays: tuple[str, ...] = setting(
        ("tokens",),
        help="Arrays that each row of the data has: tokens; segments where rows are "
        "packed; weights; source_number in a mixture. Found together with the digest, "
        "and needed before to plan.",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """Folders of a mixture, in order; none if it is none, or not resolved yet."""
        mixed = len(self.weights) > 1 and len(self.weights) == len(self.paths)
        return self.paths if mixed else ()
