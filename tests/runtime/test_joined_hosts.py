"""A train loop of several processes is one island."""

from __future__ import annotations

import json
import re
import signal

import pytest
import support
import tape_checks
from example_support import TIMEOUT_S, Example, merges_of
from runtime_support import PATIENCE_S

from diloco_jax.cluster.cluster import free_port
from diloco_jax.observability.tape import read_tape
from diloco_jax.workdir import read_config

pytestmark = pytest.mark.dist


LIES = "lies = jax.tree.map(lambda x: x.sharding, like)\n"
VALUES = "like = jax.jit(parameters, out_shardings=lies)(jax.random.key(7))\n"
"""Each process has its part of the run's first parameters, and gives it."""
THREADS = """
import threading
left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
print("threads", left)
"""
"""A thread that is still in jax or gRPC as Python ends aborts the process."""


def test_a_loop_of_two_processes_starts_again_when_one_of_them_dies(tmp_path):
    example = Example(tmp_path)
    loop = (tmp_path / "train_mesh.py").read_text()
    assert LIES in loop
    (tmp_path / "train_mesh.py").write_text(loop.replace(LIES, LIES + VALUES) + THREADS)
    served = example.serve("--init", "from-island:mesh")
    processes = [served]

    def mesh(attempt: int):
        world = f"127.0.0.1:{free_port()}"
        started = [
            example.loop("train_mesh.py", "mesh", attempt, world, index)
            for index in range(2)
        ]
        processes.extend(started)
        return started

    try:
        first, second = mesh(1)
        fast = example.train("fast", 1, 0.2)
        processes.append(fast)
        example.until(lambda tape: merges_of(tape, "mesh", 1) >= 2)
        second.send_signal(signal.SIGKILL)
        assert first.wait(TIMEOUT_S) != 0, "it cannot go on alone"
        again = [*mesh(2), fast]
        example.until(lambda tape: merges_of(tape, "mesh", 2) >= 2)
        printed = [p.communicate(timeout=TIMEOUT_S)[0].decode() for p in again]
        assert [p.returncode for p in again] == [0, 0, 0], printed
        assert served.wait(PATIENCE_S) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert all(text.endswith("threads []\n") for text in printed[:2]), printed
    learnt = [float(re.search(r"learnt (\S+)$", p, re.M)[1]) for p in printed]
    assert learnt[0] == learnt[1] == pytest.approx(learnt[2], rel=1e-5)
    summary = json.loads((example.workdir / "summary.json").read_bytes())
    tape = list(read_tape(example.workdir / "tape.jsonl"))
    joins = {name: island["joins"] for name, island in summary["islands"].items()}
    assert joins == {"mesh": 2, "fast": 1}
    assert tape[0]["first_from"] == "mesh"
    sizes = support.fragment_sizes(read_config(example.workdir))
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    assert summary["islands"]["fast"]["tokens_lost"] == {}
