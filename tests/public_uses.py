"""Uses of the public names as type checkers see them: a file as users write it.

Checked by basedpyright and mypy, both strict, and run by `test_public`.
"""

# pyright: strict
# JAX's own functions are not annotated throughout, and a lambda never is.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnnecessaryTypeIgnoreComment=false

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import safetensors
from quaxlike.lm import peft
from quaxlike.primitives import DefinedPrimitive, define_primitive
from quaxlike.sharding import shard, specs_for
from quaxlike.testing import Check, ProgramReport, check_program, check_type


class Scaled(ql.ArrayValue):
    """A type of one's own."""

    array: jax.Array
    factor: jax.Array

    def materialise(self) -> jax.Array:
        return self.array * self.factor


class Doubled(ql.ArrayOperators, ql.ArrayValue):
    """One with the operators and methods of arrays."""

    array: jax.Array

    def materialise(self) -> jax.Array:
        return 2 * self.array


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
    def normalised(x: jax.Array) -> Any:
        return x / jnp.linalg.norm(x)

    options: dict[str, Callable[[jax.Array], ql.ArrayValue]] = {"scaled": lambda x: Scaled(x, jnp.ones(()))}
    report = check_program(normalised, jnp.ones(3), which=options, transforms=["eager"], rtol=1e-3)
    assert_type(report, ProgramReport)
    assert not report.failures, report
    assert check_program(normalised, jnp.ones(3), which=["refuses"], transforms=("eager",)).transforms
    assert_type(check_type(Scaled(jnp.ones(3), jnp.ones(())), programs={}).failures, tuple[Check, ...])


def functions_of_arrays_take_values() -> None:
    w, x = Doubled(jnp.ones((2, 3))), jnp.ones(3)
    assert_type(ql.quaxify(jnp.matmul)(w, x), jax.Array)
    assert_type(ql.quaxify(jnp.sum)(Scaled(x, x), axis=0), jax.Array)

    @ql.quaxify
    def affine(w: jax.Array, x: jax.Array, *, b: float = 0.0) -> jax.Array:
        return w @ x + b

    assert affine(w, x, b=1.0).shape == (2,)
    assert jax.jit(ql.quaxify(jnp.matmul))(w, x).shape == (2,)
    assert eqx.filter_jit(ql.quaxify(jnp.matmul))(w, x).shape == (2,)
    assert jax.vmap(ql.quaxify(jnp.matmul), in_axes=(None, 0))(w, jnp.ones((4, 3))).shape == (4, 2)


def values_have_operators_and_methods(w: Doubled, x: jax.Array) -> Any:
    y = w @ x + 2.0 * w[0].sum() - (x @ w.T).mean() / w.size
    y += w.sum(axis=1) * len(w) + abs(-w).max() ** 2
    w_or_array = w.at[0].set(1.0).astype(jnp.float32).reshape(w.shape)
    assert w_or_array.shape == w.shape
    assert_type(w.shape, tuple[int, ...])
    assert_type(w.ndim, int)
    assert bool((w == w_or_array).any()) or not (w != 0).all()
    assert [row.shape for row in w] == [(3,), (3,)]
    assert float(w[0, 0]) + int(w[0, 1]) >= 0.0
    assert w.devices() == {w.device}
    assert w.to_device(w.sharding).dtype == w.dtype
    assert w.__array_namespace__().negative(w).shape == w.shape
    return y


def gradients() -> None:
    def loss(w: Doubled, x: jax.Array) -> jax.Array:
        return jnp.sum(ql.quaxify(jnp.matmul)(w, x) ** 2)

    w, x = Doubled(jnp.ones((2, 3))), jnp.ones(3)
    grads: Doubled = jax.grad(loss)(w, x)
    assert grads.array.shape == (2, 3)
    value, (grads, _) = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
    assert float(value) > 0.0
    assert values_have_operators_and_methods(w, x).shape == (2,)


def models(folder: Path) -> None:
    mlp = eqx.nn.MLP(64, 2, 64, depth=1, key=jax.random.key(0))
    adapted = ql.loraify(ql.quantize(mlp, "nf4", double_quant=True), rank=2, key=jax.random.key(1))
    params, frozen = eqx.partition(adapted, ql.trainable(adapted))

    @jax.jit
    def loss(params: Any, x: jax.Array) -> Any:
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
    lm.write(folder / "w.gguf", weights, format="gguf")
    assert_type(lm.read(folder / "w.gguf"), dict[str, Any])
    assert lm.open_checkpoint(folder / "w.gguf").format == "gguf"


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
    specs = {"w": jax.P("model", None)}  # type: ignore[no-untyped-call]
    assert_type(shard(model, mesh, specs_for(model, specs)), dict[str, jax.Array])
