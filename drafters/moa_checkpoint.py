"""MoA's released weights: names of tensors, and the shape of each attention from three layouts of configuration."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from drafters.layers import attention_shape
from specbench.engine.weights import Checkpoint

PARTS = {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}  # ours -> released
OFFICIAL = {  # beginnings of tensor names, released -> ours
    "layer_self_attention.": "lsa.",
    "Ekv2E.": "mix.",
    "self_attention.": "sa.",
    "cross_attention.input_layernorm.": "norm.",
    "cross_attention.self_attn.q_proj.": "q.",
    "cross_attention.self_attn.k_proj.": "k.",
    "cross_attention.self_attn.v_proj.": "v.",
    "cross_attention.self_attn.o_proj.": "o.",
    "cross_attention.post_attention_layernorm.": "mlp_norm.",
    "cross_attention.mlp.": "mlp.",
}


def _options(part: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A released configuration's options of one attention. Three layouts are known:

    Training saves the target's configuration. All attentions have its number of query heads, rope base and norm epsilon,
    not its key/value heads and widths; only `self_attention` has its rope scaling, and `layer_self_attention`, as wide as a
    layer's keys and values, a head dimension of its own.

    `convert_checkpoint.py` keeps that and adds `self_attention_num_key_value_heads` and the like.

    A configuration with a part for each attention has all options of each in it.
    """
    if any(isinstance(config.get(part), Mapping) for part in PARTS.values()):
        return dict(config.get(part) or {})
    options = {k: config[k] for k in ("num_attention_heads", "rms_norm_eps", "rope_theta") if k in config}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        options["rope_theta"] = rope["rope_theta"]
    if part == "self_attention":
        options |= {k: config[k] for k in ("rope_parameters", "rope_scaling") if k in config}
    if part != "layer_self_attention" and config.get("head_dim"):
        options["head_dim"] = config["head_dim"]
    if f"{part}_num_key_value_heads" in config:
        options["num_key_value_heads"] = config[f"{part}_num_key_value_heads"]
    return options


def shapes_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """By our names of the attentions, each one's part of a Llama configuration; empty for those without tensors."""
    return {ours: attention_shape(part, checkpoint, _options(part, checkpoint.config)) for ours, part in PARTS.items()}


def map_tensors(checkpoint: Checkpoint, own: Collection[str]) -> tuple[dict[str, Tensor], set[str]]:
    """Tensors by the drafter's `own` names, and the released names used; others, such as extra biases, are left over."""
    named: dict[str, Tensor] = {}
    used = set()
    for name, tensor in checkpoint.tensors.items():
        ours = next((name.replace(a, b, 1) for a, b in OFFICIAL.items() if name.startswith(a)), None)
        if ours is not None and ours in own:
            named[ours] = tensor
            used.add(name)
    return named, used
