"""The stages at which a training may end (`train.until`), and what each of them makes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from specbench.common import environment, hashing
from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.engine import weights
from specbench.records.blocks import locked
from specbench.records.schema import SKIP, WEIGHTS
from specbench.training import checkpoint
from specbench.training.corpus_reader import held_out
from specbench.training.drafter_training import TrainedWeights, train
from specbench.training.job import IN_ONE_PROCESS, Stage, TrainJob, Workspace, open_workspace
from specbench.training.overwriting import made_by, refuse_overwriting
from specbench.training.trainer import Paused
from specbench.tuning import acceptance, layer_search


def remaining(job: TrainJob) -> TrainJob | None:
    """The part of a job that is not made yet, or None; with `missing`, what a killed process left incomplete counts.

    Raises `SpecBenchError` if incomplete weights would be overwritten that another recipe made.
    """
    if not job.missing or job.until != "weights":
        return job
    stage = lacking(job.out, job.follow)
    if stage == "acceptance" and job.shard_target:
        raise SpecBenchError(f"{job.out}: only {acceptance.FILE} is missing; {IN_ONE_PROCESS}")
    if stage == "weights" and not job.overwrite:
        refuse_overwriting(job.out / WEIGHTS, made_by(job.drafter, job.recipe))
    return None if stage is None else replace(job, until=stage)


def lacking(folder: Path, follow: bool | None = None) -> Stage | None:
    """What a folder of weights lacks: them, or the acceptance of trees; None: nothing.

    follow: is that acceptance wanted? None: as the provenance says.
    """
    try:
        recipe = weights.matching(folder).get("recipe") or {}
    except SpecBenchError:
        return "weights"
    if not (recipe.get("follow") if follow is None else follow):
        return None
    try:
        acceptance.read(folder)
    except SpecBenchError:
        return "acceptance"
    return None


def run(job: TrainJob, budget: Budget) -> Iterator[str]:
    """Run a job up to its stage; the main process yields a line on everything that was made."""
    workspace = open_workspace(job)
    is_main = workspace.processes.is_main_process
    if job.until in ("vocabulary", "corpus"):
        (workspace.build_corpus if job.until == "corpus" else workspace.write_text)()
        if is_main:
            yield workspace.save_vocabulary()
    elif job.until == "weights":
        made = _train(workspace, budget)
        if is_main:
            yield made
    elif is_main:
        yield MEASUREMENTS[job.until](workspace)
    if job.pack is not None and is_main:
        yield workspace.pack()
    workspace.processes.wait_for_everyone()


def _train(workspace: Workspace, budget: Budget) -> str:
    """Train one drafter and write its weights, or stop at a checkpoint when the budget is over."""
    with _lock(workspace.job) if workspace.processes.is_main_process else nullcontext():
        try:
            trained = train(workspace, budget)
        except Paused as pause:
            return f"{workspace.job.drafter['name']}: {pause}"
        return _save(workspace, trained)


@contextmanager
def _lock(job: TrainJob) -> Iterator[None]:
    """Raises `SpecBenchError` while another process trains under the same name: it has the same checkpoint."""
    with locked(job.progress_folder, "training", wait=False) as ours:
        if not ours:
            name = job.progress_folder.name
            raise SpecBenchError(f"another process trains {name}; wait for it, or name this training: train.name=NAME")
        yield


def _save(workspace: Workspace, trained: TrainedWeights) -> str:
    """Write a drafter's weights and what was measured of it; its checkpoint is not needed any more."""
    job = workspace.job
    followed = acceptance.measure(trained.target, trained.drafter, trained.answers) if job.follow else None

    def beside(sha256: str) -> None:
        if followed is not None:
            acceptance.write(job.out, followed, sha256)

    if workspace.processes.is_main_process:
        trained.save(job.out, beside)
        (job.progress_folder / checkpoint.FILE).unlink(missing_ok=True)
    return f"weights in {job.out}"


def _measure_acceptance(workspace: Workspace) -> str:
    """Measure the acceptance of trees for a drafter whose weights are there, as training does at its end."""
    job = workspace.job
    workspace.build_held_out()
    drafter = job.make_drafter(weights=str(job.out.absolute()))
    drafter.bind(workspace.target)
    drafter.eval()
    drafter.optimize_for_inference()
    answers = held_out(workspace.shards.folder, acceptance.ANSWERS)
    followed = acceptance.measure(workspace.target, drafter, answers)
    acceptance.write(job.out, followed, hashing.of_file(job.out / WEIGHTS))
    return f"acceptance in {job.out / acceptance.FILE}"


def _search_layers(workspace: Workspace) -> str:
    """Search the sublayers of the target that a drafter should skip, with the target as it decodes."""
    job, target = workspace.job, workspace.target
    workspace.build_held_out()
    target.optimize_for_inference()
    drafter = job.make_drafter(searched=None)
    drafter.bind(target)
    answers = held_out(workspace.shards.folder, layer_search.ANSWERS)
    own = {name: value for name, value in job.drafter.items() if name not in ("name", "searched")}
    timed = {"hardware": environment.hardware(target.device), "computed_by": target.computed_by}
    digest = hashing.of([target.fingerprint(), own, timed, [answer.ids for answer in answers]])
    journal = job.progress_folder / f"search-{digest[:12]}.jsonl"
    result = layer_search.search(target, drafter, answers, journal)
    names = {"target": job.model.name, "target_fingerprint": target.fingerprint()}
    layer_search.write(job.out, names | result | {"drafter": job.drafter} | workspace.provenance)
    return f"skipped sublayers in {job.out / SKIP}: {result['predicted']['speedup']:.2f}x plain decoding expected"


MEASUREMENTS: dict[str, Callable[[Workspace], str]] = {"acceptance": _measure_acceptance, "search": _search_layers}
