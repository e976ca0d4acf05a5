"""`diloco doctor [--folder DIR] [--json]`: what of this machine a run depends on.

The installed packages: all that are required, in versions that go together. What the
operating system gives a run: ports, clock, disk, memory. What is around a run and not
of it: folders, limits, names, tools of the cloud. The devices that jax finds, in a
process of its own, since a TPU that another process holds may never answer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from diloco_jax import before_jax, files, machine
from diloco_jax.config.fields import setting
from diloco_jax.config.options import command
from diloco_jax.errors import EXIT_FAILED, ConfigError
from diloco_jax.hardware.tpus import GIB, generation_here
from diloco_jax.wire import addresses


class Level(enum.StrEnum):
    """Weight of a finding."""

    OK = "ok"
    NOTE = "note"
    """A run works, and is slower or less safe than it could be."""
    PROBLEM = "problem"
    """Some command fails here."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    what: str
    level: Level
    found: str
    remedy: str = ""
    """The thing to do about it; empty where nothing needs to be done."""


Answer = tuple[Level, str, str]
"""Level, what was found, and the remedy."""
Check = Callable[[Path], Answer | None]
"""Looks at one thing, given the folder of runs; None: it is not worth a line. Raises
ConfigError where commands would refuse."""

PACKAGE = "diloco-jax"


def check_packages(folder: Path) -> Answer:
    """Compare what is installed with what the package requires, without its extras."""
    found = map(Requirement, metadata.requires(PACKAGE) or [])
    required = [r for r in found if not r.marker or r.marker.evaluate({"extra": ""})]
    if wrong := ", ".join(filter(None, map(_wrong, required))):
        return Level.PROBLEM, wrong, f"pip install --upgrade {PACKAGE}"
    return Level.OK, f"all {len(required)} that are required", ""


def _wrong(requirement: Requirement) -> str:
    """Say what is wrong with the package that should meet a requirement."""
    try:
        here = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if here in requirement.specifier:
        return ""
    return f"{requirement.name} {here} is not {requirement.specifier}"


def check_jax(folder: Path) -> Answer:
    """Compare jax with the library that was built for it."""
    jax, jaxlib = metadata.version("jax"), metadata.version("jaxlib")
    if jax.split(".")[:3] == jaxlib.split(".")[:3]:
        return Level.OK, f"jax {jax}, jaxlib {jaxlib}", ""
    return (
        Level.PROBLEM,
        f"jax {jax} beside jaxlib {jaxlib}; jax needs the jaxlib of its own version",
        f"pip install --upgrade jax=={jax} jaxlib",
    )


def check_libtpu(folder: Path) -> Answer:
    """Look for what compiles for TPUs, in a version that this jax asks for."""
    here = before_jax.libtpu_version()
    if not here:
        return (
            Level.NOTE,
            "not installed: no TPU is used, and diloco plan compiles nothing",
            f"pip install '{PACKAGE}[tpu]', if that is wanted",
        )
    asked = map(Requirement, metadata.requires("jax") or [])
    found = (_wrong(r) for r in asked if r.name == "libtpu")
    if wrong := ", ".join(filter(None, found)):
        jax = metadata.version("jax")
        remedy = f"pip install --upgrade 'jax[tpu]=={jax}', if a TPU is to be used"
        return Level.NOTE, f"{wrong}, which jax {jax} asks for", remedy
    return Level.OK, f"libtpu {here}", ""


ANSWERS_WITHIN_S = 120.0
"""Seconds for jax to find its devices; a slice of many hosts waits for all of them."""
ASK = """
import json, jax
kinds = sorted({d.device_kind for d in jax.devices()})
print(json.dumps([jax.default_backend(), jax.local_device_count(), kinds]))
"""


