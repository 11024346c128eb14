"""Group contract: what a kernel may not do, whatever it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omniplat.conformance.build import routing_tensors, to_input
from omniplat.conformance.cases import Case, case_of, representative, schemes_of
from omniplat.conformance.checks import check, not_here
from omniplat.conformance.judge import expert_trial, linear_trial
from omniplat.conformance.subject import Subject
from omniplat.runtime.layers import LayerDescription, QuantExperts, QuantLinear, rebuild

#: What opcheck tests. Kernels are for inference: they have no gradient to register.
_OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
_EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_OWN = ("aten", "prims", "prim", "profiler")


def _cases(subject: Subject, profile: str) -> Iterable[Case]:
    """The first scheme of each capability, and one that quantizes its input where there is one."""
    for case in representative(subject):
        yield case
        others = [s for s in schemes_of(subject, case.capability, "quick") if s.activation is not None]
        if case.scheme.activation is None and others:
            yield case_of(case.capability, others[0], bias=case.bias)


def _first_cases(subject: Subject, profile: str) -> Iterable[Case]:
    """The first scheme of each capability: generating code costs seconds."""
    return representative(subject)


def _made(subject: Subject, case: Case, rows: int | None = None) -> tuple[QuantLinear | QuantExperts, tuple[Any, ...]]:
    """A layer of the case, and the arguments of a call."""
    if case.experts:
        trial = expert_trial(subject, case)
        routing = trial.routing(rows)
        return trial.layer, (to_input(trial.input(rows), case.dtype, subject), *routing_tensors(routing, subject))
    linear = linear_trial(subject, case)
    return linear.layer, (to_input(linear.input(rows), case.dtype, subject),)


@check("contract", _cases)
def test_nothing_is_written_to(subject: Subject, case: Case) -> None:
    """Neither the input, nor routing, nor what `prepare` returned, nor what it was given."""
    layer, arguments = _made(subject, case)
    state = {name: _bytes(tensor) for name, tensor in layer.named_buffers()}
    given = [_bytes(tensor) for tensor in arguments]
    layer(*arguments)
    for index, (before, tensor) in enumerate(zip(given, arguments, strict=True)):
        assert torch.equal(before, _bytes(tensor)), f"{case.id}: argument {index} was written to"
    for name, tensor in layer.named_buffers():
        assert torch.equal(state[name], _bytes(tensor)), f"{case.id}: buffer {name} was written to"


@check("contract", _cases)
def test_the_output_is_new(subject: Subject, case: Case) -> None:
    """An output is nobody else's memory: neither the input's, nor a buffer's, nor an earlier output's."""
    layer, arguments = _made(subject, case)
    first = layer(*arguments)
    held = {t.untyped_storage().data_ptr() for t in (*arguments, *layer.buffers()) if t.numel()}
    assert first.untyped_storage().data_ptr() not in held, f"{case.id}: the output shares memory"
    before = _bytes(first)
    layer(*arguments)
    assert torch.equal(before, _bytes(first)), f"{case.id}: a second call changed the first output"


@check("contract", _cases)
def test_repeatable(subject: Subject, case: Case) -> None:
    """The same bits again, also after a call of another size."""
    layer, arguments = _made(subject, case)
    _, others = _made(subject, case, 2)
    first = _bytes(layer(*arguments))
    for _ in range(3):
        layer(*others)
        assert torch.equal(first, _bytes(layer(*arguments))), f"{case.id}: another result for the same input"


@check("contract", _cases)
def test_state_round_trip(subject: Subject, case: Case) -> None:
    """Description and state dict are all of a layer: rebuilt from them it computes the same bits."""
    layer, arguments = _made(subject, case)
    text = layer.describe().to_json()
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    again = rebuild(LayerDescription.from_json(text), state)
    assert again.describe() == layer.describe()
    assert torch.equal(_bytes(layer(*arguments)), _bytes(again(*arguments))), f"{case.id}: rebuilt, it differs"


@check("contract", _cases)
def test_opcheck(subject: Subject, case: Case) -> None:
    """Every operator of the backend's own that a call reaches passes torch.library.opcheck."""
    layer, arguments = _made(subject, case)
    with _recorded() as calls:
        layer(*arguments)
    assert calls, f"{case.id}: `apply` calls no operator of torch.library"
    for operator, args, kwargs in calls:
        torch.library.opcheck(operator, args, kwargs, test_utils=_opchecks(args, kwargs))


def _opchecks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """`test_schema` compares tensors by `torch.allclose`, which takes no 8-bit floats. Where an operator is given some,
    the checks above stand in for it: nothing is written to, and the output is new."""
    takes = any(isinstance(leaf, torch.Tensor) and leaf.dtype in _EIGHT_BIT for leaf in tree_leaves((args, kwargs)))
    return tuple(name for name in _OPCHECKS if name != "test_schema" or not takes)


@check("contract", _cases)
def test_traces_without_a_break(subject: Subject, case: Case) -> None:
    """torch.compile(fullgraph=True) with any number of rows from one graph, to the same result."""
    layer, arguments = _made(subject, case)
    eager = layer(*arguments)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    except RuntimeError as error:
        not_here(f"torch.compile is not available: {error}")
    found = compiled(*arguments)
    assert found.shape == eager.shape
    assert found.dtype == eager.dtype
    assert torch.equal(_bytes(found), _bytes(eager)), f"{case.id}: traced, it computes something else"
    _, others = _made(subject, case, case.rows + 4)
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    compiled(*others)
    assert counters["stats"]["unique_graphs"] == before, f"{case.id}: another number of rows traces again"
    torch._dynamo.reset()


@check("contract", _first_cases)
def test_generated_code(subject: Subject, case: Case) -> None:
    """The code of torch.compile's default backend is right. Not to the bit: what it fuses is rounded less often."""
    problem = _without_code(subject.torch_device)
    if problem:
        not_here(f"torch.compile generates no code here: {problem}")
    torch._dynamo.reset()
    if case.experts:
        experts = expert_trial(subject, case)
        experts.layer.compile(fullgraph=True, dynamic=True)
        experts.assert_right(experts.input(), experts.routing())
    else:
        linear = linear_trial(subject, case)
        linear.layer.compile(fullgraph=True, dynamic=True)
        linear.assert_within_bound(linear.input())
    torch._dynamo.reset()


@cache
def _without_code(device: torch.device) -> str:
    """Why not even one addition is compiled here, such as a missing C++ compiler or Triton; "" where it is."""
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: x + 1, fullgraph=True)(torch.ones(2, device=device))
    except RuntimeError as error:
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as bytes: NaN and the sign of zero count."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).clone()


@contextmanager
def _recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Calls of operators that are not torch's own."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func.namespace not in _OWN:
                calls.append((func, args, dict(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]
        yield calls
