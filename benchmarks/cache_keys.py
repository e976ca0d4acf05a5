"""The programs of an island that all hosts of its slice read from one entry of jax's
compilation cache, and those of which each host has its own.

Two processes, each with an abstract slice of its own, lower all programs as hosts 0 and
1 of it and compute their keys; nothing is compiled, and no TPU is touched.

Command: `python -m benchmarks.cache_keys`, which prints a JSON object: by program, True
if the hosts' keys are equal. Cost: some 20 seconds.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
from typing import Any, NoReturn
from unittest import mock

import support

from diloco_jax.config import IslandConfig, RunConfig, SyncConfig
from diloco_jax.planning.compiling import environment_of

ISLAND = IslandConfig(topology="v6e:4x4", mesh_fsdp=16, batch_size=16)
CHIPS_PER_HOST = 4


class AskedError(Exception):
    """A key is known, and nothing is to be compiled."""


def main() -> int:
    """Compare two hosts, or be one."""
    parser = support.parser(__doc__)
    parser.add_argument("--host", type=int, help="print the keys of this host")
    host = parser.parse_args().host
    if host is not None:
        os.environ.update(environment_of(ISLAND))
        print(json.dumps(keys(host)))
        return 0
    one, other = (
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "--host", host],
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
        )
        for host in "01"
    )
    names = sorted({*one, *other})
    print(json.dumps({name: one.get(name) == other.get(name) for name in names}))
    return 0


def keys(host: int) -> dict[str, list[str]]:
    """Return the keys of all programs, by name, as this host of the slice has them."""
    import jax
    from jax._src import cache_key, compiler

    from diloco_jax.hardware.tpus import slice_of
    from diloco_jax.island.device.build import build_trainer
    from diloco_jax.models.build import build_plan
    from diloco_jax.planning.compiling import _devices, _kinds

    whole = slice_of("a", ISLAND)
    devices = _devices(whole)
    run = RunConfig(sequence_length=16, sync=SyncConfig(fragments=2))
    own = devices[CHIPS_PER_HOST * host]
    assert own.process_index == host
    alone = jax.jit(
        jax.random.key,
        static_argnums=0,
        out_shardings=jax.sharding.SingleDeviceSharding(own),
    )
    found: dict[str, list[str]] = collections.defaultdict(list)

    def asked(
        backend: Any, module: Any, used: Any, options: Any, *of: Any, **others: Any
    ) -> NoReturn:
        name, _, key = cache_key.get(module, used, options, backend).rpartition("-")
        found[name].append(key)
        raise AskedError

    with (
        mock.patch.object(jax, "process_index", return_value=host),
        mock.patch.object(jax, "process_count", return_value=whole.hosts),
        mock.patch.object(compiler, "compile_or_get_cached", asked),
    ):
        model, trainer = build_trainer(run, ISLAND, devices)
        state = trainer.abstract_state()
        kinds = _kinds(run, ISLAND, build_plan(run, model), state)
        pieces = [kind.lower(name) for kind in kinds for name in kind.names]
        steps = trainer.lower_all(run.sequence_length)
        for program in [*steps, *pieces, alone.lower(7)]:
            with contextlib.suppress(AskedError):
                program.compile()
    return found


if __name__ == "__main__":
    sys.exit(main())
