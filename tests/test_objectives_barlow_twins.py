"Barlow Twins: the paper's equations, the constant feature, the moving standard deviations, and lightly's version."
import pytest
import torch

from conformance import MomentConformance, paired, value_and_gradients
from oracles import barlow_twins_by_loops
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.objectives import BarlowTwins


class TestBarlowTwins(MomentConformance):
    objectives = [BarlowTwins(), BarlowTwins(redundancy=0.3)]

    @staticmethod
    def inner(objective, W_a, W_b):
        "The weighted residual of the correlation matrix."
        u, v = ((w - w.mean(0)) / w.std(0, correction=0) for w in (W_a, W_b))
        C, eye = u.T @ v / len(u), torch.eye(W_a.shape[1]).to(W_a)
        return ((C - eye) * (eye + objective.redundancy**0.5 * (1 - eye))).flatten()

    @staticmethod
    def outer(objective, g): return g.square().sum()


@pytest.mark.parametrize("redundancy", [0, 5e-3, 1.0])
def test_value_against_plain_loops(redundancy):
    z_a, z_b = paired(12, 4)
    assert BarlowTwins(redundancy).loss(z_a, z_b).item() == pytest.approx(barlow_twins_by_loops(z_a, z_b, redundancy), abs=1e-10)


def test_value_by_hand():
    "Two rows: every correlation is +1 or -1."
    z_a = torch.tensor([[0.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    z_b = torch.tensor([[0.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    m = TwoViewMoments.from_features(z_a, z_b)
    torch.testing.assert_close(BarlowTwins().cross_correlation(m), torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64), rtol=0, atol=1e-12)
    assert BarlowTwins(redundancy=0.25).loss(z_a, z_b).item() == pytest.approx(0 + 4 + 0.25 * 2, abs=1e-12)


def test_scale_and_shift_of_a_feature_do_not_matter():
    z_a, z_b = paired(20, 4)
    scale, shift = torch.tensor([1e-6, 1.0, 1e6, -3.0]).double(), torch.tensor([0.0, 100.0, -1e6, 3.0]).double()
    wanted = BarlowTwins().loss(z_a * scale.sign(), z_b * scale.sign())
    torch.testing.assert_close(BarlowTwins().loss(z_a * scale + shift, z_b * scale + shift), wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype, level", [(torch.float64, 0.1), (torch.float32, 0.1), (torch.float32, 1e4), (torch.float64, 1e-30), (torch.float32, 0.0)])
def test_a_constant_feature_costs_one_and_gets_no_gradient(dtype, level):
    z_a, z_b = paired(32, 3, dtype=dtype)
    column = torch.full((32, 1), level, dtype=dtype)
    wanted, *grads = value_and_gradients(BarlowTwins(), z_a, z_b)
    value, *more = value_and_gradients(BarlowTwins(), torch.cat([z_a, column], 1), torch.cat([z_b, column], 1))
    torch.testing.assert_close(value, wanted + 1, rtol=1e-6, atol=0)
    for g, w in zip(more, grads):
        assert not g[:, 3].any()
        torch.testing.assert_close(g[:, :3], w, rtol=0, atol=1e-6)


def test_a_nearly_constant_feature_still_counts():
    "Spread a thousandth of the mean, in float32: far above the guard, so the feature keeps its correlation."
    z_a, z_b = paired(64, 1, shift=0.0, noise=0.1)
    a, b = (torch.cat([z, 1e-3 * z + 1], 1).float() for z in (z_a, z_b))
    C = BarlowTwins().cross_correlation(TwoViewMoments.from_features(a, b))
    assert C[1, 1].item() == pytest.approx(C[0, 0].item(), abs=1e-3) and C[0, 0] > 0.9


def test_curvature_along_a_rescaling_is_zero():
    K_a, K_b = paired(30, 5)
    A = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curvature = BarlowTwins(0.1).curvature(A, TwoViewMoments.from_features(K_a, K_b))
    stretched = A * torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert curvature.ggn(stretched).abs().max() < 1e-12 and abs((curvature.gradient * stretched).sum()) < 1e-12


def test_average_of_batch_losses_is_not_the_loss():
    "Independent features: each batch of B adds about redundancy h (h-1) / B of noise."
    g = torch.Generator().manual_seed(0)
    z = torch.randn(4096, 8, generator=g, dtype=torch.float64)
    objective = BarlowTwins(redundancy=1.0)
    batch = torch.tensor([objective.loss(z[i:i + 16], z[i:i + 16]).item() for i in range(0, 4096, 16)])
    floor = 8 * 7 / 15                                              # E r^2 = 1/(B-1) for independent Gaussians
    assert abs(batch.mean() - floor) < 5 * batch.std() / len(batch) ** 0.5
    assert objective.loss(z, z).item() < floor / 50


def test_against_lightly():
    "lightly adds 1e-5 to the variances; with variances near 1e6 that is 1e-11 of them and both must agree."
    lightly = pytest.importorskip("lightly.loss")
    z_a, z_b = paired(40, 6)
    for redundancy in (5e-3, 0.5):
        theirs, ours = lightly.BarlowTwinsLoss(lambda_param=redundancy), BarlowTwins(redundancy)
        a, b = ((1e3 * z).requires_grad_() for z in (z_a, z_b))
        torch.testing.assert_close(ours.loss(a, b), theirs(a, b), rtol=1e-8, atol=0)
        for g, w in zip(torch.autograd.grad(ours.loss(a, b), [a, b]), torch.autograd.grad(theirs(a, b), [a, b])): torch.testing.assert_close(g, w, rtol=0, atol=1e-8 * w.abs().max().item())


def test_how_lightly_differs():
    "Its epsilon makes the loss depend on scale: at standard deviation 1e-3 perfect agreement costs (1 - v/(v+1e-5))^2 a feature."
    lightly = pytest.importorskip("lightly.loss")
    z = torch.linalg.qr(torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    z = (z - z.mean(0)) / z.std(0, correction=0) * 1e-3
    v = 1e-6
    diagonal = lambda loss: 4 * (1 - v / (v + 1e-5)) ** 2
    assert lightly.BarlowTwinsLoss(lambda_param=0)(z, z).item() == pytest.approx(diagonal(z), rel=1e-6)
    assert BarlowTwins(redundancy=0).loss(z, z).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("redundancy", [-1e-9, float("inf"), "1", True])
def test_bad_parameters(redundancy):
    with pytest.raises((ValueError, TypeError), match="redundancy"): BarlowTwins(redundancy)
