"""Continuations of a text by a run's parameters or exported ones, and scores in tasks.

A `TextModel` is a model with its parameters and tokenizer. In a multiple-choice task
the score is which choice the model thinks the likeliest. A file of it is a JSON list of
items, each with `question`, `choices` and `answer`: the right choice itself, or its
number from 0. A choice follows its question after one space, unless there is white
space between them already. Where two choices are equally likely, the first counts. An
item may have pictures, `image` or `images`: files beside that of the task.

lm-eval has its own tasks, and asks our model. It is an extra of this package (`eval`).
Nothing but `scores` imports it; what its requests mean is here, in terms of a
`TextModel`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.config.fields import check_utf8
from diloco_jax.data.documents import BOM
from diloco_jax.data.examples import pictures_for
from diloco_jax.data.pictures import (
    PLACE,
    PictureError,
    RowPictures,
    fill,
    read_pictures,
)
from diloco_jax.data.tokenizers import (
    VOCAB_SIZE,
    Tokenizer,
    find_tokenizer,
    open_tokenizer,
)
from diloco_jax.evaluation import params_of
from diloco_jax.models.build import build
from diloco_jax.models.generation import generate, make_likelihood
from diloco_jax.models.model import Params
from diloco_jax.weights import families
from diloco_jax.weights.adapted import base_run, merged
from diloco_jax.weights.first import end_tokens, read_folder, whole
from diloco_jax.weights.tensor_files import CONFIG, read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model with its parameters, tokenizer and end tokens."""

    model: ModelConfig
    params: Params
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Tokens that end a text."""
    dtype: str = "float32"
    """Type in which the model computes."""

    def encode(self, text: str, pictures: int = 0) -> list[int]:
        """Return the tokens of a text after the tokenizer's start, once, even if the
        text spells it.

        pictures: their number; each has the place `PLACE` in the text, or all stand
        before a text without any. Raises ConfigError for half a character, a token
        beyond the model's table, or places that are more or fewer than the pictures; to
        a model that takes none, `PLACE` is text.
        """
        check_utf8("the text", text)
        tokenizer, rows = self.tokenizer, self.model.vocab_size
        form = self._picture_form() if pictures else RowPictures()
        if pictures and PLACE not in text:
            text = PLACE * pictures + text
        if self.model.vision.layers:
            if (places := text.count(PLACE)) != pictures:
                raise ConfigError(
                    f"the text has {places} places of pictures ({PLACE}), and there "
                    f"are {pictures} pictures; give as many as places, or the text none"
                )
            text = text.replace(PLACE, form.text)
        start = list(tokenizer.start)
        spelled = "".join(map(tokenizer.word, start))
        if start and tokenizer.encode([spelled])[0].tolist() == start:
            text = text.removeprefix(spelled)
        found = tokenizer.encode([text])[0].tolist()
        if pictures:
            place, each = tokenizer.token_of(PLACE) or 0, [form.token] * form.tokens
            parts = (each if token == place else [token] for token in found)
            found = list(itertools.chain.from_iterable(parts))
        tokens = [*start, *found]
        if (highest := max(tokens, default=0)) >= rows:
            raise ConfigError(
                f"the text has the token {highest} ({tokenizer.word(highest)}) of "
                f"{tokenizer.name}, and the model has rows for {rows} tokens, from 0 "
                f"to {rows - 1}; leave that word out, or give the model's own tokenizer"
            )
        return tokens

    def _picture_form(self) -> RowPictures:
        """Return how rows have pictures; raise ConfigError if the model takes none, or
        another placeholder than its tokenizer has."""
        vision = self.model.vision
        if not vision.layers:
            raise ConfigError(
                "there are pictures, and the model takes none (model.vision.layers = "
                "0); leave them out, or give a model that takes them"
            )
        each = vision.tokens_per_picture
        form = pictures_for(self.tokenizer, each, each)
        if form.token != vision.token:
            raise ConfigError(
                f"the place of a picture is token {form.token} of "
                f"{self.tokenizer.name}, and token {vision.token} of the model "
                f"(model.vision.token); give the model's own tokenizer"
            )
        return form

    def pixels(self, files: Sequence[bytes]) -> np.ndarray:
        """Return pictures as the model takes them, uint8 [N, S, S, 3]."""
        side = self.model.vision.side
        pixels = np.empty((len(files), side, side, 3), np.uint8)
        fill(pixels, files)
        return pixels

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(tokens)

    def generate(
        self, prompt: Sequence[int], max_tokens: int, **how: Any
    ) -> Iterator[int]:
        """Yield the tokens that follow a prompt: see `generation.generate`."""
        return generate(
            self.model,
            self.params,
            prompt,
            max_tokens,
            ends=self.ends,
            dtype=self.dtype,
            **how,
        )

    def continuation(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add to a prompt's. Alone, they may lack a space:
        many tokenizers leave out the first one of a text."""
        before, whole = self.decode(prompt), self.decode([*prompt, *tokens])
        if whole.startswith(before):
            return whole[len(before) :]
        return self.decode(tokens)  # A character is not whole yet.


