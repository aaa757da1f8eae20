"""From messages to token ids, by the model's chat template."""

import zlib
from collections.abc import Collection
from datetime import datetime
from typing import Any

from specbench.common.errors import SpecBenchError, refusing

MAX_CHARACTERS = 10_000_000  # of a prompt; tokenizers abort the process where memory does not suffice for more
TODAY = datetime(2024, 7, 26)  # what templates take for the current date, so that a prompt is the same on every day

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


class Chat:
    """Turns messages into token ids with the tokenizer's chat template.

    Attributes:
        system: the system prompt; None leaves it to the template (CORAL, Appendix E: a drafter trained under another
            system prompt loses acceptance, so training and benchmark must agree).
    """

    def __init__(self, tokenizer: Any, system: str | None = None):
        self.tokenizer, self.system = tokenizer, system

    def encode(self, messages: list[Message], answer_follows: bool = True) -> list[int]:
        """Token ids of a conversation. answer_follows: append the header of the next answer.

        Raises `SpecBenchError` if the template is damaged, or refuses these messages.
        """
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.tokenizer.chat_template is None:  # a base model
            text = "\n\n".join(m["content"] for m in messages) + ("\n\n" if answer_follows else "")
            return self._ids(text)
        name = getattr(self.tokenizer, "name_or_path", "this tokenizer")
        with refusing(f"the chat template of {name} does not take this conversation; correct it, or change model.system"):
            _require_constant(self.tokenizer.get_chat_template())
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=answer_follows, tokenize=False)
            return self._ids(text, add_special_tokens=False)

    def opening(self, question: str) -> list[int]:
        """Ids of a conversation that begins with this question, up to its answer."""
        return self.encode([{"role": "user", "content": question}])

    def _ids(self, text: str, **options: Any) -> list[int]:
        if len(text) > MAX_CHARACTERS:
            raise SpecBenchError(f"a prompt of {len(text):,} characters, more than {MAX_CHARACTERS:,}; shorten it")
        return self.tokenizer(text, **options)["input_ids"]

    def follow_up(self, content: str) -> list[int]:
        """Ids between the texts of two answers: the end of the first, the user's turn, the header of the next.

        Raises `SpecBenchError` if the template does not concatenate turns.
        """
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
        opening = self.opening("x")
        whole = self.encode([user, answer, {"role": "user", "content": content}])
        answered = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        if whole[: len(opening) + len(answered)] != opening + answered:
            raise SpecBenchError("this tokenizer's chat template does not lay turns end to end; set train.corpus.turns=1")
        return whole[len(opening) + len(answered) :]


def _require_constant(template: str) -> None:
    """Let a template render the same at any time: with a fixed date, and without random choices, which become errors."""
    from transformers.utils import chat_template_utils

    compiled: Any = chat_template_utils._compile_jinja_template(template)  # cached: the one that the tokenizer renders
    compiled.environment.globals["strftime_now"] = TODAY.strftime
    compiled.environment.globals.pop("lipsum", None)
    compiled.environment.filters.pop("random", None)


class Pieces:
    """A stand-in for a tokenizer, for measuring time and memory: one arbitrary id for every four characters."""

    chat_template = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, text: str) -> dict[str, list[int]]:
        pieces = (text[i : i + 4] for i in range(0, len(text), 4))
        return {"input_ids": [zlib.crc32(p.encode()) % self.vocab_size for p in pieces]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"{i:03}" for i in ids)  # encodes to as many ids


def answer_text(tokenizer: Any, stop_ids: Collection[int], tokens: list[int]) -> str:
    """The text of an answer, without stop tokens."""
    return tokenizer.decode([t for t in tokens if t not in stop_ids])
