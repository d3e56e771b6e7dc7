"""The user's cache: what commands keep there, and folders that they refuse."""

import os
import subprocess
import sys

import jax
import pytest

from quaxlike import _cache
from quaxlike._cache import keep_programs
from tests.samples import use_cache


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """JAX as a user starts it, and a home of its own."""
    use_cache(monkeypatch, tmp_path)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    names = [
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_of_the_user(fresh):
    told = []
    keep_programs(None, told.append)
    folder = fresh / "quaxlike" / "programs" / _cache._processor()
    assert told == [f"Compiled programs are kept for later runs in {folder}"]
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    keep_programs(None, pytest.fail)  # it is set already


def test_what_the_user_has_set_is_kept(fresh):
    jax.config.update("jax_compilation_cache_dir", str(fresh / "own"))
    keep_programs(None, pytest.fail)
    assert jax.config.jax_compilation_cache_dir == str(fresh / "own")
    keep_programs("off", pytest.fail)
    assert not jax.config.jax_enable_compilation_cache
    keep_programs(None, pytest.fail)
    assert not jax.config.jax_enable_compilation_cache
    keep_programs(str(fresh / "another"), print)
    assert jax.config.jax_enable_compilation_cache
    assert jax.config.jax_compilation_cache_dir == str(fresh / "another")


def test_folders_that_others_may_write_to(fresh):
    told = []
    folder = fresh / "quaxlike" / "programs" / _cache._processor()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    keep_programs(None, told.append)
    assert told[0].startswith(
        f"Compiled programs are not kept: {folder} holds code that will run, and others"
    )
    with pytest.raises(PermissionError, match="others may write to it"):
        keep_programs(str(folder), pytest.fail)
    assert jax.config.jax_compilation_cache_dir is None


def test_a_user_without_a_home(fresh, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_cache.Path, "home", no_home)
    monkeypatch.setattr(_cache, "FOLDER", _cache._folder())
    told = []
    keep_programs(None, told.append)
    assert told[0].startswith(
        "Compiled programs are not kept: this user has no home folder; set XDG_CACHE_HOME"
    )
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.slow
def test_only_commands_keep_programs():
    """Importing and calling the library does not."""
    code = "import jax, quaxlike, quaxlike.lm.models; print(jax.config.jax_compilation_cache_dir)"
    env = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert run.stdout.strip() == "None"
