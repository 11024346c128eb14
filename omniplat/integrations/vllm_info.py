"""What `omniplat info --vllm` reports: installed engines, omniplat's hooks in them, and who would run a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from omniplat.errors import BackendNotInstalledError, OmniplatError, UsageError
from omniplat.integrations.dispatch import CPU_VARIABLE, OFF, dispatch_mode

if TYPE_CHECKING:
    from omniplat.integrations.vllm_claim import Verdict

#: Packages of engines, and the versions in which `tests/vllm` holds.
KNOWN: Mapping[str, str] = {"vllm": "==0.30.*", "vllm_omni": "==0.30.*"}
#: Entry points that engines read, (group, name), and what they are for.
HOOKS: Mapping[tuple[str, str], str] = {
    ("vllm.general_plugins", "omniplat"): "quantized checkpoints of language models",
    ("vllm_omni.platform_plugins", "omniplat"): "methods of diffusion models",
    ("vllm_omni.platform_plugins", "omniplat_cpu"): "diffusion models on CPUs",
    ("vllm_omni.general_plugins", "omniplat"): "methods of diffusion models",
}
#: Names of plugins that vLLM may load; all of them where it is not set.
_ALLOWED = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An installed engine; `known` says whether omniplat is tested in this version. "" where it is not installed."""

    package: str
    distribution: str = ""
    version: str = ""
    known: bool = False
    tested: str = ""


@dataclass(frozen=True, slots=True)
class HookReport:
    """One entry point of this environment: "active", or why it is not."""

    group: str
    name: str
    state: str
    purpose: str


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Who runs a checkpoint, and why the other does not: `engine_problem` and `problem` are "" where they do. `engine`
    is the one that it is for: vllm, or vllm-omni for diffusion models."""

    checkpoint: str
    runs: str
    engine_method: str = ""
    engine_problem: str = ""
    problem: str = ""
    engine: str = "vllm"


@dataclass(frozen=True, slots=True)
class VllmInfo:
    """The whole report; `checkpoint` is None where none was asked about."""

    dispatch: str
    engines: tuple[EngineReport, ...]
    hooks: tuple[HookReport, ...]
    checkpoint: CheckpointReport | None = None


def collect_vllm_info(checkpoint: str | None = None, environ: Mapping[str, str] | None = None) -> VllmInfo:
    """Look at this environment; imports vLLM only to ask about a checkpoint.

    Raises UsageError for an unknown OMNIPLAT_DISPATCH, and for a checkpoint BackendNotInstalledError without vLLM and
    UsageError where it has no metadata or neither engine can read it.
    """
    environ = os.environ if environ is None else environ
    mode = dispatch_mode(environ)
    engines = tuple(_engine(package) for package in KNOWN)
    report = _judge(checkpoint, mode, *engines) if checkpoint is not None else None
    return VllmInfo(mode, engines, tuple(_hooks(mode, environ)), report)


def _engine(package: str) -> EngineReport:
    tested = KNOWN[package]
    for distribution in packages_distributions().get(package, ()):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return EngineReport(package, distribution, found, SpecifierSet(tested).contains(found, True), tested)
    return EngineReport(package, tested=tested)


def _hooks(mode: str, environ: Mapping[str, str]) -> list[HookReport]:
    return [HookReport(group, name, _state(group, name, mode, environ), what) for (group, name), what in HOOKS.items()]


def _state(group: str, name: str, mode: str, environ: Mapping[str, str]) -> str:
    if not any(item.name == name and item.value.startswith("omniplat.") for item in entry_points(group=group)):
        return "not installed"
    allowed = environ.get(_ALLOWED)
    if allowed is not None and name not in allowed.split(","):
        return f"not called: {_ALLOWED}={allowed}"
    if name == "omniplat_cpu":
        return "active" if environ.get(CPU_VARIABLE) == "1" else f"waits for {CPU_VARIABLE}=1"
    if mode == OFF:
        return "registers nothing: OMNIPLAT_DISPATCH=off"
    if group.startswith("vllm_omni.") and not _takes_builders():
        return "active for ModelOpt's checkpoints alone: this vllm-omni takes no builders of methods"
    return "active"


def _takes_builders() -> bool:
    """False for a vllm-omni after 0.30, by its source: importing it would start an engine's plugins."""
    spec = find_spec("vllm_omni")
    if spec is None or spec.origin is None:
        return True
    factory = Path(spec.origin).parent / "quantization" / "factory.py"
    return not factory.is_file() or "def register_quantization_override" in factory.read_text(encoding="utf-8")


def _judge(checkpoint: str, mode: str, engine: EngineReport, omni: EngineReport) -> CheckpointReport:
    """By vLLM where it reads the checkpoint's configuration, else by vllm-omni, whose models it does not know."""
    if not engine.version:
        raise BackendNotInstalledError("vllm", "vllm", 'pip install "omniplat[vllm]"', kind="engine")
    from vllm.transformers_utils.config import get_config

    try:
        config = get_config(checkpoint, trust_remote_code=False)
    except Exception as error:  # of transformers, the Hub or vLLM: whatever it is, vLLM does not start with it
        return _judge_diffusion(checkpoint, mode, omni, f"{type(error).__name__}: {error}".splitlines()[0])
    if mode == OFF:
        return CheckpointReport(checkpoint, "vllm")
    from omniplat.integrations.vllm_claim import judge

    metadata = getattr(config, "quantization_config", None)
    if metadata is None:
        raise UsageError(f"{checkpoint} has no quantization_config: vLLM takes it for unquantized")
    try:
        verdict = judge(checkpoint, dict(metadata), config, mode)
    except OmniplatError as error:
        return CheckpointReport(checkpoint, "vllm", problem=error.message)
    return _report(checkpoint, "vllm", verdict)


def _judge_diffusion(checkpoint: str, mode: str, omni: EngineReport, why_not_vllm: str) -> CheckpointReport:
    """Raises UsageError for what vllm-omni has no model for either."""
    if not omni.version:
        raise UsageError(f"vLLM does not read {checkpoint}, and vllm-omni is not installed. vLLM says: {why_not_vllm}")
    from omniplat.integrations.vllm_omni_claim import judge_diffusion

    try:
        verdict = judge_diffusion(checkpoint, mode)
    except OmniplatError as error:
        raise UsageError(f"{error.message}; vLLM says: {why_not_vllm}") from error
    return _report(checkpoint, "vllm-omni", verdict)


def _report(checkpoint: str, engine: str, verdict: Verdict) -> CheckpointReport:
    ours = "nobody" if verdict.problem else "omniplat"
    return CheckpointReport(
        checkpoint,
        ours if verdict.claimed else engine,
        verdict.native_method,
        verdict.native_problem,
        verdict.problem,
        engine,
    )
