"""Published drafters in, trained ones out: against forwards written from the papers, and every wrong file by its name."""

import json
import math
import pickle
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import configuration, make, settled, tiny
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file

from specbench.common.errors import SpecBenchError
from specbench.config.export_formats import exportable
from specbench.engine import checkpoints
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Batch, Taps
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation import arms
from specbench.training.export import serve_command

D, HEADS, KV, HEAD_DIM, MLP, V, LAYERS = 32, 4, 2, 8, 48, 61, 3  # conftest's tiny target
EPS = 1e-6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.2


def adopted(drafter: str, folder: Path, target: Any, *overrides: str) -> Any:
    made = instantiate(configuration(drafter, *overrides).drafter)
    made.checkpoint = checkpoints.read(str(folder))
    made.bind(target)
    return made.eval()


def batch_of(target: Any, length: int = 12, taps: Taps | None = None) -> Batch:
    tokens = torch.randint(V, (1, length), generator=torch.Generator().manual_seed(5))
    states, hidden, kv = target.tapped(tokens, taps or Taps())
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    batch = Batch(tokens, states, everywhere, everywhere, None, 1.0)
    batch.hidden, batch.kv = hidden, kv
    return batch


# The papers' layers, written out -------------------------------------------------------------------------------------


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rope(x, positions, theta=10000.0):  # [H, T, Dh]
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (torch.arange(half) / half)  # [T, Dh / 2]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def heads_of(x, dim):  # [T, H * Dh] -> [H, T, Dh]
    return x.reshape(x.shape[0], -1, dim).transpose(0, 1)


def attention(q, k, v, mask):  # [Hq, T, Dh], [H, S, Dh], [T, S] -> [T, Hq * Dh]
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    found = torch.nan_to_num(scores.softmax(-1), 0.0) @ v  # a query that sees nothing gets nothing
    return found.transpose(0, 1).reshape(q.shape[1], -1)


