"""One side of a comparison: a drafter from its run's options, bound to the target, with its rule of acceptance.

What every command that decodes does with a `RunSpec`: load the target, build the drafter, say in a header what it was.
"""

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
from specbench.engine.device import pick_device
from specbench.engine.drafter import ServedEngine
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.evaluation import fitting
from specbench.evaluation.runner import BoundDrafter
from specbench.records import identity
from specbench.records.blocks import read_block
from specbench.records.rows import Row
from specbench.remote.link import Link
from specbench.remote.serving import LocalServers

# What is encoded to tell chat formats apart: template, system prompt and tokenizer all show in its ids.
PROBE: list[Message] = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And a number?"},
]


@dataclass(frozen=True)
class Arm:
    """A drafter that is ready, and what a header says of it.

    Attributes:
        contender: what decodes. spec: its run. said: its part of the header.
    """

    bound: BoundDrafter
    spec: RunSpec
    said: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.bound.label


@dataclass(frozen=True)
class Reused:
    """What the cells of one command have in common: servers that it started, and products that were timed."""

    servers: LocalServers = field(default_factory=LocalServers)
    timed: Timed = field(default_factory=dict)


def load(spec: RunSpec, beside: Sequence[Any] = (), reused: Reused | None = None) -> tuple[Target, Chat]:
    """Target and chat format of a run. beside: drafters that will be bound to it at the same time."""
    require_backend(spec)
    reused = reused or Reused()
    where = "" if spec.link.local else f" over link {spec.link.name}"
    print(f"loading {visible(spec.model.name)}{where} ...", file=sys.stderr, flush=True)
    target, chat = spec.model.load(link=_served(spec, reused.servers), beside=beside)
    target.packing.timed = reused.timed
    if spec.backend == "compile":
        torch._dynamo.config.recompile_limit = 64  # trees of several sizes, the baseline's among them
        target.compile()
    elif spec.model.forward == "lean":
        target.optimize_for_inference()
    return target, chat


def require_backend(spec: RunSpec) -> None:
    """Raises `SpecBenchError` where the target's device cannot run the backend."""
    if spec.backend == "compile" and not spec.link.local:
        raise SpecBenchError(f"backend=compile: link={spec.link.name} leaves no layers here to compile; leave backend out")
    if spec.backend == "compile" and pick_device(spec.model.device).type == "cpu":
        raise SpecBenchError("backend=compile is for GPUs: on a CPU its passes take longer than eager ones; leave it out")


def _served(spec: RunSpec, servers: LocalServers) -> Link | None:
    """The link to the target's server, which this process starts if no address is given; None: the target is here."""
    if spec.link.local or spec.link.to is not None:
        return None if spec.link.local else spec.link
    compressors = state_compressors(spec.link.condense, spec.shared["model"])
    return replace(spec.link, to=servers.address(spec.model, spec.threads, compressors))


def make(spec: RunSpec) -> tuple[Any, Rule]:
    """Drafter and rule of a run, refused before any target is loaded if they cannot be."""
    return spec.make_drafter(), spec.make_rule()


def build(
    spec: RunSpec, target: Target, label: str | None = None, made: tuple[Any, Rule] | None = None, **more: Any
) -> Arm:
    """A run's drafter, bound to the target. made: it and its rule, if they are there. more: goes into the header.

    A tree that is fitted to the machine is the one of earlier blocks of this cell from a machine of this kind: fitted
    anew, costs that were timed a little otherwise could make it another arm.
    """
    drafter, rule = made or make(spec)
    drafter.bind(target)
    if spec.backend == "compile":
        drafter.compile_network()
    elif spec.model.forward == "lean":
        drafter.optimize_for_inference()
    own = spec.own
    fitted = fitting.fit(drafter, spec, target, label or drafter.name)
    own["drafter"].setdefault("name", drafter.name)  # the baseline's is not in its configuration
    said = own | {
        "parameters": drafter.active_parameters,
        "bytes": _bytes(drafter, trained_only=True),
        "passes": drafter.passes,
        "lossy": rule.lossy,
        "weights": _provenance(drafter.provenance),
        "contents": drafter.contents,
    }
    served = {"served": drafter.found} if isinstance(drafter, ServedEngine) else {}
    return Arm(BoundDrafter(label or drafter.name, drafter, rule), spec, said | fitted | served | more)


def _provenance(weights: Mapping[str, Any]) -> dict[str, Any]:
    """What a header says of weights: where they come from, without the course of their training."""
    kept = {key: value for key, value in weights.items() if key not in ("recipe", "drafter")}
    if kept.get("history"):
        kept["history"] = kept["history"][-1:]
    if isinstance(kept.get("held_out"), Mapping):
        kept["held_out"] = {key: value for key, value in kept["held_out"].items() if key != "answers"}
    if isinstance(kept.get("base"), Mapping):
        kept["base"] = _provenance(kept["base"])
    return kept


def baseline(spec: RunSpec, target: Target) -> Arm:
    """Plain decoding, against which every arm is held."""
    return build(spec.as_baseline(), target)


def header(
    spec: RunSpec, target: Target, chat: Chat, arms: Iterable[Arm], questions: Sequence[Question], study: str | None = None
) -> dict[str, Any]:
    """What a block of these arms says of itself, see `specbench.records.identity` for what of it names rows."""
    arms = list(arms)
    order = identity.digest([question.digest for question in questions])
    return {
        "study": study,
        "config": spec.shared,
        "replay": spec.replay,
        "arms": {arm.label: {**arm.said, **_sequence(arm, order)} for arm in arms},
        "target": {
            "fingerprint": target.fingerprint(),
            "chat": identity.digest(chat.encode(PROBE)),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
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


def _sequence(arm: Arm, order: str) -> dict[str, str]:
    """Of a drafter whose memory goes on from prompt to prompt, which prompts these are: they determine its rows."""
    return {"sequence": order} if arm.bound.drafter.state == "run" else {}


def _bytes(model: Any, trained_only: bool = False) -> int:
    """Of a model's parameters; of a drafter's only its own, since the rest is the target's."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else []
    return sum(p.nbytes for p in parameters if p.requires_grad or not trained_only)


def require_lossless(path: Path) -> None:
    """Raises `SpecBenchError` if a greedy answer of a block is not the baseline's, and no numerical tie explains it."""
    rows = [r for r in read_block(path)[1] if isinstance(r, Row)] if path.exists() else []
    wrong = [r for r in rows if r.audit and r.audit["verdict"] == "bug"]
    if wrong:
        first = wrong[0]
        raise SpecBenchError(
            f"{len(wrong)} greedy answers differ from the baseline's beyond a numerical tie, first {first.drafter}'s to "
            f"question {first.question} turn {first.turn}: verification or a cache is wrong; rows in {path}"
        )
