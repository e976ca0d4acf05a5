"""`diloco doctor [--folder DIR] [--json]`: what of this machine a run depends on.

The installed packages: all that are required, in versions that go together. What the
operating system gives a run: ports, clock, disk, memory. What is around a run
and not of it: variables, folders, limits, names. The devices that jax finds, in a
process of its own, since a TPU that another process holds may never answer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from diloco_jax import before_jax, files, machine, process
from diloco_jax.before_jax import skip_absent_tpu
from diloco_jax.config.fields import setting
from diloco_jax.config.options import parse
from diloco_jax.errors import EXIT_FAILED, ConfigError
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.wire import addresses
from diloco_jax.wire.addresses import is_loopback


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


def ok(what: str, found: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(what=what, level=Level.OK, found=found)


def note(what: str, found: str, remedy: str) -> Finding:
    """Return a finding that could be better."""
    return Finding(what=what, level=Level.NOTE, found=found, remedy=remedy)


def problem(what: str, found: str, remedy: str) -> Finding:
    """Return a finding that keeps some command from working."""
    return Finding(what=what, level=Level.PROBLEM, found=found, remedy=remedy)


def refused(what: str, error: ConfigError) -> Finding:
    """Return the problem that commands refuse, with the end of the message as its
    remedy."""
    found, _, remedy = str(error).rpartition("; ")
    return problem(what, found, remedy)


PACKAGE = "diloco-jax"


def check_packages() -> Iterator[Finding]:
    """Yield findings on the required packages, and on jax's libraries."""
    required = _required()
    if wrong := ", ".join(filter(None, map(_wrong, required))):
        yield problem("packages", wrong, f"pip install --upgrade {PACKAGE}")
    else:
        yield ok("packages", f"all {len(required)} that are required")
    jax, jaxlib = metadata.version("jax"), metadata.version("jaxlib")
    if jax.split(".")[:3] == jaxlib.split(".")[:3]:
        yield ok("jax", f"jax {jax}, jaxlib {jaxlib}")
    else:
        yield problem(
            "jax",
            f"jax {jax} beside jaxlib {jaxlib}; jax needs the jaxlib of its version",
            f"pip install --upgrade jax=={jax} jaxlib",
        )
    if libtpu := before_jax.libtpu_version():
        yield ok("libtpu", f"libtpu {libtpu}")
    else:
        yield note(
            "libtpu",
            "not installed: no TPU is used, and diloco plan compiles nothing",
            f"pip install '{PACKAGE}[tpu]', if that is wanted",
        )


def _required() -> list[Requirement]:
    """Return what the package requires here, without its extras."""
    found = map(Requirement, metadata.requires(PACKAGE) or [])
    return [r for r in found if not r.marker or r.marker.evaluate({"extra": ""})]


def _wrong(requirement: Requirement) -> str:
    """Say what is wrong with the package that should meet a requirement."""
    try:
        here = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if here in requirement.specifier:
        return ""
    return f"{requirement.name} {here} is not {requirement.specifier}"


ANSWERS_WITHIN_S = 120.0
"""Seconds for jax to find its devices; a slice of many hosts waits for all of them."""
ASK = """
import json, jax
kinds = sorted({d.device_kind for d in jax.devices()})
print(json.dumps([jax.default_backend(), jax.local_device_count(), kinds]))
"""


def check_devices(answers_within_s: float = ANSWERS_WITHIN_S) -> Iterator[Finding]:
    """Yield what jax finds here; on a host of a TPU anything else is a problem."""
    environment = dict(os.environ)
    try:
        skip_absent_tpu(environment)
    except ConfigError as error:
        yield refused("devices", error)
        return
    command = [sys.executable, "-P", "-c", ASK]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=answers_within_s,
        )
    except subprocess.TimeoutExpired:
        yield problem(
            "devices",
            f"jax did not find its devices within {answers_within_s:g} s",
            "end other processes that use the TPU (a TPU serves one at a time), or run "
            "this on all hosts of the slice at once",
        )
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield problem("devices", f"jax ends: {reason}", "see the line of packages")
        return
    backend, count, kinds = json.loads(done.stdout.splitlines()[-1])
    found = f"{count} of {backend}: {', '.join(kinds)}"
    generation = generation_here()
    if generation and backend != "tpu":
        yield problem(
            "devices",
            f"{found}, although this machine has a TPU {generation}",
            "pip install 'diloco-jax[tpu]', and unset JAX_PLATFORMS",
        )
    elif backend == "cpu":
        yield note("devices", found, "islands train on the CPU here")
    else:
        yield ok("devices", found)


HOMES = {"XDG_CACHE_HOME": "~/.cache", "XDG_STATE_HOME": "~/.local/state"}
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def check_surroundings(folder: Path) -> Iterator[Finding]:
    """Yield what commands could stumble over. folder: of runs."""
    for what, (look, wrong, remedy) in LOOKS.items():
        try:
            if found := ", ".join(look(folder) or ()):
                yield note(what, f"{found}: {wrong}", remedy)
        except ConfigError as error:
            yield refused(what, error)
        except OSError as error:
            of_names = isinstance(error, socket.gaierror)
            yield (note if of_names else problem)(what, str(error), remedy)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _homes(folder: Path) -> Iterable[str]:
    for name, default in HOMES.items():
        path = os.environ.get(name) or os.path.expanduser(default)
        if path[0] == "~" or not os.access(existing(Path(path)), os.W_OK):
            yield path


