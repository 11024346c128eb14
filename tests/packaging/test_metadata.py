"""What the distribution says of itself."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import omniplat
from omniplat.backend import BackendSpec
from omniplat.registry import BACKENDS, default_registry
from tests.packaging import pyproject
from tests.plugins.install import read_pyproject

PROJECT = pyproject.read()["project"]
BASE = {"ml-dtypes", "msgspec", "numpy", "packaging", "rich", "safetensors", "stevedore", "typer"}
EXTRAS = {
    "cpu",
    "cuda",
    "rocm",
    "xpu",
    "ascend",
    "vllm",
    "hub",
    "gguf",
    "quantize",
    "ray",
    "docs",
    "dev",
    "conformance",
}
ACCELERATORS = ("cuda", "rocm", "xpu", "ascend")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the source distribution as an index would have it; offline."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(pyproject.ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def declared() -> list[Requirement]:
    texts = list(PROJECT["dependencies"])
    for requirements in PROJECT["optional-dependencies"].values():
        texts += requirements
    texts += pyproject.read()["build-system"]["requires"]
    for folder in sorted((pyproject.ROOT / "tests" / "plugins").glob("*/pyproject.toml")):
        texts += read_pyproject(folder.parent)["project"]["dependencies"]
    return [Requirement(text) for text in texts]


def test_aiter_is_no_dependency() -> None:
    """The index has an `aiter` that is unrelated to AMD's library, whose distribution is `amd-aiter`."""
    assert "aiter" not in {canonicalize_name(requirement.name) for requirement in declared()}


def test_aiter_is_no_dependency_of_a_backend() -> None:
    for name in ("cpu", *ACCELERATORS):
        spec = default_registry().load(BACKENDS, name)
        assert isinstance(spec, BackendSpec)
        texts = [
            *spec.distributions,
            *spec.optional,
            *(text for capability in spec.capabilities for text in capability.requires),
        ]
        assert "aiter" not in {canonicalize_name(Requirement(text).name) for text in texts}
        assert not re.search(r"install\b.*[\s\"']aiter\b", spec.install)


def test_base_dependencies_bring_no_torch() -> None:
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} == BASE


def test_extras() -> None:
    assert set(PROJECT["optional-dependencies"]) == EXTRAS


def test_torch_is_pinned_nowhere() -> None:
    for requirement in declared():
        if requirement.name.startswith("torch"):
            assert {specifier.operator for specifier in requirement.specifier} <= {">="}


def test_version_is_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert version("omniplat") == omniplat.__version__
    assigned = re.compile(r"^(__version__|version)\s*(:\s*\w+\s*)?=\s*[\"']", re.MULTILINE)
    sources = [*pyproject.ROOT.glob("omniplat/**/*.py"), *pyproject.ROOT.glob("backends/**/*.py")]
    sources.append(pyproject.ROOT / "pyproject.toml")
    found = [path.name for path in sources if assigned.search(path.read_text(encoding="utf-8"))]
    assert found == ["_version.py"]


def test_entry_points_of_first_party_backends() -> None:
    points = PROJECT["entry-points"]["omniplat.backends"]
    assert set(points) == {"cpu", *ACCELERATORS}
    assert all(points[name] == f"omniplat_{name}.spec:SPEC" for name in ACCELERATORS)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_spec_asks_for_what_its_extra_brings(name: str) -> None:
    """A backend's `distributions` and its extra say the same, but for what the index cannot give, or another brings."""
    spec = default_registry().load(BACKENDS, name)
    extra = {Requirement(text).name: text for text in PROJECT["optional-dependencies"][name]}
    needed = {Requirement(text).name: text for text in spec.distributions}
    by_other_means = {
        "rocm": {"amd-aiter", "flydsl", "triton"},
        "xpu": {"triton"},
        "ascend": {"torch"},
    }.get(name, set())
    assert set(needed) - by_other_means == set(extra)
    assert all(needed[distribution] == text for distribution, text in extra.items())
    assert not {Requirement(text).name for text in spec.optional} & (set(needed) | set(extra))
    assert spec.install == f'pip install "omniplat[{name}]"'


def test_wheel_has_five_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert tops == {"omniplat", *(f"omniplat_{name}" for name in ACCELERATORS)}
    assert "omniplat/py.typed" in wheel.namelist()
    assert all(f"omniplat_{name}/spec.py" in wheel.namelist() for name in ACCELERATORS)


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    assert "aiter" not in {canonicalize_name(requirement.name) for requirement in requirements}
    assert set(metadata.get_all("Provides-Extra") or []) == EXTRAS
    assert metadata["Version"] == omniplat.__version__
    assert any(entry.endswith("licenses/LICENSE") for entry in wheel.namelist())


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    shipped = set(wheel.namelist())
    for top in (Path("omniplat"), *(Path("backends") / name / f"omniplat_{name}" for name in ACCELERATORS)):
        for path in (pyproject.ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = path.relative_to((pyproject.ROOT / top).parent).as_posix()
                assert inside in shipped
