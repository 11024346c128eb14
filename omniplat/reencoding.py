"""Which weights with power-of-two scales may be rewritten in another format, and how far their scales may reach.

MX scales are powers of two, so a group's scale can be moved into the codes of a wider format. The *span* of a row is
the number of binades between its largest and its smallest group exponent, over groups that are not all zero
(producers write byte 0 for zero groups; those are never counted). The target has one scale per row, which puts the
largest group at the top of the target's range; what the smallest group loses follows from the span alone:

    mxfp4 -> e4m3      span <= 14: exact. 6 * 2^6 = 384 is the largest code that fits, 0.5 * 2^(6-14) = 2^-9 the
                       smallest
    mxfp8 -> e4m3      span <= 8 is accepted. Only what falls below e4m3's subnormals is rounded: within a group that
                       lies 8 binades below the largest, a relative L2 of about 2e-4 on Gaussian weights; whole
                       rows stay within 3e-6
    mxfp4 -> int8      span <= 3: exact. 12 * 2^3 = 96 is the largest code, of units of 0.5 * 2^e of the smallest group

Data only: `omniplat.oracle.reencode` is the definition in NumPy, `omniplat.portable.reencode` its form in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from omniplat.errors import InvalidSchemeError


@dataclass(frozen=True, slots=True)
class Reencoding:
    """One rule: weights of `source` become `target` where every row's span is at most `max_span`.

    `headroom` is the number of binades by which codes of the row's largest group are scaled up.
    """

    source: str
    target: str
    max_span: int
    headroom: int
    exact: bool


REENCODINGS: dict[tuple[str, str], Reencoding] = {
    (rule.source, rule.target): rule
    for rule in (
        Reencoding("mxfp4", "fp8-channel", 14, 6, exact=True),
        Reencoding("mxfp8", "fp8-channel", 8, 0, exact=False),
        Reencoding("mxfp4", "int8-channel", 3, 0, exact=True),
    )
}


def rule_for(source: str, target: str) -> Reencoding:
    """The rule between two weight ids; raises InvalidSchemeError where there is none."""
    try:
        return REENCODINGS[source, target]
    except KeyError:
        raise InvalidSchemeError(source, f"cannot be re-encoded as {target}") from None


def span_limit(source: str, target: str) -> int | None:
    """The largest span at which weights `source` may become `target`; None where no rule asks for one."""
    rule = REENCODINGS.get((source, target))
    return rule.max_span if rule is not None else None
