"""The operators. `fault` says what to get wrong."""

from __future__ import annotations

import torch

from omniplat.runtime.activate import activate


@torch.library.custom_op("omniplat_zoo::int8", mutates_args=())
def int8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    fault: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if fault == "no-f16" and x.dtype == torch.float16:
        raise RuntimeError("f16 is not implemented")
    if fault == "k64" and x.shape[-1] % 64:
        raise RuntimeError(f"K = {x.shape[-1]} is not a multiple of 64")
    values = x.float()
    if fault == "bf16":
        y = values @ (codes.float() * scale).T
    else:
        whole = fault == "per-tensor" and values.numel() > 0
        step = (values.abs().amax() if whole else values.abs().amax(-1, keepdim=True)) / 127.0
        scaled = torch.where(step == 0, 0.0, values / torch.where(step == 0, 1.0, step))
        nearest = torch.trunc(scaled + 0.5 * scaled.sign()) if fault == "ties-away" else torch.round(scaled)
        rounded = nearest.clamp(-128, 127)
        used = codes.shape[1] // 64 * 64 if fault == "k-tail" else codes.shape[1]
        # float64 holds every sum of these products
        y = (rounded.double()[..., :used] @ codes.double()[:, :used].T).float() * scale.reshape(-1) * step
    if bias is not None and fault != "no-bias":
        y = y + bias.float()
    if fault == "unrepeatable":
        y = y * (1 + 2.0**-6 * torch.rand((), device=y.device))
    if fault == "column-major" and y.dim() == 2:
        return y.to(out_dtype).T.contiguous().T  # right, and not laid out as the fake implementation says
    return y.to(out_dtype)


@int8.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    fault: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)


@torch.library.custom_op("omniplat_zoo::four_bits", mutates_args=())
def four_bits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fault: str, out_dtype: torch.dtype
) -> torch.Tensor:
    y = (x.bfloat16() if fault == "bf16-input" else x).float() @ weight.T
    if fault == "rounds-twice":
        y = y.to(out_dtype).float()
    if bias is not None:
        y = y + (bias.bfloat16() if fault == "bf16-bias" else bias).float()
    return y.to(out_dtype)


@four_bits.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fault: str, out_dtype: torch.dtype
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


@torch.library.custom_op("omniplat_zoo::eight_bits", mutates_args=())
def eight_bits(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    y = x.float() @ codes.float().T * scale.reshape(-1)
    return (y if bias is None else y + bias.float()).to(out_dtype)


@eight_bits.register_fake
def _(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)


@torch.library.custom_op("omniplat_zoo::mlp", mutates_args=())
def mlp(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    fault: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    ids = topk_ids.long()
    if fault == "two-choices":
        ids = torch.where(torch.arange(ids.shape[1], device=x.device) < 2, ids, -1)
    if expert_map is not None:
        ids = torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0)])
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    count = w13.shape[0]
    for expert in range(count):
        rows, slots = torch.nonzero(ids == expert, as_tuple=True)
        used = count - 1 - expert if fault == "expert-order" else expert
        hidden = x[rows].float() @ w13[used].T
        if b13 is not None:
            hidden = hidden + b13[used].float()
        gate, up = hidden.chunk(2, 1) if fault != "up-first" else reversed(hidden.chunk(2, 1))
        used_activation = "silu" if fault == "silu-only" else activation
        hidden = activate(gate, up, used_activation, 0.0 if fault == "no-limit" else limit, alpha)
        out = hidden @ w2[used].T
        if b2 is not None:
            out = out + b2[used].float()
        weights = topk_weights.flip(1) if fault == "routing-weights" else topk_weights
        y.index_add_(0, rows, out * weights[rows, slots, None])
    return y.to(out_dtype)


@mlp.register_fake
def _(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    fault: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)
