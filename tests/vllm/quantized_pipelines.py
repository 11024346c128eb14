"""What producers make of the transformer of a pipeline in 16 bit: quantized weights, scales and metadata, in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from omniplat import oracle
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import parse_weight_id

BLOCK = ("attn", "img_mlp", "txt_mlp")
#: ModelOpt's name of an algorithm -> the weight that it stores.
MODELOPT = {"FP8": "fp8-tensor", "NVFP4": "nvfp4"}


def in_blocks(name: str) -> bool:
    return name.startswith("transformer_blocks.") and any(f".{part}." in name for part in BLOCK)


def quantize(folder: Path, chosen: Callable[[str], bool]) -> None:
    """What vllm-omni's own tools write for MXFP8: fp8 weights with e8m0 scales, and metadata that says so."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    linears = [name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.dim() == 2]
    for name in linears:
        if chosen(name):
            made = oracle.quantize_weight(tensors[f"{name}.weight"].float().numpy(), parse_weight_id("mxfp8"))
            tensors[f"{name}.weight"] = to_tensor(made.tensors["codes"]).view(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale"] = to_tensor(made.tensors["scale"])
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    ignored = [name for name in linears if not chosen(name)]
    config["quantization_config"] = {
        "quant_method": "mxfp8", "is_checkpoint_mxfp8_serialized": True, "ignored_layers": ignored
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def quantize_to_nf4(folder: Path) -> None:
    """What diffusers writes with bitsandbytes: one flat tensor of codes for a weight, and names with dots."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    skipped, table = [], oracle.element_values("nf4")
    for name in [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2]:
        if not in_blocks(name):
            skipped.append(name.removesuffix(".weight"))
            continue
        weight = tensors[name].float().numpy()
        values = weight.reshape(-1, 64)
        largest = np.abs(values).max(1)
        code = np.abs((values / largest[:, None])[..., None] - table).argmin(-1).astype(np.uint8).reshape(-1)
        tensors[name] = to_tensor((code[0::2] << 4 | code[1::2]).reshape(-1, 1))
        tensors[f"{name}.absmax"] = to_tensor(largest)
        tensors[f"{name}.quant_map"] = to_tensor(table.astype(np.float32))
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = to_tensor(
            np.frombuffer(json.dumps(state).encode(), np.uint8)
        )
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": skipped,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def quantize_as_modelopt(folder: Path, algorithm: str, chosen: Callable[[str], bool] = in_blocks) -> None:
    """What ModelOpt exports: scales beside the chosen weights, that of inputs too, and metadata."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    linears = [name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.dim() == 2]
    for name in filter(lambda name: chosen(f"{name}."), linears):
        values = tensors[f"{name}.weight"].float().numpy()
        made = oracle.quantize_weight(values, parse_weight_id(MODELOPT[algorithm]))
        tensors[f"{name}.weight"] = to_tensor(made.tensors["codes"])
        tensors[f"{name}.input_scale"] = torch.tensor(0.02)
        if algorithm == "FP8":
            tensors[f"{name}.weight_scale"] = to_tensor(made.tensors["scale"])[0, 0]
        else:
            tensors[f"{name}.weight_scale"] = to_tensor(made.tensors["scale"])
            tensors[f"{name}.weight_scale_2"] = to_tensor(made.tensors["global_scale"])[0, 0]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt", "version": "0.40"},
        "group_size": 16, "ignore": [name for name in linears if not chosen(f"{name}.")],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
