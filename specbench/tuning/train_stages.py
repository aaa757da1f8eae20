"""The stages at which a training may end (`train.until`), and what each of them makes."""

from collections.abc import Callable, Iterator

from specbench.common.budget import Budget
from specbench.records.schema import SKIP
from specbench.training.drafter_training import train
from specbench.training.features import held_out
from specbench.training.job import TrainJob, Workspace, open_workspace
from specbench.training.trainer import Paused
from specbench.tuning import acceptance, layer_search


def run(job: TrainJob, budget: Budget) -> Iterator[str]:
    """Run a job up to its stage; the main process yields a line on everything that was made."""
    workspace = open_workspace(job)
    is_main = workspace.processes.is_main_process
    if job.until in ("vocabulary", "corpus"):
        (workspace.build_corpus if job.until == "corpus" else workspace.write_text)()
        if is_main:
            yield workspace.save_vocabulary()
    else:
        made = _train(workspace, budget) if job.until == "weights" else MEASUREMENTS[job.until](workspace)
        if is_main:
            yield made
    if job.pack is not None and is_main:
        yield workspace.pack()


def _train(workspace: Workspace, budget: Budget) -> str:
    """Train one drafter and write its weights, or stop at a checkpoint when the budget is over."""
    job = workspace.job
    try:
        trained = train(workspace, budget)
    except Paused as pause:
        return f"{job.drafter['name']}: {pause}"
    followed = acceptance.measure(workspace.target, trained.drafter, trained.answers) if job.follow else None
    if workspace.processes.is_main_process:
        trained.save(job.out)
        if followed is not None:
            acceptance.write(job.out, followed)
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
    acceptance.write(job.out, acceptance.measure(workspace.target, drafter, answers))
    return f"acceptance in {job.out / acceptance.FILE}"


def _search_layers(workspace: Workspace) -> str:
    """Search the sublayers of the target that a drafter should skip, with the target as it decodes."""
    job, target = workspace.job, workspace.target
    workspace.build_held_out()
    target.optimize_for_inference()
    drafter = job.make_drafter(searched=None)
    drafter.bind(target)
    journal = job.progress_folder / f"search-{target.fingerprint()[:12]}.journal"
    result = layer_search.search(target, drafter, held_out(workspace.shards.folder, layer_search.ANSWERS), journal)
    names = {"target": job.model.name, "target_fingerprint": target.fingerprint()}
    layer_search.write(job.out, names | result | {"drafter": job.drafter} | workspace.provenance)
    return f"skipped sublayers in {job.out / SKIP}: {result['predicted']['speedup']:.2f}x plain decoding expected"


MEASUREMENTS: dict[str, Callable[[Workspace], str]] = {"acceptance": _measure_acceptance, "search": _search_layers}
