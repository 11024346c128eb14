"""Checkpoints that real producers wrote, loaded into the models of transformers and diffusers that they belong to. The
reference is the same model with the producer's own dequantized weights, and inputs that the oracle quantizes.

With OMNIPLAT_CORPUS the checkpoints of that folder are taken as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import omniplat
from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.checkpoint.reader import ShardReader
from omniplat.document import Plan
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.reading import read_canonical
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import Scheme
from tests.goldens.check import plan_of, rounds_to_bf16
from tests.goldens.entries import Entry, bundled, corpus
from tests.modules.models import Model, flux_inputs, qwen_image_inputs, run, tokens
from tests.modules.stand_in import StandIn, StandInExperts, put_in_place
from tests.modules.test_real_models import ARITHMETIC, OF_THE_NOISE, relative

#: Class of the model -> its library and inputs.
CLASSES: dict[str, tuple[str, Any]] = {
    "Qwen3ForCausalLM": ("transformers", tokens),
    "Qwen2MoeForCausalLM": ("transformers", tokens),
    "Qwen3MoeForCausalLM": ("transformers", tokens),
    "QwenImageTransformer2DModel": ("diffusers", qwen_image_inputs),
    "FluxTransformer2DModel": ("diffusers", flux_inputs),
}


def config_of(entry: Entry) -> dict[str, Any]:
    folder = entry.checkpoint / "transformer"
    found: dict[str, Any] = json.loads(((folder if folder.is_dir() else entry.checkpoint) / "config.json").read_text())
    return found


def class_of(entry: Entry) -> str:
    config = config_of(entry)
    return str(config.get("_class_name") or config["architectures"][0])


def entries() -> list[Entry]:
    """One of each name, of the classes that are known here."""
    every = {entry.name: entry for entry in (*corpus(), *bundled())}
    return [entry for _, entry in sorted(every.items()) if class_of(entry) in CLASSES]


def build(entry: Entry) -> nn.Module:
    """The checkpoint's model in float32 without its weights, in evaluation mode."""
    library = pytest.importorskip(CLASSES[class_of(entry)][0], reason="the model's library is not installed")
    config = {key: value for key, value in config_of(entry).items() if key != "quantization_config"}
    kind = getattr(library, class_of(entry))
    if not hasattr(kind, "config_class") or kind.config_class is None:
        made: nn.Module = kind.from_config(config)
    else:
        made = kind(kind.config_class(**config)).float()
    return made.eval()


class Reference:
    """The values behind an entry, by module of the checkpoint."""

    def __init__(self, entry: Entry, plan: Plan) -> None:
        self.goldens = {} if rounds_to_bf16(entry.name) else entry.goldens()
        (self.resolution,) = plan_of(entry).resolutions
        self.reader = ShardReader(self.resolution.component.root)
        self.executes = {module: layer.executes or "" for layer in plan.layers for module in layer.modules}

    def put_into(self, model: nn.Module, *, activations: bool) -> None:
        """Fill `model`: dequantized layers, and everything else as it is stored."""
        quantized = {m.name: m for m in self.resolution.modules if m.status == "ok"}
        layers: dict[str, nn.Module] = {}
        experts: dict[str, dict[tuple[int, str], StandIn]] = {}
        for name, module in quantized.items():
            weight = read_canonical(module, self.reader)
            layer = self._stand_in(name, weight, activations)
            container, _, leaf = name.rpartition(".")
            if ".experts." in name:
                container, _, index = container.rpartition(".")
                experts.setdefault(container, {})[int(index), leaf] = layer
            else:
                layers[name] = layer
        put_in_place(model, layers | {name: StandInExperts(found) for name, found in experts.items()})
        state = {
            name: to_tensor(self.reader.read(info)).float()
            for name, info in self.resolution.component.tensors.items()
            if name.rpartition(".")[0] not in quantized and ".experts." not in name
        }
        known = dict(model.named_parameters())
        missing = model.load_state_dict({n: t for n, t in state.items() if n in known}, strict=False).missing_keys
        assert set(missing) <= set(getattr(model, "all_tied_weights_keys", {})) | {n for n in missing if n not in known}

    def _stand_in(self, name: str, weight: CanonicalWeight, activations: bool) -> StandIn:
        tensors = weight.tensors
        values = self.goldens.get(f"{name}.weight")
        executes_a16 = Scheme.parse(self.executes[name]).activation is None
        bias = tensors.get("bias")
        return StandIn(
            oracle.dequantize(weight) if values is None else values,
            weight.scheme.activation if activations and not executes_a16 else None,
            to_tensor(bias) if bias is not None else None,
            {role: tensors[role] for role in INPUTS if role in tensors},
            tensors.get("pre_scale"),
        )


INPUTS = ("input_scale", "input_zero_point", "input_global_scale")


def placed(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, (ModelLinear, ModelExperts)))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_real_checkpoint_in_its_real_model(entry: Entry) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    library, inputs = CLASSES[class_of(entry)]
    model = Model(library, lambda: build(entry), inputs, "")
    with accelerate.init_empty_weights():
        module = build(entry)
    plan = omniplat.load_into(module, entry.checkpoint, "cpu")
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    planned = [layer for layer in plan.layers if layer.status == "ok"]
    assert planned
    assert len(list(placed(module))) == len(planned)

    reference, weights_only = build(entry), build(entry)
    values = Reference(entry, plan)
    values.put_into(reference, activations=True)
    values.put_into(weights_only, activations=False)
    found, expected = run(model, module), run(model, reference)
    noise = relative(found, run(model, weights_only))
    assert relative(found, expected) <= max(ARITHMETIC, OF_THE_NOISE * noise)
    has_activations = any(Scheme.parse(layer.executes or "").activation is not None for layer in planned)
    assert (noise > 10 * ARITHMETIC) == has_activations
