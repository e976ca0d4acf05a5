"""Mutation testing of the protocol.

Question: would a mistake in `protocol/` be noticed? Every mutant has one small mistake
in one function: another comparison, `and` for `or`, another operator or number, a lost
`not`, a statement left out, nothing returned. It is caught if a test of its module
fails, or else if one of the first schedules of `diloco simulate faults` violates an
invariant, or else if another test in tests/protocol fails. Messages, assertions
(`strict` of a `zip` is one), annotations and imports are not mutated, nor is None
returned for False or an empty string.

Prediction: at least 98 % are caught, and of each survivor it can be said why (in
mutation_survivors.json).

Command: `python benchmarks/mutation.py`. `--sample N` draws N of all mutants. Results
are written as they come. Started again, it tries what is missing, has changed, or
survived without an explanation.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import gc
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import os
import re
import resource
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import at_least, at_most, parser, write_results

from diloco_jax.files import write_json
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.play import play

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = Path(__file__).with_name("mutation_survivors.json")
PROTOCOL = ROOT / "diloco_jax" / "protocol"
MODULES = sorted(
    ".".join(path.relative_to(PROTOCOL).with_suffix("").parts)
    for path in PROTOCOL.rglob("[!_]*.py")
)
CAUGHT_SHARE = 0.98
CPU_S = 60
"""A mutant that takes longer runs for ever, which is noticed too."""
OWN_TESTS = 3
"""Files of tests that name a module most, which are tried first."""
SURVIVED, BY_SCHEDULES, BY_TESTS = 0, 10, 11

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """function: dotted, within its module."""

    module: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    source: str
    """Source of the function, with the mistake."""

    @property
    def key(self) -> str:
        """Name of the mutant, valid while its function stays the same."""
        return f"{self.module}.{self.mistake}"

    @property
    def mistake(self) -> str:
        """The key without the module, which stays if the function moves."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:6]
        change = f"{_one_line(self.before)} -> {_one_line(self.after)}"
        return f"{self.function}: {change} [{digest}]"

    def code(self) -> types.CodeType:
        """Compile the function, with the mistake."""
        path = _path(self.module)
        tree = ast.parse(path.read_text())
        for name, body, index in _functions(tree):
            if name == self.function:
                body[index] = ast.parse(self.source).body[0]
                break
        code = compile(tree, str(path), "exec")
        for part in self.function.split("."):
            code = next(
                c
                for c in code.co_consts
                if isinstance(c, types.CodeType) and c.co_name == part
            )
        return code


# ---- mutants ----------------------------------------------------------------------


def mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module of the protocol."""
    for name, body, index in _functions(ast.parse(_path(module).read_text())):
        function = body[index]
        for target in _targets(function):
            for kind, changed in _changes(target):
                before = ast.unparse(target)
                with _replaced(target, changed):
                    source = ast.unparse(function)
                yield Mutant(
                    module=module,
                    function=name,
                    line=target.lineno,
                    kind=kind,
                    before=before,
                    after=ast.unparse(changed),
                    source=source,
                )


def _path(module: str) -> Path:
    return PROTOCOL.joinpath(*module.split(".")).with_suffix(".py")


def _functions(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt], int]]:
    """Yield the functions, each with its place in a body."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, body in [("", tree.body), *((f"{c.name}.", c.body) for c in classes)]:
        for index, node in enumerate(body):
            if isinstance(node, ast.FunctionDef):
                yield f"{prefix}{node.name}", body, index


