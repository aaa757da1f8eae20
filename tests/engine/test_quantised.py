"""A quantised target: rounded weights in the model, the same ones in OpenVINO's graph, and refusals in one line."""

import numpy as np
import pytest
import torch
from command_line import run
from conftest import ROOT, composed, settled, tiny
from fixtures import block, random_row, settings
from hydra.utils import instantiate

from drafters.none import NoDrafter
from specbench.common.errors import SpecBenchError
from specbench.config import train_spec
from specbench.engine.backends import forwards, openvino_llama, weight_only
from specbench.engine.memory import estimate
from specbench.engine.pretrained import config_of
from specbench.engine.tree import build
from specbench.engine.verify import Lossless
from specbench.evaluation import costs
from specbench.evaluation.runner import BoundDrafter
from specbench.records import identity
from specbench.records.blocks import below, read_block
from specbench.records.rows import Measurement, Row
from specbench.remote import serving
from specbench.reporting import cells, claim_text
from specbench.reporting.claims import compare
from specbench.reporting.evidence import Evidence
from specbench.tuning import cost_model

KINDS = ("int8", "int4")
WIDE = {"intermediate_size": 64}  # a multiple of a group, and larger weights than a pass's rounding
PROMPT = torch.arange(9)


def quantised(kind, lean=True, **sizes):
    target = tiny(**WIDE, **sizes)
    target.quantise(kind)
    if lean:
        target.optimize_for_inference()
    return target


def spec(home, *overrides):
    return instantiate(composed("run", f"model.path={home / 'model'}", "model.device=cpu", *overrides).model)


