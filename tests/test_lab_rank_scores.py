"lab.rank_scores: LiDAR against loops, scikit-learn's discriminant analysis, and PEIRA's two-view moments."
import numpy as np
import pytest
import torch

from oracles import entropy_rank_loop, lidar_spectrum_by_loops
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.lab.rank_scores import discriminant_spectrum, lidar


def views(q=3, n=12, d=4, seed=0, noise=0.4):
    "Views of one signal, with an offset and unequal scales."
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    signal = draw(n, d)*torch.linspace(0.5, 2, d) + 1
    return [signal + noise*draw(n, d) for _ in range(q)]


@pytest.mark.parametrize('q, n, d, delta', [(2, 12, 4, 1e-4), (3, 9, 3, 1e-2), (5, 4, 6, 1e-4), (2, 2, 1, 1.0)])
def test_equals_the_definition_in_loops(q, n, d, delta):
    z = views(q, n, d)
    expected = lidar_spectrum_by_loops([v.numpy() for v in z], delta)
    np.testing.assert_allclose(discriminant_spectrum(z, delta), expected, atol=1e-8*expected[0])
    assert lidar(z, delta) == pytest.approx(entropy_rank_loop(expected.clip(min=0)), rel=1e-8)
    assert lidar(z, delta) <= min(d, n - 1) + 1e-6


def test_default_is_the_papers_delta():
    assert lidar(views()) == lidar(views(), 1e-4) != lidar(views(), 1e-3)


def test_two_views_are_a_function_of_the_moments():
    a, b = views(2, 40, 5)
    m = TwoViewMoments.from_features(a, b)
    mean = (m.mean_a + m.mean_b)/2
    between = ((m.S_N + m.S_s)/4 - torch.outer(mean, mean)).numpy()
    within = ((m.S_N - m.S_s)/4 + 1e-4*torch.eye(5)).numpy()
    scipy = pytest.importorskip('scipy.linalg')
    np.testing.assert_allclose(discriminant_spectrum([a, b]), scipy.eigh(between, within, eigvals_only=True)[::-1], rtol=1e-8)


def test_equals_scikit_learns_discriminant_analysis_as_delta_vanishes():
    "Its explained variance ratios are our eigenvalues, normalised: the samples are the classes, their views the members."
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    z = views(4, 15, 3)
    peer = LinearDiscriminantAnalysis(solver='eigen').fit(torch.cat(z).numpy(), np.tile(np.arange(15), 4))
    spectrum = discriminant_spectrum(z, 1e-12)
    np.testing.assert_allclose(spectrum/spectrum.sum(), peer.explained_variance_ratio_, atol=1e-8)


def test_rotation_order_and_offset_do_not_matter():
    z, wanted = views(3, 30, 4), lidar(views(3, 30, 4))
    R = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    for same in ([v @ R for v in z], z[::-1], [v[torch.arange(29, -1, -1)] for v in z], [v + 5 for v in z], torch.stack(z), tuple(z), [v.T.contiguous().T for v in z]):
        assert lidar(same) == pytest.approx(wanted, abs=1e-8)
    assert lidar([v.float() for v in z]) == pytest.approx(wanted, abs=1e-4)
    assert lidar([v.clone().requires_grad_() for v in z]) == pytest.approx(wanted, abs=1e-10)


def test_scale_matters_through_delta_alone():
    z = views(3, 30, 4)
    assert lidar([1e3*v for v in z], 1e-4*1e6) == pytest.approx(lidar(z), abs=1e-8)
    assert abs(lidar([1e-3*v for v in z]) - lidar(z)) > 1e-2


def test_degenerate_embeddings():
    constant = torch.full((6, 3), 0.3)
    assert lidar([constant, constant]) == 0
    exact = views(1, 8, 3)[0]
    assert 1 < lidar([exact, exact]) <= 3                                     # no scatter within a sample: delta holds the inverse
    assert lidar([torch.zeros(5, 2), torch.zeros(5, 2)]) == 0


def test_noise_directions_do_not_count():
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    signal = draw(3000, 5)
    z = [torch.cat([signal + 0.1*draw(3000, 5), draw(3000, 20)], 1) for _ in range(10)]
    assert 4.9 < lidar(z) < 6 and lidar([v[:, :5] for v in z]) == pytest.approx(5, abs=0.05)


@pytest.mark.parametrize('error, match, call', [
    (ValueError, 'at least two embeddings', lambda: lidar(views(1))),
    (ValueError, 'one shape', lambda: lidar([torch.randn(4, 2), torch.randn(5, 2)])),
    (ValueError, r'views\[1\] must be finite', lambda: lidar([torch.ones(4, 2), torch.full((4, 2), float('nan'))])),
    (ValueError, r'views\[0\] must have at least 2', lambda: lidar([torch.ones(1, 2)]*2)),
    (TypeError, r'views\[0\]', lambda: lidar([torch.ones(4, 2, dtype=int)]*2)),
    (ValueError, 'delta', lambda: lidar(views(), 0)), (ValueError, 'delta', lambda: lidar(views(), float('nan')))])
def test_refusals(error, match, call):
    with pytest.raises(error, match=match): call()
