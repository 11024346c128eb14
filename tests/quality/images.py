"""Images of a diffusion pipeline under every method: diffusers' own FluxPipeline, with a small transformer and VAE of
seeded random weights. Nothing is downloaded; there are no text encoders, their output is given.

Layers as PyTorch initializes them add next to nothing to what passes by them, and nothing done to them would be seen.
So each is scaled once to outputs of unit variance (Mishkin and Matas, "All you need is a good init", 2015): blocks then
change their input as much as they keep of it. The last one is scaled to the spread that a trained model's velocities
have, whose target is the difference of noise and data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import omniplat
from omniplat.document import Plan
from omniplat.online import parse_method
from tests.modules.stand_in import of_noise, put_in_place

SIDE = 96
STEPS = 8
SEED = 0
#: Standard deviation of noise minus data, both of variance 1 and independent.
SPREAD = sqrt(2)

_WIDTH = 128
_TOKENS = 8

Pixels = NDArray[np.uint8]


def pipeline(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The pipeline in `dtype`, with the same weights each time."""
    import diffusers

    torch.manual_seed(SEED)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=4, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=_WIDTH, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12), guidance_embeds=False,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64), latent_channels=16, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip
    made = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae.eval(), transformer=transformer.eval(),
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    scale_layers(made)
    return made.to(dtype)


def scale_layers(made: Any) -> None:
    """Scale every linear layer of the transformer, in the order in which they run, by its outputs for pure noise."""
    layers = {name: layer for name, layer in made.transformer.named_modules() if isinstance(layer, nn.Linear)}

    def scale(layer: nn.Linear, to: float, output: torch.Tensor) -> torch.Tensor:
        factor = to / float(output.std())
        for parameter in layer.parameters():
            parameter.mul_(factor)
        return output * factor

    hooks = [
        layer.register_forward_hook(
            lambda layer, _, output, to=SPREAD if name == "proj_out" else 1.0: scale(layer, to, output)
        )
        for name, layer in layers.items()
    ]
    generate(made, steps=1)
    for hook in hooks:
        hook.remove()


def call(dtype: torch.dtype, seed: int = SEED, steps: int = STEPS) -> dict[str, Any]:
    """What the pipeline is called with: embeddings that text encoders would give, sizes and a generator of noise."""
    random = torch.Generator().manual_seed(1000 + seed)
    return {
        "prompt_embeds": torch.randn(1, _TOKENS, _WIDTH, generator=random).to(dtype),
        "pooled_prompt_embeds": torch.randn(1, 64, generator=random).to(dtype),
        "height": SIDE,
        "width": SIDE,
        "num_inference_steps": steps,
        "generator": random,
    }


def generate(made: Any, seed: int = SEED, steps: int = STEPS) -> Pixels:
    """One image, uint8 [height, width, 3]."""
    with torch.no_grad():
        (image,) = made(**call(made.transformer.dtype, seed, steps)).images
    pixels: Pixels = np.asarray(image, np.uint8)
    return pixels


#: Draws of signs that an expectation is the mean of.
DRAWS = 4


def quantized(made: Any, options: Mapping[str, Any]) -> tuple[Pixels, Plan]:
    """The image with the transformer quantized, and the plan; the pipeline is left as it was."""
    plan = omniplat.quantize_model(made, {"transformer": dict(options)}, "cpu")
    pixels = generate(made)
    omniplat.restore(made)
    return pixels, plan


def square_error_of_noise(made: Any, options: Mapping[str, Any], plan: Plan, draws: int = DRAWS) -> float:
    """Mean squared error of the image, in levels, where the rounding errors of the plan's layers have random signs."""
    plain, transformer = generate(made).astype(np.float64), made.transformer
    chosen = {layer.name.removeprefix("transformer.") for layer in plan.layers if layer.status == "ok"}
    linears = {name: layer for name, layer in transformer.named_modules() if name in chosen}
    errors = []
    for seed in range(draws):
        made.transformer = copy.deepcopy(transformer)
        put_in_place(made.transformer, of_noise(linears, parse_method(options), seed))
        errors.append(float(np.square(generate(made) - plain).mean()))
    made.transformer = transformer
    return float(np.mean(errors))


def in_float32() -> Pixels:
    """The image that the arithmetic of float32 gives for the BF16 pipeline's time steps, which BF16 rounds."""
    made = pipeline(torch.float32)

    def rounded(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        step = (named["timestep"].bfloat16() * 1000).float() / 1000
        return arguments, {**named, "timestep": step}

    made.transformer.register_forward_pre_hook(rounded, with_kwargs=True)
    return generate(made)
