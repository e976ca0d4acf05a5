"""Read the command line of `diloco run`, before anything loads jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import ConfigError
from diloco_jax.config.fields import setting
from diloco_jax.config.options import TRUST_CODE
from diloco_jax.files import absolute, expand

OPTION = "--resume"
RESUME_TRUSTS = "--trust-code"


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """See `diloco run --help`."""

    baseline: bool = setting(
        False,
        help="Afterwards train the same model plainly on as many tokens, and compare.",
    )
    init: str = setting(
        "",
        metavar="hf:DIR|hf:OWNER/NAME|run:WORKDIR",
        help="Start from weights, whose model is taken over with them: of a folder "
        "with config.json and safetensors, of the hub (OWNER/NAME@REVISION pins one), "
        "or of a run.",
    )
    resume: str = setting(
        "", help="Workdir of a stopped run that should go on; CONFIG may be left out."
    )
    dashboard: bool = setting(
        False, help="Show the run in a browser, too, until it ends: prints the address."
    )
    trust_code: bool = setting(False, help=TRUST_CODE)
    json: bool = setting(
        False, help="Print the summary to standard output as one JSON object."
    )


def with_config(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `diloco run` with a CONFIG: if `--resume WORKDIR` comes
    without one, add the config.json of that workdir."""
    arguments = list(arguments)
    if not arguments or arguments[0].split("=")[0] != OPTION:
        return arguments
    _, equals, value = arguments[0].partition("=")
    if not equals:
        value = arguments[1] if len(arguments) > 1 else ""
    if not value or value.startswith("-"):
        raise ConfigError(f"{OPTION} takes the workdir of the run that is to go on")
    workdir = expand(value)
    if not workdir.is_dir():
        raise ConfigError(no_folder(workdir))
    if not workdirs.holds_run(workdir):
        raise ConfigError(
            f"{OPTION} {value}: no run is there (there is no run.json); give the "
            f"workdir of a run, or begin one with diloco run CONFIG"
        )
    # Before the config is read: a config of another format may have other fields.
    workdirs.read_config(workdir, trust_code=RESUME_TRUSTS in arguments)
    return [str(workdir / run_files.CONFIG), *arguments]


def require_one_workdir(arguments: Sequence[str], workdir: str, resume: str) -> None:
    """Raise ConfigError if the command line gives both a workdir and another one to
    resume. The workdir in a config file only says where its runs begin."""
    options = {argument.split("=")[0] for argument in arguments}
    if not resume or options.isdisjoint(("--workdir", "--placement.workdir")):
        return
    if Path(absolute(workdir)).resolve() != Path(absolute(resume)).resolve():
        raise ConfigError(
            f"--workdir {workdir} with {OPTION} {resume}: a run goes on in its own "
            f"workdir; leave --workdir out"
        )


def no_folder(workdir: Path) -> str:
    return f"{OPTION} {workdir}: there is no such folder; give the workdir of a run"
