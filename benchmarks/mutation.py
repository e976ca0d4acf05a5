"""Mutation testing of the policy.

Question: would a mistake in `policy/` be noticed? Every mutant has one small mistake
in one function: another comparison, `and` for `or`, another operator or number, a lost
`not`, a statement left out, nothing returned. It is caught if one of the first
schedules of `diloco simulate faults` violates an invariant, or else if a test in
tests/policy fails. Messages, assertions, annotations and imports are not mutated.

Prediction: at least 85 % are caught.

Command: `python benchmarks/mutation.py`. Cost: about 25 minutes of one core. Results
are written as they come: started again, it goes on with the mutants that are missing
or whose function has changed.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import random
import resource
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import at_least, parser, write_results

from diloco_jax.loading import write_json
from diloco_jax.simulation.faults.play import check

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = Path(__file__).with_name("mutation_survivors.json")
MODULES = (
    "admission",
    "alerts",
    "ending",
    "fragment",
    "gathering",
    "leaving",
    "ledger",
    "membership",
    "policy",
    "recovery",
    "schedule",
    "shares",
    "state",
    "takes",
)
CAUGHT_SHARE = 0.85
CPU_S = 60
"""A mutant that takes longer runs for ever, which is noticed too."""
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
    """Of the function, with the mistake."""
    code: types.CodeType

    @property
    def key(self) -> str:
        """Names it, as long as its function stays as it is."""
        place = f"{self.module}.{self.function}"
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:6]
        return (
            f"{place}: {_one_line(self.before)} -> {_one_line(self.after)} [{digest}]"
        )


# ---- mutants ----------------------------------------------------------------------


def mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module of the policy, in the order of its lines."""
    path = ROOT / "diloco_jax" / "policy" / f"{module}.py"
    tree = ast.parse(path.read_text())
    for name, function in _functions(tree):
        for target in _targets(function):
            for kind, changed in _changes(target):
                before = ast.unparse(target)
                with _replaced(target, changed):
                    source = ast.unparse(function)
                    code = compile(tree, str(path), "exec")
                yield Mutant(
                    module=module,
                    function=name,
                    line=target.lineno,
                    kind=kind,
                    before=before,
                    after=ast.unparse(changed),
                    source=source,
                    code=_code_of(code, name),
                )


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


def _targets(function: ast.FunctionDef) -> Iterator[Any]:
    """Expressions and statements that may be changed."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.MatchClass):
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
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            # Only where the name has a value already: others are noticed at once.
            if name in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}:
                yield "statement", ast.Pass()


def _with_operator(node: Any, operator: ast.AST) -> ast.AST:
    changed = copy.copy(node)
    if isinstance(node, ast.Compare):
        changed.ops = [operator]
    else:
        changed.op = operator
    return changed


@contextlib.contextmanager
def _replaced(target: ast.AST, changed: ast.AST) -> Iterator[None]:
    """With `target` turned into `changed`, in its place in the tree."""
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


def _code_of(module: types.CodeType, name: str) -> types.CodeType:
    code = module
    for part in name.split("."):
        code = next(
            c
            for c in code.co_consts
            if isinstance(c, types.CodeType) and c.co_name == part
        )
    return code


# ---- trying them ------------------------------------------------------------------


def outcome(mutant: Mutant | None, schedules: int) -> str:
    """What notices it, "" if nothing does; tried in a process of its own."""
    child = os.fork()
    if child == 0:
        code = BY_TESTS
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            code = _try(mutant, schedules)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "runs for ever"
    return {SURVIVED: "", BY_SCHEDULES: "schedules", BY_TESTS: "tests"}[
        os.WEXITSTATUS(status)
    ]


def _try(mutant: Mutant | None, schedules: int) -> int:
    if mutant is not None:
        plant(mutant)
    for seed in range(schedules):
        if check([seed], shorten=False).violations:
            return BY_SCHEDULES
    arguments = ["-x", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "policy")]
    return BY_TESTS if pytest.main(arguments) else SURVIVED


def plant(mutant: Mutant) -> None:
    """Puts the mistake where the function is, for everyone who has imported it."""
    owner: Any = importlib.import_module(f"diloco_jax.policy.{mutant.module}")
    *classes, name = mutant.function.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function = inspect.getattr_static(owner, name)
    if isinstance(function, property):
        function = function.fget
    function.__code__ = mutant.code


# ---- results ----------------------------------------------------------------------


def main() -> int:
    """See the module's docstring."""
    made = parser(__doc__ or "")
    made.add_argument("--schedules", type=int, default=60, help="for each mutant")
    made.add_argument("--mutants", type=int, default=400, help="drawn from all")
    made.add_argument("--seed", type=int, default=0, help="of the draw")
    options = made.parse_args()
    os.chdir(ROOT)
    everything = [mutant for module in MODULES for mutant in mutants(module)]
    drawn = sorted(
        random.Random(options.seed).sample(
            range(len(everything)), min(options.mutants, len(everything))
        )
    )
    if wrong := outcome(None, options.schedules):
        raise RuntimeError(f"{wrong} fail without any mutant; mend that first")
    path = options.out / "raw" / "mutation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_bytes())["caught_by"] if path.exists() else {}
    found: dict[str, str] = {}
    for count, mutant in enumerate([everything[i] for i in drawn], 1):
        if mutant.key not in known:
            known[mutant.key] = outcome(mutant, options.schedules)
            write_json({"caught_by": known}, path)
        found[mutant.key] = known[mutant.key]
        caught = sum(map(bool, found.values()))
        print(f"\r{count}/{len(drawn)}: {caught} caught", end="", file=sys.stderr)
    print(file=sys.stderr)
    return _write(options, [everything[i] for i in drawn], len(everything), found)


def _write(options: Any, drawn: list[Mutant], total: int, found: dict[str, str]) -> int:
    explained = json.loads(EXPLAINED.read_bytes()) if EXPLAINED.exists() else {}
    survivors = [m for m in drawn if not found[m.key]]
    tables = {
        title: _counts(drawn, found, field)
        for title, field in (("By module", "module"), ("By mistake", "kind"))
    }
    tables["Survivors"] = [
        {
            "where": f"{m.module}.{m.function}, line {m.line}",
            "mistake": f"`{_one_line(m.before)}` -> `{_one_line(m.after)}`",
            "why nothing notices": explained.get(m.key, "not explained"),
        }
        for m in survivors
    ]
    caught = 1 - len(survivors) / len(drawn)
    by_schedules = sum(found[m.key] == "schedules" for m in drawn) / len(drawn)
    checks = [at_least("share of mutants caught", caught, CAUGHT_SHARE)]
    raw = {
        "mutants": total,
        "drawn": len(drawn),
        "seed": options.seed,
        "schedules": options.schedules,
        "caught_share": caught,
        "caught_by_schedules_share": by_schedules,
        "caught_by": found,
    }
    doc = (__doc__ or "").rstrip() + (
        f"\n\nOf {total} mutants {len(drawn)} were drawn (seed {options.seed}), "
        f"{by_schedules:.1%} were caught by the first {options.schedules} schedules."
    )
    return write_results(options.out, "mutation", doc, tables, checks, raw)


def _counts(
    drawn: list[Mutant], found: dict[str, str], field: str
) -> list[dict[str, Any]]:
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for mutant in drawn:
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
