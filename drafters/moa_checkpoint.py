"""MoA's released weights: names of tensors, and the shape of each attention from three layouts of configuration."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

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


def _rope(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `rope_parameters`, which older configurations spread over two entries; None without a base."""
    rope = dict(options.get("rope_scaling") or {}) | dict(options.get("rope_parameters") or {})
    rope.setdefault("rope_theta", options.get("rope_theta"))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope if rope["rope_theta"] else None


def attention_shape(part: str, checkpoint: Checkpoint, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One attention's part of a Llama configuration; empty if its tensors are not there.

    A projection's rows are those of all heads together; the number of heads and the rope base are in the configuration
    alone. Without them the file is refused, since a wrong guess that divides the rows would load and draft badly.

    options: of this attention, where they are not one of MoA's layouts.
    """
    q, k = (checkpoint.tensors.get(f"{part}.self_attn.{x}_proj.weight") for x in "qk")
    gate = checkpoint.tensors.get(f"{part}.mlp.gate_proj.weight")
    if q is None or k is None or gate is None:
        return {}
    options = _options(part, checkpoint.config) if options is None else options
    heads, head_dim, rope = options.get("num_attention_heads", 0), options.get("head_dim", 0), _rope(options)
    lacks = ["num_attention_heads"] * (not heads and not head_dim) + ["rope_theta"] * (rope is None)
    if lacks:
        raise checkpoint.refuse(
            f"its configuration does not say the {' and '.join(lacks)} of {part}, and tensors cannot tell"
        )
    heads = heads or len(q) // head_dim
    head_dim = head_dim or len(q) // heads
    kv_heads = options.get("num_key_value_heads") or len(k) // max(head_dim, 1)
    if (heads * head_dim, kv_heads * head_dim) != (len(q), len(k)) or heads % kv_heads or head_dim % 2:
        raise checkpoint.refuse(
            f"its configuration gives {part} {heads} heads of {head_dim} and {kv_heads} for keys and values, its tensors "
            f"have {len(q)} and {len(k)} rows for them"
        )
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    eps = {"rms_norm_eps": options["rms_norm_eps"]} if "rms_norm_eps" in options else {}  # else the target's
    return shape | eps | {"rope_parameters": rope, "intermediate_size": len(gate)}


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
