"""Recipes: the learning rate of every step, clipping, groups of parameters, phases and their resume; what conf/ says."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import DRAFTERS, ROOT, composed, tiny
from corpora import VOCABULARY, Fake, Text, trainer
from hydra.utils import instantiate

from specbench.common.errors import SpecBenchError
from specbench.config import validation
from specbench.engine.interface import Batch
from specbench.training.corpus_reader import CorpusReader
from specbench.training.loss_vocabulary import LossVocabulary, draw
from specbench.training.overwriting import made_by
from specbench.training.parameters import check, optimizer
from specbench.training.plan import _try, plan
from specbench.training.recipe import Phase, Schedule, TrainSettings, describe, lr_shares, phase_at, rates, starts
from specbench.training.shards import Sequence, save_shard
from specbench.training.trainer import METRICS_EVERY, Trainer

# The learning rate of every step -----------------------------------------------------------------------------------------


def test_the_schedule_rises_holds_and_falls_to_its_floor():
    schedule = Schedule(warmup=0.1, plateau=0.5, decay="linear", floor=0.2)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10:55] == [1.0] * 45  # half of the 90 steps after the warm-up
    assert factors[55:] == pytest.approx([0.2 + 0.8 * (1 - i / 45) for i in range(45)])
    assert Schedule(warmup_steps=7).factor(6, 1000) == 1.0 and Schedule(warmup_steps=7).factor(5, 1000) == pytest.approx(
        6 / 7
    )


@pytest.mark.parametrize(
    ("decay", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.5, 0.001), ("cosine", 0.5, 0.5 - 0.5 * math.cos(math.pi * 0.001))],
)
def test_every_decay_has_its_shape(decay, middle, last):
    assert Schedule(decay=decay).factor(0, 1000) == 1.0
    assert Schedule(decay=decay).factor(500, 1000) == pytest.approx(middle)
    assert Schedule(decay=decay).factor(999, 1000) == pytest.approx(last)
    lifted = Schedule(decay=decay, floor=0.3)
    assert lifted.factor(999, 1000) == pytest.approx(0.3 + 0.7 * last)


def test_drawn_ids_are_the_texts_own_and_as_many_others():
    ids, own = torch.tensor([9, 4, 7, 1, 8, 2]), torch.tensor([7, 7, 3, 2])
    torch.manual_seed(0)
    for count in (2, 3, 5):
        found = draw(ids, own, count)[0].tolist()
        assert len(found) == len(set(found)) == count and {7, 2} <= set(found) <= set(ids.tolist())
    assert draw(ids, own, 6)[0].tolist() == ids.tolist() and draw(ids, own, 1)[0].tolist() == [7, 2]
    assert len({tuple(sorted(draw(ids, own, 3)[0].tolist())) for _ in range(40)}) == 4, "the others are drawn anew"
    assert not draw(ids, own, 6)[1].any() and not draw(ids, own, 1)[1].any(), "these are certain"
    assert not draw(own, own, 2)[1].any(), "all ids are in the text, and fewer are asked for"


def test_the_bias_of_drawn_ids_makes_their_sum_an_estimate_of_that_over_all():
    torch.manual_seed(0)
    ids, own, logits = torch.randperm(40), torch.tensor([3, 5]), torch.randn(40)
    sums = []
    for _ in range(4000):
        drawn, bias = draw(ids, own, 12)
        assert not bias[:2].any() and torch.allclose(bias[2:].exp(), torch.tensor(38 / 10))
        sums.append((logits[drawn] + bias).exp().sum())
    assert torch.stack(sums).mean() == pytest.approx(float(logits.exp().sum()), rel=0.02)


def test_ids_that_the_corpus_lacks_are_drawn_beside_the_frequent_ones():
    corpus = SimpleNamespace(frequent=lambda count: torch.tensor([4, 1, 6])[:count])
    drafter = SimpleNamespace(embedding=torch.nn.Embedding(8, 2), head=torch.nn.Linear(2, 3))  # a narrower head of its own
    settings = TrainSettings(vocabulary=2, others=1)
    made = LossVocabulary(corpus, settings, drafter, torch.device("cpu"))
    assert made.ids.tolist() == [4, 1, 6, 0, 2, 3, 5, 7]
    assert LossVocabulary(corpus, TrainSettings(vocabulary=2), drafter, torch.device("cpu")).ids.tolist() == [4, 1]
    batch, drawn = Batch(torch.zeros(1, 2, dtype=torch.long), None, *[torch.ones(1, 2, dtype=torch.bool)] * 2), set()
    batch.tokens[:] = 4
    for _ in range(100):
        made.confine(batch, settings.phases[0])
        assert batch.vocabulary[:2].tolist() == [4, 1]
        drawn |= {*batch.vocabulary[2:].tolist()}
    assert drawn == {0, 2, 3, 5, 6, 7}


def test_the_mass_of_a_phase_is_its_share_of_all_learning_rates():
    levels = TrainSettings(decay="constant", phases=({"share": 0.5}, {"share": 0.5, "lr": 0.25}))
    assert lr_shares(levels, 200) == pytest.approx([0.8, 0.2])
    falling = TrainSettings(decay="linear", phases=({"share": 0.5}, {"share": 0.5}))
    assert lr_shares(falling, 10_000) == pytest.approx([0.75, 0.25], abs=1e-3)
    starved = TrainSettings(decay="cosine", phases=({"share": 0.97}, {"share": 0.03, "vocabulary": None}))
    assert lr_shares(starved, 1404)[1] < 1e-4  # what a floor and a longer phase are for


def test_a_phase_restarts_the_schedule_in_its_own_form():
    settings = TrainSettings(
        warmup_steps=2,
        decay="linear",
        phases=(
            {"share": 0.4, "restart": True},
            {"share": 0.4, "restart": True, "lr": 0.5, "warmup": 0.5},
            {"share": 0.2, "restart": True, "lr": 0.1, "warmup": 0.0, "decay": "constant"},
        ),
    )
    assert rates(settings, 10) == pytest.approx([0.5, 1, 1, 0.5, 0.25, 0.5, 0.5, 0.25, 0.1, 0.1])
    whole = TrainSettings(decay="linear", phases=({"share": 0.5}, {"share": 0.5, "lr": 2.0}))
    assert rates(whole, 4) == pytest.approx([1, 0.75, 1.0, 0.5])  # without a restart the first schedule goes on


def test_steps_belong_to_phases_by_share_whatever_the_length():
    settings = TrainSettings(phases=({"share": 0.8}, {"share": 0.2}))
    assert starts(settings, 10) == [0, 8, 10] and [phase_at(settings, s, 10) for s in (0, 7, 8, 9, 10)] == [0, 0, 1, 1, 1]
    assert starts(settings, 2) == [0, 2, 2] and phase_at(settings, 1, 2) == 0 and phase_at(settings, 2, 2) == 1
    thirds = TrainSettings(phases=[{"share": 1 / 3}] * 3)
    assert starts(thirds, 999_999)[-1] == 999_999 == len(rates(thirds, 999_999))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two warm-ups": ({"warmup": 0.1, "warmup_steps": 3}, "exclude each other"),
    "decay": ({"decay": "steps"}, "train.settings.decay=steps: must be 'constant', 'linear' or 'cosine'"),
    "share": ({"warmup": 60}, "train.settings.warmup=60: must be less than or equal to 1"),
    "clipping": ({"clip_by": "vote"}, "'norm' or 'value'"),
    "shares": ({"phases": [{"share": 0.5}, {"share": 0.4}]}, "0.5 + 0.4 do not sum to 1"),
    "empty phase": ({"phases": [{"share": 0.0}, {"share": 1.0}]}, "phases[0].share=0.0: must be greater than 0"),
    "key": ({"phases": [{"share": 1.0, "rate": 2}]}, "phases[0].rate: no such option"),
    "no share": ({"phases": [{"lr": 2}]}, "phases[0].share is missing"),
    "vocabulary": (
        {"phases": [{"share": 1.0, "vocabulary": "small"}]},
        "phases[0].vocabulary=small: must be a valid integer or must be 'inherit'",
    ),
    "no restart": ({"phases": [{"share": 1.0, "decay": "linear"}]}, "without restart=true"),
    "phase's schedule": ({"phases": [{"share": 1.0, "restart": True, "floor": 3}]}, "phases[0].floor=3: must be less than"),
}


def said_by_a_configuration(settings: dict[str, Any]) -> TrainSettings:
    validation.check_node(settings, (TrainSettings,), "train.settings")
    return TrainSettings(**settings)


@pytest.mark.parametrize("case", WRONG)
def test_a_recipe_that_cannot_be_meant_is_refused(case):
    settings, message = WRONG[case]
    with pytest.raises(SpecBenchError) as caught:
        said_by_a_configuration(settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_phases_are_said_in_one_line(tmp_path, capsys):
    phases = [{"share": 0.8, "train": ["body"]}, {"share": 0.2, "lr": 0.5, "vocabulary": None, "drafter": {"gain": 2}}]
    description = describe(TrainSettings(decay="constant", vocabulary=8192, phases=phases), 1000)
    assert description == (
        "phases: 80% confined to 8,192 ids only body (89% of the learning rate), "
        "20% over all ids gain=2 (11% of the learning rate)"
    )
    trainer(tmp_path, phases=phases).run()
    assert capsys.readouterr().err.startswith("phases: 80% over all ids only body (89% of the learning rate)")


# Steps -------------------------------------------------------------------------------------------------------------------


def gradients(made: Any) -> list[torch.Tensor]:
    """Those of one step, as the optimiser meets them."""
    found: list[torch.Tensor] = []
    step = made.optimizer.step

    def remember() -> None:
        found.extend(p.grad.clone() for p in made.parameters)
        step()

    made.optimizer.step = remember
    made.run()
    return found


def test_gradients_are_clipped_by_norm_by_value_or_not_at_all(tmp_path):
    free, norm, value = (
        gradients(trainer(tmp_path / str(i), steps=1, clip=clip, clip_by=by))
        for i, (clip, by) in enumerate([(None, "norm"), (0.05, "norm"), (0.05, "value")])
    )
    length = torch.cat([g.flatten() for g in free]).norm()
    assert length > 0.1 and max(g.abs().max() for g in free) > 0.06  # there is something to clip
    for whole, shorter, cut in zip(free, norm, value, strict=True):
        assert torch.allclose(shorter, whole * 0.05 / length, atol=1e-6)
        assert torch.equal(cut, whole.clamp(-0.05, 0.05))


def change(made: Any) -> dict[str, torch.Tensor]:
    before = {n: p.detach().clone() for n, p in made.drafter.named_parameters()}
    made.run()
    return {n: p.detach() - before[n] for n, p in made.drafter.named_parameters()}


def test_groups_scale_the_learning_rate_of_what_they_name(tmp_path):
    plain = change(trainer(tmp_path / "plain", steps=1))
    groups = {"outputs.0.bias": 2.0, "outputs": 4.0, "*.bias": 0.5}
    grouped = change(trainer(tmp_path / "grouped", steps=1, groups=groups))
    factors = {"body.weight": 1.0, "body.bias": 0.5, "outputs.0.weight": 4.0, "outputs.0.bias": 2.0}
    for name, factor in factors.items():
        assert plain[name].abs().max() > 0
        assert torch.allclose(grouped[name], factor * plain[name], atol=1e-6), name
    assert not grouped["shared.weight"].any()


def test_vectors_decay_unless_the_recipe_says_otherwise(tmp_path):
    for both, factors in ((True, {"matrix": 0.5, "vector": 0.5}), (False, {"matrix": 0.5, "vector": 1.0})):
        named = [("matrix", torch.nn.Parameter(torch.ones(2, 2))), ("vector", torch.nn.Parameter(torch.ones(2)))]
        made = optimizer(named, TrainSettings(lr=1.0, weight_decay=0.5, decay_vectors=both))
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)
        made.step()
        for name, parameter in named:
            assert torch.equal(parameter.detach(), torch.full_like(parameter, factors[name])), (both, name)


def test_a_training_that_goes_on_keeps_the_precision_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # it holds one precision a process
    monkeypatch.setattr("specbench.training.trainer.mixed", lambda *_: "bf16")
    killed = trainer(tmp_path, Fake(stop=6), precision="auto")
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    monkeypatch.setattr("specbench.training.trainer.mixed", lambda *_: "no")
    assert trainer(tmp_path, precision="auto").accelerator.mixed_precision == "bf16"


def test_weights_in_half_precision_are_trained_in_float32_or_not_at_all(tmp_path):
    with pytest.raises(SpecBenchError, match=r"train\.settings\.precision=no would train weights in bfloat16"):
        trainer(tmp_path, Fake().bfloat16())


def test_the_steps_really_get_the_rates_of_the_recipe(tmp_path):
    made, used = trainer(tmp_path, decay="linear", warmup=0.2, floor=0.1, groups={"body": 0.5}), []
    step = made.optimizer.step
    made.optimizer.step = lambda: (used.append([g["lr"] for g in made.optimizer.param_groups]), step())
    made.run()
    factors = rates(made.settings, 20)
    assert used == [pytest.approx([0.025 * f, 0.05 * f]) for f in factors] and factors[3] == 1.0 > factors[5] > 0.1


@pytest.mark.parametrize("at", [3, METRICS_EVERY + 3])
def test_a_loss_that_is_no_number_ends_the_training_and_keeps_nothing_of_it(tmp_path, at):
    made = trainer(tmp_path, epochs=20)  # which keeps every step
    loss = made.drafter.loss
    made.drafter.loss = lambda batch: {k: v * (torch.nan if made.step == at else 1) for k, v in loss(batch).items()}
    with pytest.raises(SpecBenchError, match=f"the loss became nan at step {at}; lower train.settings.lr"):
        made.run()
    assert torch.load(made.checkpoint, weights_only=True)["step"] == at


@pytest.mark.parametrize("steps", [METRICS_EVERY - 3, METRICS_EVERY, 2 * METRICS_EVERY + 5])
def test_metrics_are_smoothed_step_by_step_however_seldom_they_are_read(tmp_path, steps):
    made = trainer(tmp_path, epochs=20, steps=steps)
    seen, gradients = [], made._gradients
    made._gradients = lambda batches: (seen.append(gradients(batches)), seen[-1])[1]
    (entry,) = made.run()
    losses = [float(metrics["loss"].detach()) for metrics, _ in seen]
    smoothed = losses[0]
    for loss in losses[1:]:
        smoothed = 0.98 * smoothed + 0.02 * loss
    assert len(seen) == steps and entry["loss"] == pytest.approx(smoothed, abs=1e-5)


# Phases ------------------------------------------------------------------------------------------------------------------

PHASES = (
    {"share": 0.3, "drafter": {"gain": 3.0}, "train": ["outputs"]},
    {"share": 0.3, "drafter": {"noise": 0.5}, "vocabulary": 3, "lr": 0.5},
    {"share": 0.4, "drafter": {"gain": 0.5}, "vocabulary": None, "train": ["body.weight"], "restart": True, "warmup": 0.2},
)


def test_phases_switch_options_vocabulary_and_parameters_at_their_steps(tmp_path):
    made = trainer(tmp_path, vocabulary=5, phases=PHASES)  # 20 steps: 6, 6, 8
    weights: list[dict[str, torch.Tensor]] = []
    update = made._update
    made._update = lambda: (
        update(),
        weights.append({n: p.detach().clone() for n, p in made.drafter.named_parameters()}),
    )
    made.run()
    seen = made.drafter.seen
    assert [s["gain"] for s in seen] == [3.0] * 12 + [0.5] * 8
    assert [s["ids"] for s in seen] == [[7, 6, 5, 4, 3]] * 6 + [[7, 6, 5]] * 6 + [None] * 8
    assert [s["trained"] for s in seen] == [{"outputs"}] * 6 + [{"body", "outputs"}] * 6 + [{"body"}] * 8
    assert [s["progress"] for s in seen] == pytest.approx([i / 20 for i in range(20)])
    own = {"body.weight", "body.bias", "outputs.0.weight", "outputs.0.bias"}
    moving = [{n for n in a if not torch.equal(a[n], b[n])} for a, b in itertools.pairwise(weights)]
    expected = [{"outputs.0.weight", "outputs.0.bias"}] * 5 + [own] * 6 + [{"body.weight"}] * 8
    assert moving == expected
    assert made.drafter.gain == 0.5 and made.drafter.noise == 0.5  # as the last phase left them
    assert {n for n, p in made.drafter.named_parameters() if p.requires_grad} == own  # what will be saved


def test_validations_are_evenly_spaced_and_change_no_weights(tmp_path):
    validated, plain = trainer(tmp_path / "a", validations=3), trainer(tmp_path / "b")
    assert [entry["step"] for entry in validated.run()] == [5, 10, 15, 20]
    assert [entry["step"] for entry in plain.run()] == [20]
    for name, value in validated.drafter.state_dict().items():
        assert torch.equal(value, plain.drafter.state_dict()[name])
    trainer(tmp_path / "b", validations=9).run()  # not another recipe


@pytest.mark.parametrize("stop", [5, 20])  # at a milestone, and at the end
def test_a_run_killed_while_it_validates_loses_neither_steps_nor_losses(tmp_path, stop):
    whole = trainer(tmp_path / "whole", validations=3, checkpoint_minutes=1000)
    whole.run()
    killed = trainer(tmp_path / "killed", validations=3, checkpoint_minutes=1000)
    killed.validate = lambda: {} if killed.step < stop else {}[stop]
    with pytest.raises(KeyError):
        killed.run()
    resumed = trainer(tmp_path / "killed", validations=3, checkpoint_minutes=1000)
    resumed.run()
    assert len(resumed.drafter.seen) == 20 - stop
    losses = [[(entry["step"], entry["loss"]) for entry in one.history] for one in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_run_killed_in_any_phase_ends_with_the_same_weights(tmp_path):
    options = {"vocabulary": 5, "phases": PHASES, "groups": {"outputs": 2.0}, "decay": "cosine"}
    whole = trainer(tmp_path / "whole", **options)
    whole.run()
    for stop in (2, 6, 9, 12, 17):  # inside each phase, and between them
        folder = tmp_path / str(stop)
        killed = trainer(folder, Fake(stop=stop), **options)
        with pytest.raises(KeyboardInterrupt):
            killed.run()
        resumed = trainer(folder, **options)
        resumed.run()
        assert len(resumed.drafter.seen) == 20 - stop
        for name, value in whole.drafter.state_dict().items():
            assert torch.equal(value, resumed.drafter.state_dict()[name]), (stop, name)
        assert (resumed.drafter.gain, resumed.drafter.noise) == (0.5, 0.5)
    again = trainer(tmp_path / "whole", **options)  # of a training that is over
    again.run()
    assert not again.drafter.seen and (again.drafter.gain, again.drafter.noise) == (0.5, 0.5)


def packed_corpus(folder: Path) -> CorpusReader:
    """Random texts whose packing makes other numbers of rows in other epochs: 80 texts in pools of 32."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 21, (80,), generator=generator).tolist()
    texts_ids = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]
    states = [torch.randn(n, 4, generator=generator) for n in lengths]
    texts = zip(texts_ids, states, strict=True)
    save_shard(
        folder / "shard-00000.safetensors",
        [Sequence(i, ids, torch.ones(len(ids), dtype=torch.bool), known) for i, (ids, known) in enumerate(texts)],
    )
    return CorpusReader(folder, 1, False, 0, row_tokens=24)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_epochs_of_packed_rows_may_differ_in_length(tmp_path, accumulate):
    """Every row of every epoch is trained on once, and a run killed in a shorter epoch goes on where it stood."""
    (tmp_path / "corpus").mkdir()
    corpus, epochs = packed_corpus(tmp_path / "corpus"), 5
    counts = [math.ceil(len(corpus.batches(epoch)) / accumulate) for epoch in range(epochs)]
    shorter = next(epoch for epoch, count in enumerate(counts) if count < counts[0])
    assert shorter and max(counts) > min(counts)

    def made(name: str, stop: int | None = None, **more: Any) -> Trainer:
        options = {"lr": 0.05, "checkpoint_minutes": 0.0, "epochs": epochs, "accumulate": accumulate} | more
        return Trainer(Fake(stop=stop), corpus, TrainSettings(**options), dict, tmp_path / name)

    whole = made("whole")
    assert whole.total == sum(counts) and made("capped", steps=7).total == 7
    whole.run()
    rows = sum(len(corpus.batches(epoch)) for epoch in range(epochs))
    assert len(whole.drafter.seen) == rows and whole.step == sum(counts)
    assert whole.tokens == epochs * corpus.tokens, "a text was left out, or came twice"
    for step in (sum(counts[:shorter]) + 1, sum(counts[: shorter + 1]) - 1, sum(counts[: shorter + 1])):
        killed = made(str(step))
        update = killed._update

        def interrupted(at: int = step, run: Trainer = killed, update: Any = update) -> None:
            if run.step == at:
                raise KeyboardInterrupt
            update()

        killed._update = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            killed.run()
        resumed = made(str(step))
        resumed.run()
        assert resumed.step == whole.step and resumed.tokens == whole.tokens
        for name, value in whole.drafter.state_dict().items():
            assert torch.equal(value, resumed.drafter.state_dict()[name]), (step, name)


