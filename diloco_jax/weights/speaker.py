"""A model with its parameters and tokenizer, ready to continue a text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.config.fields import check_utf8
from diloco_jax.data.tokenizers import (
    VOCAB_SIZE,
    Bytes,
    Tokenizer,
    find_tokenizer,
    open_tokenizer,
)
from diloco_jax.evaluation import params_of
from diloco_jax.models.build import build
from diloco_jax.models.model import Params
from diloco_jax.weights import families
from diloco_jax.weights.adapted import base_run, merged
from diloco_jax.weights.files import CONFIG, read_json
from diloco_jax.weights.first import end_tokens, read_folder, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speaker:
    """A model with its parameters, tokenizer and end tokens."""

    model: ModelConfig
    params: Params
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    """Tokens that end a text."""

    def continuation(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add to a prompt's. Alone, they may lack a space:
        many tokenizers leave out the first one of a text."""
        before, whole = self.decode(prompt), self.decode([*prompt, *tokens])
        if whole.startswith(before):
            return whole[len(before) :]
        return self.decode(tokens)  # A character is not whole yet.


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
    tokenizer = _tokenizer(beside, spells_bytes, model.vocab_size)
    return Speaker(
        model=model,
        params=jax.tree.map(lambda p: jax.numpy.asarray(p, dtype), params),
        encode=functools.partial(prompt_tokens, tokenizer, model.vocab_size),
        decode=tokenizer.decode,
        ends=frozenset(end_tokens(beside)) or _end(tokenizer),
    )


def _require_bundled(model: ModelConfig) -> None:
    if model.factory:
        raise ConfigError(
            f"model.factory = {model.factory!r}: only the bundled transformer "
            f"generates; load the parameters with diloco_jax.evaluation.load_params"
        )


def prompt_tokens(tokenizer: Tokenizer, rows: int, text: str) -> list[int]:
    """Return the tokens of a text after the tokenizer's start, once, even if the text
    spells it.

    Raises ConfigError for half a character, and for a token beyond the model's table.
    """
    check_utf8("the text", text)
    start = list(tokenizer.start)
    spelled = "".join(map(tokenizer.word, start))
    if start and tokenizer.encode([spelled])[0].tolist() == start:
        text = text.removeprefix(spelled)
    tokens = [*start, *tokenizer.encode([text])[0].tolist()]
    if (highest := max(tokens, default=0)) >= rows:
        raise ConfigError(
            f"the text has the token {highest} ({tokenizer.word(highest)}) of "
            f"{tokenizer.name}, and the model has rows for {rows} tokens, from 0 to "
            f"{rows - 1}; leave that word out, or give the model's own tokenizer"
        )
    return tokens


def _tokenizer(folder: Path, spells_bytes: bool, rows: int) -> Tokenizer:
    path = find_tokenizer(folder) if folder.is_dir() else None
    if path is None:
        if spells_bytes:
            return Bytes()
        raise ConfigError(
            f"there is no tokenizer in {folder}, and the model's {rows} tokens are no "
            f"bytes; put the model's tokenizer.json or tokenizer.model there"
        )
    return open_tokenizer(path)


def _end(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token that ends a document. Text of bytes goes on with the next."""
    known = tokenizer.end is not None and not isinstance(tokenizer, Bytes)
    return frozenset([tokenizer.end] if known and tokenizer.end is not None else [])
