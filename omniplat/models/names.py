"""What a module's name alone tells: embeddings, norms and routers are unquantized by construction."""

from __future__ import annotations

import re

_EMBEDDING = re.compile(
    r"(^|\.)(wte|wpe|shared|relative_attention_bias|(\w+_)?embed(_tokens|_positions)?|(\w+_)?embeddings?(_table)?)$"
)
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate|gate\.wg|router\.(classifier|layer|proj))$")
_NORM = re.compile(r"(^|\.|_)(norm|layernorm|rmsnorm|ln)(_?\d+)?$", re.IGNORECASE)

#: `...experts.<i>.<leaf>`, `i` an int64 in decimal; the container may be called experts, moe.experts or routed_experts.
EXPERT = re.compile(r"(?P<container>(?:.*\.)?(?:routed_)?experts)\.(?P<index>[0-9]{1,18})\.(?P<leaf>[A-Za-z_]\w*)")


def is_embedding(name: str) -> bool:
    """True for look-up tables: their weight is 2-D and no linear layer."""
    return _EMBEDDING.search(name) is not None


def is_router(name: str) -> bool:
    """True for the gates that choose experts; producers keep them in 16 bit without listing them."""
    return _ROUTER.search(name) is not None


def is_norm(name: str) -> bool:
    return _NORM.search(name) is not None


def keeps_float(name: str) -> bool:
    """Modules that no quantizer touches unless told to: embeddings, routers and norms."""
    return is_embedding(name) or is_router(name) or is_norm(name)
