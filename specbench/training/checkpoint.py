"""The checkpoint of a training: one file with weights, optimisers, step and random state, written atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specbench.common.errors import SpecBenchError
from specbench.common.io import differing
from specbench.common.storage import atomic_path
from specbench.records import identity

FILE = "checkpoint.pt"  # in the progress folder of a training, until its weights are written
HINT = "use another train.name or remove it"


def write(path: Path, state: Mapping[str, Any], accelerator: Accelerator) -> None:
    """Write a state with the random states of all processes; called in all of them."""
    random_states = {
        "rng": gather_object([torch.get_rng_state()]),  # by process
        "cuda_rng": gather_object([torch.cuda.get_rng_state()]) if torch.cuda.is_available() else [],
    }
    if accelerator.is_main_process:
        with atomic_path(path) as temporary:
            torch.save({**state, **random_states}, temporary)
    accelerator.wait_for_everyone()


def check(path: Path, state: Mapping[str, Any], total: int, shaped_by: Mapping[str, Any], processes: int) -> None:
    """Raises `SpecBenchError` for a state of another number of steps or processes, or with another `shaped_by`."""
    if state["total"] != total:
        raise SpecBenchError(
            f"{path} is of a run of {state['total']} steps, this one has {total} (other corpus or settings); {HINT}"
        )
    before, now = (
        identity.plain_options(json.loads(text), drop_files=False) for text in (state["shaped_by"], json.dumps(shaped_by))
    )
    if changed := list(differing(before, now)):
        raise SpecBenchError(f"{path} is of a training with another {', '.join(changed[:4])}; {HINT}")
    if len(state["rng"]) != processes:
        raise SpecBenchError(
            f"{path} is of {len(state['rng'])} processes, this run has {processes}; launch as many or {HINT}"
        )


def restore_random_state(state: Mapping[str, Any], process: int) -> None:
    """Give this process the random state that it had."""
    torch.set_rng_state(state["rng"][process])
    if state["cuda_rng"]:
        torch.cuda.set_rng_state(state["cuda_rng"][process])
