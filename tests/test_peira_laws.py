"""Laws made to order: their spectra against closed forms, recipes and enumeration; what they refuse."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from oracles import law_by_recipe, maximal_correlation_by_alternation, products_by_enumeration
from peira_krepes.peira.cca import GaussianPair, sample_correlations
from peira_krepes.peira.laws import GaussianVectors, binary_pair, hypercube, prescribed, product
from test_peira_cca import random_table, tied_table


def tensor(*values): return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-10): torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


@pytest.mark.parametrize("rho", [0.25, -0.8, 0.0, 1.0, -1.0])
def test_binary_pair(rho):
    table = binary_pair(rho)
    close(table.canonical_correlations(), [abs(rho)])
    signs = tensor(-1, 1)
    assert (signs @ table.pi @ signs).item() == pytest.approx(rho, abs=1e-12)
    close(torch.linalg.eigvalsh(table.operator(tied=True)).sum(), rho)


def test_product_of_random_tables():
    a, b, c = random_table(2, 3), random_table(4, 2, seed=1), random_table(2, 2, seed=2)
    expected = [x * y * z for x in a.canonical_correlations(False).tolist() for y in b.canonical_correlations(False).tolist() for z in c.canonical_correlations(False).tolist()]
    close(product(a, b, c).canonical_correlations(False), sorted(expected, reverse=True) + [0] * 4) # 16 by 12 states, one factor wide and one tall
    assert product(a, b).pi[1 * 4 + 3, 2 * 2 + 1].item() == pytest.approx((a.pi[1, 2] * b.pi[3, 1]).item(), abs=1e-15) # last part fastest
    assert torch.equal(product(a).pi, a.pi)


def test_views_that_differ_in_shape_keep_their_marginals_in_a_product():
    a, b = random_table(2, 3), random_table(4, 2, seed=1)
    close(product(a, b).p, torch.kron(a.p, b.p)); close(product(a, b).q, torch.kron(a.q, b.q))


@pytest.mark.parametrize("n_bits, rho", [(1, 0.3), (3, 0.6), (5, -0.7), (2, 0.0)])
def test_hypercube(n_bits, rho):
    cube = hypercube(n_bits, rho)
    close(cube.canonical_correlations(False), [abs(rho) ** j for j in range(n_bits + 1) for _ in range(math.comb(n_bits, j))])
    eigenvalues = sorted(rho**j for j in range(n_bits + 1) for _ in range(math.comb(n_bits, j)))
    close(torch.linalg.eigvalsh(cube.operator(tied=True, center=False)), eigenvalues)
    parity = torch.tensor([(-1.0) ** bin(s).count("1") for s in range(2**n_bits)], dtype=torch.float64)
    close(parity @ cube.pi @ parity, rho**n_bits)


@settings(max_examples=60, deadline=None)
@given(c=st.lists(st.floats(0, 1), min_size=1, max_size=7), seed=st.integers(0, 10**6), uniform=st.booleans())
def test_any_spectrum_on_any_marginal(c, seed, uniform):
    p = None if uniform else torch.rand(len(c) + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 1e-3
    p = p if p is None else p / p.sum()
    table = prescribed(c, p)
    close(table.canonical_correlations(), sorted(c, reverse=True))
    close(table.pi, table.pi.T, atol=1e-14); close(table.p, torch.full((len(c) + 1,), 1 / (len(c) + 1), dtype=torch.float64) if p is None else p)
    close(table.pi, law_by_recipe(sorted(c), table.p.tolist()), atol=1e-12)


def test_more_states_than_correlations_leave_zeros():
    table = prescribed([0.5], [0.1, 0.2, 0.3, 0.4])
    close(table.canonical_correlations(), [0.5, 0, 0])
    assert torch.linalg.eigvalsh(table.operator(tied=True)).min() > -1e-12


def test_known_three_state_table():
    "The three-state table used across the tests is the same construction."
    close(prescribed([0.8, 0.5]).canonical_correlations(), tied_table(0.8, 0.5).canonical_correlations())
    close(prescribed([0.8, 0.5]).pi, tied_table(0.5, 0.8).pi)
    assert prescribed([0.9, 0.4, 0.2]).canonical_correlations()[0].item() == pytest.approx(maximal_correlation_by_alternation(prescribed([0.9, 0.4, 0.2]).pi), abs=1e-10)


def test_signed_spectra_are_eigenvalues_of_the_tied_operator():
    table = prescribed([-0.3, 0.6, 0.1], [0.4, 0.1, 0.2, 0.3])
    close(torch.linalg.eigvalsh(table.operator(tied=True)), [-0.3, 0, 0.1, 0.6])
    close(table.canonical_correlations(), [0.6, 0.3, 0.1])
    close(prescribed([-1.0]).pi, binary_pair(-1).pi)
    with pytest.raises(ValueError, match=r"allows them times 0\.5\. "): prescribed([-1.0, -1.0])
    close(prescribed([-0.5, -0.5]).pi.diagonal(), [0, 0, 0])


@pytest.mark.parametrize("p, q", [([0.5, 0.5], [0.7, 0.3]), ([0.2, 0.8], [0.6, 0.4])])
def test_two_coins_of_different_bias_reach_the_root_of_the_odds_ratio(p, q):
    ratio = (max(p) / min(p)) / (max(q) / min(q))
    limit = min(ratio, 1 / ratio) ** 0.5
    table = prescribed([limit * (1 - 1e-12)], p, q)
    close(table.canonical_correlations(), [limit]); close(table.p, p); close(table.q, q)
    with pytest.raises(ValueError, match=f"times {1 / 1.01:.4g}"): prescribed([limit * 1.01], p, q)


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 4)])
def test_different_marginals(sizes):
    p, q = (torch.rand(k, generator=torch.Generator().manual_seed(k + i), dtype=torch.float64) + 0.3 for i, k in enumerate(sizes))
    p, q = p / p.sum(), q / q.sum()
    table = prescribed([0.4, 0.2], p, q)
    close(table.p, p); close(table.q, q); close(table.canonical_correlations(), [0.4, 0.2] + [0] * (min(sizes) - 3))
    assert torch.equal(prescribed([0.4, 0.2], p, q, seed=3).pi, prescribed([0.4, 0.2], p, q, seed=3).pi)


def test_the_named_factor_is_the_largest():
    p, q = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]
    with pytest.raises(ValueError) as caught: prescribed([1.0, 0.9], p, q)
    factor = float(str(caught.value).split("allows them times ")[1].split(". ")[0])
    prescribed([factor * 0.999, factor * 0.9 * 0.999], p, q)
    with pytest.raises(ValueError, match="negative probabilities"): prescribed([factor * 1.001, factor * 0.9 * 1.001], p, q)


def test_other_states_first_may_help():
    "The given order of the states fails, another is found, and the marginals still belong to the states as given."
    p, q = tensor(0.5, 0.3, 0.2), tensor(0.2, 0.5, 0.3)
    table = prescribed([0.99, 0.9], p, q)
    close(table.p, p); close(table.q, q); close(table.canonical_correlations(), [0.99, 0.9])


@pytest.mark.parametrize("rhos", [(0.9, 0.5), (0.5, -0.5), (0.8, 0.3, 0.7), (0.4,), (0.6, 0.0)])
def test_gaussian_vectors_list_all_products_in_order(rhos):
    law = GaussianVectors(rhos)
    np.testing.assert_allclose(law.canonical_correlations(20), products_by_enumeration(rhos, 20), rtol=0, atol=1e-12)
    assert law.canonical_correlations(4, center=False)[0] == 1 and law.degrees(20, center=False).unique(dim=0).shape[0] == 20
    torch.testing.assert_close(law.canonical_correlations(19), law.canonical_correlations(20, center=False)[1:], rtol=0, atol=0)


def test_gaussian_vectors_agree_with_the_pair():
    pair, law = GaussianPair(-0.6), GaussianVectors([-0.6])
    close(law.canonical_correlations(5), pair.canonical_correlations(5), atol=1e-12)
    x = torch.linspace(-2, 2, 7, dtype=torch.float64)
    close(law.modes(x[:, None], 4), pair.modes(x, 4), atol=1e-12)


def test_gaussian_modes_by_quadrature():
    "Cross moments of the canonical functions of two coordinates are diagonal, with signed products."
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    grids = np.meshgrid(nodes, nodes, nodes, nodes, indexing="ij")
    w = torch.from_numpy(np.prod(np.meshgrid(*[weights / weights.sum()] * 4, indexing="ij"), axis=0).ravel())
    x, e = torch.from_numpy(np.stack([grids[0].ravel(), grids[1].ravel()], 1)), torch.from_numpy(np.stack([grids[2].ravel(), grids[3].ravel()], 1))
    rho = tensor(0.7, -0.4)
    law = GaussianVectors(rho)
    cross = (law.modes(x, 6) * w[:, None]).T @ law.modes(rho * x + (1 - rho**2).sqrt() * e, 6)
    close(cross, torch.diag((rho ** law.degrees(6)).prod(1)))


def test_gaussian_samples():
    x, y = GaussianVectors((0.7, -0.4)).sample(40_000, seed=1)
    cross = x * y
    assert ((cross.mean(0) - tensor(0.7, -0.4)).abs() < 5 * cross.std(0) / 200).all()
    assert abs((x[:, 0] * y[:, 1]).mean()) < 5 / 200 and abs((x[:, 0] * x[:, 1]).mean()) < 5 / 200
    close(sample_correlations(x, y), [0.7, 0.4], atol=5 / 200)
    state = torch.get_rng_state(); GaussianVectors((0.7,)).sample(5); assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("call, error, words", [
    (lambda: binary_pair(1.1), ValueError, "rho"), (lambda: binary_pair("a"), TypeError, "rho"), (lambda: product(), ValueError, "at least one"),
    (lambda: product([[0.5, 0.5]]), TypeError, "got list"), (lambda: product(*[binary_pair(0.5)] * 14), ValueError, "2 GiB"), (lambda: hypercube(0, 0.5), ValueError, "n_bits"),
    (lambda: hypercube(3, 2), ValueError, "rho"), (lambda: prescribed([1.01]), ValueError, r"in \[-1, 1\]"), (lambda: prescribed([float("nan")]), ValueError, "correlations"),
    (lambda: prescribed([]), ValueError, "non-empty"), (lambda: prescribed([[0.5]]), ValueError, "correlations"), (lambda: prescribed([0.5, 0.4], [0.5, 0.5]), ValueError, "at most 1"),
    (lambda: prescribed([0.5], [0.5, 0.6]), ValueError, "p must"), (lambda: prescribed([0.5], [0.5, 0.5], [1.0]), ValueError, "q must"), (lambda: prescribed([0.5], [0.5, float("nan")]), ValueError, "p must"),
    (lambda: prescribed([0.5], seed=-1), ValueError, "seed"), (lambda: GaussianVectors([]), ValueError, "rhos"), (lambda: GaussianVectors([0.5, -1]), ValueError, "rho"),
    (lambda: GaussianVectors([0.5]).modes(torch.ones(3, 2), 2), ValueError, "x must"), (lambda: GaussianVectors([0.5]).degrees(0), ValueError, "n_modes"), (lambda: GaussianVectors([0.5]).sample(0), ValueError, "n must")])
def test_refusals(call, error, words):
    with pytest.raises(error, match=words): call()
