"""Compare the signatures that an emulation gives to a vendor's Python functions with those of the vendor's own package.

    python -m tests.emulation.genuine_python [FOLDER VERSION]

downloads the wheel of amd-aiter that the backend asks for (or takes a folder with its source, say a checkout, and the
version that it is), reads it without importing anything, and prints every difference; exit code 1 where there is one.
The newest release is taken, so that one in which something changed is noticed when it comes. Where the index has none
that the backend takes, the newest there is gets compared, and that is said: the emulation knows its signatures too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from enum import Enum
from pathlib import Path

from omniplat_rocm.spec import SPEC
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from omniplat.emulation import emulate
from omniplat.emulation.core import vendor_of
from omniplat.emulation.schemas import of_version
from tests.emulation.sources import Sources, enum_members

DEVICE = "rocm:gfx950"
KIND = DEVICE.partition(":")[0]
#: Where the wheel and a checkout have the header that the package reads its enums from.
HEADERS = ("aiter_meta/csrc/include/aiter_enum.h", "csrc/include/aiter_enum.h")
#: pip's words where it could ask the index, and nothing fits.
NOTHING_FITS = "No matching distribution found"


def differences(folder: Path, version: str) -> list[str]:
    """One text for everything that the emulation has otherwise than the source in `folder`, or that is not there."""
    sources, found = Sources(folder), []
    for schema in of_version(vendor_of(KIND).functions, version):
        genuine = sources.signature(schema.namespace, schema.name)
        if schema.text != genuine:
            found.append(f"{schema.namespace}: emulated as\n  {schema.text}\nand defined as\n  {genuine or 'nothing'}")
    header = next((folder / name for name in HEADERS if (folder / name).is_file()), None)
    text = header.read_text() if header else ""
    with emulate(DEVICE):
        import aiter

        for enum in (aiter.QuantType, aiter.ActivationType):
            own, genuine_members = members(enum), enum_members(text, enum.__name__)
            if not own.items() <= genuine_members.items():
                found.append(f"{enum.__name__}: emulated as {own}, defined as {genuine_members or 'nothing'}")
        dtypes = [name for name in vars(aiter.dtypes) if not name.startswith("__")]
    absent = [name for name in dtypes if not sources.assigns("aiter.utility.dtypes", name)]
    return found + [f"aiter.dtypes.{name} is not there" for name in absent]


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


def unpacked(folder: Path) -> tuple[Path, str]:
    """The source of a downloaded wheel, and its version."""
    name = vendor_of(KIND).library
    (wanted,) = (text for text in SPEC.distributions if Requirement(text).name == name)
    wheel = download(wanted, folder)
    if wheel is None:
        wheel = download(name, folder)
        if wheel is None:
            raise SystemExit(f"the index has no {name} at all")
        print(f"the index has no {wanted}: compared is the newest that it has")
    with zipfile.ZipFile(wheel) as archive:
        held = [item for item in archive.namelist() if item.endswith(".py") or item in HEADERS]
        archive.extractall(folder / "source", held)
    return folder / "source", str(parse_wheel_filename(wheel.name)[1])


def main(source: str = "", version: str = "") -> int:
    with tempfile.TemporaryDirectory() as folder:
        path, read = (Path(source), version) if source else unpacked(Path(folder))
        found = differences(path, read)
    print("\n".join(found), end="\n" if found else "")
    vendor = vendor_of(KIND)
    count = len(of_version(vendor.functions, read))
    print(f"{vendor.library} {read}: {count} functions, {len(found)} differences")
    return 1 if found or not count else 0


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
