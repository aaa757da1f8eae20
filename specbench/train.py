"""Door two: train a drafter for a target, from the corpus to the weights folder.

python -m specbench.train drafter=eagle2
python -m specbench.train drafter=eagle2 train=paper model=llama2-7b
accelerate launch --num_processes 4 -m specbench.train drafter=eagle2 train=paper model=llama2-7b
"""

import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from accelerate import PartialState
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specbench import measure
from specbench.assets import atomic_path, cache_root
from specbench.datasets import Conversations
from specbench.engine import weights
from specbench.engine.grow import Chain
from specbench.engine.interface import Taps
from specbench.engine.target import pick_device
from specbench.errors import SpecBenchError, run_door, spoken
from specbench.models import ModelSpec
from specbench.training.features import Corpus, CorpusBuilder, CorpusSettings, held_out
from specbench.training.plan import plan
from specbench.training.replay import known_states, replay
from specbench.training.trainer import Trainer, TrainSettings

CALIBRATION = 64  # held-out answers of a drafter's calibration
CHAIN = 5  # steps of the held-out n-alpha: 0-alpha … 4-alpha, as in EAGLE, Table 1


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
@spoken
def main(config: DictConfig) -> None:
    """Build what is missing of the corpus, train, write the weights."""
    if config.train.missing and (Path(config.train.out) / weights.WEIGHTS).exists():
        print(f"{config.train.out}: there already (train.missing=false trains anew)")
        return
    measure.commit()  # remembered from now on: the code that trains is the code that was there at the start
    torch.set_num_threads(config.threads or torch.get_num_threads())
    spec: ModelSpec = instantiate(config.model)
    if config.train.shard_target and config.train.build:
        raise SpecBenchError(
            "a target spread over processes runs in all of them at once and writes no corpus; write it before, in one "
            "process (model.device_map=auto), then train with train.build=false"
        )
    processes = PartialState(cpu=pick_device(spec.device).type == "cpu")
    target, chat = spec.load(processes.num_processes if config.train.shard_target else 1)
    torch.manual_seed(config.train.settings.seed)
    if "weights" not in config.drafter:
        raise SpecBenchError(f"drafter={config.drafter.name} has nothing to train")
    drafter: Any = instantiate(config.drafter, weights=config.train.start)
    drafter.bind(target)

    corpus_settings: CorpusSettings = instantiate(config.train.corpus)
    text: Conversations = instantiate(config.train.text)
    chats = text.load()
    builder = CorpusBuilder(corpus_settings, target, chat, chats, cache_root() / "corpora")
    stored = corpus_settings.states and not config.train.online and drafter.taps == Taps()  # shards hold last states only
    online = None if stored else target
    settings: TrainSettings = instantiate(config.train.settings)
    estimate = plan(builder, drafter, target, settings, config.train.batch, not stored, builder.folder)
    if processes.is_main_process:
        print(estimate, flush=True)
    folder = builder.build(processes.process_index, processes.num_processes) if config.train.build else builder.folder
    processes.wait_for_everyone()
    taps = drafter.taps
    corpus = Corpus(
        folder, config.train.batch, config.train.answers_only, settings.seed, online, taps, corpus_settings.tokens
    )

    answers = held_out(folder, settings.validation_answers)

    def validate() -> dict[str, Any]:
        growth, drafter.growth = drafter.growth, Chain(CHAIN)
        try:
            found = replay(target, drafter, answers)
        finally:
            drafter.growth = growth
        return {"chain_tau": round(found.tau, 4), "n_alpha": [round(a, 4) for a in found.alphas]}

    name = config.train.name or config.drafter.name
    trainer = Trainer(drafter, corpus, settings, validate, cache_root() / "training" / config.model.name / name)
    own = sum(p.numel() for p in trainer.parameters)
    processes.print(
        f"{config.drafter.name}: {own:,} trainable parameters, {corpus.tokens:,} tokens a pass, "
        f"{trainer.total} steps, checkpoints in {trainer.folder}",
        file=sys.stderr,
    )
    history = trainer.run()
    # By all processes: a target in parts runs in all of them or in none.
    calibration = drafter.calibrate([known_states(target, ids, begin) for ids, begin in held_out(folder, CALIBRATION)])
    if not processes.is_main_process:
        return
    recipe = OmegaConf.to_container(config.train, resolve=True)
    assert isinstance(recipe, dict)
    provenance = {
        "drafter": OmegaConf.to_container(config.drafter, resolve=True),
        "target": config.model.name,
        "target_fingerprint": target.fingerprint(),
        "parameters": own,
        "data": {
            **OmegaConf.to_container(config.train.corpus, resolve=True),  # type: ignore[dict-item]
            "unique_tokens": corpus.tokens,
            "shards": len(corpus.shards),
        },
        "recipe": {k: v for k, v in recipe.items() if k not in ("name", "out")},  # where it was written is no recipe
        "tokens_seen": trainer.tokens,
        "steps": trainer.step,
        "hours": round(trainer.seconds / 3600, 3),
        "machine": measure.hardware(target.device),
        "versions": measure.versions(),
        "commit": measure.commit(),
        "history": history,
        "calibration": calibration,
    }
    out = Path(config.train.out)
    with atomic_path(out / weights.WEIGHTS) as temporary:
        weights.save(drafter, temporary.parent, provenance)
        (temporary.parent / weights.PROVENANCE).replace(out / weights.PROVENANCE)
    print(f"weights in {out}")


if __name__ == "__main__":
    run_door(main)
