"""`qerl doctor`: what it says of broken machines, that a wrong kernel is caught, and that it survives what it finds."""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import time
from functools import partial

import doctor_children
import pytest
import torch
from test_varlen import one_by_one

from qerl import doctor, kernels
from qerl.checkup import child, device, gpu_kernels, machine, packages, reference
from qerl.checkup import kernels as checkup_kernels
from qerl.checkup.finding import Check, guarded
from qerl.checkup.kernels import kernel_checks
from qerl.checkup.machine import Driver, Gpu
from qerl.checkup.place import Place, judged
from qerl.errors import UserError
from qerl.model import hub, varlen

CPU = torch.device("cpu")
PLACE = Place.of(CPU)
H200 = Gpu(0, "NVIDIA H200", "580.1", 143771, 143000, "9.0")
WITH_H200 = Driver((H200,), cuda=(13, 0))


def kernel_names():
    return [name for name, _ in kernel_checks(CPU, humming=False)]


# ---- kernels ----


@pytest.mark.parametrize("index", range(len(kernel_names())), ids=kernel_names())
def test_what_runs_on_a_cpu_is_right(index):
    name, look = kernel_checks(CPU, humming=False)[index]
    found = look()
    assert (found.name, found.status) == (name, "ok"), found


def test_a_gpus_checks_are_all_there():
    with_humming, without = (
        {name for name, _ in kernel_checks(torch.device("cuda", 0), humming=humming)}
        for humming in (True, False)
    )
    assert with_humming - without == {
        "Humming layout",
        "packed GEMM",
        "packed GEMM repeats",
        "packed GEMM + adapter",
    }
    assert without - set(kernel_names()) == {
        "adapter shrink, grow",
        "adapter grow_gated",
        "flash attention",
        "torch.compile",
    }


@pytest.mark.parametrize("check", ["check_grow", "check_grow_gated"])
def test_triton_adapters_pass_and_a_wrong_one_is_caught(monkeypatch, check):
    triton_adapter = pytest.importorskip("qerl.kernels.triton_adapter")
    look = getattr(gpu_kernels, check)
    monkeypatch.setattr(gpu_kernels, "_TOKENS", (1, 20))
    assert look(PLACE).status == "ok"
    shrink = triton_adapter.shrink

    def forgets_a_part(x, a, launch):
        parts = shrink(x, a, launch)
        parts[-1, -1] = 0
        return parts

    monkeypatch.setattr(triton_adapter, "shrink", forgets_a_part)
    found = look(PLACE)
    assert found.status == "FAILED" and "20 tokens: error" in found.found
    assert "issue" in found.advice


def test_attention_and_compiled_kernels_pass(monkeypatch):
    monkeypatch.setattr(varlen, "flash_attention", one_by_one)
    assert gpu_kernels.check_attention(PLACE).status == "ok"
    assert gpu_kernels.check_compiled(PLACE).status == "ok"


class FakeHumming:
    """Humming where there is none: the reference's product, prepared for nothing."""

    def __init__(self, device, *, batch_invariant=False):
        self.prepared = []

    def prepare(self, weights, token_counts):
        assert max(token_counts) <= kernels.MAX_PACKED_TOKENS


@pytest.fixture
def humming_on_a_cpu(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "HummingGemm", FakeHumming)
    monkeypatch.setattr(gpu_kernels.humming_layout, "mma_of", lambda device: "wgmma")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(gpu_kernels, "_GEMM_TOKENS", (1, 65))


@pytest.mark.parametrize("check", ["check_gemm", "check_repeats", "check_adapted"])
def test_the_packed_gemms_checks_pass_and_catch_one_wrong_tile(
    monkeypatch, humming_on_a_cpu, check
):
    look = getattr(gpu_kernels, check)
    assert look(PLACE).status == "ok"
    make = kernels.gemm_for

    def wrong(weight, dtype, *, batch_invariant=False):
        multiply = make(weight, dtype, batch_invariant=batch_invariant)

        def product(x, weight, scale):
            y = multiply(x, weight, scale)
            y[-1, :64] = 0
            return y

        return product

    monkeypatch.setattr(kernels, "gemm_for", wrong)
    assert look(PLACE).status == "FAILED"