def test_measured_is_what_will_be_used_and_training_goes_on_in_full_precision(tmp_path, monkeypatch):
    """Weights as they are saved, at every validation; what has ended is not measured again."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # it holds one precision a process
    seen: list[Any] = []
    made: Any = None

    def validate():
        seen.append((made.parameters[0].dtype, torch.is_autocast_enabled("cpu")))
        return {}

    corpus: Any = Text()
    ends = []
    for folder, minutes in (("often", -1.0), ("often", -1.0), ("once", 1000.0)):
        settings = TrainSettings(lr=0.05, epochs=2, precision="bf16", validate_minutes=minutes)
        made = Trainer(Fake().to(torch.bfloat16), corpus, settings, validate, tmp_path / folder)
        made.run()
        ends.append([p.clone() for p in made.parameters])
    assert seen == [(torch.bfloat16, False)] * (10 + 1)
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))


def test_the_last_phase_configures_the_drafter_even_without_a_step(tmp_path):
    made = trainer(tmp_path, steps=2, phases=[{"share": 0.8, "train": ["body"]}, {"share": 0.2, "drafter": {"gain": 7.0}}])
    made.run()
    assert len(made.drafter.seen) == 2 and made.drafter.gain == 7.0
    assert made.drafter.outputs[0].weight.requires_grad


def test_a_checkpoint_goes_on_only_under_the_recipe_it_was_made_with(tmp_path):
    trainer(tmp_path, phases=PHASES).run()
    with pytest.raises(SpecBenchError, match=r"with another settings\.lr, settings\.phases;"):
        trainer(tmp_path, lr=0.1).run()
    trainer(tmp_path, phases=PHASES, validate_minutes=3.0).run()  # says nothing about the weights


@pytest.mark.parametrize("changed", [{"drafter": {"steps": 3}}, {"target": "another"}, {"start": None}])
def test_a_finished_checkpoint_is_not_taken_for_another_training(tmp_path, changed):
    """Of as many steps under the same settings: its weights would claim to be of a drafter that they are not."""
    shaped_by = {"drafter": {"steps": 2}, "target": "this", "start": "sha"}

    def begun(shaped_by: dict[str, Any]) -> Any:
        return Trainer(Fake(), Text(), TrainSettings(epochs=2), dict, tmp_path, shaped_by)  # type: ignore[arg-type]

    begun(shaped_by).run()
    assert begun(dict(reversed(shaped_by.items()))).run()
    with pytest.raises(SpecBenchError, match=f"with another {next(iter(changed))}"):
        begun(shaped_by | changed).run()


def test_a_class_that_moved_makes_no_other_training(tmp_path):
    """Neither of a checkpoint that is to be resumed nor of weights that are to be made anew."""

    def options(module: str) -> dict[str, Any]:
        return {"growth": {"_target_": f"{module}.Dynamic", "depth": 6}}

    for module in ("specbench.engine.grow", "specbench.engine.policies"):
        Trainer(Fake(), Text(), TrainSettings(epochs=2), dict, tmp_path, options(module)).run()  # type: ignore[arg-type]
    assert made_by(options("old"), {"corpus": options("old")}) == made_by(options("new"), {"corpus": options("new")})
    assert made_by(options("old"), {}) != made_by({"growth": {"_target_": "old.Static", "depth": 6}}, {})


LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"phases": [{"share": 0.5}, {"share": 0.5, "drafter": {"steps": 3}}]}, "`steps` is no option"),
    "trained": ({"phases": [{"share": 1.0, "train": ["bod"]}]}, "phases[0].train: `bod`"),
    "nothing": ({"phases": [{"share": 1.0, "train": []}]}, "phases[0].train: nothing"),
    "frozen": ({"phases": [{"share": 1.0, "train": ["shared"]}]}, "they begin with body, outputs"),
    "group": ({"groups": {"heads": 4.0}}, "groups: `heads`"),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_the_drafter_lacks_is_said_before_the_first_step(tmp_path, case):
    settings, message = LACKING[case]
    drafter = Fake()
    with pytest.raises(SpecBenchError) as caught:
        trainer(tmp_path, drafter, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not drafter.seen and not (tmp_path / "checkpoint.pt").exists()


def test_the_plan_tries_every_phase_and_leaves_the_drafter_as_it_was():
    target, drafter = tiny(), Fake(width=32)
    settings = TrainSettings(vocabulary=5, phases=PHASES)
    assert _try(drafter, target, settings, 2, online=False).seconds > 0
    tried = drafter.seen[1::2]  # the first one of each phase warms up
    assert [s["gain"] for s in tried] == [3.0, 3.0, 0.5]
    assert [len(s["ids"] or range(VOCABULARY)) for s in tried] == [5, 3, 8]
    assert [s["progress"] for s in tried] == pytest.approx([0.15, 0.45, 0.8])
    assert (drafter.gain, drafter.noise) == (1.0, 0.1)


def test_a_target_that_caps_its_logits_is_refused_since_no_loss_does():
    target = tiny()
    target.config.final_logit_softcapping = 30.0
    text = SimpleNamespace(target=target)
    with pytest.raises(SpecBenchError, match="caps its logits"):
        plan(SimpleNamespace(settings=TrainSettings()), SimpleNamespace(text=text), Fake(width=32), online=False)


def test_the_plan_counts_what_grows_with_tokens_and_is_held_for_the_backward_pass():
    class Squares(Fake):
        def loss(self, batch):
            held = batch.tokens[..., None] * self.gain_of_all.weight[:, 0]  # [N, T, width], which the square holds
            return {"loss": (held**2).sum()}

    drafter = Squares(width=32)
    drafter.gain_of_all = torch.nn.Linear(1, 32)
    kept = _try(drafter, tiny(), TrainSettings(vocabulary=5), 2, online=False).kept
    assert kept == 4 * 32 + 8  # and a token's id


# What conf/ says ---------------------------------------------------------------------------------------------------------

TRAININGS = sorted(p.stem for p in (ROOT / "conf" / "train").glob("*.yaml"))
RECIPES = sorted(p.stem for p in (ROOT / "conf" / "recipe").glob("*.yaml"))


def settings_of(*overrides: str) -> TrainSettings:
    made: TrainSettings = instantiate(composed("train", *overrides).train.settings)
    return made


@pytest.mark.parametrize("training", TRAININGS)
def test_every_drafter_composes_with_every_training(training):
    """Those with a recipe of this training's, and one without: nothing else of a drafter meets a training."""
    own = [d for d in DRAFTERS if f"{training}_{d}" in RECIPES]
    for drafter in [*own, next(d for d in DRAFTERS if d not in own)]:
        settings = settings_of(f"train={training}", f"drafter={drafter}")
        assert isinstance(settings.phases[0], Phase)


