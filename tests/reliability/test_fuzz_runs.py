"""A run folder with a damaged file: the same command goes on, to the same numbers, or says in one line why not.

Of damage that costs nothing of the run (a lost log, an adapter copy) nothing may be seen afterwards; damaged metrics
and tables are left out, which is said; everything else is refused.
"""

import shutil
from pathlib import Path

import pytest
from children import arguments, cases, run, write_data
from damage import damages, files_of, fresh_copy
from hypothesis import given
from hypothesis import strategies as st

from qerl import diagnose, report
from qerl.errors import UserError
from qerl.metrics import COMPLETIONS, METRICS

LAST = "checkpoints/8"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, list[str], Path]:
    """A whole run, the command that made it where it can be damaged, and what it leaves after its last step."""
    folder = tmp_path_factory.mktemp("fuzz")
    data = write_data(folder / "data.jsonl")
    argv = arguments(folder / "run", data)
    assert run(argv, folder / "log") == 0, (folder / "log").read_text()
    shutil.copytree(folder / "run", folder / "whole")
    # As it is when it is killed after step 8 was logged: there is something left to do, and to repeat.
    shutil.rmtree(folder / "run" / LAST)
    shutil.copytree(folder / "run", folder / "killed")
    return folder, argv, folder / "run"


@cases(0.05)
@given(index=st.integers(0, 10**6), damage=damages())
def test_the_same_command_goes_on_or_refuses(finished, index, damage):
    folder, argv, run_dir = finished
    fresh_copy(folder / "killed", run_dir)
    names = files_of(run_dir)
    name = names[index % len(names)]
    damage[1](run_dir / name)
    log = folder / "damaged.log"
    log.unlink(missing_ok=True)
    code = run(argv, log)
    said = log.read_text(errors="replace")
    assert "Traceback" not in said, said
    if code == 0:
        for file in ("adapter_model.safetensors", "optimizer.safetensors", "state.json"):
            a, b = ((f / LAST / file).read_bytes() for f in (run_dir, folder / "whole"))
            assert a == b, said
    else:
        errors = [line for line in said.splitlines() if line.startswith("qerl: error: ")]
        assert code == 2 and len(errors) == 1, said
        assert str(name.name) in errors[0] or str(name.parent) in errors[0], said


@cases(0.15)
@given(index=st.integers(0, 10**6), damage=damages())
def test_commands_that_read_a_run(finished, index, damage, capsys):
    folder, _, _ = finished
    copy = fresh_copy(folder / "whole", folder / "copy")
    names = [
        name
        for name in files_of(copy)
        if name.name in (METRICS, "config.json", "plan.json") or name.parts[0] == COMPLETIONS
    ]
    damage[1](copy / names[index % len(names)])
    for command in (diagnose.main, report.main):
        try:
            command([str(copy)])
        except UserError as error:
            assert len(str(error)) < 2000
    capsys.readouterr()
