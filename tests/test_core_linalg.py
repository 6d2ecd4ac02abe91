"""Solvers: right answers, honest residuals, and a clear word when there is no answer."""
import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg as sla
import torch
from hypothesis import given, settings, strategies as st

from oracles import cholesky_solve_by_loops
from peira_krepes.core import linalg
from peira_krepes.core.linalg import Solve, SolveError, cg, solve_spd, symmetric, upcast


def spd(n, seed=0, dtype=torch.float64, floor=1.0):
    G = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (G @ G.T / n + floor * torch.eye(n)).to(dtype)


def vector(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def times(A): return lambda x: A @ x


def true_residual(A, b, x): return float(torch.linalg.vector_norm(b - A @ x) / torch.linalg.vector_norm(b))


# ---- conjugate gradients: answers ----

def test_three_by_three():
    "The size at which another library's conjugate gradients returned NaN."
    A = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
    s = cg(times(A), torch.tensor([1.0, 2.0, 3.0]), tol=1e-6)
    np.testing.assert_allclose(s.value, cholesky_solve_by_loops(A, [1, 2, 3]), rtol=0, atol=1e-5)
    assert s.converged and s.iterations <= 4 and not s.negative_curvature


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 12), k=st.integers(1, 3), seed=st.integers(0, 10**6), scale=st.sampled_from([1e-200, 1e-3, 1.0, 1e150]))
def test_against_a_direct_solve(n, k, seed, scale):
    A, B = spd(n, seed), vector(n, k, seed=seed) * scale
    s = cg(times(A), B, tol=1e-11)
    torch.testing.assert_close(s.value / scale, torch.linalg.solve(A, B / scale), rtol=1e-8, atol=1e-8)
    assert s.converged and s.residual <= 1e-11 and len(s.history) == s.iterations + 1 and s.history[0] == 1


@pytest.mark.parametrize("scale, operator_scale", [(1e-30, 1.0), (1e-30, 1e-30), (1.0, 1e-30), (1.0, 1e30), (1e30, 1e30), (1e-6, 1e30)])
def test_extreme_scales_in_float32(scale, operator_scale):
    "Squares of these numbers underflow or overflow in float32."
    A, b = spd(5, dtype=torch.float32), vector(5, dtype=torch.float32)
    s = cg(lambda x: operator_scale * (A @ x), scale * b, tol=1e-5)
    torch.testing.assert_close(s.value.double() / scale * operator_scale, torch.linalg.solve(A, b).double(), rtol=1e-4, atol=1e-4)


def test_against_scipy():
    A, b = spd(60, floor=0.01), vector(60)
    theirs, info = sla.cg(A.numpy(), b.numpy(), rtol=1e-10, maxiter=1000)
    s = cg(times(A), b, tol=1e-10)
    assert info == 0
    np.testing.assert_allclose(s.value, theirs, rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 2)])
def test_all_entries_of_b_are_one_vector(shape):
    b = vector(*shape)
    A = spd(b.numel())
    s = cg(lambda x: (A @ x.reshape(-1)).reshape(shape), b, tol=1e-11)
    torch.testing.assert_close(s.value.reshape(-1), torch.linalg.solve(A, b.reshape(-1)), rtol=1e-8, atol=1e-8)


def test_non_contiguous_right_hand_side():
    A, B = spd(5), vector(3, 5).T
    torch.testing.assert_close(cg(times(A), B, tol=1e-11).value, torch.linalg.solve(A, B), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [6, 8, 12])
def test_hilbert_matrix_to_the_residual(n):
    A, b = torch.from_numpy(scipy.linalg.hilbert(n)), torch.ones(n, dtype=torch.float64)
    s = cg(times(A), b, tol=1e-8, max_iter=3000)
    assert s.converged and s.residual <= 1e-8 and true_residual(A, b, s.value) <= 2e-8 # entries of the solution reach 1e8: rounding alone is 1e-8


def test_singular_but_consistent():
    G = vector(8, 3)
    A = G @ G.T
    b = A @ vector(8, seed=2)
    s = cg(times(A), b, tol=1e-10)
    assert s.converged
    torch.testing.assert_close(s.value, torch.linalg.pinv(A, hermitian=True, rtol=1e-10) @ b, rtol=1e-7, atol=1e-7)


