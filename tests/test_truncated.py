"""A thousand files that end too early: each is named or is read as far as it goes, and
nothing crashes, hangs, stays open or grows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from etils import epath

from diloco_jax import checkpoint
from diloco_jax import workdir as workdirs
from diloco_jax.cluster.processes import next_attempt
from diloco_jax.config import Config, IslandConfig, Placement, RunConfig
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import LONG
from diloco_jax.coordinator import journal as durable
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    Publishes,
)
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.data import manifest
from diloco_jax.data.documents import SourceKind
from diloco_jax.data.examples import Reader
from diloco_jax.data.manifest import read_file
from diloco_jax.data.prepare import Recipe, prepare
from diloco_jax.data.prepared import MANIFEST, read_manifest, require_whole
from diloco_jax.data.tokenizers import Bytes
from diloco_jax.errors import ConfigError
from diloco_jax.files import write_json
from diloco_jax.observability.tape import (
    JsonLines,
    Tape,
    TapeError,
    read_lines,
    read_tape,
)
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import SecurityError
from diloco_jax.wire.peers import COORDINATOR
from diloco_jax.wire.tls import TlsFiles

NAMED = (ConfigError, SecurityError, TapeError)
PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)
RUN = RunConfig(sync=LONG)
MOST_BYTES = 16 << 20
"""Memory that one reading may take: a file says no size that is believed."""


class Kind(NamedTuple):
    """A kind of file. read: returns what is in it. prefix: a file that ends early may
    be read as far as it goes."""

    path: Path
    read: Callable[[], Any]
    prefix: bool = False
    named: str = ""
    """Name that a message must have; empty = the file's."""


def tape(folder: Path) -> Kind:
    path = folder / "tape.jsonl"
    written = Tape(path)
    for number in range(40):
        written.append({"kind": "tick", "n": number, "time": 1.0})
    written.close()
    return Kind(path, lambda: [line["n"] for line in read_tape(path)], prefix=True)


def segment_of_a_tape(folder: Path) -> Kind:
    """One that was put aside: a later one follows it."""
    path = folder / "tape.jsonl"
    written = Tape(path, segment_bytes=2000)
    for number in range(50):
        written.append({"kind": "tick", "n": number, "time": 1.0})
    written.close()
    first = folder / "tape.000001.jsonl"
    return Kind(
        first, lambda: [r["n"] for r in read_tape(path)], named="tape.jsonl, line"
    )


def metrics(folder: Path) -> Kind:
    path = folder / "metrics.jsonl"
    lines = JsonLines(path)
    for number in range(40):
        lines.append({"kind": "island", "n": number})
    lines.close()
    return Kind(path, lambda: [line["n"] for line in read_lines(path)], prefix=True)


def record_log(folder: Path) -> Kind:
    log = durable.RecordLog(folder)
    for number in range(40):
        log.append({"kind": "ticks", "through": number})
    log.close()
    path = next(folder.glob("log-*.bin"))
    return Kind(
        path, lambda: [r["through"] for r in durable.read(folder, -1)], prefix=True
    )


def state_snapshot(folder: Path) -> Kind:
    whose = checkpoint.whose(RUN, "r", PLAN)
    policy = policy_config(RUN, Placement(), "r", PLAN.sizes)
    StateSnapshots(epath.Path(folder), Placement(), policy, whose).save(
        3, initial(policy)
    )

    def read() -> Any:
        opened = StateSnapshots(epath.Path(folder), Placement(), policy, whose)
        return opened.load(lambda number: False)

    return Kind(next(folder.glob("state-*")), read)


def fragment_snapshot(folder: Path) -> Kind:
    whose = checkpoint.whose(RUN, "r", PLAN)
    arrays = {"theta": [np.arange(300, dtype=np.float32)]}

    def opened() -> FragmentSnapshots:
        return FragmentSnapshots(epath.Path(folder), Placement(), [0], whose)

    opened().save(0, Version(1, 4), arrays)

    def read() -> Any:
        found = {"theta": [np.empty(300, np.float32)]}
        version = opened().find(0, Version(1, 9), found)
        return version, found["theta"][0].tolist()

    return Kind(next(folder.rglob("*.snapshot")), read, named=f"snapshots in {folder}")


def publish(folder: Path) -> Kind:
    publishes = Publishes(folder)
    publishes.write(0, Version(1, 2), bytes(range(256)) * 4, final=False)
    path = next(folder.rglob("*.publish"))

    def read() -> Any:
        mapped = publishes.mapped(0, Version(1, 2))
        found, how = publishes.read(0, Version(1, 2), None)
        assert mapped is not None
        assert bytes(mapped) == bytes(found)
        return bytes(found), how

    return Kind(path, read)


def manifest_of_tokens(folder: Path) -> Kind:
    path = folder / "tokens.npy"
    np.save(path, np.arange(640, dtype=np.int32) % 100)
    found = manifest.make(path, SourceKind.TOKENS)
    wanted = manifest.manifest_path(path)
    assert manifest.find(path) == found
    return Kind(wanted, lambda: manifest.find(path))