def test_a_gemm_that_differs_from_call_to_call_is_caught(monkeypatch, humming_on_a_cpu):
    make, calls = kernels.gemm_for, []

    def unsteady(weight, dtype, *, batch_invariant=False):
        multiply = make(weight, dtype, batch_invariant=batch_invariant)

        def product(x, weight, scale):
            calls.append(None)
            return multiply(x, weight, scale) * (1 + 1e-6 * len(calls))

        return product

    monkeypatch.setattr(kernels, "gemm_for", unsteady)
    found = gpu_kernels.check_repeats(PLACE)
    assert found.status == "FAILED" and "differ" in found.found


@pytest.mark.parametrize("error", ["bit", "sign of zero", "beside"])
def test_an_expansion_that_is_wrong_in_one_place_is_caught(monkeypatch, error):
    expand = kernels.expand

    def wrong(weight, dtype, out=None):
        dense = expand(weight, dtype, out)
        if error == "bit":
            dense[-1, -1] = torch.nextafter(dense[-1, -1], torch.tensor(torch.inf).to(dtype))
        elif error == "sign of zero":
            dense[dense == 0] = 0.0
        else:
            whole = dense.as_strided((1, dense.shape[1] + 1), dense.stride())
            whole[:, -1] = 0
        return dense

    monkeypatch.setattr(kernels, "expand", wrong)
    found = checkup_kernels.check_expansion(PLACE)
    assert found.status == "FAILED" and "rows 77..108 of 576x576" in found.found


def test_wrong_nf4_numbers_are_caught(monkeypatch):
    weight_type = type(checkup_kernels._nf4(PLACE))
    expand = weight_type.expand
    monkeypatch.setattr(weight_type, "expand", lambda self, dtype: expand(self, dtype) * 1.01)
    assert checkup_kernels.check_nf4_values(PLACE).status == "FAILED"
    assert checkup_kernels.check_nf4_product(PLACE).status == "FAILED"


def test_nan_is_no_small_error():
    exact = torch.ones(4)
    error = reference.relative_error(torch.tensor([1.0, torch.nan, 1, 1]), exact)
    assert judged("x", {"case": error}, 1.0).status == "FAILED"


# ---- packages ----


def pretend_versions(monkeypatch, versions):
    monkeypatch.setattr(packages, "version_of", versions.get)


@pytest.mark.parametrize(
    ("name", "version", "status", "said"),
    [
        ("transformers", "5.19.0", "ok", "5.19.0"),
        ("transformers", "4.56.0", "FAILED", "qerl is for transformers"),
        ("peft", None, "FAILED", "not installed"),
    ],
)
def test_a_package_out_of_range_is_said(monkeypatch, name, version, status, said):
    pretend_versions(monkeypatch, {name: version})
    found = packages.check_package(name)
    assert found.status == status and said in found.found
    assert bool(found.advice) == (status != "ok")


def test_this_environment_is_as_needed():
    assert packages.check_python().status == "ok"
    assert packages.check_other_packages().status == "ok"
    assert len(packages.requirements()[1]) > 15


def test_ranges_come_from_pyproject_where_qerl_is_not_installed(monkeypatch):
    installed = packages.requirements()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    packages.requirements.cache_clear()
    monkeypatch.setattr(importlib.metadata, "metadata", missing)
    try:
        assert packages.requirements() == installed
    finally:
        packages.requirements.cache_clear()


def test_an_unsupported_python_is_said(monkeypatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.14.0")
    found = packages.check_python()
    assert found.status == "FAILED" and "3.11" in found.advice


@pytest.mark.parametrize(
    ("version", "has_gpu", "status", "said"),
    [
        (None, True, "warning", "transformers engine, which is slower"),
        (None, False, "ok", "not installed"),
        ("0.25.1", True, "warning", "qerl knows 0.26 to"),
        ("0.99.0", True, "warning", "qerl knows 0.26 to"),
        ("main", True, "warning", "no version of vLLM"),
        ("0.26.0", True, "ok", "0.26.0"),
    ],
)
def test_vllm(monkeypatch, version, has_gpu, status, said):
    monkeypatch.setattr(device, "installed_version", lambda: version)
    found = device.check_vllm(has_gpu)
    assert found.status == status and said in found.found


def test_humming_and_triton(monkeypatch):
    for version, status in ((None, "warning"), ("0.2.0", "warning"), ("0.1.10", "ok")):
        monkeypatch.setattr(device, "version_of", lambda name, version=version: version)
        assert device.check_humming(True).status == status
    pretend_versions(monkeypatch, {})
    assert packages.check_triton(True).status == "FAILED"
    assert packages.check_triton(False).status == "ok"
    pretend_versions(monkeypatch, {"triton": "3.6.0", "torch": "2.13.0"})
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["triton==3.7.1; python_version > '3'"]
    )
    found = packages.check_triton(True)
    assert found.status == "warning" and "==3.7.1" in found.advice