def test_zero_right_hand_side_calls_nothing():
    def never(x): raise AssertionError("called")
    s = cg(never, torch.zeros(2, 3))
    assert s.converged and s.iterations == 0 and s.residual == 0 and torch.equal(s.value, torch.zeros(2, 3))


def test_the_residual_is_relative_and_tol_is_kept():
    A = spd(50, floor=1e-3)
    for tol in (1e-2, 1e-5, 1e-9):
        for scale in (1e-8, 1e8):
            s = cg(times(A), vector(50) * scale, tol=tol)
            assert true_residual(A, vector(50) * scale, s.value) <= tol
    assert cg(times(A), vector(50), tol=1e-2).iterations < cg(times(A), vector(50), tol=1e-9).iterations


def test_preconditioner_saves_iterations_and_keeps_the_answer():
    d = torch.logspace(0, 6, 80, dtype=torch.float64)
    A, b = torch.diag(d) + 0.1, torch.ones(80, dtype=torch.float64)
    plain, scaled = cg(times(A), b, tol=1e-10, max_iter=9999), cg(times(A), b, tol=1e-10, preconditioner=lambda r: r / d)
    torch.testing.assert_close(plain.value, scaled.value, rtol=1e-8, atol=1e-8)
    assert scaled.iterations * 4 < plain.iterations
    exact = cg(times(A), b, tol=1e-10, preconditioner=lambda r: torch.linalg.solve(A, r))
    assert exact.iterations == 1


def test_buffers_reused_by_the_caller_do_no_harm():
    A, b = spd(6), vector(6)
    buffers = [torch.empty(6, dtype=torch.float64) for _ in range(2)]
    s = cg(lambda x: torch.mv(A, x, out=buffers[0]), b, tol=1e-11, preconditioner=lambda r: torch.div(r, A.diagonal(), out=buffers[1]))
    torch.testing.assert_close(s.value, torch.linalg.solve(A, b), rtol=1e-8, atol=1e-8)


def test_no_graph_leaves_and_operators_may_use_autograd():
    w = vector(5).requires_grad_()
    f = lambda w: (w**2).sum() + (w.sum())**2
    hessian = lambda v: torch.autograd.functional.hvp(f, w, v)[1]
    b = vector(5, seed=4).requires_grad_()
    s = cg(hessian, b, tol=1e-10)
    assert not s.value.requires_grad
    torch.testing.assert_close(s.value, torch.linalg.solve(2 * torch.eye(5) + 2 * torch.ones(5, 5), b.detach().float()).double(), rtol=0, atol=1e-5)


# ---- conjugate gradients: failures ----

def test_float32_does_not_claim_what_it_has_not():
    "Residuals reported in float32 are those of the value returned, and a stalled solve is unsolved."
    A64 = torch.from_numpy(scipy.linalg.hilbert(8)) + 1e-7 * torch.eye(8)
    A, b = A64.float(), torch.ones(8)
    with pytest.raises(SolveError, match="cg did not solve") as e: cg(times(A), b, tol=1e-7)
    s = e.value.solve
    assert isinstance(s, Solve) and not s.converged and s.residual > 1e-7
    assert 0.5 < s.residual / true_residual(A.double(), b.double(), s.value.double()) < 2


def test_restarts_reach_below_the_drift_of_one_sweep():
    "A tolerance near the limit of float32: the first sweep's recurrence claims it, the true residual gets there after a restart."
    A, b = spd(200, floor=0.01, dtype=torch.float32), vector(200, dtype=torch.float32)
    calls = []
    s = cg(lambda x: calls.append(1) or A @ x, b, tol=1e-5)
    assert s.converged and true_residual(A.double(), b.double(), s.value.double()) <= 1.1e-5 and len(calls) > s.iterations + 1
    first = next(k for k, r in enumerate(s.history) if r <= 1e-5)
    once = cg(times(A), b, tol=1e-5, max_iter=first, on_failure="return") # what a solver without restarts would have returned
    assert once.history[-1] <= 1e-5 < once.residual and not once.converged


