"""One run of the suite inside pytest: which checks there are, which ran, and the verdict.

What should run is enumerated from the suite itself, not from what pytest collected: a check that was deselected,
removed by another plugin or lost with a worker is missing from the results and leaves the run partial.

Under pytest-xdist every worker has a session of its own. The controller's looks for the device, once, and makes the
report, which lists checks in the same order however many processes ran them; workers tell it what they found beside
outcomes.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from omniplat.conformance import suite
from omniplat.conformance.cases import PROFILES
from omniplat.conformance.checks import ATTRIBUTE, GROUPS, SUITE_SKIP, Check, HasId, capability_of, obstacle_of
from omniplat.conformance.known import KnownFailure, read_known_failures
from omniplat.conformance.report import Outcome, Problem, make_report, write_report
from omniplat.conformance.subject import Subject, find_subject
from omniplat.device import Device
from omniplat.errors import OmniplatError
from omniplat.registry import BACKENDS, default_registry

if TYPE_CHECKING:
    from omniplat.emulation import Emulation

_PROPERTY = "omniplat-check"
#: Under which the controller hands the device to workers, and they their problems to it.
_DEVICE, _PROBLEMS = "omniplat-device", "omniplat-problems"
_NONE = "none-declared"


def start(config: pytest.Config, name: str) -> Session:
    """The session of a run. Raises pytest.UsageError for options that are wrong and backends that do not load."""
    profile = str(config.getoption("--omniplat-profile"))
    if profile not in PROFILES:
        raise pytest.UsageError(f"--omniplat-profile {profile!r} is none of {', '.join(PROFILES)}")
    known = config.getoption("--omniplat-known-failures")
    report = config.getoption("--omniplat-report")
    try:
        emulation = _emulation(config)
        subject = _subject(config, name, emulation)
        entries = read_known_failures(Path(known)) if known else ()
    except OmniplatError as error:
        raise pytest.UsageError(error.message) from error
    commit = str(config.getoption("--omniplat-commit"))
    written = Path(report).absolute() if report else None
    return Session(subject, profile, entries, written, commit, emulation)


def _subject(config: pytest.Config, name: str, emulation: Emulation | None) -> Subject:
    """The backend on the device that is found here, or that the controller has found."""
    handed_over: dict[str, Any] | None = getattr(config, "workerinput", {}).get(_DEVICE)
    if handed_over is None:
        return find_subject(name, emulated=emulation.device if emulation is not None else None)
    device = Device(**handed_over["device"])
    return replace(Subject(default_registry().load(BACKENDS, name), device), **handed_over["found"])


def _emulation(config: pytest.Config) -> Emulation | None:
    """The emulation that the run asks for, on until pytest ends; None for a real device."""
    device = config.getoption("--omniplat-emulate")
    if not device:
        return None
    from omniplat.emulation import emulate

    stack = ExitStack()
    config.add_cleanup(stack.close)
    return stack.enter_context(emulate(str(device)))


class Session:
    """Pytest hooks of one run."""

    def __init__(
        self,
        subject: Subject,
        profile: str,
        known: tuple[KnownFailure, ...],
        report: Path | None,
        commit: str = "",
        emulation: Emulation | None = None,
    ) -> None:
        self._subject = subject
        self._profile = profile
        self._known = known
        self._report = report
        self._commit = commit
        self._emulation = emulation
        self._cases: dict[Callable[..., Any], tuple[HasId, ...]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._problems: list[Problem] = []
        self._started = time.monotonic()
        self.document: dict[str, Any] = {}

    # -- which checks there are ---------------------------------------------------------------------

    def generate(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize one function of the suite; one parameter set that is removed later where there is no case."""
        cases = self._of(getattr(metafunc.function, ATTRIBUTE))
        values: list[tuple[Subject, HasId | None]] = [(self._subject, case) for case in cases]
        metafunc.parametrize(
            ("subject", "case"), values or [(self._subject, None)], ids=[case.id for case in cases] or [_NONE]
        )

    def _of(self, found: Check) -> tuple[HasId, ...]:
        if found.generate not in self._cases:
            unique = {case.id: case for case in found.generate(self._subject, self._profile)}
            self._cases[found.generate] = tuple(unique.values())
        return self._cases[found.generate]

    def expected(self) -> tuple[str, ...]:
        """Ids of all checks of this backend and profile, in the order in which one process runs them."""
        checks = sorted(self._checks(), key=lambda item: GROUPS.index(item[0].group))
        return tuple(check_id(found, function.__name__, case) for found, function, case in checks)

    def _checks(self) -> Iterator[tuple[Check, FunctionType, HasId]]:
        """Every check with its function and its case."""
        for info in pkgutil.iter_modules(suite.__path__):
            module = importlib.import_module(f"{suite.__name__}.{info.name}")
            for name, function in vars(module).items():
                if name.startswith("test_") and (found := getattr(function, ATTRIBUTE, None)) is not None:
                    yield from ((found, function, case) for case in self._of(found))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = []
        for item in items:
            found = _check_of(item)
            if found is None:
                kept.append(item)
            elif _case_of(item) is not None:
                self._refuse_foreign_fixtures(item)
                kept.append(item)
        items[:] = sorted(kept, key=_position)

    def _refuse_foreign_fixtures(self, item: pytest.Item) -> None:
        """A fixture from elsewhere that acts on a check, by its name or by itself, makes it another check."""
        info = getattr(item, "_fixtureinfo", None)
        for name, definitions in (info.name2fixturedefs if info is not None else {}).items():
            for definition in definitions:
                origin = str(getattr(definition.func, "__module__", ""))
                if not origin.startswith(("_pytest.", "omniplat.conformance.")):
                    self._add(Problem("foreign-fixture", f"fixture {name!r} of {origin} acts on the suite's checks"))

    def _add(self, problem: Problem) -> None:
        if problem not in self._problems:
            self._problems.append(problem)

    # -- running ------------------------------------------------------------------------------------

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        found = _check_of(item)
        if found is None:
            return
        obstacle = obstacle_of(found, self._subject, _case_of(item))
        if obstacle is not None:
            pytest.skip(f"{SUITE_SKIP[obstacle.is_gap]}{obstacle.reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """A check whose calls the vendor's library would silently get wrong fails, whatever came out here."""
        before = len(self._emulation.violations) if self._emulation is not None else 0
        yield
        if self._emulation is not None and _check_of(item) is not None:
            found = self._emulation.violations[before:]
            assert not found, "the vendor would silently get this wrong: " + "; ".join(map(str, found))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        found = _check_of(item)
        if found is None:
            return report
        case = _case_of(item)
        text = check_id(found, _name_of(item), case)
        known = self._known_of(text)
        if known is not None and report.failed:
            report.outcome = "skipped"
            report.wasxfail = known.text
        elif known is not None and report.when == "call" and report.passed:
            report.outcome = "failed"
            report.longrepr = f"{text} is listed as a known failure and passes: remove {known.id!r} ({known.link})"
        capability = capability_of(case)
        name = capability.name if capability is not None else ""
        report.user_properties.append((_PROPERTY, {"id": text, "group": found.group, "capability": name}))
        return report

    def _known_of(self, text: str) -> KnownFailure | None:
        return next((entry for entry in self._known if entry.matches(text)), None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = list(report.user_properties)
        own = next((value for key, value in properties if key == _PROPERTY), None)
        if own is None:
            return
        before = self._outcomes.get(own["id"])
        seconds = report.duration + (before.seconds if before is not None else 0.0)
        if report.when != "call" and report.passed:
            return
        outcome, reason, gap = _judged(report)
        if before is not None and before.outcome == "failed":
            outcome, reason, gap = "failed", before.reason, False
        measured = {k: float(v) for k, v in properties if k != _PROPERTY}
        self._outcomes[own["id"]] = Outcome(
            own["id"], own["group"], own["capability"], outcome, reason, gap, seconds, measured
        )

    # -- workers ------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of pytest-xdist is about to start."""
        subject = self._subject
        found = {"missing": subject.missing, "distribution": subject.distribution, "versions": dict(subject.versions)}
        node.workerinput[_DEVICE] = {"device": asdict(subject.device), "found": found}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist has ended: what it handed over, which is nothing where it crashed."""
        for code, message in getattr(node, "workeroutput", {}).get(_PROBLEMS, ()):
            self._add(Problem(code, message))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """A worker ended within a test: a check has failed then, of which the worker can tell nothing any more."""
        path, _, test = crashitem.partition("::")
        for found, function, case in self._checks():
            file = f"{function.__module__.rpartition('.')[2]}.py"
            # pytest gives no path where it was given one module
            if test != f"{function.__name__}[{case.id}]" or Path(path).name not in ("", file):
                continue
            text, capability = check_id(found, function.__name__, case), capability_of(case)
            name = capability.name if capability is not None else ""
            known = self._known_of(text)
            outcome, reason = ("known", known.text) if known is not None else ("failed", "the process running it ended")
            self._outcomes[text] = Outcome(text, found.group, name, outcome, reason)

    # -- the verdict --------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        handed_over: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if handed_over is not None:
            handed_over[_PROBLEMS] = [(item.code, item.message) for item in self._problems]
            return
        expected = self.expected()
        for entry in self._known:
            if not any(entry.matches(text) for text in expected):
                self._problems.append(Problem("known-failure-matches-nothing", f"{entry.id!r} ({entry.link})"))
        outcomes = [self._outcomes[text] for text in dict.fromkeys(expected) if text in self._outcomes]
        self.document = make_report(
            self._subject,
            self._profile,
            outcomes,
            self._problems,
            left_out=len(set(expected)) - len(outcomes),
            seconds=time.monotonic() - self._started,
            plugins=_foreign_plugins(session.config),
            commit=self._commit,
        )
        if self._report is not None:
            write_report(self._report, self.document)
        if self.document["result"] == "failure" and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from omniplat.conformance.render import summary_lines

        terminalreporter.section(f"conformance of backend {self._subject.spec.name}")
        for line in summary_lines(self.document):
            terminalreporter.line(line)


def check_id(found: Check, function: str, case: object) -> str:
    """The id of a check in reports and lists of known failures."""
    return f"{found.group}/{function.removeprefix('test_')}:{getattr(case, 'id', _NONE)}"


def _check_of(item: pytest.Item) -> Check | None:
    found = getattr(getattr(item, "function", None), ATTRIBUTE, None)
    return found if isinstance(found, Check) else None


def _position(item: pytest.Item) -> int:
    found = _check_of(item)
    return GROUPS.index(found.group) if found is not None else len(GROUPS)


def _name_of(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", None) or item.name)


def _case_of(item: pytest.Item) -> object:
    specification = getattr(item, "callspec", None)
    return specification.params.get("case") if specification is not None else None


def _judged(report: pytest.TestReport) -> tuple[str, str, bool]:
    """(outcome, reason, whether it leaves the run partial) of one report."""
    if report.failed:
        return "failed", _last_line(report.longreprtext), False
    if report.passed:
        return "passed", "", False
    if hasattr(report, "wasxfail"):
        return "known", str(report.wasxfail), False
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    reason = str(reason).removeprefix("Skipped: ")
    for gap, prefix in SUITE_SKIP.items():
        if reason.startswith(prefix):
            return "skipped", reason.removeprefix(prefix), gap
    return "skipped", f"skipped from outside the suite: {reason}", True


def _last_line(text: str) -> str:
    """What a failure says: the assertion's message, without the traceback."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E")]
    return "\n".join(lines[:12]) if lines else text.strip().splitlines()[-1] if text.strip() else ""


def _foreign_plugins(config: pytest.Config) -> list[str]:
    """What else had a hand in the run: packages of plugins, and conftest files, that are not pytest's own."""
    names = []
    for name, plugin in config.pluginmanager.list_name_plugin():
        module = str(getattr(plugin, "__name__", type(plugin).__module__))
        if plugin is not None and not module.startswith(("_pytest", "omniplat.conformance")):
            names.append(Path(name).name if name.endswith(".py") else module.partition(".")[0])
    return sorted(set(names))