# ---- machine ----


@pytest.mark.parametrize(
    ("driver", "status", "said"),
    [
        (Driver(), "skipped", "none"),
        (Driver(error="Driver/library version mismatch"), "FAILED", "mismatch"),
        (WITH_H200, "ok", "580.1, runs CUDA up to 13.0: NVIDIA H200 (compute 9.0)"),
        (Driver(cuda=(12, 8)), "ok", "no nvidia-smi"),
    ],
)
def test_drivers(driver, status, said):
    found = machine.check_driver(driver)
    assert found.status == status and said in found.found


@pytest.mark.parametrize(
    ("driver", "built_for", "status"),
    [
        (Driver(), None, "ok"),
        (WITH_H200, None, "FAILED"),
        (WITH_H200, "13.0", "ok"),
        (WITH_H200, "12.8", "ok"),
        (Driver((H200,), cuda=(12, 8)), "13.0", "FAILED"),
        (Driver((H200,)), "13.0", "warning"),
    ],
)
def test_torch_has_to_fit_the_driver(driver, built_for, status):
    assert machine.check_torch_build(driver, built_for).status == status


def test_who_holds_the_gpu_is_said():
    assert machine.check_gpu_memory(WITH_H200).status == "ok"
    busy = dataclasses.replace(H200, index=1, free_mib=2048)
    found = machine.check_gpu_memory(Driver((H200, busy), ("4711 python 141000 MiB",)))
    assert found.status == "warning"
    assert "1: 2.0 of 140.4 GiB free; held by 4711 python 141000 MiB" in found.found


