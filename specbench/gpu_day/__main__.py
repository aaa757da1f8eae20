"""python -m specbench.gpu_day STAGE [--dry] [--minutes=M] [OPTION=VALUE …]

python -m specbench.gpu_day pack STAGE [--have=FILE] [--python=3.12]

`tools/gpu.sh` sets the environment and calls this. OPTION=VALUE goes to the steps that know it, as `model.path=DIR`.
"""

import argparse
import os
import sys
from pathlib import Path

from specbench.common.errors import SpecBenchError, warn
from specbench.common.storage import PROJECT
from specbench.gpu_day import archives, needs, runner
from specbench.gpu_day.stages import STAGES

MINUTES = 8.0  # of ten: a step may take a little longer, see `runner.GRACE_S`, and results are packed behind it


def arguments(words: list[str]) -> argparse.Namespace:
    """Raises `SpecBenchError` for flags that do not exist or have no such value."""
    parser = argparse.ArgumentParser(prog="tools/gpu.sh", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("words", nargs="*", metavar="[pack] STAGE [OPTION=VALUE …]")
    parser.add_argument("--dry", action="store_true", help="the same steps at toy size, on a CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all steps together")
    parser.add_argument("--have", help="a file with the names of packages that the machine has")
    parser.add_argument("--python", default="3.12", help="version of the machine's interpreter")
    try:
        found, unknown = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        raise SpecBenchError(str(error)) from error
    if unknown:
        raise SpecBenchError(f"{unknown[0]}: no such flag; there are --dry, --minutes, --have, --python")
    return found


def main(words: list[str]) -> int:
    flags = arguments(words)
    packing = flags.words[:1] == ["pack"]
    stage, *options = flags.words[packing:] or [""]
    if stage not in STAGES:
        raise SpecBenchError(f"stage {stage or '?'}: name one of {', '.join(STAGES)}")
    if packing:
        needs.pack(stage, Path(os.environ.get("GPU_PACK", "gpu-pack")), flags.have, flags.python)
        return 0
    out = Path(os.environ.get("OUT") or PROJECT / "gpu-out").absolute()
    name = f"{stage}-dry" if flags.dry else stage  # what a dry run did is not done
    work = Path(os.environ.get("GPU_WORK") or PROJECT / "gpu-work").absolute() / name
    if not work.exists() and not archives.read(out, name, work):
        archives.read(PROJECT / "gpu-in", name, work)
    steps = STAGES[stage](work, flags.dry)
    return 1 if runner.run(name, steps, work, out, options, flags.minutes) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecBenchError as error:
        warn(str(error))
        sys.exit(2)
