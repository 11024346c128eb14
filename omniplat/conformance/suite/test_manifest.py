"""Group manifest: the declaration itself. Reads data; imports kernels only where their device is here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import packages_distributions
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from omniplat.backend import SUPPORTED_API_VERSIONS
from omniplat.capability import Capability, matches
from omniplat.conformance.catalog import (
    DTYPES,
    OPS,
    activation_ids,
    declared_activations,
    declared_weights,
    weight_ids,
)
from omniplat.conformance.checks import Named, backend, capabilities, check
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import UNITS
from omniplat.device import ARCHITECTURES
from omniplat.layer import EXTRAS

#: Modules that no declaration may import, beside those of the backend's own distributions.
HEAVY = ("torch", "torch_npu", "triton", "vllm", "transformers", "jax", "aiter", "humming", "flashinfer",
         "bitsandbytes", "omniplat.runtime", "omniplat.reference.kernels")  # fmt: skip
_DIMS = {"linear": {"in", "out"}, "moe": {"in", "out", "intermediate", "experts"}}
_STATUSES = ("never", "upstream", "todo")


def _heavy_modules(subject: Subject) -> list[str]:
    spec = subject.spec
    texts = (
        *spec.distributions,
        *spec.optional,
        *(text for capability in spec.capabilities for text in capability.requires),
    )
    names = {canonicalize_name(Requirement(text).name) for text in texts} - {"numpy", "gguf"}
    found = {
        module for module, dists in packages_distributions().items() if {canonicalize_name(d) for d in dists} & names
    }
    return sorted({*HEAVY, *found})


def _loaded_after(code: str, heavy: list[str]) -> list[str]:
    """Which of the heavy modules a fresh interpreter holds after `code`."""
    report = f"import json, sys; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@check("manifest", backend, runs=False)
def test_loading_is_light(subject: Subject, case: Named) -> None:
    code = "from omniplat.registry import BACKENDS, default_registry\n"
    code += f"default_registry().load(BACKENDS, {subject.spec.name!r})"
    loaded = _loaded_after(code, _heavy_modules(subject))
    assert not loaded, f"loading the declaration imports {', '.join(loaded)}"


@check("manifest", backend, runs=False)
def test_probing_is_light(subject: Subject, case: Named) -> None:
    """The probe looks for devices and versions; it returns a BackendProbe and raises nothing but omniplat's errors."""
    code = "from omniplat.registry import BACKENDS, default_registry, probe_backend\n"
    code += "from omniplat.errors import BackendUnavailableError\n"
    code += f"spec = default_registry().load(BACKENDS, {subject.spec.name!r})\n"
    code += "try:\n    probe_backend(spec)\nexcept BackendUnavailableError:\n    pass"
    loaded = _loaded_after(code, _heavy_modules(subject))
    assert not loaded, f"the probe imports {', '.join(loaded)}"


@check("manifest", backend, runs=False)
def test_the_backend_is_described(subject: Subject, case: Named) -> None:
    spec = subject.spec
    assert spec.api_version in SUPPORTED_API_VERSIONS
    assert spec.kinds, "serves no kind of device"
    assert set(spec.kinds) <= set(ARCHITECTURES), f"unknown kinds: {set(spec.kinds) - set(ARCHITECTURES)}"
    assert spec.probe, "declares no probe"
    assert spec.capabilities, "declares no capability"
    assert spec.install, "says no line that installs its runtime"
    for text in (*spec.distributions, *spec.optional):
        Requirement(text)


@check("manifest", backend, runs=False)
def test_names_are_unique(subject: Subject, case: Named) -> None:
    names = [capability.name for capability in subject.spec.capabilities]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"several capabilities are called {', '.join(twice)}"
    assert all(name.replace("_", "").isalnum() for name in names), "a name is letters, digits and _"


