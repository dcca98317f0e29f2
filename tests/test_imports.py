"""Who may import whom: the sentences of absence in ARCHITECTURE.md, checked on the syntax tree."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qerl"
HEAVY = ("torch", "transformers", "peft", "datasets", "bitsandbytes", "accelerate")

FORBIDDEN: dict[str, tuple[str, ...]] = {
    # Parsing the command line must not wait for torch.
    **{
        f"qerl.{name}": HEAVY
        for name in (
            "config",
            "errors",
            "families",
            "settings",
            "comparison.arms",
            "comparison.runner",
            "checkup.packages",
            "checkup.machine",
            "checkup.child",
        )
    },
    "qerl.settings.presets": HEAVY,
    "qerl.cache": HEAVY,
    "qerl.types": ("qerl.",),
    "qerl.algo": ("qerl.quant", "qerl.model", "qerl.engine", "qerl.tasks", "transformers"),
    "qerl.quant": ("qerl.kernels", "qerl.model", "qerl.engine", "qerl.tasks", "qerl.algo"),
    "qerl.kernels": ("qerl.model", "qerl.engine", "qerl.tasks", "qerl.algo"),
    "qerl.model": ("qerl.engine", "qerl.tasks"),
    "qerl.engine": ("qerl.tasks",),
    # Reward workers start often, so what they load is small.
    "qerl.tasks": ("torch", "transformers", "qerl.quant", "qerl.model", "qerl.engine", "qerl.algo"),
}
ONLY_UNDER: dict[str, str] = {
    "vllm": "qerl.engine",
    "triton": "qerl.kernels",
    "humming": "qerl.kernels",
    "wandb": "qerl.trackers",
    "tensorboard": "qerl.trackers",
    "torch.utils.tensorboard": "qerl.trackers",
}
ENTRY_POINTS = (
    "train",
    "evaluate",
    "quantize",
    "sample",
    "plan",
    "compare",
    "check",
    "diagnose",
    "doctor",
    "report",
    "api",
    "bench",
    "loop",
    "collect",
    "update",
    "run",
    "build",
)


def modules() -> list[tuple[str, Path]]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append((".".join(parts).removesuffix(".__init__"), path))
    return names


def imports(path: Path) -> Iterator[str]:
    """Names that a file imports when it runs, in functions too; not those under `if TYPE_CHECKING`."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def is_under(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent if parent.endswith(".") else f"{parent}.")


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_one_way(module, path):
    for imported in imports(path):
        for part, forbidden in FORBIDDEN.items():
            if is_under(module, part):
                assert not any(is_under(imported, name) for name in forbidden), imported
        for third_party, home in ONLY_UNDER.items():
            if is_under(imported, third_party):
                assert is_under(module, home), imported
        if is_under(imported, "vllm"):
            assert path.name.startswith("vllm_"), imported
        below = module.count(".") > 1
        assert not (
            below and imported.split(".")[:2] in [["qerl", name] for name in ENTRY_POINTS]
        ), imported


def test_the_rules_see_imports(tmp_path):
    """The checker itself: it finds imports inside functions and leaves out those for type checkers."""
    source = tmp_path / "a.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from qerl.engine import base\n"
    )
    assert set(imports(source)) == {"typing.TYPE_CHECKING", "qerl.engine.base"}
    assert is_under("torch.nn", "torch")
    assert not is_under("torchvision", "torch")


@pytest.mark.parametrize(
    "statement",
    [
        "import qerl.settings.cli, qerl.settings.cli_help, qerl.__main__",
        "import qerl.train, qerl.compare, qerl.report, qerl.doctor, qerl.bench, qerl.benchmarking.processes",
        # torch may be what is broken.
        "import qerl.checkup.packages, qerl.checkup.machine, qerl.checkup.child",
        "import qerl.tasks, pkgutil, importlib\n"
        "for module in pkgutil.iter_modules(qerl.tasks.__path__): importlib.import_module(f'qerl.tasks.{module.name}')",
    ],
)
def test_light_modules_load_no_torch(statement):
    code = f"{statement}\nimport sys\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
