"""The data of a run, whatever kind it is: what all who train or evaluate load."""

from __future__ import annotations

import dataclasses

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.data.corpus import load_checked_corpus
from diloco_jax.data.index import GlobalIndex
from diloco_jax.data.source import Rows, Source
from diloco_jax.data.windows import ValidationWindows, Windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What a run trains and validates on."""

    train: Source
    validation: Source
    """Rows in which everything that is held out is predicted once."""
    digest: str
    """16 hex digits over all of it."""
    largest: int
    """Highest token."""
    bytes_per_token: float | None
    """Bytes of the validation text for each token predicted; None if unknown."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays of a row, in order, as `data.arrays` has them."""
        return tuple(sorted(self.train.fields))

    def index(self, seed: int) -> Rows:
        """Return the training rows by position of the global index."""
        return GlobalIndex(self.train, seed)


def load_data(run: RunConfig, *, copied: bool = False) -> Data:
    """Load a run's data; raise ConfigError if it is not the run's, does not fill a
    window, or holds nothing out.

    copied: the files are copies, and their manifests are believed (`load_corpus`).
    """
    corpus, length = load_checked_corpus(run.data, copied=copied), run.sequence_length
    data = Data(
        train=Windows(corpus.train, length),
        validation=ValidationWindows(corpus.validation, length),
        digest=corpus.digest,
        largest=corpus.largest,
        bytes_per_token=1.0 if corpus.of_bytes else None,
    )
    if run.data.digest and set(data.arrays) != set(run.data.arrays):
        raise ConfigError(
            f"data.arrays = {', '.join(run.data.arrays)} in the run's config, but rows "
            f"of the data here have {', '.join(data.arrays)}; give the run's data "
            f"(--data.paths)"
        )
    return data


def require_vocabulary(data: Data, run: RunConfig) -> None:
    """Raise ConfigError if the bundled model has no place for a token. The vocabulary
    of a user's own model is not known here."""
    model = run.model
    if data.largest >= model.vocab_size and not model.factory:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}, but the tokens go up to "
            f"{data.largest}; set it to {data.largest + 1} or more"
        )