def check_devices(folder: Path) -> Answer:
    """Tell what jax finds here; on a host of a TPU anything else is a problem."""
    environment = dict(os.environ)
    before_jax.skip_absent_tpu(environment)
    command = [sys.executable, "-P", "-c", ASK]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=ANSWERS_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return (
            Level.PROBLEM,
            f"jax did not find its devices within {ANSWERS_WITHIN_S:g} s",
            "end other processes that use the TPU (a TPU serves one at a time), or run "
            "this on all hosts of the slice at once",
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Level.PROBLEM, f"jax ends: {reason}", "see the line of packages"
    backend, count, kinds = json.loads(done.stdout.splitlines()[-1])
    found = f"{count} of {backend}: {', '.join(kinds)}"
    generation = generation_here()
    if generation and backend != "tpu":
        return (
            Level.PROBLEM,
            f"{found}, although this machine has a TPU {generation}",
            "pip install 'diloco-jax[tpu]', and unset JAX_PLATFORMS",
        )
    if backend == "cpu":
        return Level.NOTE, found, "islands train on the CPU here"
    return Level.OK, found, ""


TRIAL_BYTES = 64 << 20
"""Bytes that the trial of the disk writes."""
SLOW_DISK = 100e6
"""Bytes per second below which a coordinator of 1 B parameters falls behind: it writes
each merge, and all of its state in turns."""
FREE_BYTES = 5 * GIB
FEWEST_FILES = 4096
"""Open files of a coordinator with some hundred hosts."""
CLOCK_UNSYNCHRONISED = 5
"""Returned by adjtimex where nothing disciplines the clock."""


def check_disk(folder: Path) -> Answer:
    """Write, and force to the disk, what one second of a good disk takes."""
    folder = existing(folder)
    free = shutil.disk_usage(folder).free
    try:
        rate = written_per_s(folder, min(TRIAL_BYTES, free // 4))
    except OSError as error:
        return (
            Level.PROBLEM,
            f"{folder} cannot be written: {error.strerror}",
            "give a folder that can, as --folder here and as --workdir of runs",
        )
    remedy = ""
    if free < FREE_BYTES:
        remedy = "free some space: diloco plan says what a run needs"
    elif rate < SLOW_DISK:
        remedy = "large runs want a faster disk: diloco plan says what a run writes"
    found = f"{folder}: {rate / 1e6:,.0f} MB/s, {free / GIB:,.1f} GiB free"
    return Level.NOTE if remedy else Level.OK, found, remedy


def written_per_s(folder: Path, nbytes: int) -> float:
    """Return the bytes per second that a file of that size takes to be on the disk.
    Raises OSError."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.monotonic()
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell() / max(time.monotonic() - started, 1e-6)


def check_ports(folder: Path) -> Answer:
    """Open ports as a coordinator does, for control and bulk, and reach both."""
    try:
        control, bulk = addresses.reserve("127.0.0.1:0")
        with bulk, addresses.listen(control) as server:
            for port in (server, bulk):
                socket.create_connection(port.getsockname(), timeout=5).close()
    except (OSError, ConfigError) as error:
        return (
            Level.PROBLEM,
            f"two ports in a row of this machine cannot be opened and reached: {error}",
            "allow connections over the loopback interface: `ip link set lo up`",
        )
    return Level.OK, f"{control} and the port of bulk beside it were reached", ""


def check_open_files(folder: Path) -> Answer:
    """Look at the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    found = f"{'no limit' if soft == unlimited else f'{soft:,}'} at once"
    if soft == unlimited or soft >= FEWEST_FILES:
        return Level.OK, found, ""
    most = FEWEST_FILES if hard == unlimited else min(hard, FEWEST_FILES)
    return Level.NOTE, found, f"ulimit -n {most}, for a large coordinator"


def check_clock(folder: Path) -> Answer:
    """Tell if anything keeps the clock right: certificates and metrics go by it."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        # struct timex, all zeros: change nothing. It has 208 bytes on 64-bit Linux.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (AttributeError, OSError):
        state = -1
    if state == CLOCK_UNSYNCHRONISED:
        return (
            Level.NOTE,
            f"{now}, and the kernel says that nothing keeps it right",
            "have NTP or chrony run, here or on the host of this container",
        )
    kept = "kept right by the system" if state >= 0 else "the system does not tell more"
    return Level.OK, f"{now}, {kept}", ""


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def unusual(found: Iterable[str], wrong: str, remedy: str) -> Answer | None:
    """Note what was found, if anything was."""
    told = ", ".join(found)
    return (Level.NOTE, f"{told}: {wrong}", remedy) if told else None


def check_home(folder: Path) -> Answer | None:
    """Look for the folders of a user where commands keep files."""
    homes = {"XDG_CACHE_HOME": "~/.cache", "XDG_STATE_HOME": "~/.local/state"}
    paths = [os.environ.get(n) or os.path.expanduser(home) for n, home in homes.items()]
    return unusual(
        (p for p in paths if p[0] == "~" or not os.access(existing(Path(p)), os.W_OK)),
        "no file can be kept there",
        "set HOME, or XDG_CACHE_HOME and XDG_STATE_HOME, to folders to write to",
    )


def check_temporary(folder: Path) -> Answer | None:
    """Write a temporary file."""
    try:
        with tempfile.TemporaryFile():
            return None
    except OSError as error:
        return Level.PROBLEM, str(error), "set TMPDIR to a folder to write to"


def check_proxies(folder: Path) -> Answer | None:
    """Look for proxies."""
    names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    return unusual(
        (f"{n}={v}" for n, v in os.environ.items() if n.lower() in names),
        "machines of a run dial each other without them",
        "name those machines in no_proxy, if connections fail",
    )


def check_name(folder: Path) -> Answer | None:
    """Look up this machine's own name."""
    remedy = "write this machine's own address and its name into /etc/hosts"
    try:
        address = socket.gethostbyname(name := socket.gethostname())
    except OSError as error:
        return Level.NOTE, str(error), remedy
    alone = [f"{name} is {address}"] if addresses.is_loopback(address) else []
    return unusual(alone, "no other machine reaches that", remedy)


def check_locks(folder: Path) -> Answer | None:
    """Lock a file where runs are to be."""
    try:
        with tempfile.NamedTemporaryFile(dir=existing(folder)) as file:
            files.lock(file, Path(file.name))
    except OSError as error:
        return Level.PROBLEM, str(error), "give a folder to write to, as --folder"
    return None


TOOLS = {
    "gcloud": (("version",), "diloco launch"),
    "kubectl": (("version", "--client"), "diloco launch --on gke"),
    "sky": (("--version",), "diloco launch --on sky"),
    "docker": (("--version",), "building the image of a launch"),
}
"""Programs that some commands call, with the words that ask for their version, and what
needs them."""
TOLD_WITHIN_S = 20.0


def check_tool(tool: str, folder: Path) -> Answer:
    """Look for a program, and ask for its version."""
    words, needs = TOOLS[tool]
    if not shutil.which(tool):
        return Level.OK, f"not found; {needs} needs it", ""
    try:
        command = [tool, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOLD_WITHIN_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Level.NOTE, f"{error}", f"install it anew: {needs} needs it"
    version = (done.stdout.strip().splitlines() or ["tells no version"])[0]
    return Level.OK, f"{version}, for {needs}", ""


CHECKS: dict[str, Check] = {
    "packages": check_packages,
    "jax": check_jax,
    "libtpu": check_libtpu,
    "processor": lambda _: (Level.OK, f"{machine.cores()} cores for this process", ""),
    "memory": lambda _: (Level.OK, f"{machine.left_bytes()[1] / GIB:.1f} GiB", ""),
    "disk": check_disk,
    "ports": check_ports,
    "open files": check_open_files,
    "clock": check_clock,
    "home": check_home,
    "temporary": check_temporary,
    "proxies": check_proxies,
    "name": check_name,
    "modules": lambda _: unusual(
        {path.stem for path in Path().glob("*.py")} & sys.stdlib_module_names,
        "Python has modules of these names, and the current folder, too",
        "rename those files, or work in another folder",
    ),
    "threads": lambda _: machine.require_threads(2),
    "locks": check_locks,
    **{tool: functools.partial(check_tool, tool) for tool in TOOLS},
    "devices": check_devices,
}


def look(what: str, folder: Path) -> Finding | None:
    """Carry out one of `CHECKS`; None if there is nothing to say."""
    try:
        answer = CHECKS[what](folder)
    except ConfigError as error:
        # The end of a refusal is its remedy.
        found, _, remedy = str(error).rpartition("; ")
        answer = Level.PROBLEM, found, remedy
    if answer is None:
        return None
    level, found, remedy = answer
    return Finding(what=what, level=level, found=found, remedy=remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `diloco doctor`."""

    folder: Path = setting(Path("."), help="Where runs are to be: its disk is tried.")
    json: bool = setting(False, help="Print one JSON object to standard output.")


STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


@command(DoctorOptions, "diloco doctor")
def doctor_command(options: DoctorOptions) -> int:
    """Tell what is installed, what jax finds, and what the machine gives a run."""
    from rich.console import Console
    from rich.text import Text

    from diloco_jax.observability.terminal import bar

    console = Console(stderr=True, markup=False, highlight=False)
    findings = []
    with bar(console, "examining this machine") as report:
        for finding in examine(options.folder, report):
            findings.append(finding)
            line = Text(f"{finding.level:8}", STYLES[finding.level])
            line.append(f"{finding.what:12} {finding.found}", "default")
            console.print(line, soft_wrap=True)
            if finding.remedy:
                console.print(" " * 21 + finding.remedy, style="dim", soft_wrap=True)
    if options.json:
        print(json.dumps({"findings": msgspec.to_builtins(findings)}))
    broken = any(f.level is Level.PROBLEM for f in findings)
    return EXIT_FAILED if broken else 0


def examine(
    folder: Path, report: Callable[[float], None] = lambda share: None
) -> Iterator[Finding]:
    """Yield what every check finds, the quick ones first. report: told the share of the
    checks that are done."""
    version, python = metadata.version(PACKAGE), platform.python_version()
    here = f"{version}, Python {python}, {platform.platform()}"
    yield Finding(what="diloco_jax", level=Level.OK, found=here)
    for done, what in enumerate(CHECKS, start=1):
        if finding := look(what, folder):
            yield finding
        report(done / len(CHECKS))
