"""An island that comes back on an empty disk fetches while it reads its programs from
the cache that its owner's islands share, and compiles anew those that cannot be read.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import pytest
import support
from jax._src import compilation_cache
from runtime_support import (
    PATIENCE_S,
    await_that,
    coordinator,
    make_config,
    placed,
    started,
)

from diloco_jax import compilation
from diloco_jax.config.loading import write_config_json
from diloco_jax.island.main import TrainingHost
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.island.boundary import Ending

TIMEOUT_S = 240.0


class Waits(TrainingHost):
    """Compiles once all fragments have come."""

    came, told = threading.Event(), list[dict[str, int]]()

    def _tell_left(self, **left: int) -> None:
        super()._tell_left(**left)
        self.told.append(left)
        if left.get("fragments_left") == 0:
            self.came.set()

    def compile(self) -> None:
        assert self.came.wait(PATIENCE_S), "it fetches after it has compiled"
        assert self.told == [{"fragments_left": left} for left in (2, 1, 0)]
        super().compile()
        programs = [left["programs_left"] for left in self.told[3:]]
        assert programs == list(range(len(programs), 0, -1))


def test_anchors_come_beside_compilation(text, tmp_path):
    config = placed(make_config(text), time_budget_s=PATIENCE_S)
    with coordinator(config, tmp_path / "run") as service:
        island = Waits(config, "a", service.address, tmp_path / "a")
        island.start()
        assert island.exchange.anchor(0)
        assert not any(island.mailbox.tell_left().values())
        island.stop(Ending(0, "end of test", "stopped"))
        island.close()


def live(folder: Path, address: str, incarnation: int) -> tuple[int, int]:
    """Return the programs that a life of island a compiled, and those that it read,
    once it has adopted a merge. Each has a disk of its own."""
    command = [*support.DILOCO, "island", str(folder / "config.json"), "--name", "a"]
    command += ["--coordinator", address, "--workdir", str(folder / f"{incarnation}")]
    command += ["--incarnation", f"{incarnation}", "--cache", str(folder / "cache")]
    log = folder / f"{incarnation}.log"

    def is_complete() -> bool:
        assert process.poll() is None, log.read_text()
        return any(
            (r["kind"], r.get("incarnation")) == ("island", incarnation)
            and r["record"]["kind"] == "adopted"
            for r in read_tape(folder / "run" / "tape.jsonl")
        )

    with started(command, log) as process:
        await_that(is_complete, TIMEOUT_S)
        process.terminate()
        process.wait(PATIENCE_S)
    ends = re.search(r"ends: .*; (\d+) programs compiled, (\d+) read", log.read_text())
    return int(ends[1]), int(ends[2])


@pytest.mark.dist
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_only_programs_that_cannot_be_read_are_compiled(text, tmp_path, monkeypatch):
    monkeypatch.delenv(compilation.VARIABLE)
    config = make_config(text, cycles=10_000, quorum=1)
    a = dataclasses.replace(config.islands["a"], step_seconds=0.02)
    config = dataclasses.replace(config, islands={"a": a})
    config = placed(config, time_budget_s=PATIENCE_S, evaluate_every_steps=0).validate()
    write_config_json(config, tmp_path / "config.json")
    foreign = compilation_cache.combine_executable_and_time(b"of another version", 1)
    other = compilation_cache.compress_executable(foreign)
    with coordinator(config, tmp_path / "run") as service:
        found = live(tmp_path, service.address, 1)
        (kind,) = (tmp_path / "cache").iterdir()
        entries = sorted(kind.iterdir())
        # Some programs are read, as two have one key.
        assert (found[0], kind.name[:4]) == (len(entries), "jax-")
        for number, entry in enumerate(entries):
            whole = entry.read_bytes()
            entry.write_bytes((b"", whole[: len(whole) // 2], other)[number % 3])
        assert live(tmp_path, service.address, 2) == found
        assert live(tmp_path, service.address, 3) == (0, sum(found))