def _targets(function: Any) -> Iterator[Any]:
    """Expressions and statements that may be changed."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.MatchClass):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        stack += reversed(
            [
                child
                for field, value in ast.iter_fields(node)
                if field not in ("annotation", "returns", "pattern")
                for child in (value if isinstance(value, list) else [value])
                if isinstance(child, ast.AST)
            ]
        )


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=[operator]) | ast.BoolOp(op=operator):
            kind = "comparison" if isinstance(node, ast.Compare) else "boolean"
            yield kind, _with_operator(node, SWAPPED[type(operator)]())
        case ast.BinOp(op=operator) if type(operator) in SWAPPED:
            yield "arithmetic", _with_operator(node, SWAPPED[type(operator)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "not", operand
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Return(value=value) if value is not None:
            if ast.unparse(value) not in ("None", "False", "''"):
                yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            # Only where the name has a value already: others are noticed at once.
            if name in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}:
                yield "statement", ast.Pass()


def _with_operator(node: Any, operator: ast.AST) -> ast.AST:
    fields = {"ops": [operator]} if isinstance(node, ast.Compare) else {"op": operator}
    changed: ast.AST = copy.copy(node)
    vars(changed).update(fields)
    return changed


@contextlib.contextmanager
def _replaced(target: ast.AST, changed: ast.AST) -> Iterator[None]:
    """Turn `target` into `changed`, in its place in the tree, within the block."""
    kind, fields = type(target), dict(vars(target))
    ast.fix_missing_locations(ast.copy_location(changed, target))
    target.__class__ = type(changed)
    vars(target).update(vars(changed))
    try:
        yield
    finally:
        target.__class__ = kind
        vars(target).clear()
        vars(target).update(fields)


# ---- trying them ------------------------------------------------------------------


class Trial:
    """A plugin of pytest that tries mutants instead of running tests. Each one has a
    process of its own, in which all tests are collected already."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self.code: int | None = None
        """The exit code; None if the tests cannot be collected."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try them once all tests are collected."""
        if session.testsfailed:  # Not all are.
            return True
        self._session = session
        took_s: dict[str, float] = collections.defaultdict(float)
        with contextlib.suppress(FileNotFoundError):
            for line in (ROOT / "build/tests/durations.txt").read_text().splitlines():
                seconds, _, test = line.split(maxsplit=2)
                took_s[test.partition("::")[0].rpartition(".")[2]] += float(seconds)
        by_file: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            by_file.setdefault(item.path, []).append(item)
        # Those that took long when all tests ran come last.
        paths = sorted(by_file, key=lambda path: took_s[path.stem])
        self._tests = {path: by_file[path] for path in paths}
        self._texts = {path: path.read_text() for path in by_file}
        gc.collect()
        gc.freeze()
        self.code = _try_all(self, self._options)
        return True

    def start(self, mutant: Mutant | None) -> int:
        """Try a mutant in a process of its own; return the process id."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = BY_TESTS
            with contextlib.suppress(BaseException):
                resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
                code = self._try(mutant)
            os._exit(code)
        return child

    def outcomes(self, todo: Iterable[Mutant]) -> Iterator[tuple[Mutant, str]]:
        """Try as many mutants at a time as the options say; yield them as they end."""
        running: dict[int, Mutant] = {}
        waiting = iter(todo)
        while True:
            free = self._options.jobs - len(running)
            for mutant in itertools.islice(waiting, free):
                running[self.start(mutant)] = mutant
            if not running:
                return
            child, noticed = ended()
            yield running.pop(child), noticed

    def _try(self, mutant: Mutant | None) -> int:
        own: list[Path] = []
        if mutant is not None:
            plant(mutant)
            own = self._own_tests(mutant.module)
        if self._tests_fail(own):
            return BY_TESTS
        if _schedules_fail(self._options.schedules):
            return BY_SCHEDULES
        others = [path for path in self._tests if path not in own]
        return BY_TESTS if self._tests_fail(others) else SURVIVED

    def _own_tests(self, module: str) -> list[Path]:
        """Return the files of tests that name a module most."""
        name = re.compile(rf"\b{module.rpartition('.')[2]}\b")
        counts = {path: len(name.findall(text)) for path, text in self._texts.items()}
        return sorted(counts, key=lambda path: -counts[path])[:OWN_TESTS]

    def _tests_fail(self, paths: Iterable[Path]) -> bool:
        items = [item for path in paths for item in self._tests[path]]
        for item, following in itertools.zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                return True
        return False


def _schedules_fail(schedules: int) -> bool:
    logging.disable(logging.CRITICAL)  # Torn logs and refused takes are the point here.
    gc.disable()
    for seed in range(schedules):
        if play(draw(seed)).wrong is not None:
            return True
        gc.collect()
    gc.enable()
    logging.disable(logging.NOTSET)
    return False


def ended() -> tuple[int, str]:
    """Wait for the next process to end; return its id and the check that noticed the
    mistake, "" if none did."""
    child, status = os.wait()
    if os.WIFSIGNALED(status):
        return child, "runs for ever"
    by = {SURVIVED: "", BY_SCHEDULES: "schedules", BY_TESTS: "tests"}
    return child, by[os.WEXITSTATUS(status)]


def plant(mutant: Mutant) -> None:
    """Put the mistake into the function itself, for every module that imported it."""
    owner: Any = importlib.import_module(f"diloco_jax.protocol.{mutant.module}")
    *classes, name = mutant.function.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function = inspect.getattr_static(owner, name)
    for inner in ("fget", "func"):  # Of a property, cached or not.
        function = getattr(function, inner, function)
    function = inspect.unwrap(function)  # Of a cache.
    function.__code__ = mutant.code()


# ---- results ----------------------------------------------------------------------


def main() -> int:
    """See the module's docstring."""
    made = parser(__doc__ or "")
    made.add_argument("--schedules", type=int, default=60, help="for each mutant")
    made.add_argument("--sample", type=int, help="mutants drawn; all by default")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    options = made.parse_args()
    os.chdir(ROOT)
    trial = Trial(options)
    arguments = ["-q", "-s", "-p", "no:cacheprovider", "tests/protocol"]
    pytest.main(arguments, plugins=[trial])
    if trial.code is None:
        raise RuntimeError("tests/protocol cannot be collected; mend that first")
    return trial.code