@check("manifest", backend, runs=False)
def test_what_is_not_supported_is_not_declared(subject: Subject, case: Named) -> None:
    for entry in subject.spec.not_supported:
        assert entry.status in _STATUSES, f"{entry.pattern}: status {entry.status!r} is none of {_STATUSES}"
        assert entry.reason, f"{entry.pattern} has no reason"
        weight, _, activation = entry.pattern.partition("/")
        for capability in subject.spec.capabilities:
            weights = [w for w in declared_weights(capability, weight_ids(subject.spec)) if matches((weight,), w)]
            activations = declared_activations(capability, activation_ids(subject.spec))
            executed = (capability.executes,) if capability.executes else activations
            acts = [a for a in executed if matches((activation or "*",), a)]
            assert not (weights and acts), f"{entry.pattern} is not supported, and {capability.name} declares it"


@check("manifest", capabilities, runs=False)
def test_a_capability_is_well_formed(subject: Subject, case: Named) -> None:
    item = _capability(case)
    assert item.op in OPS, f"op {item.op!r} is none of {OPS}"
    assert item.dtypes, "no dtype"
    assert set(item.dtypes) <= set(DTYPES), f"dtypes {item.dtypes} are not all of {DTYPES}"
    assert item.accumulator in UNITS, f"accumulator {item.accumulator!r} is none of {', '.join(UNITS)}"
    known = {arch for kind in subject.spec.kinds for arch in ARCHITECTURES[kind]}
    assert set(item.archs) <= known, f"unknown architectures {sorted(set(item.archs) - known)}"
    for rule in item.shapes:
        assert rule.dim in _DIMS[item.op], f"a shape rule for {rule.dim!r}, which {item.op} has not"
        assert rule.needed, f"the shape rule for {rule.dim} accepts everything"
        assert not rule.maximum or rule.maximum >= max(rule.minimum, rule.multiple_of), f"{rule.dim}: nothing is legal"
    for text in item.requires:
        Requirement(text)
    assert item.evidence == "declared" or item.evidence.startswith(("emulated", "verified on "))
    assert set(item.refuses) <= set(EXTRAS), f"refuses {item.refuses}, which are not all of {EXTRAS}"
    assert item.resident >= 1.0 or item.via, "keeps less than what is stored without a re-encoding"


@check("manifest", capabilities, runs=False)
def test_every_pattern_means_a_scheme(subject: Subject, case: Named) -> None:
    item = _capability(case)
    for pattern in item.weights:
        assert any(matches((pattern,), text) for text in weight_ids(subject.spec)), f"{pattern} matches no weight"
    names = activation_ids(subject.spec)
    for pattern in item.activations:
        assert any(matches((pattern,), text) for text in names), f"{pattern} matches no activation"
    if item.executes:
        assert item.executes in names, f"executes {item.executes!r}, which is no activation"


@check("manifest", capabilities)
def test_the_kernel_resolves(subject: Subject, case: Named) -> None:
    """`impl` is a kernel of the capability's op, without state, with a config that is hashable and survives JSON."""
    from omniplat.runtime.kernel import LinearKernel, MoeKernel, load_kernel

    item = _capability(case)
    module, colon, name = item.impl.partition(":")
    assert colon, f"impl {item.impl!r} is not module:Class"
    found: Any = getattr(import_module(module), name)
    kernel = load_kernel(item.impl)
    kind = MoeKernel if item.op == "moe" else LinearKernel
    assert isinstance(kernel, kind), f"{item.impl} is no kernel for {item.op}"
    assert isinstance(kernel.name, str)
    assert kernel.name
    assert not vars(kernel), f"a kernel has no state, and {name} has {sorted(vars(kernel))}"
    config: Any = found.config_type
    assert is_dataclass(config), f"config_type {config!r} is no dataclass"
    assert config.__hash__ is not None, f"{config!r} is not frozen"
    assert not any(field.type in ("Any", Any) for field in fields(config))


def _capability(case: Named) -> Capability:
    assert case.capability is not None
    return case.capability
