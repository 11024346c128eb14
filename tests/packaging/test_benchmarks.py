"""What the benchmarks import is there: they run on devices, so nothing else would tell before somebody measures."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
#: Where modules of this repository lie.
SOURCES = (ROOT / "benchmarks", ROOT, *sorted(path for path in (ROOT / "backends").iterdir() if path.is_dir()))


def file_of(module: str) -> Path | None:
    parts = Path(*module.split("."))
    candidates = [
        path for source in SOURCES for path in ((source / parts).with_suffix(".py"), source / parts / "__init__.py")
    ]
    return next((path for path in candidates if path.is_file()), None)


def names_of(path: Path) -> set[str]:
    """What a module defines or imports at its top level, and the modules of its package."""
    found = {child.stem for child in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                found |= {alias.asname or alias.name for alias in names}
    return found


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_imports_are_there(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and (source := file_of(node.module)):
            missing += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names_of(source)]
    assert not missing


def test_benchmarks_import_from_here() -> None:
    """The check above looks at something."""
    found = [
        node.module
        for path in BENCHMARKS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and file_of(node.module)
    ]
    assert {"cuda_linear", "omniplat.scheme"} <= set(found)
