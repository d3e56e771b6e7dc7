"""Checks a type's hooks, using one of its values."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..core.construction import leaves_of
from ..core.jaxprs.linearity import is_linear
from ..core.jaxprs.slots import LeafLayout, leaf_specs
from ..core.jaxprs.unify import OperandMismatch
from ..core.plain_arrays import takes_no_like
from ..core.shapes import as_shapes
from ..core.values import Value, aval_of, is_value
from .compare import disagreement, is_inexact
from .programs import mesh, plain
from .refusing import found_by_name, reveal

HOOKS: dict[str, Callable[["Subject"], bool]] = {}


class Wrong(Exception):
    """Raised if a hook doesn't satisfy its specification."""


@dataclasses.dataclass
class Subject:
    """The value under test, along with its materialised array."""

    value: Any
    dense: Any

    @property
    def leaves(self) -> list[Any]:
        return jtu.tree_leaves(self.value)

    @property
    def cls(self) -> type[Any]:
        return type(self.value)

    def overrides(self, hook: str) -> bool:
        mine, base = (getattr(cls, hook) for cls in (self.cls, Value))
        return getattr(mine, "__func__", mine) is not getattr(base, "__func__", base)

    def varied(self) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Returns the differentiable leaves, together with a function rebuilding the value from them."""
        leaves, treedef = jtu.tree_flatten(self.value)

        def build(varied: list[Any]) -> Any:
            new = iter(varied)
            return treedef.unflatten([next(new) if is_inexact(x) else x for x in leaves])

        return [x for x in leaves if is_inexact(x)], build

    def stack(self) -> Any:
        """Returns a stack of two different values with the same structure."""

        def other(x: Any) -> Any:
            return (1.5 * x).astype(x.dtype) if is_inexact(x) else x

        return jtu.tree_map(lambda x: jnp.stack([x, other(x)]), self.value)

    def split(self, axis: int) -> tuple[jax.P, int, Any] | None:
        """Shards an axis (or no axis, for -1) over as many devices as it can be divided between.

        **Returns:** the spec, the device count, and the sharded value. This is None if the type doesn't
        support sharding, or doesn't specify how to shard its leaves.
        """
        leaves, treedef = jtu.tree_flatten(self.value)
        spec = jax.P() if axis < 0 else jax.P(*[None] * axis, "i")
        try:
            specs = leaf_specs(LeafLayout(treedef, tuple(map(jax.typeof, leaves))), spec)
        except ValueError:
            return None
        sizes = [] if axis < 0 else [self.dense.shape[axis]]
        for x, own in zip(leaves, specs, strict=True):
            if len(own) > jnp.ndim(x):
                raise Wrong(f"shard_spec({spec}) gives {own} for a leaf of shape {jnp.shape(x)}")
            sizes += [x.shape[i] for i, entry in enumerate(own) if entry is not None]
        devices = next(n for n in range(len(jax.devices()), 0, -1) if all(k % n == 0 for k in sizes))
        shardings = [jax.NamedSharding(mesh(devices), own) for own in specs]
        return spec, devices, treedef.unflatten(map(jax.device_put, leaves, shardings))

    def same(self, found: Any, what: str, expected: Any = None) -> None:
        expected = self.dense if expected is None else expected
        if difference := disagreement(found, expected):
            raise Wrong(f"{what}: {difference}.")


def hook(name: str) -> Callable[[Callable[[Subject], bool]], Callable[[Subject], bool]]:
    """Registers a check. This should return whether the type has the hook, and raise an error if it is
    incorrect.
    """

    def decorator(check: Callable[[Subject], bool]) -> Callable[[Subject], bool]:
        HOOKS[name] = check
        return check

    return decorator


@hook("static fields")
def _statics(subject: Subject) -> bool:
    fields = [f for f in dataclasses.fields(subject.value) if f.metadata.get("static")]
    for f in fields:
        for part in _parts(getattr(subject.value, f.name, None)):
            if isinstance(part, jax.Array | np.ndarray):
                raise Wrong(
                    f"{subject.cls.__name__}.{f.name} is a static field, but holds an array of shape "
                    f"{part.shape}: transforms cannot see it. Leave out `static=True`, or store a tuple of "
                    "numbers."
                )
    return bool(fields)


def _parts(static: Any, depth: int = 3) -> list[Any]:
    """Returns everything inside a static field, including any nested objects.

    Dataclass fields with `compare=False` are skipped: the other fields are assumed to determine these.
    """
    found: list[Any] = []
    for leaf in leaves_of(static):
        fields = dataclasses.fields(leaf) if dataclasses.is_dataclass(leaf) else ()
        derived = [field.name for field in fields if not field.compare]
        inside = vars(leaf) if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type) else {}
        plain_object = not callable(leaf) and not isinstance(leaf, jax.Array)
        found += [leaf] + (
            [x for name, part in inside.items() if name not in derived for x in _parts(part, depth - 1)]
            if plain_object
            else []
        )
    return found


@hook("aval")
def _aval(subject: Subject) -> bool:
    want = jax.typeof(subject.dense)
    shapes = as_shapes(subject.value)
    for what, value in {"": subject.value, " of a value with shapes for leaves": shapes}.items():
        found = aval_of(value)
        if (found.shape, found.dtype) != (want.shape, want.dtype):
            raise Wrong(
                f"{subject.cls.__name__}.aval(){what} says {found.str_short()}, but materialise() makes "
                f"{want.str_short()}."
            )
    return True


@hook("flatten")
def _flatten(subject: Subject) -> bool:
    leaves, treedef = jtu.tree_flatten(subject.value)
    for path, leaf in jtu.tree_leaves_with_path(subject.value):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | complex):
            raise Wrong(f"the leaf {jtu.keystr(path)} is {leaf!r}, not an array")
    again = jtu.tree_unflatten(treedef, leaves)
    if type(again) is not subject.cls or jtu.tree_structure(again) != treedef:
        raise Wrong("flattening and unflattening change the structure; static fields must be comparable")
    hash(treedef)
    subject.same(reveal(again), "flattening and unflattening change the array")
    # JAX does this internally, so it must not raise an error.
    jtu.tree_unflatten(treedef, [object()] * len(leaves))
    return True


@hook("pickle")
def _pickle(subject: Subject) -> bool:
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in subject.leaves if hasattr(x, "dtype")):
        return False  # JAX can't pickle random keys
    subject.same(reveal(copy.deepcopy(subject.value)), "copy.deepcopy changes the array")
    if found_by_name(subject.cls) not in subject.cls.__mro__:
        return False  # Python can't pickle local classes
    subject.same(reveal(pickle.loads(pickle.dumps(subject.value))), "pickling changes the array")
    return True


@hook("stacking")
def _stacking(subject: Subject) -> bool:
    if not subject.leaves:
        return False
    stack = subject.stack()
    each = [jtu.tree_map(lambda x, i=i: x[i], stack) for i in range(2)]
    want = jnp.stack([reveal(x) for x in each])

    def one(value: Any) -> Any:
        aval = aval_of(value)
        if aval.shape != subject.dense.shape:
            raise Wrong(
                f"under jax.vmap over a stack, the aval of one value has shape {aval.shape} instead of "
                f"{subject.dense.shape}. Derive the shape from the array fields."
            )
        return reveal(value)

    subject.same(jax.vmap(one)(stack), "materialise() under jax.vmap of a stack", want)
    subject.same(
        jax.lax.scan(lambda _, x: (None, one(x)), None, stack)[1], "materialise() in a scan of a stack", want
    )
    return True


@hook("linear")
def _linear(subject: Subject) -> bool:
    if not is_linear(subject.value):
        return False
    varied, build = subject.varied()
    if not varied:
        return True

    def dense(leaves: Any) -> Any:
        return reveal(build(leaves))

    other = [plain(x) for x in varied]
    both = dense([a + b for a, b in zip(varied, other, strict=True)])
    advice = f"{subject.cls.__name__} is not linear in its leaves: leave out `linear = True`"
    subject.same(dense([2 * x for x in varied]), advice, 2 * subject.dense)
    subject.same(both, advice, subject.dense + dense(other))
    return True


@hook("leading_axis")
def _leading_axis(subject: Subject) -> bool:
    axes = subject.value.leading_axis()
    if axes is NotImplemented:
        return False
    if not subject.dense.shape:
        return False
    axes, (leaves, treedef) = list(axes), jtu.tree_flatten(subject.value)
    if len(axes) != len(leaves):
        raise Wrong(f"leading_axis() names {len(axes)} axes ({axes}) for {len(leaves)} array leaves")
    for i in range(subject.dense.shape[0]):
        try:
            row = treedef.unflatten(
                [x if a is None else jnp.take(x, i, a) for x, a in zip(leaves, axes, strict=True)]
            )
            found = reveal(row)
        except Exception as error:
            raise Wrong(f"leading_axis() gives {axes}, but a row cannot be materialised: {error}") from error
        subject.same(found, f"leading_axis() gives {axes}, by which row {i} is wrong", subject.dense[i])
    return True


@hook("promote")
def _promote(subject: Subject) -> bool:
    if not subject.overrides("promote"):
        return False
    array = plain(subject.dense) if is_inexact(subject.dense) else subject.dense
    try:
        lifted = subject.cls.promote(array, subject.value)
    except OperandMismatch:  # the type doesn't accept plain arrays
        return False
    if lifted is NotImplemented:
        return False
    if not is_value(lifted):
        raise Wrong(
            f"promote(array, like) must return a Value or NotImplemented; found {type(lifted).__name__}"
        )
    subject.same(reveal(lifted), "promote(array, like) gives a different array", array)
    if is_inexact(array):
        out, pull = jax.vjp(lambda x: reveal(subject.cls.promote(x, subject.value)), array)
        subject.same(pull(out)[0], "the gradient of promote(array, like) differs from the array's", out)
    if takes_no_like(subject.cls):
        zeros = jnp.zeros_like(subject.dense)
        alone = subject.cls.promote(zeros, None)
        if alone is not NotImplemented:
            subject.same(reveal(alone), "promote(zeros) gives a different array", zeros)
    return True


@hook("widen")
def _widen(subject: Subject) -> bool:
    if not subject.overrides("widen"):
        return False
    wide = subject.value.widen(subject.value)
    if wide is NotImplemented:
        return False
    subject.same(reveal(wide), "widen(like) changes the array")
    return True


@hook("cotangent")
def _cotangent(subject: Subject) -> bool:
    if not subject.overrides("cotangent") or not is_linear(subject.value):
        return False
    subject.same(reveal(subject.cls.cotangent(subject.value)), "cotangent(ct) differs from ct")
    subject.same(
        reveal(subject.cls.cotangent(subject.dense)), "cotangent(ct) of a plain array differs from ct"
    )
    return True


@hook("follows_rules")
def _follows_rules(subject: Subject) -> bool:
    if not isinstance(subject.value.follows_rules(), bool):
        raise Wrong(f"follows_rules() must return a bool; found {subject.value.follows_rules()!r}")
    return subject.overrides("follows_rules")


@hook("shard_spec")
def _shard_spec(subject: Subject) -> bool:
    """Shards each axis over several devices. Each shard must then materialise to the array's corresponding
    shard.
    """
    for axis in range(-1, subject.dense.ndim):
        if (split := subject.split(axis)) is None:
            continue
        spec, _, placed = split
        subject.same(reveal(placed), f"placing by shard_spec({spec}) changes the array")
    return subject.overrides("shard_spec")


def check_hooks(subject: Subject) -> dict[str, tuple[str, str]]:
    """Checks each hook. Returns a dict from hooks to "ok", "failed", or "-" (if the type doesn't have it),
    and a message.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, check in HOOKS.items():
        try:
            found[name] = ("ok" if check(subject) else "-", "")
        except Wrong as wrong:
            found[name] = ("failed", str(wrong))
        except Exception as error:
            found[name] = ("failed", f"{name} raises {type(error).__name__}: {error}")
    return found
