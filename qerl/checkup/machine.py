"""The machine around Python: driver, GPU memory and who holds it, compilers, disk, hub.

Read with the tools that a machine has, without a CUDA context: what is free is what was free before qerl came.
"""

import ctypes
import glob
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from qerl.cache import cache_root
from qerl.checkup.finding import Check

_TIMEOUT_S = 20
_SHORT_GIB, _TIGHT_GIB = 1, 20
"""Free disk below which nothing can be kept, and below which a model of 7B (15 GB) does not fit."""
_BUSY = 0.1
"""Share of a card that others may hold without a word."""
_PROBE = "#include <Python.h>\nint qerl_probe(void) { return PY_MAJOR_VERSION; }\n"


@dataclass(frozen=True)
class Gpu:
    """A row of nvidia-smi."""

    index: int
    name: str
    driver: str
    total_mib: int
    free_mib: int
    capability: str


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says."""

    gpus: tuple[Gpu, ...] = ()
    holders: tuple[str, ...] = ()
    """`pid name MiB` of each process that holds memory on a GPU; none where the driver does not show them"""
    error: str = ""
    """Why there is no answer though nvidia-smi is there"""
    cuda: tuple[int, int] | None = None
    """Newest CUDA that the driver runs"""

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus) or self.cuda is not None


def read_driver() -> Driver:
    """Ask nvidia-smi and libcuda; empty without an NVIDIA driver."""
    cuda = _driver_cuda()
    if shutil.which("nvidia-smi") is None:
        return Driver(cuda=cuda)
    fields = "index,name,driver_version,memory.total,memory.free,compute_cap"
    try:
        rows = _query(f"--query-gpu={fields}")
        gpus = tuple(
            Gpu(int(index), name, driver, _mib(total), _mib(free), capability)
            for index, name, driver, total, free, capability in rows
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Driver(error=_said(error), cuda=cuda)
    try:
        holders = _query("--query-compute-apps=pid,process_name,used_memory")
    except (OSError, subprocess.SubprocessError):
        holders = []  # not every driver shows them
    return Driver(gpus, tuple(" ".join(row) + " MiB" for row in holders), cuda=cuda)


def check_driver(driver: Driver) -> Check:
    """Driver and cards."""
    if driver.error:
        advice = "see what nvidia-smi says; after an update of the driver a reboot helps"
        return Check("NVIDIA driver", "FAILED", driver.error, advice)
    if not driver.has_gpu:
        return Check("NVIDIA driver", "skipped", "none; a run takes the CPU")
    runs = f", runs CUDA up to {'.'.join(map(str, driver.cuda))}" if driver.cuda else ""
    if not driver.gpus:
        return Check("NVIDIA driver", "ok", f"libcuda{runs}; no nvidia-smi to ask")
    cards = ", ".join(f"{gpu.name} (compute {gpu.capability})" for gpu in driver.gpus)
    return Check("NVIDIA driver", "ok", f"{driver.gpus[0].driver}{runs}: {cards}")


def check_size() -> Check:
    """Cores and main memory: for whoever reads the block."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return Check("machine", "ok", f"{cores} cores, {memory:.0f} GiB, {platform.platform()}")


def check_torch_build(driver: Driver, built_for: str | None) -> Check:
    """Whether the installed torch can use this driver. `built_for`: torch.version.cuda."""
    name = "torch's CUDA"
    advice = "make setup, or pip install '.[gpu]' in qerl's folder without constraints.txt"
    if not driver.has_gpu:
        return Check(name, "ok", f"built for {built_for or 'CPUs'}")
    if built_for is None:
        return Check(name, "FAILED", "a CPU build beside a GPU", advice)
    if driver.cuda is None:
        return Check(name, "warning", f"built for {built_for}; libcuda cannot be asked", advice)
    major = int(built_for.split(".")[0])
    found = f"built for {built_for}, driver up to {driver.cuda[0]}.{driver.cuda[1]}"
    if major > driver.cuda[0]:
        return Check(name, "FAILED", found, f"a driver for CUDA {major}, or a torch for less")
    return Check(name, "ok", found)


def check_gpu_memory(driver: Driver) -> Check:
    """How much is free, and who holds the rest."""
    name = "GPU memory"
    if not driver.gpus:
        return Check(name, "skipped", "nvidia-smi shows no GPU")
    free = ", ".join(
        f"{gpu.index}: {gpu.free_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB free"
        for gpu in driver.gpus
    )
    if all(gpu.free_mib >= (1 - _BUSY) * gpu.total_mib for gpu in driver.gpus):
        return Check(name, "ok", free)
    holders = "; ".join(driver.holders) or "processes that this machine does not show"
    advice = "end what is not needed, or set memory_gib; a run plans around what others hold"
    return Check(name, "warning", f"{free}; held by {holders}", advice)


