"""Python and the packages: what is installed against what qerl supports, from qerl's own metadata.

Nothing is imported for it: a package that cannot be imported has a version all the same.
"""

import importlib.metadata
import platform
import tomllib
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from qerl.checkup.finding import Check

SHOWN = ("torch", "transformers", "peft", "bitsandbytes")
"""Packages with a line of their own; the others share one."""
SETUP = "make setup, or pip install --editable . in qerl's folder"
GPU_EXTRA = "make setup, or pip install '.[gpu]' in qerl's folder"


@cache
def requirements() -> tuple[SpecifierSet, dict[str, SpecifierSet]]:
    """Supported versions of Python and of each package: qerl's metadata, or pyproject.toml where it is not installed.

    Empty where there is neither.
    """
    try:
        metadata = importlib.metadata.metadata("qerl")
        python, lines = metadata["Requires-Python"], metadata.get_all("Requires-Dist") or []
    except importlib.metadata.PackageNotFoundError:
        path = Path(__file__).parents[2] / "pyproject.toml"
        if not path.is_file():
            return SpecifierSet(), {}
        project = tomllib.loads(path.read_text())["project"]
        python, lines = project["requires-python"], project["dependencies"]
    parsed = [Requirement(line) for line in lines]
    needed = {one.name: one.specifier for one in parsed if "extra" not in str(one.marker or "")}
    return SpecifierSet(python), needed


def version_of(name: str) -> str | None:
    """Installed version of a distribution; None when it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    """The interpreter."""
    version, supported = platform.python_version(), requirements()[0]
    if supported.contains(version, prereleases=True):
        return Check("Python", "ok", version)
    return Check("Python", "FAILED", version, f"qerl runs with Python {supported}")


def check_package(name: str) -> Check:
    """One package that qerl cannot do without."""
    version, supported = version_of(name), requirements()[1].get(name, SpecifierSet())
    if version is None:
        return Check(name, "FAILED", "not installed", SETUP)
    if supported.contains(version, prereleases=True):
        return Check(name, "ok", version)
    return Check(name, "FAILED", f"{version}; qerl is for {name} {supported}", SETUP)


def check_other_packages() -> Check:
    """The rest of what qerl needs, together."""
    others = [check_package(name) for name in requirements()[1] if name not in SHOWN]
    wrong = [one for one in others if one.status != "ok"]
    if not others:
        return Check("other packages", "warning", "what is needed is not known here", SETUP)
    if wrong:
        found = ", ".join(f"{one.name} {one.found}" for one in wrong)
        return Check("other packages", "FAILED", found, SETUP)
    return Check("other packages", "ok", f"{len(others)} as needed")


def check_triton(has_gpu: bool) -> Check:
    """Triton compiles qerl's own kernels; torch names the version that it was built with."""
    version = version_of("triton")
    if version is None:
        if has_gpu:
            return Check("triton", "FAILED", "not installed; GPU kernels need it", GPU_EXTRA)
        return Check("triton", "ok", "not installed; needed on a GPU only")
    wanted = _wanted_by_torch("triton")
    if wanted.contains(version, prereleases=True):
        return Check("triton", "ok", version)
    advice = f"pip install 'triton{wanted}'"
    return Check("triton", "warning", f"{version}; the installed torch wants {wanted}", advice)


def _wanted_by_torch(name: str) -> SpecifierSet:
    """Versions of a package that torch's metadata asks for on this machine; empty for any."""
    if version_of("torch") is None:
        return SpecifierSet()
    for line in importlib.metadata.requires("torch") or []:
        one = Requirement(line)
        if one.name == name and (one.marker is None or one.marker.evaluate({"extra": ""})):
            return one.specifier
    return SpecifierSet()
