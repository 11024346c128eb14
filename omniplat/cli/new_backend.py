"""`omniplat new-backend NAME`: write a package with a backend that works and passes the conformance suite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from omniplat.cli.output import print_json
from omniplat.errors import UsageError
from omniplat.registry import BACKENDS, default_registry

SCHEMA = "omniplat.new-backend/1"

_TEMPLATES = Path(__file__).parent / "templates" / "backend"
#: Template -> where it goes; `{package}` is the import package.
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "init.py.txt": "{package}/__init__.py",
    "spec.py.txt": "{package}/spec.py",
    "kernels.py.txt": "{package}/kernels.py",
}


def new_backend_command(name: str, directory: Path | None, *, json_output: bool) -> int:
    """Body of the command.

    Raises UsageError for a name that cannot be one or is another package's, and a folder that holds something.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(f"a backend's name is lower-case letters, digits and single hyphens, found {name!r}")
    distribution = f"omniplat-{name}"
    for plugin in default_registry().plugins(BACKENDS):
        # two packages that claim one name are a conflict, and neither loads; its own package may be written again
        if plugin.name == name and plugin.distribution.partition(" ")[0] != distribution:
            raise UsageError(f"backend {name} exists: {plugin.distribution} registers it; choose another name")
    package = distribution.replace("-", "_")
    folder = directory or Path(distribution)
    marks = {"@name@": name, "@distribution@": distribution, "@package@": package}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is no empty folder")
        _write(folder, marks)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    if json_output:
        files = [target.format(package=package) for target in _FILES.values()]
        print_json({"schema": SCHEMA, "directory": str(folder), "files": files})
        return 0
    print(f"wrote {folder}; next:")
    print(f'  pip install "omniplat[conformance]" -e {folder}')
    print(f"  omniplat conformance {name} --profile quick")
    return 0


def _write(folder: Path, marks: Mapping[str, str]) -> None:
    """The templates below `folder`, with what stands for each mark; raises OSError."""
    for template, target in _FILES.items():
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        for mark, value in marks.items():
            text = text.replace(mark, value)
        path = folder / target.format(package=marks["@package@"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
