"""Every call into the decisions, written down while random fault schedules are played.

One line of JSON for each: [name, arguments, calls of ports, result], in their order,
after one that says of what code they are.
What is remembered between calls (a state, an object) is known by the number of the call
that made it, so that no state need ever be translated.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from differential_names import (
    CLASSES,
    CONSTANTS,
    FUNCTIONS,
    PLAY_SEED,
    STATES,
    Hooked,
)
from differential_values import PACKAGE, code_digest, encode, find, found, text

CODE, SCHEDULE, CONSTANT = "code", "schedule", "constant"


def record(seeds: range, path: Path) -> None:
    """Play the schedules of these seeds with the imported package."""
    play_seed = found(PLAY_SEED)
    part = path.with_suffix(".part")
    with gzip.open(part, "wt", compresslevel=1) as file:
        file.write(text([CODE, code_digest()]) + "\n")
        recorder = Recorder(file)
        with recorder.hooked():
            for seed in seeds:
                recorder.begin(seed)
                wrong = play_seed(seed).wrong
                assert wrong is None, f"seed {seed} violates {wrong}"
    part.rename(path)


def methods_of(kind: type) -> dict[str, Callable[..., Any]]:
    """Return public methods, getters of properties, and the constructor."""
    methods: dict[str, Callable[..., Any]] = {}
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and (name[0] != "_" or name == "__init__"):
            methods[name] = function
    return methods


class Recorder:
    """A writer of the calls of one schedule after the other."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._inside = False
        self._asked: list[Any] = []
        """Calls of ports by the call that is recorded."""
        self._count = 0
        self._known: dict[int, tuple[Any, int]] = {}
        """Objects and the calls that made them, by id; kept, so that ids are."""
        kinds = [kind for name in STATES if (kind := find(name)) is not None]
        kinds += [kind for h in CLASSES.values() if (kind := found(h.places))]
        constants = [kind for name in CONSTANTS if (kind := find(name)) is not None]
        self._results = dict.fromkeys(kinds, self._made)
        self._values: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys(kinds, self._reference),
            **dict.fromkeys(constants, self._constant),
            _Port: lambda port: {"": "port", "name": port.name},
        }

    def begin(self, seed: int) -> None:
        """Begin a new schedule: no object is known yet."""
        self._known, self._count = {}, 0
        self._write([SCHEDULE, seed])

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record all calls of the tables' classes and functions within the block."""
        for module in _modules():
            importlib.import_module(module)
        replaced: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, value: Any) -> None:
            replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        for name, places in FUNCTIONS.items():
            if (function := found(places)) is not None:
                hook = self._hook(name, function)
                for module in [
                    m for n, m in sys.modules.items() if n.startswith(PACKAGE)
                ]:
                    for attribute, value in list(vars(module).items()):
                        if value is function:
                            replace(module, attribute, hook)
        for name, hooked in CLASSES.items():
            if (kind := found(hooked.places)) is not None:
                for method, function in methods_of(kind).items():
                    hook = self._hook(f"{name}.{method}", function, hooked)
                    is_property = isinstance(vars(kind)[method], property)
                    replace(kind, method, property(hook) if is_property else hook)
        try:
            yield
        finally:
            for owner, name, value in reversed(replaced):
                setattr(owner, name, value)

    def _hook(
        self, name: str, function: Callable[..., Any], hooked: Hooked | None = None
    ) -> Callable[..., Any]:
        is_constructor = name.endswith(".__init__")
        signature = inspect.signature(function)

        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            for port in hooked.ports if is_constructor and hooked else ():
                real = bound.arguments[port]
                bound.arguments[port] = _Port(port, real, self._ask)
            given = list(bound.args[1:] if is_constructor else bound.args)
            arguments = self._encoded(given), self._encoded(bound.kwargs)
            self._asked, self._inside = [], True
            try:
                result = function(*bound.args, **bound.kwargs)
            finally:
                self._inside = False
            made = args[0] if is_constructor else result
            said = encode(made, self._results)
            self._write([name, arguments, self._asked, said])
            self._count += 1
            return result

        return hook

    def _ask(
        self,
        port: str,
        method: str,
        function: Callable[..., Any],
        *args: Any,
        **kw: Any,
    ) -> Any:
        if not self._inside:
            return function(*args, **kw)
        arguments = self._encoded(args), self._encoded(kw)
        result = function(*args, **kw)
        self._asked.append([port, method, arguments, self._encoded(result)])
        return result

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._values)

    def _made(self, thing: Any) -> Any:
        self._known[id(thing)] = thing, self._count
        return {"": "made"}

    def _reference(self, thing: Any) -> Any:
        if id(thing) not in self._known:
            # The object was on a disk meanwhile.
            same = [
                number
                for before, number in self._known.values()
                if type(before) is type(thing) and before == thing
            ]
            assert same, f"a {type(thing).__name__} that no recorded call has made"
            self._known[id(thing)] = thing, max(same)
        return {"": "made", "by": self._known[id(thing)][1]}

    def _constant(self, thing: Any) -> Any:
        if id(thing) not in self._known:
            self._write([CONSTANT, encode(thing, {})])
            self._known[id(thing)] = thing, self._count
            self._count += 1
        return {"": "made", "by": self._known[id(thing)][1]}

    def _write(self, line: Any) -> None:
        self._file.write(text(line) + "\n")


class _Port:
    """A stand-in between a recorded object and the port that it calls."""

    def __init__(self, name: str, real: Any, ask: Callable[..., Any]) -> None:
        self.name, self._real, self._ask = name, real, ask

    def __getattr__(self, method: str) -> Any:
        function = getattr(self._real, method)
        return functools.partial(self._ask, self.name, method, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self.name, "", self._real, *args, **kwargs)


def _modules() -> list[str]:
    """Return the names of all modules that the schedules are played with."""
    package = importlib.import_module(f"{PACKAGE}simulation.faults")
    return [
        f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__)
    ]
