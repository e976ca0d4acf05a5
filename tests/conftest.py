"""For all tests: what one process of the suite compiled, the others load."""

import os
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"

# libtpu is here to compile for TPUs; there is none to run on.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before jax is imported anywhere; child processes inherit it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))