def _name(folder: Path) -> Iterable[str]:
    address = socket.gethostbyname(name := socket.gethostname())
    return [f"{name} is {address}"] if is_loopback(address) else []


def _temporary(folder: Path) -> None:
    with tempfile.TemporaryFile():
        pass


def _locks(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=existing(folder)) as file:
        files.lock(file, Path(file.name))


Look = Callable[[Path], Iterable[str] | None]
LOOKS: dict[str, tuple[Look, str, str]] = {
    "home": (
        _homes,
        "no file can be kept there",
        "set HOME, or XDG_CACHE_HOME and XDG_STATE_HOME, to folders to write to",
    ),
    "temporary": (
        _temporary,
        "no file can be written there",
        "set TMPDIR to a folder to write to",
    ),
    "proxies": (
        lambda _: [f"{n}={v}" for n, v in os.environ.items() if n.lower() in PROXIES],
        "machines of a run dial each other without them",
        "name those machines in no_proxy, if connections fail",
    ),
    "name": (
        _name,
        "no other machine reaches that",
        "write this machine's own address and its name into /etc/hosts",
    ),
    "modules": (
        lambda _: {p.stem for p in Path().glob("*.py")} & sys.stdlib_module_names,
        "Python has modules of these names, and the current folder, too",
        "rename those files, or work in another folder",
    ),
    "variables": (
        lambda _: [f"{n}={v}" for n, v in process.variables_set_right.items()],
        "commands of diloco do not heed them",
        "unset them, if that surprises",
    ),
    "threads": (lambda _: machine.require_threads(2), "", ""),
    "locks": (_locks, "", "give a folder to write to, as --folder"),
}
"""Looks: the function that finds what is unusual, why that matters, the remedy."""


GIB = 1 << 30
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


def check_system(folder: Path) -> Iterator[Finding]:
    """Yield findings on this machine. folder: where runs are to be; it is tried."""
    yield ok("processor", f"{machine.cores()} cores for this process")
    yield ok("memory", f"{machine.left_bytes()[1] / GIB:.1f} GiB")
    yield _disk(folder)
    yield _ports()
    yield _open_files()
    yield _clock()


def _disk(folder: Path) -> Finding:
    """Write, and force to the disk, what one second of a good disk takes."""
    folder = existing(folder)
    free = shutil.disk_usage(folder).free
    try:
        rate = _written_per_s(folder, min(TRIAL_BYTES, free // 4))
    except OSError as error:
        return problem(
            "disk",
            f"{folder} cannot be written: {error.strerror}",
            "give a folder that can, as --folder here and as --workdir of runs",
        )
    found = f"{folder}: {rate / 1e6:,.0f} MB/s, {free / GIB:,.1f} GiB free"
    if free < FREE_BYTES:
        return note("disk", found, "free some space: diloco plan says what a run needs")
    if rate < SLOW_DISK:
        return note(
            "disk",
            found,
            "large runs want a faster disk: diloco plan says what a run writes",
        )
    return ok("disk", found)


def _written_per_s(folder: Path, nbytes: int) -> float:
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.monotonic()
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell() / max(time.monotonic() - started, 1e-6)


def _ports() -> Finding:
    """Open ports as a coordinator does, for control and bulk, and reach both."""
    try:
        control, bulk = addresses.reserve("127.0.0.1:0")
        with bulk, addresses.listen(control) as server:
            for port in (server, bulk):
                socket.create_connection(port.getsockname(), timeout=5).close()
        return ok("ports", f"{control} and the port of bulk beside it were reached")
    except (OSError, ConfigError) as error:
        return problem(
            "ports",
            f"two ports in a row of this machine cannot be opened and reached: {error}",
            "allow connections over the loopback interface: `ip link set lo up`",
        )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    found = f"{'no limit' if soft == unlimited else f'{soft:,}'} at once"
    if soft != unlimited and soft < FEWEST_FILES:
        most = FEWEST_FILES if hard == unlimited else min(hard, FEWEST_FILES)
        return note("open files", found, f"ulimit -n {most}, for a large coordinator")
    return ok("open files", found)


def _clock() -> Finding:
    """Tell if anything keeps the clock right: certificates and metrics go by it."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        # struct timex, all zeros: change nothing. It has 208 bytes on 64-bit Linux.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (AttributeError, OSError):
        state = -1
    if state == CLOCK_UNSYNCHRONISED:
        return note(
            "clock",
            f"{now}, and the kernel says that nothing keeps it right",
            "have NTP or chrony run, here or on the host of this container",
        )
    kept = "kept right by the system" if state >= 0 else "the system does not tell more"
    return ok("clock", f"{now}, {kept}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `diloco doctor`."""

    folder: Path = setting(Path("."), help="Where runs are to be: its disk is tried.")
    json: bool = setting(False, help="Print one JSON object to standard output.")


STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def doctor_command(arguments: Sequence[str]) -> int:
    """Report on this machine; return 1 if something keeps commands from working."""
    (options,) = parse(
        [DoctorOptions],
        arguments,
        "diloco doctor",
        "Tell what is installed, what jax finds, and what the machine gives a run.",
    )
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
    kinds of checks that are done."""

    version = metadata.version("diloco-jax")
    python = platform.python_version()
    yield ok("diloco_jax", f"{version}, Python {python}, {platform.platform()}")
    kinds: list[Callable[[], Iterator[Finding]]] = [
        check_packages,
        lambda: check_system(folder),
        lambda: check_surroundings(folder),
        check_devices,
    ]
    for done, check in enumerate(kinds, start=1):
        yield from check()
        report(done / len(kinds))
