"""From a `RunSpec` to an arm: load the target, build and bind the drafter, describe both in a block's header."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbench.common import environment
from specbench.common.errors import SpecBenchError, visible
from specbench.config.run_spec import RunSpec, state_compressors
from specbench.data.chat import Chat, Message
from specbench.data.prompts import Question
from specbench.engine.backends.packed_linear import Timed
from specbench.engine.device import free_unused
from specbench.engine.drafter import ServedEngine
from specbench.engine.target import Target
from specbench.engine.tensors import dtype_name
from specbench.engine.verify import Rule
from specbench.evaluation import fitting
from specbench.evaluation.runner import BoundDrafter
from specbench.records import identity
from specbench.records.blocks import read_block
from specbench.records.rows import Row
from specbench.remote.link import Link
from specbench.remote.serving import LocalServers

# Of a training's history, in a header.
CURVE = (
    "step",
    "tokens",
    "classification",
    "regression",
    "chain_tau",
    "tree_tau",
    "n_alpha",
    "alpha0_top4",
    "alpha0_top10",
)
CURVE_POINTS = 32
# Its ids identify a chat format: they depend on template, system prompt and tokenizer.
PROBE: list[Message] = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And a number?"},
]


@dataclass(frozen=True)
class Arm:
    """A bound drafter, its run, and its part of a header."""

    bound: BoundDrafter
    spec: RunSpec
    description: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.bound.label


@dataclass(frozen=True)
class Reused:
    """What the cells of one command share: servers that it started, and timings of matrix products."""

    servers: LocalServers = field(default_factory=LocalServers)
    timed: Timed = field(default_factory=dict)


def load(spec: RunSpec, beside: Sequence[Any] = (), reused: Reused | None = None) -> tuple[Target, Chat]:
    """Target and chat format of a run. beside: drafters that will be bound to it, for which memory is left free."""
    reused = reused or Reused()
    over = "" if spec.link.local else f" over link {spec.link.name}"
    print(f"loading {visible(spec.model.name)}{over} ...", file=sys.stderr, flush=True)
    link: Link | None = None if spec.link.local else spec.link
    if link is not None and link.to is None:  # no address: the server is a process of this one
        compressors = state_compressors(link.condense, spec.shared["model"])
        link = replace(link, to=reused.servers.address(spec.model, spec.threads, compressors))
    target, chat = spec.model.load(link=link, beside=beside, sequences=spec.batch)
    target.packing.timed = reused.timed
    if spec.backend == "graphs":
        target.capture()
    if spec.model.forward == "lean":
        target.optimize_for_inference()
        free_unused()  # of matrices that were joined: later requests do not fit into what they leave in the allocator
    return target, chat


def groups(spec: RunSpec, drafters: Sequence[Any]) -> list[list[int]]:
    """Indices of a run's drafters, in groups that memory holds beside the target, see `ModelSpec.groups`."""
    if len(drafters) < 2 or not spec.link.local:
        return [list(range(len(drafters)))]
    return spec.model.groups(drafters, spec.batch)


def make(spec: RunSpec) -> tuple[Any, Rule]:
    """Drafter and rule of a run, not yet bound. Raises `SpecBenchError` for options that do not fit the drafter."""
    return spec.make_drafter(), spec.make_rule()


def build(
    spec: RunSpec, target: Target, label: str | None = None, made: tuple[Any, Rule] | None = None, **more: Any
) -> Arm:
    """A run's drafter, bound to the target. made: result of `make`, if there is one. more: goes into the header.

    A tree that is fitted to the machine is taken from earlier blocks of this cell on this kind of machine: fitted again,
    with slightly other costs, it could become another arm.
    """
    drafter, rule = made or make(spec)
    drafter.bind(target)
    if target.captures:
        drafter.capture(target)
    if spec.model.forward == "lean":
        drafter.optimize_for_inference()
    own = spec.own
    fitted = fitting.fit(drafter, spec, target, label or drafter.name)
    own["drafter"].setdefault("name", drafter.name)  # the baseline's is not in its configuration
    description = own | {
        "parameters": drafter.active_parameters,
        "bytes": _bytes(drafter, but=target.model),
        "passes": drafter.passes,
        "lossy": rule.lossy,
        "weights": _provenance(drafter.provenance),
        "contents": drafter.contents,
    }
    if (dtype := fitting.draft_dtype(drafter.weights_owner)) is not None:
        description["draft_dtype"] = dtype
    served = {"served": drafter.found} if isinstance(drafter, ServedEngine) else {}
    return Arm(BoundDrafter(label or drafter.name, drafter, rule), spec, description | fitted | served | more)


