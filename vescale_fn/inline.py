"""Source text of functions and classes together with everything of this package that they use.

`Inliner` collects definitions until nothing is missing, so that the text runs where the package is not installed.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


@dataclass(eq=False)
class Inliner:
    """Definitions in an order in which they can be executed, and the imports that they need."""

    definitions: dict[str, str] = field(default_factory=dict)  # by name
    imports: dict[str, str] = field(default_factory=dict)  # by the name they bind
    objects: dict[str, Any] = field(default_factory=dict)  # what a name stands for

    def add(self, thing: Any, name: str = "") -> str:
        """Take in a function or class, of another package as an import. Returns its name in the text."""
        thing = inspect.unwrap(thing)
        name = name or thing.__name__
        if self.seen(name, thing):
            return name
        if not (getattr(thing, "__module__", None) or "").startswith(_PACKAGE):
            self.imports[name] = _import(thing, name)
            return name
        if "<" in thing.__qualname__:
            raise ValueError(
                f"{thing.__qualname__} is made inside another function, so it cannot be written into a file. Define "
                "it at the top of a module."
            )
        source = textwrap.dedent(inspect.getsource(thing))
        self.needs(source, sys.modules[thing.__module__])
        self.definitions[name] = _without_examples(source)
        return name

    def seen(self, name: str, thing: Any) -> bool:
        """Whether the text has this already. Two things of one name cannot live in one file."""
        if name in self.objects and self.objects[name] is not thing:
            raise ValueError(f"Two things are called {name}: {self.objects[name]!r} and {thing!r}. Rename one of them.")
        known = name in self.objects
        self.objects[name] = thing
        return known

    def needs(self, source: str, module: ModuleType) -> None:
        """Take in what a piece of a module's source refers to."""
        for name in _names(ast.parse(source)):
            if name not in vars(module) or (hasattr(builtins, name) and getattr(builtins, name) is vars(module)[name]):
                continue
            value = vars(module)[name]
            if isinstance(value, ModuleType) and value.__name__ in sys.modules:  # torch.ops.aten is none to import
                self.imports[name] = _import_module(value, name)
            elif inspect.isroutine(value) or inspect.isclass(value) or hasattr(value, "__wrapped__"):
                self.add(value, name)
            elif not self.seen(name, value):
                text = _assignment(module, name)
                if text is None:  # imported from elsewhere under this name
                    self.imports[name] = f"from {value.__module__} import {name}"
                else:
                    self.needs(text, module)
                    self.definitions[name] = text


def _names(tree: ast.AST) -> Iterator[str]:
    """Names that code refers to when it runs: annotations are not evaluated."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.AST):
                yield from _names(node)


def _import(thing: Any, name: str) -> str:
    """The line that imports a function or class of another package."""
    module = "torch" if thing.__module__ is None or thing.__module__ == "torch._tensor" else thing.__module__
    module = {"_operator": "operator"}.get(module, module)
    return f"from {module} import {thing.__name__}" + (f" as {name}" if name != thing.__name__ else "")


def _import_module(module: ModuleType, name: str) -> str:
    return f"import {module.__name__}" + (f" as {name}" if name != module.__name__ else "")


def _assignment(module: ModuleType, name: str) -> str | None:
    """The statements at the top of a module that give a name its value."""
    lines = []
    for node in _tree(module).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            lines.append(ast.get_source_segment(inspect.getsource(module), node) or "")
    return "\n".join(lines) if lines else None


@lru_cache(maxsize=64)
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _without_examples(source: str) -> str:
    """Source whose docstrings have lost their examples, which import the package."""
    return re.sub(r'\n\s*\n\s*>>> .*?\n(?=\s*""")', "\n", source, flags=re.DOTALL).rstrip()
