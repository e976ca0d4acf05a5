"""An island that comes back on an empty disk reads its programs from the cache that its
owner's islands share, and compiles anew those that cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import support
from bucket_support import TIMEOUT_S, Bucket, bucket
from jax._src import compilation_cache
from runtime_support import PATIENCE_S, coordinator, make_config, placed

from diloco_jax import compilation
from diloco_jax.config import Config
from diloco_jax.config.loading import write_config_json
from diloco_jax.island.main import TrainingHost
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.island.boundary import Ending

__all__ = ["bucket"]

COMPILES = """
import sys
from diloco_jax import compilation
compilation.use_cache(sys.argv[1], "kind")
import jax
jax.jit(lambda x: x * 2 + 1)(1.0).block_until_ready()
print(compilation.counted())
"""


def environment() -> dict[str, str]:
    named = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return {n: value for n, value in named.items() if n != compilation.VARIABLE}


@dataclasses.dataclass(frozen=True)
class Lives:
    """Lives of island a, each on a disk of its own, with one cache."""

    config: Config
    folder: Path
    address: str

    def live(self, incarnation: int) -> tuple[int, int]:
        """Return the programs that a life compiled, and those that it read, once it has
        adopted a merge and has all programs."""
        write_config_json(self.config, self.folder / "config.json")
        command = [*support.DILOCO, "island", self.folder / "config.json"]
        command += ["--name", "a", "--coordinator", self.address]
        command += ["--workdir", self.folder / f"disk-{incarnation}"]
        command += ["--incarnation", incarnation, "--cache", self.folder / "cache"]
        log = self.folder / f"{incarnation}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=output,
                stderr=output,
                env=environment(),
            )
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while not (
                "all programs are there" in log.read_text()
                and self.adopted(incarnation)
            ):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            process.terminate()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        (ends,) = re.findall(
            r"ends: .*; (\d+) programs compiled, (\d+) read", log.read_text()
        )
        return int(ends[0]), int(ends[1])

    def adopted(self, incarnation: int) -> bool:
        return any(
            record["kind"] == "island"
            and record["incarnation"] == incarnation
            and record["record"]["kind"] == "adopted"
            for record in read_tape(self.folder / "run" / "tape.jsonl")
        )


def spoil(entries: list[Path]) -> None:
    """Leave a third of them empty, a third torn, and a third of another version."""
    foreign = compilation_cache.combine_executable_and_time(b"of another version", 1)
    for number, entry in enumerate(entries):
        whole = entry.read_bytes()
        torn = whole[: len(whole) // 2]
        other = compilation_cache.compress_executable(foreign)
        entry.write_bytes((b"", torn, other)[number % 3])
        os.utime(entry, (0, 0))


class Waits(TrainingHost):
    """Compiles once all fragments have come."""

    came = threading.Event()

    def _tell_left(self, **left: int) -> None:
        super()._tell_left(**left)
        if left.get("fragments_left") == 0:
            self.came.set()

    def compile(self) -> None:
        assert self.came.wait(PATIENCE_S), "it fetches after it has compiled"
        super().compile()


def test_anchors_come_beside_compilation(text, tmp_path):
    config = placed(make_config(text), time_budget_s=PATIENCE_S)
    with coordinator(config, tmp_path / "run") as service:
        island = Waits(config, "a", service.address, tmp_path / "a")
        island.start()
        assert island.exchange.anchor(0)
        assert not any(island.mailbox.tell_left().values())
        island.stop(Ending(0, "end of test", "stopped"))
        island.close()


@pytest.mark.dist
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_only_programs_that_cannot_be_read_are_compiled(text, tmp_path):
    config = make_config(text, cycles=10_000, quorum=1)
    a = dataclasses.replace(config.islands["a"], step_seconds=0.02)
    config = dataclasses.replace(config, islands={"a": a})
    config = placed(config, time_budget_s=PATIENCE_S, evaluate_every_steps=0).validate()
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(coordinator(config, tmp_path / "run"))
        lives = Lives(config, tmp_path, service.address)
        compiled, read = lives.live(1)  # Some programs are read: two have one key.
        (kind,) = (tmp_path / "cache").iterdir()
        entries = sorted(kind.iterdir())
        assert (compiled, kind.name[:4]) == (len(entries), "jax-")
        spoil(entries)
        assert lives.live(2) == (compiled, read)
        assert lives.live(3) == (0, compiled + read)


@pytest.mark.dist
def test_programs_in_a_bucket_are_read_from_there(bucket: Bucket) -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", COMPILES, "gs://bucket/islands/_jax-cache/_shared"],
            env={**environment(), **bucket.environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert told[0] == "1 programs compiled, 0 read from the cache"
    assert told[1] == "0 programs compiled, 1 read from the cache"
    names = [name for name in bucket.names() if "_jax-cache/_shared/kind/" in name]
    assert len(names) == 1
