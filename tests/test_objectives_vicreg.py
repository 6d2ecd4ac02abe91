"VICReg: the paper's equations, the row count, the hinge, the released weights, and lightly's version."
import math

import pytest
import torch

from conformance import MomentConformance, paired, value_and_gradients
from oracles import vicreg_by_loops
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.objectives.vicreg import VICReg


class TestVICReg(MomentConformance):
    objectives = [VICReg(), VICReg(invariance=0.5, variance=3.0, covariance=2.0)]

    @staticmethod
    def inner(objective, W_a, W_b):
        "Differences and off-diagonal covariances with the root of their weights, then the variances of both views."
        n, h = W_a.shape
        covs = [torch.cov(W.T) for W in (W_a, W_b)]
        off = [(C - C.diagonal().diag()).flatten() * (objective.covariance / h) ** 0.5 for C in covs]
        return torch.cat([(W_a - W_b).flatten() * (objective.invariance / n) ** 0.5, *off, *(C.diagonal() for C in covs)])

    @staticmethod
    def outer(objective, g):
        h = 3                                                      # the width of MomentConformance.point()
        return g[:-2 * h].square().sum() + objective.variance * (1 - (g[-2 * h:] + 1e-4).sqrt()).relu().sum() / h


@pytest.mark.parametrize("weights", [(25, 25, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
def test_value_against_plain_loops(weights):
    z_a, z_b = paired(7, 4)
    z_a = z_a * torch.tensor([0.1, 0.5, 1.0, 3.0])                 # some features below the wanted deviation, some above
    assert VICReg(*weights).loss(z_a, z_b).item() == pytest.approx(vicreg_by_loops(z_a, z_b, *weights), abs=1e-10)


def test_value_by_hand():
    "Two rows, two features: covariance [[2, 2], [2, 2]] of view a, zero of view b."
    z_a, z_b = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    assert VICReg(1, 0, 0).loss(z_a, z_b).item() == pytest.approx(2, abs=1e-12)            # sum over features, mean over rows
    assert VICReg(0, 1, 0).loss(z_a, z_b).item() == pytest.approx(0 + 0.99, abs=1e-12)     # 1 - sqrt(1e-4) of view b, not halved
    assert VICReg(0, 0, 1).loss(z_a, z_b).item() == pytest.approx(2 * 4 / 2, abs=1e-12)


def test_the_defaults_are_the_papers():
    assert VICReg() == VICReg(invariance=25, variance=25, covariance=1)


def test_the_row_count_of_merged_batches_is_that_of_all():
    "n/(n-1) belongs to the union: with the count of a part the value would be visibly another."
    z_a, z_b = paired(12, 3)
    parts = [TwoViewMoments.from_features(z_a[i:j], z_b[i:j]) for i, j in ((0, 1), (1, 4), (4, 12))]
    merged = parts[0] + parts[1] + parts[2]
    assert VICReg(0, 1, 1).value(merged).item() == pytest.approx(vicreg_by_loops(z_a, z_b, 0, 1, 1), abs=1e-10)
    pretended = TwoViewMoments(4, *(getattr(merged, name) for name in ("mean_a", "mean_b", "S_aa", "S_bb", "S_ab")))
    assert abs(VICReg(0, 1, 1).value(pretended) - VICReg(0, 1, 1).value(merged)) > 1e-2


def test_moments_of_one_row_are_refused():
    z_a, z_b = paired(1, 3)
    moments = TwoViewMoments.from_features(z_a, z_b)
    with pytest.raises(ValueError, match="at least 2 rows"): VICReg().value(moments)
    with pytest.raises(ValueError, match="at least 2 rows"): VICReg().curvature(torch.ones(3, 2), moments)


def test_a_common_shift_changes_nothing_and_a_rotation_does():
    z_a, z_b = paired(20, 4)
    shift = torch.tensor([1e3, -1e3, 5.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(VICReg().loss(z_a + shift, z_b + shift), VICReg().loss(z_a, z_b), rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype, level", [(torch.float64, 0.0), (torch.float32, 0.1), (torch.float32, 1e6), (torch.float64, 1e12)])
def test_collapse_costs_the_full_hinge_and_has_no_gradient(dtype, level):
    "Constants so large that their variance comes out as rounding error, of either sign, too."
    z = torch.full((16, 3), level, dtype=dtype)
    value, *gradients = value_and_gradients(VICReg(), z, z)
    assert value.item() == pytest.approx(2 * 25 * 0.99, abs=1e-4)
    for g in gradients: assert torch.isfinite(g).all()


def test_features_beyond_the_wanted_deviation_feel_no_hinge():
    K_a, K_b = paired(30, 4)
    moments, A = TwoViewMoments.from_features(K_a, K_b), 100 * torch.eye(4, dtype=torch.float64)
    curvature = VICReg(0, 1, 0).curvature(A, moments)
    assert curvature.value == 0 and not curvature.gradient.any() and not curvature.ggn(A).any()


def test_the_hessian_is_indefinite_where_the_gauss_newton_matrix_is_not():
    K_a, K_b = paired(30, 4)
    moments, A = TwoViewMoments.from_features(K_a, K_b), 0.1 * torch.eye(4, 2, dtype=torch.float64)
    hessian = torch.func.hessian(lambda a: VICReg(0, 1, 0).value(moments.project(a)))(A).reshape(8, 8)
    assert torch.linalg.eigvalsh(hessian)[0] < -0.1


def test_curvature_of_the_agreement_is_its_hessian():
    K_a, K_b = paired(30, 4)
    moments, A = TwoViewMoments.from_features(K_a, K_b), torch.ones(4, 2, dtype=torch.float64)
    D = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(VICReg(3, 0, 0).curvature(A, moments).ggn(D), 6 * (moments.S_N - moments.S_s) @ D, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 6])
def test_released_weights_against_lightly(dim):
    "Mean over features and half the variance terms, in the weights of equation 6; everything else is equal."
    lightly = pytest.importorskip("lightly.loss")
    a, b = (z.requires_grad_() for z in paired(40, dim))
    ours, theirs = VICReg.as_released(dim).loss(a, b), lightly.VICRegLoss()(a, b)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    for g, w in zip(torch.autograd.grad(ours, [a, b]), torch.autograd.grad(theirs, [a, b])): torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


def test_how_the_paper_differs_from_lightly():
    "Term by term: a factor h, a factor 2, none."
    lightly = pytest.importorskip("lightly.loss")
    z_a, z_b = paired(40, 6)
    z_a, z_b = z_a / 4, z_b / 4                                    # standard deviations below 1, so that the hinge is active
    for weights, factor in (((1, 0, 0), 6), ((0, 1, 0), 2), ((0, 0, 1), 1)):
        theirs = lightly.VICRegLoss(*weights)(z_a, z_b).item()
        assert theirs > 1e-3 and VICReg(*weights).loss(z_a, z_b).item() == pytest.approx(factor * theirs, rel=1e-10)


def test_released_weights():
    assert VICReg.as_released(100) == VICReg(0.25, 12.5, 1.0)
    with pytest.raises(ValueError, match="dim"): VICReg.as_released(0)


@pytest.mark.parametrize("name", ["invariance", "variance", "covariance"])
@pytest.mark.parametrize("bad", [-1e-9, math.inf, "1", True])
def test_bad_parameters(name, bad):
    with pytest.raises((ValueError, TypeError), match=name): VICReg(**{name: bad})
