"""Compare the signatures that emulations give to a vendor's Python functions with those of the vendor's own package.

    python -m tests.emulation.genuine_python LIBRARY [FOLDER VERSION]

downloads the wheel of LIBRARY (amd-aiter, auto-round-lib) that the backend asks for, or takes a folder with its source,
say a checkout, and the version that it is. It is read without importing anything; every difference is printed, and the
exit code is 1 where there is one. The newest release is taken, so that one in which something changed is noticed when
it comes. Where the index has none that the backend takes, the newest there is gets compared, and that is said.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from omniplat.emulation import emulate
from omniplat.emulation.core import vendor_of
from omniplat.emulation.schemas import OpSchema, of_version
from omniplat.registry import BACKENDS, default_registry
from tests.emulation.sources import Sources, enum_members


@dataclass(frozen=True)
class Package:
    """`device` is one that is emulated with it. `headers` are where a wheel or a checkout has the C++ header that its
    `enums` are read from; `variables` is a module of constants."""

    device: str
    headers: tuple[str, ...] = ()
    enums: tuple[str, ...] = ()
    variables: str = ""

    @property
    def functions(self) -> tuple[OpSchema, ...]:
        return vendor_of(self.kind).functions

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


PACKAGES = {
    "amd-aiter": Package(
        "rocm:gfx950",
        headers=("aiter_meta/csrc/include/aiter_enum.h", "csrc/include/aiter_enum.h"),
        enums=("QuantType", "ActivationType"),
        variables="aiter.utility.dtypes",
    ),
    "auto-round-lib": Package("xpu:bmg"),
}
#: pip's words where it could ask the index, and nothing fits.
NOTHING_FITS = "No matching distribution found"


def differences(package: Package, folder: Path, version: str) -> list[str]:
    """One text for everything that the emulation has otherwise than the source in `folder`, or that is not there."""
    sources, found = Sources(folder), []
    for schema in of_version(package.functions, version):
        genuine = sources.signature(schema.namespace, schema.name)
        if schema.text != genuine:
            found.append(f"{schema.namespace}: emulated as\n  {schema.text}\nand defined as\n  {genuine or 'nothing'}")
    header = next((folder / name for name in package.headers if (folder / name).is_file()), None)
    text = header.read_text() if header else ""
    with emulate(package.device):
        for name in package.enums:
            own = members(getattr(import_module("aiter"), name))
            defined = enum_members(text, name)
            if not own.items() <= defined.items():
                found.append(f"{name}: emulated as {own}, defined as {defined or 'nothing'}")
        names = vars(import_module(package.variables)) if package.variables else ()
        absent = [name for name in names if not name.startswith("__") and not sources.assigns(package.variables, name)]
    return found + [f"{package.variables}.{name} is not there" for name in absent]


def members(enum: type[Enum]) -> dict[str, int]:
    return {member.name: member.value for member in enum}


def download(requirement: str, folder: Path) -> Path | None:
    """The newest wheel that fits; None where the index has none. Raises CalledProcessError where pip fails."""
    asked = (sys.executable, "-m", "pip", "download", "--quiet", "--pre", "--no-deps", "--dest", folder, requirement)
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode and NOTHING_FITS in done.stderr:
        return None
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    return next(folder.glob("*.whl"))


def unpacked(library: str, package: Package, folder: Path) -> tuple[Path, str]:
    """The source of a downloaded wheel, and its version."""
    backend = default_registry().load(BACKENDS, package.kind)
    (wanted,) = (text for text in (*backend.distributions, *backend.optional) if Requirement(text).name == library)
    wheel = download(wanted, folder)
    if wheel is None:
        wheel = download(library, folder)
        if wheel is None:
            raise SystemExit(f"the index has no {library} at all")
        print(f"the index has no {wanted}: compared is the newest that it has")
    with zipfile.ZipFile(wheel) as archive:
        held = [item for item in archive.namelist() if item.endswith(".py") or item in package.headers]
        archive.extractall(folder / "source", held)
    return folder / "source", str(parse_wheel_filename(wheel.name)[1])


def main(library: str, source: str = "", version: str = "") -> int:
    package = PACKAGES[library]
    with tempfile.TemporaryDirectory() as folder:
        path, read = (Path(source), version) if source else unpacked(library, package, Path(folder))
        found = differences(package, path, read)
    print("\n".join(found), end="\n" if found else "")
    count = len(of_version(package.functions, read))
    print(f"{library} {read}: {count} functions, {len(found)} differences")
    return 1 if found or not count else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4) or sys.argv[1] not in PACKAGES:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
