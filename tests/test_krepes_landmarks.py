"Landmarks: seeding against plain Python and scikit-learn, leverage against its definition, and draws that are what they claim to be."
import warnings

import numpy as np
import pytest
import torch
from oracles import greedy_seeds_by_loops, leverage_by_columns
from scipy.stats import spearmanr

from peira_krepes.krepes import landmarks
from peira_krepes.krepes.landmarks import (_race, _weights, crowd_of_candidates, greedy_seeds, leverage_scores, nystrom_leverage,
                                           select_landmarks)

METHODS = ["kmeans++", "leverage", "uniform"]


def generator(seed): return torch.Generator().manual_seed(seed)


def clusters(n, d, count, seed=0, dtype=torch.float32):
    "Gaussian clusters of very different sizes."
    g = generator(seed)
    centres, sizes = torch.randn(count, d, generator=g) * 4, torch.logspace(0, 2, count)
    return (centres[torch.multinomial(sizes, n, True, generator=g)] + torch.randn(n, d, generator=g)).to(dtype)


def potential(x, rows): return torch.cdist(x.double(), x[rows].double()).amin(1).square().sum().item()


def gaussian(x):
    d2 = torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.exp(-2 * d2 / d2.median())


# ---- seeding ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_seeding_is_greedy_kmeans_plus_plus(seed):
    x = torch.randn(40, 3, generator=generator(seed), dtype=torch.float64)
    weights = torch.rand(40, generator=generator(seed + 1), dtype=torch.float64) + 0.1
    assert greedy_seeds(x, weights, 9, generator(2)).tolist() == greedy_seeds_by_loops(x, weights, 9, generator(2))


def test_potential_is_distributed_as_scikit_learns():
    peer = pytest.importorskip("sklearn.cluster").kmeans_plusplus
    x = clusters(1200, 5, 30)
    ours = np.array([potential(x, select_landmarks(x, 35, seed=s)) for s in range(30)])
    theirs = np.array([potential(x, torch.from_numpy(peer(x.numpy(), 35, random_state=s)[1])) for s in range(30)])
    error = np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / 30)
    assert abs(ours.mean() - theirs.mean()) < 5 * error


def test_crowd_of_many_rows_costs_little_potential():
    "The stated price of the doubling rounds: five percent above scikit-learn's sequential greedy seeding."
    peer = pytest.importorskip("sklearn.cluster").kmeans_plusplus
    x = clusters(12_000, 16, 200)
    ours = np.mean([potential(x, select_landmarks(x, 110, seed=s)) for s in range(5)])
    theirs = np.mean([potential(x, torch.from_numpy(peer(x.numpy(), 110, random_state=s)[1])) for s in range(5)])
    assert ours < 1.05 * theirs


def test_a_far_outlier_is_a_landmark_even_among_many_rows():
    x = torch.randn(10_000, 4, generator=generator(0))
    x[1234] = 100.0
    assert all(1234 in select_landmarks(x, 5, seed=s) for s in range(5))


