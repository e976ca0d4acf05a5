"""launch/*.sh: they start what they say, at once where .venv is there already, and
name what is missing. Nothing is installed here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from diloco_jax.cluster.cluster import ALLOCATOR

ROOT = Path(__file__).parents[2]
WAIT_S = 60
CHECKED = [
    "ruff format --check .",
    "ruff check .",
    "mypy diloco_jax benchmarks/members benchmarks/peers",
    # The checkout of these tests has no benchmarks; bash leaves the pattern alone.
    "mypy --explicit-package-bases benchmarks/*.py",
]
"""Checks that `test.sh` runs before pytest."""

SAYS = '#!/bin/bash\necho "$(basename "$0") $*"\n'


@pytest.fixture
def checkout(tmp_path):
    """The scripts, and what their stamp is a hash of."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "durations.py", tmp_path / "tests")
    return tmp_path


def bash(checkout, *arguments, python=sys.executable, venv=".venv"):
    return subprocess.run(
        ["bash", *arguments],
        cwd=checkout,
        # Nothing is fetched, should a script go on to install.
        env={**os.environ, "PYTHON": str(python), "VENV": venv, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def installed(checkout):
    """As after `ensure_environment test`: a stamp, and tools that say their names."""
    probe = 'source launch/environment.sh; "$PYTHON" -c "$PROBE"'
    version, stamp = bash(checkout, "-c", probe).stdout.split()
    assert version == ".".join(map(str, sys.version_info[:3]))
    for tool in ("diloco", "ruff", "mypy", "pytest"):
        executable(checkout / ".venv" / "bin" / tool, SAYS)
    (checkout / ".venv" / "installed-test").write_text(f"{stamp}\n")
    return checkout


def test_local_starts_the_quickstart_with_its_arguments(installed):
    """Also from another folder than .venv."""
    (installed / ".venv").rename(installed / "other")
    started = bash(installed, "launch/local.sh", "--total-tokens", "9", venv="other")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout == "diloco run configs/quickstart.py --total-tokens 9\n"


def test_test_runs_every_check(installed):
    started = bash(installed, "launch/test.sh")
    assert (started.returncode, started.stderr) == (0, "")
    said = started.stdout.splitlines()
    assert set(CHECKED) <= set(said), "types are checked beside the first tests"
    most, compiled, last = (line for line in said if line.startswith("pytest"))
    assert "-m not (optimized or tpu_compile or timing or nightly)" in most
    assert "-m (optimized or tpu_compile) and not (timing or nightly)" in compiled
    assert last.startswith("pytest -m timing and not nightly ")
    # Each leaves the seconds of its tests.
    for line, name in ((most, "most"), (compiled, "compiled"), (last, "timing")):
        assert f"--junitxml build/tests/{name}.xml" in line


def test_a_wrong_type_ends_the_checks_after_the_tests_beside_them(installed):
    says = f'{SAYS}[[ $1 == diloco_jax ]] && echo "error: a type" && exit 1\n'
    executable(installed / ".venv" / "bin" / "mypy", says)
    started = bash(installed, "launch/test.sh")
    assert started.returncode == 1
    assert "error: a type" in started.stdout
    assert "timing" not in started.stdout.replace("or timing", "")


def test_test_gives_its_arguments_to_pytest(installed):
    started = bash(installed, "launch/test.sh", "tests/core", "-x")
    asked = "pytest --junitxml build/tests/asked.xml tests/core -x"
    assert started.stdout.splitlines() == [*CHECKED, asked]
    assert (installed / "build" / "tests" / "durations.txt").is_file()


def test_test_shares_the_cores_for_what_is_cheap(installed):
    started = bash(installed, "launch/test.sh", "--fast", "-x")
    *checks, fast = started.stdout.splitlines()
    assert checks == CHECKED
    assert fast.startswith("pytest --numprocesses ")
    assert fast.endswith(" or nightly) -x")
    folders = re.findall(r" (tests/\S+)", fast)
    assert "tests/core" in folders
    assert all((ROOT / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("script", ["local.sh", "test.sh"])
def test_a_python_that_is_too_old_is_named_with_the_remedy(checkout, script):
    """It prints its version, and 3 is the exit code of the probe."""
    old = executable(checkout / "python3.9", "#!/bin/bash\necho 3.9.2\nexit 3\n")
    refused = bash(checkout, f"launch/{script}", python=old)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"error: '{old}' is Python 3.9.2; 3.11 or newer is needed" in refused.stderr
    assert f"PYTHON=/path/to/python3.12 bash launch/{script}" in refused.stderr
    assert not (checkout / ".venv").exists()


def test_the_probe_knows_an_old_python(checkout):
    """As it would run there."""
    probe = (
        "source launch/environment.sh; "
        'echo "import sys; sys.version_info = (3, 10, 9); $PROBE" | "$PYTHON" -'
    )
    probed = bash(checkout, "-c", probe)
    assert (probed.returncode, probed.stdout) == (3, "3.10.9")


def test_no_python_at_all_is_named_with_the_remedy(checkout):
    refused = bash(checkout, "launch/local.sh", python="no-such-python")
    assert refused.returncode == 2
    assert "no 'no-such-python' found; Python 3.11 or newer" in refused.stderr


def test_other_requirements_are_installed_again(installed):
    """With a Python that cannot make a .venv, so that it ends there."""
    with (installed / "setup.cfg").open("a") as file:
        file.write("# changed\n")
    script = f'[[ $2 == *ensurepip* ]] && exit 1; exec "{sys.executable}" "$@"'
    without = executable(installed / "python3", f"#!/bin/bash\n{script}\n")
    refused = bash(installed, "launch/local.sh", python=without)
    assert refused.returncode == 2
    assert "has no venv module: install it" in refused.stderr


def test_the_images_allocator_is_that_of_diloco_run() -> None:
    dockerfile = (ROOT / "launch/gke/Dockerfile").read_text()
    (set_to,) = re.findall(r"^ENV GLIBC_TUNABLES=(\S+)$", dockerfile, re.MULTILINE)
    assert {"GLIBC_TUNABLES": set_to} == ALLOCATOR


def test_the_image_has_the_jax_that_the_tests_run_with() -> None:
    """And with it one libtpu: its extra names one version."""
    dockerfile = (ROOT / "launch/gke/Dockerfile").read_text()
    (version,) = re.findall(r"^ARG JAX=(\S+)$", dockerfile, re.MULTILINE)
    assert f"jax[tpu]>={version}\n" in (ROOT / "setup.cfg").read_text()
    needed = metadata.requires("jax") or []
    libtpu = [n for n in needed if n.startswith("libtpu") and "tpu" in n.split(";")[1]]
    assert re.match(r"libtpu\s*==", libtpu[0])
    assert '"jax[tpu]==${JAX}"' in dockerfile


def test_the_images_packages_are_those_with_the_dockerfiles_jax(checkout):
    """With a `uv` that says what it is asked for."""
    ask = '#!/bin/bash\necho "$@" >asked; cat >>asked\n'
    executable(checkout / "tools/uv", ask)
    done = bash(checkout, "-c", "PATH=$PWD/tools:$PATH bash launch/constraints.sh")
    assert done.returncode == 0, done.stderr
    options, *packages = (checkout / "asked").read_text().splitlines()
    dockerfile = (ROOT / "launch/gke/Dockerfile").read_text()
    (jax,) = re.findall(r"^ARG JAX=(\S+)$", dockerfile, re.MULTILINE)
    built_with = (ROOT / "pyproject.toml").read_text()
    assert packages[0] == f"jax[tpu]=={jax}"
    assert f'requires = ["{packages[1]}"]' in built_with
    assert "--generate-hashes" in options
    assert "--python-version 3.12 " in options
    (extras,) = re.findall(r'"\.\[(\S+)\]"', dockerfile)
    assert all(f"--extra {extra} " in options for extra in extras.split(","))
    file = re.search(r"--output-file (\S+)", options)[1]
    assert f"!{file}\n" in (ROOT / ".dockerignore").read_text()


@pytest.mark.parametrize(
    ("there", "wanted", "enough"),
    [
        ("test", "", True),
        ("test", "test", True),
        ("test,tpu,docs", "docs", True),
        ("test,tpu,docs", "test,tpu", True),
        ("test", "test,tpu", False),
        ("", "test", False),
        ("docs", "test", False),
    ],
)
def test_what_was_installed_with_more_extras_will_do(installed, there, wanted, enough):
    """With a pip that says what it is asked for."""
    stamp = installed / ".venv" / "installed-test"
    stamp.rename(stamp.with_name(f"installed-{there}"))
    python = f'exec "{sys.executable}" "$@"'
    script = f'[[ $* == *" pip "* ]] || {python}; echo asked "$@"; exit 7'
    executable(installed / ".venv/bin/python", f"#!/bin/bash\n{script}\n")
    ask = f'source launch/environment.sh; ensure_environment "{wanted}"'
    done = bash(installed, "-c", f"set -e; {ask}")
    assert (done.returncode, "asked" in done.stdout) == (
        (0, False) if enough else (7, True)
    )
