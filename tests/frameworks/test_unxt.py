"""unxt, whose quantities and rules are written for quax, computes the same on quaxlike."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(find_spec("unxt") is None, reason="unxt is not installed"),
]

PROGRAMS = """
q / t
q + km
q @ q
q < u.Quantity(2.0, "m")
q[1]
q.to("cm")
q + t
q.at[0].set(km)
qnp.sum(q)
qnp.square(q)
qnp.sqrt(q * q)
qnp.sin(u.Quantity(90.0, "deg"))
qnp.where(q.value > 1, q, q * 2)
qnp.concatenate([q, q])
qnp.cumsum(q)
qnp.dot(q, q)
qnp.linspace(q[0], q[2], 4)
qnp.arange(u.Quantity(0.0, "m"), u.Quantity(3.0, "m"), u.Quantity(1.0, "m"))
qnp.linalg.norm(q)
u.Angle(1.0, "rad") + u.Angle(1.0, "deg")
jax.jit(lambda q: qnp.linalg.norm(q) * t)(q)
jax.vmap(lambda x: x * t)(q)
jax.lax.scan(lambda c, x: (c + x, c), q[0], q)
jax.lax.cond(True, lambda q: 2 * q, lambda q: q * q / q, q)
u.experimental.grad(lambda x: x**2, units=("m",))(u.Quantity(3.0, "m"))
u.experimental.hessian(lambda x: x**3, units=("m",))(u.Quantity(3.0, "m"))
quax.quaxify(jnp.cross)(q, q)
quax.quaxify(jax.jit(jnp.multiply))(q, q)
"""

_RUN = """
import json, sys
if sys.argv[1] == "quaxlike":
    import quaxlike
    sys.modules["quax"] = quaxlike
import jax, jax.numpy as jnp, quax, quaxed.numpy as qnp, unxt as u

q, t, km = u.Quantity(jnp.array([1.0, 2.0, 3.0]), "m"), u.Quantity(2.0, "s"), u.Quantity(1.0, "km")
results = {}
for program in json.load(sys.stdin):
    try:
        results[program] = repr(eval(program))
    except Exception as error:
        results[program] = type(error).__name__
print(json.dumps(results))
"""


def _results(which: str) -> dict[str, str]:
    programs = json.dumps(PROGRAMS.split("\n")[1:-1])
    command = [sys.executable, "-W", "ignore", "-c", _RUN, which]
    run = subprocess.run(command, input=programs, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_the_same_results_as_with_quax():
    results = _results("quaxlike")
    assert results == _results("quax")
    assert [name for name, text in results.items() if text.endswith("Error")] == ["q + t"]
