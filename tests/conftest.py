"""Test configuration: several CPU devices, strict promotion, and what environment variables ask for."""

import atexit
import gc
import math
import os
import re
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

# Read once, when JAX starts its backend. Four devices share the cores; each process keeps to one compute
# thread so that parallel test workers do not fight over them.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_cpu_multi_thread_eigen=false",
        # Most of the small programs of the tests run once, and do not repay that their machine code is
        # optimised. `QUAXLIKE_OPTIMIZED=1` leaves XLA as users have it.
        *(
            []
            if os.environ.get("QUAXLIKE_OPTIMIZED") == "1"
            else [
                "--xla_backend_optimization_level=0",
                # Programs are too small to be split into parts that are compiled side by side.
                "--xla_cpu_parallel_codegen_split_count=1",
                # A flag that later releases do not know.
                *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
            ]
        ),
    ]
).strip()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests of the native products turn them on themselves. With `QUAXLIKE_NATIVE=1` all tests run with them.
os.environ.setdefault("QUAXLIKE_NATIVE", "0")
# Most of the time of the tests is that of compiling the same small programs: workers, and processes that
# tests start, share what they compiled. A program that another one is just writing is compiled again. A
# folder that is given lasts from run to run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="quaxlike-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import jaxtyping
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Before the first import of quaxlike: every annotation of the package is checked when called, if asked for:
# that takes time.
if os.environ.get("QUAXLIKE_CHECK_ANNOTATIONS") == "1":
    install_import_hook("quaxlike", "beartype.beartype")

# Imported and collected objects live as long as the process: garbage collections need not look at them.
gc.disable()

_SLOW_FILE = re.compile(r"^pytestmark = .*\b(pytest\.mark\.(slow|frameworks)|client\()", re.MULTILINE)

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so that a deadline per example says nothing.
settings.register_profile("quaxlike", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("quaxlike")


class WithoutSlow:
    """Makes no cases of slow tests, and imports no files of them alone: to drop what was collected takes
    seconds of each worker."""

    def pytest_ignore_collect(self, collection_path):
        slow = collection_path.suffix == ".py" and _SLOW_FILE.search(collection_path.read_text("utf-8"))
        return True if slow else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj):
        return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else None


def pytest_configure(config):
    if "not slow" in config.getoption("markexpr"):
        config.pluginmanager.register(WithoutSlow(), WithoutSlow.__name__)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Of the cases of a test marked `quick(n)`, n that lie far from each other are quick, the rest slow; of
    those of one marked `quick("id", ...)`, the cases with these ids. If it is marked `each_value`, slow cases
    are left out that have no value of a parameter that the others do not have."""
    cases = yield
    marks = {mark.name: mark for mark in getattr(obj, "pytestmark", ())}
    if "quick" in marks and cases:
        own = [case for case in cases if not case.get_closest_marker("slow")]
        for case in _not_quick(name, own, *marks["quick"].args):
            case.add_marker(pytest.mark.slow)
    if "each_value" in marks and cases and os.environ.get("QUAXLIKE_ALL_CASES") != "1":
        cases = _with_each_value(cases)
    if isinstance(cases, list) and collector.config.pluginmanager.has_plugin(WithoutSlow.__name__):
        return [case for case in cases if not case.get_closest_marker("slow")]
    return cases


def _not_quick(name, cases, *chosen):
    if isinstance(chosen[0], str):
        ids = [case.callspec.id for case in cases]
        if missing := set(chosen) - set(ids):
            raise pytest.UsageError(f"{name} has no cases {sorted(missing)}, but {ids[:9]}, …")
        return [case for case in cases if case.callspec.id not in chosen]
    return _spread(cases)[chosen[0] :]


def _spread(cases):
    """In the order of multiples of the golden ratio: the first few lie far apart in the table."""
    return [cases[i] for i in sorted(range(len(cases)), key=lambda i: i * (math.sqrt(5) - 1) / 2 % 1)]


def _with_each_value(cases):
    """The quick ones, and slow ones until each value of each parameter is in one."""
    seen, kept = set(), []
    for case in sorted(_spread(cases), key=lambda case: case.get_closest_marker("slow") is not None):
        entries = {(name, str(value)) for name, value in case.callspec.params.items()}
        if not case.get_closest_marker("slow") or entries - seen:
            kept.append(case)
        seen |= entries
    return [case for case in cases if case in kept]


#: How many programs were compiled while a module was collected.
_COMPILED = {}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    def count(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            _COMPILED[collector.nodeid] = _COMPILED.get(collector.nodeid, 0) + 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        return (yield)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture
def compiled_while_collected():
    return _COMPILED


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()
    # JAX makes many objects that live long. By default they are looked at every 700 allocations.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


# A compiled program takes about three maps of memory, of which Linux lets a process have 65,530: XLA ends the
# process that asks for more.
_TOO_MANY_MAPS = 30_000
_MAPS = Path("/proc/self/maps")
_maps_counted_at = time.monotonic()


def pytest_runtest_teardown():
    global _maps_counted_at
    if time.monotonic() - _maps_counted_at < 10 or not _MAPS.exists():
        return
    if _MAPS.read_bytes().count(b"\n") > _TOO_MANY_MAPS:
        jax.clear_caches()
        gc.collect()
    _maps_counted_at = time.monotonic()


def pytest_terminal_summary(terminalreporter):
    """The table of what `pytest -m clients` compared."""
    passed = terminalreporter.stats.get("passed", ())
    rows = [row for test in passed for name, row in test.user_properties if name == "compared"]
    if rows:
        from tests.lm.clients.suite import report

        terminalreporter.section("programs, files and families")
        for line in report(rows, os.environ.get("QUAXLIKE_WRITE_OUTPUTS") == "1"):
            terminalreporter.line(line)


@pytest.fixture
def check_leaks():
    """Fails a test in which a tracer outlives its transform."""
    with jax.checking_leaks():
        yield


@pytest.fixture
def default_promotion():
    """JAX's default promotion rules, for code that is not ours (diffrax, user programs)."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def x64():
    """64-bit types on, for oracles in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """Annotations are not checked, so that our own message for a wrong argument is seen."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
