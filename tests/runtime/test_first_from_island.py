"""A run that begins with the parameters of one of its islands."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import support
import tape_checks
from example_support import TIMEOUT_S, Example
from runtime_support import PATIENCE_S, make_config, placed

from diloco_jax.cluster.cluster import free_port
from diloco_jax.cluster.status import read_status
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.island.main import TrainingHost
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import read_tape
from diloco_jax.weights.first import first_params, require_repeatable, started_from
from diloco_jax.workdir import read_config

pytestmark = pytest.mark.dist

OWN_SEED = 7
SAYS = """
    params = island.params
    began = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(params))
    print(f"began {began!r}")
"""


@pytest.fixture
def example(tmp_path):
    """The page's; its loop `own.py` begins with other parameters than are drawn."""
    example = Example(tmp_path)
    loop = (tmp_path / "train.py").read_text()
    loop = loop.replace("\n    params = island.params\n", SAYS)
    (tmp_path / "train.py").write_text(loop)
    loop = loop.replace("jax.random.key(0)", f"jax.random.key({OWN_SEED})")
    (tmp_path / "own.py").write_text(loop)
    return example


def test_it_is_visible_when_it_is_complete_whoever_dies_before(example):
    processes = [served := example.serve("--init", "from-island:fast")]
    try:
        slow = example.train("slow", 1, 0.02)
        fast = example.loop("own.py", "fast", 1, 0.02)
        processes += [slow, fast]
        shown = await_status(example, lambda s: s["islands"])
        assert shown["phase"] == "gathering"
        assert "island 'fast', of which 0 of 3" in shown["alerts"][0]
        assert "slow" not in shown["islands"]
        served.send_signal(signal.SIGKILL)
        fast.send_signal(signal.SIGKILL)
        served.wait(PATIENCE_S)
        (example.workdir / "coordinator.address").unlink()
        assert not (example.workdir / "log").exists()
        processes.append(served := example.serve())
        processes.append(fast := example.loop("own.py", "fast", 2, 0.02))
        printed = [p.communicate(timeout=TIMEOUT_S)[0].decode() for p in (fast, slow)]
        assert (fast.returncode, slow.returncode) == (0, 0), printed
        assert served.wait(PATIENCE_S) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    first = first_of(example)
    assert first["first_from"] == "fast"
    began, learnt = (
        [float(re.search(rf"{word} (\S+)$", text, re.M)[1]) for text in printed]
        for word in ("began", "learnt")
    )
    assert learnt[0] == learnt[1]
    own, drawn = (size_of(example, seed) for seed in (OWN_SEED, 0))
    assert began[0] == pytest.approx(own, rel=1e-6)
    assert abs(own - drawn) > 1e-3 * own
    summary = json.loads((example.workdir / "summary.json").read_bytes())
    tape = list(read_tape(example.workdir / "tape.jsonl"))
    sizes = support.fragment_sizes(read_config(example.workdir))
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    assert {n: i["joins"] for n, i in summary["islands"].items()} == {
        "fast": 1,
        "slow": 1,
    }


def test_an_island_of_the_products_own_gives_what_its_model_draws(text, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    config = placed(
        make_config(text, cycles=1, quorum=1), first_from="b", bind=address
    ).validate()
    service = Coordinator(config, tmp_path, init=True)
    thread = threading.Thread(target=lambda: (service.start(), service.run()))
    thread.start()
    try:
        island = TrainingHost(config, "b", address, tmp_path / "b")
        island.start()
        ending = island.loop.run()
        island.stop(ending)
        island.close()
        assert ending.exit_code == 0, ending
    finally:
        thread.join(PATIENCE_S)
        service.close()
    run, first = config.run, next(iter(read_tape(tmp_path / "tape.jsonl")))
    drawn = first_params(run, build(run))
    digest = Store(run, build_plan(run, build(run)), drawn, 1.0).digest()
    assert (first["first_from"], first["parameters_digest"]) == ("b", digest)
    assert island.mailbox.counted()[0]["bytes_join"] == 0, "it has them already"


def test_a_source_that_cannot_give_is_refused_by_name():
    config = Config(islands={"fast": IslandConfig(), "slow": IslandConfig()})
    begun = started_from(config, "from-island:fast").validate()
    assert begun.placement.first_from == "fast"
    assert begun.run.fingerprint() == config.run.fingerprint()
    with pytest.raises(ConfigError, match=r"no such island .did you mean 'fast'"):
        started_from(config, "from-island:fst").validate()
    with pytest.raises(ConfigError, match="write hf:DIR"):
        started_from(config, "from-islands:fast")
    model = dataclasses.replace(config.run.model, weights="hf:/somewhere")
    run = dataclasses.replace(config.run, model=model)
    with pytest.raises(ConfigError, match=r"model\.weights = 'hf:/somewhere'"):
        started_from(dataclasses.replace(config, run=run), "from-island:fast")
    with pytest.raises(ConfigError, match="replay has only what is drawn or in files"):
        require_repeatable(begun.placement, "replay")


def first_of(example):
    """The tape's first line."""
    return next(iter(read_tape(example.workdir / "tape.jsonl")))


def size_of(example, seed):
    """The sum of the absolute values of the page's parameters."""
    code = (
        "import jax, run, numpy as np;"
        f"leaves = jax.tree.leaves(run.parameters(jax.random.key({seed})));"
        "print(repr(sum(float(np.abs(leaf).sum()) for leaf in leaves)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=example.folder,
        env=example.environment,
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return float(done.stdout)


def await_status(example, condition):
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = read_status(str(example.workdir), Placement())
        if condition(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
