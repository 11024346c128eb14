"""Names that one module has in different programs: where the language model stands, and renamed path segments.

Producers write rules in the names of the model that they loaded, engines and exporters rename modules, and a checkpoint
may have either's names. Data only; `omniplat.formats.aliases` uses it for rules that name nothing as they stand.
"""

from __future__ import annotations

#: Prefixes that stand for the same part of a model. The first that a name has is exchanged for the others.
PREFIXES: tuple[tuple[str, ...], ...] = (
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.audio_tower.", "audio_tower."),
    ("language_model.lm_head", "lm_head"),
    ("model.language_model.", "language_model.model.", "model."),
)

#: Path segments that stand for the same container.
SEGMENTS: tuple[tuple[str, str], ...] = (
    ("block_sparse_moe", "mlp"),
    ("routed_experts", "experts"),
)


def spellings_of(name: str) -> tuple[str, ...]:
    """The other names of a module, without its own."""
    prefix, others = next(((one, group) for group in PREFIXES for one in group if name.startswith(one)), ("", ("",)))
    rest = name.removeprefix(prefix)
    rests = [rest]
    segments = rest.split(".")
    for pair in SEGMENTS:
        for old, new in (pair, pair[::-1]):
            if old in segments:
                rests.append(".".join(new if segment == old else segment for segment in segments))
    return tuple(spelled for other in others for tail in rests if (spelled := other + tail) != name)
