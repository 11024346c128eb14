"""Kernels over torch_npu's operators. They reach them through `torch.ops.npu`, as the library or an emulation registers
them; torch loads torch_npu itself where it is installed."""
