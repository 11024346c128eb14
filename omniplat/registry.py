"""Plugins: what is installed, without importing any of it, and loading the one that was chosen.

`importlib.metadata` lists the entry points of a group and knows each one's distribution, so two distributions
that claim one name are seen before anything is imported. stevedore then loads exactly the entry point that was
chosen. A plugin that fails is reported where plugins are listed, and raises only when it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar, cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from omniplat.backend import SUPPORTED_API_VERSIONS, BackendProbe, BackendSpec
from omniplat.errors import (
    BackendApiError,
    BackendConflictError,
    BackendLoadError,
    BackendNotInstalledError,
    OmniplatError,
    UsageError,
)

if TYPE_CHECKING:
    from omniplat.formats.base import Format
    from omniplat.models.family import Family

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PluginGroup(Generic[T]):
    """One entry-point group: its name, what its plugins are called and export, and the check of that object."""

    name: str
    kind: str
    expected: str
    accepts: Callable[[Any], TypeGuard[T]]


def _is_backend(found: Any) -> TypeGuard[BackendSpec]:
    return isinstance(found, BackendSpec)


def _is_format(found: Any) -> TypeGuard[Format]:
    members = isinstance(getattr(found, "name", None), str), hasattr(found, "claims"), hasattr(found, "read")
    return not isinstance(found, type) and all(members)


def _is_families(found: Any) -> TypeGuard[tuple[Family, ...]]:
    from omniplat.models.family import Family

    return isinstance(found, tuple) and all(isinstance(family, Family) for family in found)


BACKENDS: PluginGroup[BackendSpec] = PluginGroup("omniplat.backends", "backend", "a BackendSpec", _is_backend)
FORMATS: PluginGroup[Format] = PluginGroup("omniplat.formats", "format", "a Format", _is_format)
MODELS: PluginGroup[tuple[Family, ...]] = PluginGroup(
    "omniplat.models", "model table", "a tuple of Family", _is_families
)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One name of a group and who registers it. `distributions` has more than one entry in a conflict.

    `install` is the pip line that brings the plugin with what it needs, read from the distribution's metadata.
    """

    group: str
    name: str
    value: str
    distributions: tuple[str, ...]
    install: str

    @property
    def distribution(self) -> str:
        return " and ".join(self.distributions)


@dataclass(frozen=True, slots=True)
class PluginRecord(Generic[T]):
    """A plugin that was examined. `state` is "loads", "not-installed", "broken", "conflict" or "incompatible".

    `loaded` is what it exports, None unless it loads; `problem` says why not; `error` is the exception itself.
    """

    plugin: Plugin
    state: str
    loaded: T | None = None
    problem: str = ""
    error: OmniplatError | None = None


def _label(dist: Distribution | None) -> str:
    return f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"


def _install_line(dist: Distribution | None, name: str) -> str:
    if dist is None:
        return ""
    extras = dist.metadata.get_all("Provides-Extra") or []
    return f'pip install "{dist.name}[{name}]"' if name in extras else f"pip install {dist.name}"


def applicable_requirements(dist: Distribution, extra: str) -> tuple[str, ...]:
    """Names of the distributions that `dist` requires, with those of its extra `extra`, in canonical spelling."""
    names = []
    for text in dist.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            names.append(canonicalize_name(requirement.name))
    return tuple(names)


def missing_requirement(error: BaseException, requirements: tuple[str, ...]) -> str | None:
    """The declared requirement whose absence explains an import error, or None.

    Only a ModuleNotFoundError can be explained, and only by a requirement that is not installed: a library that is
    here and fails to load is another problem, and "please install it" would be the wrong advice.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = canonicalize_name(error.name.partition(".")[0])
    for exact in (True, False):
        for name in requirements:
            if (name == module if exact else name.startswith(module + "-")) and not is_installed(name):
                return name
    return None


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


_STATES: tuple[tuple[type[OmniplatError], str], ...] = (
    (BackendConflictError, "conflict"),
    (BackendApiError, "incompatible"),
    (BackendNotInstalledError, "not-installed"),
)


class Registry:
    """The plugins of this environment. One instance may be used from several threads.

    Nothing is read before the first question; answers are kept until `refresh`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
        self._loaded: dict[tuple[str, str], object] = {}
        self._generation = 0

    def refresh(self) -> None:
        """Forget what was found; the next question looks again. Modules that are imported stay imported."""
        with self._lock:
            self._entries.clear()
            self._loaded.clear()
            self._generation += 1

    def plugins(self, group: PluginGroup[Any]) -> tuple[Plugin, ...]:
        """All plugins of a group, sorted by name. Imports none of them."""
        return tuple(_describe(group.name, name, found) for name, found in sorted(self._find(group.name).items()))

    def names(self, group: PluginGroup[Any]) -> tuple[str, ...]:
        return tuple(sorted(self._find(group.name)))

    def load(self, group: PluginGroup[T], name: str) -> T:
        """What the plugin `name` exports.

        Raises UsageError (no such name), BackendConflictError, BackendNotInstalledError, BackendLoadError or
        BackendApiError.
        """
        key = (group.name, name)
        with self._lock:
            if key in self._loaded:
                return cast(T, self._loaded[key])
            generation = self._generation
        found = self._find(group.name).get(name)
        if found is None:
            raise UsageError(*_unknown(name, group.name, self.plugins(group)))
        plugin = _describe(group.name, name, found)
        if len(found) > 1:
            raise BackendConflictError(name, group.name, plugin.distributions)
        # Imported without the lock: a plugin's import may take its time or start threads of its own.
        loaded = _validate(group, plugin, _import(group, plugin, found[0]))
        with self._lock:
            if generation == self._generation:
                self._loaded[key] = loaded
        return loaded

    def examine(self, group: PluginGroup[T]) -> tuple[PluginRecord[T], ...]:
        """Load every plugin of a group and report each; raises for none."""
        return tuple(self._examine_one(group, plugin) for plugin in self.plugins(group))

    def _examine_one(self, group: PluginGroup[T], plugin: Plugin) -> PluginRecord[T]:
        try:
            return PluginRecord(plugin, "loads", self.load(group, plugin.name))
        except OmniplatError as error:
            state = next((state for kind, state in _STATES if isinstance(error, kind)), "broken")
            return PluginRecord(plugin, state, None, error.message, error)

    def _find(self, group: str) -> dict[str, tuple[EntryPoint, ...]]:
        with self._lock:
            if group not in self._entries:
                by_name: dict[str, tuple[EntryPoint, ...]] = {}
                for entry in entry_points(group=group):
                    by_name[entry.name] = (*by_name.get(entry.name, ()), entry)
                self._entries[group] = by_name
            return self._entries[group]


