"""The coordinator's merges by islands and parameters: linear or not?

Question: do time and memory of a cycle of merges grow with islands and parameters, and
with nothing else? And are two workers twice as fast as one process? One process on one
core, no network: a store of 24 fragments of like pieces, radial-directional averaging,
Nesterov, int8 both ways, the route "native". Every fragment is merged from M deltas,
each checked on its arrival; of four cycles the last one is measured. With two workers
each has half of the fragments and a core, and both begin that cycle together. Extents
are multiples of 128, as those of models are, so that 100 M become 97.5 M: an array with
odd ones is a single tile, which costs five times as much to merge.

*Per merged byte* divides CPU seconds by the deltas' bytes as f32. *Memory* is what the
process holds at its peak beyond interpreter, programs and deltas, over the f32
parameters. The deltas of all fragments are the same memory, since 64 of each would not
fit. *Disk* is the bytes of a publish over the f32 parameters merged: what a merge
writes before it is committed, snapshots apart.

*Speed-up* is the time of one process over that of the slower of two. Cores may share
what limits them: *of copies* is the speed-up of as many copies of large arrays, by
which the bound is multiplied where it is below 2.

Linear means that 16 times the islands cost no more than 16 times the CPU, and that a
parameter costs alike at any size: bounds hold the cost per merged byte against that of
the smallest, with a quarter to spare for caches. A cycle of 1 B parameters and 8
islands has 32 GB of deltas as f32, which at 5 Gbit/s in int8 come in 12.8 s.

*Restore*: snapshots of all fragments, and three cycles of int8 publishes after them, on
this disk, dropped from the system's cache before each part. *Read* is the time in which
as many threads read these files and do nothing else; *alone* the CPU seconds of the
digests of these bytes, and of the publishes decoded by the route "native", over memory
that exists. Then a holder restores them. Its CPU seconds are those of the process in
user mode: what the kernel takes for copies and new pages, *system*, stands beside them.
Of three times each the least counts. At last a merge of each fragment is ordered as the
restore begins; *back* are the fragments that are when the first merge is committed, its
publish on the disk.

Prediction: 3.1 CPU s for that cycle, by raw/merging.md as it was then, on an
AMD EPYC; per byte falling with M, since the outer step is one for all. Two workers 1.9
times.

Command: `python -m benchmarks.coordinator_scale`; with `--again` it makes the page anew
from its raw numbers, with `--restore N` it measures the restore of N parameters alone.
Cost: about 8 minutes on two cores, 16 GiB of memory for the largest (it is left out
where less is free).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
from machine import free_bytes, machine_facts, resident
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
from diloco_jax.machine import give_memory_back
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
ISLANDS = (1, 2, 4, 8, 16, 32, 64)
PARAMETERS = (10_000_000, 100_000_000, 1_000_000_000)
AT_ONCE = 8
"""Islands for which all sizes are measured; all numbers of islands at about 100 M."""
FREE_OVER_PARAMETERS = 4 * 4.0
"""Bytes that have to be free, per parameter: the state and a publish of each."""
CYCLE_MAX_S = 12.8
GROWTH_MAX = 1.25
WORKERS, SPEED_UP_MIN = 2, 1.8
COPY_BYTES, COPIES = 1 << 28, 12
READY = "ready\n"
CYCLES = 4
"""The last one is measured: by then memory is that of older versions."""
WHOSE = {"run_id": "r", "run": {"total_tokens": 0}, "plan": ""}
BEHIND = 3
"""Cycles of publishes behind the newest snapshots of a restore."""
CPU_MAX, BACK_MAX = 1.15, 0.5
TIMED, REPEATED = ("read", "alone", "restored"), 3
"""Parts of a restore of which the least of so many seconds count."""
NAME = "coordinator_scale"
TARGET = "a cycle of 1 B x 8 islands, CPU s"


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--cycle", nargs=3, type=int, help="used by itself")
    parser.add_argument("--restore", type=int, help="parameters of a restore alone")
    parser.add_argument("--part", nargs=3, help="used by itself")
    parser.add_argument(
        "--again",
        action="store_true",
        help="make the page anew from its raw numbers, and measure nothing",
    )
    options = parser.parse_args()
    if options.cycle:
        print(json.dumps(cycle_here(*options.cycle)))
        return 0
    if options.part:
        part, folder, parameters = options.part
        print(json.dumps(PARTS[part](Path(folder), int(parameters))))
        return 0
    size = PARAMETERS[0 if options.quick else 1]
    if options.again or options.restore:
        path = options.out / "raw" / f"{NAME}.json"
        raw = json.loads(path.read_bytes())
        facts = support.measured_before(raw)
        kept = ("cycles", "left_out", "workers", "restore")
        raw = {key: raw[key] for key in kept if key in raw}
        if options.restore:
            raw["restore"] = restore(options.restore)
    else:
        raw, facts = measure(size, quick=options.quick), None
    found, spread = raw["cycles"], raw["workers"]
    largest = max(
        (row for row in found if row["islands"] == AT_ONCE),
        key=lambda row: row["parameters"],
    )
    scaled = largest["cpu_s"] / largest["parameters"] * PARAMETERS[-1]
    checks = [support.at_most(TARGET, scaled, CYCLE_MAX_S, ".1f")]
    alike = [row for row in found if row["parameters"] == elements_of(size)]
    checks += growth("islands", alike)
    if not options.quick:
        at_once = [row for row in found if row["islands"] == AT_ONCE]
        checks += growth("parameters", at_once)
    checks.append(
        support.at_least(
            f"{WORKERS} workers: speed-up",
            spread["speed_up"],
            SPEED_UP_MIN * min(1.0, spread["of_copies"] / WORKERS),
            ".2f",
        )
    )
    restores = [raw["restore"]] if "restore" in raw else []
    checks += [check for found in restores for check in restore_checks(found)]
    rows = [
        {
            "parameters": f"{row['parameters']:,}",
            "islands": row["islands"],
            "elapsed, s": f"{row['elapsed_s']:.2f}",
            "CPU, s": f"{row['cpu_s']:.2f}",
            "CPU ns per merged byte": f"{1e9 * row['s_per_byte']:.3f}",
            "memory": f"{row['memory']:.2f}",
            "disk": f"{row['disk']:.3f}",
            "not measured": "",
        }
        for row in sorted(found, key=lambda r: (r["parameters"], r["islands"]))
    ]
    rows += [{"parameters": "", "not measured": text} for text in raw["left_out"]]
    tables = {
        "A cycle": rows,
        f"{WORKERS} workers": [
            {
                "parameters": f"{elements_of(size):,}",
                "islands": AT_ONCE,
                "one process, s": f"{spread['one_s']:.2f}",
                f"{WORKERS} workers, s": f"{spread['several_s']:.2f}",
                "speed-up": f"{spread['speed_up']:.2f}",
                "of copies": f"{spread['of_copies']:.2f}",
            }
        ],
        **({"A restore": list(map(restore_row, restores))} if restores else {}),
    }
    return support.deliver(options, NAME, __doc__, tables, checks, raw, facts)


def measure(size: int, *, quick: bool) -> dict[str, Any]:
    """Return the raw numbers: cycles of every number of islands at this size, and of
    every size at one number of islands."""
    asked = [(size, islands) for islands in ((2, AT_ONCE) if quick else ISLANDS)]
    if not quick:
        asked += [(other, AT_ONCE) for other in PARAMETERS if other != size]
    found, left_out = [], []
    for parameters, islands in asked:
        if FREE_OVER_PARAMETERS * parameters > (free := free_bytes()):
            left_out.append(f"{parameters:,} parameters: {free / 1e9:.1f} GB free")
            continue
        print(
            f"{time.strftime('%H:%M:%S')} {parameters:,} x {islands}", file=sys.stderr
        )
        found += cycles(parameters, islands, 1)
    return {
        "cycles": found,
        "left_out": left_out,
        "workers": speed_up(size),
        "restore": restore(size),
    }


def side_of(parameters: int) -> int:
    """Return the rows of each fragment's array: a multiple of EXTENT."""
    return parameters // FRAGMENTS // COLUMNS // EXTENT * EXTENT


