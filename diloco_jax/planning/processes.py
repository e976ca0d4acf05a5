"""Islands of a config, each compiled in a process of its own, two at a time.

libtpu reads its flags once, writes to standard error and may abort, so it must not run
in the process that plans. Equal islands are compiled once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import os
import signal
import tempfile
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
from diloco_jax.planning.workers import Workers, last_lines

DEADLINE_S = 3600.0
"""Seconds for one island; a dozen billion parameters take minutes on a free core."""
WORKER = "diloco_jax.planning.compiling"
AT_A_TIME = 2
"""Processes at a time; each takes a core and some GB of memory."""
Flags = tuple[tuple[str, str], ...]
"""Variables with flags, by name."""
Report = Callable[[str, str, float], None]
"""Callback (island, current work, share that is done); several threads call it."""


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
        group = _compiled_part(config.islands[name]), flags_of(config, name)
        groups.setdefault(group, []).append(name)
    plans: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="diloco-plan-") as folder:
        path = Path(folder) / run_files.CONFIG
        write_config_json(config, path)
        compiler = _Compiler(path, report)
        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
            work = {
                pool.submit(
                    compiler.compile, alike[0], config.islands[alike[0]], flags
                ): alike
                for (_, flags), alike in groups.items()
            }
            try:
                for future in concurrent.futures.as_completed(work):
                    plans.update(dict.fromkeys(work[future], future.result()))
            except BaseException:
                compiler.stop()
                pool.shutdown(cancel_futures=True)
                raise
    return {name: plans[name] for name in names}


def _compiled_part(island: IslandConfig) -> IslandConfig:
    """Return the island without the fields that no compiler sees."""
    return dataclasses.replace(
        island, stands_for="", step_seconds=0.0, hosts=1, offers=""
    )


class _Compiler:
    """Compiles islands, one per call of `compile`, from any thread."""

    def __init__(self, path: Path, report: Report) -> None:
        self._path = path
        self._report = report
        self._workers = Workers()

    def compile(self, name: str, island: IslandConfig, flags: Flags) -> Any:
        """Compile an island in its process and return its plan."""
        log = self._path.with_name(f"{name}.log")
        environment = environment_of(island, flags)
        plan, code = self._workers.run(
            WORKER,
            [str(self._path), name],
            environment=environment,
            log=log,
            deadline_s=DEADLINE_S,
            progress=lambda doing, share: self._report(name, doing, share),
        )
        if plan is not None:
            self._report(name, "done", 1.0)
            return plan
        if code == -signal.SIGKILL:
            raise PlanError(
                f"compiling island {name} was killed, for want of memory or after "
                f"{DEADLINE_S:g} s; it said:\n{last_lines(log)}"
            )
        raise ConfigError(
            f"compiling island {name} for {island.topology} ended with code {code} and "
            f"no result, with {libtpu_flags_in_force(environment)}; flags that you set "
            f"there override those of diloco_jax/before_jax.py; it said:\n"
            f"{last_lines(log)}"
        )

    def stop(self) -> None:
        """End all processes."""
        self._workers.stop()


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
