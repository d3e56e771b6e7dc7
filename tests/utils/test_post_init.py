import asyncio
import threading

import pytest

from quaxlike.utils import dataclass, enable_post_init, no_post_init, skip_post_init_if_disabled


@dataclass
class Positive:
    x: float

    @skip_post_init_if_disabled
    def __post_init__(self):
        """Checks the sign."""
        if self.x < 0:
            raise ValueError("x must be positive")


def test_runs_by_default():
    with pytest.raises(ValueError, match="x must be positive"):
        Positive(-1.0)


def test_skipped_in_the_context_and_back_after_it():
    with no_post_init():
        assert Positive(-1.0).x == -1.0
    with pytest.raises(ValueError, match="x must be positive"):
        Positive(-1.0)


def test_contexts_nest():
    with no_post_init():
        with enable_post_init():
            with pytest.raises(ValueError, match="x must be positive"):
                Positive(-1.0)
            with no_post_init():
                Positive(-1.0)
            with pytest.raises(ValueError, match="x must be positive"):
                Positive(-1.0)
        Positive(-1.0)
    with pytest.raises(ValueError, match="x must be positive"):
        Positive(-1.0)


@pytest.mark.parametrize("context", [no_post_init, enable_post_init])
def test_restored_on_error(context):
    with pytest.raises(RuntimeError, match="inside"), context():
        raise RuntimeError("inside")
    with pytest.raises(ValueError, match="x must be positive"):
        Positive(-1.0)


def test_restored_to_the_outer_context_on_error():
    with no_post_init():
        with pytest.raises(RuntimeError, match="inside"), enable_post_init():
            raise RuntimeError("inside")
        Positive(-1.0)


def test_as_a_decorator():
    @no_post_init()
    def build():
        return Positive(-1.0)

    assert build().x == build().x == -1.0


def test_per_thread():
    inside, checked = threading.Event(), threading.Event()
    raised: list[str] = []

    def other():
        inside.wait(10)
        try:
            Positive(-1.0)
        except ValueError as error:
            raised.append(str(error))
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with no_post_init():
        inside.set()
        assert checked.wait(10)
        Positive(-1.0)
    thread.join()
    assert raised == ["x must be positive"]


def test_a_thread_started_inside_begins_enabled():
    raised: list[str] = []

    def build():
        try:
            Positive(-1.0)
        except ValueError as error:
            raised.append(str(error))

    with no_post_init():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert raised == ["x must be positive"]


def test_wrapper_keeps_name_and_doc():
    assert Positive.__post_init__.__name__ == "__post_init__"
    assert Positive.__post_init__.__qualname__ == "Positive.__post_init__"
    assert Positive.__post_init__.__doc__ == "Checks the sign."


def test_init_variables_are_handed_on():
    @skip_post_init_if_disabled
    def post_init(self: list[int], first: int, *, second: int) -> None:
        self += [first, second]

    found: list[int] = []
    post_init(found, 1, second=2)
    assert found == [1, 2]
    with no_post_init():
        post_init(found, 3, second=4)
    assert found == [1, 2]


def test_other_tasks_are_not_affected():
    async def check():
        inside, checked = asyncio.Event(), asyncio.Event()

        async def skipping():
            with no_post_init():
                inside.set()
                await checked.wait()
                Positive(-1.0)

        async def checking():
            await inside.wait()
            with pytest.raises(ValueError, match="x must be positive"):
                Positive(-1.0)
            checked.set()

        await asyncio.gather(skipping(), checking())

    asyncio.run(check())


def test_a_task_inherits_the_setting():
    async def build():
        return Positive(-1.0).x

    async def start():
        with no_post_init():
            task = asyncio.create_task(build())
        return await task

    assert asyncio.run(start()) == -1.0


def test_the_parameter_is_named_for_the_method():
    called = []
    method = skip_post_init_if_disabled(post_init=lambda self: called.append(self))
    method(1)
    with no_post_init():
        method(2)
    assert called == [1]
