"""The compilation cache survives a process that was killed while writing to it."""

import os
import subprocess
import sys

CODE = """
import sys, warnings
warnings.simplefilter("error")
from pathlib import Path
import jax
from diloco_jax import compilation
compilation.use_cache(Path(sys.argv[1]))
jax.jit(lambda x: x * 2 + 1)(1.0).block_until_ready()
"""


def compile_something(folder):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", CODE, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_torn_entry_does_not_keep_later_ones_out(tmp_path):
    torn = tmp_path / "jit_f-0123-cache"
    torn.write_bytes(b"half")
    done = compile_something(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not torn.exists()
    entries = sorted(path.name for path in tmp_path.glob("*-cache"))
    assert entries
    assert all(
        (tmp_path / name.replace("-cache", "-atime")).exists() for name in entries
    )