def check_compiler(needed: bool) -> Check:
    """A C compiler and Python's headers, by compiling a file that uses both: Triton and torch.compile do that."""
    name = "C compiler, headers"
    status = "FAILED" if needed else "warning"
    why = "Triton and torch.compile need it" if needed else "a GPU's kernels would need it"
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if compiler is None:
        found = f"no C compiler; {why}"
        return Check(name, status, found, "on Debian or Ubuntu: apt-get install gcc g++")
    headers = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(_PROBE)
        command = [*compiler.split(), "-shared", "-fPIC", f"-I{headers}", str(source)]
        try:
            _run([*command, "-o", str(source.with_suffix(".so"))])
        except (OSError, subprocess.SubprocessError) as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            advice = f"on Debian or Ubuntu: apt-get install gcc g++ python{version}-dev"
            return Check(name, status, f"{compiler}: {_said(error)}; {why}", advice)
    if shutil.which("g++") is None and needed:
        found = f"{compiler}, no g++; Humming builds its compiler with it"
        return Check(name, "warning", found, "on Debian or Ubuntu: apt-get install g++")
    return Check(name, "ok", f"{compiler}, {headers}")


def check_nvrtc(built_for: str | None) -> Check:
    """CUDA's run-time compiler with headers, of torch's own CUDA: Humming compiles its kernels with it."""
    name = "nvrtc"
    major = (built_for or "").split(".")[0]
    for root in _cuda_folders(major):
        headers = Path(root, "include", "nvrtc.h")
        libraries = glob.glob(f"{root}/lib*/libnvrtc.so*") + glob.glob(f"{root}/*/*/libnvrtc.so*")
        if headers.is_file() and libraries:
            return Check(name, "ok", root)
    found = f"nvrtc.h and libnvrtc of CUDA {major} are not found; Humming's GEMM may not compile"
    return Check(name, "warning", found, f"pip install 'humming-kernels[cu{major}]'")


def check_disk(what: str, folder: Path) -> Check:
    """Free space where `folder` is or will be, and whether it can be written."""
    name = f"disk: {what}"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    found = f"{free:.1f} GiB free at {folder}"
    advice = "set QERL_CACHE, HF_HOME or --run-dir to a folder with room"
    if not os.access(existing, os.W_OK):
        return Check(name, "FAILED", f"{existing} cannot be written", advice)
    if free < _SHORT_GIB:
        return Check(name, "FAILED", found, advice)
    if free < _TIGHT_GIB:
        return Check(name, "warning", f"{found}; a 7B model takes 15 GB", advice)
    return Check(name, "ok", found)


def disk_folders() -> dict[str, Path]:
    """Where qerl writes: packed models, downloads, runs started here."""
    from huggingface_hub import constants

    hub = Path(constants.HF_HUB_CACHE)
    return {"packed models": cache_root(), "downloads": hub, "runs": Path("runs").absolute()}


def check_hub() -> Check:
    """Whether models and data can be downloaded."""
    from huggingface_hub import constants

    from qerl.model.hub import HubUnreachableError, ask_hub

    name = "Hugging Face hub"
    if constants.HF_HUB_OFFLINE:
        found = "not asked, as HF_HUB_OFFLINE is set; only what is on this machine can be used"
        return Check(name, "skipped", found)
    try:
        ask_hub()
    except HubUnreachableError as error:
        advice = "use local folders or what is in the cache; --model quickstart needs no hub"
        return Check(name, "warning", f"{constants.ENDPOINT} does not answer ({error})", advice)
    return Check(name, "ok", f"{constants.ENDPOINT} answers")


def _driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA that the driver runs, from libcuda itself; None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _cuda_folders(major: str) -> list[str]:
    """Where Humming looks for a CUDA of this major version: toolkits, then the wheels that torch brings."""
    toolkits = ["/usr/local/cuda", *sorted(glob.glob(f"/usr/local/cuda-{major}*"))]
    toolkits += [os.environ["CUDA_HOME"]] if "CUDA_HOME" in os.environ else []
    wheels = [f"{entry}/nvidia/cu{major}" for entry in sys.path]
    wheels += [f"{entry}/nvidia/cuda_nvrtc" for entry in sys.path if major == "12"]
    return [folder for folder in toolkits + wheels if os.path.isdir(folder)]


def _query(what: str) -> list[list[str]]:
    text = _run(["nvidia-smi", what, "--format=csv,noheader,nounits"])
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line]


def _mib(text: str) -> int:
    """A number of MiB; 0 for `[N/A]` and the like, which nvidia-smi says of some cards."""
    return int(text) if text.isdecimal() else 0


def _run(command: list[str]) -> str:
    """Output of a command. Raises OSError or SubprocessError when it fails or hangs."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout


def _said(error: Exception) -> str:
    """The last line that a failed command printed."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = f"{error.stdout}\n{error.stderr}".split("\n")
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if "error" in line]
        return (errors or said or [f"exit code {error.returncode}"])[-1][:300]
    return str(error)
