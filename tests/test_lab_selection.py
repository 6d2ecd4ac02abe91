"lab.selection: label-free scores against their definitions, rank correlations against scipy and enumeration, every refusal."
import itertools
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from oracles import energy_by_inverse, entropy_rank_loop, lidar_spectrum_by_loops, spearman_by_pairs
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.lab.encoders import Projector, build_encoder
from peira_krepes.lab.selection import CONDITIONS, label_free_scores, rank_correlation, score_embeddings
from peira_krepes.objectives import PEIRA


def embeddings(q=2, n=30, d=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    signal = torch.randn(n, d, generator=g, dtype=torch.float64)
    return [0.5*signal + 0.3*torch.randn(n, d, generator=g, dtype=torch.float64) + 0.2 for _ in range(q)]

def alike(n, **change): return [dict(ridge=0.1, dim=8, center=False) | change for _ in range(n)]


@dataclass(frozen=True)
class Distance:
    def loss(self, a, b): return (a - b).square().sum()/len(a)


# ---- scores --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('center', [False, True])
@pytest.mark.parametrize('q', [2, 3])
def test_scores_equal_their_definitions(q, center):
    z, ridge = embeddings(q), 0.2
    scores = score_embeddings(z, ridge, center, {'distance': Distance()})
    Sigma, N = np.zeros((4, 4)), np.zeros((4, 4))
    pairs = list(itertools.combinations([v.numpy() for v in z], 2))
    mean_a, mean_b = (sum(p[i].mean(0) for p in pairs)/len(pairs) for i in (0, 1))
    for a, b in pairs:
        Sigma += (a.T @ b + b.T @ a)/30/len(pairs); N += (a.T @ a + b.T @ b)/30/len(pairs)
    if center:
        Sigma -= np.outer(mean_a, mean_b) + np.outer(mean_b, mean_a); N -= np.outer(mean_a, mean_a) + np.outer(mean_b, mean_b)
    assert scores['negative_energy'] == pytest.approx(-energy_by_inverse(Sigma, N, ridge), abs=1e-10)
    assert scores['rankme'] == pytest.approx(entropy_rank_loop(np.linalg.svd(torch.cat(z).numpy(), compute_uv=False)), abs=1e-10)
    assert scores['lidar'] == pytest.approx(entropy_rank_loop(lidar_spectrum_by_loops([v.numpy() for v in z], 1e-4)), rel=1e-8)
    assert scores['distance'] == pytest.approx(-np.mean([((a - b)**2).sum()/30 for a, b in pairs]), abs=1e-10)
    assert [scores[c] for c in CONDITIONS] == [ridge, 4, center, 30, q]
    assert json.loads(json.dumps(scores)) == scores


def test_with_two_views_the_energy_is_the_objectives():
    z = embeddings()
    assert score_embeddings(z)['negative_energy'] == pytest.approx(-PEIRA().loss(*z).item(), abs=1e-12)


def test_the_energy_is_of_all_rows_and_not_a_mean_over_batches():
    z = embeddings(2, 200)
    batches = np.mean([-PEIRA().loss(a, b).item() for a, b in zip(*(v.split(10) for v in z))])
    assert abs(batches - score_embeddings(z)['negative_energy']) > 0.01


@pytest.mark.parametrize('projector', [None, True])
def test_model_scores_are_those_of_its_embeddings_and_leave_no_trace(projector):
    encoder = build_encoder('conv', 1, 16, width=4, seed=0)
    projector = projector and Projector(16, 16, 8)
    whole = encoder if projector is None else nn.Sequential(encoder, projector)
    encoder.layers[1].eval()
    views = [torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    modes, state = [m.training for m in whole.modules()], {k: v.clone() for k, v in whole.state_dict().items()}
    before = torch.get_rng_state()
    scores = label_free_scores(encoder, projector, views, ridge=0.3, center=True)
    assert torch.equal(before, torch.get_rng_state()) and [m.training for m in whole.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in whole.state_dict().items())
    for other in ([v.to(memory_format=torch.channels_last) for v in views], [v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for v in views]):
        again = label_free_scores(encoder, projector, other, ridge=0.3, center=True, batch_size=7)
        assert again == pytest.approx(scores, rel=1e-4)
    whole.double().eval()
    with torch.no_grad(): z = [whole(v.double()) for v in views]
    assert score_embeddings(z, 0.3, True) == pytest.approx(scores, rel=1e-4)


def test_training_rows_are_optimistic_and_held_out_rows_are_not():
    "Best linear encoders of pure noise: E is negative on the rows it was fitted to, and positive or zero on new ones."
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, 20, generator=g, dtype=torch.float64)
    a, b = draw(60), draw(60)
    m = TwoViewMoments.from_features(a, b)
    c, v = scipy.linalg.eigh(m.S_s.numpy(), m.S_N.numpy())
    A = torch.tensor(v*np.sqrt((np.sqrt(c.clip(min=0)) - 0.1).clip(min=0)))
    training, held = score_embeddings([a @ A, b @ A])['negative_energy'], score_embeddings([draw(4000) @ A, draw(4000) @ A])['negative_energy']
    assert training == pytest.approx(0.5*((np.sqrt(c.clip(min=0)) - 0.1).clip(min=0)**2).sum(), abs=1e-8)
    assert training > 0.5 and held < 0


@pytest.mark.parametrize('error, match, call', [
    (ValueError, 'at least two embeddings', lambda z: score_embeddings(z[:1])),
    (ValueError, 'one shape', lambda z: score_embeddings([z[0], z[1][:5]])),
    (ValueError, 'finite', lambda z: score_embeddings([z[0], z[1]/0])),
    (ValueError, 'ridge', lambda z: score_embeddings(z, 0)),
    (ValueError, 'center', lambda z: score_embeddings(z, 0.1, 1)),
    (ValueError, 'objectives must not be called ridge, which is taken', lambda z: score_embeddings(z, objectives={'ridge': Distance()})),
    (ValueError, 'objectives must not be called dim, lidar, which are', lambda z: score_embeddings(z, objectives={'lidar': Distance(), 'dim': Distance()}))])
def test_score_refusals(error, match, call):
    with pytest.raises(error, match=match): call(embeddings())


def test_collapsed_embeddings_have_finite_scores():
    zero = torch.zeros(10, 3)
    scores = score_embeddings([zero, zero])
    assert scores['negative_energy'] == scores['rankme'] == scores['lidar'] == 0
    assert all(math.isfinite(v) for v in score_embeddings([zero + 0.3, zero + 0.3]).values())


# ---- rank correlation ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize('n', [3, 5, 12])
def test_value_equals_scipys_and_counted_ranks(n, ties):
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal(n), rng.standard_normal(n)
    if ties: x, y = np.r_[x[:-1], x[0]], np.r_[y[:-2], y[0], y[0]] if n > 3 else np.r_[y[:-1], y[0]]
    r = rank_correlation(x, y, alike(n), resamples=99)
    assert r.value == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12) == pytest.approx(spearman_by_pairs(x, y), abs=1e-12)
    assert -1 <= r.low <= r.high <= 1 and 0 < r.p_value <= 1 and r.n == n


