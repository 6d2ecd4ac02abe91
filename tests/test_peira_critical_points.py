"""Every critical point, its energy, its Hessian's spectrum and its stability."""
import warnings
from math import comb

import pytest
import torch

from peira_krepes.peira.cca import JointTable
from peira_krepes.peira.critical_points import critical_points, hessian_inertia, hessian_spectrum, is_strict_saddle
from peira_krepes.peira.energy import energy, gradient, hessian_product, minimum_energy
from test_peira_cca import binary_pair, random_table, tied_table


def diagonal_heavy(rows, columns, seed=0):
    "A table with several strong correlations."
    pi = torch.eye(rows, columns, dtype=torch.float64) + 0.3 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return JointTable(pi / pi.sum())


def dense_hessian(W, B, ridge):
    "By autograd from the energy, which shares nothing with the closed form but the definition."
    n = W.numel()
    return torch.autograd.functional.hessian(lambda w: energy(w, B, ridge), W).reshape(n, n)


CASES = [(diagonal_heavy(4, 4).operator(), 0.2, 2), (diagonal_heavy(4, 5, 1).operator(center=False), 0.3, 3), (diagonal_heavy(4, 4, 2).operator(tied=True), 0.1, 4),
         (tied_table(0.8, 0.5).operator(tied=True), 0.2, 2), (binary_pair(-0.8).operator(), 0.1, 1), (binary_pair(-0.8).operator(tied=True, center=False), 0.1, 2)]


@pytest.mark.parametrize("B, ridge, dim", CASES)
def test_every_listed_point_is_critical_and_has_the_stated_energy_and_spectrum(B, ridge, dim):
    values = torch.linalg.eigvalsh(B).flip(0)
    usable = int((values > ridge**2).sum())
    points = critical_points(B, ridge, dim)
    assert len(points) == len({p.modes for p in points}) == sum(comb(usable, r) for r in range(min(dim, usable) + 1))
    for p in points:
        b = values[list(p.modes)]
        assert p.W.shape == (len(B), dim) and gradient(p.W, B, ridge).abs().max() < 1e-10
        assert p.energy == pytest.approx(-((b.sqrt() - ridge) ** 2).sum().item() / 2, abs=1e-12) == energy(p.W, B, ridge).item()
        torch.testing.assert_close((p.W.T @ p.W).diagonal()[:len(b)], b.sqrt() - ridge, rtol=0, atol=1e-10)
        formula, dense = hessian_spectrum(values, ridge, p.modes, dim), torch.linalg.eigvalsh(dense_hessian(p.W, B, ridge))
        torch.testing.assert_close(formula, dense, rtol=0, atol=1e-8)
        assert len(formula) == len(B) * dim
        assert is_strict_saddle(p.W, B, ridge) == bool(dense[0] < -1e-8)


@pytest.mark.parametrize("B, ridge, dim", CASES)
def test_only_the_top_set_is_no_strict_saddle(B, ridge, dim):
    values = torch.linalg.eigvalsh(B)
    points = critical_points(B, ridge, dim)
    best = points[0]
    assert best.energy == pytest.approx(minimum_energy(values.clamp(-1, 1), ridge, dim), abs=1e-12)
    assert best.modes == tuple(range(min(dim, int((values > ridge**2).sum()))))
    assert [p.modes for p in points if not is_strict_saddle(p.W, B, ridge)] == [best.modes]
    assert [p.energy for p in points] == sorted(p.energy for p in points) and points[-1].modes == ()


def test_zero_modes_of_the_minimum_are_the_orbit():
    B, ridge = diagonal_heavy(5, 5).operator(), 0.2
    values = torch.linalg.eigvalsh(B).flip(0)
    usable = int((values > ridge**2).sum())
    for k in (1, 2, usable, usable + 2):
        r = min(k, usable)
        spectrum = hessian_spectrum(values, ridge, tuple(range(r)), k)
        assert int((spectrum.abs() < 1e-9).sum()) == r * (r - 1) // 2 + r * (k - r) and spectrum.min() > -1e-12


