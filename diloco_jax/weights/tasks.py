"""Multiple-choice tasks: which choice a model thinks the likeliest.

A file is a JSON list of items, each with `question`, `choices` and `answer`: the right
choice itself, or its number from 0. A choice follows its question after one space,
unless there is white space between them already. Where two choices are equally likely,
the first counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np

from diloco_jax.config import ConfigError
from diloco_jax.data.documents import BOM
from diloco_jax.models.generation import make_likelihood
from diloco_jax.weights.speaker import Speaker

SHORTEST = 16
"""Tokens to which shorter rows are filled up, then twice as many, and so on: each
length is compiled once."""
LOGITS = 1 << 26
"""Logits that are in memory at a time."""

Report = Callable[[float], None]
"""Called with the share that is done."""


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question with its choices."""

    question: str
    choices: tuple[str, ...]
    answer: int | str

    @property
    def right(self) -> int:
        """The number of the right choice, from 0."""
        if isinstance(self.answer, str):
            return self.choices.index(self.answer)
        return self.answer


class Task(NamedTuple):
    """The items of one file, which is its name."""

    name: str
    items: tuple[Item, ...]


class ScoredText(NamedTuple):
    """A choice after its question, as tokens."""

    tokens: Sequence[int]
    scored: int
    """The last so many tokens are the choice."""
    cut: bool
    """True if the question's first tokens are left out."""


def read_task(path: Path) -> Task:
    """Read a file; raise ConfigError, naming file and item, if it is no task."""
    try:
        found = msgspec.json.decode(path.read_bytes().removeprefix(BOM))
    except FileNotFoundError:
        raise ConfigError(f"--tasks {path}: there is no such file") from None
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"--tasks {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f'--tasks {path} is no list of items; write [{{"question": ..., '
            f'"choices": [..., ...], "answer": 0}}, ...]'
        )
    return Task(path.stem, tuple(_item(path, n, raw) for n, raw in enumerate(found)))


def _item(path: Path, number: int, raw: Any) -> Item:
    where = f"--tasks {path}, item {number}"
    try:
        item = msgspec.convert(raw, Item)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if "\0" in "".join((item.question, *item.choices)):
        raise ConfigError(f"{where} has a NUL character (U+0000), which no text has")
    if len(item.choices) < 2 or not all(item.choices):
        raise ConfigError(
            f"{where} has choices = {list(item.choices)}; give two or more, none empty"
        )
    if isinstance(item.answer, str):
        if item.choices.count(item.answer) != 1:
            raise ConfigError(
                f"{where}: answer = {item.answer!r} is no choice, or several; give one "
                f"of them, or its number from 0"
            )
    elif not 0 <= item.answer < len(item.choices):
        raise ConfigError(
            f"{where}: answer = {item.answer}, but there are {len(item.choices)} "
            f"choices; they count from 0"
        )
    return item


def score(
    speaker: Speaker,
    task: Task,
    length: int,
    *,
    dtype: str = "float32",
    report: Report = lambda share: None,
) -> dict[str, Any]:
    """Return the scores of a model, JSON-compatible.

    `accuracy` is the share of the items whose right choice has the highest
    log-likelihood, `accuracy_per_byte` that with the highest one per byte of its text.
    `accuracy_error` and `accuracy_per_byte_error` are their standard errors (null for a
    single item), `items` their number, and `cut` the items whose questions were longer
    than fits and lost their beginnings.

    length: most tokens of a question and a choice: those of the model's training.
    Raises ConfigError, naming the item, if a choice alone is longer.
    """
    rows = [
        _row(speaker, item, choice, length, f"{task.name}, item {number}")
        for number, item in enumerate(task.items)
        for choice in item.choices
    ]
    found, _ = likelihoods(speaker, rows, dtype=dtype, report=report)
    plain, per_byte, cut, at = [], [], 0, 0
    for item in task.items:
        own = slice(at, at + len(item.choices))
        at = own.stop
        sizes = [len(choice.encode()) for choice in item.choices]
        plain.append(int(np.argmax(found[own])) == item.right)
        per_byte.append(int(np.argmax(found[own] / sizes)) == item.right)
        cut += any(row.cut for row in rows[own])
    return {
        "items": len(task.items),
        **_share("accuracy", plain),
        **_share("accuracy_per_byte", per_byte),
        "cut": cut,
    }


def _share(name: str, right: Sequence[bool]) -> dict[str, float | None]:
    """Return a share and its standard error, from the sample's variance."""
    count, share = len(right), sum(right) / len(right)
    error = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return {name: share, f"{name}_error": error}


def _row(
    speaker: Speaker, item: Item, choice: str, length: int, where: str
) -> ScoredText:
    apart = item.question[-1:].isspace() or choice[:1].isspace() or not item.question
    text = item.question + ("" if apart else " ") + choice
    tokens, before = speaker.encode(text), len(speaker.encode(item.question))
    # Tokens of the whole text: a model never saw a text that was cut there. The first
    # token of all has nothing before it, and no probability.
    scored = len(tokens) - max(1, min(before, len(tokens) - 1))
    if scored >= length:
        raise ConfigError(
            f"{where}: the choice {choice[:40]!r} has {scored} tokens, and the model's "
            f"sequences have {length}; leave the item out"
        )
    kept = tokens[-length:]
    return ScoredText(kept, scored, cut=len(kept) < len(tokens))


def likelihoods(
    speaker: Speaker,
    rows: Sequence[ScoredText],
    *,
    dtype: str = "float32",
    report: Report = lambda share: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-likelihood of each row's scored tokens, f64 [rows], and whether
    each of them is the likeliest one, bool [rows]."""
    likelihood = make_likelihood(speaker.model, dtype)
    found, greedy = np.zeros(len(rows)), np.zeros(len(rows), bool)
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        padded = SHORTEST
        while padded < len(row.tokens):
            padded *= 2
        by_length.setdefault(padded, []).append(index)
    done = 0
    for padded, indices in sorted(by_length.items()):
        count = max(1, LOGITS // (padded * speaker.model.vocab_size))
        count = min(count, len(indices))
        for start in range(0, len(indices), count):
            batch = indices[start : start + count]
            tokens = np.zeros((count, padded), np.int32)
            weights = np.zeros((count, padded), np.float32)
            for place, index in enumerate(batch):
                row = rows[index]
                tokens[place, : len(row.tokens)] = row.tokens
                weights[place, len(row.tokens) - row.scored : len(row.tokens)] = 1.0
            given = jnp.asarray(tokens), jnp.asarray(weights)
            of_batch = likelihood(speaker.params, *given)
            found[batch] = np.asarray(of_batch.log)[: len(batch)]
            greedy[batch] = np.asarray(of_batch.greedy)[: len(batch)]
            done += len(batch)
            report(done / len(rows))
    return found, greedy
