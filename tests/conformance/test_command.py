"""`omniplat conformance` from a folder that is nobody's, and the author's guide as a new user would try it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.conformance.conftest import environment
from tests.packaging.pyproject import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def command(folder: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "omniplat", "conformance", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder, env=environment(site))


def test_a_part_of_the_suite_is_no_success(tmp_path: Path, site: Path) -> None:
    """The folder's own configuration takes no part."""
    (tmp_path / "conftest.py").write_text("raise SystemExit('not mine')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --nonesuch\n")
    select = ("--profile", "quick", "-k", "unique")
    done = command(tmp_path, site, "zoo-correct", *select, "--report", "r.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PARTIAL: zoo-correct" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["counts"]["passed"] == 1
    done = command(tmp_path, site, "zoo-correct", *select, "--allow-partial", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["result"] == "partial"
    done = command(tmp_path, site, "r.json", "--render", "junit")
    assert done.stdout.startswith("<?xml")


def test_wrong_usage(tmp_path: Path, site: Path) -> None:
    for arguments in (("nonesuch",), ("toy", "--render", "pdf"), ("absent.json", "--render", "text")):
        done = command(tmp_path, site, *arguments)
        assert done.returncode == 2, done.stdout
        assert "error: " in done.stderr
    assert command(tmp_path, site, "toy", "--profile", "nonesuch").returncode == 2


def test_the_guide_for_authors_makes_a_backend_that_passes(tmp_path: Path) -> None:
    """Its code, typed into files, is a backend that conforms."""
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    spec, kernels = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    package = tmp_path / "omniplat_acme"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "spec.py").write_text(spec)
    (package / "kernels.py").write_text(kernels)
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (entry,) = re.findall(r"^acme = \"(.*)\"$", toml, re.MULTILINE)
    info = tmp_path / "omniplat_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omniplat-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[omniplat.backends]\nacme = {entry}\n")
    done = command(tmp_path, tmp_path, "acme", "--profile", "quick", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["result"], report["failed"]) == (0, "success", [])


def test_a_new_backend_conforms_at_once(tmp_path: Path, site: Path) -> None:
    argv = [sys.executable, "-m", "omniplat", "new-backend"]
    done = subprocess.run([*argv, "two-words"], capture_output=True, text=True, check=True, cwd=tmp_path)
    folder = tmp_path / "omniplat-two-words"
    assert 'pip install "omniplat[conformance]" -e omniplat-two-words' in done.stdout
    assert "omniplat conformance two-words" in done.stdout
    with (folder / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    info = folder / "omniplat_two_words-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = "".join(f"{k} = {v}\n" for k, v in project["entry-points"]["omniplat.backends"].items())
    (info / "entry_points.txt").write_text(f"[omniplat.backends]\n{entries}")
    done = command(tmp_path, folder, "two-words", "--profile", "quick", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["result"], report["failed"]) == (0, "success", [])
    done = subprocess.run([*argv, "other", "--json"], capture_output=True, text=True, check=True, cwd=tmp_path)
    written = json.loads(done.stdout)
    assert all((tmp_path / written["directory"] / path).is_file() for path in written["files"])
    for name, words in (
        ("two-words", "no empty folder"), ("Two Words", "lower-case"), ("../up", "lower-case"),
        *((taken, "choose another name") for taken in ("cpu", "cuda", "rocm", "xpu", "ascend")),
    ):  # fmt: skip
        done = subprocess.run([*argv, name], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr


def test_the_matrix_answers_from_the_package(tmp_path: Path, site: Path) -> None:
    def matrix(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "omniplat", "matrix", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(site))

    whole = json.loads(matrix("--json").stdout)
    assert whole["schema"] == "omniplat.matrix/1"
    assert {row["backend"] for row in whole["rows"]} >= {"cpu", "cuda", "rocm", "xpu", "ascend", "zoo-correct"}
    done = matrix("--device", "cpu", "--method", "mxfp4", "--json")
    assert done.returncode == 0
    rows = [row for row in json.loads(done.stdout)["rows"] if row["backend"] == "cpu"]
    assert {row["op"] for row in rows} == {"linear", "moe"}
    assert all(row["evidence"].startswith("verified on cpu:") for row in rows)
    assert all(row["loads"] for row in rows)
    planned = next(row for row in whole["rows"] if not row["loads"] and row["archs"] and row["backend"] == "cuda")
    text = matrix("--device", f"cuda:{planned['archs'][0]}").stdout
    assert "declared; plans only" in " ".join(text.split())
    text = matrix("--device", "cuda:sm90", "--method", "fp8").stdout
    assert "scaled_mm_row" in text
    assert "expert_loop" not in text
    assert matrix("--device", "npu:310p", "--method", "nvfp4").returncode == 1
    for wrong in (("--method", "nonesuch"), ("--device", "tpu")):
        done = matrix(*wrong)
        assert done.returncode == 2
        assert "error: " in done.stderr
