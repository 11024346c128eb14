"""Words that the capability tables share: requirements, modules of kernels, architectures, limits of shapes."""

from __future__ import annotations

from omniplat.capability import ShapeRule

#: From the release on whose operators include all that kernels call: 2.6 lacks npu_dynamic_mx_quant and others.
TORCH_NPU = "torch-npu>=2.10"
#: Repositories at the commits that were read; a path in them follows.
OP_PLUGIN = "https://github.com/Ascend/op-plugin/blob/517f2e7d0f202f38b76310706cb977ca2388ad21"
OPS_NN = "https://github.com/hicann/ops-nn/blob/e5c3fa9327ea95ba26d06227e746923580d10921"
VLLM_ASCEND = "https://github.com/vllm-project/vllm-ascend/blob/182b75ea84ff13ece27b57391331ef8935410aea"
TORCH = "torch>=2.6"

LINEAR = "omniplat_ascend.kernels.linear"
MOE = "omniplat_ascend.kernels.moe"

INT8_ARCHS = ("a2", "a3", "a5")
A5 = ("a5",)
HALF = ("bf16", "f16")
NEAREST_EVEN = ("nearest-even",)
#: Groups of weight-only layers: multiples of 32.
GROUPS = ("g32", "g64", "g96", "g128", "g160", "g192", "g256", "g512", "g1024")
INT4_GROUPED = tuple(f"{stem}-{group}" for stem in ("int4", "uint4") for group in GROUPS)
INT8_GROUPED = tuple(f"{stem}-{group}" for stem in ("int8", "uint8") for group in GROUPS)

AXIS = 65535
LINEAR_AXES = (ShapeRule("in", maximum=AXIS), ShapeRule("out", maximum=AXIS))
MOE_AXES = (*LINEAR_AXES, ShapeRule("intermediate", maximum=AXIS))
PACKED_AXES = (ShapeRule("in", multiple_of=8, maximum=AXIS), ShapeRule("out", maximum=AXIS))
PACKED_MOE = (
    ShapeRule("in", multiple_of=8, maximum=AXIS),
    ShapeRule("out", multiple_of=8, maximum=AXIS),
    ShapeRule("intermediate", multiple_of=8, maximum=AXIS),
)
#: K of both products comes in groups of 256, up to 18432.
W4A8_MOE = tuple(ShapeRule(dim, multiple_of=256, maximum=18432) for dim in ("in", "out", "intermediate"))
MX_AXES = (ShapeRule("in", multiple_of=64, maximum=AXIS), ShapeRule("out", maximum=AXIS))
MX_MOE = (
    ShapeRule("in", multiple_of=64, maximum=AXIS),
    ShapeRule("out", multiple_of=64, maximum=AXIS),
    ShapeRule("intermediate", multiple_of=64, maximum=AXIS),
)
