"""One training as a job: its options, and what each of its stages works with.

`specbench.config.train_spec` makes a `TrainJob`; nothing here knows Hydra. `open_workspace` loads what every stage needs:
the target, and the corpus that it writes. The weights are trained in `drafter_training`; the stages are in
`specbench.tuning.train_stages`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from filelock import FileLock

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.common.storage import cache_root
from specbench.data.conversations import Conversations
from specbench.engine import vocabulary
from specbench.engine.device import pick_device
from specbench.engine.loading import ModelSpec
from specbench.engine.target import Target
from specbench.training.corpus import CorpusSettings, CorpusText
from specbench.training.overwriting import tracked
from specbench.training.recipe import TrainSettings
from specbench.training.shards import VALIDATION, Shards

Stage = Literal["vocabulary", "corpus", "weights", "acceptance", "search"]
IN_ONE_PROCESS = "run it in one process and without train.shard_target (model.device_map=auto spreads a large target)"
LONGEST_WAIT = timedelta(days=3)  # of one process for another, which may have more of the corpus to write
WITH_DRAFTER: tuple[Stage, ...] = ("weights", "acceptance", "search")  # stages that load a drafter


@dataclass(frozen=True)
class TrainJob:
    """A settled training. `conf/train/small.yaml` explains each option.

    Attributes:
        drafter, recipe: the options of the drafter and of `train` as plain values, for provenances.
        make_drafter: returns the drafter, not yet bound to a target; takes options that replace its own.
        start: folder of weights to begin with. text: conversations whose questions the corpus answers.
    """

    threads: int | None
    model: ModelSpec
    drafter: Mapping[str, Any]
    make_drafter: Callable[..., Any]
    recipe: Mapping[str, Any]
    settings: TrainSettings
    corpus: CorpusSettings
    text: Conversations
    until: Stage
    name: str | None
    out: Path
    packed: Path
    start: str | None
    pack: str | None
    minutes: float | None
    batch: int  # rows
    row_tokens: int | None
    missing: bool
    overwrite: bool
    build: bool
    shard_target: bool
    online: bool
    follow: bool
    answers_only: bool

    @property
    def progress_folder(self) -> Path:
        """Folder of checkpoints and other states of an interrupted job."""
        return cache_root() / "training" / self.model.name / (self.name or str(self.drafter["name"]))


@dataclass(frozen=True)
class Workspace:
    """The loaded target, the corpus that it writes, and the processes that share the work."""

    job: TrainJob
    target: Target
    text: CorpusText
    processes: PartialState

    @cached_property
    def shards(self) -> Shards:
        return Shards(self.text)

    @property
    def recipe(self) -> dict[str, Any]:
        """The options of `train`, with what `auto` stood for."""
        writing = self.text.settings
        corpus = self.job.recipe["corpus"] | {"precision": writing.precision, "reading": self.text.reading}
        return {**self.job.recipe, "corpus": corpus}

    @property
    def provenance(self) -> dict[str, Any]:
        machine, versions = environment.hardware(self.target.device), environment.versions()
        return {"machine": machine, "versions": versions, "commit": environment.commit()}

    def write_text(self) -> None:
        """Write the missing text; where none is missing, do not wait for jobs that compute states of it."""
        if self.processes.num_processes > 1 or self.text.missing():  # several go through it together
            with self._lock():
                self._in_all_processes(self.text.write)

    def build_corpus(self) -> None:
        """Write the missing text, then the missing states; where all are there, do not wait for jobs that write others."""
        if self.processes.num_processes > 1 or self.text.missing() or self.shards.tokens()[1]:
            with self._lock():
                self._in_all_processes(self.text.write)
                self._in_all_processes(self.shards.build)

    def _in_all_processes(self, write: Callable[[int, int], Any]) -> None:
        """Write each process's share, and wait for the others."""
        write(self.processes.process_index, self.processes.num_processes)
        self.processes.wait_for_everyone()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Jobs side by side enter one after the other, the processes of one job together."""
        with FileLock(self.text.folder / ".lock") if self.processes.is_main_process else nullcontext():
            self.processes.wait_for_everyone()
            yield

    def build_held_out(self) -> None:
        """Write the missing held-out answers, under a lock of their own: jobs that train need not wait."""
        with FileLock(self.text.folder / f"{VALIDATION}.lock"):
            self.text.write(held_out=True)
            self.shards.build(held_out=True)

    def save_vocabulary(self) -> str:
        """Write the corpus's most frequent ids; returns a line that says where."""
        path = self.job.packed / vocabulary.FILE
        if tracked(path) and not self.job.overwrite:
            return f"{path} is under version control and stays as it is (train.overwrite=true counts its ids anew)"
        vocabulary.save(path, *self.text.frequent(vocabulary.MAX_IDS, self.job.model.name))
        return f"frequent ids in {path}"

    def pack(self) -> str:
        """Write the corpus as one file of ids; returns a line that says where."""
        provenance = {"license": self.job.pack, "questions": self.job.recipe["text"]} | self.provenance
        return f"corpus in {self.text.pack(self.job.packed, provenance)}"


def open_workspace(job: TrainJob) -> Workspace:
    """Load the target and prepare the folder of its corpus."""
    environment.commit()  # cached from now on: the commit at the start of the training counts
    torch.set_num_threads(job.threads or torch.get_num_threads())
    model, on_cpu = job.model, pick_device(job.model.device).type == "cpu"
    if model.dtype == "auto" and on_cpu:
        model = replace(model, dtype="float32")  # products in bfloat16 are slower on most processors, and less exact
    processes = PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)
    if processes.num_processes > 1:
        model = replace(model, device_map=None)  # each has the target, or its part of it, on its own GPU
    drafters = [job.make_drafter()] if job.until in WITH_DRAFTER else []
    if job.until == "weights" and job.batch < (n := processes.num_processes):
        raise SpecBenchError(f"train.batch={job.batch}: so many rows of all {n} processes together; set it to {n} or more")
    target, chat = model.load(processes.num_processes if job.shard_target else 1, beside=drafters)
    root, conversations = cache_root() / "corpora", job.text.digest()
    text = CorpusText(job.corpus, target, chat, job.text.load, root, job.packed, conversations)
    with processes.main_process_first():
        text.prepare()
    return Workspace(job, target, text, processes)
