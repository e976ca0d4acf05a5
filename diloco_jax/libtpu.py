"""The flags for libtpu, by TPU generation and by the version of libtpu.

libtpu reads them once per process, from LIBTPU_INIT_ARGS, when jax first looks for TPUs
or compiles for them. Set them before jax is imported; this module imports no jax.
`docs/results/plan.md` compares the candidates.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from importlib import metadata

VARIABLE = "LIBTPU_INIT_ARGS"
MAXTEXT = "MaxText, benchmarks/xla_flags_library.py"
LISTED = "libtpu 0.0.42.1 and 0.0.50.1 list it; docs/results/plan.md compares it"
UNFUSED = "--xla_tpu_enable_all_reduce_scatter_fusion=false"
SOURCES = {
    "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true": MAXTEXT,
    "--xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=true": LISTED,
    "--xla_tpu_enable_sparse_core_collective_offload_3d_all_gather=true": LISTED,
    "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true": LISTED,
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true": MAXTEXT,
    "--xla_tpu_use_tc_device_shape_on_sc=true": MAXTEXT,
    "--xla_sc_disable_megacore_partitioning=true": MAXTEXT,
    "--xla_enable_async_all_gather=true": MAXTEXT,
    UNFUSED: LISTED,
}
"""Every flag that is given, and where it stands. None has a documented meaning: they
were chosen by the programs that the compilers make of them.

Left out: continuation fusion (`xla_tpu_enable_async_collective_fusion` and
`xla_tpu_overlap_compute_collective_tc`), which could do the same. The two together gave
NaN without an error on v6e-16 with jax 0.10.2 (github.com/jax-ml/jax/issues/38741), and
libtpu 0.0.50.1 refuses fusion of gathers on all generations but v5e, since it may give
wrong results.
"""
Flags = tuple[str, ...]
SPARSE_CORE: Flags = tuple(flag for flag in SOURCES if flag != UNFUSED)
"""Flags that let SparseCores carry out collectives during the matrix products."""
FLAGS: dict[str, tuple[tuple[tuple[int, ...], Flags], ...]] = {
    "v5p": (((0, 0, 42), SPARSE_CORE),),
    # On v6e no reduce-scatter of 12 B overlaps. Left as an all-reduce it sends twice
    # the bytes, but SparseCores do that beside the matrix products.
    "v6e": (((0, 0, 42), (*SPARSE_CORE, UNFUSED)),),
}
"""Pairs of the first libtpu version and its flags, by generation, newest first. Older
versions and other generations get no flags."""


def flags_of(generation: str, version: str) -> Flags:
    """Return the flags for this generation; none where they were never tried.

    generation: "v6e"; version: libtpu's, "0.0.42.1"; either may be empty.
    """
    here = tuple(map(int, re.findall(r"\d+", version)))
    for since, flags in FLAGS.get(generation, ()):
        if here >= since:
            return flags
    return ()


def installed_version() -> str:
    """Return the version of libtpu; empty if it is not installed."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return ""


def generation_of(topology: str) -> str:
    """Return the generation of a topology like "v5p:4x4x4"; empty for an empty one."""
    return topology.partition(":")[0]


def set_flags(generation: str, environment: MutableMapping[str, str]) -> None:
    """Add the generation's flags to the environment. Flags that are set stay."""
    given = environment.get(VARIABLE, "").split()
    names = {flag.split("=")[0] for flag in given}
    flags = flags_of(generation, installed_version())
    missing = [flag for flag in flags if flag.split("=")[0] not in names]
    if missing:
        environment[VARIABLE] = " ".join([*given, *missing])


def clashes(given: str, flags: Flags, whose: str) -> list[str]:
    """Describe every flag in `given` that the table has with another value.

    whose: generation and version of libtpu that the table's flags are for.
    """
    names = {flag.split("=")[0]: flag for flag in flags}
    found = [(flag, names.get(flag.split("=")[0], flag)) for flag in given.split()]
    return [
        f"{VARIABLE} has {here}, and the table for {whose} has {there}: the variable "
        f"counts; leave the flag out to have the table's"
        for here, there in found
        if here != there
    ]


def in_force(environment: MutableMapping[str, str]) -> str:
    """Describe for messages the libtpu and flags that compile in that environment."""
    version, flags = installed_version() or "none", environment.get(VARIABLE, "")
    return f"libtpu {version}, {VARIABLE} = {flags!r}"
