"SIGReg: LeJEPA's algorithms by loops over the whole grid, directions and seeds, what grid and directions cannot see, lightly's version."
import dataclasses
import math

import pytest
import torch

from conformance import ObjectiveConformance, paired, value_and_gradients
from oracles import epps_pulley_by_loops, lejepa_by_loops
from peira_krepes.objectives.sigreg import SIGReg


class TestSIGReg(ObjectiveConformance):
    objectives = [SIGReg(n_directions=8), SIGReg(weight=0.7, n_directions=5, seed=3), SIGReg(weight=1.0, n_directions=6, extent=3.0, n_points=33)]


@pytest.mark.parametrize("options", [dict(), dict(weight=0.0), dict(weight=1.0), dict(extent=3.0, n_points=33), dict(extent=2.0, n_points=3)])
def test_value_against_plain_loops(options):
    "Complex exponentials over the full symmetric grid: half of it gives the same value."
    z_a, z_b = paired(7, 3)
    objective = SIGReg(**({"weight": 0.3, "n_directions": 4, "seed": 2} | options))
    wanted = lejepa_by_loops(z_a, z_b, objective.directions(3), objective.weight, objective.extent, objective.n_points)
    assert objective.loss(z_a, z_b).item() == pytest.approx(wanted, abs=1e-10)


def test_the_defaults():
    assert SIGReg() == SIGReg(weight=0.05, n_directions=1024, seed=0, extent=5.0, n_points=17)


