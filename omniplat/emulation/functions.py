"""Functions that stand in for those of a vendor's Python library, and take what those take."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from omniplat.emulation.core import Emulation, Implementation
from omniplat.emulation.schemas import OpSchema

_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD


def stand_in(schema: OpSchema, implementation: Implementation, emulation: Emulation) -> Callable[..., Any]:
    """A function with the signature of `schema`: TypeError for a call that does not fit it, VendorError for an argument
    that `implementation` knows nothing of. Defaults are the implementation's."""
    signature = signature_of(schema)
    known = inspect.signature(implementation).parameters
    op = f"{schema.namespace}.{schema.name}"

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        unknown = sorted(set(given) - set(known))
        emulation.require(op, not unknown, f"{', '.join(unknown)} is not emulated")
        return implementation(emulation, **given)

    call.__name__, call.__signature__ = schema.name, signature  # type: ignore[attr-defined]
    return call


def signature_of(schema: OpSchema) -> inspect.Signature:
    """Names, kinds and defaults of a function's parameters; a default is the text that stands for it."""
    (node,) = ast.parse(f"def {schema.text}: ...").body
    assert isinstance(node, ast.FunctionDef)
    names = [argument.arg for argument in node.args.args]
    defaults = [ast.unparse(default) for default in node.args.defaults]
    absent = [inspect.Parameter.empty] * (len(names) - len(defaults))
    named = zip(names, [*absent, *defaults], strict=True)
    parameters = [inspect.Parameter(name, _NAMED, default=default) for name, default in named]
    if node.args.vararg is not None:
        parameters.append(inspect.Parameter(node.args.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    if node.args.kwarg is not None:
        parameters.append(inspect.Parameter(node.args.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)
