"""The declarations: all of them are those of the correct backend, cut down to what the fault is about."""

from __future__ import annotations

from dataclasses import replace

from omniplat.backend import BackendProbe, BackendSpec
from omniplat.capability import Capability
from omniplat.device import Device
from omniplat.host import detect_cpu, installed_versions

_TORCH = ("torch>=2.6",)

INT8 = Capability(
    "int8",
    "linear",
    ("int8-channel",),
    ("int8-token",),
    scale_rules=("absmax",),
    roundings=("nearest-even",),
    refuses=("pre_scale",),
    requires=_TORCH,
    accumulator="int32",
    impl="Int8",
)
FOUR_BITS = Capability(
    "four_bits",
    "linear",
    ("int4-g32", "mxfp4", "nvfp4"),
    ("a16",),
    refuses=("group_index", "pre_scale"),
    requires=_TORCH,
    impl="FourBits",
)
#: Hands its operator the codes as they are, in torch's 8-bit floats.
EIGHT_BITS = Capability(
    "eight_bits",
    "linear",
    ("fp8-channel",),
    ("a16",),
    refuses=("pre_scale",),
    requires=_TORCH,
    impl="EightBits",
)
EXPERTS = Capability("experts", "moe", ("int8-channel", "fp8-channel"), ("a16",), requires=_TORCH, impl="Experts")


def backend(name: str, *capabilities: Capability) -> BackendSpec:
    """A backend whose kernels have the fault that its name says: `omniplat_zoo.kernels` has a class for each."""
    title = "".join(word.capitalize() for word in name.split("-"))
    impls = (replace(c, impl=f"omniplat_zoo.kernels:{title}{c.impl}") for c in capabilities)
    return BackendSpec(
        name=f"zoo-{name}",
        api_version=1,
        kinds=("cpu",),
        capabilities=tuple(impls),
        probe="omniplat_zoo.spec:probe",
        install="pip install omniplat-zoo",
        distributions=_TORCH,
    )


def probe() -> BackendProbe:
    device = detect_cpu()
    return BackendProbe(True, devices=(f"cpu:{device.arch}",), versions=installed_versions(_TORCH), found=(device,))


def emulated_probe() -> BackendProbe:
    """As where an emulation stands in for the device."""
    return BackendProbe(True, found=(Device("npu", "a5", "emulated", described=False, emulated=True),))


CORRECT = backend("correct", INT8, FOUR_BITS, EIGHT_BITS, EXPERTS)
NIBBLES = backend("nibbles", FOUR_BITS)
SCALE_ROW = backend("scale-row", INT8)
GLOBAL_DIVIDED = backend("global-divided", FOUR_BITS)
E8M0_NUMBER = backend("e8m0-number", FOUR_BITS)
BF16_FALLBACK = backend("bf16-fallback", INT8)
#: Says that it follows every rule for scales of activations, and always divides by 127.
OWN_RULE = backend("own-rule", replace(INT8, scale_rules=()))
#: Rounds what lies half way between two codes away from zero.
TIES_AWAY = backend("ties-away", INT8)
PER_TENSOR = backend("per-tensor", INT8)
NO_BIAS = backend("no-bias", INT8)
DECLARES_MORE = backend("declares-more", INT8)
K_TAIL = backend("k-tail", INT8)
NEEDS_K64 = backend("needs-k64", INT8)
MUTATES = backend("mutates", INT8)
UNREPEATABLE = backend("unrepeatable", INT8)
COLUMN_MAJOR = backend("column-major", INT8)
ROUTING_WEIGHTS = backend("routing-weights", EXPERTS)
EXPERT_ORDER = backend("expert-order", EXPERTS)
UP_FIRST = backend("up-first", EXPERTS)
SILU_ONLY = backend("silu-only", EXPERTS)
NO_LIMIT = backend("no-limit", EXPERTS)
#: Takes w2 for one of w13's scheme.
ONE_SCHEME = backend("one-scheme", EXPERTS)
#: Looks at the first two experts that a row chose.
TWO_CHOICES = backend("two-choices", EXPERTS)
#: Rounds products to the output's dtype, and then adds the bias.
ROUNDS_TWICE = backend("rounds-twice", FOUR_BITS)
#: Computes in bf16, whatever the layer's dtype is.
BF16_INPUT = backend("bf16-input", FOUR_BITS)
BF16_BIAS = backend("bf16-bias", FOUR_BITS)
DECLARES_LESS = backend("declares-less", INT8)
VALUE_ERROR = backend("value-error", INT8)
ONLINE = backend("online", INT8)
EMULATED = replace(
    backend("correct", replace(INT8, requires=("torch-npu>=99",))),
    name="zoo-emulated",
    kinds=("npu",),
    probe="omniplat_zoo.spec:emulated_probe",
)
