"""Parts done by several processes, which end with the command that started them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from diloco_jax.data.prepare.parts import Part, SourceFile
from diloco_jax.data.prepare.writing import Recipe, done_path, write_part
from diloco_jax.data.tokenizers.of_bytes import Bytes
from diloco_jax.data.tokenizers.opening import open_tokenizer
from diloco_jax.errors import ConfigError

SAFE_PATH = "PYTHONSAFEPATH"
TOLD_EVERY_S = 0.2
WATCH_S = 1.0
"""Seconds between two looks of a worker at whether the command still runs."""


@dataclasses.dataclass(frozen=True)
class _Work:
    """The needs of a worker, for every part. A tokenizer is opened where it is used."""

    folder: Path
    sources: Sequence[SourceFile]
    recipe: Recipe
    tokenizer: str
    read: Synchronized[int]


_work: _Work


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Have children import what is installed, and nothing of the current folder."""
    given = SAFE_PATH in os.environ
    os.environ.setdefault(SAFE_PATH, "1")
    try:
        yield
    finally:
        if not given:
            del os.environ[SAFE_PATH]


@_safe_path()
def do_parts(
    folder: Path,
    sources: Sequence[SourceFile],
    parts: Sequence[Part],
    recipe: Recipe,
    workers: int,
    report: Callable[[float], None],
) -> None:
    """Do the parts that are not done; see `work.prepare`."""
    sizes = [sum(piece.nbytes for piece in part) for part in parts]
    left = [n for n in range(len(parts)) if not done_path(folder, n).exists()]
    total, before = sum(sizes), sum(sizes) - sum(sizes[n] for n in left)
    if workers == 1 or len(left) < 2:
        read = before

        def advance(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            report(min(read / total, 1.0))

        for number in left:
            write_part(folder, number, sources, parts[number], recipe, advance)
        return
    context = multiprocessing.get_context("spawn")
    counter: Synchronized[int] = context.Value("q", before)
    files = recipe.tokenizer.files
    bare = dataclasses.replace(recipe, tokenizer=Bytes())  # A stand-in, until opened.
    work = _Work(folder, sources, bare, str(files[0]) if files else "", counter)
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(left)), context, _begin, (work, os.getpid())
    ) as pool:
        try:
            waiting = {pool.submit(_do, n, parts[n]) for n in left}
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, TOLD_EVERY_S, concurrent.futures.FIRST_COMPLETED
                )
                report(min(counter.value / total, 1.0))
                for one in done:
                    one.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                f"--workers = {workers}: a worker ended, perhaps for want of memory; "
                f"give fewer, and the same command goes on in {folder}"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()


def _begin(work: _Work, parent: int) -> None:
    """Make this process a worker: it leaves signals of the terminal to the command,
    and ends when that is gone."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker has one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    recipe = dataclasses.replace(work.recipe, tokenizer=open_tokenizer(work.tokenizer))
    _work = dataclasses.replace(work, recipe=recipe)


def _do(number: int, part: Part) -> None:
    counter = _work.read

    def advance(nbytes: int) -> None:
        with counter.get_lock():
            counter.value += nbytes

    write_part(_work.folder, number, _work.sources, part, _work.recipe, advance)
