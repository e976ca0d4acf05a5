"""The tokenizer of a path, and what does not fit it."""

from __future__ import annotations

from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import ModelConfig
from diloco_jax.data.tokenizers.beside import BESIDE
from diloco_jax.data.tokenizers.of_bytes import Bytes
from diloco_jax.data.tokenizers.of_json import NAME as JSON
from diloco_jax.data.tokenizers.of_json import JsonTokenizer
from diloco_jax.data.tokenizers.of_pieces import NAME as PIECES
from diloco_jax.data.tokenizers.of_pieces import SUFFIX, PiecesTokenizer
from diloco_jax.data.tokenizers.tokenizer import Tokenizer
from diloco_jax.errors import ConfigError


def open_tokenizer(path: str | Path, field: str = "data.tokenizer") -> Tokenizer:
    """Open a tokenizer.json, a *.model of SentencePiece, or a folder that has one; ""
    is the tokenizer of bytes.

    Raises ConfigError, naming `field`, if the path has none of these.
    """
    if not str(path):
        return Bytes()
    given = Path(path)
    found = find_tokenizer(given) if given.is_dir() else given
    if found is None or not found.is_file():
        what = f"has neither {JSON} nor {PIECES}" if found is None else "is no file"
        raise ConfigError(
            f"{field}: {given} {what}; give a tokenizer.json, a {SUFFIX} of "
            f"SentencePiece, or a folder that has one"
        )
    if found.suffix == ".json":
        return JsonTokenizer(found)
    if found.suffix == SUFFIX:
        return PiecesTokenizer(found)
    raise ConfigError(
        f"{field}: {found} ends neither in .json nor in {SUFFIX}; give a "
        f"tokenizer.json or a {SUFFIX} of SentencePiece"
    )


def find_tokenizer(folder: Path) -> Path | None:
    """Return the tokenizer's file in a folder, None if it has none. Where there are
    both kinds, tokenizer.json counts: it has the words that were added, too."""
    found = (folder / name for name in (JSON, PIECES))
    return next((path for path in found if path.is_file()), None)


def kept_name(path: Path) -> str:
    """Return the name under which a run keeps and exports a file of a tokenizer."""
    if path.name in BESIDE:
        return path.name
    return PIECES if path.suffix == SUFFIX else JSON


def tokenizer_of_weights(weights: str) -> Path | None:
    """Return the tokenizer's file in the folder that a run starts from, as
    `model.weights` names it; None if there is none."""
    kind, _, folder = weights.partition(":")
    beside = Path(folder, "" if kind == "hf" else run_files.SOURCE)
    return find_tokenizer(beside) if weights and beside.is_dir() else None


def require_tokenizer(tokenizer: Tokenizer, model: ModelConfig, data: str) -> None:
    """Raise ConfigError if the data's tokenizer is another one than that of the weights
    that a run starts from. data: names the data."""
    theirs = tokenizer_of_weights(model.weights)
    if theirs is not None:
        digest = open_tokenizer(theirs).digest
        require_digest(tokenizer.digest, digest, data, str(theirs))


def require_digest(ours: str, theirs: str, data: str, name: str) -> None:
    """Raise ConfigError, with both digests, if data was made with another tokenizer.

    ours: digest of the tokenizer that the data was made with; data: names it. theirs
    and name: digest and name of the one that it has to be.
    """
    if ours != theirs:
        raise ConfigError(
            f"data.tokenizer: {data} is of the tokenizer {ours}, but {name} is "
            f"{theirs}; make the data again with `diloco data prepare OUT SOURCES "
            f"--tokenizer {name}`"
        )
