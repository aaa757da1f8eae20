"""A command called in a process forked from one that has imported everything: real processes, in milliseconds.

`python -m specbench.run` spends seconds on importing torch and Transformers, the same in every call. A forkserver pays
them once. It has imported and done nothing else, so every fork begins as a new interpreter would: own output, exit code,
environment and folder, nothing left over from another call, and signals end it alone.

This module is imported by the forkserver, hence knows neither pytest nor what it tests.
"""

import os
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

COMMANDS = [
    f"specbench.{command}"
    for command in ("run", "train", "report", "study", "export", "cost", "serve", "evidence", "gpu_day.cycles")
]
LATER = [  # what the commands import only when they need it
    "drafters.beagle",
    "drafters.coral",
    "drafters.medusa",
    "drafters.moa",
    "drafters.none",
    "drafters.router",
    "drafters.vanilla",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
    "openvino.opset15",
    "torch.distributed",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama",
]
# Read by libraries when they are imported, so before the fork.
FIXED = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

_context = get_context("forkserver")
_context.set_forkserver_preload([*COMMANDS, *LATER, __name__, "preloaded"])


class ForkedCommand:
    """A running `python -m module arguments…`, as far as `subprocess.Popen` is needed here.

    Args:
        output: folder for its stdout and stderr.
    """

    def __init__(self, module: str, arguments: list[str], folder: Path, environment: dict[str, str], output: Path):
        self.files = output / "stdout", output / "stderr"
        self.process = _context.Process(target=_become, args=(module, arguments, folder, environment, self.files))
        server = {**FIXED, "PYTHONPATH": str(Path(__file__).parent)}
        before = {name: os.environ.get(name) for name in server}
        os.environ.update(server)
        try:
            self.process.start()  # the first time with the forkserver, which takes its environment from here
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = 300) -> int:
        """Its exit code; a process that takes longer is killed and named."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.send_signal(signal.SIGKILL)
            self.process.join()
            raise subprocess.TimeoutExpired(str(self.process), timeout, stderr=self.files[1].read_bytes())
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended, as with `Popen`."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def completed(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        code = self.wait(timeout)
        return subprocess.CompletedProcess(self.pid, code, *(file.read_text() for file in self.files))


def _become(module: str, arguments: list[str], folder: Path, environment: dict[str, str], files: tuple[Path, Path]) -> None:
    """In the fork: turn into `python -m module arguments…`."""
    assert "preloaded" in sys.modules, "the forkserver, which passes over modules that it does not find, imported nothing"
    sys.stdout.flush(), sys.stderr.flush()
    for descriptor, file in zip((1, 2), files, strict=True):
        own = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(own, descriptor)
        os.close(own)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [module, *arguments]
    package, _, name = module.rpartition(".")
    vars(sys.modules[package]).pop(name, None)
    sys.modules.pop(module, None)  # to be executed once more, as the main module
    runpy.run_module(module, run_name="__main__", alter_sys=True)
