"""What a Python package defines, read from its source: nothing of it is imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path


class Sources:
    """A folder with packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def signature(self, module: str, name: str) -> str:
        """ "name(a, b=1)", without annotations, of the function that `from module import name` gives; "" of none."""
        found = self._definition(module, name, frozenset())
        if not isinstance(found, ast.FunctionDef):
            return ""
        for node in ast.walk(found.args):
            if isinstance(node, ast.arg):
                node.annotation = None
        return f"{name}({ast.unparse(found.args)})"

    def assigns(self, module: str, name: str) -> bool:
        """True where the module has a variable of that name."""
        return isinstance(self._definition(module, name, frozenset()), ast.Assign)

    def _definition(self, module: str, name: str, seen: frozenset[str]) -> ast.stmt | None:
        """The last definition of a name, through the imports of a module, in whatever block they are."""
        path = self._file(module)
        if path is None or module in seen:
            return None
        nodes = list(ast.walk(ast.parse(path.read_text())))
        own = [node for node in nodes if _defines(node, name)]
        if own:
            return own[-1]  # type: ignore[return-value]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                imported = {alias.asname or alias.name: alias.name for alias in node.names}
                if name in imported or "*" in imported:
                    source = _absolute(node, module, is_package=path.name == "__init__.py")
                    found = self._definition(source, imported.get(name, name), seen | {module})
                    if found is not None:
                        return found
        return None

    def _file(self, module: str) -> Path | None:
        stem = self._folder.joinpath(*module.split("."))
        held = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
        return held or self._moved(module)

    def _moved(self, module: str) -> Path | None:
        """Where a package's `_BACKWARD_COMPAT_MAP` says that a module went."""
        package, _, name = module.rpartition(".")
        init = self._folder.joinpath(*package.split("."), "__init__.py")
        if not package or not init.is_file():
            return None
        for node in ast.parse(init.read_text()).body:
            if _defines(node, "_BACKWARD_COMPAT_MAP"):
                assert isinstance(node, ast.Assign)
                moved = ast.literal_eval(node.value).get(name)
                return self._file(f"{package}.{moved}") if moved else None
        return None


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == name
    return isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def enum_members(header: str, name: str) -> dict[str, int]:
    """Members of an `enum class` of C++, counted on from the last that has a number; none where there is no such."""
    found = re.search(rf"enum class {name}\b[^{{]*\{{(.*?)\}}", header, re.DOTALL)
    members: dict[str, int] = {}
    following = 0
    for text in re.sub(r"//.*", "", found[1] if found else "").split(","):
        member, _, number = (part.strip() for part in text.partition("="))
        if member:
            members[member] = int(number) if number else following
            following = members[member] + 1
    return members
