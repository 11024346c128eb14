"""What is known of models under quantization, as data: which of their layers are sensitive, which methods fail them.

Every entry has a reason and a source. Entries are surfaced as findings of code `model-advice`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omniplat.findings import Finding, finding
from omniplat.models import diffusion
from omniplat.models.family import identifiers_of
from omniplat.models.names import keeps_float

#: 16 bit and 8 bit inputs stand for anything but this.
_FOUR_BIT = ("mxfp4", "mxfp4-dual", "nvfp4", "nvfp4-g32", "int4-token", "svdq-nvfp4", "svdq-int4")


@dataclass(frozen=True, slots=True)
class Sensitive:
    """Layers that stay in 16 bit unless somebody asks: `pattern` is searched in a module's name.

    `diffusion`     for diffusion transformers only.
    """

    pattern: str
    reason: str
    source: str
    diffusion: bool = True

    def hits(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None


@dataclass(frozen=True, slots=True)
class Refused:
    """A model that one kind of method is known to fail: `identifiers` of its configuration and values it has.

    `activations`   ids of activations that are concerned.
    """

    model: str
    identifiers: tuple[str, ...]
    activations: tuple[str, ...]
    reason: str
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def concerns(self, config: Mapping[str, Any]) -> bool:
        named = not set(self.identifiers).isdisjoint(identifiers_of(config))
        return named and all(config.get(key) == value for key, value in self.config.items())


_OMNI_2728 = "vllm-project/vllm-omni issue 2728"

SENSITIVE: tuple[Sensitive, ...] = (
    Sensitive(
        r"(^|\.)(img_mod|txt_mod|adaLN_modulation|modulation|time_proj|double_stream_modulation_\w+"
        r"|single_stream_modulation|norm1\.linear|norm1_context\.linear|norm\.linear)(\.|$)",
        "modulation: an error here scales and shifts every token of a block",
        _OMNI_2728,
    ),
    Sensitive(
        r"(^|\.)(x_embedder|context_embedder|img_in|txt_in|patch_embedding|patch_embed|time_embed(ding)?"
        r"|time_text_embed|time_guidance_embed|timestep_embedder|guidance_embedder|text_embedder|condition_embedder"
        r"|image_embedder|caption_projection|cap_embedder|t_embedder)(\.|$)",
        "embedder of patches, time or text: small, and everything is computed from it",
        _OMNI_2728,
    ),
    Sensitive(
        r"^(proj_out|norm_out|final_layer|head|output_layer|all_final_layer)(\.|$)",
        "final layer: its error is the output's",
        _OMNI_2728,
    ),
    Sensitive(
        r"(^|\.)lm_head$", "head of a language model: producers leave it in 16 bit", "llm-compressor's recipes", False
    ),
)

#: Components of pipelines that no default method reaches.
FLOAT_COMPONENTS = re.compile(r"(text_encoder(_\d+)?|image_encoder|vae|audio_vae|vocoder|vqvae|safety_checker)")
FLOAT_COMPONENT_REASON = (
    "text encoders and VAEs stay in 16 bit: they are a small part of the time, and their error reaches every pixel"
)

REFUSED: tuple[Refused, ...] = (
    *(
        Refused(
            "Wan2.2-TI2V-5B",
            identifiers,
            _FOUR_BIT,
            "four-bit weights and activations were made to work for the 14B models of Wan2.2 only",
            "vllm-project/vllm-omni pull request 3578",
            config,
        )
        for identifiers, config in (
            (("WanTransformer3DModel",), {"in_channels": 48, "num_layers": 30}),
            (("ti2v",), {}),
        )
    ),
)


def is_diffusion(config: Mapping[str, Any]) -> bool:
    """True for the transformers of image and video models."""
    known = {name for family in diffusion.FAMILIES for name in family.identifiers if family.name != "t5-encoder"}
    names = identifiers_of(config)
    return any(name in known or re.search(r"Transformer[23]DModel$", name) for name in names)


def why_sensitive(name: str, config: Mapping[str, Any]) -> str:
    """Why a module stays in 16 bit by default, with the source; "" where nothing is known."""
    if keeps_float(name):
        return "embedding, router or norm: no producer quantizes it"
    for entry in SENSITIVE:
        if (not entry.diffusion or is_diffusion(config)) and entry.hits(name):
            return f"{entry.reason} ({entry.source})"
    return ""


def refusals(
    config: Mapping[str, Any], activations: Mapping[str, Iterable[str]], *, allowed: bool, component: str = ""
) -> list[Finding]:
    """Findings where a model gets what it is known to fail with. `activations` maps activation ids to modules."""
    found = []
    for entry in REFUSED:
        modules = [name for key in entry.activations for name in activations.get(key, ())]
        if modules and entry.concerns(config):
            found.append(
                finding(
                    "model-advice",
                    f"{entry.model}: {entry.reason} ({entry.source})",
                    severity="warning" if allowed else "error",
                    component=component,
                    modules=modules,
                    fix="" if allowed else "another method, or --allow model-advice",
                )
            )
    return found