def test_a_recipe_is_chosen_by_training_and_drafter():
    known = {f"{t}_{d}" for t in TRAININGS for d in DRAFTERS}
    assert set(RECIPES) <= known, "no combination chooses this file"
    assert settings_of("train=paper", "drafter=medusa").lr == 1e-3
    assert settings_of("train=paper", "drafter=beagle").decay == "constant"
    assert settings_of("train=small", "drafter=medusa").warmup == 0.1
    assert settings_of("train=small", "drafter=medusa", "~recipe").warmup == 0.03
    assert (
        settings_of("train=paper", "drafter=medusa", "train.settings.lr=0.5").lr == 0.5
    )  # the command line has the last word
    given = settings_of("drafter=hass", "train.settings.phases=[{share: 1.0, vocabulary: 16}]")
    assert given.phases == (Phase(share=1.0, vocabulary=16),)


def test_what_has_no_recipe_of_its_own_is_trained_like_eagle():
    own, general = (composed("train", "train=paper", f"drafter={d}").train for d in ("eagle2", "eagle2_token"))
    assert own.settings == general.settings and own.batch == general.batch and own.answers_only == general.answers_only


def objectives(settings: TrainSettings, total: int) -> tuple[dict[str, float], dict[int | None, float]]:
    """Learning-rate mass by options of the objective (which stay until changed), and by vocabulary."""
    options: dict[str, Any] = {}
    by_options: dict[str, float] = {}
    by_ids: dict[int | None, float] = {}
    for phase, mass in zip(settings.phases, lr_shares(settings, total), strict=True):
        options |= phase.drafter
        by_options[str(options)] = by_options.get(str(options), 0.0) + mass
        ids = settings.vocabulary_in(phase)
        by_ids[ids] = by_ids.get(ids, 0.0) + mass
    return by_options, by_ids