def elements_of(parameters: int) -> int:
    """Return the parameters that a cycle has which is asked for so many."""
    return FRAGMENTS * side_of(parameters) * COLUMNS


def speed_up(parameters: int) -> dict[str, float]:
    """Return the seconds of a cycle of one process and of several, and how many times
    as fast these are, in merging and in copying."""
    one = cycles(parameters, AT_ONCE, 1)
    several = cycles(parameters, AT_ONCE, WORKERS)
    one_s = one[0]["elapsed_s"]
    several_s = max(row["elapsed_s"] for row in several)
    slowest = max(row["copy_s"] for row in several)
    return {
        "one_s": one_s,
        "several_s": several_s,
        "speed_up": one_s / several_s,
        "of_copies": WORKERS * one[0]["copy_s"] / slowest,
    }


def growth(what: str, rows: list[dict[str, Any]]) -> list[support.Check]:
    """Check that nothing costs more per merged byte than with the fewest."""
    rows = sorted(rows, key=lambda row: row[what])
    return support.each(
        f"{what}: per merged byte over the fewest",
        (
            support.at_most(
                f"{row[what]:,} {what}: per merged byte over {rows[0][what]:,}",
                row["s_per_byte"] / rows[0]["s_per_byte"],
                GROWTH_MAX,
            )
            for row in rows[1:]
        ),
    )