def odd():
    """Weights with a row of zeros, a row of one value, an outlier, and groups that do not reach zero."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[0], weight[1], weight[2, 5], weight[3], weight[4] = 0, 0.3, 40, weight[3].abs() + 5, -weight[4].abs() - 5
    return weight


# Rounding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_weight_is_the_nearest_and_rounds_to_itself(kind):
    weight = odd()
    once = weight_only.rounded(weight, kind)
    steps = once.scales.expand(once.integers.shape).flatten(1)
    assert ((once.weight - weight).abs() <= 0.52 * steps).all() and once.weight.isfinite().all()
    again = weight_only.rounded(once.weight, kind)
    assert torch.equal(again.weight, once.weight) and torch.equal(again.integers, once.integers)
    assert (once.weight[0] == 0).all(), "zeros stay zeros"


def test_integers_fit_their_bits():
    int8, int4 = (weight_only.rounded(odd(), kind) for kind in KINDS)
    assert int8.scales.shape == (24, 1, 1) and int8.integers.abs().max() == 127
    assert int4.scales.shape == int4.offsets.shape == (24, 2, 1)
    assert (int4.integers.min(), int4.integers.max()) == (0, 15)


def test_weights_in_four_bits_with_a_least_value_a_group_are_found_again():
    """As GGUF's Q4_1 has them, of which the default model's files are made."""
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(16, (8, 2, 32), generator=generator)
    integers[..., 0], integers[..., 1] = 0, 15
    steps = torch.rand(8, 2, 1, generator=generator) + 0.1
    found = weight_only.rounded(((integers - 7.3) * steps).flatten(1), "int4").weight.unflatten(1, (2, -1))
    assert ((found - (integers - 7.3) * steps).abs() < 0.02 * steps).all()


# The target -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_layers_products_are_rounded(kind):
    original, target = tiny(**WIDE), quantised(kind, lean=False)
    changed = {
        name for (name, p), q in zip(original.model.named_parameters(), target.model.parameters(), strict=True)
        if not torch.equal(p, q)
    }  # fmt: skip
    assert changed == {n for n, p in original.model.named_parameters() if "layers" in n and p.ndim == 2}


def runs(target):
    """Logits of one token behind a prompt: alone, in a tree of 8, and in a batch beside two sorts of neighbours."""
    tokens = torch.arange(20, 28)
    tree = build(tokens, torch.tensor([-1] + [0] * 7), torch.tensor([0] + [1] * 7), torch.tensor([0, *range(7)]), 7, 7)
    lone = build(tokens[:1], torch.tensor([-1]), torch.tensor([0]), torch.tensor([0]), 0, 0)
    text, found = torch.cat([PROMPT, tokens[:1]]), []
    with torch.inference_mode():
        for drafted in (lone, tree):
            target.reset(40)
            target.prefill(PROMPT)
            found.append(target.forward(drafted).logits[0].clone())
        for neighbour in (torch.zeros_like(text), text.flip(0)):
            batch, positions = torch.stack([text, neighbour]), torch.arange(10).expand(2, 10)
            found.append(target.score(batch, positions, None, None)[1][0, -1].clone())
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours_and_is_the_models_own(kind):
    plain, lean = runs(quantised(kind, lean=False)), runs(target := quantised(kind))
    assert target.kernels == "openvino"
    scale = float(plain.abs().max())
    assert (lean - lean[0]).abs().max() < 1e-5 * scale, "alone, in a tree and in a batch"
    assert (lean - plain).abs().max() < 1e-5 * scale, "in OpenVINO and in PyTorch"
    original = runs(tiny(**WIDE))
    assert (plain - original).abs().max() > 1e-3 * scale, "it is another target"


@pytest.mark.parametrize(("kind", "stored"), [("int8", "i8"), ("int4", "u4"), (None, "f32")])
def test_the_graph_multiplies_with_stored_integers(kind, stored):
    target = tiny(**WIDE) if kind is None else quantised(kind)
    target.optimize_for_inference()
    runs(target)
    compiled = target.fused.request(False).get_compiled_model().get_runtime_model()
    products = [op for op in compiled.get_ops() if op.get_rt_info()["layerType"].value == "FullyConnected"]
    kinds = [op.get_rt_info()["runtimePrecision"].value for op in products]
    assert len(kinds) == 4 * target.layers + 1 and kinds.count(stored) >= 4 * target.layers


def test_a_graph_of_other_weights_is_refused(monkeypatch):
    nibbles = openvino_llama._nibbles
    monkeypatch.setattr(openvino_llama, "_nibbles", lambda integers: nibbles(integers.flip(2)))
    with pytest.raises(SpecBenchError, match=r"model\.quantised=int4"):
        quantised("int4")


def test_costs_of_a_quantised_target_are_its_own():
    original, target = tiny(**WIDE), quantised("int8")
    original.optimize_for_inference()
    assert original.kernels == target.kernels
    assert cost_model.made_for(original, {}).get("quantised") is None
    assert cost_model.made_for(target, {})["quantised"] == "int8"


# Loading --------------------------------------------------------------------------------------------------------------


def test_it_is_loaded_in_float32_and_has_its_originals_fingerprint(home, monkeypatch):
    monkeypatch.setattr("specbench.engine.device.torch.cpu.get_capabilities", lambda: {"amx_bf16": True, "avx2": True})
    (original, _), (target, _) = spec(home, "model.dtype=float32").load(), spec(home, "model.quantised=int8").load()
    assert (target.dtype, target.quantised) == (torch.float32, "int8")
    assert target.fingerprint() == original.fingerprint()
    weights = [t.decoder.layers[0].mlp.up_proj.weight for t in (original, target)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.device_map=auto"], "not with model.device_map=auto"),
        (["model.dtype=bfloat16"], "leave model.dtype=bfloat16 out"),
        (["model.forward=plain"], "no faster than its original with model.forward=plain"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_it_is_loaded(overrides, message, home, monkeypatch):
    monkeypatch.setattr("specbench.engine.loading.model_folder", lambda *a: pytest.fail("fetched"))
    with pytest.raises(SpecBenchError, match=message):
        spec(home, "model.quantised=int8", *overrides).load()


def test_machines_where_it_would_be_slower_refuse_it(home, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False})
    with pytest.raises(SpecBenchError, match="without AVX2"):
        spec(home, "model.quantised=int8").load()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(forwards, "has_openvino", lambda: False)
    with pytest.raises(SpecBenchError, match="OpenVINO, which is not installed"):
        spec(home, "model.quantised=int8").load()


@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_layers_that_the_graph_does_not_know_are_refused(architecture):
    with pytest.raises(SpecBenchError, match="only layers as Llama's"):
        tiny(architecture).quantise("int8")


def test_layers_with_a_part_of_a_group_are_refused():
    with pytest.raises(SpecBenchError, match="48 inputs, no multiple of 32; use int8"):
        tiny().quantise("int4")


def test_without_room_for_the_graph_it_is_refused():
    target = quantised("int8", lean=False)
    target.packing.room = lambda: 1000
    with pytest.raises(SpecBenchError, match="has no memory"):
        target.optimize_for_inference()


def test_the_graph_of_a_quantised_target_takes_less_memory():
    sizes = {"model_type": "llama", **tiny(**WIDE).config.to_dict()}
    sizes = {k: sizes[k] for k in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    config = config_of(sizes | {"num_attention_heads": 4}, "shape")
    full, int8, int4 = (estimate(config, torch.float32, torch.device("cpu"), 64, quantised=kind) for kind in (None, *KINDS))
    assert full.copies > int8.copies > int4.copies and full.weights == int8.weights == int4.weights


# Its records ----------------------------------------------------------------------------------------------------------


def test_its_rows_lie_in_cells_of_their_own():
    plain, int8, int4 = (settled("eagle2", f"model.quantised={kind}") for kind in ("null", *KINDS))
    assert int8.cell_folder.name == f"{plain.cell_folder.name}-int8" and int4.cell_folder.name.endswith("-int4")
    headers = [settings("eagle2") for _ in range(3)]
    for header, kind in zip(headers[1:], KINDS, strict=True):
        header["target"]["quantised"] = kind
    assert len({identity.cell_key(header) for header in headers}) == 3
    assert len({identity.machine_key(header) for header in headers}) == 1, "speeds on one machine are compared"


def test_servers_and_trainings_refuse_it():
    for refuse in (
        lambda: settled("eagle2", "model.quantised=int8", "link=5g"),
        lambda: train_spec.from_config(composed("train", "drafter=eagle2", "model.quantised=int8")),
        lambda: serving.server(spec(ROOT, "model.quantised=int8"), "tcp://127.0.0.1:0"),
    ):
        with pytest.raises(SpecBenchError, match=r"model\.quantised"):
            refuse()


def test_claims_take_each_quantised_target_by_itself(tmp_path):
    rng = np.random.default_rng(0)
    for kind, seconds in ((None, 4.0), ("int8", 2.0)):
        header = settings("eagle2", dataset="a", study="s")
        header["target"] |= {"parameters": 100} | ({} if kind is None else {"quantised": kind})
        written = block(tmp_path, header, f"a-{kind}")
        for question in map(str, range(24)):
            for name in ("none", "eagle2"):
                row, _ = random_row(rng, name, question)
                row.decode_s = seconds * len(row.tokens)
                written.write(row)
    study = {"title": "x", "source": ["x"], "varies": ["dtype"], "arms": {"eagle2": {"run": ["drafter=eagle2"]}}}
    study["cells"] = [["dataset=a", "data.limit=24"], ["dataset=a", "data.limit=24", "model.quantised=int8"]]
    study["cells"].append({"run": ["dataset=a", "data.limit=80"], "needs": {"device": "cuda"}})
    entries = cells.collect(below(tmp_path), tmp_path)
    assert {e.precision for e in entries} == {"float32", "float32 with int8 weights"}
    test = {"metric": "tokens_per_s", "of": "none", "at": {"quantised": "int8"}, "over_at": {}, "is": "more"}
    found = compare(test, Evidence(study, entries))
    assert found.effect.value == pytest.approx(2, rel=0.1) and (found.done, found.planned) == (24, 24)
    assert "differ in dtype" in compare(test, Evidence(study | {"varies": []}, entries)).reason
    absent = compare({**test, "at": {"quantised": "int4"}}, Evidence(study, entries))
    assert absent.effect is None and absent.reason == "no rows of none at quantised=int4"
    text = claim_text.describe(test, found.effect, "", Evidence(study, entries).place)
    assert text.startswith("speed of plain decoding at int8 over the original: 1.88 [")


# Its quality ----------------------------------------------------------------------------------------------------------


def test_quality_is_what_teacher_forcing_says():
    original, target = tiny(**WIDE), quantised("int8", lean=False)
    drafter = NoDrafter()
    drafter.bind(target)
    plain = BoundDrafter("none", drafter, Lossless())
    prompts = [[3, 4, 5, 6], [7, 8, 9]]
    same = costs.quality(original, original, plain, prompts, 12)
    assert same["perplexity"] == same["original"] and same["agreement"] == 1
    found = costs.quality(target, original, plain, prompts, 12)
    answers = [costs._answer(original, plain, prompt, 12, original.stop_ids) for prompt in prompts]
    losses, agreed = [], []
    assert same["tokens"] == found["tokens"] == sum(map(len, answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        for i, token in enumerate(answer):
            ids = torch.tensor([[*prompt, *answer[:i]]])
            ours, theirs = (m.model(ids).logits[0, -1].log_softmax(-1) for m in (target, original))
            losses.append(-float(ours[token]))
            agreed.append(bool(ours.argmax() == theirs.argmax()))
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert found["original"] == same["original"] and found["agreement"] == pytest.approx(np.mean(agreed))


def test_the_floor_of_a_quantised_target_reads_less():
    full, int8 = (costs.bandwidth(t, [[3, 4]], 4)["bytes"] for t in (tiny(**WIDE), quantised("int8", lean=False)))
    layers = sum(p.nbytes for p in tiny(**WIDE).decoder.layers.parameters())
    assert full - int8 == layers - layers // 4


def test_a_run_measures_it_beside_its_rows_and_names_it(home):
    run(home, "run", "model.quantised=int8", "drafter=suffix", "decode.max_new_tokens=8", "data.limit=2", "memory=0")
    (path,) = (path for path in below(home / "results") if path.parent.name.endswith("-int8"))
    header, records = read_block(path)
    assert header["target"]["quantised"] == "int8" and header["config"]["model"]["dtype"] == "float32"
    (quality,) = (r for r in records if isinstance(r, Measurement) and r.what == "quality")
    assert quality.drafter == "none" and quality.values["agreement"] > 0.5
    audits = [r.audit["verdict"] for r in records if isinstance(r, Row) and r.drafter == "suffix"]
    assert audits and set(audits) == {"identical"}
