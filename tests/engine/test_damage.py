"""Files of a model's folder, damaged at random places: each ends in a model that decodes, or in one line."""

import json
import random
import shutil

import pytest
from battery import counting
from conftest import make
from decoding import generate

from specbench.common.errors import format_exception
from specbench.engine.loading import ModelSpec

TEMPLATE = """{%- for m in messages %}{% if loop.first and m['role'] != 'system' %}w1 {{ strftime_now('%Y') }}
{% endif %}{{ 'w2 ' + m['role'] + ' ' + m.content | trim + ' w3' }}{% endfor %}
{%- if add_generation_prompt %} w4{% endif %}"""
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
ODD = [None, 0, -1, 1, 3, 10**7, 2**31, 2**63, 10**30, 0.5, -1e308, 1e-300, float("nan"), True, "", "x", "w1", [], [0], {}]
CASES = 30  # of each file


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """A folder with every kind of file that may be damaged."""
    folder = shutil.copytree(home / "model", tmp_path_factory.mktemp("damage") / "whole")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def nodes(value, path=()):
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from nodes(inner, (*path, key))


def damage_value(rng, text):
    """Put an odd value somewhere, or take one away; sometimes twice."""
    value = json.loads(text)
    for _ in range(rng.choice([1, 1, 2])):
        *above, key = rng.choice(list(nodes(value)))
        inner = value
        for step in above:
            inner = inner[step]
        if rng.random() < 0.15:
            del inner[key]
        else:
            inner[key] = rng.choice(ODD)
    return json.dumps(value).encode()


def damage_bytes(rng, text):
    """Cut some out, put others in, or repeat a part."""
    begin = rng.randrange(len(text))
    end = min(len(text), begin + rng.choice([0, 1, 1, 5, 60]))
    return text[:begin] + rng.choice([b"", rng.randbytes(3), b"0", b"9", b"}", b'"', text[begin:end] * 2]) + text[end:]


@pytest.mark.parametrize("name", FILES)
def test_a_folder_damaged_anywhere_decodes_or_is_refused(name, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(whole, tmp_path / "model")
    assert reason(folder) is None
    text, rng = (whole / name).read_bytes(), random.Random(name)
    for case in range(CASES):
        damage = damage_value if name.endswith(".json") and case % 4 else damage_bytes
        (folder / name).write_bytes(damage(rng, text))
        with counting(f"{name} {case}"):
            message = reason(folder)
            known = message is None or ("\n" not in message and len(message) < 900 and "fault of SpecBench" not in message)
            assert known, f"{message}: {(folder / name).read_bytes()!r}"


def reason(folder):
    """Why a folder's model does not decode; None if it does."""
    try:
        use(folder)
    except Exception as error:
        return format_exception(error)
    return None


def use(folder):
    target, chat = ModelSpec("tiny", path=str(folder), device="cpu", dtype="float32").load()
    assert target.fingerprint() and target.contents()
    prompt = chat.encode([{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}])
    tokens, _ = generate(target, make("none", target), prompt[-9:] or [0], 3, stop=target.stop_ids)
    chat.tokenizer.decode([t for t in tokens if t not in target.stop_ids])