def open_model(
    source: Path,
    dtype: str = "float32",
    cycle: int | None = None,
    *,
    trust_code: bool = False,
    report: Callable[[float], None] = lambda share: None,
) -> TextModel:
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
        if model.factory:
            raise ConfigError(
                f"model.factory = {model.factory!r}: only the bundled transformer "
                f"generates; load the parameters with diloco_jax.evaluation.load_params"
            )
        params, _ = params_of(config, source, build(run), cycle, report)
        beside = source / run_files.SOURCE
        if model.lora_rank or model.train:
            model, params = base_run(run).model, merged(run, params)
        spells_bytes = not model.weights or model.vocab_size == VOCAB_SIZE
    else:
        found = read_json(source / CONFIG)
        model = families.read(found, str(source / CONFIG))
        params, beside = whole(read_folder(source, model), report), source
        spells_bytes = model.vocab_size == VOCAB_SIZE
    path = find_tokenizer(beside) if beside.is_dir() else None
    if path is None and not spells_bytes:
        raise ConfigError(
            f"there is no tokenizer in {beside}, and the model's {model.vocab_size} "
            f"tokens are no bytes; put the model's tokenizer.json or tokenizer.model "
            f"there"
        )
    ends = frozenset(end_tokens(beside))
    tokenizer = open_tokenizer(path or "")
    if not ends and path is not None and tokenizer.end is not None:
        ends = frozenset([tokenizer.end])  # Text of bytes goes on with the next.
    return TextModel(
        model=model,
        params=jax.tree.map(lambda p: jax.numpy.asarray(p, dtype), params),
        tokenizer=tokenizer,
        ends=ends,
        dtype=dtype,
    )


SHORTEST = 16
"""Tokens to which shorter rows are filled up, then twice as many, and so on: each
length is compiled once."""
LOGITS = 1 << 26
"""Logits that are in memory at a time."""
PICTURED_ROWS = 16
"""Rows with pictures that are computed at a time."""

Report = Callable[[float], None]
"""Called with the share that is done."""


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question with its choices."""

    question: str
    choices: tuple[str, ...]
    answer: int | str
    image: str | None = None
    images: tuple[str, ...] = ()
    """Files of pictures, which begin in the folder of the task's file."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the item's pictures."""
        return self.images if self.image is None else (self.image,)

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
    folder: Path = Path()
    """Where the file is."""


class ScoredText(NamedTuple):
    """A choice after its question, as tokens."""

    tokens: Sequence[int]
    scored: int
    """The last so many tokens are the choice."""
    cut: bool
    """True if the question's first tokens are left out."""
    pictures: tuple[bytes, ...] = ()
    """Their files, in the order of their places."""


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
    items = tuple(_item(path, n, raw) for n, raw in enumerate(found))
    return Task(path.stem, items, path.parent)


def _item(path: Path, number: int, raw: Any) -> Item:
    where = f"--tasks {path}, item {number}"
    try:
        item = msgspec.convert(raw, Item)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if item.image is not None and item.images:
        raise ConfigError(f"{where} has both 'image' and 'images'; leave one out")
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
    text_model: TextModel, task: Task, length: int, report: Report = lambda share: None
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
    rows = []
    for number, item in enumerate(task.items):
        where = f"{task.name}, item {number}"
        pictures = files_of(where, item.files, task.folder)
        rows += [
            _row(text_model, item, choice, length, where, pictures)
            for choice in item.choices
        ]
    found, _ = likelihoods(text_model, rows, report)
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


