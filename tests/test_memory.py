"""Memory that a machine has left, with and without a control group; malloc's arenas."""

import subprocess
import sys

import pytest

from diloco_jax import memory

MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  400 kB\nHugePages: 0\n"
COUNTED = """
import ctypes, sys, threading
from diloco_jax import memory
if sys.argv[1:]:
    memory.one_arena()
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
    (tmp_path / memory.GROUP).mkdir(parents=True)
    return tmp_path


def test_what_is_left_of_a_machine(root):
    assert memory.left_bytes(root) == (400 << 10, 1000 << 10)
    assert memory.resident_bytes(root) == 30 * memory.PAGE_BYTES
    status = root / "proc" / "self" / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    150 kB\nVmRSS:\t    120 kB\n")
    assert memory.peak_bytes(root) == 150 << 10


def test_a_control_group_allows_less(root):
    group = root / memory.GROUP
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("450000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 20000\n")
    assert memory.left_bytes(root) == (70_000, 500_000)
    (group / "memory.max").write_text("max\n")
    assert memory.left_bytes(root) == (400 << 10, 1000 << 10)


def test_a_system_that_does_not_tell(tmp_path):
    assert memory.left_bytes(tmp_path) == (0, 0)
    assert memory.resident_bytes(tmp_path) == 0
    assert memory.peak_bytes(tmp_path) == 0


def test_this_process_is_seen_to_grow():
    before = memory.resident_bytes()
    block = b"\x01" * (64 << 20)  # Zeros might not be resident.
    assert memory.resident_bytes() - before > 32 << 20
    assert len(block) == 64 << 20


def arenas(*arguments: str) -> int:
    command = [sys.executable, "-c", COUNTED, *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    return told.stdout.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_threads_share_an_arena():
    assert arenas() > 2
    assert arenas("one") == 1
