"""Collecting the tensors of one checkpoint module from an engine that hands them over one by one."""

from __future__ import annotations

import numpy as np
import torch

from omniplat.canonical import Array
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError
from omniplat.packed import Part
from omniplat.roworder_apply import row_permutation
from omniplat.runtime.tensors import to_array

#: Types of which NumPy knows the bytes only; what they mean is in the scheme.
_BYTES = frozenset(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name))


def leaf_of(info: TensorInfo, module: str, *, stacked: bool = False) -> str:
    """What follows a module's name in its tensor's: `weight_scale`. Of stacked experts the engine makes `weight` out
    of the module's own name, so that `gate_up_proj_blocks` becomes `weight_blocks`."""
    rest = info.name.removeprefix(module)
    return f"weight{rest}" if stacked else rest.removeprefix(".")


class ModuleTensors:
    """The roles of one checkpoint module, until all of them are there.

    An engine may cut a tensor whose rows are fused on disk into its parts (q, k, v; gate, up), and put those in
    canonical order (`reordered`). Here the pieces are put together again as they were on disk, so that everything
    from there on has one path.
    """

    def __init__(
        self, part: Part, *, pieces: int = 1, reordered: bool = False, stacked: bool = False, bias: bool = False
    ) -> None:
        """`pieces` is the number of parts that the module holds; without `bias` that tensor is the engine's."""
        module = part.module
        self.name = module.name
        self._order = part.row_order
        self._count = pieces
        self._reordered = reordered
        self._stacked = stacked
        self._roles = {
            leaf_of(info, module.name, stacked=stacked): (role, info)
            for role, info in module.tensors.items()
            if bias or role != "bias"
        }
        self._pieces: dict[str, dict[int, Array]] = {}
        self._arrays: dict[str, Array] = {}

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(self._roles)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of tensors that have not come, or not all of their pieces."""
        return tuple(info.name for role, info in self._roles.values() if role not in self._arrays)

    def take(self, leaf: str, tensor: torch.Tensor, piece: int | None = None) -> bool:
        """Take one tensor, or piece number `piece` of it; True when it was the last of the module.

        A tensor that is no role is ignored. Raises InvalidCheckpointError for one that comes twice or has a shape
        that the checkpoint's header contradicts.
        """
        if leaf not in self._roles:
            return False
        role, info = self._roles[leaf]
        if role in self._arrays:
            raise InvalidCheckpointError("was delivered twice", key=info.name)
        array = to_array(tensor.view(torch.uint8) if tensor.dtype in _BYTES else tensor)
        shape = info.shape[1:] if self._stacked else info.shape
        if array.size != int(np.prod(shape)):
            if piece is None:
                raise InvalidCheckpointError(f"was delivered as {list(array.shape)}, not {list(shape)}", key=info.name)
            held = self._pieces.setdefault(leaf, {})
            if piece in held:
                raise InvalidCheckpointError(f"piece {piece} was delivered twice", key=info.name)
            held[piece] = array
            if len(held) < self._count:
                return False
            array = self._whole([held[number] for number in sorted(held)], info)
            del self._pieces[leaf]
        elif piece is not None and piece < self._count - 1:
            # The same one value for every piece: the last one counts.
            return False
        self._arrays[role] = array.reshape(shape)
        return not self.missing

    def arrays(self) -> dict[str, Array]:
        """All roles as stored; they are let go of."""
        arrays, self._arrays = self._arrays, {}
        self._roles = {}
        return arrays

    def _whole(self, pieces: list[Array], info: TensorInfo) -> Array:
        whole = np.concatenate(pieces)
        shape = info.shape[1:] if self._stacked else info.shape
        if whole.size != int(np.prod(shape)):
            raise InvalidCheckpointError(
                f"was delivered in pieces of {', '.join(str(list(piece.shape)) for piece in pieces)}, "
                f"which are not {list(shape)}",
                key=info.name,
            )
        if self._reordered:
            whole = whole[np.argsort(row_permutation(self._order, whole.shape[0]))]
        return whole
