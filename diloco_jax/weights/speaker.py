"""A model with its parameters and tokenizer, ready to continue a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.data.tokenizers.of_bytes import VOCAB_SIZE, Bytes
from diloco_jax.data.tokenizers.opening import (
    find_tokenizer,
    open_tokenizer,
    require_fitting,
)
from diloco_jax.data.tokenizers.tokenizer import Tokenizer
from diloco_jax.evaluation import params_of
from diloco_jax.models.build import build
from diloco_jax.models.model import Params
from diloco_jax.weights import families
from diloco_jax.weights.adapted import base_run, merged
from diloco_jax.weights.files import CONFIG, read_json
from diloco_jax.weights.first import read_folder, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speaker:
    """A model with its parameters, tokenizer and end tokens."""

    model: ModelConfig
    params: Params
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    """Tokens that end a text."""


def open_speaker(
    source: Path,
    dtype: str = "float32",
    cycle: int | None = None,
    *,
    trust_code: bool = False,
    report: Callable[[float], None] = lambda share: None,
) -> Speaker:
    """Open a run's workdir, with its newest parameters or those of a kept cycle, or a
    folder of weights.

    trust_code: execute code that the run's config names, whoever wrote it. report: told
    the share of the weights that is read.

    Raises ConfigError if it is neither, or has no tokenizer that fits its model.
    """
    if source.is_file():
        raise ConfigError(
            f"RUN_OR_EXPORT: {source} is a file; give its folder, {source.parent}"
        )
    if workdirs.holds_run(source):
        config = workdirs.read_config(source, trust_code=trust_code)
        run, model = config.run, config.run.model
        _require_bundled(model)
        params, _ = params_of(config, source, build(run), cycle, report)
        beside = source / run_files.SOURCE
        if model.lora_rank:
            model, params = base_run(run).model, merged(run, params)
        spells_bytes = not model.weights or model.vocab_size == VOCAB_SIZE
    else:
        found = read_json(source / CONFIG)
        model = families.read(found, str(source / CONFIG))
        params, beside = whole(read_folder(source, model), report), source
        spells_bytes = model.vocab_size == VOCAB_SIZE
    tokenizer = _tokenizer(beside, model, spells_bytes)
    return Speaker(
        model=model,
        params=jax.tree.map(lambda p: jax.numpy.asarray(p, dtype), params),
        encode=lambda text: [*tokenizer.start, *tokenizer.encode([text])[0].tolist()],
        decode=tokenizer.decode,
        ends=_ends(beside) or _end(tokenizer),
    )


def _require_bundled(model: ModelConfig) -> None:
    if model.factory:
        raise ConfigError(
            f"model.factory = {model.factory!r}: only the bundled transformer "
            f"generates; load the parameters with diloco_jax.evaluation.load_params"
        )


def _tokenizer(folder: Path, model: ModelConfig, spells_bytes: bool) -> Tokenizer:
    path = find_tokenizer(folder) if folder.is_dir() else None
    if path is None:
        if spells_bytes:
            return Bytes()
        raise ConfigError(
            f"there is no tokenizer in {folder}, and the model's {model.vocab_size} "
            f"tokens are no bytes; put the model's tokenizer.json or tokenizer.model "
            f"there"
        )
    tokenizer = open_tokenizer(path)
    require_fitting(tokenizer, model)
    return tokenizer


def _end(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token that ends a document. Text of bytes goes on with the next."""
    known = tokenizer.end is not None and not isinstance(tokenizer, Bytes)
    return frozenset([tokenizer.end] if known and tokenizer.end is not None else [])


def _ends(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", CONFIG):
        if (folder / name).is_file():
            ends = families.text_config(read_json(folder / name)).get("eos_token_id")
            if ends is None:
                continue
            found = ends if isinstance(ends, list) else [ends]
            if not all(type(end) is int for end in found):
                raise ConfigError(
                    f"{folder / name}: eos_token_id = {ends!r}; it is a number of a "
                    f"token, or a list of them: copy the file again"
                )
            return frozenset(found)
    return frozenset()
