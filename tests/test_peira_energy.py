"""Energy, gradient, Hessian products and the minimum against definitions, autograd and worked values."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from oracles import auxiliary_by_loops, population_energy_by_loops
from peira_krepes.peira.cca import JointTable, estimated_table
from peira_krepes.peira.energy import auxiliary_loss, energy, gradient, hessian_product, lipschitz_constant, minimum_energy, predictor
from peira_krepes.peira.laws import hypercube, prescribed
from test_peira_cca import binary_pair, random_table, tied_table


def normal(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def minimise(B, ridge, dim, seed=0, starts=3):
    "The lowest energy that a quasi-Newton method reaches."
    from scipy.optimize import minimize
    def objective(w):
        W = torch.from_numpy(w.reshape(len(B), dim))
        return energy(W, B, ridge).item(), gradient(W, B, ridge).numpy().ravel()
    rng = np.random.default_rng(seed)
    return min(minimize(objective, rng.normal(size=len(B) * dim), jac=True, method="BFGS", options={"gtol": 1e-10}).fun for _ in range(starts))


@pytest.mark.parametrize("tied, center", [(False, False), (True, False), (False, True), (True, True)])
def test_energy_is_the_definition(tied, center):
    table = random_table(4, 4, seed=1)
    B = table.operator(tied=tied, center=center)
    W = normal(len(B), 3, seed=2)
    if center: # the centred operator equals the centred definition where embeddings have mean zero
        constants = [((table.p + table.q) / 2).sqrt()] if tied else [torch.cat([table.p.sqrt(), 0 * table.q]), torch.cat([0 * table.p, table.q.sqrt()])]
        for v in constants: W = W - torch.outer(v, v @ W)
    U, V = table.embeddings(W, tied=tied)
    if tied and center: # pooled means vanish; the definition removes each view's own, equal to them only for equal marginals
        table = JointTable((table.pi + table.pi.T) / 2)
        U, V = table.embeddings(W, tied=True)
    assert energy(W, B, 0.3).item() == pytest.approx(population_energy_by_loops(table.pi, U, V, 0.3, center), abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 4), seed=st.integers(0, 10**6), ridge=st.sampled_from([0.05, 0.3, 1.5]), scale=st.sampled_from([0.0, 1e-6, 1.0, 30.0]))
def test_derivatives_against_autograd(k, seed, ridge, scale):
    B = random_table(3, 4, seed).operator(center=bool(seed % 2))
    W, H = (scale * normal(7, k, seed=seed)).requires_grad_(), normal(7, k, seed=seed + 1)
    by_autograd, = torch.autograd.grad(energy(W, B, ridge), W)
    torch.testing.assert_close(gradient(W.detach(), B, ridge), by_autograd, rtol=1e-10, atol=1e-10)
    second = torch.autograd.functional.hvp(lambda W: energy(W, B, ridge), W.detach(), H)[1]
    torch.testing.assert_close(hessian_product(W.detach(), B, ridge, H), second, rtol=1e-10, atol=1e-10)


def test_derivatives_are_finite_at_collapsed_and_repeated_spectra():
    B = random_table(3, 3).operator()
    column = normal(6, 1)
    for W in (torch.zeros(6, 3, dtype=torch.float64), column.repeat(1, 3), torch.cat([column, torch.zeros(6, 2, dtype=torch.float64)], 1), torch.eye(6, 3, dtype=torch.float64)):
        W = W.clone().requires_grad_()
        by_autograd, = torch.autograd.grad(energy(W, B, 0.1), W)
        torch.testing.assert_close(by_autograd, gradient(W.detach(), B, 0.1), rtol=0, atol=1e-10)
        assert torch.isfinite(hessian_product(W.detach(), B, 0.1, normal(6, 3))).all()


def test_rotation_invariance():
    B, W = random_table(3, 4).operator(), normal(7, 3)
    R, _ = torch.linalg.qr(normal(3, 3, seed=4))
    torch.testing.assert_close(energy(W @ R, B, 0.2), energy(W, B, 0.2), rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient(W @ R, B, 0.2), gradient(W, B, 0.2) @ R, rtol=0, atol=1e-10)
    torch.testing.assert_close(hessian_product(W @ R, B, 0.2, W[:, [1, 0, 2]] @ R), hessian_product(W, B, 0.2, W[:, [1, 0, 2]]) @ R, rtol=0, atol=1e-10)


def dense_hessian(W, B, ridge, loss=energy):
    return torch.autograd.functional.hessian(lambda w: loss(w, B, ridge), W).reshape(W.numel(), W.numel())


def test_whole_hessian_at_degenerate_points():
    B, column = random_table(3, 3).operator(), normal(6, 1)
    for W in (0 * normal(6, 3), column.repeat(1, 3), torch.cat([column, 0 * normal(6, 2)], 1), torch.eye(6, 3, dtype=torch.float64), 1e4 * normal(6, 3)):
        ours = torch.stack([hessian_product(W, B, 0.1, e.view(6, 3)).flatten() for e in torch.eye(18, dtype=torch.float64)], 1)
        torch.testing.assert_close(ours, dense_hessian(W, B, 0.1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [0.01, 0.3, 7.0])
def test_scaling_symmetry(factor):
    "Only correlations over the squared ridge matter."
    B, W = random_table(3, 4).operator(), normal(7, 3)
    torch.testing.assert_close(energy(factor**0.25 * W, factor * B, factor**0.5 * 0.2), factor * energy(W, B, 0.2), rtol=1e-10, atol=0)
    O, _ = torch.linalg.qr(normal(7, 7, seed=9))
    torch.testing.assert_close(energy(O @ W, O @ B @ O.T, 0.2), energy(W, B, 0.2), rtol=0, atol=1e-10)
    c = torch.linalg.eigvalsh(B) * factor / max(1, factor)
    assert minimum_energy(c / 4, 0.1, 2) == pytest.approx(minimum_energy(c, 0.2, 2) / 4, abs=1e-10)


def test_hessian_is_symmetric():
    B, W, H, G = random_table(3, 4).operator(), normal(7, 3), normal(7, 3, seed=1), normal(7, 3, seed=2)
    assert (G * hessian_product(W, B, 0.2, H)).sum().item() == pytest.approx((H * hessian_product(W, B, 0.2, G)).sum().item(), abs=1e-10)


# ---- the auxiliary loss ----

@pytest.mark.parametrize("tied", [False, True])
def test_auxiliary_loss_is_the_definition(tied):
    table = random_table(4, 4, seed=1)
    B = table.operator(tied=tied, center=False)
    W, frozen = normal(len(B), 3), normal(len(B), 3, seed=1)
    by_loops = auxiliary_by_loops(table.pi, *table.embeddings(W, tied), *table.embeddings(frozen, tied), 0.3)
    assert auxiliary_loss(W, B, 0.3, frozen).item() == pytest.approx(by_loops, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 4), seed=st.integers(0, 10**6), ridge=st.sampled_from([0.05, 0.3, 1.5]), scale=st.sampled_from([0.0, 1e-6, 1.0, 30.0]))
def test_auxiliary_loss_has_the_gradient_and_half_the_inner_product(k, seed, ridge, scale):
    B = random_table(3, 4, seed).operator(center=bool(seed % 2))
    W = (scale * normal(7, k, seed=seed)).requires_grad_()
    value = auxiliary_loss(W, B, ridge)
    by_autograd, = torch.autograd.grad(value, W)
    slope = gradient(W.detach(), B, ridge)
    torch.testing.assert_close(by_autograd, slope, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(value.detach(), (W.detach() * slope).sum() / 2, rtol=1e-10, atol=1e-10)


def test_auxiliary_loss_is_no_energy():
    "Zero at every stationary point, while the energies differ; a saddle where the energy has its minimum; the energy's Hessian only at collapse."
    from peira_krepes.peira.critical_points import critical_points
    B = tied_table(0.8, 0.5).operator(tied=True)
    points = critical_points(B, 0.2, 2)
    for point in points: assert abs(auxiliary_loss(point.W, B, 0.2)) < 1e-12
    assert points[0].energy < -0.3
    best = points[0].W
    curvature = torch.linalg.eigvalsh(dense_hessian(best, B, 0.2, lambda w, B, ridge: auxiliary_loss(w, B, ridge, best)))
    c = torch.tensor([0.8, 0.5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(curvature, ((c[:2, None] - c) / c[:2, None].sqrt()).flatten().sort().values, rtol=0, atol=1e-10)
    assert torch.linalg.eigvalsh(dense_hessian(best, B, 0.2))[0] > -1e-10 and curvature[0] < -0.4
    zero = 0 * best
    torch.testing.assert_close(dense_hessian(zero, B, 0.2, lambda w, B, ridge: auxiliary_loss(w, B, ridge, zero)), dense_hessian(zero, B, 0.2), rtol=0, atol=1e-10)


def test_auxiliary_loss_does_not_differentiate_what_is_frozen():
    B, W = random_table(2, 3).operator(), normal(5, 2).requires_grad_()
    frozen = normal(5, 2, seed=1).requires_grad_()
    auxiliary_loss(W, B, 0.1, frozen).backward()
    assert frozen.grad is None and W.grad is not None
    with pytest.raises(ValueError, match=r"W_frozen must have shape \(5, 2\)"): auxiliary_loss(W, B, 0.1, frozen[:, :1])
    with pytest.raises(ValueError, match="W_frozen and B must share dtype"): auxiliary_loss(W, B, 0.1, frozen.float())


def test_predictor_convention():
    Sigma, N = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=torch.float64), torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    P = predictor(Sigma, N, 0.5)
    assert P[0, 1].item() == pytest.approx(0.12, abs=1e-12) and P[1, 0].item() == pytest.approx(0.2, abs=1e-12)


def test_predictor_minimises_the_ridge_regression():
    table = random_table(3, 4, seed=6)
    B, W = table.operator(center=False), normal(7, 2)
    U, V = table.embeddings(W)
    P = predictor(W.T @ B @ W, W.T @ W, 0.3).clone().requires_grad_()
    loss = 0.3 * P.square().sum() + sum(table.pi[x, y] * ((V[y] - P @ U[x]).square().sum() + (U[x] - P @ V[y]).square().sum()) for x in range(3) for y in range(4))
    slope, = torch.autograd.grad(loss, P)
    assert slope.abs().max() < 1e-10


@pytest.mark.parametrize("rho, center, tied, dim, expected", [
    (0.25, True, False, 1, -0.08), (0.25, False, False, 2, -0.485), (-0.8, True, False, 1, -0.3155573), (-0.8, True, True, 1, 0.0),
    (0.0, False, False, 1, -0.405), (0.0, False, True, 1, -0.405), (0.0, True, False, 1, 0.0)])
def test_worked_minima(rho, center, tied, dim, expected):
    B = binary_pair(rho).operator(tied=tied, center=center)
    assert minimum_energy(torch.linalg.eigvalsh(B), 0.1, dim) == pytest.approx(expected, abs=5e-8)
    assert minimise(B, 0.1, dim) == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
@pytest.mark.parametrize("ridge", [0.1, 0.4, 0.95])
def test_minimum_against_an_optimiser(ridge, dim):
    table = random_table(4, 5, seed=11)
    assert minimise(table.operator(), ridge, dim) == pytest.approx(minimum_energy(table.canonical_correlations(), ridge, dim), abs=1e-8)


def test_minimum_by_hand():
    assert minimum_energy([0.8, 0.5], 0.2, 2) == pytest.approx(-0.3696932, abs=1e-7)
    assert minimum_energy([0.5, 0.8], 0.2, 2) == minimum_energy(torch.tensor([0.8, 0.5, -0.9, 0.0], dtype=torch.float64), 0.2, 7)
    assert minimum_energy(np.array([0.8, -0.9]), 0.2, 2) == minimum_energy([0.8], 0.2, 1)
    assert minimum_energy([0.04, 0.01], 0.2, 2) == 0.0 and minimum_energy([], 0.2, 1) == 0.0


def test_lipschitz_constant_is_sharp_at_collapse_and_never_exceeded():
    for seed, ridge in ((0, 0.1), (1, 0.5), (2, 2.0)):
        B = random_table(3, 3, seed).operator()
        bound = lipschitz_constant(B, ridge)
        hessian = lambda W: torch.linalg.eigvalsh(torch.autograd.functional.hessian(lambda w: energy(w, B, ridge), W).reshape(12, 12)).abs().max().item()
        assert hessian(torch.zeros(6, 2, dtype=torch.float64)) == pytest.approx(bound, abs=1e-10)
        assert max(hessian(scale * normal(6, 2, seed=s)) for s in range(10) for scale in (0.03, 0.2, 1.0)) <= bound + 1e-10
        assert ridge > 1 or bound <= 4 / ridge


@settings(max_examples=40, deadline=None)
@given(K=st.integers(1, 6), k=st.integers(1, 6), seed=st.integers(0, 10**6), ridge=st.sampled_from([0.05, 0.4, 2.0]), size=st.floats(0.01, 10))
def test_curvature_beyond_the_ridge_never_exceeds_norm_over_ridge(K, k, seed, ridge, size):
    "For every symmetric B, here reflections, the worst kind: all eigenvalues of the Hessian minus the ridge lie within the norm of B over the ridge."
    O, _ = torch.linalg.qr(normal(K, K, seed=seed))
    B = O @ torch.diag(torch.where(normal(K, seed=seed + 1) > 0, 1.0, -1.0).double()) @ O.T
    W = size * ridge**0.5 * normal(K, k, seed=seed + 2)
    spectrum = torch.linalg.eigvalsh(dense_hessian(W, (B + B.T) / 2, ridge)) - ridge
    assert spectrum.abs().max() <= 1 / ridge + 1e-10


def test_the_step_that_never_raises_the_energy():
    table = prescribed([0.8, 0.5, 0.1])
    B = table.operator()
    L, W = lipschitz_constant(B, 0.2), 2 * normal(8, 2)
    for _ in range(100):
        slope = gradient(W, B, 0.2)
        new = W - slope / L
        assert energy(new, B, 0.2) <= energy(W, B, 0.2) - slope.square().sum() / (2 * L) + 1e-12
        W = new
    assert L == pytest.approx(0.2 + 0.8 / 0.2, abs=1e-10)
    H = torch.linalg.eigh(B)[1][:, :1].repeat(1, 2)
    torch.testing.assert_close(hessian_product(0 * H, B, 0.2, H), L * H, rtol=0, atol=1e-10)
    assert energy(1e-3 * H - 2.2 / L * gradient(1e-3 * H, B, 0.2), B, 0.2) > energy(1e-3 * H, B, 0.2) # beyond 2/L it rises


@pytest.mark.parametrize("n, k", [(3, 5), (5, 5), (9, 5)])
def test_a_batch_in_which_nothing_recurs_is_memorised(n, k):
    batch = estimated_table(list(range(n)), list(reversed(range(n))))
    assert minimum_energy(torch.linalg.eigvalsh(batch.operator(center=False)).clamp(-1, 1), 0.1, k) == pytest.approx(-min(n, k) * 0.81 / 2, abs=1e-10)
    assert minimise(batch.operator(center=False), 0.1, k, starts=1) == pytest.approx(-min(n, k) * 0.81 / 2, abs=1e-8)
    assert minimum_energy(batch.canonical_correlations(), 0.1, k) == pytest.approx(-min(n - 1, k) * 0.81 / 2, abs=1e-10)


def test_minimum_on_the_hypercube():
    "Parities of j bits are kept while rho^j exceeds the squared ridge: 3 single bits and 3 pairs, not the triple."
    assert minimum_energy(hypercube(3, 0.4).canonical_correlations(), 0.3, 7) == pytest.approx(-(3 * (0.4**0.5 - 0.3) ** 2 + 3 * 0.1**2) / 2, abs=1e-10)


@pytest.mark.parametrize("door", [energy, gradient, auxiliary_loss, lambda W, B, ridge: hessian_product(W, B, ridge, W)])
def test_refusals(door):
    B, W = random_table(2, 3).operator(), normal(5, 2)
    for ridge in (0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="ridge"): door(W, B, ridge)
    with pytest.raises(TypeError, match="ridge"): door(W, B, "0.1")
    with pytest.raises(ValueError, match=r"W must have shape \(5, d\); got \(4, 2\)"): door(W[:4], B, 0.1)
    with pytest.raises(ValueError, match="B must be symmetric"): door(W, torch.triu(B), 0.1)
    with pytest.raises(ValueError, match="B must be square"): door(W, B[:4], 0.1)
    with pytest.raises(ValueError, match="share dtype"): door(W.float(), B, 0.1)
    with pytest.raises(ValueError, match="finite.*row 2"): door(torch.where(torch.arange(5)[:, None] == 2, torch.nan, W), B, 0.1)


def test_more_refusals():
    B, W = random_table(2, 3).operator(), normal(5, 2)
    with pytest.raises(ValueError, match=r"H must have shape \(5, 2\)"): hessian_product(W, B, 0.1, W[:, :1])
    for arguments, words in ((([1.5], 0.1, 1), "lie in"), (([[0.5]], 0.1, 1), "one-dimensional"), (([0.5], 0.1, 0), "dim"), (([0.5], 0, 1), "ridge"), (([float("nan")], 0.1, 1), "lie in")):
        with pytest.raises(ValueError, match=words): minimum_energy(*arguments)
    with pytest.raises(ValueError, match="one size"): predictor(torch.eye(2), torch.eye(3), 0.1)
    with pytest.raises(ValueError, match="N must be symmetric"): predictor(torch.eye(2), torch.triu(torch.ones(2, 2)), 0.1)


def test_float32_agrees_to_its_precision():
    B, W = random_table(3, 4).operator(), normal(7, 2)
    assert energy(W.float(), B.float(), 0.1).dtype == torch.float32
    torch.testing.assert_close(gradient(W.float(), B.float(), 0.1).double(), gradient(W, B, 0.1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(dtype):
    B, W = random_table(2, 3).operator().to(dtype), normal(5, 2).to(dtype)
    for call in (lambda: energy(W, B, 0.1), lambda: gradient(W, B, 0.1), lambda: auxiliary_loss(W, B, 0.1), lambda: lipschitz_constant(B, 0.1), lambda: predictor(B, B, 0.1)):
        with pytest.raises(TypeError, match="float32 or float64"): call()


def test_arrays_are_taken():
    B, W = random_table(2, 3).operator(), normal(5, 2)
    for door in (energy, gradient, auxiliary_loss): torch.testing.assert_close(door(W.numpy(), B.numpy(), 0.1), door(W, B, 0.1), rtol=0, atol=0)
