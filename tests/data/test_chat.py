"""A dialogue that is written turn by turn has the ids of the whole conversation."""

import pytest
from conftest import WORDS
from drafting import save_tokenizer
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer

from specbench.common.errors import SpecBenchError
from specbench.data.chat import Chat

QUESTIONS, ANSWERS = ("w9 w8", "w3", "w5 w5"), ("w7 w2", "w4 w6 w1")
TURNS = "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
END_TO_END = TURNS + "{% if add_generation_prompt %}assistant {% endif %}"
NUMBERED = END_TO_END.replace("{{ m.role }}", "w{{ messages | length }} {{ m.role }}")
TRIMMED = "{% for m in messages[-1:] %}{{ m.content }} {% endfor %}"


@pytest.fixture
def tokenizer(tmp_path):
    save_tokenizer(tmp_path, [*WORDS, "user", "assistant", "system", "end", "x"])
    made = AutoTokenizer.from_pretrained(tmp_path)
    made.backend_tokenizer.pre_tokenizer = Whitespace()
    return made


@pytest.mark.parametrize("system", [None, "w1 w1"])
@pytest.mark.parametrize("template", [END_TO_END, None])
def test_turns_laid_end_to_end_are_the_whole_conversation(tokenizer, template, system):
    tokenizer.chat_template = template
    chat, messages, ids = Chat(tokenizer, system), [], []
    for number, question in enumerate(QUESTIONS):
        ids += chat.follow_up(question) if number else chat.opening(question)
        messages.append({"role": "user", "content": question})
        assert ids == chat.encode(messages)
        if number < len(ANSWERS):
            ids += tokenizer(ANSWERS[number])["input_ids"]
            messages.append({"role": "assistant", "content": ANSWERS[number]})


@pytest.mark.parametrize("template", [NUMBERED, TRIMMED])
def test_a_template_that_does_not_concatenate_turns_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(SpecBenchError, match=r"does not lay turns end to end; set train\.corpus\.turns=1"):
        Chat(tokenizer).follow_up("w9")