@pytest.mark.parametrize('y', [[1, 2, 3, 4], [1, 3, 2, 4], [2, 1, 4, 3], [1, 2, 2, 3]])
def test_p_value_is_that_of_all_pairings(y):
    x = [0.1, 0.5, 0.7, 2.0]
    null = np.array([spearman_by_pairs(x, p) for p in itertools.permutations(y)])
    value = spearman_by_pairs(x, y)
    wanted = min(1, 2*min((null >= value - 1e-9).mean(), (null <= value + 1e-9).mean()))
    assert rank_correlation(x, y, alike(4)).p_value == pytest.approx(wanted, abs=1e-12)


def test_many_models_use_random_pairings():
    rng = np.random.default_rng(1)
    x = rng.standard_normal(20); y = 0.5*x + rng.standard_normal(20)
    p = rank_correlation(x, y, alike(20)).p_value
    peer = scipy.stats.spearmanr(x, y).pvalue
    assert abs(p - peer) < 5*math.sqrt(peer*(1 - peer)/9999) + 0.1*peer                       # Monte Carlo, and the peer's t approximation


def test_interval_is_the_bootstraps_quantiles():
    rng = np.random.default_rng(2)
    x = rng.standard_normal(8); y = x + rng.standard_normal(8)
    drawn = []
    for _ in range(4000):
        rows = rng.integers(0, 8, 8)
        drawn.append(spearman_by_pairs(x[rows], y[rows]) if np.ptp(x[rows]) and np.ptp(y[rows]) else 0.0)
    r = rank_correlation(x, y, alike(8), level=0.8)
    drawn = np.sort(drawn)
    for end, q in ((r.low, 0.1), (r.high, 0.9)):
        share = np.mean(drawn <= end)                                                          # atoms: the share must straddle q
        assert np.mean(drawn < end - 1e-9) - 5*math.sqrt(q*(1 - q)/4000) <= q <= share + 5*math.sqrt(q*(1 - q)/4000)
    wide = rank_correlation(x, y, alike(8), level=0.99)
    assert wide.low <= r.low <= r.high <= wide.high


