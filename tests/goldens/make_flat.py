"""Write tests/data/producers: weights as optimum-quanto, hqq and torchao write them, and what those make of them.

Run where the producers are installed: `python tests/goldens/make_flat.py quanto|hqq|torchao [TILES.npz]`.
torchao packs `Int4TilePackedTo4dTensor` on CUDA devices only; TILES.npz holds what PyTorch 2.11 gave on an H200: `p*`
from `aten._convert_weight_to_int4pack`, `sz*` pairs of scale and zero (bits of bf16), and `w*`, the product of a unit
matrix with both by `aten._weight_int4pack_mm`. The other files come from optimum-quanto 0.2.7 and hqq 0.2.8.

Each file has the tensors of the producer's own state dictionary, its metadata, and for every module `expected/NAME/at`
(places in the flattened weight) and `expected/NAME/values`, from the producer's own dequantization.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parents[1] / "data" / "producers"
SAMPLES = 400


def sample(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values at some places of `weight`, the first and the last among them."""
    count = weight.numel()
    at = np.unique(np.concatenate([[0, count - 1], np.random.default_rng(0).integers(0, count, SAMPLES)]))
    index = torch.from_numpy(at.astype(np.int64))
    values = weight.detach().float().reshape(-1)[index].contiguous()
    return {f"expected/{name}/at": index, f"expected/{name}/values": values}


def quanto() -> None:
    """A block of a language model whose configuration gives the shapes, a bias, and group sizes that give them."""
    from optimum.quanto import freeze, qint2, qint4, quantize

    shapes = {
        "self_attn.q_proj": (24, 160),
        "self_attn.k_proj": (8, 160),
        "self_attn.o_proj": (160, 24),
        "mlp.up_proj": (192, 160),
        "mlp.down_proj": (160, 192),
        "extra.whole": (10, 200),
        "extra.bias": (33, 640),
    }
    for qtype in (qint4, qint2):
        torch.manual_seed(0)
        state: dict[str, torch.Tensor] = {}
        for name, (n, k) in shapes.items():
            linear = torch.nn.Sequential(torch.nn.Linear(k, n, bias="bias" in name))
            quantize(linear, weights=qtype)
            freeze(linear)
            full = f"model.layers.0.{name}"
            state |= {f"{full}.{key.removeprefix('0.')}": value for key, value in linear.state_dict().items()}
            state |= sample(full, linear[0].weight.dequantize())
        save_file({key: value.contiguous() for key, value in state.items()}, HERE / f"quanto-{qtype.name}.safetensors")


def hqq() -> None:
    """Both axes, every width, and words that are viewed as floats."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for axis in (0, 1):
        torch.manual_seed(axis)
        state: dict[str, torch.Tensor] = {}
        for bits in (1, 2, 3, 4, 8):
            for group in (32, None):
                as_float = bits == 4 and group is None
                config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, view_as_float=as_float)
                layer = HQQLinear(
                    torch.nn.Linear(96, 64, bias=False), config, compute_dtype=torch.float32, device="cpu"
                )
                name = f"b{bits}.{'whole' if group is None else 'g32'}"
                state |= {f"{name}.{key}": value for key, value in layer.state_dict().items()}
                state |= sample(name, layer.dequantize())
        save_file({key: value.contiguous() for key, value in state.items()}, HERE / f"hqq-axis{axis}.safetensors")


def torchao(tiles: str) -> None:
    """Tiles with true shapes that are smaller than the padded ones."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.quantize_.workflows.int4.int4_tile_packed_to_4d_tensor import Int4TilePackedTo4dTensor

    found = np.load(tiles)
    weights, state = {}, {}
    for key, name, shape in (("8_8", "whole", (8, 1024)), ("24_8", "padded", (20, 768))):
        pair = torch.from_numpy(found[f"sz{key}"]).view(torch.bfloat16)
        packed = torch.from_numpy(found[f"p{key}"])
        weights[f"{name}.weight"] = Int4TilePackedTo4dTensor(packed, pair, [1, 128], torch.Size(shape))
        state |= sample(name, torch.from_numpy(found[f"w{key}"])[: shape[0], : shape[1]])
    flat, metadata = flatten_tensor_state_dict(weights)
    save_file(dict(flat) | state, HERE / "torchao-tiles.safetensors", metadata=metadata)


if __name__ == "__main__":
    HERE.mkdir(parents=True, exist_ok=True)
    {"quanto": quanto, "hqq": hqq, "torchao": torchao}[sys.argv[1]](*sys.argv[2:])
