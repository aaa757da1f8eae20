"""Arguments of a class that files of `conf/` configure, read from its source: importing drafters takes seconds."""

import ast
from collections.abc import Iterator

from specbench.common.storage import PROJECT

WORDS = {"None": "null", "True": "true", "False": "false"}  # as a command line has them


def of(path: str) -> dict[str, str]:
    """Optional arguments of a class's constructor and their defaults, by name.

    Those of its parents are among them where it has no constructor, or one that passes keyword arguments on.

    path: of the class, as `_target_` names it.
    """
    module, _, name = path.rpartition(".")
    source = PROJECT.joinpath(*module.split(".")).with_suffix(".py")
    if not source.is_file():
        return {}
    body = ast.parse(source.read_text()).body
    found: dict[str, str] = {}
    for cls in (node for node in body if isinstance(node, ast.ClassDef) and node.name == name):
        constructors = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        for constructor in constructors:
            found |= _with_defaults(constructor.args)
        if not constructors or constructors[0].args.kwarg:
            for parent in _parents(cls, body, module):
                found = of(parent) | found
    return found


def _with_defaults(arguments: ast.arguments) -> dict[str, str]:
    named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = zip(named, arguments.defaults, strict=True)
    written = ((argument.arg.removesuffix("_"), ast.unparse(default).strip("'")) for argument, default in pairs)
    return {name: WORDS.get(default, default) for name, default in written}


def _parents(cls: ast.ClassDef, body: list[ast.stmt], module: str) -> Iterator[str]:
    """Paths of the classes that a class of a module derives from."""
    imported = {alias.asname or alias.name: n.module for n in body if isinstance(n, ast.ImportFrom) for alias in n.names}
    for base in cls.bases:
        if isinstance(base, ast.Name):
            yield f"{imported.get(base.id, module)}.{base.id}"
