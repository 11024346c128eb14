"""Planning the layers of one component: a kernel for each or the reasons against all, and what is to be said of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from omniplat.backend import BackendSpec
from omniplat.capability import Accepted, Capability, Rejected, compare_activation, matches
from omniplat.checkpoint.folder import Component
from omniplat.device import Device
from omniplat.document import PlanLayer, PlanRule, PlanTrace
from omniplat.engines import tensors_below, undeliverable
from omniplat.errors import BackendUnavailableError
from omniplat.findings import Finding, finding
from omniplat.formats.resolved import ResolvedModule
from omniplat.layer import LayerSpec
from omniplat.legality import TP_SIZES, Cut, assembled_spec, cut_layer
from omniplat.match import Candidate, Match, Policy, match
from omniplat.moe_block import moe_details
from omniplat.packed import PackedLayer
from omniplat.packing import Packed
from omniplat.preflight import Scales
from omniplat.scheme import Scheme, TensorQuant

_ACTIVATION_NOTES = {
    "weight-only": "weight-only",
    "upgraded": "activation-upgraded",
    "regrouped": "activation-regrouped",
}
_NO_KERNEL = "unsupported-combination"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a plan is to run: backend, device, parallel sizes, what the caller allows, which engine's loader."""

    spec: BackendSpec
    device: Device
    tp: int = 1
    ep: int = 1
    policy: Policy = field(default_factory=Policy)
    is_default: bool = False
    reason: str = ""
    engine: str = ""


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer of the plan with what the loader needs: its modules and the capability that was chosen."""

    layer: PlanLayer
    packed: PackedLayer
    capability: Capability | None

    @property
    def impl(self) -> str:
        """The kernel's "module:Class". Raises BackendUnavailableError for one that is only planned on."""
        assert self.capability is not None
        if not self.capability.impl:
            raise BackendUnavailableError(str(self.layer.backend), f"kernel {self.capability.name} is only planned on")
        return self.capability.impl


@cache
def _details_of(quant: TensorQuant | None) -> dict[str, Any] | None:
    return asdict(quant) | {"block": list(quant.block)} if quant is not None else None


def _details(scheme: Scheme) -> dict[str, Any]:
    details: dict[str, Any] = {
        "weight": _details_of(scheme.weight),
        "activation": _details_of(scheme.activation),
        "pre_scale": scheme.pre_scale,
    }
    return details | ({"transform": list(scheme.transform)} if scheme.is_transformed else {})


@dataclass(frozen=True, slots=True)
class _Answer:
    """What planning found for one layer. `faster` is the candidate that the other preference would choose."""

    status: str
    capability: Capability | None = None
    executes: str | None = None
    trace: tuple[PlanTrace, ...] = ()
    alternative: str | None = None
    faster: Candidate | None = None


