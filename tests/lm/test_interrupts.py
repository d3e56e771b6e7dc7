"""Interrupts that wait to be taken, in processes of their own."""

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from quaxlike.lm._interrupts import interrupts_deferred, status_of, take_interrupt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Processes cannot be interrupted so there.")

_PROGRAM = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from quaxlike.lm._interrupts import interrupts_deferred, take_interrupt

slow = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda i, x: x @ x / jnp.linalg.norm(x), x)[0, 0])

def work(patience):
    with interrupts_deferred("last words", patience=patience):
        print("ready", flush=True)
        {body}

"""


def interrupted(body, *, patience=1, after=(0.3,)):
    """The status of a program that is interrupted, and what it prints."""
    program = _PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), " " * 8).strip())
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}\nwork({patience})"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for seconds in after:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


LONG = """
x = slow(jnp.ones((900, 900)))
values = [x, x]
try:
    float(np.mean(values))  # NumPy would make another error of an interrupt
    take_interrupt()
except KeyboardInterrupt:
    print("taken")
    sys.exit(130)
"""


@pytest.mark.slow
def test_an_interrupt_waits_for_the_device_and_is_taken():
    status, out, errors = interrupted(LONG)
    assert (status, out) == (130, "taken\n")
    assert errors == "Stops after this step. Press Ctrl-C again to stop at once.\n"


@pytest.mark.slow
def test_the_second_one_ends_the_process_at_once():
    status, out, errors = interrupted(
        LONG.replace("x = ", "x = sum(slow(jnp.ones((900, 900))) for _ in range(40)) + "), after=(0.3, 0.3)
    )
    assert (status, out) == (130, "last words\n")
    assert "Error" not in errors


@pytest.mark.slow
def test_without_patience_the_first_one_does():
    status, out, errors = interrupted("while True: time.sleep(0.01)", patience=0)
    assert (status, out, errors) == (130, "last words\n", "")


def test_other_signals_are_interrupts_where_they_are_named():
    before = signal.getsignal(signal.SIGTERM)
    with interrupts_deferred("", signals=[signal.SIGINT, signal.SIGTERM]):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt) as stop:
            take_interrupt()
        assert status_of(stop.value) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert status_of(KeyboardInterrupt()) == 130


def test_what_was_before_is_restored():
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    with interrupts_deferred(""):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        take_interrupt()  # nothing to take
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            take_interrupt()
    assert signal.getsignal(signal.SIGINT) is before[0]
    assert signal.set_wakeup_fd(before[1]) == -1
    take_interrupt()


def test_other_threads_have_no_handlers():
    def work():
        with interrupts_deferred(""):
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