def test_rounding_limit_is_named():
    A, b = spd(200, floor=0.01, dtype=torch.float32), vector(200, dtype=torch.float32)
    with pytest.raises(SolveError, match="rounding limits the residual"): cg(times(A), b, tol=1e-9)


@pytest.mark.parametrize("eigenvalues", [[1.0, -1.0], [5.0, 2.0, -1e-3], [-1.0, -2.0], [3.0, 1.0, 1.0, -0.239]])
def test_an_indefinite_operator_never_claims_success(eigenvalues):
    n = len(eigenvalues)
    Q, _ = torch.linalg.qr(vector(n, n))
    A = Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T
    b = A @ torch.linalg.solve(A, -Q[:, -1] + 0.1 * Q.sum(1))
    s = cg(times(A), b, on_failure="return")
    assert s.converged is False or true_residual(A, b, s.value) <= 1e-6
    direction = Q[:, -1]
    s = cg(times(A), direction, on_failure="return") # the first direction is the negative one
    assert not s.converged and s.negative_curvature and torch.equal(s.value, torch.zeros_like(direction))
    with pytest.raises(SolveError, match="negative curvature.*add damping"): cg(times(A), direction)


def test_zero_curvature_of_an_indefinite_operator_is_negative_curvature():
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    s = cg(times(swap), torch.tensor([1.0, 0.0]), on_failure="return")
    assert s.negative_curvature and not s.converged


def test_inconsistent_singular_system():
    A = torch.diag(torch.tensor([2.0, 1.0, 0.0]))
    with pytest.raises(SolveError, match="singular.*leaves its range") as e: cg(times(A), torch.ones(3))
    assert not e.value.solve.negative_curvature
    with pytest.raises(SolveError, match="singular"): cg(times(torch.zeros(3, 3)), torch.ones(3))


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_from_the_operator_stops_at_the_last_finite_iterate(after, poison):
    A, calls = spd(20, floor=0.01), []
    def matvec(x):
        calls.append(1)
        return A @ x * (poison if len(calls) > after else 1.0)
    s = cg(matvec, vector(20), on_failure="return")
    assert not s.converged and s.iterations == after and torch.isfinite(s.value).all() and len(calls) <= after + 2
    calls.clear()
    with pytest.raises(SolveError, match="NaN or infinity"): cg(matvec, vector(20))


def test_bad_preconditioner():
    with pytest.raises(SolveError, match="preconditioner is not positive definite"): cg(times(spd(4)), vector(4), preconditioner=lambda r: -r)
    with pytest.raises(SolveError, match="preconditioner|NaN"): cg(times(spd(4)), vector(4), preconditioner=lambda r: r * float("nan"))


def test_iteration_limits(monkeypatch):
    A, b = spd(300, floor=1e-4), vector(300)
    s = cg(times(A), b, max_iter=3, on_failure="return")
    assert s.iterations == 3 and not s.converged and s.residual == pytest.approx(true_residual(A, b, s.value), rel=1e-9)
    with pytest.raises(SolveError, match=r"relative residual .* against tol 1.0e-06 after 3 iterations \(300 unknowns, torch.float64\).*raise max_iter"):
        cg(times(A), b, max_iter=3)
    hard = torch.logspace(0, 14, 30, dtype=torch.float64)
    assert cg(lambda x: hard * x, torch.ones(30, dtype=torch.float64), tol=1e-12, on_failure="return").iterations <= 300
    monkeypatch.setattr(linalg, "MAX_ITERATIONS", 7)
    assert cg(lambda x: hard * x, torch.ones(30, dtype=torch.float64), tol=1e-12, on_failure="return").iterations == 7


