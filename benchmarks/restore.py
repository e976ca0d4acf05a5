"""A coordinator's restore from its disk: seconds, beside disk and cores alone.

Question: does a coordinator that comes back need longer than its disk and its cores
do, and does it merge before all is back? One process, no network: snapshots of 24
fragments of like pieces and three cycles of int8 publishes after them, on this disk.
Before each part they are read, and dropped from the system's cache: memory that was
free for seconds belongs to a virtual machine's host, and takes longer to have again
than a restore does. Extents are multiples of 128, as those of models are, so that 100 M
become 97.5 M.

*Read* is the time in which as many threads read these files and do nothing else;
*alone* the CPU seconds of the digests of these bytes, and of the publishes decoded by
the route "native", over memory that exists. Then a holder restores them. Its CPU
seconds are those of the process in user mode: what the kernel takes for copies and new
pages, *system*, stands beside them. Of three times each the least counts. At last a
merge of each fragment is ordered as the restore begins; *back* are the fragments that
are when the first merge is committed, its publish on the disk.

Prediction: the longer of disk and cores, and a tenth more; the first merge when two
fragments of 24 are back.

Command: `python -m benchmarks.restore`; `--parameters` says how many. Cost: five
minutes, 16 bytes of memory and 13 of disk a parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import support
from etils import epath
from merge_rate import contributions, encoded_delta, store_of
from xxhash import xxh3_128

from diloco_jax import machine
from diloco_jax.cluster.cluster import coordinator_environment
from diloco_jax.compilation import passes_of
from diloco_jax.config import OuterConfig, Placement, RunConfig
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    Publishes,
)
from diloco_jax.coordinator.holding.holder import RESTORES_AT_ONCE, StoreHolder
from diloco_jax.coordinator.holding.inbox import Inbox, Rooms
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.snapshots import flat
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.files import BLOCK_BYTES
from diloco_jax.hardware.machines import RESTORED_MAX
from diloco_jax.protocol.holding import (
    Commit,
    Committed,
    Merge,
    MergeDigested,
    MergePrepared,
    RestoredFragment,
    RestoreFragments,
)
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import bulk

RUN = RunConfig(
    outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
)
FRAGMENTS, CODEC = 24, "int8"
COLUMNS, EXTENT = 1024, 128
PARAMETERS = 100_000_000
WHOSE = {"run_id": "r", "run": {"total_tokens": 0}, "plan": ""}
BEHIND = 3
"""Cycles of publishes behind the newest snapshots."""
CPU_MAX, BACK_MAX = 1.15, 0.5
TIMED, REPEATED = ("read", "alone", "restored"), 3
"""Parts of which the least of so many seconds count."""
_rooms = threading.local()
"""A buffer of each thread."""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--part", nargs=3, help="used by itself")
    options = parser.parse_args()
    if options.part:
        part, folder, parameters = options.part
        print(json.dumps(PARTS[part](Path(folder), int(parameters))))
        return 0
    found = restore(options.parameters)
    tables, checks = {"A restore": [row_of(found)]}, checks_of(found)
    return support.write_results(
        options.out, "restore", __doc__, tables, checks, {"restore": found}
    )


def side_of(parameters: int) -> int:
    """Return the rows of each fragment's array: a multiple of EXTENT."""
    return parameters // FRAGMENTS // COLUMNS // EXTENT * EXTENT


def elements_of(parameters: int) -> int:
    """Return the parameters that there are if so many are asked for."""
    return FRAGMENTS * side_of(parameters) * COLUMNS


def restore(parameters: int) -> dict[str, Any]:
    """Return the raw numbers of a restore, each part in a process of its own."""
    found: dict[str, Any] = {
        "parameters": elements_of(parameters),
        "cores": machine.cores(),
    }
    env = {**os.environ, **coordinator_environment(), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="diloco-restore-") as folder:
        words = [sys.executable, __file__, "--part"]
        for part in ("prepared", *TIMED * REPEATED, "merged"):
            print(f"{time.strftime('%H:%M:%S')} restore: {part}", file=sys.stderr)
            told = subprocess.run(
                [*words, part, folder, str(parameters)],
                env=env,
                stdout=subprocess.PIPE,
                check=True,
            )
            new = json.loads(told.stdout)
            old = found.setdefault(part, new)
            found[part] = {key: min(old[key], value) for key, value in new.items()}
    return found


