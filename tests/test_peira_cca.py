"""Joint tables and the Gaussian pair: correlations, the reduction to one operator, refusals."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from oracles import maximal_correlation_by_alternation
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.peira.cca import GaussianPair, JointTable


def random_table(rows, columns, seed=0):
    pi = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 1e-3
    return JointTable(pi / pi.sum())


def binary_pair(rho): return JointTable([[(1 + rho) / 4, (1 - rho) / 4], [(1 - rho) / 4, (1 + rho) / 4]])


def tied_table(*correlations):
    "Three equally likely states, symmetric, with the given centred correlations."
    u = torch.tensor([[1, -1, 0], [1, 1, -2]], dtype=torch.float64)
    u /= u.norm(dim=1, keepdim=True)
    return JointTable((torch.ones(3, 3, dtype=torch.float64) / 3 + sum(c * torch.outer(x, x) for c, x in zip(correlations, u))) / 3)


@pytest.mark.parametrize("rho", [0.25, -0.8, 0.0, 1.0])
def test_binary_pair(rho):
    table = binary_pair(rho)
    torch.testing.assert_close(table.canonical_correlations(), torch.tensor([abs(rho)], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(table.canonical_correlations(center=False), torch.tensor([1, abs(rho)], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.linalg.eigvalsh(table.operator(tied=True)).sum(), torch.tensor(rho, dtype=torch.float64), rtol=0, atol=1e-12)


def test_independent_views_have_no_correlation():
    pi = torch.outer(torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.3, 0.2])).double()
    assert JointTable(pi).canonical_correlations().abs().max() < 1e-12 and JointTable(pi).operator().abs().max() < 1e-12


def test_identical_views_correlate_fully():
    table = JointTable(torch.diag(torch.tensor([0.5, 0.3, 0.2])))
    torch.testing.assert_close(table.canonical_correlations(), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
    assert table.canonical_correlations().max() <= 1


@pytest.mark.parametrize("shape", [(2, 5), (4, 4), (6, 3)])
def test_first_correlation_against_alternating_expectations(shape):
    table = random_table(*shape)
    assert table.canonical_correlations()[0] == pytest.approx(maximal_correlation_by_alternation(table.pi), abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 10**6), center=st.booleans())
def test_operator_has_plus_and_minus_the_correlations(rows, columns, seed, center):
    table = random_table(rows, columns, seed)
    c = table.canonical_correlations(center)
    assert len(c) == min(rows, columns) - center and ((c >= 0) & (c <= 1)).all() and (c.diff() <= 0).all()
    expected = torch.cat([c, -c, torch.zeros(rows + columns - 2 * len(c), dtype=torch.float64)]).sort().values
    torch.testing.assert_close(torch.linalg.eigvalsh(table.operator(center=center)), expected, rtol=0, atol=1e-10)


def test_three_state_tied_table():
    table = tied_table(0.8, 0.5)
    torch.testing.assert_close(table.canonical_correlations(), torch.tensor([0.8, 0.5], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.linalg.eigvalsh(table.operator(tied=True, center=False)), torch.tensor([0.5, 0.8, 1.0], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_reduction_gives_the_moments_of_the_embeddings(tied):
    "Sigma and N of embeddings of all pairs of states, by the two-view moments of a weighted sample, are W'BW and W'W."
    table = random_table(4, 4, seed=3)
    B = table.operator(tied=tied, center=False)
    W = torch.randn(len(B), 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    U, V = table.embeddings(W, tied=tied)
    x, y = (i.flatten() for i in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    weights = (16 * table.pi.flatten()).sqrt()[:, None]
    m = TwoViewMoments.from_features(U[x] * weights, V[y] * weights)
    torch.testing.assert_close(W.T @ B @ W, m.S_s, rtol=0, atol=1e-10)
    torch.testing.assert_close(W.T @ W, m.S_N, rtol=0, atol=1e-10)
    assert (U is V) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_centring_acts_as_zero_on_constants_and_changes_nothing_else(tied):
    table = random_table(4, 4, seed=8)
    full, centred = table.operator(tied=tied, center=False), table.operator(tied=tied)
    parts = [((table.p + table.q) / 2).sqrt()] if tied else [torch.cat([table.p.sqrt(), s * table.q.sqrt()]) / 2**0.5 for s in (1, -1)]
    constants = torch.stack(parts, 1)
    assert (centred @ constants).abs().max() < 1e-12
    rest = torch.eye(len(full), dtype=torch.float64) - constants @ constants.T
    torch.testing.assert_close(rest @ full @ rest, centred, rtol=0, atol=1e-12)


def test_samples_follow_the_table():
    table = random_table(3, 4, seed=2)
    n = 100_000
    x, y = table.sample(n, seed=1)
    counts = torch.bincount(4 * x + y, minlength=12).view(3, 4) / n
    assert ((counts - table.pi).abs() < 5 * (table.pi * (1 - table.pi) / n).sqrt()).all()
    assert torch.equal(table.sample(50, seed=1)[0], table.sample(50, seed=1)[0]) and not torch.equal(table.sample(50, seed=1)[0], table.sample(50, seed=2)[0])
    state = torch.get_rng_state(); table.sample(5, seed=3)
    assert torch.equal(state, torch.get_rng_state())


def test_sampled_one_hot_features_against_cca_zoo():
    "Linear CCA of one-hot features is CCA over all functions of the states."
    linear = pytest.importorskip("cca_zoo.linear")
    table = tied_table(0.8, 0.5)
    x, y = table.sample(20_000, seed=0)
    counts = torch.bincount(3 * x + y, minlength=9).view(3, 3).double() / len(x)
    ours = JointTable(counts).canonical_correlations()
    one_hot = lambda s: np.eye(3)[s.numpy()][:, :2] # two columns span all centred functions of three states
    views = [one_hot(x), one_hot(y)]
    z = linear.CCA(n_components=2).fit(views).transform(views)
    theirs = [np.corrcoef(z[0][:, i], z[1][:, i])[0, 1] for i in range(2)]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pi, words", [
    ([[0.5, -0.1], [0.3, 0.3]], r"no negative entries; pi\[0, 1\] is -0.1"), ([[1.0, 1.0], [1.0, 1.0]], "sums to 4"), ([[0.5, 0.0], [0.5, 0.0]], "column 1 is zero"),
    ([[0.0, 0.0], [0.5, 0.5]], "row 0 is zero"), ([[float("nan"), 1.0]], "pi must be finite"), ([0.5, 0.5], "shape")])
def test_tables_that_are_no_laws(pi, words):
    for kind in (lambda x: x, np.array, torch.tensor):
        with pytest.raises(ValueError, match=words): JointTable(kind(pi))


def test_tables_of_other_kinds():
    with pytest.raises(TypeError, match="pi must be a floating"): JointTable(torch.ones(1, 1, dtype=torch.int64))
    single = torch.rand(3, 3); single /= single.sum()
    table = JointTable(single) # float32 sums to 1 only up to its rounding
    assert table.pi.dtype == torch.float64 and abs(table.pi.sum() - 1) < 1e-12
    with pytest.raises(ValueError, match="same states; pi has shape \\(2, 3\\)"): random_table(2, 3).operator(tied=True)
    with pytest.raises(ValueError, match="same states"): random_table(2, 3).embeddings(torch.ones(2, 1), tied=True)
    with pytest.raises(ValueError, match="W must have shape \\(5, d\\)"): random_table(2, 3).embeddings(torch.ones(4, 1))
    with pytest.raises(ValueError, match="n must be at least 1"): random_table(2, 3).sample(0)


# ---- the Gaussian pair ----

@pytest.mark.parametrize("rho", [0.9, 0.3, 0.0, -0.6])
def test_hermite_correlations_by_quadrature(rho):
    "E[h_j(X) h_k(Y)] = rho^k delta_jk, by Gauss-Hermite quadrature that is exact for these degrees."
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights /= weights.sum()
    x, e = (torch.from_numpy(a.ravel()) for a in np.meshgrid(nodes, nodes, indexing="ij"))
    w = torch.from_numpy(np.outer(weights, weights).ravel())
    pair = GaussianPair(rho)
    y = rho * x + (1 - rho**2) ** 0.5 * e
    cross = (pair.modes(x, 6, center=False) * w[:, None]).T @ pair.modes(y, 6, center=False)
    torch.testing.assert_close(cross, torch.diag(torch.tensor([rho**k for k in range(6)], dtype=torch.float64)), rtol=0, atol=1e-10)
    torch.testing.assert_close(cross.diagonal().abs(), pair.canonical_correlations(6, center=False), rtol=0, atol=1e-10)


def test_gaussian_values_and_modes():
    np.testing.assert_allclose(GaussianPair(0.5).canonical_correlations(4), [0.5, 0.25, 0.125, 0.0625], rtol=1e-12)
    np.testing.assert_allclose(GaussianPair(-0.5).canonical_correlations(3, center=False), [1, 0.5, 0.25], rtol=1e-12)
    x = torch.tensor([-1.5, 0.0, 2.0], dtype=torch.float64)
    np.testing.assert_allclose(GaussianPair(0.5).modes(x, 3), np.stack([x, (x**2 - 1) / 2**0.5, (x**3 - 3 * x) / 6**0.5], 1), rtol=1e-12, atol=1e-12)
    assert GaussianPair(0.5).modes(x, 1).shape == (3, 1) and GaussianPair(0.5).modes(x, 1, center=False).tolist() == [[1.0]] * 3


def test_gaussian_sample():
    x, y = GaussianPair(-0.7).sample(50_000, seed=4)
    product = x * y
    assert abs(product.mean() + 0.7) < 5 * product.std() / 50_000**0.5 and abs(y.square().mean() - 1) < 5 * (2 / 50_000) ** 0.5


def test_gaussian_refusals():
    for rho, error in ((1.0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), ("a", TypeError)):
        with pytest.raises(error, match="rho"): GaussianPair(rho)
    with pytest.raises(ValueError, match="n_modes"): GaussianPair(0.5).canonical_correlations(0)
    with pytest.raises(ValueError, match="finite"): GaussianPair(0.5).modes(torch.tensor([float("nan")]), 2)