def test_scales_that_hide_in_each_other_are_all_reached():
    "Each scale holds nearly all of the potential until it is hit, so the doubling rounds alone would end with too few candidates."
    x = torch.randn(9000, 3, generator=generator(0), dtype=torch.float64) * 1e-9
    x[:12] += 10.0 ** torch.arange(12, dtype=torch.float64).neg()[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = select_landmarks(x, 40)
    assert len(rows.unique()) == 40 and set(range(5)) <= set(rows.tolist())


def test_crowd_is_distinct_and_as_large_as_wanted():
    x = clusters(9000, 8, 50)
    x = (x - x.mean(0)) / x.abs().max()
    for seed in range(3):
        crowd = crowd_of_candidates(x, 300, generator(seed))
        assert len(crowd.unique()) == len(crowd) and 225 <= len(crowd) <= 400


def test_weights_count_the_nearest_rows():
    x = clusters(3000, 4, 20)
    crowd = torch.arange(100)                                        # 100 x 32 >= 3000: every row is in the sample
    owner = torch.cdist(x.double(), x[crowd].double()).argmin(1)
    assert torch.equal(_weights(x, crowd, generator(0)), torch.bincount(owner, minlength=100).double().clamp_min(1))


# ---- the door --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [60, 9000])
def test_distinct_seeded_and_independent_of_global_state(method, n):
    x = clusters(n, 6, 12) + 1e4                                     # float32 with a large offset
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = select_landmarks(x, 20, method, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first, select_landmarks(x, 20, method, seed=0))
    assert first.dtype == torch.int64 and first.shape == (20,) and len(first.unique()) == 20
    assert not torch.equal(first, select_landmarks(x, 20, method, seed=1))


@pytest.mark.parametrize("method", METHODS)
def test_number_of_threads_changes_nothing(method):
    x, threads = clusters(9000, 24, 40), torch.get_num_threads()
    try:
        rows = []
        for count in (1, 2):
            torch.set_num_threads(count)
            rows.append(select_landmarks(x, 60, method, seed=5))
    finally: torch.set_num_threads(threads)
    assert torch.equal(*rows)


@pytest.mark.parametrize("method", METHODS)
def test_memory_layout_precision_and_arrays_change_nothing(method):
    x = clusters(200, 6, 10)
    rows = select_landmarks(x, 15, method)
    assert torch.equal(rows, select_landmarks(x.T.contiguous().T, 15, method))
    assert torch.equal(rows, select_landmarks(x.numpy(), 15, method))
    assert torch.equal(rows, select_landmarks(x.clone().requires_grad_(), 15, method))
    assert len(select_landmarks(x.bfloat16(), 15, method).unique()) == 15


def test_an_offset_does_not_change_kmeans():
    x = torch.randint(-50, 50, (300, 4), generator=generator(0)).float() + torch.arange(300.0)[:, None] / 512
    assert torch.equal(select_landmarks(x, 20), select_landmarks(x + 4096, 20))      # exact in float32


@pytest.mark.parametrize("n", [60, 9000])
@pytest.mark.parametrize("method", ["kmeans++", "leverage"])
def test_fewer_distinct_points_than_landmarks(method, n):
    x = torch.zeros(n, 3)
    x[:4] = torch.eye(4)[:, :3] + (torch.arange(4.0)[:, None] == 3) * 2
    expected = 5 if method == "kmeans++" else 4                      # the zero row is a point, but has no leverage
    with pytest.warns(UserWarning, match=f"only {expected} of the 10 landmarks"): rows = select_landmarks(x, 10, method)
    assert len(rows.unique()) == 10 and {0, 1, 2, 3} <= set(rows[:expected].tolist())


@pytest.mark.parametrize("value", [0.0, 3.7])
def test_constant_data_is_filled_uniformly(value):
    x, hits = torch.full((6, 2), value), torch.zeros(6)
    with pytest.warns(UserWarning, match="only 1 of the 2"):
        for seed in range(600): hits[select_landmarks(x, 2, seed=seed)] += 1
    assert ((hits - 200).abs() < 5 * (600 * (1 / 3) * (2 / 3)) ** 0.5).all()


@pytest.mark.parametrize("method", METHODS)
def test_all_rows_and_one_row(method):
    x = torch.randn(30, 4, generator=generator(0))
    assert select_landmarks(x, 30, method).sort()[0].tolist() == list(range(30))
    assert select_landmarks(x, 1, method).shape == (1,)
    assert select_landmarks(x[:1], 1, method).tolist() == [0]


@pytest.mark.parametrize("arguments, error, message", [
    (dict(m=31), ValueError, "m must be between 1 and 30; got 31"), (dict(m=0), ValueError, "m must be"), (dict(m=2.0), TypeError, "m must be a whole number"),
    (dict(m=3, method="kmeans"), ValueError, "method must be one of 'kmeans\\+\\+', 'leverage', 'uniform'"), (dict(m=3, seed=-1), ValueError, "seed must be")])
def test_refusals_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message): select_landmarks(torch.randn(30, 4), **arguments)


def test_bad_features_are_refused():
    x = torch.randn(30, 4)
    x[7, 2] = torch.inf
    with pytest.raises(ValueError, match="features must be finite.*row 7"): select_landmarks(x, 3)
    with pytest.raises(ValueError, match="features must have shape"): select_landmarks(x[0], 3)


def test_extreme_magnitudes():
    x = torch.randn(9000, 3, generator=generator(0), dtype=torch.float64)
    assert torch.equal(select_landmarks(x, 20), select_landmarks(x * 2.0**600, 20))
    assert torch.equal(select_landmarks(x, 20), select_landmarks(x * 2.0**-600, 20))


# ---- leverage --------------------------------------------------------------------------------------------------------
def test_leverage_is_the_diagonal_of_the_smoother():
    x = torch.randn(25, 4, generator=generator(0), dtype=torch.float64)
    expected = torch.tensor(leverage_by_columns(gaussian(x), 0.01), dtype=torch.float64)
    torch.testing.assert_close(leverage_scores(gaussian(x), 0.01), expected, rtol=1e-8, atol=1e-8)
    expected = torch.tensor(leverage_by_columns(x @ x.T, 0.01), dtype=torch.float64)
    for given, kind in ((x @ x.T, "kernel"), (x, "features"), (x.numpy(), "auto"), (x.T.contiguous().T, "auto")):
        torch.testing.assert_close(leverage_scores(given, 0.01, kind=kind), expected, rtol=1e-8, atol=1e-8)
    assert expected.sum() < 4                                        # no more effective dimensions than features


def test_wide_and_tall_features_agree_with_their_kernel():
    for shape in ((20, 50), (50, 20), (30, 30)):
        F = torch.randn(*shape, generator=generator(1), dtype=torch.float64)
        torch.testing.assert_close(leverage_scores(F, 0.1, kind="features"), leverage_scores(F @ F.T, 0.1), rtol=1e-8, atol=1e-8)