def row_of(found: dict[str, Any]) -> dict[str, str]:
    """Return a restore's row of the page."""
    back, merged = found["restored"], found["merged"]
    return {
        "parameters": f"{found['parameters']:,}",
        "cores": str(found["cores"]),
        "wall, s": f"{back['wall_s']:.2f}",
        "read, s": f"{found['read']['wall_s']:.2f}",
        "CPU, s": f"{back['cpu_s']:.2f}",
        "alone, s": f"{found['alone']['cpu_s']:.2f}",
        "system, s": f"{back['system_s']:.2f}",
        "first merge, s": f"{merged['first_s']:.2f}",
        "back": f"{merged['back']} of {FRAGMENTS}",
    }


def checks_of(found: dict[str, Any]) -> list[support.Check]:
    """Return the bounds of a restore."""
    back = found["restored"]
    cores_s = (back["cpu_s"] + back["system_s"]) / found["cores"]
    longer = max(found["read"]["wall_s"], cores_s)
    return [
        support.at_most(
            "restore: over its disk or its cores", back["wall_s"] / longer, RESTORED_MAX
        ),
        support.at_most(
            "restore: CPU over digests and decoding alone",
            back["cpu_s"] / found["alone"]["cpu_s"],
            CPU_MAX,
        ),
        support.at_most(
            "restore: share back at the first merge",
            found["merged"]["back"] / FRAGMENTS,
            BACK_MAX,
        ),
    ]


def shapes_of(parameters: int) -> dict[str, tuple[int, int]]:
    """Return one matrix for each fragment."""
    return {f"w{i:02}": (side_of(parameters), COLUMNS) for i in range(FRAGMENTS)}


def empty_store(parameters: int) -> Store:
    """Return a store without arrays; all that replays need is compiled."""
    passes = passes_of("native")
    like = store_of(RUN, CODEC, {"w": (EXTENT, COLUMNS)}, 1, passes)
    payload = encoded_delta(like, CODEC, 0, 0)
    made = like.merge(0, contributions(1), [payload], final=False)
    like.replay(0, Version(1, 1), made.payload, final=False)
    sync = dataclasses.replace(
        RUN.sync, fragments=FRAGMENTS, codec_up=CODEC, codec_down=CODEC
    )
    shapes = shapes_of(parameters)
    plan = plan_fragments(
        dict(shapes), dict.fromkeys(shapes, ("embed", "mlp")), FRAGMENTS
    )
    return Store(dataclasses.replace(RUN, sync=sync), plan, None, 60.0, passes)


def holder_of(store: Store, folder: Path) -> StoreHolder:
    """Return a holder on that disk."""
    snapshots = epath.Path(folder / "snapshots")
    return StoreHolder(
        store,
        Inbox(store.layouts_up, Rooms(1 << 40)),
        Publishes(folder / "publishes"),
        FragmentSnapshots(snapshots, Placement(), range(FRAGMENTS), WHOSE),
        None,
        write_within_s=60.0,
    )


def files_of(folder: Path) -> list[Path]:
    """Return the files of all fragments. None of them is in the system's cache, and all
    were, so that its memory is this machine's."""
    found = [path for path in folder.rglob("00*/*") if path.is_file()]
    for path in found:
        read_through(path)
    for path in found:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def read_through(path: Path) -> None:
    """Read a file, and keep nothing of it."""
    if not hasattr(_rooms, "octets"):
        _rooms.octets = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(_rooms.octets):
            pass


def asked_of(folder: Path) -> RestoreFragments:
    """Return what is to be restored there."""
    path = folder / "asked.json"
    return msgspec.json.decode(path.read_bytes(), type=RestoreFragments)