def cycles(parameters: int, islands: int, workers: int) -> list[dict[str, Any]]:
    """Measure that many processes, each with its share of the fragments and a core of
    its own, with the coordinator's environment."""
    cores = sorted(os.sched_getaffinity(0))[-workers:]
    sizes = map(str, (parameters, islands, workers))
    words = [sys.executable, __file__, "--cycle", *sizes]
    env = {**os.environ, **coordinator_environment(), "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    ["taskset", "--cpu-list", str(core), *words],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for core in cores
        ]
        for _ in range(2):  # Before the copies and before the cycle: together.
            for process in processes:
                assert process.stdout is not None
                if process.stdout.readline() != READY:
                    raise support.RunError("a process of the benchmark failed")
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise support.RunError("a process of the benchmark failed")
    return [json.loads(text) for text in told]


def cycle_here(parameters: int, islands: int, workers: int) -> dict[str, Any]:
    """Merge every fragment of one worker, of that many."""
    count, passes = FRAGMENTS // workers, passes_of("native")
    shape = (side_of(parameters), COLUMNS)
    elements = count * shape[0] * COLUMNS
    small = store_of(RUN, CODEC, {"w": shape}, 1, passes)
    payload = encoded_delta(small, CODEC, 0, 0)
    parts = contributions(islands)
    # Each its own memory, as deltas of islands have.
    payloads = [payload, *(payload.copy() for _ in range(islands - 1))]
    merged = small.merge(
        0,
        parts,
        payloads,
        [small.squares(0, payload)] * islands,
        final=False,
    )
    written = merged.payload.nbytes
    del small, merged
    give_memory_back()
    before = resident("VmRSS")
    shapes = {f"w{i:02}": shape for i in range(count)}
    store = store_of(RUN, CODEC, shapes, count, passes)

    def merge_all(number: int) -> None:
        for fragment in range(count):
            squares = [store.squares(fragment, payload) for payload in payloads]
            merged = store.merge(fragment, parts, payloads, squares, final=False)
            store.commit(fragment, Version(1, 1 + number), merged)

    for number in range(CYCLES - 1):
        merge_all(number)
    peak = resident("VmHWM") - before
    copy_s = together(copy_many)
    cpu_began = time.process_time()
    elapsed_s = together(lambda: merge_all(CYCLES - 1))
    cpu_s = time.process_time() - cpu_began
    return {
        "parameters": elements,
        "islands": islands,
        "cpu_s": cpu_s,
        "elapsed_s": elapsed_s,
        "copy_s": copy_s,
        "s_per_byte": cpu_s / (4 * elements * islands),
        "memory": max(peak, 0) / (4 * elements),
        "disk": count * written / (4 * elements),
    }


# ---- a restore ---------------------------------------------------------------------


def restore(parameters: int) -> dict[str, Any]:
    """Return the raw numbers of a restore, each part in a process of its own."""
    found: dict[str, Any] = {
        "parameters": elements_of(parameters),
        "cores": machine.cores(),
        **machine_facts(),
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


def restore_row(found: dict[str, Any]) -> dict[str, str]:
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


def restore_checks(found: dict[str, Any]) -> list[support.Check]:
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
    """Return the files of all fragments; none of them is in the system's cache."""
    found = [path for path in folder.rglob("00*/*") if path.is_file()]
    for path in found:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def asked_of(folder: Path) -> RestoreFragments:
    """Return what is to be restored there."""
    path = folder / "asked.json"
    return msgspec.json.decode(path.read_bytes(), type=RestoreFragments)


@contextlib.contextmanager
def timed(found: dict[str, Any]) -> Iterator[None]:
    """Note the seconds of a block: elapsed, and of the processor in either mode."""
    began, before = time.monotonic(), os.times()
    yield
    after = os.times()
    found["wall_s"] = time.monotonic() - began
    found["cpu_s"] = after.user - before.user
    found["system_s"] = after.system - before.system


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
    rooms = threading.local()

    def read(path: Path) -> None:
        if not hasattr(rooms, "octets"):
            rooms.octets = bytearray(BLOCK_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(rooms.octets):
                pass

    paths = sorted(files_of(folder), key=lambda path: path.parent.name)
    with timed(found), ThreadPoolExecutor(at_once()) as pool:
        list(pool.map(read, paths))
    return found


def at_once() -> int:
    """Return how many fragments are restored at a time here."""
    return min(RESTORES_AT_ONCE, machine.cores())


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


def together(work: Callable[[], object]) -> float:
    """Say that this process is ready, wait for the others, and return the seconds of
    the work."""
    print(READY, end="", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    work()
    return time.monotonic() - began


def copy_many() -> None:
    """Copy large arrays, which is as fast as memory is."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.ones_like(source)
    for _ in range(COPIES):
        np.copyto(target, source)


if __name__ == "__main__":
    support.script(main)
