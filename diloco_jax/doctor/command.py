"""`diloco doctor [--folder DIR] [--json]`."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from diloco_jax.config.fields import setting
from diloco_jax.doctor.finding import Finding, Level, ok
from diloco_jax.exit_codes import EXIT_FAILED
from diloco_jax.options import parse


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
    from diloco_jax.doctor.devices import check_devices
    from diloco_jax.doctor.packages import check_packages
    from diloco_jax.doctor.surroundings import check_surroundings
    from diloco_jax.doctor.system import check_system

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
