"""The environment that jax must find when it is imported; imports no jax itself.

libtpu reads its flags once per process, from LIBTPU_INIT_ARGS, when jax first looks for
TPUs or compiles for them. They go by TPU generation and by the version of libtpu, and
must be set before jax is imported. `docs/results/plan.md` compares the candidates.

`describe_environment` tells the tape what was found: the facts about a process on which
the bits of its results depend.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata, util
from pathlib import Path

from diloco_jax import machine
from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.hardware import tpus

LIBTPU_VARIABLE = "LIBTPU_INIT_ARGS"
MAXTEXT = "MaxText, benchmarks/xla_flags_library.py"
LISTED = "libtpu 0.0.42.1 and 0.0.50.1 list it; docs/results/plan.md compares it"
UNFUSED = "--xla_tpu_enable_all_reduce_scatter_fusion=false"
FLAG_SOURCES = {
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
SPARSE_CORE: Flags = tuple(flag for flag in FLAG_SOURCES if flag != UNFUSED)
"""Flags that let SparseCores carry out collectives during the matrix products."""
LIBTPU_FLAGS: Mapping[str, Flags] = {
    "v5p": SPARSE_CORE,
    # On v6e no reduce-scatter of 12 B overlaps. Left as an all-reduce it sends twice
    # the bytes, but SparseCores do that beside the matrix products.
    "v6e": (*SPARSE_CORE, UNFUSED),
}
"""Flags by generation; others get none."""
TRIED = (0, 0, 42)
"""First version of libtpu with which they were tried; older ones get none."""


def libtpu_flags(generation: str, version: str) -> Flags:
    """Return the flags for this generation; none where they were never tried.

    generation: "v6e"; version: libtpu's, "0.0.42.1"; either may be empty.
    """
    here = tuple(map(int, re.findall(r"\d+", version)))
    return LIBTPU_FLAGS.get(generation, ()) if here >= TRIED else ()


def libtpu_version() -> str:
    """Return the version of libtpu; empty if it is not installed."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return ""


def generation_of(topology: str) -> str:
    """Return the generation of a topology like "v5p:4x4x4"; empty for an empty one."""
    return topology.partition(":")[0]


def set_libtpu_flags(generation: str, environment: MutableMapping[str, str]) -> None:
    """Add the generation's flags to the environment. Flags that are set stay."""
    given = environment.get(LIBTPU_VARIABLE, "").split()
    names = {flag.split("=")[0] for flag in given}
    flags = libtpu_flags(generation, libtpu_version())
    missing = [flag for flag in flags if flag.split("=")[0] not in names]
    if missing:
        environment[LIBTPU_VARIABLE] = " ".join([*given, *missing])


def flag_clashes(given: str, flags: Flags, whose: str) -> list[str]:
    """Describe every flag in `given` that the table has with another value.

    whose: generation and version of libtpu that the table's flags are for.
    """
    names = {flag.split("=")[0]: flag for flag in flags}
    found = [(flag, names.get(flag.split("=")[0], flag)) for flag in given.split()]
    return [
        f"{LIBTPU_VARIABLE} has {here}, and the table for {whose} has {there}: the "
        f"variable counts; leave the flag out to have the table's"
        for here, there in found
        if here != there
    ]


def libtpu_flags_in_force(environment: MutableMapping[str, str]) -> str:
    """Describe for messages the libtpu and flags that compile in that environment."""
    version, flags = libtpu_version() or "none", environment.get(LIBTPU_VARIABLE, "")
    return f"libtpu {version}, {LIBTPU_VARIABLE} = {flags!r}"


FLAG_LISTS = ("XLA_FLAGS", LIBTPU_VARIABLE)
"""Variables whose values are lists of flags. An unknown flag ends the process."""
HOST_DEVICES = "--xla_force_host_platform_device_count"
MULTI_SLICE = "MEGASCALE_"
"""Beginning of the names of a multi-slice job's variables."""
MIN_NPROC = 16


def prepare_environment(
    devices: int, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Give the process `devices` virtual CPU devices; call before importing jax.

    Variables of a multi-slice job that it inherited are cleared: an island's world is
    one slice, and with them jax would wait for the others. Real accelerators are not
    touched. Raises ConfigError as `require_flags` and `require_platforms` do.
    """
    require_flags(environment)
    require_platforms(environment)
    for name in [name for name in environment if name.startswith(MULTI_SLICE)]:
        del environment[name]
    set_devices(devices, environment)
    machine.fit_threads(environment, MIN_NPROC if devices > 1 else 1)


def set_devices(
    devices: int, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Give the process `devices` virtual CPU devices; call before importing jax."""
    flags = environment.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if flag.split("=")[0] != HOST_DEVICES]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{HOST_DEVICES}={devices}"])


