"""Which of an island's programs all hosts of a slice read from one entry of jax's
cache: the list of docs/cloud.md, from two abstract slices."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax.config import IslandConfig
from diloco_jax.planning.compiling import environment_of

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
    ),
]

ISLAND = IslandConfig(topology="v6e:4x4", mesh_fsdp=16, batch_size=16)
PAGE = Path(__file__).parents[2] / "docs" / "cloud.md"
HEAD = "| program | one entry for |"

KEYS = """
import collections, itertools, json, sys
import jax
from jax._src import cache_key, compiler
from jax.sharding import SingleDeviceSharding
from diloco_jax.config import IslandConfig, RunConfig, SyncConfig
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.island.device.build import build_trainer
from diloco_jax.models.build import build_plan
from diloco_jax.planning.compiling import _devices, _kinds
from tiny import MODEL, SEQUENCE_LENGTH

host, found = int(sys.argv[1]), collections.defaultdict(list)
island = IslandConfig(**json.loads(sys.argv[2]))
whole = slice_of("a", island)
jax.process_index = lambda *of: host
jax.process_count = lambda *of: whole.hosts
devices = _devices(whole)


class Asked(Exception):
    pass


def asked(backend, module, devices, options, *of, **others):
    name, _, key = cache_key.get(module, devices, options, backend).rpartition("-")
    found[name].append(key)
    raise Asked


def lowered():
    run = RunConfig(model=MODEL, sequence_length=SEQUENCE_LENGTH,
                    sync=SyncConfig(fragments=2))
    model, trainer = build_trainer(run, island, devices)
    state = trainer.abstract_state()
    kinds = _kinds(run, island, build_plan(run, model), state)
    pieces = [kind.lower(name) for kind in kinds for name in kind.names]
    own = [device for device in devices if device.process_index == host]
    alone = jax.jit(jax.random.key, static_argnums=0,
                    out_shardings=SingleDeviceSharding(own[0]))
    return [*trainer.lower_all(SEQUENCE_LENGTH), *pieces, alone.lower(7)]


compiler.compile_or_get_cached = asked
for program in lowered():
    try:
        program.compile()
    except Asked:
        pass
print(json.dumps(found))
"""


def test_the_page_lists_the_programs_with_one_key_on_all_hosts():
    facts = {n: getattr(ISLAND, n) for n in ("topology", "mesh_fsdp", "batch_size")}
    environment = environment_of(ISLAND)
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", KEYS, str(host), json.dumps(facts)],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for host in (0, 1)
    ]
    first, second = (json.loads(host.communicate(timeout=400)[0]) for host in hosts)
    assert first.keys() == second.keys()
    same = {name for name in first if first[name] == second[name]}
    table = PAGE.read_text().split(HEAD)[1].split("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    listed = {"all hosts": set[str](), "each host": set[str]()}
    for row in rows:
        listed[row[2].strip()] |= set(row[1].strip(" `").split("`, `"))
    assert listed == {"all hosts": same, "each host": first.keys() - same}
