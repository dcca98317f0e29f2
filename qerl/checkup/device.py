"""What happens in the child (child.py): torch and its GPU, vLLM and the engine that a run takes, every kernel."""

from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from qerl.checkup.finding import Check, describe, guarded
from qerl.checkup.kernels import kernel_checks
from qerl.checkup.machine import Driver, check_nvrtc, check_torch_build
from qerl.checkup.packages import GPU_EXTRA, version_of
from qerl.engine.choice import choose_engine
from qerl.engine.vllm_setup import NEWEST, OLDEST, installed_version, newer_than_run, parse_version
from qerl.errors import UserError
from qerl.kernels.gemm import SUPPORTED_VERSION as HUMMING

_OLDEST_CAPABILITY = (8, 0)


def look_at_device(driver: Driver, connection: Connection) -> None:
    """Send each check's name, then its finding."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    humming = version_of("humming-kernels") is not None
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("torch's CUDA", lambda: check_torch_build(driver, torch.version.cuda)),
        ("GPU in torch", lambda: check_gpu(driver.has_gpu)),
        ("vLLM", lambda: check_vllm(driver.has_gpu)),
        ("humming-kernels", lambda: check_humming(driver.has_gpu)),
        ("engine", lambda: check_engine(device)),
    ]
    if on_gpu and humming:
        checks.append(("nvrtc", lambda: check_nvrtc(torch.version.cuda)))
    broken = ""
    for name, look in checks + kernel_checks(device, humming=humming):
        if broken:
            connection.send(Check(name, "skipped", f"nothing works on the GPU after {broken!r}"))
            continue
        connection.send(name)
        connection.send(guarded(name, lambda look=look: finished(device, look)))
        broken = "" if answers(device) else name
    if not on_gpu:
        found = "the GPU's kernels: Triton, Humming, flash attention, torch.compile"
        connection.send(Check("not looked at", "skipped", found))
    elif not humming:
        found = "the packed GEMM and its adapter, as humming-kernels is not installed"
        connection.send(Check("not looked at", "skipped", found))


def check_gpu(expected: bool) -> Check:
    """The card that a run takes, and whether torch has code for it. `expected`: whether the machine has one."""
    name = "GPU in torch"
    if not torch.cuda.is_available():
        if not expected:
            return Check(name, "skipped", "no GPU")
        if torch.version.cuda is not None:
            torch.cuda.init()  # raises what is wrong
        return Check(name, "FAILED", "torch sees none", "look at CUDA_VISIBLE_DEVICES, and above")
    device, count = torch.device("cuda", 0), torch.cuda.device_count()
    capability = torch.cuda.get_device_capability(device)
    found = f"cuda:0, {torch.cuda.get_device_name(device)}, compute {_dotted(capability)}"
    if count > 1:
        found += f", the first of {count} visible; CUDA_VISIBLE_DEVICES chooses another"
    if capability < _OLDEST_CAPABILITY:
        advice = "qerl's kernels need compute capability 8.0 (Ampere) or newer; use --device cpu"
        return Check(name, "FAILED", found, advice)
    built = torch.cuda.get_arch_list()
    if not any(_runs(architecture, capability) for architecture in built):
        advice = f"this torch is built for {', '.join(built)}: install one for this card"
        return Check(name, "FAILED", found, advice)
    return Check(name, "ok", found)


def check_engine(device: torch.device) -> Check:
    """What `engine = "auto"` takes for an NVFP4 base."""
    choice = choose_engine("auto", device, "nvfp4")
    return Check("engine", "ok", f"{choice.name} ({choice.reason})")


def check_vllm(has_gpu: bool) -> Check:
    """The engine of a GPU; a run goes without it, slower."""
    version = installed_version()
    if version is None:
        found = "not installed; rollouts take the transformers engine"
        if has_gpu:
            return Check("vLLM", "warning", f"{found}, which is slower", GPU_EXTRA)
        return Check("vLLM", "ok", found)
    range_text = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    try:
        too_old, newer = parse_version(version) < OLDEST, newer_than_run(version)
    except UserError as error:
        return Check("vLLM", "warning", str(error), GPU_EXTRA)
    if too_old or newer:
        found = f"{version}; qerl knows {range_text}"
        advice = GPU_EXTRA if too_old else "if a run fails, install one of these"
        return Check("vLLM", "warning", found, advice)
    return Check("vLLM", "ok", version)


def check_humming(has_gpu: bool) -> Check:
    """The packed GEMM of vLLM's rollouts on an NVFP4 base."""
    version = version_of("humming-kernels")
    if version is None and has_gpu:
        found = "not installed; NVFP4 cannot be sampled with vLLM"
        return Check("humming-kernels", "warning", found, f"pip install humming-kernels=={HUMMING}")
    if version is None:
        return Check("humming-kernels", "ok", "not installed; needed on a GPU only")
    if version != HUMMING:
        found = f"{version}; qerl was run with {HUMMING}"
        return Check("humming-kernels", "warning", found, "its layout is compared below")
    return Check("humming-kernels", "ok", version)


def finished(device: torch.device, look: Callable[[], Check]) -> Check:
    """`look()`, with the errors that a GPU reports later; too little memory is no fault of a kernel."""
    try:
        found = look()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        advice = "free GPU memory and run it again"
        return Check("kernels' memory", "warning", f"too little ({describe(error)})", advice)
    return found


def answers(device: torch.device) -> bool:
    """Whether the device still works: after an illegal access in a kernel a GPU does nothing for this process."""
    if device.type != "cuda":
        return True
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for `architecture`, sm_90 or compute_80 say, runs on such a card."""
    kind, _, digits = architecture.partition("_")
    digits = digits.rstrip("af")
    built = int(digits[:-1]), int(digits[-1])
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