def test_the_three_ways_to_hear_about_a_failure():
    A, b = spd(50, floor=1e-3), vector(50)
    with pytest.warns(RuntimeWarning, match="cg did not solve"): warned = cg(times(A), b, max_iter=2, on_failure="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        returned = cg(times(A), b, max_iter=2, on_failure="return")
    with pytest.raises(SolveError) as e: cg(times(A), b, max_iter=2)
    for s in (warned, returned, e.value.solve): assert not s.converged and s.iterations == 2 and s.residual > 1e-6


def test_cg_arguments():
    b, same = torch.ones(3), lambda x: x
    for wrong, error, words in ((b.half(), TypeError, "float32 or float64"), (b.long(), TypeError, "float32 or float64"), ([1.0], TypeError, "b must"),
                                (b * float("nan"), ValueError, "finite"), (b[:0], ValueError, "non-empty")):
        with pytest.raises(error, match=words): cg(same, wrong)
    for options, error, words in (({"tol": 0}, ValueError, "tol"), ({"tol": 1}, ValueError, "tol"), ({"max_iter": 0}, ValueError, "max_iter"),
                                  ({"max_iter": 2.5}, TypeError, "max_iter"), ({"on_failure": "ignore"}, ValueError, "'raise', 'warn', 'return'")):
        with pytest.raises(error, match=words): cg(same, b, **options)
    for bad in (lambda x: x[:2], lambda x: x.double(), lambda x: None, lambda x: 1.0):
        with pytest.raises(ValueError, match="matvec must return a tensor like b"): cg(bad, b)
    with pytest.raises(ValueError, match="preconditioner must return"): cg(same, b, preconditioner=lambda r: r[:1])


# ---- Cholesky and the small tools ----

@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, None), (torch.bfloat16, None)])
def test_solve_spd_against_plain_loops(dtype, tol):
    A, b = spd(6).to(dtype), vector(6).to(dtype)
    x = solve_spd(A, b)
    assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and x.shape == b.shape
    np.testing.assert_allclose(x, cholesky_solve_by_loops(A.double(), b.double()), rtol=0, atol=tol or 1e-4)
    B = vector(6, 2).to(dtype)
    torch.testing.assert_close(solve_spd(A, B)[:, 1], solve_spd(A, B[:, 1]), rtol=1e-5, atol=1e-6)


def test_solve_spd_gradient():
    A, B = spd(4).requires_grad_(), vector(4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda A, B: solve_spd(symmetric(A), B), (A, B))


@pytest.mark.parametrize("A", [torch.eye(5, dtype=torch.float64), torch.diag(torch.tensor([1.0, 1, 1, 2, 2]).double()), 1e-8 * torch.eye(5).double()])
def test_gradient_is_exact_at_repeated_eigenvalues(A):
    A = A.clone().requires_grad_()
    gradient, = torch.autograd.grad(solve_spd(A, torch.eye(5, dtype=torch.float64)).trace(), A)
    inverse = torch.linalg.inv(A.detach())
    torch.testing.assert_close(gradient, -inverse @ inverse, rtol=1e-10, atol=0)


def test_solve_spd_refusals():
    A, b = spd(3), vector(3)
    Q, _ = torch.linalg.qr(vector(3, 3))
    indefinite = Q @ torch.diag(torch.tensor([2.0, 1.0, -0.239], dtype=torch.float64)) @ Q.T
    with pytest.raises(ValueError, match=r"positive definite; its smallest eigenvalue is -2.390e-01"): solve_spd(indefinite, b)
    with pytest.raises(ValueError, match="smallest eigenvalue is 0.000e\\+00"): solve_spd(torch.zeros(3, 3), b.float())
    with pytest.raises(ValueError, match="finite"): solve_spd(A * float("nan"), b)
    with pytest.raises(ValueError, match="symmetric"): solve_spd(A + torch.triu(0.1 * torch.ones(3, 3), 1), b)
    for x, y in ((A[:2], b), (A, b[:2]), (A[0], b), (A[None], b)):
        with pytest.raises(ValueError, match=r"A must be \(d,d\)"): solve_spd(x, y)


def test_upcast_and_symmetric():
    for dtype in (torch.float16, torch.bfloat16): assert upcast(torch.ones(2, dtype=dtype)).dtype == torch.float32
    x = torch.ones(2, dtype=torch.float64)
    assert upcast(x) is x
    A = vector(2, 3, 3)
    assert torch.equal(symmetric(A), symmetric(A).mT)
    torch.testing.assert_close(symmetric(A)[1], (A[1] + A[1].T) / 2, rtol=0, atol=0)