def files_of(
    where: str, files: Sequence[str], folder: Path | None
) -> tuple[bytes, ...]:
    """Return files of pictures as `read_pictures` does; raise ConfigError, which begins
    with `where`, for one that is none."""
    try:
        return read_pictures(files, folder)
    except PictureError as error:
        raise ConfigError(f"{where}: {error}; give the file of a picture") from error


def _row(
    text_model: TextModel,
    item: Item,
    choice: str,
    length: int,
    where: str,
    pictures: tuple[bytes, ...],
) -> ScoredText:
    apart = item.question[-1:].isspace() or choice[:1].isspace() or not item.question
    text = item.question + ("" if apart else " ") + choice
    count = len(pictures)
    try:
        tokens = text_model.encode(text, count)
        # Space belongs to the word after it.
        before = len(text_model.encode(item.question.rstrip(" "), count))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    what = f"{where}: the choice {choice[:40]!r}"
    scored = _scored(tokens, before, length, what, "leave the item out")
    if pictures and scored.cut:
        raise ConfigError(
            f"{what} has {len(tokens)} tokens with its question and pictures, and the "
            f"model's sequences have {length}; leave the item out"
        )
    return scored._replace(pictures=pictures)


def _scored(
    tokens: Sequence[int], before: int, length: int, what: str, remedy: str
) -> ScoredText:
    """Return the last tokens of a text, of which those after the first `before` count:
    tokens of the whole text, since a model never saw a text that was cut there. The
    first token of all has nothing before it, and no probability."""
    scored = len(tokens) - max(1, min(before, len(tokens) - 1))
    if scored >= length:
        raise ConfigError(
            f"{what} has {scored} tokens, and the model's sequences have {length}; "
            f"{remedy}"
        )
    kept = tokens[-length:]
    return ScoredText(kept, scored, cut=len(kept) < len(tokens))


