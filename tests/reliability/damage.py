"""Ways in which a file goes bad, as data: what a disk, a copy that broke off, an editor or a bug does to it."""

import shutil
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

Damage = Callable[[Path], None]


@st.composite
def damages(draw) -> tuple[str, Damage]:
    """A name for messages, and what to do to a file."""
    kind = draw(
        st.sampled_from(
            ["flip", "cut", "insert", "append", "delete", "empty", "zero", "replace", "folder"]
        )
    )
    place = draw(st.floats(0, 1, exclude_max=True))
    mask = draw(st.integers(1, 255))
    junk = draw(st.one_of(st.binary(max_size=20), st.sampled_from(JUNK)))

    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        at = int(place * max(1, len(data)))
        match kind:
            case "flip":
                if data:
                    data[at] ^= mask
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = junk
            case "append":
                data += junk
            case "delete":
                path.unlink()
                return
            case "empty":
                data.clear()
            case "zero":
                data[at : at + 4096] = bytes(len(data[at : at + 4096]))
            case "replace":
                data[:] = junk
            case "folder":
                path.unlink()
                path.mkdir()
                return
        path.write_bytes(data)

    return f"{kind} at {place:.3f} (mask {mask}, junk {junk!r})", apply


JUNK = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"step": 1}\n',
    b'{"step": 99, "train/reward": 1}\n',
    b"\xff\xfe\x00",
    b"[" * 5000,
    b"1e999",
    b"version https://git-lfs.github.com/spec/v1\n",
)


def files_of(folder: Path) -> list[Path]:
    """Every file, by relative path, in a fixed order."""
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def fresh_copy(source: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(target)
    return Path(shutil.copytree(source, target))