def test_feature_blocks_do_not_show():
    F = torch.randn(20_000, 3, generator=generator(1))
    C = F.double().T @ F.double() + 0.1 * 20_000 * torch.eye(3)
    torch.testing.assert_close(leverage_scores(F, 0.1), (F.double() @ torch.linalg.inv(C) * F.double()).sum(1), rtol=1e-8, atol=1e-8)


def test_nystrom_with_all_columns_is_exact():
    K = gaussian(torch.randn(60, 2, generator=generator(3)))
    torch.testing.assert_close(nystrom_leverage(K, K, K.diagonal(), 1e-2), leverage_scores(K, 1e-2), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("ridge", [1e-2, 1e-3])
@pytest.mark.parametrize("data", ["clusters", "gauss"])
def test_nystrom_keeps_the_order_at_four_effective_dimensions(data, ridge):
    x = clusters(1200, 4, 20) if data == "clusters" else torch.randn(1200, 3, generator=generator(0))
    K = gaussian(x)
    exact = leverage_scores(K, ridge)
    rows = torch.randperm(1200, generator=generator(1))[:int(4 * exact.sum()) + 1]
    estimate = nystrom_leverage(K[:, rows], K[rows][:, rows], K.diagonal(), ridge)
    assert spearmanr(estimate, exact)[0] >= 0.95
    assert (estimate >= 0).all() and (estimate < 1).all()


def test_nystrom_chooses_its_own_size():
    "Wide data, so that 256 columns are too few; the answer has four times its own effective dimension."
    K = gaussian(torch.randn(1500, 6, generator=generator(0)))
    exact = leverage_scores(K, 1e-3)
    assert 4 * exact.sum() > 300
    adaptive, small = leverage_scores(K, 1e-3, "nystrom"), leverage_scores(K, 1e-3, "nystrom", n_landmarks=100)
    assert (adaptive - exact).norm() < 0.1 * exact.norm() < (small - exact).norm()


def test_a_row_no_landmark_sees_keeps_its_leverage():
    K = torch.eye(50, dtype=torch.float64)
    estimate = nystrom_leverage(K[:, :10], K[:10, :10], K.diagonal(), 0.1)
    torch.testing.assert_close(estimate, torch.full((50,), 1 / 6, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_hutchinson_is_unbiased_with_the_stated_variance():
    K = gaussian(torch.randn(60, 2, generator=generator(0)))
    exact, probes = leverage_scores(K, 1e-2), 4000
    error = leverage_scores(K, 1e-2, "hutchinson", n_probes=probes) - exact
    M = torch.linalg.solve(K + 0.6 * torch.eye(60), K)
    deviation = ((M.square().sum(1) - exact**2) / probes).sqrt()
    assert (error.abs() < 5 * deviation).all()
    assert (deviation <= ((1 - exact) * exact / probes).sqrt() + 1e-12).all()
    assert error.norm() > deviation.norm() / 2                       # it is the estimator with this noise, and not the exact score


def test_race_draws_one_after_the_other():
    "Without replacement: P(first, second) = p_1 p_2 / (1 - p_1)."
    scores, n = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 20_000
    g, counts = generator(0), torch.zeros(3, 3)
    for _ in range(n):
        i, j = _race(scores, 2, g)
        counts[i, j] += 1
    expected = scores[:, None] * scores / (1 - scores[:, None]) * (1 - torch.eye(3))
    assert ((counts / n - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt()).all()


def test_leverage_landmarks_prefer_leverage():
    x = torch.randn(400, 3, generator=generator(0)) * 0.1
    x[:5] = torch.randn(5, 3, generator=generator(1)) * 3
    hits = torch.stack([(select_landmarks(x, 6, "leverage", seed=s) < 5).sum() for s in range(20)]).double().mean()
    assert hits > 3                                                  # uniform: 0.075


def test_leverage_refusals():
    K = gaussian(torch.randn(20, 2))
    with pytest.raises(ValueError, match="K_or_features must be symmetric"): leverage_scores(torch.triu(K), 0.1)
    with pytest.raises(ValueError, match="lowest diagonal entry -"): leverage_scores(-K, 0.1)
    with pytest.raises(ValueError, match="smallest eigenvalue is -"): leverage_scores(K - 0.5 * torch.eye(20), 1e-6)
    with pytest.raises(ValueError, match="ridge must be"): leverage_scores(K, 0)
    with pytest.raises(ValueError, match="K_or_features must be square"): leverage_scores(K[:, :5], 0.1, kind="kernel")
    with pytest.raises(ValueError, match="n_landmarks must be"): leverage_scores(K, 0.1, "nystrom", n_landmarks=0)
    with pytest.raises(ValueError, match="method must be one of"): leverage_scores(K, 0.1, "diagonal")


def test_large_features_take_the_default_route_by_size(monkeypatch):
    "Exact as long as the matrix to factor is small, whatever n."
    asked = []
    monkeypatch.setattr(landmarks, "_nystrom", lambda *a: asked.append("nystrom"))
    F = torch.randn(2100, 2090, generator=generator(0))
    leverage_scores(F, 0.1)
    leverage_scores(F[:, :5], 0.1)
    assert asked == ["nystrom"]