def put_command(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nvidia_smi_is_read_and_its_failure_survived(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_driver_cuda", lambda: (13, 0))
    row = "0, NVIDIA H200, 580.1, 143771, [N/A], 9.0"
    script = f'case $1 in --query-gpu*) echo "{row}";; *) echo "77, python, 512";; esac'
    put_command(tmp_path, "nvidia-smi", script)
    driver = machine.read_driver()
    assert driver.gpus == (dataclasses.replace(H200, free_mib=0),)
    assert driver.holders == ("77 python 512 MiB",) and driver.has_gpu
    put_command(
        tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: version mismatch'; exit 18"
    )
    assert "version mismatch" in machine.read_driver().error


def test_a_missing_compiler_and_missing_headers_are_said(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    assert machine.check_compiler(False).status == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
        found = machine.check_compiler(True)
        assert found.status == "FAILED" and "Python.h" in found.found and "-dev" in found.advice
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.check_compiler(False).status == "warning"
    found = machine.check_compiler(True)
    assert found.status == "FAILED" and "apt-get install gcc" in found.advice


def test_nvrtc_is_found_beside_its_header(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_cuda_folders", lambda major: [str(tmp_path)])
    found = machine.check_nvrtc("13.0")
    assert found.status == "warning" and "humming-kernels[cu13]" in found.advice
    for path in (tmp_path / "include" / "nvrtc.h", tmp_path / "lib" / "libnvrtc.so.13"):
        path.parent.mkdir()
        path.touch()
    assert machine.check_nvrtc("13.0").status == "ok"


def test_a_full_disk_is_said(monkeypatch, tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    usage = machine.shutil.disk_usage(tmp_path)
    for gib, status in ((0.5, "FAILED"), (5, "warning"), (100, "ok")):
        free = usage._replace(free=int(gib * 2**30))
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path, free=free: free)
        assert machine.check_disk("runs", folder).status == status
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert "cannot be written" in machine.check_disk("runs", folder).found


def test_the_hub_is_asked_shortly_or_not_at_all(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = machine.check_hub()
    assert found.status == "skipped" and "HF_HUB_OFFLINE" in found.found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for outcome, status in ((OSError("no route"), "warning"), (None, "ok")):

        class Session:
            def get(self, url, timeout, outcome=outcome):
                assert timeout == hub.HUB_TIMEOUT_S
                if outcome:
                    raise outcome
                return self

            def raise_for_status(self):
                pass

        monkeypatch.setattr(hub, "get_session", Session)
        assert machine.check_hub().status == status


# ---- the GPU, as torch sees it ----


@pytest.mark.parametrize(
    ("capability", "built", "count", "status", "said"),
    [
        ((9, 0), ["sm_80", "sm_90"], 1, "ok", "cuda:0, NVIDIA H200, compute 9.0"),
        ((9, 0), ["sm_90a"], 4, "ok", "the first of 4 visible"),
        ((8, 9), ["sm_80"], 1, "ok", "compute 8.9"),
        ((12, 0), ["sm_90", "compute_90"], 1, "ok", "compute 12.0"),
        ((12, 0), ["sm_90", "sm_100"], 1, "FAILED", "compute 12.0"),
        ((7, 5), ["sm_75"], 1, "FAILED", "compute 7.5"),
    ],
)
def test_the_card_that_is_taken_is_said(monkeypatch, capability, built, count, status, said):
    for name, value in (
        ("is_available", True),
        ("device_count", count),
        ("get_device_capability", capability),
        ("get_device_name", "NVIDIA H200"),
        ("get_arch_list", built),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    found = device.check_gpu(True)
    assert found.status == status and said in found.found


def test_a_gpu_that_torch_does_not_see_is_a_failure():
    if torch.cuda.is_available():
        pytest.skip("torch sees one here")
    assert device.check_gpu(False).status == "skipped"
    assert guarded("GPU in torch", lambda: device.check_gpu(True)).status == "FAILED"


def test_too_little_memory_is_no_wrong_kernel():
    def look():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    found = device.finished(CPU, look)
    assert found.status == "warning" and "free GPU memory" in found.advice


# ---- the child ----


def test_a_child_that_dies_or_hangs_is_a_finding():
    found = []
    child.run_in_child(doctor_children.die, 30, found.append)
    (last,) = found
    assert last.status == "FAILED" and last.name == "a kernel"
    assert "SIGSEGV" in last.found and "double free" in last.found
    found.clear()
    started = time.monotonic()
    child.run_in_child(doctor_children.hang, 5, found.append)
    assert time.monotonic() - started < 20
    assert [(check.name, check.status) for check in found] == [
        ("first", "ok"),
        ("second", "FAILED"),
    ]
    assert "--seconds" in found[1].advice


# ---- the command ----


def test_the_command(tmp_path):
    """As a user runs it; the home folder is named in no block."""
    command = [sys.executable, "-m", "qerl.doctor"]
    environment = os.environ | {"HOME": str(tmp_path / "me"), "HF_HUB_OFFLINE": "1"}
    environment.pop("QERL_CACHE", None)
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )
    shown, _, pasted = done.stdout.partition("To paste into an issue")
    assert not done.stderr
    assert done.returncode == int("FAILED" in shown)
    for name in ("Python", "torch", "disk: runs", "NVFP4 expansion", "NF4 product", "engine"):
        assert f" {name} " in shown and f" {name} " in pasted
    assert str(tmp_path / "me") in shown and str(tmp_path / "me") not in pasted
    assert pasted.count("```") == 2


def test_a_failure_is_exit_code_1_and_in_the_verdict(monkeypatch, capsys):
    def look(tell, seconds):
        tell(Check("good", "ok", "fine"))
        tell(guarded("packed GEMM", lambda: 1 / 0, "mend it"))

    monkeypatch.setattr(doctor, "_look", look)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "NOT fit: 1 of 2 failed (packed GEMM)." in out
    assert "ZeroDivisionError: division by zero" in out and "-> mend it" in out


@pytest.mark.parametrize(
    "words", [["now"], ["--seconds"], ["--seconds", "x"], ["--seconds=0"], ["--seconds", "5", "6"]]
)
def test_bad_words_are_refused(words):
    with pytest.raises(UserError, match="seconds"):
        doctor.main(words)


def test_help_answers_without_torch():
    code = (
        "import sys\nfrom qerl import doctor\ntry: doctor.main(['--help'])\nexcept SystemExit as e:\n"
        " assert not e.code\nassert 'torch' not in sys.modules"
    )
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    assert "usage: python -m qerl.doctor" in run([sys.executable, "-c", code]).stdout
