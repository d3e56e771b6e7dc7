"""Files are replaced whole, and stay what they were: their permissions, and links to them."""

import os
import stat

import jax.numpy as jnp
import pytest

import quaxlike as ql
from quaxlike._files import replacing


def write(path):
    with replacing(path) as file:
        file.write(b"new")


def page(path):
    ql.explain(lambda x: x)(jnp.ones(3)).to_html(path)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("put", [write, page])
class TestPermissions:
    def test_of_new_files(self, put, tmp_path, umask):
        put(tmp_path / "x")
        assert mode(tmp_path / "x") == 0o640

    @pytest.mark.parametrize("wanted", [0o600, 0o664])
    def test_are_kept(self, put, tmp_path, wanted, umask):
        path = tmp_path / "x"
        path.write_bytes(b"old")
        path.chmod(wanted)
        put(path)
        assert mode(path) == wanted
        assert path.read_bytes() != b"old"

    def test_the_umask_is_not_touched(self, put, tmp_path, monkeypatch):
        """It belongs to all threads."""

        def umask(_):
            raise AssertionError

        monkeypatch.setattr(os, "umask", umask)
        put(tmp_path / "x")
        put(tmp_path / "x")

    def test_links_are_followed(self, put, tmp_path):
        (tmp_path / "folder").mkdir()
        target, link = tmp_path / "folder" / "target", tmp_path / "link"
        link.symlink_to(target)
        put(link)
        target.write_bytes(b"old")
        put(link)
        assert link.is_symlink()
        assert target.read_bytes() != b"old"
        assert [*(tmp_path / "folder").iterdir()] == [target]


def test_after_an_error_nothing_has_changed(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