def likelihoods(
    text_model: TextModel,
    rows: Sequence[ScoredText],
    report: Report = lambda share: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-likelihood of each row's scored tokens, f64 [rows], and whether
    each of them is the likeliest one, bool [rows]."""
    likelihood = make_likelihood(text_model.model, text_model.dtype)
    found, greedy = np.zeros(len(rows)), np.zeros(len(rows), bool)
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for index, row in enumerate(rows):
        padded = SHORTEST
        while padded < len(row.tokens):
            padded *= 2
        by_kind.setdefault((padded, bool(row.pictures)), []).append(index)
    done = 0
    for (padded, pictured), indices in sorted(by_kind.items()):
        count = max(1, LOGITS // (padded * text_model.model.vocab_size))
        count = min(count, len(indices), PICTURED_ROWS if pictured else count)
        most = max(len(rows[index].pictures) for index in indices)
        side = text_model.model.vision.side
        for start in range(0, len(indices), count):
            batch = indices[start : start + count]
            tokens = np.zeros((count, padded), np.int32)
            weights = np.zeros((count, padded), np.float32)
            for place, index in enumerate(batch):
                row = rows[index]
                tokens[place, : len(row.tokens)] = row.tokens
                weights[place, len(row.tokens) - row.scored : len(row.tokens)] = 1.0
            given = [jnp.asarray(tokens), jnp.asarray(weights)]
            if pictured:
                pixels = np.zeros((count, most, side, side, 3), np.uint8)
                counts = np.zeros(count, np.int32)
                for place, index in enumerate(batch):
                    own = rows[index].pictures
                    counts[place] = len(own)
                    pixels[place, : len(own)] = text_model.pixels(own)
                given += [jnp.asarray(pixels), jnp.asarray(counts)]
            of_batch = likelihood(text_model.params, *given)
            found[batch] = np.asarray(of_batch.log)[: len(batch)]
            greedy[batch] = np.asarray(of_batch.greedy)[: len(batch)]
            done += len(batch)
            report(done / len(rows))
    return found, greedy


MAX_TOKENS = 256
"""Most tokens of an answer if the task does not say."""


class Answers:
    """Answer the three requests of lm-eval by a model.

    If the tokenizer has no start token, a text follows a token that ends texts, as a
    document does in training. If it has neither, the first token of a text gets no
    probability.
    """

    def __init__(
        self, text_model: TextModel, length: int, report: Report = lambda share: None
    ) -> None:
        """length: most tokens of a row: those of the model's training."""
        self._text_model, self._length, self._report = text_model, length, report
        starts = bool(text_model.encode(""))
        self._before = [] if starts or not text_model.ends else [min(text_model.ends)]

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return, for each continuation after its context, its log-likelihood in nats,
        and whether it is the likeliest one.

        A context that is too long loses its beginning. Raises ConfigError if a
        continuation alone is longer than a row.
        """
        rows = [self._row(*pair) for pair in pairs]
        found = likelihoods(self._text_model, rows, self._report)
        return [(float(log), bool(same)) for log, same in zip(*found, strict=True)]

    def of_texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each whole text, in nats: each token is
        predicted once, after as much text as a row has room for."""
        rows, owners = list[ScoredText](), list[int]()
        for owner, text in enumerate(texts):
            tokens = self._encode(text)
            for start in range(1, len(tokens), self._length - 1):
                end = min(start + self._length - 1, len(tokens))
                kept = tokens[max(0, end - self._length) : end]
                rows.append(ScoredText(kept, end - start, cut=len(kept) < end))
                owners.append(owner)
        sums = [0.0] * len(texts)
        logs, _ = likelihoods(self._text_model, rows, self._report)
        for owner, log in zip(owners, logs, strict=True):
            sums[owner] += float(log)
        return sums

    def continuations(
        self, requests: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[str]:
        """Return a continuation of each context, up to the first of its `until`."""
        found = []
        for done, (context, how) in enumerate(requests):
            found.append(self._continue(context, how))
            self._report((done + 1) / len(requests))
        return found

    def _encode(self, text: str) -> list[int]:
        return [*self._before, *self._text_model.encode(text)]

    def _row(self, context: str, continuation: str) -> ScoredText:
        tokens = self._encode(context + continuation)
        # Space belongs to the word after it.
        before = len(self._encode(context.rstrip()))
        what = f"the continuation {continuation[:40]!r}"
        return _scored(tokens, before, self._length, what, "leave the task out")

    def _continue(self, context: str, how: dict[str, Any]) -> str:
        until = how.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(how.get("max_gen_toks") or MAX_TOKENS)
        if not 0 < most < self._length:
            raise ConfigError(
                f"max_gen_toks = {most}: the model's sequences have {self._length} "
                f"tokens, and a context has one at least; leave the task out"
            )
        text_model, tokens = self._text_model, list[int]()
        prompt = self._encode(context)[most - self._length :]
        draws = bool(how.get("do_sample"))
        for token in text_model.generate(
            prompt,
            most,
            temperature=float(how.get("temperature") or 0) if draws else 0.0,
            top_p=float(how.get("top_p") or 1.0),
            room=self._length,
        ):
            tokens.append(token)
            text = text_model.continuation(prompt, tokens)
            found = [text.index(stop) for stop in stops if stop and stop in text]
            if found:
                return text[: min(found)]
        return text_model.continuation(prompt, tokens)


def scores(
    text_model: TextModel,
    tasks: Sequence[str],
    length: int,
    *,
    limit: int | None = None,
    report: Report = lambda share: None,
) -> dict[str, Any]:
    """Return what lm-eval says of the model by task, JSON-compatible.

    Args:
      tasks: names of lm-eval's tasks, or paths of YAML files that describe one.
      limit: most items of a task.

    Raises:
      ConfigError: lm-eval is not installed, or does not know a task.
    """
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--lm-eval needs lm-eval ({error}): pip install 'diloco-jax[eval]'"
        ) from error
    answers = Answers(text_model, length, report)

    class Asked(LM):  # type: ignore[misc, unused-ignore]
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return answers.likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return answers.of_texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any) -> list[str]:
            return answers.continuations([request.args for request in requests])

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    if lost := [file for file in files if not file.is_file()]:
        raise ConfigError(f"--lm-eval {lost[0]}: there is no such file")
    folders = sorted({str(file.parent) for file in files})
    manager = TaskManager(include_path=folders or None)
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(
            f"--lm-eval {unknown[0]}: lm-eval has no such task; `lm-eval ls tasks` "
            f"lists them, and a file TASK.yaml describes one of the same name"
        )
    found = lm_eval.simple_evaluate(
        model=Asked(),
        tasks=names,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in found["results"][name].items()
            if isinstance(value, int | float)
        }
        for name in names
    }