@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_where_time_allows_all_drafters_are_trained_on_the_same_text(scale):
    """Epochs are each paper's own; only Medusa-2, which changes the target, ends after so many steps on a GPU."""
    drafters = [recipe.removeprefix(f"{scale}_") for recipe in RECIPES if recipe.startswith(scale)]
    trained = {drafter: composed("train", f"train={scale}", f"drafter={drafter}") for drafter in drafters}
    assert len(trained) > 10 and len({config.train.corpus.tokens for config in trained.values()}) == 1
    assert {d for d, config in trained.items() if config.train.settings.steps} <= {"medusa2"}
    assert {config.train.start for config in trained.values()} == {None}


@pytest.mark.parametrize("scale", ["small", "gpu"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_objective_and_vocabulary_of_a_recipe_is_really_trained(drafter, scale):
    settings = settings_of(f"train={scale}", f"drafter={drafter}")
    for total in (150, 1404):
        by_options, by_ids = objectives(settings, total)
        assert min(by_options.values()) >= 0.15
        assert by_ids.get(None, 0.0) >= 0.05 or settings.others >= 1000, "some ids are never trained"
        assert list(by_options.values())[-1] >= 0.5  # the method's own comes last and gets the most


def test_the_papers_numbers():
    """The learning rate at the steps the papers and their code name."""
    hass = settings_of("train=paper", "drafter=hass")
    by_step = [hass.lr * factor for factor in rates(hass, 50_000)]
    assert by_step[0] == pytest.approx(3e-5 / 400) and by_step[399] == pytest.approx(3e-5)
    assert by_step[40_000] == pytest.approx(1e-5 / 100, rel=1e-5) and by_step[40_099] == pytest.approx(1e-5, rel=1e-5)
    moa = settings_of("train=paper", "drafter=moa")
    by_step = [moa.lr * factor for factor in rates(moa, 186_000)]
    assert by_step[49] == pytest.approx(6e-4) and by_step[6_199] == pytest.approx(3e-5, rel=1e-2)
    assert len(set(by_step[6_200:])) == 1 and by_step[-1] == pytest.approx(3e-5)
    eagle = settings_of("train=paper", "drafter=eagle2")
    by_step = [eagle.lr * factor for factor in rates(eagle, 323_000)]
    assert by_step[1_999] == pytest.approx(3e-5) and by_step[-1] == pytest.approx(3e-5 * (800 - 323) / 798, rel=1e-2)
    assert (eagle.clip, eagle.clip_by) == (0.5, "value")
    beagle = settings_of("train=paper", "drafter=beagle")
    assert rates(beagle, 8_000)[2_000:] == [1.0] * 6_000 and (beagle.clip, beagle.clip_by) == (0.5, "norm")
    medusa = settings_of("train=paper", "drafter=medusa")
    drafters = {d: composed("train", "train=paper", f"drafter={d}").drafter for d in ("medusa", "moa")}
    assert drafters["medusa"].head_per_level and drafters["moa"].periods == [5, 15]
    assert rates(medusa, 1_000)[99] == 1.0 and rates(medusa, 1_000)[550] == pytest.approx(0.5)


@pytest.mark.parametrize("scale", ["small", "paper", "gpu", "brief"])
@pytest.mark.parametrize("drafter", ["vanilla", "eagle2", "medusa", "medusa2", "hass", "eagle3", "coral", "beagle", "moa"])
def test_every_drafter_can_follow_its_recipe(scale, drafter):
    config = composed("train", f"train={scale}", f"drafter={drafter}")
    made = instantiate(config.drafter, weights=None)
    target = tiny()
    made.bind(target)
    made.prepare_training(target)
    check(made, instantiate(config.train.settings))
