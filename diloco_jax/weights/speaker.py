"""A model with its parameters and tokenizer, ready to continue a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.data import tokenizer as of_bytes
from diloco_jax.evaluation import load_params
from diloco_jax.models.model import Params
from diloco_jax.weights import families
from diloco_jax.weights.files import CONFIG, read_json
from diloco_jax.weights.first import read_folder, whole

TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speaker:
    """See the module."""

    model: ModelConfig
    params: Params
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    """Tokens that end a text."""


def open_speaker(source: Path, dtype: str = "float32") -> Speaker:
    """Open a run's workdir or a folder of weights.

    Raises ConfigError if it is neither, or has no tokenizer that fits its model.
    """
    if workdirs.holds_run(source):
        model = workdirs.read_config(source).run.model
        params, beside = load_params(source), source / run_files.SOURCE
        spells_bytes = not model.weights or model.vocab_size == of_bytes.VOCAB_SIZE
    else:
        found = read_json(source / CONFIG)
        model = families.read(found, str(source / CONFIG))
        params, beside = whole(read_folder(source, model)), source
        spells_bytes = model.vocab_size == of_bytes.VOCAB_SIZE
    if model.factory:
        raise ConfigError(
            f"model.factory = {model.factory!r}: only the bundled transformer "
            f"generates; load the parameters with diloco_jax.evaluation.load_params"
        )
    encode, decode = _tokenizer(beside / TOKENIZER, model, spells_bytes)
    return Speaker(
        model=model,
        params=jax.tree.map(lambda p: jax.numpy.asarray(p, dtype), params),
        encode=encode,
        decode=decode,
        ends=_ends(beside),
    )


def _tokenizer(
    path: Path, model: ModelConfig, spells_bytes: bool
) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    if not path.is_file():
        if spells_bytes:
            return (
                lambda text: of_bytes.encode(text).tolist(),
                lambda tokens: of_bytes.decode(np.asarray(tokens)),
            )
        raise ConfigError(
            f"there is no {path}, and the model's {model.vocab_size} tokens are no "
            f"bytes; put the model's tokenizer.json there"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package tokenizers; pip install 'diloco-jax[text]'"
        ) from error
    try:
        made: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower one.
        raise ConfigError(
            f"{path} cannot be read as a tokenizer ({error}); copy it again"
        ) from error
    if (words := made.get_vocab_size()) > model.vocab_size:
        raise ConfigError(
            f"{path} has {words} tokens, the model {model.vocab_size}; both must be of "
            f"one model"
        )
    return lambda text: list(made.encode(text).ids), made.decode


def _ends(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", CONFIG):
        if (folder / name).is_file():
            ends = families.text_config(read_json(folder / name)).get("eos_token_id")
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()
