"""Train a drafter for a target, from the corpus to the weights folder.

python -m specbench.train drafter=eagle2 train.out=FOLDER
python -m specbench.train drafter=eagle2 train=paper model=llama2-7b
accelerate launch --num_processes 4 -m specbench.train drafter=eagle2 train=paper model=llama2-7b
python -m specbench.train train.until=corpus train.pack=LICENCE       # corpus and frequent ids; also as one file
python -m specbench.train train.until=vocabulary                      # its text and its frequent ids
python -m specbench.train drafter=eagle2 train.until=acceptance       # acceptance of trees, for weights that are there
python -m specbench.train drafter=self_speculation train.until=search # which sublayers to skip
"""

import specbench.common.omp_policy  # noqa: F401

# isort: split
from typing import Any

from specbench.common.budget import Budget
from specbench.config import train_spec
from specbench.config.cli import command, run_cli
from specbench.tuning import train_stages


@command("train")
def main(config: Any) -> None:
    """Write the missing part of the corpus, train, write the weights."""
    asked = train_spec.from_config(config)
    job = train_stages.remaining(asked)
    if job is None:
        print(f"{asked.out}: there already (train.missing=false trains anew)")
        return
    for line in train_stages.run(job, Budget.of_minutes(job.minutes)):
        print(line)


if __name__ == "__main__":
    run_cli(main, "train")
