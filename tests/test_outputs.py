"""Files that are written where a user says: whole or not at all, and in the place of nothing else."""

import os
import socket
import stat
from pathlib import Path

import pytest

from snapstream.outputs import regular_file, replacing, write_text


@pytest.fixture
def others(tmp_path):
    """One of each kind of thing that is no regular file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "to-pipe").symlink_to(tmp_path / "pipe")
    (tmp_path / "to-device").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        yield tmp_path


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("/dev/null", "it is a device"),
        ("/dev/full", "it is a device"),
        ("pipe", "it is a pipe"),
        ("directory", "it is a directory"),
        ("socket", "it is a socket"),
        ("to-pipe", "it is a pipe"),
        ("to-device", "it is a device"),
        ("loop", "symbolic links"),
        ("no/file", "there is no directory"),
    ],
)
def test_what_is_no_regular_file_stays(others, name, what):
    path = others / name
    before = path.lstat() if path.is_symlink() or path.exists() else None
    with pytest.raises(OSError, match=what):
        write_text(path, "text")
    if before is not None:
        assert path.lstat().st_mode == before.st_mode
        assert path.lstat().st_ino == before.st_ino


def test_links_are_followed(tmp_path):
    target, link, chain, dangling = (tmp_path / name for name in ("target", "link", "chain", "dangling"))
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    chain.symlink_to(link)
    write_text(chain, "new")
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert chain.is_symlink()
    dangling.symlink_to(tmp_path / "later")
    write_text(dangling, "new")
    assert (tmp_path / "later").read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_what_breaks_off_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with replacing(path) as file:
            file.write_text("half of it")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_is_still_needed_is_not_replaced(tmp_path):
    text, link, hard, other = (tmp_path / name for name in ("text", "link", "hard", "other"))
    text.write_text("long")
    link.symlink_to(text)
    hard.hardlink_to(text)
    for path in (text, link, hard, Path(os.path.relpath(text))):
        with pytest.raises(OSError, match="it is the same file as"):
            regular_file(path, "-", tmp_path / "missing", text)
    assert regular_file(other, text) == other