def mlp(x, t, prefix):
    gate, up, down = (t[f"{prefix}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def layer(x, t, prefix, positions, mask, dim, input_norm=True):
    normed = rms(x, t[f"{prefix}.input_layernorm.weight"]) if input_norm else x
    q, k, v = (heads_of(normed @ t[f"{prefix}.self_attn.{n}_proj.weight"].T, dim) for n in "qkv")
    x = x + attention(rope(q, positions), rope(k, positions), v, mask) @ t[f"{prefix}.self_attn.o_proj.weight"].T
    return x + mlp(rms(x, t[f"{prefix}.post_attention_layernorm.weight"]), t, prefix)


def layer_tensors(prefix, width, heads, kv, dim, inner, input_norm=True):
    t = {
        f"{prefix}.self_attn.q_proj.weight": random(heads * dim, width),
        f"{prefix}.self_attn.k_proj.weight": random(kv * dim, width),
        f"{prefix}.self_attn.v_proj.weight": random(kv * dim, width),
        f"{prefix}.self_attn.o_proj.weight": random(width, heads * dim),
        f"{prefix}.mlp.gate_proj.weight": random(inner, width),
        f"{prefix}.mlp.up_proj.weight": random(inner, width),
        f"{prefix}.mlp.down_proj.weight": random(width, inner),
        f"{prefix}.post_attention_layernorm.weight": 1 + random(width),
    }
    return t | ({f"{prefix}.input_layernorm.weight": 1 + random(width)} if input_norm else {})


def strict(length):
    return torch.ones(length, length, dtype=torch.bool).tril(-1)


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


# In ------------------------------------------------------------------------------------------------------------------


def eagle_tensors(target, bias):
    torch.manual_seed(3)
    t = {"fc.weight": random(D, 2 * D)} | layer_tensors("layers.0", D, HEADS, KV, HEAD_DIM, MLP, input_norm=False)
    t["embed_tokens.weight"] = target.embedding.weight.detach().clone()
    return t | ({"fc.bias": random(D)} if bias else {})


def write(folder: Path, tensors, name="model.safetensors", **config) -> Path:
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("drafter", ["eagle2", "hass", "coral"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_eagles_and_hass_files_give_the_papers_states(drafter, bias, name, tmp_path):
    target = tiny()
    t = eagle_tensors(target, bias)
    folder = write(tmp_path / "c", t, name, bias=not bias)  # the tensor decides, not the configuration
    made = adopted(drafter, folder, target)
    batch = batch_of(target)
    ours = made.predict(batch.states[:, :-1], batch)[0]
    embedded = target.embedding.weight[batch.tokens[0, 1:]]
    x = torch.cat([embedded, batch.states[0, :-1]], -1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
    n = len(x)
    theirs = layer(x, t, "layers.0", torch.arange(n).float(), causal(n), HEAD_DIM, input_norm=False)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert made.provenance["sha256"].keys() == {name}


@pytest.mark.parametrize("own_heads", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusas_files_give_the_papers_logits(own_heads, prefix, tmp_path):
    target = tiny()
    torch.manual_seed(4)
    t = {}
    for k in range(3):
        for i in range(2):
            t |= {f"{prefix}{k}.{i}.linear.weight": random(D, D), f"{prefix}{k}.{i}.linear.bias": random(D)}
        if own_heads:
            t[f"{prefix}{k}.2.weight"] = random(V, D)
    folder = write(tmp_path / "c", t, "medusa_lm_head.pt", medusa_num_heads=5)  # published files say 5 and hold 3
    made = adopted("medusa", folder, target)
    assert (made.heads, made.layers, made.head_per_level) == (3, 2, own_heads)
    states = batch_of(target).states[0]
    for k in range(3):
        x = states
        for i in range(2):
            x = x + F.silu(x @ t[f"{prefix}{k}.{i}.linear.weight"].T + t[f"{prefix}{k}.{i}.linear.bias"])
        head = t[f"{prefix}{k}.2.weight"] if own_heads else target.head.weight
        output = made.outputs[k] if own_heads else target.head
        torch.testing.assert_close(output(made.network(states, k)), x @ head.T, atol=1e-5, rtol=1e-4)


STACKED = 2 * KV * HEAD_DIM
MOA_PARTS = {  # a configuration with a part for each attention, as the authors' `MOASpecConfig` saves it
    "num_attention_heads": 1,  # there these are key/value heads
    "layer_self_attention": {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_theta": 10000.0},
    "self_attention": {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_theta": 10000.0},
    "cross_attention": {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 500.0},
}


def moa_tensors(cross_heads=(2, 1, 16)):
    torch.manual_seed(6)
    t = layer_tensors("layer_self_attention", STACKED, 4, 1, 8, 20)
    t |= {"Ekv2E.weight": random(D, STACKED), "Ekv2E.bias": random(D)}
    return t | layer_tensors("self_attention", D, 4, 1, 8, 28) | layer_tensors("cross_attention", D, *cross_heads, 36)


def test_moas_released_layout_gives_the_papers_states(tmp_path):
    target = tiny()
    t, stacked = moa_tensors(), STACKED
    folder = write(tmp_path / "c", t, kv_hidden_size=stacked, disable_LSA=False, **MOA_PARTS)
    made = adopted("moa", folder, target, "+drafter.window=1")
    batch = batch_of(target, taps=made.taps)
    n = batch.tokens.shape[1]
    kv = torch.stack([torch.cat([batch.kv[i][0][0], batch.kv[i][1][0]], -1) for i in range(LAYERS)])  # [L, H, T, 2 Dh]
    everything = torch.ones(LAYERS, LAYERS, dtype=torch.bool)
    g = []
    for token in range(n):
        x = kv[:, :, token].reshape(LAYERS, stacked)
        g.append(layer(x, t, "layer_self_attention", torch.arange(LAYERS).float(), everything, 8).mean(0))
    g = torch.stack(g) @ t["Ekv2E.weight"].T + t["Ekv2E.bias"]
    positions = torch.arange(n).float()
    s = layer(target.embedding.weight[batch.tokens[0]], t, "self_attention", positions, causal(n), 8)
    norm = t["cross_attention.input_layernorm.weight"]
    q = heads_of(rms(s, norm) @ t["cross_attention.self_attn.q_proj.weight"].T, 16)
    k, v = (heads_of(rms(g, norm) @ t[f"cross_attention.self_attn.{x}_proj.weight"].T, 16) for x in "kv")
    seen = attention(rope(q, positions, 500.0), rope(k, positions, 500.0), v, strict(n))
    y = s + seen @ t["cross_attention.self_attn.o_proj.weight"].T
    theirs = y + mlp(rms(y, t["cross_attention.post_attention_layernorm.weight"]), t, "cross_attention")
    torch.testing.assert_close(next(made.predict(batch, [made._windows(batch)]))[1][0], theirs, atol=1e-5, rtol=1e-4)


def test_moas_self_attention_alone_has_the_targets_rope_scaling(tmp_path):
    """In the authors' training the cross-attention, built second, switches scaling off in the configuration all share."""
    config = {"num_attention_heads": 4, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    made = adopted("moa", write(tmp_path / "c", moa_tensors((4, 1, 8)), **config), tiny())
    torch.testing.assert_close(made.rotary.inv_freq * 4, made.cross_rotary.inv_freq)
    assert torch.equal(made.lsa.rotary.inv_freq, made.cross_rotary.inv_freq)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "does not say the num_attention_heads and rope_theta of layer_self_attention"),
        ({"num_attention_heads": 4}, "does not say the rope_theta of layer_self_attention"),
        ({"rope_theta": 10000.0}, "does not say the num_attention_heads of layer_self_attention"),
        ({"rope_theta": 10000.0, "num_attention_heads": 5}, "5 heads of 6 and 1 for keys and values.* 32 and 8 rows"),
        ({"rope_theta": 10000.0, "num_attention_heads": 64}, "64 heads of 0"),
        (MOA_PARTS | {"cross_attention": {"rope_theta": 500.0}}, "num_attention_heads of cross_attention"),
        (MOA_PARTS | {"cross_attention": {"num_attention_heads": 2}}, "rope_theta of cross_attention"),
        (
            {"rope_theta": 10000.0, "num_attention_heads": 4, "cross_attention_num_key_value_heads": 4},
            "gives cross_attention 4 heads of 8 and 4 .* 32 and 16 rows",
        ),
        ({"rope_theta": 10000.0, "num_attention_heads": 4, "head_dim": 16}, "self_attention 4 heads of 16"),
    ],
)
def test_heads_and_rope_bases_that_a_moa_configuration_leaves_open_are_refused(config, words, tmp_path):
    with pytest.raises(SpecBenchError, match=words) as error:
        adopted("moa", write(tmp_path / "c", moa_tensors(), **config), tiny())
    assert "\n" not in str(error.value)


def test_a_bias_that_moas_layers_have_not_is_refused(tmp_path):
    t = moa_tensors() | {"layer_self_attention.self_attn.q_proj.bias": random(STACKED)}
    with pytest.raises(SpecBenchError, match=r"also holds layer_self_attention\.self_attn\.q_proj\.bias"):
        adopted("moa", write(tmp_path / "c", t, **MOA_PARTS), tiny())


def test_a_draft_model_is_a_checkpoint_too(tmp_path, home):
    target = tiny()
    made = adopted("vanilla", home / "model", target)
    batch = batch_of(target)
    positions = torch.arange(12)[None]
    torch.testing.assert_close(made.lm.run(batch.tokens, positions, None, None), batch.states)  # the target itself


# Wrong files ---------------------------------------------------------------------------------------------------------


def spoiled(kind: str, t: dict, folder: Path) -> Path:
    if kind == "input norm":
        t["layers.0.input_layernorm.weight"] = torch.ones(D)
    if kind == "missing":
        del t["layers.0.self_attn.k_proj.weight"]
    if kind == "left over":
        t["layers.1.mlp.up_proj.weight"] = random(MLP, D)
    if kind == "vocabulary":
        t["embed_tokens.weight"] = random(V + 3, D)
    if kind == "another target":
        t["embed_tokens.weight"] = random(V, D)
    if kind == "width":
        t["fc.weight"] = random(D, D)
    path = write(folder, t)
    if kind == "cut off":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    if kind == "code":
        (path / "model.safetensors").unlink()
        with (path / "pytorch_model.bin").open("wb") as file:
            pickle.dump({"fc.weight": Path("/etc/passwd")}, file)
    if kind == "empty":
        (path / "model.safetensors").unlink()
    if kind == "damaged configuration":
        (path / "config.json").write_text('{"a": ')
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("input norm", "input norm"),
        ("missing", r"lacks layer\.self_attn\.k_proj\.weight"),
        ("left over", r"also holds layers\.1\.mlp\.up_proj\.weight"),
        ("vocabulary", "another target"),
        ("another target", "another target"),
        ("width", r"fc\.weight is \[32, 32\], not \[32, 64\]"),
        ("cut off", "damaged or cut off"),
        ("code", "holds code"),
        ("empty", "holds no weights"),
        ("damaged configuration", "damaged"),
    ],
)
def test_a_wrong_file_is_refused_by_name(kind, words, tmp_path):
    target = tiny()
    folder = spoiled(kind, eagle_tensors(target, True), tmp_path / "c")
    with pytest.raises(SpecBenchError, match=words) as error:
        adopted("eagle2", folder, target)
    assert "\n" not in str(error.value)


def test_a_drafter_that_asks_a_trained_one_hands_the_checkpoint_to_it(tmp_path):
    target, folder = tiny(), tmp_path / "c"
    write(folder, eagle_tensors(target, True))
    asked = settled("hybrid", f"checkpoint={folder}", "drafter.trained=hass")
    made, _ = arms.make(asked)
    made.bind(target)
    assert made.provenance["base"] == adopted("hass", folder, target).provenance
    assert any(name.startswith("base/") for name in made.contents)
    with pytest.raises(SpecBenchError, match="drafter=suffix takes no checkpoint"):
        arms.make(settled("suffix", f"checkpoint={folder}"))
    with pytest.raises(SpecBenchError, match="no published layout is known for Routed"):  # it has weights of its own
        arms.make(settled("coral_router", f"checkpoint={folder}", "drafter.base.weights=null"))[0].bind(target)


def test_where_none_were_trained_a_trained_part_takes_what_its_target_publishes():
    asked, alone = settled("hybrid", "model=llama2-7b"), settled("eagle2", "model=llama2-7b")
    assert asked.checkpoint == alone.checkpoint is not None


@pytest.mark.parametrize("named", [["vanilla", "drafter.path=DIR"], ["eagle2", "drafter.weights=DIR"]])
def test_what_the_user_names_is_not_replaced_by_what_is_published(named):
    assert settled(named[0], "model=llama2-7b").checkpoint is not None
    assert settled(*named, "model=llama2-7b").checkpoint is None


def test_a_draft_model_inside_another_drafter_takes_a_checkpoint():
    made = instantiate(configuration("ouroboros").drafter)
    assert made.weights_owner is made.base and made.weights_owner.takes_checkpoint


@pytest.mark.parametrize("drafter", ["eagle2", "hass"])
def test_a_head_has_its_own_heads_and_rope(drafter, tmp_path):
    target = tiny()
    t = eagle_tensors(target, True) | layer_tensors("layers.0", D, HEADS, HEADS, HEAD_DIM, MLP, input_norm=False)
    config = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": 0.5}  # the tensors say HEADS
    for theta, expected in (({}, 10000.0), ({"rope_theta": 777.0}, 777.0)):
        made = adopted(drafter, write(tmp_path / str(expected), t, **config, **theta), target)
        assert len(made.layer.self_attn.k_proj.weight) == HEADS * HEAD_DIM
        assert made.layer.post_attention_layernorm.variance_epsilon == 0.5
        assert made.rotary.config.rope_parameters["rope_theta"] == expected


def test_a_head_for_a_target_with_biases_has_none_behind_its_attention(tmp_path):
    """Qwen2's layers, and published heads for it: q, k and v have biases, o has none."""
    target = tiny("qwen2")
    t = eagle_tensors(target, True)
    t |= {f"layers.0.self_attn.{x}_proj.bias": random(len(t[f"layers.0.self_attn.{x}_proj.weight"])) for x in "qkv"}
    made = adopted("eagle2", write(tmp_path / "c", t), target)
    assert not made.layer.self_attn.o_proj.bias.any()
    assert torch.equal(made.layer.self_attn.q_proj.bias, t["layers.0.self_attn.q_proj.bias"])


def test_a_head_exported_for_scaled_embeddings_reads_unscaled_ones(monkeypatch):
    target = tiny()
    made = make("eagle2", target, "+drafter.bias=false")
    before, _ = made.export_tensors("vllm", target)
    monkeypatch.setattr(target.embedding, "embed_scale", torch.tensor(4.0), raising=False)
    scaled, _ = made.export_tensors("vllm", target)
    halves = [tensors["fc.weight"].chunk(2, 1) for tensors in (before, scaled)]
    assert torch.equal(4 * halves[0][0], halves[1][0]) and torch.equal(halves[0][1], halves[1][1])


def test_a_place_that_is_nowhere():
    with pytest.raises(SpecBenchError, match="is no folder here and cannot be fetched"):
        checkpoints.read("nobody/has-this-drafter")


def test_a_drafter_without_a_published_layout(tmp_path):
    target = tiny()
    with pytest.raises(SpecBenchError, match="no published layout is known for Beagle"):
        adopted("beagle", write(tmp_path / "c", eagle_tensors(target, True)), target)


def trained_eagle(target: Any, *overrides: str) -> Any:
    """A head that has learnt what the target says after nothing at all."""
    made = make("eagle2", target, "+drafter.noise=0", *overrides)
    tokens = target.greedy(target.stop_ids, 24)
    states, _, _ = target.tapped(tokens, Taps())
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(150):
        made.loss(Batch(tokens, states, everywhere, everywhere, None, 1.0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return made


def test_swapped_halves_of_fc_are_seen(tmp_path):
    target = tiny()
    tensors, _ = trained_eagle(target).export_tensors("sglang", target)
    adopted("eagle2", write(tmp_path / "right", tensors), target)
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], 1)
    with pytest.raises(SpecBenchError, match="swap the halves"):
        adopted("eagle2", write(tmp_path / "swapped", tensors), target)


# Out -----------------------------------------------------------------------------------------------------------------

# What each server's loader asks for, restated: the parameters its model has for these, by name, and what it ignores.
VLLM_EAGLE = {"fc.weight"}  # no bias; `model.` is put before every name; embedding and head come from the target
SGLANG_EAGLE = {"fc.weight", "fc.bias"}
LAYER = {
    f"layers.0.{n}.weight"
    for n in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        "post_attention_layernorm",
    )
}


def served(drafter: Any, server: str, target: Any, folder: Path) -> tuple[dict, dict]:
    tensors, config = drafter.export_tensors(server, target)
    write(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return load_file(folder / "model.safetensors"), config


def ids(target: Any, drafter: Any) -> list[list[int]]:
    """The drafts of every cycle: a drafter that came back whole proposes the same."""
    found, propose = [], drafter.propose

    def recording(*arguments: Any) -> Any:
        tree = propose(*arguments)
        found.append(tree.tokens.tolist())
        return tree

    drafter.propose = recording
    for _ in decode(target, drafter, [3, 4, 5], Limits(24), Lossless(), Sampler()):
        pass
    return found


@pytest.mark.parametrize("drafter", ["eagle2", "hass", "coral"])
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_an_exported_head_is_what_the_server_loads_and_comes_back_the_same(drafter, server, tmp_path):
    target = tiny()
    made = make(drafter, target, "+drafter.bias=false")
    tensors, config = served(made, server, target, tmp_path / "out")
    assert set(tensors) == LAYER | (VLLM_EAGLE if server == "vllm" else SGLANG_EAGLE)
    if server == "sglang":
        assert not tensors["fc.bias"].any()
    assert config["architectures"] == [{"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[server]]
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert config["max_position_embeddings"] == target.config.max_position_embeddings
    assert config["rope_theta"] == 10000.0
    again = adopted(drafter, tmp_path / "out", target)
    assert ids(target, again) == ids(target, made)


def test_vllm_would_drop_a_bias_so_it_is_refused():
    target = tiny()
    with pytest.raises(SpecBenchError, match=r"drafter\.bias=false.*format=sglang"):
        make("eagle2", target).export_tensors("vllm", target)


@pytest.mark.parametrize("own_heads", [True, False])
def test_an_exported_medusa_has_vllms_names_and_comes_back_the_same(own_heads, tmp_path):
    target = tiny()
    made = make("medusa", target, f"+drafter.head_per_level={own_heads}", "+drafter.heads=3")
    with torch.no_grad():
        for p in made.blocks.parameters():
            p.normal_(0, 0.2)
    tensors, config = served(made, "vllm", target, tmp_path / "out")
    blocks = {f"blocks.{k}.layers.0.{x}" for k in range(3) for x in ("weight", "bias")}
    assert set(tensors) == blocks | {f"lm_heads.{k}.weight" for k in range(3 if own_heads else 1)}
    assert config["medusa_fc_bias"] is True and config["original_lm_head"] is not own_heads
    assert (config["num_heads"], config["num_hidden_layers"], config["model_type"]) == (3, 1, "medusa")
    again = adopted("medusa", tmp_path / "out", target)
    assert again.head_per_level is own_heads
    states = batch_of(target).states[0]
    for k in range(3):
        torch.testing.assert_close(again.network(states, k), made.network(states, k))
    assert ids(target, again) == ids(target, made)


@pytest.mark.parametrize(
    ("drafter", "server"), [("beagle", "vllm"), ("moa", "sglang"), ("medusa", "sglang"), ("vanilla", "vllm")]
)
def test_what_a_server_cannot_hold_is_refused_with_the_reason(drafter, server):
    target = tiny()
    with pytest.raises(SpecBenchError, match=f"{server} has no model"):
        make(drafter, target).export_tensors(server, target)


def test_a_format_says_which_drafters_it_takes_as_they_are_configured():
    assert exportable("vllm") == ["eagle3", "medusa"], "EAGLE's heads have a bias here, which vLLM would drop"
    assert exportable("sglang") == ["coral", "eagle1", "eagle2", "eagle2-chain", "eagle2_small", "eagle3", "hass"]
    for drafter in exportable("sglang"):
        assert make(drafter, target := tiny()).export_tensors("sglang", target)


def test_a_served_head_is_asked_for_the_tree_that_it_had_here(tmp_path):
    command = shlex.split(serve_command("sglang", "a b", tmp_path, make("eagle2", tiny(), "tree=chain", "tree.gamma=3")))
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "a b"]
    assert command[5:9] == ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(tmp_path)]
    assert command[9:] == [
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    ]
    command = shlex.split(serve_command("vllm", "m", tmp_path, make("medusa", tiny())))
    assert command[:4] == ["vllm", "serve", "m", "--speculative-config"]
    assert json.loads(command[4]) == {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 5}
    command = shlex.split(serve_command("vllm", "m", tmp_path, make("eagle2", tiny())))
    assert json.loads(command[4]) == {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 6}
