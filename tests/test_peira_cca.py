"""Joint tables and the Gaussian pair: correlations, the reduction to one operator, refusals."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from oracles import counts_by_loops, maximal_correlation_by_alternation
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.peira.cca import GaussianPair, JointTable, estimated_table, sample_correlations


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


@pytest.mark.parametrize("tied", [False, True])
def test_stack_is_the_inverse_of_embeddings(tied):
    table = random_table(4, 4, seed=3)
    W = torch.randn(4 if tied else 8, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    U, V = table.embeddings(W, tied=tied)
    torch.testing.assert_close(table.stack(U, None if tied else V), W, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"U must have shape \(4, d\)"): table.stack(U[:3])
    with pytest.raises(ValueError, match=r"V must have shape \(4, 3\)"): table.stack(U, V[:, :2])
    with pytest.raises(ValueError, match="same states"): random_table(2, 3).stack(torch.ones(2, 1))


# ---- samples ----

def test_counted_table_against_loops():
    x, y = [3, 1, 3, 3, 7, 1], ["b", "a", "a", "b", "c", "a"]
    for labels in (x, np.array(x), torch.tensor(x)):
        np.testing.assert_allclose(estimated_table(labels, y).pi, counts_by_loops(x, y), rtol=0, atol=1e-12)
    np.testing.assert_allclose(estimated_table(np.array(y, dtype=object), x).pi, counts_by_loops(y, x), rtol=0, atol=1e-12) # as pandas stores strings
    np.testing.assert_allclose(estimated_table([True, False, True], [0, 0, 1]).pi, [[1 / 3, 0], [1 / 3, 1 / 3]], rtol=0, atol=1e-12)


def test_sum_of_squared_correlations_is_pearsons_statistic():
    stats = pytest.importorskip("scipy.stats")
    x, y = random_table(3, 5, seed=1).sample(700, seed=2)
    table = estimated_table(x, y)
    statistic = stats.chi2_contingency(700 * table.pi.numpy(), correction=False).statistic
    assert 700 * table.canonical_correlations().square().sum().item() == pytest.approx(statistic, abs=1e-8)


def test_errors_of_two_coins_and_of_identical_views():
    for rho in (0.3, -0.8): torch.testing.assert_close(binary_pair(rho).correlation_errors(100), torch.tensor([(1 - rho**2) ** 0.5 / 10], dtype=torch.float64), rtol=0, atol=1e-10)
    assert binary_pair(1.0).correlation_errors(100).item() == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4)])
def test_errors_against_the_spread_of_samples(shape):
    "Root mean square error over 400 samples, beside the formula; and no bias beyond first order."
    table, n, runs = random_table(*shape, seed=4), 20_000, 400
    draws = np.random.default_rng(0).multinomial(n, table.pi.flatten().numpy(), size=runs).reshape(runs, *shape) / n
    found = torch.stack([JointTable(d).canonical_correlations() for d in draws]) - table.canonical_correlations()
    predicted = table.correlation_errors(n)
    assert ((found.square().mean(0).sqrt() / predicted - 1).abs() < 5 / (2 * runs) ** 0.5).all()
    assert (found.mean(0).abs() < 5 * predicted / runs**0.5 + 5 / n).all() # Monte-Carlo, and the bias of order 1/n


def test_errors_are_not_a_number_at_zeros_and_ties():
    assert tied_table(0.5, 0.5).correlation_errors(100).isnan().all()
    assert tied_table(0.5, 0.0).correlation_errors(100).isnan().tolist() == [False, True]
    assert JointTable(torch.outer(torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8]))).correlation_errors(10).isnan().all()
    assert random_table(1, 3).correlation_errors(10).shape == (0,)


def test_estimates_converge_at_the_monte_carlo_rate():
    "Slope -1/2 on logarithmic axes, within five standard errors over seeds."
    table, sizes, seeds = tied_table(0.8, 0.5), (100, 1000, 10_000), range(60)
    errors = np.array([[(estimated_table(*table.sample(n, seed=s)).canonical_correlations()[0] - 0.8).abs().item() for s in seeds] for n in sizes])
    t = np.log(sizes) - np.log(sizes).mean()
    slopes = (t[:, None] * np.log(np.maximum(errors, 1e-12))).sum(0) / (t**2).sum()
    assert abs(slopes.mean() + 0.5) < 5 * slopes.std() / len(seeds) ** 0.5 and slopes.std() / len(seeds) ** 0.5 < 0.1


def features(n=400, seed=0, dtype=torch.float64):
    a, b, noise = torch.randn(3, n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shared = torch.tensor([0.9, 0.6, 0.3, 0.0], dtype=torch.float64)
    mix = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return (a @ mix + 3).to(dtype), (shared * a + (1 - shared**2).sqrt() * noise).to(dtype)


def test_linear_correlations_against_the_normal_equations():
    z_a, z_b = features()
    m = TwoViewMoments.from_features(z_a, z_b).centered()
    squares = torch.linalg.eigvals(torch.linalg.solve(m.S_aa, m.S_ab) @ torch.linalg.solve(m.S_bb, m.S_ab.T)).real.sort(descending=True).values
    torch.testing.assert_close(sample_correlations(z_a, z_b), squares.sqrt(), rtol=0, atol=1e-8)
    m = TwoViewMoments.from_features(z_a, z_b)
    squares = torch.linalg.eigvals(torch.linalg.solve(m.S_aa, m.S_ab) @ torch.linalg.solve(m.S_bb, m.S_ab.T)).real.sort(descending=True).values
    torch.testing.assert_close(sample_correlations(z_a, z_b, center=False), squares.sqrt(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("peer", ["cca_zoo", "sklearn"])
def test_linear_correlations_against_peers(peer):
    z_a, z_b = (z.numpy() for z in features())
    if peer == "cca_zoo":
        model = pytest.importorskip("cca_zoo.linear").CCA(n_components=4).fit([z_a, z_b])
        s_a, s_b = model.transform([z_a, z_b])
    else:
        model = pytest.importorskip("sklearn.cross_decomposition").CCA(4, max_iter=100_000, tol=1e-15).fit(z_a, z_b)
        s_a, s_b = model.transform(z_a, z_b)
    theirs = [np.corrcoef(s_a[:, i], s_b[:, i])[0, 1] for i in range(4)]
    np.testing.assert_allclose(sample_correlations(*features()), theirs, rtol=0, atol=1e-8)


def test_linear_correlations_ignore_units_copies_and_constants():
    z_a, z_b = features()
    expected = sample_correlations(z_a, z_b)
    more = torch.cat([1e6 * z_a, z_a[:, :2], z_a[:, :1] + z_a[:, 1:2], torch.full((400, 1), 1e3, dtype=torch.float64)], 1)
    torch.testing.assert_close(sample_correlations(more, z_b @ torch.diag(torch.tensor([1e-9, 1, 1e9, 1], dtype=torch.float64))), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(sample_correlations(more.T.contiguous().T, z_b), expected, rtol=0, atol=1e-8)
    f32 = features(dtype=torch.float32)
    dependent = torch.cat([f32[0], f32[0].sum(1, keepdim=True)], 1) # dependent up to single precision's rounding
    assert len(sample_correlations(dependent, dependent)) == 4
    torch.testing.assert_close(sample_correlations(dependent, f32[1]), expected, rtol=0, atol=1e-4)
    assert sample_correlations(torch.ones(9, 2), torch.randn(9, 2)).shape == (0,)


@pytest.mark.parametrize("n, center, forced", [(12, True, 5), (12, False, 4), (9, True, 8)])
def test_few_rows_force_ones_and_say_so(n, center, forced):
    z = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.warns(UserWarning, match=f"{forced} of the correlations are 1 whatever"): c = sample_correlations(z[0], z[1], center)
    assert (c > 1 - 1e-10).sum() == forced


def test_enough_rows_do_not_warn(recwarn):
    sample_correlations(*torch.randn(2, 17, 8, dtype=torch.float64))
    assert not recwarn.list


@pytest.mark.parametrize("call, error, words", [
    (lambda: estimated_table([0.5], [1]), TypeError, "x must hold states"), (lambda: estimated_table([0, 1], [0]), ValueError, "2 and 1"), (lambda: estimated_table([], []), ValueError, "x must be a non-empty"),
    (lambda: estimated_table([0], [[0]]), ValueError, "y must be a non-empty"), (lambda: estimated_table([None, "a"], [0, 1]), TypeError, "x must hold states"), (lambda: random_table(2, 2).correlation_errors(0), ValueError, "n must"),
    (lambda: sample_correlations(torch.ones(1, 1), torch.ones(1, 1)), ValueError, "z_a must have at least 2"), (lambda: sample_correlations(torch.ones(2, 1), torch.ones(3, 1)), ValueError, "z_b must have shape"),
    (lambda: sample_correlations(torch.ones(2, 1), torch.tensor([[1.0], [float("nan")]])), ValueError, "z_b must be finite")])
def test_sample_refusals(call, error, words):
    with pytest.raises(error, match=words): call()


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


def test_samples_skip_cells_of_probability_zero_and_tables_may_be_large():
    sparse = JointTable([[0.5, 0.0, 0.0], [0.0, 0.0, 0.25], [0.0, 0.25, 0.0]])
    x, y = sparse.sample(20_000)
    assert x.dtype == y.dtype == torch.int64 and (sparse.pi[x, y] > 0).all() and len(torch.unique(3 * x + y)) == 3
    n, cells = 20_000, 2**13 # 2^25 cells altogether, and a law that is easy to check: Y is X or the state beside it
    wide = torch.zeros(cells // 2, cells, dtype=torch.float32)
    rows = torch.arange(cells // 2)
    wide[rows, 2 * rows], wide[rows, 2 * rows + 1] = 0.75 * 2 / cells, 0.25 * 2 / cells
    x, y = JointTable(wide).sample(n, seed=1)
    assert torch.equal(y // 2, x) and abs((y % 2).double().mean() - 0.25) < 5 * (0.75 * 0.25 / n) ** 0.5
    assert abs(x.double().mean() / (cells // 2) - 0.5) < 5 / (12 * n) ** 0.5


def test_linear_correlations_at_any_scale():
    z_a, z_b = features()
    torch.testing.assert_close(sample_correlations(1e250 * z_a, 1e-250 * z_b), sample_correlations(z_a, z_b), rtol=0, atol=1e-10)


def test_tied_centring_is_about_the_pooled_mean():
    "With different marginals the moments centred view by view differ from it by half the outer product of the means' difference."
    table, U = random_table(4, 4, seed=8), torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    W, a, b = table.stack(U), table.p @ U, table.q @ U
    each = U.T @ (table.pi + table.pi.T) @ U - torch.outer(a, b) - torch.outer(b, a)
    assert (a - b).norm() > 0.01
    torch.testing.assert_close(W.T @ table.operator(tied=True) @ W, each - torch.outer(a - b, a - b) / 2, rtol=0, atol=1e-12)


def test_modes_want_a_list():
    for x in (1.0, torch.zeros(3, 2)):
        with pytest.raises(ValueError, match="x must be a list of numbers"): GaussianPair(0.5).modes(x, 2)