class LayerPlanner:
    """Plans the layers of one component; equal layers are matched once."""

    def __init__(
        self,
        packed: Packed,
        target: Target,
        component: Component | None = None,
        preflight: Scales | None = None,
    ) -> None:
        self._packed = packed
        self._target = target
        self._preflight = preflight
        # Only what lies in a checkpoint can be written out.
        self._fix = "omniplat convert SRC DST --to bf16 writes it dequantized" if component is not None else ""
        stored = component.tensors.values() if component is not None and target.engine else ()
        names = [module.name for layer in packed.layers for module in layer.modules] if stored else []
        self._below = tensors_below(names, stored) if stored else {}
        self._matches: dict[tuple[LayerSpec, frozenset[tuple[str, int]]], Match] = {}
        self._notes: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._severities: dict[tuple[str, str], str] = {}

    def plan(self, layer: PackedLayer) -> PlannedLayer:
        spec, modules = layer.spec, layer.modules
        tp_cuts = {size: cut_layer(layer, size) for size in TP_SIZES}
        status = self._status(layer)
        spans = self._spans(layer) if status == "ok" else {}
        answer = self._answer(layer, status, self._parallel_problem(layer, tp_cuts), spans)
        capability = answer.capability
        first = modules[0]
        stored = sum(module.stored_bytes for module in modules) // self._shares(layer)
        resident = int(stored * capability.kept(spec.scheme.weight_id)) if capability is not None else stored
        if answer.faster is not None:
            self._note_faster(layer, answer.faster, stored, resident)
        document = PlanLayer(
            name=spec.name,
            component=spec.component,
            op=spec.op,
            modules=tuple(sorted(module.name for module in modules)),
            shape=_shape(spec),
            declared=_joined(layer, declared=True),
            stored=_joined(layer, declared=False) or "",
            executes=answer.executes,
            details=_details(spec.scheme) | moe_details(spec.moe, layer.block),
            status=answer.status,
            container=first.storage.container,
            stored_dtype=first.stored_dtype,
            legal_tp=self._legal_tp(layer, tp_cuts, status, spans),
            legal_ep=tuple(_divisors(spec.moe.experts)) if spec.moe is not None else (),
            decided_by=PlanRule(first.decided_by.file, first.decided_by.rule, first.decided_by.reading),
            backend=self._target.spec.name if capability is not None else None,
            kernel=capability.name if capability is not None else None,
            via=(capability.via or None) if capability is not None else None,
            variants=capability.variants if capability is not None else (),
            alternative=answer.alternative,
            trace=answer.trace,
            stored_bytes=stored,
            resident_bytes=resident,
            peak_load_bytes=resident + max(module.stored_bytes for module in modules),
            scale_spans=spans,
        )
        return PlannedLayer(document, layer, capability)

    def _answer(self, layer: PackedLayer, status: str, parallel_problem: str, spans: Mapping[str, int]) -> _Answer:
        """Which kernel runs the layer, or why none does; findings about it are noted."""
        spec, target, modules = layer.spec, self._target, layer.modules
        if status == "unquantized":
            # The model's own linear layer runs it; there is nothing to dispatch.
            return _Answer("unsupported" if parallel_problem else status, executes=spec.scheme.id)
        if status == "unsupported":
            reasons = sorted({text for module in modules for text in module.problems})
            needed = {"rule": "scheme", "needed": "a documented scheme"}
            return _Answer(status, trace=tuple(PlanTrace(target.spec.name, needed | {"found": r}) for r in reasons))
        if status != "ok":
            return _Answer(status)
        assembled = assembled_spec(layer, target.tp, target.ep)
        outcome = self._match(assembled, spans)
        self._note_refused(layer, outcome, spans)
        trace = _trace(outcome, target.spec)
        if outcome.chosen is None:
            self._notes[_NO_KERNEL, _unsupported(layer, target)] += [m.name for m in modules]
            return _Answer("unsupported", trace=trace)
        if parallel_problem:
            return _Answer("unsupported", trace=trace)
        if problems := self._engine_problems(layer):
            needed = {"rule": "loader", "needed": "tensors that it delivers"}
            return _Answer(
                "unsupported", trace=tuple(PlanTrace(target.engine, needed | {"found": p}) for p in problems)
            )
        decision = outcome.chosen.decision
        assert isinstance(decision, Accepted)
        self._note_activation(layer, decision, outcome.chosen.capability)
        self._note_growth(layer, outcome.chosen.capability)
        self._note_quirks(outcome.chosen.capability, modules)
        return _Answer(
            status,
            outcome.chosen.capability,
            # blocks of fewer rows with the scales repeated are the stored ones' values
            decision.executes.replace(assembled.scheme.weight_id, spec.scheme.weight_id),
            trace,
            outcome.alternative.capability.name if outcome.alternative is not None else None,
            outcome.faster,
        )

    def _status(self, layer: PackedLayer) -> str:
        if layer.spec.name in self._packed.invalid or any(m.status == "invalid" for m in layer.modules):
            return "invalid"
        if any(m.status == "unsupported" for m in layer.modules):
            return "unsupported"
        schemes = (layer.spec.scheme, *((layer.spec.moe.w2_scheme,) if layer.spec.moe else ()))
        return "unquantized" if all(scheme is None or scheme.is_unquantized for scheme in schemes) else "ok"

    # -- parallelism --------------------------------------------------------------------------------

    def _parallel_problem(self, layer: PackedLayer, cuts: dict[int, Cut]) -> str:
        target, spec = self._target, layer.spec
        names = [module.name for module in layer.modules]
        cut = cuts[target.tp] if target.tp in cuts else cut_layer(layer, target.tp)
        if not cut.legal:
            self._notes["tp-not-divisible", f"tp = {target.tp}: {cut.problem}"] += names
            return cut.problem
        if spec.moe is not None and spec.moe.experts % target.ep:
            problem = f"{spec.moe.experts} experts are not a multiple of ep = {target.ep}"
            self._notes["ep-not-divisible", problem] += names
            return problem
        return ""

    def _engine_problems(self, layer: PackedLayer) -> list[str]:
        """Why the asked engine's loader cannot bring the layer's tensors."""
        if not self._target.engine:
            return []
        problems = undeliverable(self._target.engine, self._packed.family, layer, self._below)
        for reason, names in problems.items():
            self._notes["engine-cannot-load", f"{self._target.engine}: {reason}"] += names
        return list(problems)

    def _shares(self, layer: PackedLayer) -> int:
        if layer.spec.moe is not None:
            return self._target.tp * self._target.ep
        return self._target.tp if layer.split.style != "replicated" else 1

    def _legal_tp(
        self, layer: PackedLayer, cuts: dict[int, Cut], status: str, spans: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Sizes at which no shard cuts anything and, where a kernel runs the whole layer, one runs the shard."""
        legal = tuple(size for size, cut in cuts.items() if cut.legal)
        if status != "ok" or self._match(assembled_spec(layer, 1, 1), spans).chosen is None:
            return legal
        shards = {size: assembled_spec(layer, size, 1) for size in legal}
        return tuple(size for size, shard in shards.items() if self._match(shard, spans).chosen is not None)

    # -- kernels ------------------------------------------------------------------------------------

    def _match(self, spec: LayerSpec, spans: Mapping[str, int] | None = None) -> Match:
        key = replace(spec, name="", component="", parts=()), frozenset((spans or {}).items())
        if key not in self._matches:
            target = self._target
            self._matches[key] = match(spec, target.spec.capabilities, target.device, target.policy, spans)
        return self._matches[key]

    # -- values of scales ---------------------------------------------------------------------------

    def _spans(self, layer: PackedLayer) -> Mapping[str, int]:
        """Spans of the layer's scales where the preflight reads them; what is wrong with the scales is noted."""
        if self._preflight is None:
            return {}
        target = self._target
        outcome = self._match(assembled_spec(layer, target.tp, target.ep))
        via = outcome.chosen.capability.via if outcome.chosen is not None else ""
        found = self._preflight.scan(layer, via, outcome.alternative is not None)
        for module, problem in found.problems.items():
            self._notes["scale-not-finite", problem].append(module)
        return found.spans

    def _note_refused(self, layer: PackedLayer, outcome: Match, spans: Mapping[str, int]) -> None:
        """A re-encoding that was planned from headers alone, and that the spans forbid."""
        if not spans:
            return
        target = self._target
        planned = self._match(assembled_spec(layer, target.tp, target.ep)).chosen
        chosen = outcome.chosen
        if planned is None or (chosen is not None and chosen.capability == planned.capability):
            return
        found = ", ".join(f"{span} binades of {weight}" for weight, span in spans.items())
        instead = chosen.capability.name if chosen is not None else "no kernel"
        message = (
            f"scales of a row span {found}, too many for {planned.capability.name} via {planned.capability.via}; "
            f"{instead} runs it"
        )
        self._notes["reencode-refused", message] += [module.name for module in layer.modules]
        if chosen is None:
            self._severities["reencode-refused", message] = "error"

    def _note_faster(self, layer: PackedLayer, faster: Candidate, stored: int, resident: int) -> None:
        """What the other preference would choose, and what it would cost."""
        assert isinstance(faster.decision, Accepted)
        capability = faster.capability
        larger = int(stored * capability.kept(layer.spec.scheme.weight_id))
        via = f" via {capability.via}" if capability.via else ""
        message = (
            f"--prefer speed would run {_ids(layer)} on {capability.name}{via} as {faster.decision.executes}, "
            f"in {larger / max(resident, 1):.2g} times the memory"
        )
        self._notes["faster-option", message] += [module.name for module in layer.modules]

    def _note_activation(self, layer: PackedLayer, decision: Accepted, capability: Capability) -> None:
        for scheme, modules in _by_scheme(layer):
            declared, executed = scheme.activation_id, capability.executes or scheme.activation_id
            code = _ACTIVATION_NOTES.get(compare_activation(declared, executed), "")
            if code:
                message = f"declared {scheme.id}, executes {scheme.weight_id}/{executed}"
                self._notes[code, message] += [module.name for module in modules]
        if decision.instead:
            first = (*capability.scale_rules[:1], *capability.roundings[:1], capability.scale_format)
            own = ", ".join(filter(None, first))
            message = f"declared {_ids(layer)} with {decision.instead}, {capability.name} quantizes by {own}"
            self._notes["activation-regrouped", message] += [module.name for module in layer.modules]

    def _note_growth(self, layer: PackedLayer, capability: Capability) -> None:
        """A layer that is kept larger than it is stored: where memory is preferred, nothing here can follow that."""
        kept = capability.kept(layer.spec.scheme.weight_id)
        if kept <= 1.0:
            return
        form = f", as {capability.via}" if capability.via else ""
        # Kernels that grow by little are chosen as if they did not: there may be another.
        if self._target.policy.prefer == "memory" and capability.resident > 1.0:
            message = (
                f"{self._target.device} has no kernel that runs {_ids(layer)} in the size it is stored in: "
                f"{capability.name} keeps it in {kept:.3g} times that{form}"
            )
        else:
            message = f"{capability.name} keeps {_ids(layer)} in {kept:.3g} times the size it is stored in{form}"
        self._notes["kept-larger", message] += [module.name for module in layer.modules]

    def _note_quirks(self, capability: Capability, modules: Sequence[ResolvedModule]) -> None:
        for quirk in self._target.spec.quirks:
            here = not quirk.archs or self._target.device.arch in quirk.archs
            if here and matches(quirk.kernels, capability.name):
                message = f"{capability.name}: {quirk.text} ({quirk.source})"
                self._notes["known-quirk", message] += [module.name for module in modules]

    def findings(self) -> list[Finding]:
        component = self._packed.layers[0].spec.component if self._packed.layers else ""
        return [
            finding(
                code,
                message,
                severity=self._severities.get((code, message), ""),
                component=component,
                modules=names,
                fix=self._fix if code == _NO_KERNEL else "",
            )
            for (code, message), names in sorted(self._notes.items())
        ]


def _by_scheme(layer: PackedLayer) -> list[tuple[Scheme, Sequence[ResolvedModule]]]:
    """A layer's schemes and the modules of each: two of experts whose w2 has another than w13."""
    second = layer.spec.moe.w2_scheme if layer.spec.moe is not None else None
    if second is None:
        return [(layer.spec.scheme, layer.modules)]
    w13, w2 = ([part.module for group in groups for part in group] for groups in (layer.w13, layer.w2))
    return [(layer.spec.scheme, w13), (second, w2)]


def _ids(layer: PackedLayer) -> str:
    return "+".join(scheme.id for scheme, _ in _by_scheme(layer))


def _unsupported(layer: PackedLayer, target: Target) -> str:
    message = f"{target.device} has no kernel for {layer.spec.op} with {_ids(layer)}"
    if any(scheme.weight.block == (1, 1) for scheme, _ in _by_scheme(layer)):
        message += ": weights of several rows share a scale, and by rows that is a scale for each weight"
    return message


def _trace(outcome: Match, spec: BackendSpec) -> tuple[PlanTrace, ...]:
    """The answers of the kernels of the same op; of all kernels where none accepts."""
    if not spec.capabilities:
        nothing = {"rule": "capabilities", "needed": "a kernel", "found": f"backend {spec.name} declares none yet"}
        return (PlanTrace(spec.name, nothing),)
    trace = []
    for item in outcome.candidates:
        decision = item.decision
        if item is outcome.chosen:
            continue
        if isinstance(decision, Rejected):
            if decision.rule != "op" or outcome.chosen is None:
                rejected = {"rule": decision.rule, "needed": decision.needed, "found": decision.found}
                trace.append(PlanTrace(item.capability.name, rejected))
        else:
            trace.append(PlanTrace(item.capability.name, accepted={"executes": decision.executes}))
    return tuple(trace)


def _shape(spec: LayerSpec) -> dict[str, int]:
    shape = {"out": spec.out_features, "in": spec.in_features}
    if spec.moe is not None:
        shape |= {"intermediate": spec.moe.intermediate, "experts": spec.moe.experts}
    return shape


def _joined(layer: PackedLayer, *, declared: bool) -> str | None:
    """The id of the layer; of w13 and w2 joined with "+" where they differ, None where nothing is declared."""
    groups = (layer.w13, layer.w2) if layer.spec.op == "moe" else ((layer.parts,),)
    modules = [group[0][0].module for group in groups if group and group[0]]
    ids = [(m.declared.id if m.declared else None) if declared else m.stored_id for m in modules]
    known = [text for text in dict.fromkeys(ids) if text is not None]
    return "+".join(known) if known else None


def _divisors(count: int) -> Iterable[int]:
    return (size for size in range(1, count + 1) if count % size == 0)
