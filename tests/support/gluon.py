"""Runs kernels that are written in Gluon on the CPU, from their own source, which Triton has no interpreter for.

`Interpreted(kernel)` takes the Python functions behind `gluon.jit` and gives them other globals: `gl` is `Language`
below, and functions of the kernel's module call one another. Each program of a grid then runs by itself, on numpy
arrays, with the integers and floats of the types that Triton would give them; assembly by `tests.support.ptx`.

It is stricter than a device: what reads or writes outside of a tensor, or in the gaps between its rows, is an error, as
is a load of 16 bytes that is not aligned to them. Layouts are Gluon's own, and have to agree as they do there; where a
warp works together they say which elements are its threads'. Not seen here: races, the order in which tensor cores add
up, and what the compiler makes of it.

Only what the kernels here use is known.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from omniplat.runtime.tensors import to_array
from tests.support.ptx import Register, evaluated, reads_after_writes

Values = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Numbers; those of a scalar have no layout, nor have those whose layout Gluon infers."""

    values: Values
    layout: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def to(self, dtype: np.dtype[Any], bitcast: bool = False) -> Tensor:
        return Tensor(self.values.view(dtype) if bitcast else self.values.astype(dtype), self.layout)

    def __index__(self) -> int:
        assert not self.shape
        return int(self.values)

    def __bool__(self) -> bool:
        raise TypeError("what a program does may not depend on numbers that it computes")

    def __add__(self, other: Operand) -> Tensor:
        return _elementwise(operator.add, self, other)

    def __sub__(self, other: Operand) -> Tensor:
        return _elementwise(operator.sub, self, other)

    def __mul__(self, other: Operand) -> Tensor:
        return _elementwise(operator.mul, self, other)

    def __and__(self, other: Operand) -> Tensor:
        return _elementwise(operator.and_, self, other)

    def __floordiv__(self, other: Operand) -> Tensor:
        return _elementwise(_of_naturals(operator.floordiv), self, other)

    def __mod__(self, other: Operand) -> Tensor:
        return _elementwise(_of_naturals(operator.mod), self, other)

    def __lt__(self, other: Operand) -> Tensor:
        return _elementwise(operator.lt, self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return _elementwise(operator.gt, self, other)

    def __rsub__(self, other: int) -> Tensor:
        return _elementwise(operator.sub, other, self)

    def __neg__(self) -> Tensor:
        return Tensor(-self.values, self.layout)

    __radd__ = __add__
    __rmul__ = __mul__


Operand = Tensor | int | float


def _of_naturals(operation: Callable[[Values, Values], Values]) -> Callable[[Values, Values], Values]:
    """Below zero a device rounds to zero, and Python down."""

    def computed(a: Values, b: Values) -> Values:
        assert np.min(a) >= 0
        assert np.min(b) > 0
        return operation(a, b)

    return computed


def _layout(*operands: Tensor) -> Any:
    """That of what is computed from all of them: all have the same one, and as many dimensions, but for scalars."""
    blocks = [operand for operand in operands if operand.values.ndim]
    for block in blocks[1:]:
        if block.values.ndim != blocks[0].values.ndim or block.layout != blocks[0].layout:
            raise ValueError(f"{block.shape}, {block.layout} beside {blocks[0].shape}, {blocks[0].layout}")
    return blocks[0].layout if blocks else None


def _broadcast(*operands: Tensor) -> list[Values]:
    """The numbers of all of them, in one shape."""
    return list(np.broadcast_arrays(*(operand.values for operand in operands)))


def _elementwise(operation: Callable[[Any, Any], Values], a: Operand, b: Operand) -> Tensor:
    """Python's own numbers take the type of what they meet."""
    layout = _layout(*(operand for operand in (a, b) if isinstance(operand, Tensor)))
    left, right = (operand.values if isinstance(operand, Tensor) else operand for operand in (a, b))
    with np.errstate(over="ignore"):
        found = np.asarray(operation(left, right))
    if found.dtype == np.float64:
        raise TypeError(f"{left.dtype} and {right.dtype} are one type for Triton, and another one for numpy")
    return Tensor(found, layout)


def _tensor(value: Operand) -> Tensor:
    """Python's integers are of 32 bits, where those hold them."""
    if isinstance(value, Tensor):
        return value
    integer = np.int32 if -(2**31) <= value < 2**31 else np.int64
    return Tensor(np.asarray(value, np.float32 if isinstance(value, float) else integer))


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """A tensor's elements one behind another, at `address`; those `held` are its own, others lie between its rows."""

    elements: Values
    held: NDArray[np.bool_]
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = extent if tensor.numel() else 0
        held = torch.zeros(extent, dtype=torch.bool)
        held.as_strided(tensor.shape, tensor.stride()).fill_(True)
        elements = to_array(tensor.as_strided((extent,), (1,)))
        assert not extent or elements.ctypes.data == tensor.data_ptr()
        return cls(elements, held.numpy(), tensor.data_ptr())

    def checked(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        inside = (places >= 0) & (places < len(self.elements))
        if not inside.all():
            raise IndexError(f"{places[~inside][0]} is outside of {len(self.elements)} elements")
        if not self.held[places].all():
            raise IndexError("between rows")
        return places

    def load(self, addresses: Register) -> Register:
        """16 bytes from each of the addresses, as four numbers."""
        if (addresses % np.uint64(16)).any():
            raise ValueError("16 bytes are loaded from where none can be")
        width = self.elements.itemsize
        first = (addresses.astype(np.int64) - self.address) // width
        places = self.checked(first[..., None] + np.arange(16 // width))
        return self.elements[places].view(np.uint32).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _PointerType:
    element_ty: np.dtype[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Pointer:
    """Elements of a tensor in memory, by their places there."""

    memory: _Memory
    places: Tensor

    @property
    def dtype(self) -> _PointerType:
        return _PointerType(self.memory.elements.dtype)

    def __add__(self, other: Operand) -> Pointer:
        return Pointer(self.memory, self.places + _tensor(other).to(np.dtype(np.int64)))

    def addresses(self) -> Tensor:
        places = self.places
        return Tensor(self.memory.address + places.values * self.memory.elements.itemsize, places.layout)


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    values: Values

    def store(self, value: Tensor) -> None:
        assert value.shape == self.values.shape
        assert value.dtype == self.values.dtype
        self.values[...] = value.values

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        assert start + length <= self.values.shape[dim]
        return _Shared(self.values[(builtins.slice(None),) * dim + (builtins.slice(start, start + length),)])

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.values.copy(), layout)


def _range(*limits: int | Tensor) -> Iterator[Tensor]:
    """A loop counts in 32 bits."""
    return (_tensor(i) for i in builtins.range(*(operator.index(limit) for limit in limits)))


class Language:
    """Gluon's, as one program of the grid has it."""

    int16, int32, int64, float16, float32, bfloat16 = (
        np.dtype(kind) for kind in (np.int16, np.int32, np.int64, np.float16, np.float32, ml_dtypes.bfloat16)
    )

    def __init__(self, program: tuple[int, int, int]) -> None:
        from triton.experimental.gluon import language

        self._program = program
        self.BlockedLayout = language.BlockedLayout
        self.SliceLayout = language.SliceLayout
        self.SwizzledSharedLayout = language.SwizzledSharedLayout

    def program_id(self, axis: int) -> Tensor:
        return _tensor(self._program[axis])

    @staticmethod
    def static_assert(condition: bool) -> None:
        assert condition

    @staticmethod
    def static_range(*limits: int) -> range:
        return builtins.range(*limits)

    @staticmethod
    def arange(start: int, end: int, layout: Any) -> Tensor:
        assert (end - start).bit_count() == 1
        return Tensor(np.arange(start, end, dtype=np.int32), layout)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: np.dtype[Any], layout: Any) -> Tensor:
        return Tensor(np.zeros(tuple(shape), dtype), layout)

    @staticmethod
    def zeros_like(value: Tensor) -> Tensor:
        return Tensor(np.zeros_like(value.values), value.layout)

    def expand_dims(self, value: Tensor, axis: int) -> Tensor:
        assert isinstance(value.layout, self.SliceLayout)
        assert value.layout.dim == axis
        return Tensor(np.expand_dims(value.values, axis), value.layout.parent)

    @staticmethod
    def minimum(a: Operand, b: Operand) -> Tensor:
        return _elementwise(np.minimum, _tensor(a), _tensor(b))

    @staticmethod
    def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
        left, right = _tensor(a), _tensor(b)
        assert left.dtype == right.dtype
        return Tensor(np.where(condition.values, left.values, right.values), _layout(condition, left, right))

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        _layout(a, b)
        return Tensor(np.stack((a.values, b.values), -1))

    @staticmethod
    def reshape(value: Tensor, shape: Sequence[int]) -> Tensor:
        return Tensor(value.values.reshape(shape))

    @staticmethod
    def permute(value: Tensor, order: Sequence[int]) -> Tensor:
        return Tensor(value.values.transpose(order))

    @staticmethod
    def allocate_shared_memory(dtype: np.dtype[Any], shape: Sequence[int], layout: Any) -> _Shared:
        return _Shared(np.full(tuple(shape), np.nan, dtype))

    @staticmethod
    def load(pointer: Pointer, mask: Tensor | None = None, other: Operand | None = None) -> Tensor:
        assert (mask is None) == (other is None)
        memory, places = pointer.memory, pointer.places
        if mask is None:
            return Tensor(np.asarray(memory.elements[memory.checked(places.values)]), places.layout)
        at, inside = _broadcast(places, mask)
        found = np.full(at.shape, _tensor(other).values, memory.elements.dtype)
        found[inside] = memory.elements[memory.checked(at[inside])]
        return Tensor(found, _layout(places, mask))

    @staticmethod
    def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
        memory = pointer.memory
        assert value.dtype == memory.elements.dtype
        _layout(pointer.places, value, mask)
        at, values, inside = _broadcast(pointer.places, value, mask)
        memory.elements[memory.checked(at[inside])] = values[inside]

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Sequence[Tensor | Pointer], dtype: Sequence[np.dtype[Any]],
        is_pure: bool, pack: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """An element is a register."""
        assert is_pure
        assert pack == 1
        given = [arg.addresses() if isinstance(arg, Pointer) else arg for arg in args]
        letters = constraints.split(",")
        outputs, taken = letters[: len(dtype)], letters[len(dtype) :]
        widths = {"r": ("i4", "u4"), "l": ("i8", "u8"), "f": ("f4",)}
        for letter, kind in zip(
            [letter.lstrip("=&") for letter in outputs] + taken,
            [*dtype, *(arg.dtype for arg in given)],
            strict=True,
        ):
            assert f"{kind.kind}{kind.itemsize}" in widths[letter], f"{kind} for {letter}"
        assert all(letter.startswith("=") for letter in outputs)
        if reads_after_writes(asm, len(dtype)):
            assert all(letter.startswith("=&") for letter in outputs), "inputs are read when outputs are written"
        layout = _layout(*given)
        if "mma." in asm:
            self._check_warps(layout)
        pointers = [arg for arg in args if isinstance(arg, Pointer)]
        found = evaluated(
            asm,
            len(dtype),
            [arg.values.view(f"u{arg.dtype.itemsize}") for arg in given],
            pointers[0].memory.load if pointers else None,
        )
        return tuple(Tensor(value.view(kind), layout) for value, kind in zip(found, dtype, strict=True))

    def _check_warps(self, layout: Any) -> None:
        """Each 32 elements along dimension 0 are those of a warp's threads, at the same places of the others."""
        assert isinstance(layout, self.BlockedLayout)
        ones = [1] * (len(layout.size_per_thread) - 1)
        assert layout.size_per_thread[0] == 1
        assert list(layout.threads_per_warp) == [32, *ones]
        assert list(layout.warps_per_cta)[1:] == ones


class Interpreted:
    """Stands in for a kernel of `gluon.jit`: `Interpreted(kernel)[grid](*arguments, **constants)`."""

    def __init__(self, kernel: Any) -> None:
        self.__name__ = kernel.fn.__name__
        self._module = kernel.fn.__globals__

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(
            *arguments: torch.Tensor | int, num_warps: int, maxnreg: int | None = None, **constants: object
        ) -> None:
            given = [
                Pointer(_Memory.of(argument), Tensor(np.asarray(0, np.int64)))
                if isinstance(argument, torch.Tensor)
                else _tensor(argument)
                for argument in arguments
            ]
            for program in np.ndindex(*grid):
                self._functions(Language(program))[self.__name__](*given, **constants)

        return launch

    def _functions(self, language: Language) -> dict[str, Any]:
        """The module's functions, which call one another, and no longer Triton."""
        names: dict[str, Any] = {"__builtins__": builtins, "gl": language, "range": _range}
        for name, value in self._module.items():
            if isinstance(getattr(value, "fn", None), FunctionType):
                names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        return names
