"""`omniplat conformance`: run the suite against a backend, or render a report of it.

The suite runs in a pytest of its own: no configuration, conftest file or plugin of the folder it is started in, or of
the environment, takes part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omniplat.cli.output import print_json
from omniplat.conformance.render import FORMATS, render
from omniplat.conformance.report import read_report
from omniplat.errors import BackendNotInstalledError, UsageError
from omniplat.registry import BACKENDS, default_registry, is_installed

_PLUGIN = "omniplat.conformance.plugin"
#: pytest's exit codes for passed, failed tests and nothing collected: the others mean that the run itself broke.
_RAN = (0, 1)


def conformance_command(
    name: str,
    *,
    profile: str,
    report: Path | None,
    known_failures: Path | None,
    commit: str,
    render_as: str | None,
    allow_partial: bool,
    select: str | None,
    jobs: int,
    emulated: str | None,
    json_output: bool,
) -> int:
    """Body of the command. Returns 0 for success (and partial where allowed), else 1.

    With `render_as`, `name` is a report's file (or with a backend's name, its fresh report is rendered).
    """
    if render_as is not None and render_as not in FORMATS:
        raise UsageError(f"cannot render {render_as!r}; known: {', '.join(FORMATS)}")
    if render_as is not None and name.endswith(".json"):
        document = read_report(Path(name))
    else:
        document = _run(
            name,
            profile,
            report,
            known_failures,
            commit,
            select,
            jobs,
            emulated,
            quiet=json_output or render_as is not None,
        )
    if json_output:
        print_json(document)
    elif render_as is not None:
        sys.stdout.write(render(document, render_as))
    elif report is not None:
        print(f"report: {report}")
    accepted = ("success", "partial") if allow_partial else ("success",)
    return 0 if document["result"] in accepted else 1


def _run(
    name: str,
    profile: str,
    report: Path | None,
    known_failures: Path | None,
    commit: str,
    select: str | None,
    jobs: int,
    emulated: str | None,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Run the suite; its report. Raises the errors of an unknown backend and of missing libraries first."""
    default_registry().load(BACKENDS, name)
    for library in ("pytest", "torch", *(("pytest-xdist",) if jobs > 1 else ())):
        if not is_installed(library):
            line = 'pip install "omniplat[conformance]"'
            raise BackendNotInstalledError("conformance", library, line, kind="suite")
    with tempfile.TemporaryDirectory(prefix="omniplat-conformance-") as folder:
        written = report.absolute() if report is not None else Path(folder) / "report.json"
        _make_room(written)
        options = ["--omniplat-backend", name, "--omniplat-profile", profile, "--omniplat-report", str(written)]
        if known_failures is not None:
            options += ["--omniplat-known-failures", str(known_failures.absolute())]
        if commit:
            options += ["--omniplat-commit", commit]
        if emulated:
            options += ["--omniplat-emulate", emulated]
        if select:
            options += ["-k", select]
        code = _pytest(options, Path(folder), jobs, quiet=quiet)
        if code not in _RAN and not written.is_file():
            raise UsageError(f"the suite did not run: pytest ended with exit code {code}")
        return read_report(written)


def _make_room(report: Path) -> None:
    """A folder for the report, and no earlier one; raises UsageError before minutes go into one that has no place."""
    if report.exists() and not report.is_file():
        raise UsageError(f"report {report} exists and is no file")
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.touch()
        report.unlink()
    except OSError as error:
        raise UsageError(f"report {report} cannot be written: {error.strerror}") from error


def _pytest(options: Sequence[str], folder: Path, jobs: int, *, quiet: bool) -> int:
    """pytest with the suite and nothing else, in a process of its own, or in `jobs` of them."""
    ini = folder / "pytest.ini"
    # what torch says of itself while it compiles is nothing that an author could mend
    ini.write_text("[pytest]\nfilterwarnings =\n    ignore::DeprecationWarning:torch\\..*\n", encoding="utf-8")
    argv = [sys.executable, "-m", "pytest", "-p", _PLUGIN, "--pyargs", "omniplat.conformance.suite", "-c", str(ini)]
    argv += ["--rootdir", str(folder), "--noconftest", "-p", "no:cacheprovider", "-q", "--no-header", "-rN"]
    # torch logs much while it compiles, and one fault of a kernel fails dozens of checks: whole tracebacks only of
    # checks that were picked
    argv += ["-p", "no:logging", "--tb=short" if "-k" in options else "--tb=line"]
    argv += ["--basetemp", str(folder / "tmp"), *options]
    environ = {key: text for key, text in os.environ.items() if not key.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if jobs > 1:
        # checks take from a millisecond to a minute: whoever has none left takes others'
        argv += ["-p", "xdist.plugin", "--numprocesses", str(jobs), "--dist", "worksteal"]
        share = str(max(1, (os.cpu_count() or 1) // jobs))
        environ = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share, **environ}
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(argv, env=environ, stdout=output, check=False).returncode