def test_collapse_by_hand():
    spectrum = hessian_spectrum([0.8, 0.5, -0.3, 0.0], 0.2, (), 2)
    torch.testing.assert_close(spectrum, torch.tensor([0.2 - 4, 0.2 - 4, 0.2 - 2.5, 0.2 - 2.5, 0.2, 0.2, 1.7, 1.7], dtype=torch.float64), rtol=0, atol=1e-12)


def test_one_mode_by_hand():
    "b = .25, ridge .1: t = .5, s = .4, own curvature 4*.1*.4/.5; the outside mode .09 has t^2 - b over t."
    torch.testing.assert_close(hessian_spectrum([0.09, 0.25], 0.1, [1], 1), torch.tensor([0.32, 0.32], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(hessian_spectrum([0.16, 0.25], 0.1, [0], 1), torch.tensor([-0.225, 0.3], dtype=torch.float64), rtol=0, atol=1e-12)


def test_binary_pair_worked_values():
    table = binary_pair(0.25)
    W = critical_points(table.operator(), 0.1, 1)[0].W
    U, V = table.embeddings(W)
    N = (W.T @ W).item()
    assert (table.p @ U**2).item() == pytest.approx(0.2, abs=1e-10) and (table.q @ V**2).item() == pytest.approx(0.2, abs=1e-10)
    assert N == pytest.approx(0.4, abs=1e-10) and (W.T @ table.operator() @ W).item() / (N + 0.1) == pytest.approx(0.2, abs=1e-10)


@pytest.mark.parametrize("B, ridge, dim", CASES)
def test_stationarity_identity_and_label_free_spectrum(B, ridge, dim):
    eye = torch.eye(dim, dtype=torch.float64)
    for p in critical_points(B, ridge, dim):
        N, Sigma = p.W.T @ p.W, p.W.T @ B @ p.W
        torch.testing.assert_close(Sigma, N @ (N + ridge * eye) @ (N + ridge * eye), rtol=0, atol=1e-10)
        P = Sigma @ torch.linalg.inv(N + ridge * eye)
        b = torch.linalg.eigvalsh(B).flip(0)[list(p.modes)]
        torch.testing.assert_close(torch.linalg.eigvalsh((P + P.T) / 2).flip(0)[:len(b)].sort().values, (b - ridge * b.sqrt()).sort().values, rtol=0, atol=1e-10)


def test_repeated_eigenvalues():
    "Three states with equal correlations: any direction in the pair is a mode, and the minimum is a connected family."
    B = tied_table(0.5, 0.5).operator(tied=True)
    points = critical_points(B, 0.2, 1)
    assert [p.modes for p in points] == [(0,), (1,), ()] and points[0].energy == pytest.approx(points[1].energy, abs=1e-12)
    assert not is_strict_saddle(points[0].W, B, 0.2) and not is_strict_saddle(points[1].W, B, 0.2) and is_strict_saddle(points[2].W, B, 0.2)
    spectrum = hessian_spectrum([0.5, 0.5, 0.0], 0.2, (0,), 1)
    assert int((spectrum.abs() < 1e-12).sum()) == 1
    torch.testing.assert_close(torch.linalg.eigvalsh(dense_hessian(points[0].W, B, 0.2)), spectrum, rtol=0, atol=1e-8)


def test_rotated_points_keep_their_answer():
    B, ridge, k = CASES[1]
    for i, p in enumerate(critical_points(B, ridge, k)):
        R, _ = torch.linalg.qr(torch.randn(k, k, generator=torch.Generator().manual_seed(i), dtype=torch.float64))
        assert is_strict_saddle(p.W @ R, B, ridge) == is_strict_saddle(p.W, B, ridge)
        torch.testing.assert_close(torch.linalg.eigvalsh(dense_hessian(p.W @ R, B, ridge)), hessian_spectrum(torch.linalg.eigvalsh(B).flip(0), ridge, p.modes, k), rtol=0, atol=1e-8)


def test_nothing_to_learn():
    "With every correlation at most ridge squared only collapse is critical, and it is the global minimum."
    B = random_table(3, 3).operator() * 0.01
    points = critical_points(B, 0.2, 2)
    assert [p.modes for p in points] == [()] and not is_strict_saddle(points[0].W, B, 0.2)
    full = torch.eye(2, dtype=torch.float64)
    W = critical_points(full, 0.1, 2)[0].W # nothing is left outside
    assert not is_strict_saddle(W, full, 0.1)


def test_refusals():
    B, ridge, k = CASES[0]
    values = torch.linalg.eigvalsh(B)
    with pytest.raises(ValueError, match="ridge"): critical_points(B, 0, 2)
    with pytest.raises(ValueError, match="dim must be between 1 and 8"): critical_points(B, 0.1, 9)
    with pytest.raises(ValueError, match="dim"): critical_points(B, 0.1, 0)
    with pytest.raises(ValueError, match="symmetric"): critical_points(torch.triu(B), 0.1, 2)
    with pytest.raises(ValueError, match="critical points, more than 20000"): critical_points(torch.eye(40, dtype=torch.float64), 0.1, 20)
    with pytest.raises(ValueError, match="sorted from the largest"): hessian_spectrum(values, ridge, (0,), k)
    with pytest.raises(ValueError, match="at most dim = 1"): hessian_spectrum(values.flip(0), ridge, (0, 1), 1)
    with pytest.raises(ValueError, match="modes must be distinct"): hessian_spectrum(values.flip(0), ridge, (0, 0), k)
    with pytest.raises(ValueError, match="modes must lie in"): hessian_spectrum(values.flip(0), ridge, (99,), k)
    with pytest.raises(ValueError, match="eigenvalues must be"): hessian_spectrum(torch.ones(2, 2), ridge, (), k)
    with pytest.raises(ValueError, match="W must be a critical point"): is_strict_saddle(torch.ones(8, 2, dtype=torch.float64), B, ridge)
    with pytest.raises(ValueError, match="W must have shape"): is_strict_saddle(torch.ones(3, 2, dtype=torch.float64), B, ridge)


SPECTRA = [([0.8, 0.5, 0.3, 0.0, -0.5, -0.8], 0.2, 2), ([0.6, 0.6, 0.6, 0.1], 0.2, 2), ([0.9, 0.5, 0.5, 0.5, 0.2], 0.3, 3), ([0.7, 0.7, 0.0], 0.1, 3), ([0.5, 0.04, -0.1], 0.2, 2), ([0.3, -0.9], 0.6, 1)]


def in_random_basis(b, seed=0):
    basis, _ = torch.linalg.qr(torch.randn(len(b), len(b), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    B = basis @ torch.diag(torch.tensor(b, dtype=torch.float64)) @ basis.T
    return (B + B.T) / 2


@pytest.mark.parametrize("b, ridge, dim", SPECTRA)
def test_prescribed_spectra_with_negative_zero_and_repeated_eigenvalues(b, ridge, dim):
    "Closed form, counts and dense Hessian at every critical point, rotated."
    B = in_random_basis(b)
    for i, p in enumerate(critical_points(B, ridge, dim)):
        R, _ = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(i), dtype=torch.float64))
        dense = torch.linalg.eigvalsh(dense_hessian(p.W @ R, B, ridge))
        torch.testing.assert_close(hessian_spectrum(b, ridge, p.modes, dim), dense, rtol=0, atol=1e-8)
        counts = hessian_inertia(b, ridge, p.modes, dim)
        assert counts == (int((dense < -1e-7).sum()), int((dense.abs() <= 1e-7).sum()), int((dense > 1e-7).sum()))
        assert is_strict_saddle(p.W @ R, B, ridge) == (counts[0] > 0)


def test_inertia_by_hand():
    assert hessian_inertia([0.8, 0.5, 0.0], 0.2, (0, 1), 2) == (0, 1, 5) and hessian_inertia([0.8, 0.5, 0.0], 0.2, (0, 1), 4) == (0, 5, 7)
    assert hessian_inertia([0.8, 0.5, 0.0], 0.2, (1,), 2) == (2, 1, 3) and hessian_inertia([0.8, 0.5, 0.0], 0.2, (), 2) == (4, 0, 2)
    assert hessian_inertia([0.6, 0.6, 0.6, 0.6, 0.6], 0.2, (0, 1), 2) == (0, 1 + 2 * 3, 3) # O(2) and the planes in five dimensions
    assert hessian_inertia([0.0, 0.8, 0.5], 0.2, (1,), 1) == hessian_inertia([0.8, 0.5, 0.0], 0.2, (0,), 1)
    assert hessian_inertia([0.8, 0.79], 0.2, (1,), 1) == (1, 0, 1) and hessian_inertia([0.8, 0.79], 0.2, (1,), 1, tol=0.1) == (0, 1, 1)


@pytest.mark.parametrize("excess", [0.0, 1e-3, 0.2])
def test_a_ridge_above_the_root_of_the_first_correlation_makes_collapse_the_minimum(excess):
    b, ridge = [0.25, 0.1, 0.0], 0.5 + excess
    points = critical_points(torch.diag(torch.tensor(b, dtype=torch.float64)), ridge, 2)
    assert [p.modes for p in points] == [()] and minimum_energy(b, ridge, 2) == 0
    assert hessian_spectrum(b, ridge, (), 2)[0].item() == pytest.approx(ridge - 0.25 / ridge, abs=1e-12) and hessian_inertia(b, ridge, (), 2)[0] == 0
    W = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert min(energy(scale * W, torch.diag(torch.tensor(b, dtype=torch.float64)), ridge).item() for scale in (1e-3, 0.1, 1.0)) > 0


def test_invariant_sets_of_the_gradient():
    "A kernel vector of W, and an eigenvector orthogonal to it, are the gradient's too."
    B = in_random_basis([0.8, 0.5, 0.2, -0.4])
    g = torch.Generator().manual_seed(1)
    W, x = torch.randn(4, 3, generator=g, dtype=torch.float64), torch.randn(3, 1, generator=g, dtype=torch.float64)
    W = W - W @ x @ x.T / x.square().sum()
    assert (gradient(W, B, 0.2) @ x).abs().max() < 1e-10
    for v in torch.linalg.eigh(B)[1].T:
        W = torch.randn(4, 3, generator=g, dtype=torch.float64)
        W = W - torch.outer(v, v @ W)
        assert (v @ gradient(W, B, 0.2)).abs().max() < 1e-10


def test_inertia_refuses():
    with pytest.raises(ValueError, match="tol"): hessian_inertia([0.8, 0.5], 0.2, (0,), 1, tol=-1)
    with pytest.raises(ValueError, match="ridge"): hessian_inertia([0.8, 0.5], 0, (0,), 1)
    with pytest.raises(ValueError, match="above ridge"): hessian_inertia([0.8, 0.01], 0.2, (1,), 1)


def test_arrays_are_taken_and_lists_of_modes_wanted():
    B, ridge, k = CASES[0]
    ours, theirs = critical_points(B, ridge, k), critical_points(B.numpy(), ridge, k)
    assert [c.modes for c in ours] == [c.modes for c in theirs] and torch.equal(ours[0].W, theirs[0].W)
    assert is_strict_saddle(ours[-1].W.numpy(), B.numpy(), ridge) and not is_strict_saddle(ours[0].W.numpy(), B.numpy(), ridge)
    with pytest.raises(TypeError, match="B must be a floating tensor"): critical_points(B.tolist(), ridge, k)
    for modes in (0, None):
        with pytest.raises(TypeError, match="modes must be a list"): hessian_spectrum([0.5], 0.1, modes, 1)
