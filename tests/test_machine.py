"""The cores that a process may use, on large hosts and in small containers, and the
memory that a machine has left, with and without a control group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax import machine
from diloco_jax.coordinator.holding.holder import MERGES_AT_ONCE, merges_at_once
from diloco_jax.machine import cores


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """A host of 200 cores, on all of which the process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(200), raising=False)
    monkeypatch.setattr(machine.sys, "platform", "linux")


def group(root, inside, files, line="0::"):
    """Has the process in a control group; `files`: by path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    with (root / "proc/self/cgroup").open("a") as written:
        written.write(f"{line}{inside}\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_host_without_control_groups_has_all_its_cores(tmp_path):
    assert cores(tmp_path) == machine.schedulable() == 200


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("max 100000\n", 200),
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),
        ("10000 100000\n", 1),
        ("40000000 100000\n", 200),
    ],
)
def test_a_container_has_its_share(tmp_path, limit, found):
    # A container's own group looks to it like the root.
    group(tmp_path, "/", {"cpu.max": limit})
    assert cores(tmp_path) == found


def test_the_tightest_group_around_the_process_counts(tmp_path):
    files = {
        "a/cpu.max": "400000 100000",
        "a/b/cpu.max": "max 100000",
        "a/b/c/cpu.max": "800000 100000",
        "other/cpu.max": "100000 100000",
    }
    group(tmp_path, "/a/b/c", files)
    assert cores(tmp_path) == 4


def test_merges_follow_the_cores_up_to_their_memory():
    assert [merges_at_once(n) for n in (1, 2, 8, 200)] == [1, 1, 2, MERGES_AT_ONCE]


def test_nothing_else_counts_cores():
    package = Path(machine.__file__).parent
    counts = ("cpu_count", "getaffinity")
    found = {
        path.name
        for path in package.rglob("*.py")
        if any(count in path.read_text() for count in counts)
    }
    assert found == {"machine.py"}


MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  400 kB\nHugePages: 0\n"
COUNTED = """
import ctypes, sys, threading
from diloco_jax import machine
if sys.argv[1:]:
    machine.one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(12)
def hold():
    libc.malloc(100_000)
    together.wait()
threads = [threading.Thread(target=hold) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fclose(out)
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "self" / "statm").write_text("900 30 5 1 0 100 0\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / machine.GROUPS).mkdir(parents=True)
    return tmp_path


def test_what_is_left_of_a_machine(root):
    assert machine.left_bytes(root) == (400 << 10, 1000 << 10)
    assert machine.resident_bytes(root) == 30 * machine.PAGE_BYTES
    status = root / "proc" / "self" / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    150 kB\nVmRSS:\t    120 kB\n")
    assert machine.peak_bytes(root) == 150 << 10


def test_a_control_group_allows_less(root):
    group = root / machine.GROUPS
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("450000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 20000\n")
    assert machine.left_bytes(root) == (70_000, 500_000)
    inner = group / "user.slice/run.scope"
    inner.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/user.slice/run.scope\n")
    (inner / "memory.max").write_text("300000\n")
    (inner / "memory.current").write_text("250000\n")
    assert machine.left_bytes(root) == (50_000, 300_000)
    (group / "memory.max").write_text("max\n")
    (inner / "memory.max").write_text("max\n")
    assert machine.left_bytes(root) == (400 << 10, 1000 << 10)


def test_a_system_that_does_not_tell(tmp_path):
    assert machine.left_bytes(tmp_path) == (0, 0)
    assert machine.resident_bytes(tmp_path) == 0
    assert machine.peak_bytes(tmp_path) == 0


def test_this_process_is_seen_to_grow():
    before = machine.resident_bytes()
    block = b"\x01" * (64 << 20)  # Zeros might not be resident.
    assert machine.resident_bytes() - before > 32 << 20
    assert len(block) == 64 << 20


def arenas(*arguments: str) -> int:
    command = [sys.executable, "-c", COUNTED, *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    return told.stdout.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_threads_share_an_arena():
    assert arenas() > 2
    assert arenas("one") == 1
