"""Compare the decisions of this checkout with those of another commit.

`decisions` plays random fault schedules with the other commit's code, writes down every
call into both halves of the protocol, and has this checkout's code do the same calls:
what they return (states apart) and what they call must be equal, byte for byte.
`schedules` plays them with both, and compares what happens to the coordinator, and
when: the simulator and its islands behave alike. `emulations` compares digests of
everything that small emulations leave: parameters, history, summary.

What was renamed since is said in differential_names.py, and nowhere else. Recordings
are kept, and used again.

Command: `python benchmarks/differential.py decisions --base 78da2d9`. Cost: about two
minutes of one core for each of the three. Exit code 1 if there is a difference.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from differential_emulations import emulations
from differential_record import record
from differential_replay import matched, replay

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("diloco_jax", "configs")
WORKERS = ("record", "replay", "match", "emulate")
"""Parts of the work, each in a process of its own that imports one of both packages."""
LISTED = 12
"""Names of differing values of an emulation that are printed."""


def main() -> int:
    """Compare; return 1 if there is a difference."""
    options = _options()
    if options.what in WORKERS:
        return _part(options)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    base = _extracted(options.base, out)
    seeds = ["--seeds", str(options.seeds), "--first-seed", str(options.first_seed)]
    if options.what == "emulations":
        old, new = out / f"{base.name}-emulations.json", out / "emulations.json"
        if not old.exists():
            _work(base, "emulate", old)
        _work(ROOT, "emulate", new, "--renamed")
        return _compare_emulations(old, new)
    old = out / f"{base.name}-{options.first_seed}-{options.seeds}.jsonl.gz"
    if not old.exists():
        _work(base, "record", old, *seeds)
    if options.what == "decisions":
        return _work(ROOT, "replay", old, fails=True)
    new = out / "here.jsonl.gz"
    _work(ROOT, "record", new, *seeds)
    return _work(ROOT, "match", old, "--other", str(new), fails=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    compared = ("decisions", "schedules", "emulations")
    parser.add_argument(
        "what", choices=(*compared, *WORKERS), metavar="{" + ",".join(compared) + "}"
    )
    parser.add_argument("--base", default="HEAD", help="the other commit")
    parser.add_argument("--seeds", type=int, default=500, help="schedules")
    parser.add_argument("--first-seed", type=int, default=0)
    kept = Path(tempfile.gettempdir(), "diloco-differential")
    parser.add_argument("--out", type=Path, default=kept, help="folder of recordings")
    for hidden in ("--file", "--other"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--renamed", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _part(options: argparse.Namespace) -> int:
    """Do one part with the package that PYTHONPATH names first."""
    package = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    import diloco_jax

    assert Path(diloco_jax.__file__).is_relative_to(package), diloco_jax.__file__
    logging.disable(logging.CRITICAL)  # Refused takes are the point here.
    first = options.first_seed
    match options.what:
        case "record":
            record(range(first, first + options.seeds), options.file)
        case "emulate":
            found = emulations(package, renamed=options.renamed)
            options.file.write_text(json.dumps(found))
        case "replay":
            compared = replay(options.file)
            print(compared)
            return int(not compared.holds)
        case "match":
            compared = matched(options.file, options.other)
            print(compared)
            return int(not compared.holds)
    return 0


def _work(
    package: Path, what: str, file: Path, *arguments: str, fails: bool = False
) -> int:
    """Have a process do one part with this package. fails: return its exit code."""
    script = str(Path(__file__).resolve())
    command = [sys.executable, script, what, "--file", str(file), *arguments]
    environment = {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env={**os.environ, **environment}, check=not fails)
    return done.returncode


def _extracted(commit: str, out: Path) -> Path:
    """Return the package as it is in a commit."""
    named = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{commit}^{{commit}}"]
    digest = subprocess.run(named, check=True, capture_output=True, text=True).stdout
    folder = out / digest.strip()[:12]
    if not folder.exists():
        archive = ["git", "-C", str(ROOT), "archive", digest.strip(), *NEEDED]
        packed = subprocess.run(archive, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(folder, filter="data")
    return folder


def _compare_emulations(old: Path, new: Path) -> int:
    """Print a table; values that only this checkout has are not compared."""
    differ = 0
    before, after = (json.loads(path.read_text()) for path in (old, new))
    print(f"{'emulation':<20} {'parameters':<34} {'values':>6} {'equal':>6}")
    for case, values in before.items():
        here = after.get(case, {})
        wrong = [name for name in values if values[name] != here.get(name)]
        differ += bool(wrong)
        parameters = f"{values['parameters']} {here.get('parameters')}"
        equal = len(values) - len(wrong)
        print(f"{case:<20} {parameters:<34} {len(values):>6} {equal:>6}")
        for name in wrong[:LISTED]:
            print(f"    {name}: {values[name]} here {here.get(name)}")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
