"""Digests of seeded emulations: the same bits before and after a change of the code.

    python tests/simulation/digests.py            prints those of the working tree
    python tests/simulation/digests.py --beside   compares with the first commit

Bits depend on the processor, its cores, the versions of Python, numpy and jax, and the
flags of XLA. So the first commit that has this file runs beside the working tree, with
its own scenes, which have the same names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BESIDE_S = 600.0
BASE = ""
"""Commit whose bits hold, after one that changed them on purpose; "": the first one."""
ADOPT = ("keep", "rebase", "overwrite", "blend")
CODECS = ("f32", "bf16", "int8", "int4")
MERGES = ("rda", "mean", "trimmed_mean", "clipped_mean")
WEIGHTINGS = ("tokens", "tokens_times_rate", "uniform")

Digests = dict[str, dict[str, str]]


def scenes(text: str) -> dict[str, tuple[Any, Any]]:
    """Return configs and options by name. text: a folder of it."""
    from emulate_support import make_config, with_placement
    from tiny import MODEL, SEQUENCE_LENGTH

    from diloco_jax import EmulationOptions
    from diloco_jax.config.loading import read_config

    instant = EmulationOptions()
    overlapped = EmulationOptions(merge_seconds=0.5)
    uneven = EmulationOptions(merge_seconds=0.5, step_spread=0.3)
    failing = EmulationOptions(
        step_spread=0.3, failure_every_seconds=20.0, down_seconds=2.0
    )
    quick = read_config("quickstart")
    quick = quick.replace("model", MODEL).replace("sequence_length", SEQUENCE_LENGTH)
    quick = quick.replace("total_tokens", 1920 * SEQUENCE_LENGTH)
    quick = quick.replace("data", make_config(text).run.data)
    faults = ("v5p-b@40:kill",)
    placement = dataclasses.replace(quick.placement, faults=faults)
    quick = dataclasses.replace(quick, placement=placement)
    unequal = make_config(text, quorum=1).replace("islands.b.step_seconds", 2.5)
    struck = ("b@4:kill", "coordinator@3:kill", "a@9:pause3")
    found = {
        "quickstart": (quick, overlapped),
        "unequal islands": (unequal, uneven),
        "random failures": (make_config(text, quorum=1, steps=40), failing),
        "faults": (with_placement(make_config(text, quorum=1), faults=struck), instant),
        "error feedback off": (make_config(text, error_feedback=False), overlapped),
    }
    for rule in ADOPT:
        # Without a grace deltas miss merges, where "keep" and "rebase" differ.
        missed = make_config(text, quorum=1, grace=0.0, adopt=rule, steps=24)
        missed = missed.replace("islands.b.step_seconds", 2.5)
        found[f"adopt {rule}"] = missed, uneven
    for codec in CODECS:
        found[f"codec up {codec}"] = make_config(text, codec_up=codec), overlapped
        found[f"codec down {codec}"] = make_config(text, codec_down=codec), overlapped
    for rule in MERGES:
        found[f"merge {rule}"] = make_config(text, merge=rule), overlapped
    for rule in WEIGHTINGS:
        found[f"weighting {rule}"] = make_config(text, weighting=rule), overlapped
    return found


def write_text(folder: Path) -> str:
    """Write the text that the scenes train on; return its folder."""
    import numpy as np

    numbers = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in numbers.integers(0, 99, 200))
        (folder / f"{index}.txt").write_text(line)
    return str(folder)


def digests_of(config: Any, options: Any) -> dict[str, str]:
    """Emulate; return the digests of the last parameters and of all merges."""
    from diloco_jax import emulate

    result = emulate(config, options=options)
    params, merges = hashlib.sha256(), hashlib.sha256()
    for name, array in sorted(leaves(result.params)):
        params.update(f"{name} {array.dtype} {array.shape}".encode())
        params.update(array.tobytes())
    table = result.history.merges
    for fragment, digest in zip(table["fragment"], table["digest"], strict=True):
        merges.update(f"{fragment} {digest}\n".encode())
    return {
        "params": params.hexdigest(),
        "merges": merges.hexdigest(),
        "count": str(len(table["digest"])),
    }


def leaves(params: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """List the arrays of parameters, by dotted names."""
    found: list[tuple[str, Any]] = []
    for name, value in params.items():
        if isinstance(value, Mapping):
            found += leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def all_digests() -> Digests:
    """Run every scene."""
    with tempfile.TemporaryDirectory() as folder:
        made = scenes(write_text(Path(folder)))
        return {name: digests_of(*scene) for name, scene in made.items()}


def first_commit() -> str:
    """Return `BASE`, or the first commit that has this file; "" outside of a whole
    clone."""
    line = ["git", "rev-parse", "--is-shallow-repository"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.stdout.strip() != "false":
        return ""
    if BASE:
        return BASE
    line = ["git", "log", "--diff-filter=A", "--format=%H", "--"]
    line.append("tests/simulation/digests.py")
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    return next(iter(found.stdout.split()[-1:]), "") if not found.returncode else ""


def of_first_commit(commit: str) -> Digests:
    """Run the scenes of a commit by the package as it was then."""
    with tempfile.TemporaryDirectory() as folder:
        tree = f"{folder}/base"
        git = ["git", "worktree"]
        add = [*git, "add", "--detach", tree, commit]
        subprocess.run(add, cwd=ROOT, check=True, capture_output=True)
        try:
            done = subprocess.run(
                [sys.executable, "tests/simulation/digests.py"],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": tree},
                check=True,
                timeout=BESIDE_S,
                stdout=subprocess.PIPE,
            )
        finally:
            remove = [*git, "remove", "--force", tree]
            subprocess.run(remove, cwd=ROOT, check=True, capture_output=True)
    found: Digests = json.loads(done.stdout)
    return found


def differences(before: Digests, after: Digests) -> list[str]:
    """Name the scenes that gave other bits, or are missing."""
    names = sorted(before.keys() | after.keys())
    return [
        f"{name}: {before.get(name)} before, {after.get(name)} now"
        for name in names
        if before.get(name) != after.get(name)
    ]


def main(arguments: list[str]) -> int:
    """Print or compare."""
    if arguments == ["--beside"]:
        told = differences(of_first_commit(first_commit()), all_digests())
        print("\n".join(told) or "the same bits")
        return 1 if told else 0
    print(json.dumps(all_digests()))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The tests' own cache: both commits compile much the same.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache/jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    sys.path.append(str(ROOT / "tests"))  # For `tiny.py`, as pytest does.
    sys.exit(main(sys.argv[1:]))
