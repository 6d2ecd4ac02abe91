"Spectral contrastive loss: sums over pairs of rows, the factorisation, the bound, and the authors' estimate over different rows."
import dataclasses

import pytest
import torch

from conformance import MomentConformance, paired
from oracles import spectral_by_loops
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.objectives.spectral import SpectralContrastive


class TestSpectralContrastive(MomentConformance):
    objectives = [SpectralContrastive()]

    def test_there_are_objectives_with_different_parameters(self):
        assert not dataclasses.fields(SpectralContrastive) and SpectralContrastive() == SpectralContrastive()

    @staticmethod
    def inner(objective, W_a, W_b):
        "All n^2 scores, divided by n."
        return (W_a @ W_b.T).flatten() / len(W_a)

    @staticmethod
    def outer(objective, g):
        n = int(len(g) ** 0.5)
        return g.square().sum() - 2 * g.reshape(n, n).trace()


def test_value_against_plain_loops():
    z_a, z_b = paired(9, 4)
    assert SpectralContrastive().loss(z_a, z_b).item() == pytest.approx(spectral_by_loops(z_a, z_b), abs=1e-10)


def test_value_by_hand():
    "Scores [[2, 0], [3, 1]]: -(2 + 1) + (4 + 9 + 1) / 4."
    z_a, z_b = torch.tensor([[2.0, 0.0], [3.0, 1.0]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    assert SpectralContrastive().loss(z_a, z_b).item() == pytest.approx(-3 + 14 / 4, abs=1e-12)


def test_means_count():
    "Uncentred: a common shift changes the loss, and one constant embedding of length one has loss -1."
    one = torch.tensor([[0.6, 0.8]], dtype=torch.float64).repeat(10, 1)
    assert SpectralContrastive().loss(one, one).item() == pytest.approx(-1, abs=1e-12)


@pytest.mark.parametrize("n, d", [(8, 3), (8, 8), (4, 8)])
def test_the_bound_of_a_batch_is_reached_by_free_embeddings(n, d):
    z = n ** 0.5 * torch.eye(n, d, dtype=torch.float64)
    assert SpectralContrastive().loss(z, z).item() == pytest.approx(-min(n, d), abs=1e-12)
    z_a, z_b = paired(n, d)
    assert SpectralContrastive().loss(z_a, z_b) > -min(n, d)


def test_value_is_a_factorisation_of_the_joint_law():
    "L = |T - F G'|^2 - |T|^2 for tables of embeddings of a finite law, and the SVD reaches minus the sum of squared correlations."
    g = torch.Generator().manual_seed(0)
    pi = torch.rand(5, 6, generator=g, dtype=torch.float64)
    pi /= pi.sum()
    p, q = pi.sum(1), pi.sum(0)
    T = pi / torch.outer(p, q).sqrt()
    moments = lambda U, V: TwoViewMoments(2, p @ U, q @ V, U.T @ (p[:, None] * U), V.T @ (q[:, None] * V), U.T @ pi @ V)
    U, V = (torch.randn(k, 2, generator=g, dtype=torch.float64) for k in (5, 6))
    F, G = p.sqrt()[:, None] * U, q.sqrt()[:, None] * V
    assert SpectralContrastive().value(moments(U, V)).item() == pytest.approx(((T - F @ G.T).square().sum() - T.square().sum()).item(), abs=1e-10)
    left, c, right = torch.linalg.svd(T)
    best = moments(left[:, :2] * c[:2].sqrt() / p.sqrt()[:, None], right.T[:, :2] * c[:2].sqrt() / q.sqrt()[:, None])
    assert SpectralContrastive().value(best).item() == pytest.approx(-c[:2].square().sum().item(), abs=1e-10)


def test_the_authors_estimate_leaves_out_the_pairs():
    "n^2 of ours = n (n-1) of theirs and the squared scores of the pairs."
    z_a, z_b = paired(9, 3)
    pull = -2 * (z_a * z_b).sum(1).mean().item()
    theirs, pairs = spectral_by_loops(z_a, z_b, same=False) - pull, (z_a * z_b).sum(1).square().mean().item()
    assert SpectralContrastive().loss(z_a, z_b).item() == pytest.approx(pull + 8 / 9 * theirs + pairs / 9, abs=1e-10)
    assert abs(SpectralContrastive().loss(z_a, z_b).item() - pull - theirs) > 1e-2


def test_rotating_the_coefficients_is_a_zero_mode():
    K_a, K_b = paired(30, 5)
    A = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curvature = SpectralContrastive().curvature(A, TwoViewMoments.from_features(K_a, K_b))
    omega = torch.tensor([[0.0, 1, 2], [-1, 0, 3], [-2, -3, 0]], dtype=torch.float64)
    assert curvature.ggn(A @ omega).abs().max() < 1e-10 and abs((curvature.gradient * (A @ omega)).sum()) < 1e-10


def test_other_cuts_are_indefinite():
    "Cut at the moments or at the embeddings, the outer Hessian, and the matrix, has negative eigenvalues."
    K_a, K_b = paired(12, 4)
    K_a = K_a * torch.tensor([3.0, 1.0, 1.0, 0.2])
    moments, A = TwoViewMoments.from_features(K_a, K_b), torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3
    def lowest(inner, outer):
        J = torch.func.jacrev(inner)(A).reshape(-1, 8)
        return torch.linalg.eigvalsh(J.T @ torch.func.hessian(outer)(inner(A)) @ J)[0]
    second = lambda a: torch.stack([a.T @ moments.S_aa @ a, a.T @ moments.S_bb @ a]).flatten()
    assert lowest(second, lambda g: (g[:4] * g[4:]).sum()) < -1e-3
    both = lambda a: torch.cat([K_a @ a, K_b @ a]).flatten()
    assert lowest(both, lambda g: SpectralContrastive().loss(*g.reshape(2, 12, 2))) < -1e-3