def prepare_island(
    island: IslandConfig,
    environment: MutableMapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> None:
    """Make the process one host of the island; call before importing jax.

    libtpu's flags are those of the island's topology, or else of this machine's TPUs.
    """
    prepare_environment(island.devices // island.hosts, environment)
    generation = generation_of(island.topology) or tpus.generation_here(root)
    set_libtpu_flags(generation, environment)


def dial_directly(host: str, environment: MutableMapping[str, str]) -> None:
    """Have gRPC of jax dial a host without the proxy that variables may name; call it
    before jax does. Its own variable replaces the general ones."""
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    others = next((environment[name] for name in names if environment.get(name)), "")
    environment[names[0]] = f"{others},{host}" if others else host


def skip_absent_tpu(
    environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Choose the CPU if jax could find nothing else; call before importing jax.

    Otherwise jax would ask an installed libtpu for a TPU, which asks a metadata server
    and complains on standard error. Nothing is chosen if a platform is set already, or
    if there is a sign of a TPU or a plugin for another accelerator. Raises ConfigError
    as `require_flags` and `require_platforms` do.
    """
    require_flags(environment)
    require_platforms(environment, root)
    chosen = "JAX_PLATFORMS" in environment
    if not (chosen or _plugins() or _may_have_tpu(environment, root)):
        environment["JAX_PLATFORMS"] = "cpu"


def require_platforms(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Raise ConfigError if JAX_PLATFORMS names what cannot be here: jax ends then, for
    some platforms without a word."""
    value = environment.get("JAX_PLATFORMS", "")
    here = {"cpu"}
    if libtpu_version() and _may_have_tpu(environment, root):
        here.add("tpu")
    missing = {name.strip() for name in value.split(",")} - {"", *here}
    if missing and not (_plugins() and "tpu" not in missing):
        raise ConfigError(
            f"JAX_PLATFORMS = {value!r}, and jax has {', '.join(sorted(here))} here; "
            f"unset it, or pip install 'diloco-jax[tpu]' or 'diloco-jax[cuda]' on a "
            f"machine that has one"
        )


def require_flags(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if XLA does not take XLA_FLAGS: it ends the process."""
    given = environment.get("XLA_FLAGS", "").split()
    flags = " ".join(flag for flag in given if flag.split("=")[0] != HOST_DEVICES)
    # jax, where it is imported, has threads, beside which no fork is safe.
    if flags and "jax" not in sys.modules and (said := _refusal(flags)):
        raise ConfigError(f"XLA_FLAGS = {flags!r}: {said}; take that flag out")


@functools.cache
def _refusal(flags: str) -> str:
    """Return what XLA says against flags, or nothing. A fork of this process asks, as
    nothing but an end tells; it has no import to do, and takes milliseconds."""
    from jaxlib import xla_client

    ears, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.environ["XLA_FLAGS"] = flags
            os.dup2(mouth, 2)
            xla_client.CompileOptions()  # Reads them.
        finally:
            os._exit(0)
    os.close(mouth)
    with open(ears, errors="replace") as told:
        said = told.read().partition("\n")[0].rpartition("] ")[2]
    return said if os.waitpid(child, 0)[1] else ""


def _may_have_tpu(environment: Mapping[str, str], root: Path) -> bool:
    named = any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in environment)
    return named or tpus.may_be_here(root)


def _plugins() -> bool:
    """Tell if jax has plugins, which is how it finds GPUs."""
    entry_points = metadata.entry_points(group="jax_plugins")
    return bool(entry_points) or util.find_spec("jax_plugins") is not None


VECTOR_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""Instruction sets for which XLA compiles different code, as Linux names them."""


STEERING = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
"""Beginnings of the names of variables that jax and its libraries read."""
NOT_STEERING = (
    *FLAG_LISTS,
    *("JAX_COORDINATOR_", "TPU_WORKER_", "TPU_PROCESS_ADDRESSES"),
)
"""Variables that are left out: the tape has flags as facts of their own, and the others
only name the places of hosts."""
LONGEST_FACT = 4096
"""Characters of a fact."""
OF_PROGRAMS = (
    *("jax", "jaxlib", "libtpu", "device_kind", "topology", "cpu"),
    *("xla_flags", "libtpu_flags"),
)
"""Facts on which a compiled program depends."""


def describe_environment() -> dict[str, str | int]:
    """Return versions, flags, device kind; counts of devices, processes, threads."""
    import jax

    device = jax.devices()[0]
    return {
        "diloco_jax": metadata.version("diloco-jax"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "threads": _threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu": libtpu_version(),
        "libtpu_flags": os.environ.get(LIBTPU_VARIABLE, ""),
        "variables": _variables(),
    }


def programs_kind(topology: str) -> str:
    """Return the name of a folder for programs that processes like this one compile
    alike: with these versions and flags, for these devices.

    jax's keys tell the same apart, and more. By folders a person sees what is old.
    topology: of the island; empty = as many devices as there are.
    """
    facts = describe_environment()
    flags = str(facts["xla_flags"]).split()
    facts["xla_flags"] = " ".join(f for f in flags if not f.startswith(HOST_DEVICES))
    facts["topology"] = topology or facts["devices"]
    told = "\n".join(f"{name}={facts[name]}" for name in OF_PROGRAMS)
    kind = re.sub(r"[^a-z0-9]+", "-", str(facts["device_kind"]).lower())
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    return f"jax-{facts['jax']}-{kind}-{digest}"


def _variables() -> str:
    """Return the other variables that steer jax, as NAME=VALUE."""
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(STEERING) and not name.startswith(NOT_STEERING)
    ]
    return " ".join(found)[:LONGEST_FACT]


def _threads() -> int:
    """Count the threads of XLA's pool, which decide how long sums are cut."""
    if nproc := os.environ.get("NPROC"):
        return int(nproc)
    return machine.schedulable()


def _cpu() -> str:
    """Return the name and instruction sets of the processor, if the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip().lower(), value.strip())
    flags = machine.instructions().split()
    sets = [name for name in VECTOR_SETS if name in flags]
    return " ".join((facts.get("model name", platform.machine()), *sets))
