"""python -m specbench.gpu_day STAGE [--dry] [--minutes=M] [OPTION=VALUE …]

python -m specbench.gpu_day pack STAGE [--have=FILE] [--python=3.12]

`tools/gpu.sh` sets the environment and calls this. OPTION=VALUE goes to the steps that know it, as `model.path=DIR`.
"""

import os
import sys
from pathlib import Path

from specbench.common.errors import SpecBenchError, warn
from specbench.common.storage import PROJECT
from specbench.gpu_day import archives, needs, runner
from specbench.gpu_day.stages import STAGES

MINUTES = 9.0
FLAGS = ("dry", "minutes", "have", "python")


def main(words: list[str]) -> int:
    flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    words = [word for word in words if not word.startswith("--")]
    if unknown := [name for name in flags if name not in FLAGS]:
        raise SpecBenchError(f"--{unknown[0]}: no such flag; there are --{', --'.join(FLAGS)}")
    packing = words[:1] == ["pack"]
    stage, *options = words[packing:] or [""]
    if stage not in STAGES:
        raise SpecBenchError(f"stage {stage or '?'}: name one of {', '.join(STAGES)}")
    if packing:
        needs.pack(stage, Path(os.environ.get("GPU_PACK", "gpu-pack")), flags.get("have"), flags.get("python", "3.12"))
        return 0
    out = Path(os.environ.get("OUT") or PROJECT / "gpu-out").absolute()
    name = f"{stage}-dry" if "dry" in flags else stage  # what a dry run did is not done
    work = Path(os.environ.get("GPU_WORK") or PROJECT / "gpu-work").absolute() / name
    if not work.exists() and not archives.read(out, name, work):
        archives.read(PROJECT / "gpu-in", name, work)
    steps = STAGES[stage](work, "dry" in flags)
    return 1 if runner.run(name, steps, work, out, options, float(flags.get("minutes", MINUTES))) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecBenchError as error:
        warn(str(error))
        sys.exit(2)
