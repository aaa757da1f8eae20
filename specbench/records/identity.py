"""What names a row: the arm, the cell (target, decoding, mode) and the question that determine it, and nothing else.

Commit, versions and machine stand in a block's header but name nothing: accepted lengths of a greedy answer stay true when
a docstring changes. What an arm is follows from its part of the header, by options and digests of weights; of a tree that
was fitted to a machine the tree that came out counts. Paths and module names do not, since files move.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.common.hashing import of

# Raised when code emits, accepts or counts otherwise than before: rows of lower numbers no longer count.
DECODING = 1
# Raised when an engine is faster or slower than before: seconds of lower numbers are no longer compared, counts stay.
TIMING = 1

FILES = ("weights", "searched", "path", "name")  # options that say where something lies or what it is called
FOLLOWING_COSTS = (
    "CostAwareTree",
    "Rate",
)  # trees that follow costs in every cycle, so that no one tree comes out of a fit
# Classes that were called otherwise when rows were first named by them.
FIRST_NAMES = {"CostAwareTree": "Rate", "AccuracyTree": "Calibrated"}


def digest(value: Any) -> str:
    """12 hexadecimal digits of the SHA-256 of a plain value, the same before it was written to a file and after."""
    return of(json.loads(json.dumps(value)))[:12]


def question_digest(turns: Sequence[str], check: str | None = None) -> str:
    """Of a question: of the texts of all its turns, and of how its answer is scored, if it is."""
    return digest(list(turns) if check is None else [list(turns), check])


def arm_key(arm: Mapping[str, Any]) -> tuple[str, str]:
    """An arm's name by what determines its rows: its recipe, and the tree that was fitted, if one was. arm: its header."""
    provenance = arm.get("weights") or {}
    recipe = {
        "drafter": plain_options(arm.get("drafter") or {}),
        "verify": plain_options(arm.get("verify") or {}),
        "files": {name: sha for name, sha in (arm.get("contents") or {}).items() if not name.endswith(".json")},
        "searched": [sha for name, sha in (arm.get("contents") or {}).items() if name.endswith("skip.json")],
        "calibration": provenance.get("calibration"),
        "sequence": arm.get("sequence"),
    }
    fitted = arm.get("fitted")
    return digest(recipe), "" if fitted is None else digest(_tree(arm, fitted))


def _tree(arm: Mapping[str, Any], fitted: Mapping[str, Any]) -> Any:
    growth = str((arm.get("tree") or {}).get("_target_", "")).rpartition(".")[2]
    if growth in FOLLOWING_COSTS:
        return fitted["costs"]
    return {name: fitted["choice"][name] for name in ("depth", "top_k", "nodes")}


def plain_options(value: Any) -> Any:
    """Options without what is null, a place or a name, classes without their modules."""
    if isinstance(value, Mapping):
        kept = {key: plain_options(v) for key, v in value.items() if v is not None and key not in FILES}
        return kept | _class_of(kept)
    return [plain_options(v) for v in value] if isinstance(value, (list, tuple)) else value


def unplaced(value: Any) -> Any:
    """The same options, classes without their modules: a file that moved makes no other training."""
    if isinstance(value, Mapping):
        kept = {key: unplaced(v) for key, v in value.items()}
        return kept | _class_of(kept)
    return [unplaced(v) for v in value] if isinstance(value, (list, tuple)) else value


def _class_of(options: Mapping[str, Any]) -> dict[str, str]:
    if "_target_" not in options:
        return {}
    name = str(options["_target_"]).rpartition(".")[2]
    return {"_target_": FIRST_NAMES.get(name, name)}


def cell_key(header: Mapping[str, Any]) -> str:
    """Target, decoding and mode of a block: rows of one arm and question under one such key are the same row."""
    config, target = header["config"], header["target"]
    sampler, decode, link = config["sampler"], config.get("decode") or {}, config.get("link") or {}
    shape = plain_options({**link, "to": None})  # without the address
    drawn = sampler["temperature"] > 0 or bool(header.get("simulated"))
    return digest(
        {
            "target": [target.get("fingerprint"), target["dtype"], target.get("chat"), config["model"].get("max_context")],
            "dataset": config["dataset"]["name"],
            "sampler": {name: _number(value) for name, value in plain_options(sampler).items()},
            "tokens": decode.get("max_new_tokens"),
            "seed": decode.get("seed") if drawn else None,
            "replay": bool(header.get("replay")),
            "link": None if link.get("name", "local") == "local" else shape,
        }
    )


def _number(value: Any) -> Any:
    """A typed 1 is the 1.0 that a file gives back."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def machine_key(header: Mapping[str, Any]) -> str:
    """The kind of machine, and how the engine runs on it: only blocks of one kind have their speeds pooled."""
    hardware, config = header["hardware"], header["config"]
    machine = [hardware["device"], hardware.get("instructions"), hardware["cores"]]
    engine = [config.get("threads") or hardware.get("threads"), config.get("backend"), config["model"].get("forward")]
    return digest([*machine, *engine, header.get("timing")])
