"""What importing and planning cost, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import omniplat
from tests.packaging import pyproject

EXAMPLE = pyproject.ROOT / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"
HEAVY = ("torch", "torch_npu", "triton", "vllm", "transformers", "huggingface_hub", "ray")
REPORT = f"import json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"


def modules_after(code: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def test_import_is_light(tmp_path: Path) -> None:
    assert modules_after("import omniplat", tmp_path) == []


def test_import_loads_no_module_but_the_version(tmp_path: Path) -> None:
    code = "import omniplat, sys; print(sorted(m for m in sys.modules if m.startswith(('omniplat.', 'numpy', 'rich'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "['omniplat._version']"


def test_public_names_are_light(tmp_path: Path) -> None:
    code = "import omniplat\nfor name in ('Scheme', 'backends', 'devices', 'errors'): getattr(omniplat, name)"
    assert modules_after(code, tmp_path) == []


def test_every_spec_and_probe_is_light(tmp_path: Path) -> None:
    code = "import omniplat\nomniplat.backends(); omniplat.devices()"
    assert modules_after(code, tmp_path) == []


def test_info_is_light(tmp_path: Path) -> None:
    assert modules_after("from omniplat.cli.info import info\ninfo(True)", tmp_path) == []


@pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the example checkpoint is not here")
@pytest.mark.parametrize("device", ["cpu", "cuda:sm90"])
def test_plan_is_light(tmp_path: Path, device: str) -> None:
    code = f"import omniplat\nomniplat.plan({str(EXAMPLE)!r}, device={device!r})"
    assert modules_after(code, tmp_path) == []


def test_public_names() -> None:
    assert set(omniplat.__all__) <= set(dir(omniplat))
    assert omniplat.Scheme.parse("mxfp8/mxfp8").id == "mxfp8/mxfp8"
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        omniplat.nonesuch  # noqa: B018


def test_no_function_is_shadowed_by_a_module_of_its_name() -> None:
    modules = {path.stem for path in Path(omniplat.__file__).parent.glob("*.py")}
    modules |= {path.parent.name for path in Path(omniplat.__file__).parent.glob("*/__init__.py")}
    shadowed = {name for name in omniplat.__all__ if name in modules and not name.startswith("__")}
    assert shadowed <= {"errors"}  # exported as the module that it is
