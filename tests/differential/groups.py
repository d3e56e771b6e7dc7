# ruff: noqa: E501 (an operation has one line)
"""Operations that few programs would meet by chance, in groups that are drawn as often as each other.

Letters, holes and names are those of `operations`. LAPACK never finds the singular values of infinity.
"""

GROUPS: dict[str, str] = {
    "linear algebra": """
jnp.linalg.solve(x, y)
jnp.linalg.solve(x, r)
jnp.linalg.solve(y + 3 * jnp.eye(x.shape[-1]), x)
jnp.linalg.inv(x)
jnp.linalg.det(x)
jnp.linalg.det(2 * x.T)
jnp.linalg.slogdet(x)[1]
jnp.linalg.slogdet(x)[0]
jnp.linalg.cholesky(x @ x.T + 3 * jnp.eye(x.shape[0]))
jnp.linalg.cholesky(abs(x) + 3 * jnp.eye(x.shape[-1]), upper=True, symmetrize_input=True)
jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(x @ x.T + 3 * jnp.eye(x.shape[0])), y)
jax.scipy.linalg.lu(x + 3 * jnp.eye(x.shape[-1]))[{n}]
jnp.linalg.qr(x)[0] @ y
abs(jnp.linalg.qr(x)[1])
jnp.linalg.eigvalsh(x + x.T)
abs(jnp.linalg.eigh(x @ x.T)[1])
(lambda w, u: (u * jnp.exp(w)) @ u.T)(*jnp.linalg.eigh(x + x.T))
jnp.linalg.svd(jnp.where(jnp.isfinite(x), x, 0), compute_uv=False)
abs(jnp.linalg.svd(jnp.where(jnp.isfinite(x), x, 0), full_matrices=False)[0])
jnp.linalg.pinv(jnp.where(jnp.isfinite(x), x, 0))
jnp.linalg.lstsq(jnp.where(jnp.isfinite(x), x, 0), y)[0]
jnp.linalg.norm(jnp.where(jnp.isfinite(x), x, 0), 2)
jax.scipy.linalg.expm(x)
jnp.linalg.matrix_power(x, -1)
jnp.linalg.multi_dot([x, y, x])
jax.scipy.linalg.block_diag(x, y)
jax.scipy.linalg.solve(x @ x.T + 3 * jnp.eye(x.shape[0]), y, assume_a="pos")
jax.scipy.linalg.solve_triangular(x, y, lower=True)
lax.linalg.triangular_solve(x, y, left_side=True, lower=True, unit_diagonal=True)
lax.linalg.triangular_solve(jnp.triu(x) + 2 * jnp.eye(x.shape[-1]), x, left_side=True)
lax.linalg.triangular_solve(jnp.triu(y) + 2 * jnp.eye(x.shape[-1]), x, transpose_a=True)
lax.linalg.tridiagonal_solve(r, 3 + r, r, x)
lax.custom_linear_solve(lambda b: x @ b, r, lambda _, b: jnp.linalg.solve(x, b))
lax.custom_linear_solve(lambda b: x @ b, x @ r, lambda _, b: jnp.linalg.solve(x, b), lambda _, b: jnp.linalg.solve(x.T, b))
lax.custom_linear_solve(lambda b: y @ b + 3 * b, x, lambda _, b: jnp.linalg.solve(y + 3 * jnp.eye(b.shape[0]), b), symmetric=True)
lax.custom_root(lambda z: x @ z - r, r, lambda _, z: jnp.linalg.solve(x, r), lambda g, b: jnp.linalg.solve(jax.jacobian(g)(b), b))
jax.scipy.sparse.linalg.cg(lambda b: x @ (x.T @ b) + 3 * b, r, maxiter=3)[0]
""",
    "custom derivatives": """
custom.{staged}(custom.{derivative})(x)
custom.{staged}(custom.{derivative})(x) * y
custom.{derivative}(s * x)
custom.{staged}(custom.{derivative})(x @ m)
custom.{staged}(lambda x: custom.{derivative}(jnp.sin(x)))(x)
custom.{staged}(jax.nn.{activation})(x)
jax.nn.{activation}(custom.{derivative}(x))
jnp.frexp(x)[0]
jnp.ldexp(x, 2)
""",
    "numbers": """
x / {bad}
x * {bad}
{bad} * x
{bad} / x
x + {bad}
{bad} - x
x**{bad}
s * {bad} * x
x / jnp.zeros(())
x / (s - s)
x * jnp.array({bad}, x.dtype)
x / (y * {bad})
jnp.where(x > s, x, {bad})
jnp.where(x == 0, {bad}, x)
jnp.where(y > 0, x, {bad})
jnp.maximum(x, {bad})
jnp.clip(x, {bad}, 1)
x @ (m * {bad})
x @ m.at[0].set({bad})
(x * {bad}).sum({a})
x.at[{n}].set({bad})
x.at[{n}].multiply({bad})
y.at[0].set({bad}) * x
x / y.at[0].set(ZERO)
x + y.at[..., 0].set({bad})
x / x
x / abs(x)
jnp.log(x)
jnp.sqrt(x - x)
""",
    "scalars and shapes": """
lax.select(True, x, y)
lax.select(False, x, v)
lax.select_n(True, x, y)
lax.select_n(False, x, -x)
lax.select_n(1, x, y, x)
lax.select_n(np.bool_(True), x, y)
jnp.where(True, x, y)
lax.cond(True, lambda x: x, lambda x: 2 * x, x)
lax.mul(x, 2.0)
lax.sub(1.0, x)
lax.div(x, 2.0)
lax.max(x, 0.5)
lax.clamp(-0.5, x, 0.5)
x * True
x + np.float32(2)
np.ones(x.shape) * x
2 ** x
x // 2
x % 0.75
1 / (2 + x * x)
divmod(x, 2)[1]
x / k
x * k
k * x
k / x
x - k
jnp.where(k > 0, x, k)
jax.vmap(lambda k: x / k)(k)
jax.vmap(lambda k: x / k.reshape(()))(k)
jax.vmap(lambda k: k.reshape(()) * x)(k)
jax.vmap(lambda k: (x * k.reshape(())) @ m)(k)
jnp.broadcast_to(x[:1], x.shape)
jnp.broadcast_to(x[..., :1], (2, *x.shape))
jnp.broadcast_to(x[:1, ..., :1], x.shape)
jnp.broadcast_to(x[..., None], (*x.shape, 2))
lax.broadcast_in_dim(x[:1], (3, *x.shape[1:]), range(x.ndim))
lax.broadcast_in_dim(x, (*x.shape, 2), range(x.ndim))
x[..., :1] * y
x[:1] + y
x[:0]
x[..., :0]
x[:0].sum({a})
x[..., :0] @ x[:0]
e @ x
x @ e.T
jnp.concatenate([x, x[:0]])
jnp.zeros((0, *x.shape), x.dtype) * x
jax.vmap(lambda k: k.sum() * x)(k[:0])
x.at[:0].set(s)
x[jnp.zeros(0, int)]
x.reshape(-1)[:1] * x
""",
}