def file_of_tokens(folder: Path) -> Kind:
    path = folder / "tokens.npy"
    np.save(path, np.arange(640, dtype=np.int32) % 100)
    return Kind(path, lambda: read_file(path, SourceKind.TOKENS, None).values.tolist())


def prepared(folder: Path) -> Path:
    (folder / "in").mkdir()
    for number in range(12):
        (folder / "in" / f"{number}.txt").write_text(f"text {number} " * 20)
    recipe = Recipe(
        tokenizer=Bytes(), reader=Reader(), sequence_length=32, validation_fraction=0.3
    )
    prepare(folder / "out", (str(folder / "in"),), recipe, workers=1)
    return folder / "out"


def prepared_manifest(folder: Path) -> Kind:
    out = prepared(folder)
    return Kind(out / MANIFEST, lambda: read_manifest(out))


def prepared_rows(folder: Path) -> Kind:
    out = prepared(folder)
    contents = read_manifest(out)
    path = out / contents.train.shards[0].name
    return Kind(path, lambda: require_whole(out, contents))


def config_json(folder: Path) -> Kind:
    path = folder / "config.json"
    write_config_json(Config(islands={"a": IslandConfig()}), path)
    return Kind(path, lambda: dataclasses.asdict(read_config_json(path)))


def run_json(folder: Path) -> Kind:
    workdirs.RunFacts(run_id="r", begun_unix=1.0).write(folder)
    return Kind(folder / "run.json", lambda: workdirs.read_facts(folder))


def summary(folder: Path) -> Kind:
    path = folder / "summary.json"
    write_json({"phase": "done", "tokens": 12, "islands": {"a": {"steps": 3}}}, path)
    return Kind(path, lambda: workdirs.read_summary(folder))


def attempts(folder: Path) -> Kind:
    path = folder / "attempts.json"
    write_json({f"island-{number}": number for number in range(9)}, path)

    def read() -> dict[str, int]:
        before = path.read_bytes()
        next_attempt(path, "island-3")
        path.write_bytes(before)
        return dict(json.loads(before))

    return Kind(path, read)


def certificate(folder: Path) -> Kind:
    make_certificates(folder, [], 1)
    path = folder / "coordinator.pem"
    return Kind(path, lambda: str(TlsFiles.load(folder, COORDINATOR).who))


KINDS = (
    tape,
    segment_of_a_tape,
    metrics,
    record_log,
    state_snapshot,
    fragment_snapshot,
    publish,
    manifest_of_tokens,
    file_of_tokens,
    prepared_manifest,
    prepared_rows,
    config_json,
    run_json,
    summary,
    attempts,
    certificate,
)
CUTS = 64
"""Files of each kind."""


def cuts(size: int) -> list[int]:
    """Lengths up to one byte less than the whole, evenly apart."""
    return sorted({size * n // CUTS for n in range(CUTS)} | {1, size - 1})


def opened() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def read(kind: Kind) -> tuple[Any, str]:
    """Return what is in the file, or what is said of it."""
    try:
        return kind.read(), ""
    except NAMED as error:
        return None, str(error)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_file_that_ends_early_is_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    kind: Kind = make(tmp_path)
    octets = kind.path.read_bytes()
    whole = kind.read()
    before = opened()
    tracemalloc.start()
    for length in cuts(len(octets)):
        kind.path.write_bytes(octets[:length])
        tracemalloc.reset_peak()
        found, said = read(kind)
        cut = f"cut to {length} of {len(octets)}: {said}"
        if said:
            assert (kind.named or str(kind.path)) in said, cut
        elif kind.prefix:
            assert found == whole[: len(found)], cut
        else:
            # Only the newline at its end says nothing.
            assert (found, octets[length:].strip()) == (whole, b""), cut
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        kind.path.write_bytes(octets)
    tracemalloc.stop()
    # Threads of other tests may end meanwhile.
    assert all(now <= then for now, then in zip(opened(), before, strict=True))
    assert kind.read() == whole


def test_a_checkpoint_of_an_island_whose_files_end_early_is_named(tmp_path) -> None:
    opened = checkpoint.open_folder(tmp_path / "kept", keep=2)
    trees = {"moments": {"x": np.arange(64, dtype=np.float32)}}
    checkpoint.save(opened, 1, trees, {"steps": 7})

    def everything() -> Any:
        facts = checkpoint.read_facts(opened, 1)
        return facts, checkpoint.restore(opened, 1, "moments")["x"].tolist()

    whole = everything()
    files = [p for p in (tmp_path / "kept" / "1").rglob("*") if p.is_file()]
    assert len(files) > 4
    named = 0
    for path in files:
        octets = path.read_bytes()
        for length in (0, len(octets) // 2, len(octets) - 1):
            path.write_bytes(octets[: max(0, length)])
            found, said = read(Kind(path, everything))
            if said:
                named += 1
                assert said.startswith(f"checkpoint 1 in {tmp_path / 'kept'} cannot be")
                assert "restore it from a copy, or remove it: the island" in said
                assert "\n" not in said
            else:
                assert found == whole
        path.write_bytes(octets)
    opened.close()
    assert named >= len(files)


def test_there_are_a_thousand() -> None:
    assert len(KINDS) * CUTS >= 1000
