"""Execute the notebooks: all of them with small settings, as a test, or one with its own settings, to keep its outputs.

    python tools/notebooks.py                       every notebook, with the small settings; nothing is kept
    python tools/notebooks.py --keep 01_quickstart  with its own settings; outputs are written into the file

The small settings stand in the notebooks: the cell tagged "parameters" has them as metadata (`tiny`).
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
REWARD_FILE = f"REWARD_FILE = {str(ROOT / 'tests' / 'reward_low_tokens.py') + ':low_tokens'!r}\n"
TIMEOUT_S = 1800


def execute(path: Path, tiny: bool) -> nbformat.NotebookNode:
    """Run a notebook in an empty folder and return it with outputs. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    if tiny:
        for cell in notebook.cells:
            if "tiny" in cell.metadata:
                cell.source = REWARD_FILE + cell.metadata["tiny"]
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=TIMEOUT_S, resources=resources, kernel_name="python3"
        ).execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave out what says nothing (execution times, standard error, whose home it was); what was printed is one output."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        outputs: list[nbformat.NotebookNode] = []
        for output in cell.outputs:
            if output.get("name") == "stderr":
                continue
            if "text" in output:
                output.text = output.text.replace(str(Path.home()), "~")
            if output.get("name") == "stdout" and outputs and outputs[-1].get("name") == "stdout":
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs


def main(words: list[str]) -> int:
    """Execute; exit code 1 if a cell fails."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    keep = words[:1] == ["--keep"]
    names = words[1:] if keep else [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        start = time.monotonic()
        try:
            notebook = execute(path, tiny=not keep)
        except CellExecutionError as error:
            print(f"{name}: {error}")
            return 1
        if keep:
            tidy(notebook)
            nbformat.write(notebook, path)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
