"""Compare the schemas that emulations register with those of the vendors' own libraries, on a machine without any.

    python tests/emulation/genuine.py KIND [WHEEL]

downloads the wheel that KIND's emulation stands for (or takes the given file), loads its libraries and prints every
difference; exit code 1 where there is one. The libraries link to a driver that is absent here: everything that they
ask for and nobody defines becomes an empty function of a library that a C compiler makes. Only the registration of
operators runs. Nothing is ever called through this, and it must run in a process of its own.

Needs nm and readelf (binutils), a C compiler, and the torch that the wheel was built for.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from omniplat.emulation.core import Vendor, vendor_of
from omniplat.emulation.schemas import of_version


@dataclass(frozen=True)
class Genuine:
    """`libraries` of the wheel to load, in order, in whichever folder of it they lie; `real` names symbols that
    registration runs, and the expression of a, b and n that does their work: an empty function would corrupt what is
    registered."""

    libraries: tuple[str, ...]
    real: tuple[tuple[str, str], ...] = ()


GENUINE: dict[str, Genuine] = {
    "cuda": Genuine(("_C_stable_libtorch.abi3.so",)),
    "npu": Genuine(("torch_npu/lib/libtorch_npu.so",)),
    "xpu": Genuine(
        tuple(f"vllm_xpu_kernels/{name}.abi3.so" for name in ("_C", "_moe_C", "_xpu_C")),
        real=(("_intel_fast_memcpy", "memmove(a, b, n)"), ("_intel_fast_memset", "memset(a, (int)(long)b, n)")),
    ),
}


#: Libraries of every process whose symbols a wheel may ask for without a version.
_RUNTIME = ("libstdc++.so.6", "libm.so.6")


def run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def symbols(library: Path, which: str) -> set[str]:
    """Dynamic symbols of a library: what is "--defined-only", or "--undefined-only" and neither weak nor versioned, as
    glibc's are (`name@GLIBC_2.2.5`)."""
    lines = [line.split() for line in run("nm", "--dynamic", which, library).splitlines() if line.strip()]
    if which == "--defined-only":
        return {words[-1].partition("@")[0] for words in lines}
    return {words[-1] for words in lines if words[-2] == "U" and "@" not in words[-1]}


def needed(library: Path) -> set[str]:
    lines = run("readelf", "--dynamic", "--wide", library).splitlines()
    return {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}


def build_stand_ins(wheel: Path, real: tuple[tuple[str, str], ...], folder: Path) -> list[Path]:
    """Libraries that define all that those of `wheel` lack, one for each name that they want and that is nowhere."""
    held = [path for path in wheel.rglob("*.so*") if path.is_file()]
    here = [*Path(torch.__file__).parent.joinpath("lib").glob("*.so*"), *held]
    defined = set().union(*(symbols(library, "--defined-only") for library in here))
    asked = set().union(*(symbols(library, "--undefined-only") for library in held))
    running = [ctypes.CDLL(name) for name in (None, *_RUNTIME)]
    lacking = sorted(name for name in asked - defined if not any(hasattr(library, name) for library in running))
    doers = dict(real)
    lines = ["#include <string.h>"]
    for index, name in enumerate(lacking):
        body = f"return {doers[name]};" if name in doers else "return 0;"
        lines.append(f'void *s{index}(void *a, void *b, unsigned long n) __asm__("{name}");')
        lines.append(f"void *s{index}(void *a, void *b, unsigned long n) {{ {body} }}")
    (folder / "stand_in.c").write_text("\n".join(lines) + "\n")
    (folder / "empty.c").write_text("int nothing;\n")
    wanted = set().union(*(needed(library) for library in held)) - {path.name for path in here}
    made = []
    for name in sorted(filter(is_missing, wanted)):
        source = folder / ("empty.c" if made else "stand_in.c")
        run("cc", "-shared", "-fPIC", "-w", "-o", folder / name, source, f"-Wl,-soname,{name}")
        made.append(folder / name)
    return made


def is_missing(name: str) -> bool:
    """True for a library that the dynamic linker does not find by itself."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return True
    return False


def genuine_schemas(kind: str, vendor: Vendor, wheel: Path, folder: Path) -> set[str]:
    """What torch prints of the operators that the wheel's libraries register in the vendor's namespaces."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    libraries = [next((folder / "wheel").rglob(name)) for name in GENUINE[kind].libraries]
    before = {str(schema) for schema in torch._C._jit_get_all_schemas()}
    for stand_in in build_stand_ins(folder / "wheel", GENUINE[kind].real, folder):
        ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)
    for library in libraries:
        ctypes.CDLL(str(library), mode=os.RTLD_LAZY | ctypes.RTLD_GLOBAL)
    namespaces = tuple(sorted({f"{schema.namespace}::" for schema in vendor.schemas}))
    found = {str(schema) for schema in torch._C._jit_get_all_schemas()} - before
    return {text for text in found if text.startswith(namespaces)}


def main(kind: str, wheel: str = "") -> int:
    vendor = vendor_of(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(wheel)
        if not wheel:
            asked = f"{vendor.library}=={vendor.version}"
            run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, asked)
            path = next(Path(folder).glob("*.whl"))
        genuine = genuine_schemas(kind, vendor, path, Path(folder))
    own = of_version(vendor.schemas, vendor.version)
    missing = [schema for schema in own if _printed(schema.qualified, schema.text) not in genuine]
    for schema in missing:
        print(f"{schema.qualified} is emulated as\n  {schema.namespace}::{schema.text}\nand registered as")
        same = sorted(text for text in genuine if text.partition("(")[0] == schema.qualified)
        print("\n".join(f"  {text}" for text in same) or "  nothing")
    print(f"{vendor.library} {vendor.version}: {len(own) - len(missing)} of {len(own)} schemas are the genuine ones")
    return 1 if missing or not own else 0


def _printed(qualified: str, text: str) -> str:
    """A schema as torch prints it."""
    return str(torch._C.parse_schema(f"{qualified.partition('::')[0]}::{text}"))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in GENUINE:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