def _provenance(weights: Mapping[str, Any]) -> dict[str, Any]:
    """A header's entry on weights: where they come from, without recipe; of a training's history the learning curve."""
    kept = {key: value for key, value in weights.items() if key not in ("recipe", "drafter")}
    if kept.get("history"):
        kept["history"] = _learning_curve(kept["history"])
    if isinstance(kept.get("held_out"), Mapping):
        kept["held_out"] = {key: value for key, value in kept["held_out"].items() if key != "answers"}
    if isinstance(kept.get("base"), Mapping):
        kept["base"] = _provenance(kept["base"])
    return kept


def _learning_curve(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last entry of a history, below at most `CURVE_POINTS` earlier ones with what `CURVE` names."""
    earlier = [{name: point[name] for name in CURVE if name in point} for point in history[:-1]]
    stride = max(1, -(-len(earlier) // CURVE_POINTS))
    return [*earlier[::-1][::stride][::-1], history[-1]]


def baseline(spec: RunSpec, target: Target) -> Arm:
    """Plain decoding, with which every arm is compared."""
    return build(spec.as_baseline(), target)


def header(
    spec: RunSpec, target: Target, chat: Chat, arms: Iterable[Arm], questions: Sequence[Question], study: str | None = None
) -> dict[str, Any]:
    """The header of a block of these arms; `specbench.records.identity` says which parts of it name rows."""
    arms = list(arms)
    order = {"sequence": identity.digest([question.digest for question in questions])}  # determines rows of `state=run`
    return {
        "study": study,
        "config": spec.shared,
        "replay": spec.replay,
        "arms": {a.label: {**a.description, **(order if a.bound.drafter.state == "run" else {})} for a in arms},
        "target": {
            "fingerprint": target.fingerprint(),
            "chat": identity.digest(chat.encode(PROBE)),
            "dtype": dtype_name(target.dtype),
            **({} if target.quantised is None else {"quantised": target.quantised}),
            **({} if target.adapted is None else {"adapted": target.adapted.name}),
            "device": str(target.device),
            **target.computed_by,
            "parameters": sum(p.numel() for p in target.decoder.layers.parameters()) + target.head.weight.numel(),
            "bytes": _bytes(target.model),
            "vocabulary": target.vocab_size,
            "contents": target.contents(),
        },
        "simulated": any(arm.bound.rule.simulated for arm in arms),
        "commit": environment.commit(),
        "versions": environment.versions(),
        "hardware": environment.hardware(target.device),
        "load": environment.load(),
    }


def _bytes(model: Any, but: Any = None) -> int:
    """Bytes of a model's parameters. but: another model, whose parameters are not counted again where both have them."""
    own, other = (list(m.parameters()) if isinstance(m, torch.nn.Module) else [] for m in (model, but))
    shared = set(map(id, other))
    return sum(p.nbytes for p in own if id(p) not in shared)


def require_lossless(path: Path) -> None:
    """Raises `SpecBenchError` if a greedy answer of a block is not the baseline's, and no numerical tie explains it."""
    rows = [r for r in read_block(path)[1] if isinstance(r, Row)] if path.exists() else []
    if wrong := [r for r in rows if r.audit and r.audit["verdict"] == "bug"]:
        first = wrong[0]
        raise SpecBenchError(
            f"{len(wrong)} greedy answers differ from the baseline's beyond a numerical tie, first {first.drafter}'s to "
            f"question {first.question} turn {first.turn}: verification or a cache is wrong; rows in {path}"
        )
