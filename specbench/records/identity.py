"""Keys of rows: digests of the arm, the cell (target, decoding, mode) and the question that determine a row.

Commit, versions and machine are in a block's header but not in its keys, so rows stay valid when unrelated code changes. An
arm's key covers its options and the digests of its weights, and the resulting tree where one was fitted to a machine. Paths
and module names are excluded, since files move.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.common.hashing import of

# To be raised when code emits, accepts or counts differently: rows with a lower number are ignored.
DECODING = 1
# To be raised when the engine becomes faster or slower: speeds with a lower number are not compared; counts remain valid.
TIMING = 3

# To be raised when emulated networks delay differently: then speeds over them are not compared with those before.
EMULATOR = 2
# To be raised when several sequences at once become faster or slower: rows with a lower number are of another cell.
BATCHING = 3
# To be raised when sampled decoding becomes faster or slower: then speeds at temperature > 0 are not compared with earlier.
SAMPLING = 2
# To be raised when a drafter's training makes other weights from the same options: then studies train them anew.
OBJECTIVES = {"beagle": 2}  # 2: drawn ids are corrected for in predictions of its windows, too
SPEEDS = {"timing": TIMING, "emulator": EMULATOR, "batching": BATCHING, "sampling": SAMPLING}  # as headers have them

TENSOR_FILES = (".safetensors", ".bin", ".index.json")  # files of a target whose tensors are in its fingerprint
FILES = ("weights", "searched", "path", "name")  # options that are paths or names
# Tree classes that adapt to costs in every cycle, so that a fit yields no fixed tree.
COST_AWARE = ("CostAwareTree", "Rate")
# Classes and options that were renamed after rows had been keyed by their first names.
FIRST_NAMES = {"CostAwareTree": "Rate", "AccuracyTree": "Calibrated"}
FIRST_OPTION_NAMES = {"on_disconnect": "then", "timeout_s": "patience_s"}


def digest(value: Any) -> str:
    """12 hexadecimal digits of the SHA-256 of a plain value, equal before and after a round trip through JSON."""
    return of(json.loads(json.dumps(value)))[:12]


def question_digest(turns: Sequence[str], check: str | None = None) -> str:
    """Digest of a question: the texts of its turns, and the check that scores its answer, if it has one."""
    return digest(list(turns) if check is None else [list(turns), check])


def variant(adapter: str | None, quantised: str | None) -> str | None:
    """What makes another target of a model: `adapted-medusa2`, `int8`, or both; None: nothing. adapter: a folder."""
    parts = [] if adapter is None else [f"adapted-{adapter_name(adapter)}"]
    return "-".join([*parts, *([] if quantised is None else [quantised])]) or None


def adapter_name(folder: str) -> str:
    """What rows call an adapter: the last part of its folder."""
    return re.sub(r"[^\w.-]", "_", Path(folder).name) or "adapter"


def arm_key(arm: Mapping[str, Any]) -> tuple[str, str]:
    """Digests of an arm's recipe and of its fitted tree ("" without one). arm: its part of the header."""
    contents = arm.get("contents") or {}
    recipe = {
        "drafter": plain_options(arm.get("drafter") or {}),
        "verify": plain_options(arm.get("verify") or {}),
        "files": {name: sha for name, sha in contents.items() if not name.endswith(".json")},
        "searched": [sha for name, sha in contents.items() if name.endswith("skip.json")],
        "calibration": (arm.get("weights") or {}).get("calibration"),
        "sequence": arm.get("sequence"),
        **({"draft_dtype": dtype} if (dtype := arm.get("draft_dtype")) else {}),  # older arms have no such entry
    }
    fitted = arm.get("fitted")
    if fitted is None:
        return digest(recipe), ""
    if _class_name((arm.get("tree") or {}).get("_target_", "")) in COST_AWARE:
        return digest(recipe), digest(fitted["costs"])
    return digest(recipe), digest({name: fitted["choice"][name] for name in ("depth", "top_k", "nodes")})


def plain_options(value: Any, drop_files: bool = True) -> Any:
    """Options with classes named without their modules. drop_files: leave out nulls, paths and names."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if not drop_files or (v is not None and k not in FILES)}
        plain = {FIRST_OPTION_NAMES.get(k, k): plain_options(v, drop_files) for k, v in kept.items()}
        if "_target_" in plain:
            name = _class_name(plain["_target_"])
            plain["_target_"] = FIRST_NAMES.get(name, name)
        return plain
    return [plain_options(v, drop_files) for v in value] if isinstance(value, (list, tuple)) else value


def _class_name(target: Any) -> str:
    return str(target).rpartition(".")[2]


def cell_key(header: Mapping[str, Any]) -> str:
    """Target, decoding and mode of a block: of each arm and question only one row counts under one key."""
    config, target = header["config"], header["target"]
    settings = {name: sha for name, sha in (target.get("contents") or {}).items() if not name.endswith(TENSOR_FILES)}
    sampler, decode = config["sampler"], config.get("decode") or {}
    shape = plain_options({**(config.get("link") or {}), "to": None})
    quantised = target.get("quantised")
    sampled = sampler["temperature"] > 0 or bool(header.get("simulated"))
    return digest(
        {
            "target": [target.get("fingerprint"), target["dtype"], target.get("chat"), config["model"].get("max_context")],
            "settings": settings,  # the same tensors compute something else under another configuration or tokenizer
            "dataset": config["dataset"]["name"],
            "sampler": {name: _number(value) for name, value in plain_options(sampler).items()},
            "tokens": decode.get("max_new_tokens"),
            "seed": decode.get("seed") if sampled else None,
            "replay": bool(header.get("replay")),
            "link": shape if _linked(config) else None,
            **({} if config.get("batch", 1) == 1 else {"batch": [config["batch"], header.get("batching", 1)]}),
            **({} if quantised is None else {"quantised": quantised}),
        }
    )


def _number(value: Any) -> Any:
    """Integers as floats, so that 1 and 1.0 have one digest."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def speeds_count(header: Mapping[str, Any]) -> bool:
    """Are a block's speeds those of today's engine, by every number of `SPEEDS` that applies to it?"""
    config = header["config"]
    applies = {
        "timing": True,
        "emulator": _linked(config),
        "batching": config.get("batch", 1) > 1,
        "sampling": config["sampler"]["temperature"] > 0,
    }
    return all(header.get(name) == SPEEDS[name] for name, used in applies.items() if used)


def _linked(config: Mapping[str, Any]) -> bool:
    return bool((config.get("link") or {}).get("name", "local") != "local")


def kind_of(hardware: Mapping[str, Any]) -> list[Any]:
    """The kind of a machine, whatever the engine's settings on it. hardware: of a header."""
    return [hardware["device"], hardware.get("instructions"), hardware["cores"]]


def machine_key(header: Mapping[str, Any]) -> str:
    """The kind of machine and the engine's settings on it; speeds are pooled only over blocks with one key."""
    hardware, config = header["hardware"], header["config"]
    engine = [config.get("threads") or hardware.get("threads"), config.get("backend"), config["model"].get("forward")]
    attention = header["target"].get("attention")  # older blocks, and those of CPUs, name none
    chosen = [] if attention is None else [attention]
    if _linked(config) and "emulator" in header:  # older blocks name none
        chosen.append(f"emulator {header['emulator']}")
    if config["sampler"]["temperature"] > 0 and "sampling" in header:
        chosen.append(f"sampling {header['sampling']}")
    return digest([*kind_of(hardware), *engine, header["target"].get("kernels"), header.get("timing"), *chosen])
