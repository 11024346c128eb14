"""One declaration held against one module's headers: whether they agree, and what each adds to the other."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.modules import Module
from omniplat.formats.declared import Declared
from omniplat.formats.recognise import Stored
from omniplat.scheme import Scheme


def agrees(declared: Declared, stored: Stored) -> bool:
    """True when the headers show what is declared."""
    if not declared.quantizes:
        return not stored.quantized
    if declared.open_granularity and stored.quantized:
        return _same_codes(declared, stored)
    return stored.quantized and stored.weight is not None and stored_id(stored) == declared.scheme.weight_id


def differs_in_granularity(declared: Declared, stored: Stored) -> bool:
    """True where both have codes of one kind, and what the declared activation needs of the tensors is there."""
    activation = declared.scheme.activation
    is_static = activation is not None and not activation.dynamic and activation.second_scale == ""
    return _same_codes(declared, stored) and (not is_static or "input_scale" in stored.leaves)


def _same_codes(declared: Declared, stored: Stored) -> bool:
    weight = declared.scheme.weight
    found = stored.weight
    return found is not None and (found.element, found.second_scale) == (weight.element, weight.second_scale)


def settled(declared: Declared, stored: Stored) -> Declared:
    """`declared`, with what the metadata leaves to the tensors: the granularity, and whether the input is quantized.

    A static activation whose scale may be missing is none where it is missing.
    """
    if declared.open_granularity and stored.weight is not None:
        scheme = replace(declared.scheme, weight=stored.weight)
        declared = replace(declared, scheme=scheme, open_granularity=False)
    activation = declared.scheme.activation
    if activation is not None and declared.missing_ok:
        role = "input_global_scale" if activation.second_scale == "global" else "input_scale"
        is_static = activation.second_scale == "global" or not activation.dynamic
        if is_static and role in declared.missing_ok and role not in stored.leaves:
            return replace(declared, scheme=declared.scheme.with_activation(None))
    return declared


def stored_id(stored: Stored) -> str:
    return Scheme(stored.weight).weight_id if stored.weight is not None else "something unknown"


def hint_from_headers(module: Module, stored: Stored) -> Declared | None:
    """Activation that scales beside the weight imply, where there is no metadata to ask."""
    if stored.weight is None or not stored.quantized or stored.problem:
        return None
    scheme = Scheme(stored.weight)
    if stored.weight.second_scale == "global" and {"input_scale", "input_global_scale"} & module.leaves.keys():
        scheme = Scheme.parse(f"{scheme.weight_id}/nvfp4")
    elif stored.weight.element == "fp8_e4m3" and {"input_scale", "scale_input"} & module.leaves.keys():
        scheme = Scheme.parse(f"{scheme.weight_id}/fp8-tensor-static")
    return Declared(scheme)
