"""What a training must not write over unasked: weights that belong to the project, or that another recipe made."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specbench.engine.weights import PROVENANCE
from specbench.errors import SpecBenchError
from specbench.files import read_json

UNDECIDED = {  # of a recipe: where, when and how fast, not what comes out
    "": (
        "name",
        "out",
        "minutes",
        "missing",
        "overwrite",
        "build",
        "until",
        "packed",
        "pack",
        "shard_target",
        "follow",
        "text",
    ),
    "settings": ("checkpoint_minutes", "validate_minutes", "validation_answers"),
    "corpus": ("precision", "states", "shard", "rows", "reading"),
    "drafter": ("name", "weights", "vocabulary", "growth"),
}
SHOWN = 4  # differences that a message names


def tracked(path: Path) -> bool:
    """Is this file under version control? False outside a git checkout."""
    try:
        command = ["git", "ls-files", "--error-unmatch", path.name]
        return subprocess.run(command, cwd=path.parent, capture_output=True).returncode == 0
    except OSError:
        return False


def refuse_overwriting(path: Path, recipe: Mapping[str, Any] | None = None) -> None:
    """Refuse to write over a file, unless it is an untracked one that the same recipe made.

    Args:
        path: where the training will write. recipe: `made_by` of this training; None: any untracked file may go.

    Raises:
        SpecBenchError: it would be lost.
    """
    if not path.exists():
        return
    mend = "write elsewhere with train.out=FOLDER, or allow it with train.overwrite=true"
    if tracked(path):
        raise SpecBenchError(f"{path} is under version control and would be overwritten; {mend}")
    if recipe is None:
        return
    origin = path.parent / PROVENANCE
    if not origin.exists():
        raise SpecBenchError(f"{path} has no {PROVENANCE} beside it that says who made it; {mend}")
    before: dict[str, Any] = read_json(origin)
    there = made_by(before.get("drafter") or {}, before.get("recipe") or {})
    if changed := list(differing(there, json.loads(json.dumps(recipe)))):
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise SpecBenchError(f"{path} was made with another {', '.join(changed[:SHOWN])}{more}; {mend}")


def made_by(drafter: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about weights, of a drafter's configuration and `train`'s, as plain values."""
    parts = {"drafter": drafter, **{name: recipe.get(name) or {} for name in ("settings", "corpus")}}
    found: dict[str, Any] = {
        name: {k: v for k, v in part.items() if k not in UNDECIDED[name]} for name, part in parts.items()
    }
    return found | {k: v for k, v in recipe.items() if k not in (*UNDECIDED[""], "settings", "corpus")}


def differing(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Names of what is not alike in two trees of plain values."""
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differing(a, b, f"{place}{name}.")
        elif a != b or (name in before) != (name in now):
            yield f"{place}{name}"