def test_seed_and_global_generators():
    x, y = [1, 5, 2, 8, 4, 9, 3, 7], [2, 6, 1, 9, 3, 8, 5, 4]
    state = np.random.get_state()[1].copy()
    assert rank_correlation(x, y, alike(8)) == rank_correlation(x, y, alike(8))
    assert rank_correlation(x, y, alike(8), seed=1).p_value != rank_correlation(x, y, alike(8), seed=2).p_value
    assert (np.random.get_state()[1] == state).all()


def test_monotone_changes_and_order_of_models_do_not_matter():
    x, y = np.array([0.3, 1.0, 0.2, 2.0, 0.9]), np.array([0.5, 0.4, 0.1, 0.9, 0.8])
    r = rank_correlation(x, y, alike(5))
    assert rank_correlation(np.exp(x), y**3, alike(5)) == r
    assert rank_correlation(x[::-1], y[::-1], alike(5)).value == pytest.approx(r.value, abs=1e-12)
    assert rank_correlation(-x, y, alike(5)).value == pytest.approx(-r.value, abs=1e-12)
    assert rank_correlation(torch.tensor(x), list(y), alike(5)) == r


@pytest.mark.filterwarnings('error')
def test_few_models_give_no_warnings():
    assert rank_correlation([1, 2, 3], [1, 2, 3], alike(3)).value == 1
    r = rank_correlation([1, 1, 2], [1, 2, 2], alike(3))
    assert r.value == pytest.approx(0.5) and math.isfinite(r.low) and math.isfinite(r.high)


def test_scores_of_models_are_their_own_conditions():
    runs = [score_embeddings(embeddings(seed=s)) for s in range(4)]
    scores = [r['negative_energy'] for r in runs]
    assert rank_correlation(scores, scores, runs).value == 1
    runs[1] = score_embeddings(embeddings(seed=1), ridge=0.2)
    with pytest.raises(ValueError, match="agree in 'ridge'.*got 0.1, 0.2"): rank_correlation(scores, scores, runs)
    assert rank_correlation(scores, scores, runs, alike=('dim', 'rows')).value == 1
    runs[1] = score_embeddings(embeddings(seed=1, n=31))
    with pytest.raises(ValueError, match="agree in 'rows'"): rank_correlation(scores, scores, runs, alike=('dim', 'rows'))


@pytest.mark.parametrize('match, arguments', [
    ('scores must be one number.*at least three', ([1, 2], [1, 2], alike(2))),
    ('scores must be one number', ([[1, 2, 3]], [1, 2, 3], alike(3))),
    ('accuracies must be one number', ([1, 2, 3], [1, 2, 3, 4], alike(3))),
    ('scores must not be all equal', ([1, 1, 1], [1, 2, 3], alike(3))),
    ('accuracies must not be all equal', ([1, 2, 3], [0.5]*3, alike(3))),
    ('scores must be finite; got nan for model 1', ([1, float('nan'), 3], [1, 2, 3], alike(3))),
    ('accuracies must be finite; got inf', ([1, 2, 3], [1, 2, float('inf')], alike(3))),
    ('conditions must hold one mapping for each of the 3', ([1, 2, 3], [1, 2, 3], alike(2))),
    ("conditions must agree in 'ridge'", ([1, 2, 3], [1, 2, 3], alike(2) + alike(1, ridge=0.2))),
    ("conditions must agree in 'dim'", ([1, 2, 3], [1, 2, 3], alike(2) + alike(1, dim=16))),
    ("conditions must agree in 'center'", ([1, 2, 3], [1, 2, 3], alike(2) + alike(1, center=True))),
    (r"conditions\[0\] must say its 'dim'", ([1, 2, 3], [1, 2, 3], [dict(ridge=0.1)]*3))])
def test_rank_correlation_refuses(match, arguments):
    with pytest.raises(ValueError, match=match): rank_correlation(*arguments)


@pytest.mark.parametrize('change, name', [(dict(level=0), 'level'), (dict(level=1.0), 'level'), (dict(resamples=10), 'resamples')])
def test_rank_correlation_refuses_settings(change, name):
    with pytest.raises(ValueError, match=name): rank_correlation([1, 2, 3], [1, 2, 3], alike(3), **change)
