"""Islands of a config, each compiled in a process of its own, two at a time.

libtpu reads its flags once, writes to standard error and may abort, so it must not run
in the process that plans; one that hangs must be killed, and its exit code told, which
pools of the standard library cannot do. Equal islands are compiled once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.before_jax import (
    FLAG_LISTS,
    generation_of,
    libtpu_flags_in_force,
    prepare_environment,
    set_libtpu_flags,
)
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.launch import variables_of
from diloco_jax.config.loading import write_config_json
from diloco_jax.core.members import importable

DEADLINE_S = 3600.0
"""Seconds for one island; a dozen billion parameters take minutes on a free core."""
WORKER = "diloco_jax.planning.compiling"
"""Prints one JSON object per line: `{"doing", "done", "parts"}` is progress,
`{"result"}` the last line, `{"config_error"}` a refusal."""
AT_A_TIME = 2
"""Processes at a time; each takes a core and some GB of memory."""
Flags = tuple[tuple[str, str], ...]
"""Variables with flags, by name."""
Report = Callable[[str, float], None]
"""Callback (island, share that is done); several threads call it."""


class PlanError(Exception):
    """A compilation was killed."""


def require_libtpu() -> None:
    """Raise ConfigError with the remedy if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "libtpu is not installed, and `diloco plan` compiles with it: "
            "pip install -e '.[tpu]' (no TPU is needed)"
        )


def compile_islands(
    config: Config, report: Report, names: Collection[str] = ()
) -> dict[str, Any]:
    """Return the plans of these islands by name, as builtins; of all, if none is named.

    Raises ConfigError, also if a compilation fails, or PlanError if one is killed.
    """
    groups: dict[tuple[IslandConfig, Flags], list[str]] = {}
    names = names or list(config.islands)
    for name in names:
        # Without the fields that no compiler sees.
        compiled = dataclasses.replace(
            config.islands[name], stands_for="", step_seconds=0.0, hosts=1
        )
        groups.setdefault((compiled, flags_of(config, name)), []).append(name)
    plans: dict[str, Any] = {}
    running: set[subprocess.Popen[str]] = set()
    with tempfile.TemporaryDirectory(prefix="diloco-plan-") as folder:
        path = Path(folder) / run_files.CONFIG
        write_config_json(config, path)
        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
            work = {
                pool.submit(_compile, path, alike[0], island, flags, report, running): (
                    alike
                )
                for (island, flags), alike in groups.items()
            }
            try:
                for future in concurrent.futures.as_completed(work):
                    plans.update(dict.fromkeys(work[future], future.result()))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(running):
                    process.kill()
                raise
    return {name: plans[name] for name in names}


def _compile(
    path: Path,
    name: str,
    island: IslandConfig,
    flags: Flags,
    report: Report,
    running: set[subprocess.Popen[str]],
) -> Any:
    """Compile an island in its process and return its plan.

    running: has the process as long as it lives."""
    log, environment = path.with_name(f"{name}.log"), environment_of(island, flags)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(path), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment, **importable()},
            text=True,
        )
    running.add(process)
    # A process that hangs prints nothing, so the deadline must kill it.
    killer = threading.Timer(DEADLINE_S, process.kill)
    killer.start()
    assert process.stdout
    try:
        with process.stdout as lines:
            for said in map(json.loads, lines):
                if "config_error" in said:
                    raise ConfigError(said["config_error"])
                if "result" in said:
                    report(name, 1.0)
                    return said["result"]
                report(name, said["done"] / said["parts"])
        code = process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        running.discard(process)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    if code == -signal.SIGKILL:
        raise PlanError(
            f"compiling island {name} was killed, for want of memory or after "
            f"{DEADLINE_S:g} s; it said:\n{last}"
        )
    raise ConfigError(
        f"compiling island {name} for {island.topology} ended with code {code} and no "
        f"result, with {libtpu_flags_in_force(environment)}; flags that you set there "
        f"override those of diloco_jax/before_jax.py; it said:\n{last}"
    )


def flags_of(config: Config, name: str) -> Flags:
    """Return the variables with flags that a launch gives to the island."""
    given = variables_of(config.launch, name).plain
    return tuple((flags, given[flags]) for flags in FLAG_LISTS if flags in given)


def environment_of(island: IslandConfig, flags: Flags = ()) -> dict[str, str]:
    """Return the environment of an island's process, without this machine's devices.

    flags: see `flags_of`; they count before those of this machine.
    """
    environment = dict(os.environ) | dict(flags)
    prepare_environment(1, environment)
    set_libtpu_flags(generation_of(island.topology), environment)
    return environment | {
        "JAX_PLATFORMS": "cpu",
        # No device is opened, so that several processes may load the library.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # The cache cannot read back compilations for absent devices.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
    }
