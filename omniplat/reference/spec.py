"""What the cpu backend can run. Data only."""

from __future__ import annotations

from omniplat.backend import BackendSpec
from omniplat.capability import Capability, ShapeRule

#: Weights whose values the row decoder of `decode.py` knows.
_QUANTIZED = (
    *("fp8-tensor", "fp8-channel", "fp8-g*", "fp8-block*"),
    *("fp8e5m2-tensor", "fp8e5m2-channel", "fp8e5m2-g*", "fp8e5m2-block*"),
    *("int[2-8]-tensor", "int[2-8]-channel", "int[2-8]-g*", "int[2-8]-block*"),
    # all blocks but 1x1: a scale and a zero point for each weight take more room than the weight in bf16
    *("uint[2-8]-tensor", "uint[2-8]-channel", "uint[2-8]-g*", "uint[2-8]-block[2-9]*", "uint[2-8]-block1[0-9]*"),
    *("uint[2-8]-block1x1?*", "uint[2-8]-block1x[2-9]*"),
    *("mxfp8", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "mxfp4-dual", "mxint4", "mxint8", "nvfp4*"),
    *("nf4-b*", "fp4bnb-b*"),
)
_FLOAT = ("bf16",)
_ACTIVATIONS = (
    "a16",
    *("fp8-token", "fp8-tensor", "fp8-tensor-static", "fp8-g*"),
    *("fp8e5m2-token", "fp8e5m2-tensor", "fp8e5m2-tensor-static", "fp8e5m2-g*"),
    *("int[2-8]-token", "int[2-8]-token-asym", "int[2-8]-tensor", "int[2-8]-tensor-asym", "int[2-8]-g*"),
    *("int[2-8]-tensor-static", "int[2-8]-tensor-static-asym"),
    *("mxfp8", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "mxfp4-dual", "mxint4", "mxint8", "nvfp4*"),
)
#: GGUF types that its library decodes.
_GGUF = (
    *("gguf-q4_0", "gguf-q4_1", "gguf-q5_0", "gguf-q5_1", "gguf-q8_0", "gguf-mxfp4", "gguf-nvfp4"),
    *("gguf-q2_k", "gguf-q3_k", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-iq4_nl", "gguf-iq4_xs"),
    *("gguf-iq1_s", "gguf-iq1_m", "gguf-iq2_xxs", "gguf-iq2_xs", "gguf-iq2_s", "gguf-iq3_xxs", "gguf-iq3_s"),
    *("gguf-tq1_0", "gguf-tq2_0"),
)
_KERNELS = "omniplat.reference.kernels"

SPEC = BackendSpec(
    name="cpu",
    api_version=1,
    kinds=("cpu",),
    capabilities=(
        Capability(
            name="int8_linear",
            op="linear",
            weights=("int[235678]-tensor", "int[235678]-channel"),
            activations=("int[2-8]-token", "int[2-8]-tensor", "int[2-8]-tensor-static"),
            accumulator="int32",
            priority=20,
            impl=f"{_KERNELS}:Int8Linear",
            variants=("vnni-int8", "f32-of-integers"),
        ),
        Capability(
            name="dequant_linear",
            op="linear",
            weights=_QUANTIZED,
            activations=_ACTIVATIONS,
            priority=10,
            transforms=(ShapeRule("left"), ShapeRule("right")),
            impl=f"{_KERNELS}:DequantLinear",
            variants=("f32-row-tiles", "bf16-row-tiles"),
        ),
        Capability(
            name="float_linear",
            op="linear",
            weights=_FLOAT,
            activations=_ACTIVATIONS,
            priority=10,
            impl=f"{_KERNELS}:FloatLinear",
            variants=("f32-row-tiles", "bf16"),
        ),
        Capability(
            name="low_rank_linear",
            op="linear",
            weights=("svdq-nvfp4", "svdq-int4-g64"),
            activations=("a16", "svdq-nvfp4", "svdq-int4"),
            priority=10,
            impl="omniplat.reference.low_rank:LowRankLinear",
        ),
        Capability(
            name="gguf_linear",
            op="linear",
            weights=_GGUF,
            activations=("a16",),
            requires=("gguf>=0.10",),
            priority=10,
            impl="omniplat.reference.gguf_blocks:GgufLinear",
        ),
        Capability(
            name="llm_int8_linear",
            op="linear",
            weights=("int8-bnb",),
            activations=("a16", "int8-bnb"),
            executes="a16",
            priority=10,
            impl=f"{_KERNELS}:LlmInt8Linear",
        ),
        Capability(
            name="expert_loop",
            op="moe",
            weights=(*_FLOAT, *_QUANTIZED),
            activations=_ACTIVATIONS,
            priority=10,
            impl=f"{_KERNELS}:ExpertLoop",
        ),
    ),
    probe="omniplat.reference.probe:probe",
    install='pip install "omniplat[cpu]"',
    distributions=("torch>=2.6",),
    not_supported=(),
)
