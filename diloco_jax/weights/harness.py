"""lm-eval asks a run's parameters, or exported ones: its tasks, our model.

lm-eval is an extra of this package (`eval`). Nothing but `scores` imports it; what its
requests mean is here, in terms of a `Speaker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax.config import ConfigError
from diloco_jax.models.generation import generate
from diloco_jax.weights.speaker import Speaker
from diloco_jax.weights.tasks import Report, ScoredText, likelihoods

MAX_TOKENS = 256
"""Most tokens of an answer if the task does not say."""


class Answers:
    """Answer the three requests of lm-eval by a model.

    If the tokenizer has no start token, a text follows a token that ends texts, as a
    document does in training. If it has neither, the first token of a text gets no
    probability.
    """

    def __init__(
        self,
        speaker: Speaker,
        length: int,
        *,
        dtype: str = "float32",
        report: Report = lambda share: None,
    ) -> None:
        """length: most tokens of a row: those of the model's training."""
        self._speaker, self._length = speaker, length
        self._dtype, self._report = dtype, report
        starts = bool(speaker.encode(""))
        self._before = [] if starts or not speaker.ends else [min(speaker.ends)]

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return, for each continuation after its context, its log-likelihood in nats,
        and whether it is the likeliest one.

        A context that is too long loses its beginning. Raises ConfigError if a
        continuation alone is longer than a row.
        """
        found = likelihoods(
            self._speaker,
            [self._row(*pair) for pair in pairs],
            dtype=self._dtype,
            report=self._report,
        )
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
        logs, _ = likelihoods(
            self._speaker, rows, dtype=self._dtype, report=self._report
        )
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
        return [*self._before, *self._speaker.encode(text)]

    def _row(self, context: str, continuation: str) -> ScoredText:
        # Tokens of the whole text: a model never saw a text that was cut there. Space
        # belongs to the word after it.
        bare = context.rstrip()
        tokens = self._encode(context + continuation)
        before = len(self._encode(bare)) or 1
        scored = len(tokens) - min(before, len(tokens) - 1)
        if scored >= self._length:
            raise ConfigError(
                f"the continuation {continuation[:40]!r} has {scored} tokens, and the "
                f"model's sequences have {self._length}; leave the task out"
            )
        kept = tokens[-self._length :]
        return ScoredText(kept, scored, cut=len(kept) < len(tokens))

    def _continue(self, context: str, how: dict[str, Any]) -> str:
        until = how.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(how.get("max_gen_toks") or MAX_TOKENS)
        if not 0 < most < self._length:
            raise ConfigError(
                f"max_gen_toks = {most}: the model's sequences have {self._length} "
                f"tokens, and a context has one at least; leave the task out"
            )
        speaker, tokens = self._speaker, list[int]()
        prompt = self._encode(context)[most - self._length :]
        for token in generate(
            speaker.model,
            speaker.params,
            prompt,
            most,
            temperature=float(how.get("temperature") or 0) if _draws(how) else 0.0,
            top_p=float(how.get("top_p") or 1.0),
            ends=speaker.ends,
            dtype=self._dtype,
            room=self._length,
        ):
            tokens.append(token)
            text = speaker.continuation(prompt, tokens)
            found = [text.index(stop) for stop in stops if stop and stop in text]
            if found:
                return text[: min(found)]
        return speaker.continuation(prompt, tokens)


def _draws(how: dict[str, Any]) -> bool:
    return bool(how.get("do_sample"))


def scores(
    speaker: Speaker,
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
    answers = Answers(speaker, length, report=report)

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
    return {name: _plain(found["results"][name]) for name in names}


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a task's result; those that are none are left out."""
    return {
        name.removesuffix(",none"): value
        for name, value in result.items()
        if isinstance(value, int | float)
    }
