"""Uses of the public names as type checkers see them: a file as users write it.

Checked by basedpyright and mypy, and run by `test_public`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp

import quaxlike as ql
from quaxlike import interop
from quaxlike.interop import peft, safetensors
from quaxlike.primitives import DefinedPrimitive, define_primitive
from quaxlike.sharding import shard, specs_for
from quaxlike.testing import Check, ProgramReport, check_program, check_type


class Scaled(ql.ArrayValue):
    """A type of one's own."""

    array: jax.Array
    factor: jax.Array

    def materialise(self) -> jax.Array:
        return self.array * self.factor


@ql.register("neg")
def negated(x: Scaled, **params: Any) -> Scaled:
    return Scaled(x.array, -x.factor)


def types_and_rules() -> None:
    x = Scaled(jnp.ones(3), jnp.asarray(2.0))
    negate: Callable[[Any], Any] = ql.quaxify(jnp.negative)
    assert ql.is_value(negate(x))
    assert x.shape == (3,)
    rules = ql.rules_for(Scaled)
    assert [rule.primitive.name for rule in rules] == ["neg"]
    ql.check_ambiguities(Scaled)
    report = ql.explain(jnp.negative)(x)
    assert_type(report, ql.Report)
    assert not report.materialised
    with ql.on_materialise("allow"):
        assert ql.quaxify(lambda x: x + 1.0)(x).shape == (3,)


def quaxified_functions_keep_their_types() -> None:
    def twice(x: jax.Array, n: int = 2) -> jax.Array:
        return x * n

    assert_type(ql.quaxify(twice)(jnp.ones(2), n=3), jax.Array)


def functions_and_types_are_tested() -> None:
    def normalised(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x)

    options: dict[str, Callable[[jax.Array], ql.ArrayValue]] = {"scaled": lambda x: Scaled(x, jnp.ones(()))}
    report = check_program(normalised, jnp.ones(3), which=options, transforms=["eager"], rtol=1e-3)
    assert_type(report, ProgramReport)
    assert not report.failures, report
    assert check_program(normalised, jnp.ones(3), which=["refuses"], transforms=("eager",)).transforms
    assert_type(check_type(Scaled(jnp.ones(3), jnp.ones(())), programs={}).failures, tuple[Check, ...])


def models(folder: Path) -> None:
    mlp = eqx.nn.MLP(64, 2, 64, depth=1, key=jax.random.key(0))
    adapted = ql.loraify(ql.quantize(mlp, "nf4", double_quant=True), rank=2, key=jax.random.key(1))
    params, frozen = eqx.partition(adapted, ql.trainable(adapted))

    @jax.jit
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return ql.quaxify(eqx.combine(params, frozen))(x).sum()

    grads = jax.grad(loss)(params, jnp.ones(64))
    assert len(jax.tree.leaves(grads)) == len(jax.tree.leaves(params))
    assert_type(ql.summary(adapted).trainable, int)
    merged = ql.merge(ql.loraify(mlp, rank=2, key=jax.random.key(1)))
    safetensors.save(folder / "model.safetensors", merged)
    again = safetensors.load(folder / "model.safetensors", like=merged)
    assert len(jax.tree.leaves(again)) == len(jax.tree.leaves(merged))
    peft.save_adapter(folder / "adapter", adapted, base_model="base")
    adapted = peft.load_adapter(str(folder / "adapter"), mlp)
    assert list(ql.select(adapted, ["0.weight"]))


def files(folder: Path) -> None:
    weights: dict[str, Any] = {"w": ql.BlockArray.quantize(jnp.ones((32, 64)), codec="q8_0")}
    interop.save(folder / "w.gguf", weights, format="gguf")
    assert_type(interop.load(folder / "w.gguf"), dict[str, Any])
    assert interop.open_checkpoint(folder / "w.gguf").format == "gguf"


def arrays() -> None:
    w = ql.NF4Array.quantize(jnp.ones((4, 64)), block_size=32)
    assert_type(w, ql.NF4Array)
    assert_type(w.ndim, int)
    lora = ql.LoraArray(w, jnp.ones((1, 64)), jnp.ones((4, 1)), alpha=2.0)
    assert ql.materialise(lora).shape == (4, 64)
    assert_type(ql.SparseArray.from_dense(jnp.eye(4)), ql.SparseArray)


def primitives_and_meshes() -> None:
    double: DefinedPrimitive = define_primitive("double_for_users", lambda x: 2 * x)
    assert double(jnp.ones(2)).shape == (2,)
    mesh = jax.make_mesh((1,), ("model",))
    model = {"w": jnp.ones((4, 4))}
    assert_type(shard(model, mesh, specs_for(model, {"w": jax.P("model", None)})), dict[str, jax.Array])
