"""Public functions of other packages with arguments, for `python -m benchmarks.packages`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quaxlike.testing.zoo import ZOO

Functions = dict[str, tuple[Any, ...]]

# Solves take long to trace. Other kinds find little that these do not.
OF_SOLVES = ("refuses", "non-linear", "half precision")


class Package(NamedTuple):
    """What is tried of a package."""

    needs: str  # the distribution, and the module, without which it is left out
    functions: Callable[[], Functions]  # by name, each a function and its arguments
    which: tuple[str, ...] = tuple(ZOO)  # the kinds of Values


def _array(values: Any, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.asarray(values, dtype))  # to import this compiles nothing


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return _array(_numbers(*shape, seed=seed))


KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
_X = 0.5 * _numbers(4, 4)
X, Y = _array(_X), _array(0.5 * _numbers(4, 4, seed=1))
V, U = _array(0.5 * _numbers(4)), _array(0.5 * _numbers(4, seed=1))
POSITIVE = _array(np.exp(_X))
UNIT = _array(1 / (1 + np.exp(-_X)))  # between 0 and 1
DEFINITE = _array(_X @ _X.T + 3 * np.eye(4))
LABELS = _array([0, 2, 1, 3], np.int32)
IMAGE = _normal(3, 8, 8)


def _named(module: Any, names: str, *args: Any) -> Functions:
    """Functions of a module, all with these arguments."""

    def find(name: str) -> Any:
        return functools.reduce(getattr, name.split("."), module)

    return {name: (find(name), *args) for name in names.split()}


# JAX ----------------------------------------------------------------------------------------------


def _of_numpy() -> Functions:
    unary = (
        "abs negative sign sin cos tan sinh cosh tanh arctan arcsinh exp expm1 square floor ceil round "
        "sum mean prod max min std var ptp median argmax argmin argsort sort cumsum cumprod any all "
        "count_nonzero nan_to_num nansum nanmean isfinite isnan ravel transpose flip fliplr rot90 diff trace "
        "diagonal tril triu atleast_2d squeeze real conj copy array asarray zeros_like ones_like gradient "
        "fft.fft fft.rfft linalg.norm corrcoef cov unwrap"
    )
    positive = "log log2 log10 log1p sqrt cbrt reciprocal"
    definite = (
        "linalg.inv linalg.det linalg.slogdet linalg.cholesky linalg.eigvalsh linalg.pinv linalg.qr "
        "linalg.svd"
    )
    binary = (
        "add subtract multiply divide maximum minimum arctan2 hypot logaddexp power floor_divide mod greater "
        "equal isclose allclose array_equal matmul dot vdot inner outer kron tensordot copysign heaviside "
        "polyval"
    )
    return (
        _named(jnp, unary, X)
        | _named(jnp, positive, POSITIVE)
        | _named(jnp, definite, DEFINITE)
        | _named(jnp, binary, POSITIVE, UNIT)
        | _named(jnp, "cross", V[:3], U[:3])
        | _named(jnp, "convolve correlate searchsorted", jnp.sort(V), U)
        | {
            "where": (lambda x, y: jnp.where(x > 0, x, y), X, Y),
            "interp": (jnp.interp, V, jnp.arange(4.0), U),
            "clip": (lambda x: jnp.clip(x, -0.5, 0.5), X),
            "einsum": (lambda x, y, v: jnp.einsum("ij,jk,k->i", x, y, v), X, Y, V),
            "concatenate": (lambda x, y: jnp.concatenate([x, y]), X, Y),
            "stack": (lambda x, y: jnp.stack([x, y]), X, Y),
            "split": (lambda x: jnp.split(x, 2), X),
            "pad": (lambda x: jnp.pad(x, 1, mode="reflect"), X),
            "roll": (lambda x: jnp.roll(x, 1, 0), X),
            "repeat": (lambda x: jnp.repeat(x, 2, 0), X),
            "tile": (lambda x: jnp.tile(x, 2), X),
            "reshape": (lambda x: jnp.reshape(x, (2, 8)), X),
            "moveaxis": (lambda x: jnp.moveaxis(x, 0, 1), X),
            "broadcast_to": (lambda x: jnp.broadcast_to(x, (2, 4, 4)), X),
            "take": (lambda x, i: jnp.take(x, i, axis=0), X, LABELS),
            "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i[:, None], axis=1), X, LABELS),
            "x[i]": (lambda x, i: x[i, ::2], X, LABELS),
            "x.at[i].set": (lambda x, i, v: x.at[i].set(v), X, LABELS, V),
            "x.at[i].add": (lambda x, i, v: x.at[i].add(v), X, LABELS, V),
            "linalg.solve": (jnp.linalg.solve, DEFINITE, V),
            "linalg.eigh": (lambda x: jnp.linalg.eigh(x)[0], DEFINITE),
            "linalg.lstsq": (lambda a, b: jnp.linalg.lstsq(a, b)[0], DEFINITE, V),
            "linalg.matrix_power": (lambda x: jnp.linalg.matrix_power(x, 3), X),
            "bincount": (lambda i: jnp.bincount(i, length=4), LABELS),
            "digitize": (lambda x: jnp.digitize(x, jnp.arange(3.0)), X),
            "histogram": (lambda x: jnp.histogram(x, bins=4, range=(-1.0, 1.0))[0], X),
            "percentile": (lambda x: jnp.percentile(x, 30.0), X),
            "unique": (lambda i: jnp.unique(i, size=4), LABELS),
            "vectorize": (jnp.vectorize(jnp.dot, signature="(n),(n)->()"), X, Y),
            "apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.cumsum, 0, x), X),
            "piecewise": (lambda x: jnp.piecewise(x, [x < 0, x >= 0], [jnp.sin, jnp.cos]), X),
            "select": (lambda x, y: jnp.select([x > 0, y > 0], [x, y]), X, Y),
        }
    )


def _of_nn() -> Functions:
    unary = (
        "relu relu6 gelu silu swish mish elu selu celu leaky_relu softplus soft_sign sigmoid log_sigmoid "
        "hard_tanh hard_sigmoid hard_swish squareplus sparse_plus softmax log_softmax standardize logsumexp "
        "glu tanh identity"
    )
    return _named(jax.nn, unary, X) | {
        "one_hot": (lambda i: jax.nn.one_hot(i, 4), LABELS),
        "dot_product_attention": (
            jax.nn.dot_product_attention,
            *(_normal(1, 3, 2, 4, seed=i) for i in range(3)),
        ),
        "initializers.orthogonal": (lambda key, x: jax.nn.initializers.orthogonal()(key, (4, 4)) @ x, KEY, X),
    }


def _of_scipy() -> Functions:
    import jax.scipy as jsp
    from jax.scipy import optimize

    special = "erf erfc expit entr gammaln digamma i0e i1e ndtr log_ndtr logsumexp"
    linalg = "cholesky det inv expm lu qr svd eigh sqrtm polar"
    found = _named(jsp.special, special, POSITIVE) | _named(
        jsp.special, "xlogy xlog1py betaln gammainc zeta rel_entr kl_div", 1.5 + UNIT, 1.0 + UNIT
    )
    found |= _named(jsp.special, "logit erfinv ndtri", UNIT) | _named(jsp.linalg, linalg, DEFINITE)
    found |= {
        "linalg.solve": (lambda a, b: jsp.linalg.solve(a, b, assume_a="pos"), DEFINITE, V),
        "linalg.cho_solve": (lambda a, b: jsp.linalg.cho_solve(jsp.linalg.cho_factor(a), b), DEFINITE, V),
        "linalg.lu_solve": (lambda a, b: jsp.linalg.lu_solve(jsp.linalg.lu_factor(a), b), DEFINITE, V),
        "linalg.solve_triangular": (lambda a, b: jsp.linalg.solve_triangular(a, b, lower=True), DEFINITE, V),
        "linalg.block_diag": (jsp.linalg.block_diag, X, Y),
        "sparse.linalg.cg": (lambda a, b: jsp.sparse.linalg.cg(lambda x: a @ x, b)[0], DEFINITE, V),
        "sparse.linalg.gmres": (lambda a, b: jsp.sparse.linalg.gmres(lambda x: a @ x, b)[0], DEFINITE, V),
        "sparse.linalg.bicgstab": (
            lambda a, b: jsp.sparse.linalg.bicgstab(lambda x: a @ x, b)[0],
            DEFINITE,
            V,
        ),
        "signal.convolve": (jsp.signal.convolve, X, Y),
        "signal.fftconvolve": (jsp.signal.fftconvolve, X, Y),
        "signal.detrend": (jsp.signal.detrend, X),
        "ndimage.map_coordinates": (lambda x, i: jsp.ndimage.map_coordinates(x, [i, i], order=1), X, 2.0 + V),
        "optimize.minimize": (
            lambda x: optimize.minimize(lambda x: jnp.sum((x - 1.0) ** 2), x, method="BFGS").x,
            V,
        ),
        "interpolate.RegularGridInterpolator": (
            lambda v, x: jsp.interpolate.RegularGridInterpolator((jnp.arange(4.0),), v)(x[:, None]),
            V,
            2.0 + U,
        ),
        "integrate.trapezoid": (jsp.integrate.trapezoid, X),
        "stats.rankdata": (jsp.stats.rankdata, V),
        "stats.gaussian_kde": (lambda x, at: jsp.stats.gaussian_kde(x)(at), V, U),
    }
    of_two = "norm.logpdf norm.cdf norm.logcdf cauchy.logpdf laplace.logpdf logistic.logpdf gumbel_r.logpdf"
    found |= {f"stats.{k}": v for k, v in _named(jsp.stats, of_two, X, Y).items()}
    of_positive = "gamma.logpdf pareto.logpdf expon.logpdf t.logpdf poisson.logpmf"
    found |= {f"stats.{k}": v for k, v in _named(jsp.stats, of_positive, 2.0 + UNIT, UNIT).items()}
    return found


# Optax, and the packages around Equinox -----------------------------------------------------------


def _of_optax() -> Functions:
    import optax

    losses = (
        "l2_loss squared_error huber_loss log_cosh hinge_loss cosine_similarity cosine_distance "
        "sigmoid_binary_cross_entropy sigmoid_focal_loss softmax_cross_entropy"
    )
    optimisers: dict[str, Any] = {
        name: make(1e-2)
        for name, (make,) in _named(
            optax,
            "sgd adam adamw adagrad adadelta adamax nadam radam rmsprop lamb lars lion yogi novograd "
            "adabelief adafactor amsgrad adan fromage optimistic_gradient_descent rprop sm3 sign_sgd",
        ).items()
    }
    optimisers |= {
        "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
        "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-2)),
        "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
        "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
        "ema": optax.chain(optax.ema(0.9), optax.sgd(1e-2)),
        "centralize": optax.chain(optax.centralize(), optax.sgd(1e-2)),
        "schedules": optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    }

    def steps(optimiser: Any, params: Any, grads: Any) -> Any:
        state = optimiser.init(params)
        for _ in range(2):
            updates, state = optimiser.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    params, grads = {"w": X, "b": V}, {"w": Y, "b": U}
    return (
        _named(optax, losses, X, UNIT)
        | {
            "softmax_cross_entropy_with_integer_labels": (
                optax.softmax_cross_entropy_with_integer_labels,
                X,
                LABELS,
            ),
            "kl_divergence": (optax.losses.kl_divergence, jax.nn.log_softmax(X), jax.nn.softmax(Y)),
            "smooth_labels": (lambda x: optax.smooth_labels(x, 0.1), UNIT),
            "ctc_loss": (
                lambda logits: optax.ctc_loss(
                    logits, jnp.zeros((1, 6)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
                ),
                _normal(1, 6, 4),
            ),
            "ntxent": (lambda x: optax.losses.ntxent(x, jnp.array([0, 0, 1, 1])), X),
            "global_norm": (optax.global_norm, params),
            "projections.projection_simplex": (optax.projections.projection_simplex, V),
            "incremental_update": (lambda x, y: optax.incremental_update(x, y, 0.1), X, Y),
        }
        | {name: (functools.partial(steps, o), params, grads) for name, o in optimisers.items()}
    )


def _of_equinox() -> Functions:
    nn = eqx.nn
    image, signal, tokens = IMAGE, IMAGE[0], _normal(5, 4)
    layers: dict[str, tuple[Any, Any]] = {
        "Linear": (nn.Linear(4, 3, key=KEY), V),
        "MLP": (nn.MLP(4, 3, 8, 2, key=KEY), V),
        "Conv1d": (nn.Conv1d(8, 2, 3, key=KEY), signal),
        "Conv2d": (nn.Conv2d(3, 2, 3, key=KEY), image),
        "ConvTranspose1d": (nn.ConvTranspose1d(8, 2, 3, key=KEY), signal),
        "ConvTranspose2d": (nn.ConvTranspose2d(3, 2, 3, key=KEY), image),
        "LayerNorm": (nn.LayerNorm(4), V),
        "RMSNorm": (nn.RMSNorm(4), V),
        "GroupNorm": (nn.GroupNorm(2, 4), V),
        "Embedding": (nn.Embedding(4, 3, key=KEY), jnp.array(2)),
        "MaxPool2d": (nn.MaxPool2d(2), image),
        "AvgPool2d": (nn.AvgPool2d(2), image),
        "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(3), image),
        "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(3), image),
        "PReLU": (nn.PReLU(), V),
        "Dropout": (nn.Dropout(0.5, inference=True), V),
        "RotaryPositionalEmbedding": (nn.RotaryPositionalEmbedding(4), tokens),
        "WeightNorm": (nn.WeightNorm(nn.Linear(4, 3, key=KEY)), V),
        "Sequential": (nn.Sequential([nn.Linear(4, 4, key=KEY), nn.Lambda(jax.nn.relu)]), V),
    }
    call = lambda layer, x: layer(x)
    attention = nn.MultiheadAttention(2, 4, key=KEY)
    batch_norm, bn_state = nn.make_with_state(nn.BatchNorm)(4, "batch", mode="batch")

    def normalised(layer: Any, x: Any) -> Any:
        return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, bn_state)[0]

    return {name: (call, layer, x) for name, (layer, x) in layers.items()} | {
        "GRUCell": (lambda cell, x, h: cell(x, h), nn.GRUCell(4, 4, key=KEY), V, U),
        "LSTMCell": (lambda cell, x, h: cell(x, (h, h)), nn.LSTMCell(4, 4, key=KEY), V, U),
        "GRUCell in a scan": (
            lambda cell, xs: lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(4, xs.dtype), xs)[0],
            nn.GRUCell(4, 4, key=KEY),
            tokens,
        ),
        "MultiheadAttention": (lambda layer, x: layer(x, x, x), attention, tokens),
        "BatchNorm": (normalised, batch_norm, tokens),
    }


def _of_diffrax() -> Functions:
    import diffrax

    # Made once, so that the solves are traced once.
    term = diffrax.ODETerm(lambda t, y, a: jnp.tanh(a @ y) - y)
    linear = diffrax.ODETerm(lambda t, y, a: a @ y)

    def solved(solver: Any, options: dict[str, Any], y: Any, a: Any) -> Any:
        return diffrax.diffeqsolve(term, solver, 0.0, 0.5, 0.1, y, a, **options).ys

    control = {"stepsize_controller": diffrax.PIDController(rtol=1e-3, atol=1e-3)}
    direct = {"adjoint": diffrax.DirectAdjoint()}
    saved = {"saveat": diffrax.SaveAt(ts=jnp.array([0.2, 0.4]))}
    solves: dict[str, tuple[Any, dict[str, Any]]] = {
        "Euler": (diffrax.Euler(), {}),
        "Heun": (diffrax.Heun(), saved),
        "Dopri5, PIDController": (diffrax.Dopri5(), control | saved),
        "Tsit5, DirectAdjoint": (diffrax.Tsit5(), control | direct),
        "Kvaerno3, DirectAdjoint": (diffrax.Kvaerno3(), control | direct),
    }

    def by_noise(t: Any, y: Any, a: Any) -> Any:
        return y

    def integrated(y: Any, a: Any) -> Any:
        noise = diffrax.VirtualBrownianTree(0.0, 0.5, 0.05, (), KEY)
        terms = diffrax.MultiTerm(linear, diffrax.ControlTerm(by_noise, noise))
        return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 0.5, 0.1, y, a).ys

    def interpolated(ts: Any, ys: Any) -> Any:
        return diffrax.LinearInterpolation(ts, ys).evaluate(1.5)

    return {
        f"diffeqsolve, {name}": (functools.partial(solved, *how), V, X) for name, how in solves.items()
    } | {
        "diffeqsolve, VirtualBrownianTree": (integrated, V, X),
        "LinearInterpolation": (interpolated, jnp.arange(4.0), X),
    }


def _of_lineax() -> Functions:
    import lineax as lx

    def solved(solver: Any, tags: Any, a: Any, b: Any) -> Any:
        return lx.linear_solve(lx.MatrixLinearOperator(a, tags), b, solver).value

    definite = lx.positive_semidefinite_tag
    tolerances = {"rtol": 1e-5, "atol": 1e-5}
    solvers: dict[str, tuple[Any, Any]] = {
        "LU": (lx.LU(), ()),
        "QR": (lx.QR(), ()),
        "SVD": (lx.SVD(), ()),
        "Cholesky": (lx.Cholesky(), definite),
        "Triangular": (lx.Triangular(), lx.lower_triangular_tag),
        "Diagonal": (lx.Diagonal(), lx.diagonal_tag),
        "Tridiagonal": (lx.Tridiagonal(), lx.tridiagonal_tag),
        "CG": (lx.CG(**tolerances), definite),
        "GMRES": (lx.GMRES(**tolerances), ()),
        "BiCGStab": (lx.BiCGStab(**tolerances), ()),
        "AutoLinearSolver": (lx.AutoLinearSolver(well_posed=None), ()),
    }

    def by_function(a: Any, b: Any) -> Any:
        operator = lx.FunctionLinearOperator(lambda x: a @ x, jax.eval_shape(lambda: b))
        return lx.linear_solve(operator, b, lx.GMRES(**tolerances)).value

    return {name: (functools.partial(solved, *how), DEFINITE, V) for name, how in solvers.items()} | {
        "FunctionLinearOperator": (by_function, DEFINITE, V),
        "TridiagonalLinearOperator": (
            lambda d, u, b: lx.linear_solve(lx.TridiagonalLinearOperator(d, u, u), b).value,
            3.0 + V,
            V[:3],
            U,
        ),
    }


def _of_optimistix() -> Functions:
    import optimistix as optx

    tolerances = {"rtol": 1e-4, "atol": 1e-4}

    def residual(y: Any, a: Any) -> Any:
        return y - 0.1 * jnp.tanh(a @ y) - 1.0

    def loss(y: Any, a: Any) -> Any:
        return jnp.sum(residual(y, a) ** 2)

    solves: dict[str, tuple[Any, Any, Any]] = {
        "root_find, Newton": (optx.root_find, residual, optx.Newton(**tolerances)),
        "root_find, Chord": (optx.root_find, residual, optx.Chord(**tolerances)),
        "least_squares, GaussNewton": (optx.least_squares, residual, optx.GaussNewton(**tolerances)),
        "least_squares, LevenbergMarquardt": (
            optx.least_squares,
            residual,
            optx.LevenbergMarquardt(**tolerances),
        ),
        "least_squares, Dogleg": (optx.least_squares, residual, optx.Dogleg(**tolerances)),
        "minimise, BFGS": (optx.minimise, loss, optx.BFGS(**tolerances)),
        "minimise, NelderMead": (optx.minimise, loss, optx.NelderMead(**tolerances)),
        "minimise, NonlinearCG": (optx.minimise, loss, optx.NonlinearCG(**tolerances)),
        "minimise, GradientDescent": (optx.minimise, loss, optx.GradientDescent(0.2, **tolerances)),
        "fixed_point, FixedPointIteration": (
            optx.fixed_point,
            lambda y, a: 0.1 * jnp.tanh(a @ y) + 1.0,
            optx.FixedPointIteration(**tolerances),
        ),
    }

    def solved(find: Any, fn: Any, solver: Any, y: Any, a: Any) -> Any:
        return find(fn, solver, y, a, max_steps=1000).value

    found: Functions = {name: (functools.partial(solved, *how), V, X) for name, how in solves.items()}
    bisection = optx.Bisection(**tolerances)
    options = {"lower": -3.0, "upper": 3.0}
    cubic = lambda y, a: y**3 + y - a
    found["root_find, Bisection"] = (
        lambda y, a: optx.root_find(cubic, bisection, y, a, options=options).value,
        V[0],
        U[0],
    )
    return found


# Flax and NumPyro ---------------------------------------------------------------------------------


def _of_linen() -> Functions:
    import flax.linen as nn

    tokens, image = _normal(5, 4), _normal(1, 6, 6, 3)
    layers: dict[str, tuple[Any, Any]] = {
        "Dense": (nn.Dense(3), V),
        "DenseGeneral": (nn.DenseGeneral((2, 3)), V),
        "Conv": (nn.Conv(2, (3, 3)), image),
        "ConvTranspose": (nn.ConvTranspose(2, (3, 3)), image),
        "LayerNorm": (nn.LayerNorm(), V),
        "RMSNorm": (nn.RMSNorm(), V),
        "GroupNorm": (nn.GroupNorm(2), tokens),
        "BatchNorm": (nn.BatchNorm(use_running_average=True), tokens),
        "Embed": (nn.Embed(4, 3), LABELS),
        "MultiHeadDotProductAttention": (nn.MultiHeadDotProductAttention(2), tokens),
        "RNN of GRUCell": (nn.RNN(nn.GRUCell(3)), tokens[None]),
        "RNN of OptimizedLSTMCell": (nn.RNN(nn.OptimizedLSTMCell(3)), tokens[None]),
        "WeightNorm": (nn.WeightNorm(nn.Dense(3)), V),
        "Sequential": (nn.Sequential([nn.Dense(3), nn.gelu, nn.Dense(2)]), V),
        "Dropout": (nn.Dropout(0.5, deterministic=True), V),
        "PReLU": (nn.PReLU(), V),
    }
    return {name: (layer.apply, layer.init(KEY, x), x) for name, (layer, x) in layers.items()}


def _of_nnx() -> Functions:
    from flax import nnx

    tokens, image, rngs = _normal(5, 4), _normal(1, 6, 6, 3), nnx.Rngs(0)
    layers: dict[str, tuple[Any, Any]] = {
        "Linear": (nnx.Linear(4, 3, rngs=rngs), V),
        "LinearGeneral": (nnx.LinearGeneral(4, (2, 3), rngs=rngs), V),
        "Conv": (nnx.Conv(3, 2, (3, 3), rngs=rngs), image),
        "ConvTranspose": (nnx.ConvTranspose(3, 2, (3, 3), rngs=rngs), image),
        "LayerNorm": (nnx.LayerNorm(4, rngs=rngs), V),
        "RMSNorm": (nnx.RMSNorm(4, rngs=rngs), V),
        "GroupNorm": (nnx.GroupNorm(4, 2, rngs=rngs), tokens),
        "BatchNorm": (nnx.BatchNorm(4, use_running_average=True, rngs=rngs), tokens),
        "Embed": (nnx.Embed(4, 3, rngs=rngs), LABELS),
        "MultiHeadAttention": (nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False), tokens),
        "RNN of GRUCell": (nnx.RNN(nnx.GRUCell(4, 3, rngs=rngs)), tokens[None]),
        "RNN of LSTMCell": (nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs)), tokens[None]),
        "Sequential": (nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.gelu), V),
        "LoRA": (nnx.LoRA(4, 2, 3, rngs=rngs), V),
    }

    def applied(layer: Any, x: Any) -> tuple[Any, ...]:
        graph, state = nnx.split(layer)
        return lambda state, x: nnx.merge(graph, state)(x), state, x

    return {name: applied(*how) for name, how in layers.items()}


def _of_numpyro() -> Functions:
    import numpyro.distributions as dist

    positive = jnp.exp(V)
    simplex = jax.nn.softmax(X)
    unit = jax.nn.sigmoid(V)
    counts = LABELS.astype(jnp.float32)
    tried: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(
            ("Normal", "Cauchy", "Laplace", "Logistic", "Gumbel", "SoftLaplace"), (U, positive, V)
        ),
        **dict.fromkeys(("Beta", "Kumaraswamy"), (positive, positive, unit)),
        **dict.fromkeys(("Gamma", "InverseGamma", "Weibull", "Levy"), (positive, positive, positive)),
        "LogNormal": (U, positive, positive),
        "Exponential": (positive, positive),
        "HalfNormal": (positive, positive),
        "HalfCauchy": (positive, positive),
        "Chi2": (positive, positive),
        "Pareto": (unit, positive, positive + 1.0),
        "StudentT": (positive, U, positive, V),
        "AsymmetricLaplace": (U, positive, positive, V),
        "Uniform": (V - 2.0, V + 2.0, V),
        "TruncatedNormal": (U, positive, V),
        "VonMises": (U, positive, V),
        "Dirichlet": (jnp.exp(X), simplex),
        "MultivariateNormal": (U, DEFINITE, V),
        "MultivariateStudentT": (positive[0] + 2.0, U, jnp.linalg.cholesky(DEFINITE), V),
        "LowRankMultivariateNormal": (U, X[:, :2], positive, V),
        "BernoulliLogits": (U, (V > 0).astype(jnp.float32)),
        "BernoulliProbs": (unit, (V > 0).astype(jnp.float32)),
        "BinomialLogits": (U, jnp.array([4, 4, 4, 4]), counts),
        "CategoricalLogits": (X, LABELS),
        "CategoricalProbs": (simplex, LABELS),
        "GeometricProbs": (unit, counts),
        "Poisson": (positive, counts),
        "NegativeBinomial2": (positive, positive, counts),
        "GammaPoisson": (positive, positive, counts),
        "BetaBinomial": (positive, positive, jnp.array([4, 4, 4, 4]), counts),
        "ZeroInflatedPoisson": (unit, positive, counts),
        "OrderedLogistic": (V, jnp.arange(3.0), LABELS),
    }

    def density(make: Any, *args: Any) -> Any:
        *params, value = args
        return make(*params).log_prob(value)

    found: Functions = {n: (functools.partial(density, getattr(dist, n)), *args) for n, args in tried.items()}
    total = lambda logits, value: dist.MultinomialLogits(logits, total_count=6).log_prob(value)
    cholesky = lambda concentration, value: dist.LKJCholesky(4, concentration).log_prob(value)
    mixture = lambda logits, means, x: dist.MixtureSameFamily(
        dist.Categorical(logits=logits), dist.Normal(means, 1.0)
    ).log_prob(x)
    correlation = DEFINITE / jnp.sqrt(jnp.outer(jnp.diag(DEFINITE), jnp.diag(DEFINITE)))
    return found | {
        "MultinomialLogits": (total, V, counts),
        "LKJCholesky": (cholesky, positive[0], jnp.linalg.cholesky(correlation)),
        "MixtureSameFamily": (mixture, V, U, V[0]),
        "Normal.sample": (lambda key, loc, scale: dist.Normal(loc, scale).sample(key), KEY, U, positive),
        "Gamma.sample": (lambda key, a, b: dist.Gamma(a, b).sample(key), KEY, positive, positive),
        "Categorical.sample": (lambda key, x: dist.Categorical(logits=x).sample(key), KEY, X),
    }


PACKAGES = {
    "jax.numpy": Package("jax", _of_numpy),
    "jax.nn": Package("jax", _of_nn),
    "jax.scipy": Package("jax", _of_scipy),
    "optax": Package("optax", _of_optax),
    "equinox.nn": Package("equinox", _of_equinox),
    "lineax": Package("lineax", _of_lineax, OF_SOLVES),
    "optimistix": Package("optimistix", _of_optimistix, OF_SOLVES),
    "diffrax": Package("diffrax", _of_diffrax, OF_SOLVES),
    "flax.linen": Package("flax", _of_linen),
    "flax.nnx": Package("flax", _of_nnx),
    "numpyro": Package("numpyro", _of_numpyro),
}
