"""Threads share one of malloc's arenas where they are told to."""

import subprocess
import sys

import pytest

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


def arenas(*arguments: str) -> int:
    command = [sys.executable, "-c", COUNTED, *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    return told.stdout.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_threads_share_an_arena():
    assert arenas() > 2
    assert arenas("one") == 1