def _try_all(trial: Trial, options: Any) -> int:
    """Try what is missing, and write the results; return the exit code."""
    everything = [mutant for module in MODULES for mutant in mutants(module)]
    trial.start(None)
    if wrong := ended()[1]:
        raise RuntimeError(f"{wrong} fail without any mutant; mend that first")
    path = options.out / "raw" / "mutation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_bytes())["caught_by"] if path.exists() else {}
    total = len(everything)
    drawn = {m.key for m in sorted(everything, key=_lot)[: options.sample]}
    everything = [m for m in everything if m.key in drawn or m.key in known]
    settled = {key for key, by in known.items() if by} | explained().keys()
    found = {m.key: known[m.key] for m in everything if m.key in known.keys() & settled}
    # In the lottery's order, so that a part of them is a sample too.
    missing = sorted((m for m in everything if m.key not in found), key=_lot)
    for mutant, noticed in trial.outcomes(missing):
        found[mutant.key] = noticed
        write_json({"caught_by": found}, path)
        caught = sum(map(bool, found.values()))
        told = f"{len(found)}/{len(everything)}: {caught} caught"
        print(f"\r{told}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return _write(options, everything, total, found)


def _lot(mutant: Mutant) -> str:
    """Return the place in the lottery, which stays while the function does."""
    return hashlib.sha256(mutant.mistake.encode()).hexdigest()


def explained() -> dict[str, str]:
    """Return why nothing notices, by the survivor's key."""
    why: dict[str, str] = json.loads(EXPLAINED.read_bytes())
    return why


def _write(
    options: Any, everything: list[Mutant], total: int, found: dict[str, str]
) -> int:
    why = explained()
    survivors = [m for m in everything if not found[m.key]]
    if stale := why.keys() - {m.key for m in survivors}:
        print("explained, but no survivors:", *sorted(stale), sep="\n", file=sys.stderr)
    tables = {
        title: _counts(everything, found, field)
        for title, field in (("By module", "module"), ("By mistake", "kind"))
    }
    tables["Survivors"] = [
        {
            "where": f"{m.module}.{m.function}, line {m.line}",
            "mistake": f"`{_one_line(m.before)}` -> `{_one_line(m.after)}`",
            "why nothing notices": why.get(m.key, "not explained"),
        }
        for m in survivors
    ]
    caught = 1 - len(survivors) / len(everything)
    by_schedules = sum(by == "schedules" for by in found.values()) / len(everything)
    unexplained = sum(m.key not in why for m in survivors)
    checks = [
        at_least("share of mutants caught", caught, CAUGHT_SHARE),
        at_most("survivors without an explanation", unexplained, 0),
    ]
    raw = {
        "mutants": total,
        "tried": len(everything),
        "schedules": options.schedules,
        "caught_share": caught,
        "caught_by_schedules_share": by_schedules,
        "caught_by": found,
    }
    doc = (__doc__ or "").rstrip() + (
        f"\n\n{len(everything)} of the {total} mutants were tried, drawn at random.\n"
        f"{by_schedules:.1%} of them passed the tests of their module, and were caught "
        f"by the first {options.schedules} schedules."
    )
    return write_results(options.out, "mutation", doc, tables, checks, raw)


def _counts(
    everything: list[Mutant], found: dict[str, str], field: str
) -> list[dict[str, Any]]:
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for mutant in everything:
        groups[getattr(mutant, field)][found[mutant.key] or "survived"] += 1
    return [
        {
            field: name,
            "mutants": counts.total(),
            "by schedules": counts["schedules"],
            "by tests": counts["tests"],
            "run for ever": counts["runs for ever"],
            "survived": counts["survived"],
        }
        for name, counts in sorted(groups.items())
    ]


def _one_line(source: str) -> str:
    text = " ".join(source.split()).replace("|", r"\|")
    return text if len(text) <= 90 else f"{text[:87]}..."


if __name__ == "__main__":
    sys.exit(main())