def _describe(group: str, name: str, found: tuple[EntryPoint, ...]) -> Plugin:
    return Plugin(
        group,
        name,
        " and ".join(entry.value for entry in found),
        tuple(_label(entry.dist) for entry in found),
        _install_line(found[0].dist, name),
    )


def _unknown(name: str, group: str, available: tuple[Plugin, ...]) -> tuple[str, dict[str, object]]:
    known = ", ".join(f"{plugin.name} ({plugin.install})" for plugin in available)
    message = f"{group}: nothing named {name!r} is installed; available: {known or 'nothing'}"
    return message, {"name": name, "group": group, "available": [plugin.name for plugin in available]}


def _import(group: PluginGroup[Any], plugin: Plugin, entry: EntryPoint) -> object:
    from stevedore.extension import ExtensionManager
    from stevedore.named import NamedExtensionManager

    class OneEntryPoint(NamedExtensionManager[Any]):
        """Loads the entry point that discovery found, so stevedore neither searches again nor caches on disk."""

        def list_entry_points(self) -> list[EntryPoint]:
            return [entry]

    failures: list[BaseException] = []

    def on_failure(manager: ExtensionManager[Any], failed: EntryPoint, error: BaseException) -> None:
        failures.append(error)

    try:
        manager = OneEntryPoint(
            group.name, names=[plugin.name], on_load_failure_callback=on_failure, on_missing_entrypoints_callback=None
        )
    except (Exception, SystemExit) as raised:  # stevedore lets AssertionError through; a module may call sys.exit
        failures.append(raised)
    if not failures:
        return manager[plugin.name].plugin
    cause = failures[0]
    requirements = applicable_requirements(entry.dist, plugin.name) if entry.dist is not None else ()
    missing = missing_requirement(cause, requirements)
    if missing is not None:
        raise BackendNotInstalledError(plugin.name, missing, plugin.install, kind=group.kind) from cause
    problem = f"{type(cause).__name__}: {cause}"
    raise BackendLoadError(plugin.name, problem, distribution=plugin.distribution, kind=group.kind) from cause


def _validate(group: PluginGroup[T], plugin: Plugin, loaded: object) -> T:
    if not group.accepts(loaded):
        problem = f"{plugin.value} is {type(loaded).__name__}, not {group.expected}"
        raise BackendLoadError(plugin.name, problem, distribution=plugin.distribution, kind=group.kind)
    if isinstance(loaded, BackendSpec):
        if loaded.api_version not in SUPPORTED_API_VERSIONS:
            raise BackendApiError(plugin.name, loaded.api_version, SUPPORTED_API_VERSIONS)
        if loaded.name != plugin.name:
            problem = f"{plugin.value} names itself {loaded.name!r}"
            raise BackendLoadError(plugin.name, problem, distribution=plugin.distribution, kind=group.kind)
    return loaded


def probe_backend(spec: BackendSpec) -> BackendProbe:
    """Examine this machine with a backend's own probe.

    Raises what the probe raises of this package's errors (BackendUnavailableError: a device is here and does not
    answer), and BackendLoadError where the probe itself fails.
    """
    if not spec.probe:
        return BackendProbe(available=False, reason="declares no probe")
    try:
        found = EntryPoint(spec.name, spec.probe, "omniplat.probe").load()()
    except OmniplatError:
        raise
    except (Exception, SystemExit) as error:
        raise BackendLoadError(spec.name, f"its probe failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, BackendProbe):
        raise BackendLoadError(spec.name, f"its probe returned {type(found).__name__}, not a BackendProbe")
    return found


@cache
def default_registry() -> Registry:
    """The registry of this process."""
    return Registry()