@contextlib.contextmanager
def timed(found: dict[str, Any]) -> Iterator[None]:
    """Note the seconds of a block: elapsed, and of the processor in either mode."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    found["wall_s"] = time.monotonic() - began
    found["cpu_s"] = after.ru_utime - before.ru_utime
    found["system_s"] = after.ru_stime - before.ru_stime


def prepare(folder: Path, parameters: int) -> dict[str, Any]:
    """Write snapshots after a first merge, and the publishes of later ones."""
    store = store_of(RUN, CODEC, shapes_of(parameters), FRAGMENTS, passes_of("native"))
    holder, asked = holder_of(store, folder), []
    payload = encoded_delta(store, CODEC, 0, 0)
    for fragment in range(FRAGMENTS):
        digests = {}
        for number in range(1, 2 + BEHIND):
            version = Version(1, number)
            merged = store.merge(fragment, contributions(1), [payload], final=False)
            store.commit(fragment, version, merged)
            if number == 1:
                holder._snapshots.save_first(fragment, *store.current(fragment))
                continue
            digests[number] = holder._publishes.write(
                fragment, version, merged.payload, final=False
            ).digest
        asked.append(Committed(fragment=fragment, version=version, digests=digests))
    told = RestoreFragments(fragments=tuple(asked))
    (folder / "asked.json").write_bytes(msgspec.json.encode(told))
    return {"bytes": sum(path.stat().st_size for path in files_of(folder))}


def read_alone(folder: Path, parameters: int) -> dict[str, Any]:
    """Read all files, as many at a time as a restore does."""
    found: dict[str, Any] = {}
    paths = sorted(files_of(folder), key=lambda path: path.parent.name)
    with timed(found), ThreadPoolExecutor(RESTORES_AT_ONCE) as pool:
        list(pool.map(read_through, paths))
    return found


def compute_alone(folder: Path, parameters: int) -> dict[str, Any]:
    """Digest all bytes, and decode the publishes, by memory that exists."""
    store = empty_store(parameters)
    holder, sums = holder_of(store, folder), {"cpu_s": 0.0, "decode_s": 0.0}
    for own in asked_of(folder).fragments:
        arrays = store.room(own.fragment)
        version = holder._snapshots.find(own.fragment, own.version, arrays)
        store.load(own.fragment, arrays, version)
        payloads = {
            Version(1, number): holder._publishes.read(
                own.fragment, Version(1, number), digest
            )[0]
            for number, digest in own.digests.items()
        }
        digested: dict[str, Any] = {}
        decoded: dict[str, Any] = {}
        with timed(digested):
            for values in (*flat(arrays), *payloads.values()):
                xxh3_128(np.ascontiguousarray(values).data).digest()
        with timed(decoded):
            for number, payload in payloads.items():
                store.replay(
                    own.fragment,
                    number,
                    payload,
                    final=False,
                    digested=number == own.version,
                )
        sums["cpu_s"] += digested["cpu_s"] + decoded["cpu_s"]
        sums["decode_s"] += decoded["cpu_s"]
    return sums


def restore_alone(folder: Path, parameters: int) -> dict[str, Any]:
    """Restore all fragments."""
    found: dict[str, Any] = {}
    holder, asked = holder_of(empty_store(parameters), folder), asked_of(folder)
    files_of(folder)
    holder.store.describe()  # Versions of packages, which a process reads once.
    with timed(found):
        answer = holder.restore(asked, whole=True)
    assert len(answer.fragments) == FRAGMENTS
    return found


def merge_meanwhile(folder: Path, parameters: int) -> dict[str, Any]:
    """Restore all fragments, with a merge of each ordered at once."""
    store = empty_store(parameters)
    holder, asked = holder_of(store, folder), asked_of(folder)
    part = contributions(1)[0]
    payload = encoded_delta(store, CODEC, 0, 0)
    for fragment in range(FRAGMENTS):
        start = bulk.UploadStart(
            run_id="r",
            island=part.island,
            incarnation=part.incarnation,
            session="s",
            fragment=fragment,
            tick=part.tick,
            offset=0,
            length=payload.nbytes,
            total=payload.nbytes,
        )
        place = holder.upload_begin(start)
        place[:] = payload.data
        holder.upload_end(start, place)
    back: list[int] = []
    merged: list[int] = []
    found: dict[str, Any] = {}
    over = threading.Event()

    def heard(message: Any) -> None:
        if isinstance(message, RestoredFragment):
            back.append(message.fragment)
            if len(back) == FRAGMENTS:
                found["all_back_s"] = time.monotonic() - began
        elif isinstance(message, MergePrepared):
            holder.hold(Commit(fragment=message.fragment, version=message.version))
            if "first_s" not in found:
                found.update(first_s=time.monotonic() - began, back=len(back))
        elif isinstance(message, MergeDigested):
            merged.append(message.fragment)
            if len(merged) == FRAGMENTS:
                over.set()

    def failed(error: BaseException) -> None:
        found["error"] = repr(error)
        over.set()

    holder.answer(heard, failed)
    files_of(folder)
    began = time.monotonic()
    holder.restore(asked)
    holder.warm_up()
    for own in asked.fragments:
        merge = Merge(
            fragment=own.fragment,
            version=own.version.next(),
            contributions=(part,),
            share=1.0,
            final=False,
        )
        holder.hold(merge)
    over.wait()
    holder.close()
    if "error" in found:
        raise support.RunError(found["error"])
    return found


PARTS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "prepared": prepare,
    "read": read_alone,
    "alone": compute_alone,
    "restored": restore_alone,
    "merged": merge_meanwhile,
}
"""The parts of a restore's measurement."""


if __name__ == "__main__":
    support.script(main)