def test_directions_are_unit_reproducible_and_of_their_own_generator():
    state = torch.random.get_rng_state()
    U = SIGReg(n_directions=300, seed=7).directions(5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert U.shape == (5, 300) and torch.allclose(U.norm(dim=0), torch.ones(300, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.manual_seed(123)
    assert torch.equal(U, SIGReg(weight=0.5, n_directions=300, seed=7).directions(5))
    assert (U - SIGReg(n_directions=300, seed=8).directions(5)).norm() > 1
    second = U @ U.T / 300                                         # uniform on the sphere: I/5, with E u_i^4 = 3/35, E u_i^2 u_j^2 = 1/35
    assert (second.diagonal() - 0.2).abs().max() < 5 * (3 / 35 - 1 / 25) ** 0.5 / 300 ** 0.5
    assert (second - second.diagonal().diag()).abs().max() < 5 * (1 / 35) ** 0.5 / 300 ** 0.5


def test_new_directions_for_each_step():
    z_a, z_b = paired(20, 4)
    objective = SIGReg(weight=1.0, n_directions=3)
    steps = [dataclasses.replace(objective, seed=step).loss(z_a, z_b).item() for step in range(3)]
    assert steps[0] == objective.loss(z_a, z_b).item() and len(set(steps)) == 3


@pytest.mark.parametrize("n", [8, 200])
def test_gaussian_rows_have_the_expected_statistic(n):
    "Sum of w (1 - phi^2), independent of n."
    objective, g = SIGReg(weight=1.0, n_directions=4), torch.Generator().manual_seed(n)
    draws = torch.stack([objective.loss(z, z) for z in torch.randn(200, n, 6, generator=g, dtype=torch.float64)])
    t, w = objective.grid()
    expected = (w * (1 - (-t**2).exp())).sum()
    assert abs(expected - math.sqrt(2 * math.pi) * (1 - 1 / math.sqrt(3))) < 1e-3
    assert abs(draws.mean() - expected) < 5 * draws.std() / 200 ** 0.5


def test_fine_grid_against_the_integral_in_closed_form():
    x = torch.randn(30, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = (-(x - x.T) ** 2 / 2).exp().sum() / 30 - 2**0.5 * (-x**2 / 4).exp().sum() + 30 / 3**0.5
    objective = SIGReg(weight=1.0, n_directions=1, extent=9.0, n_points=129)
    assert objective.loss(x, x).item() == pytest.approx(math.sqrt(2 * math.pi) * kernel.item(), abs=1e-8)


def test_the_grid_repeats():
    x = torch.randn(30, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for objective, period in ((SIGReg(1.0, 1), 2 * math.pi / 0.625), (SIGReg(1.0, 1, extent=3.0, n_points=33), 2 * math.pi / 0.1875)):
        assert objective.loss(x + period, x + period).item() == pytest.approx(objective.loss(x, x).item(), abs=1e-9)
        assert objective.loss(x + period / 2, x + period / 2) > 10 * objective.loss(x, x)


def test_collapse_is_a_critical_point_that_pushes_outwards_nearby():
    z, u = torch.zeros(16, 3, dtype=torch.float64), paired(16, 3, shift=0.0)[0]
    objective = SIGReg(weight=1.0, n_directions=16)
    t, w = objective.grid()
    value, *gradients = value_and_gradients(objective, z, z)
    assert value.item() == pytest.approx(16 * (w * (1 - (-t**2 / 2).exp()) ** 2).sum().item(), abs=1e-10)
    for g in gradients: assert not g.any()
    _, near, _ = value_and_gradients(objective, 1e-3 * u, 1e-3 * u)
    assert (near * u).sum() < 0


def test_gradient_is_bounded_far_out():
    objective = SIGReg(weight=1.0, n_directions=16)
    t, w = objective.grid()
    for size in (1e1, 1e3, 1e6):
        z = size * paired(16, 3)[0]
        _, g, _ = value_and_gradients(objective, z, z)
        assert g.norm(dim=1).max() < 2 * (w * t).sum()              # half of the statistic belongs to each view


def test_a_subspace_without_directions_is_not_seen():
    z, _ = paired(40, 12)
    objective = SIGReg(weight=1.0, n_directions=5)
    Q = torch.linalg.qr(objective.directions(12))[0]
    flat = z @ Q @ Q.T
    assert torch.linalg.matrix_rank(flat) == 5
    assert objective.loss(flat, flat).item() == pytest.approx(objective.loss(z, z).item(), abs=1e-10)
    other = dataclasses.replace(objective, seed=1)
    assert abs(other.loss(flat, flat) - other.loss(z, z)) > 0.1


def test_the_statistic_of_a_repeated_batch_doubles():
    "It is no mean over samples: averaging processes' losses would halve it."
    z_a, z_b = paired(20, 4)
    objective = SIGReg(weight=1.0, n_directions=6)
    assert objective.loss(z_a.repeat(2, 1), z_b.repeat(2, 1)).item() == pytest.approx(2 * objective.loss(z_a, z_b).item(), abs=1e-10)


@pytest.mark.parametrize("extent, n_points", [(3.0, 33), (5.0, 17)])
def test_against_lightly(extent, n_points):
    "The same directions and grid; its stored float32 grid is replaced by the float64 one."
    theirs = pytest.importorskip("lightly.loss.lejepa_loss")
    a, b = (z.requires_grad_() for z in paired(40, 6))
    ours = SIGReg(weight=0.2, n_directions=10, extent=extent, n_points=n_points)
    regulariser = theirs.SIGReg(knots=n_points // 2 + 1, t_max=extent, num_vectors=10).double()
    t, w = ours.grid()
    padded = lambda x, first: torch.cat([torch.tensor([first], dtype=torch.float64), x])
    torch.testing.assert_close(regulariser.weights[1:], w, rtol=1e-6, atol=0)
    regulariser.t, regulariser.phi, regulariser.weights = padded(t, 0.0), padded((-t**2 / 2).exp(), 1.0), padded(w, 0.0)
    regulariser._generate_unit_vectors = lambda device, dtype, num_features: ours.directions(num_features)
    views = torch.stack([a, b])
    wanted = 0.2 * regulariser(views) + 0.8 * theirs.lejepa_invariance_loss(all_proj=views, global_proj=views)
    got = ours.loss(a, b)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)
    for g, w in zip(torch.autograd.grad(got, [a, b]), torch.autograd.grad(wanted, [a, b])): torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


def test_epps_pulley_oracle_by_hand():
    "One row at zero, three points -1, 0, 1: twice half a step of (1 - e^-1/2)^2 e^-1/2."
    assert epps_pulley_by_loops([0.0], 1.0, 3) == pytest.approx((1 - math.exp(-0.5)) ** 2 * math.exp(-0.5), abs=1e-15)


@pytest.mark.parametrize("options", [dict(weight=-0.1), dict(weight=1.1), dict(n_directions=0), dict(n_directions=2.5), dict(seed=-1), dict(extent=0.0), dict(n_points=16), dict(n_points=1)])
def test_bad_parameters(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))): SIGReg(**options)
