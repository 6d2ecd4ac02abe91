"""PEIRA's flow with lagging moments: rates, critical speed, rotation, overshoot, and the limit of infinite speed."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import linear_sum_assignment

from oracles import lagging_jacobian, lagging_steps
from peira_krepes.peira.critical_points import hessian_spectrum
from peira_krepes.peira.dynamics import peira_flow
from peira_krepes.peira.energy import energy, minimum_energy
from peira_krepes.peira.slow_predictor import critical_speed, overshoot, rotating_wave, slow_predictor_flow, slow_predictor_rates
from test_peira_dynamics import TIED, start


def diagonal(*b): return torch.diag(torch.tensor(b, dtype=torch.float64))


def matched(x, y):
    "Largest distance between two multisets of complex numbers."
    distance = np.abs(np.asarray(x)[:, None] - np.asarray(y)[None])
    return distance[linear_sum_assignment(distance)].max()


@pytest.mark.parametrize("b, ridge, modes, dim", [([0.9, 0.5, 0.3, 0.0], 0.2, (0, 1, 2), 3), ([0.9, 0.5, 0.3, 0.0], 0.2, (0, 1), 3), ([0.9, 0.5, 0.3, -0.9], 0.2, (1, 2), 2),
                                                  ([0.9, 0.5, 0.3, 0.0], 0.1, (2, 0), 2), ([0.9, 0.5, 0.0], 0.2, (), 2), ([0.7, 0.3], 0.1, (0, 1), 2), ([0.9], 0.3, (0,), 1)])
@pytest.mark.parametrize("speed", [0.07, 0.9, 12.0])
def test_rates_against_a_jacobian_by_finite_differences(b, ridge, modes, dim, speed):
    rates = slow_predictor_rates(b, ridge, modes, dim, speed)
    assert len(rates) == len(b) * dim + dim * (dim + 1) and (rates.real.diff() <= 1e-12).all()
    assert matched(rates, np.linalg.eigvals(lagging_jacobian(b, ridge, modes, dim, speed))) < 1e-5 # differences of step 1e-5, and roots of multiplicity two


def test_rates_with_equal_correlations():
    "Multiple roots, which an eigenvalue solver finds to the square root of its precision only: compare the characteristic polynomial of the pair's block instead."
    rates = slow_predictor_rates([0.5, 0.5], 0.2, (0, 1), 2, 1.0)
    h = 4 * 0.2 * (0.5**0.5 - 0.2) / 0.5**0.5
    expected = 3 * list(np.roots([1, 1, h])) + 3 * [-1.0] + [0.0]
    assert matched(rates, expected) < 1e-7


def test_fast_averages_have_the_hessians_rates():
    b, modes = [0.9, 0.5, 0.3, 0.0], (0, 1)
    rates = slow_predictor_rates(b, 0.2, modes, 3, 1e7)
    slow = rates[rates.real > -1e5].real
    torch.testing.assert_close(slow.sort().values, (-hessian_spectrum(b, 0.2, modes, 3)).sort().values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("modes", [(), (0,), (1, 2), (0, 2)])
def test_saddles_are_left_at_the_same_rate_at_every_speed(modes):
    "Outside modes feel no lag, so the growth rates of the plain flow are all there."
    b, lam = [0.9, 0.5, 0.3, 0.0], 0.2
    growth = -hessian_spectrum(b, lam, modes, 2)
    for speed in (0.1, 1.0, 10.0):
        rates = slow_predictor_rates(b, lam, modes, 2, speed)
        for g in growth[growth > 1e-9]: assert (rates - g).abs().min() < 1e-10


def largest(b, ridge, dim, speed):
    r = min(dim, sum(x > ridge**2 for x in b))
    return slow_predictor_rates(sorted(b, reverse=True), ridge, range(r), dim, speed)[0].real.item()


@settings(max_examples=60, deadline=None)
@given(b=st.lists(st.floats(0.05, 1), min_size=1, max_size=4), dim=st.integers(1, 4), ridge=st.sampled_from([0.05, 0.1, 0.2]))
def test_critical_speed_separates_stable_from_unstable(b, dim, ridge):
    critical = critical_speed(b, ridge, dim)
    for factor in (1.001, 1.5, 10): assert largest(b, ridge, dim, factor * critical + 1e-6) < 1e-9
    if critical > 1e-3: assert largest(b, ridge, dim, 0.99 * critical) > 1e-9


def test_critical_speed_by_hand():
    assert critical_speed([0.9, 0.0], 0.1, 2) == pytest.approx(8.9, abs=1e-12)
    assert critical_speed([0.5, 0.5], 0.1, 2) == critical_speed([0.5], 0.1, 1) == critical_speed([0.9, 0.1], 0.1, 1) == 0.0
    assert critical_speed([0.005], 0.1, 1) == 0.0
    assert critical_speed([0.0, 0.1, 0.9], 0.1, 2) == critical_speed([0.9, 0.1], 0.1, 2) == pytest.approx(2.2503, abs=1e-4)


def test_infinite_speed_is_peiras_flow():
    W0 = start(3, 2, 0, norm=0.3)
    exact = peira_flow(W0, TIED, 0.2, 5).W
    gaps = [(slow_predictor_flow(W0, TIED, 0.2, speed, 5).W - exact).norm().item() for speed in (1e3, 1e4, 1e5)]
    assert gaps[2] < 1e-4 and all(9 < a / b < 11 for a, b in zip(gaps, gaps[1:]))


def test_the_flow_keeps_its_records():
    W0 = start(3, 2, 1)
    flow = slow_predictor_flow(W0, TIED, 0.2, 2.0, 10)
    assert flow.path.shape == (401, 3, 2) and flow.N.shape == flow.Sigma.shape == (401, 2, 2) and torch.equal(flow.W, flow.path[-1])
    torch.testing.assert_close(flow.N[0], W0.T @ W0, rtol=0, atol=1e-12)
    assert flow.lagging_energies[0].item() == pytest.approx(flow.energies[0].item(), abs=1e-12) == energy(W0, TIED, 0.2).item()
    P = flow.Sigma[50] @ torch.linalg.inv(flow.N[50] + 0.2 * torch.eye(2, dtype=torch.float64))
    assert flow.lagging_energies[50].item() == pytest.approx((-P.trace() / 2 + 0.1 * flow.N[50].trace()).item(), abs=1e-10)


def test_a_non_contiguous_start_and_global_precision_do_not_matter():
    W0 = start(3, 2, 1)
    expected = slow_predictor_flow(W0, TIED, 0.2, 2.0, 3).W
    torch.testing.assert_close(slow_predictor_flow(W0.T.contiguous().T, TIED, 0.2, 2.0, 3).W, expected, rtol=0, atol=0)


def test_fast_averages_reach_the_minimum_and_slow_ones_rotate_when_a_column_is_free():
    W0 = start(3, 3, 2, norm=0.01)
    assert slow_predictor_flow(W0, TIED, 0.2, 5.0, 150).energies[-1].item() == pytest.approx(minimum_energy([0.8, 0.5], 0.2, 3), abs=1e-8)
    late = slow_predictor_flow(W0, TIED, 0.2, 1.0, 150)
    assert late.energies[-1] > minimum_energy([0.8, 0.5], 0.2, 3) + 0.01 and late.lagging_energies[-1] < minimum_energy([0.8, 0.5], 0.2, 3) - 0.01


@pytest.mark.parametrize("speed", [0.3, 1.0, 3.0])
def test_rotation_from_the_flow(speed):
    share, velocity = rotating_wave(0.8, 0.2, speed)
    path = slow_predictor_flow(torch.tensor([[0.01, 0.002], [0.005, -0.01]], dtype=torch.float64), diagonal(0.8, 0), 0.2, speed, 150).path[-21:, 0].numpy()
    angle = np.unwrap(np.arctan2(path[:, 1], path[:, 0]))
    assert (path**2).sum(1) == pytest.approx(share, abs=1e-5)
    assert abs(np.diff(angle)) == pytest.approx(velocity * 150 / 400, abs=1e-5)


def test_rotation_at_its_ends():
    best = 0.8**0.5 - 0.2
    assert rotating_wave(0.8, 0.2, 3.8 - 1e-6)[0] == pytest.approx(best, rel=1e-5)
    assert rotating_wave(0.8, 0.2, 1e-5)[0] == pytest.approx(2 * best, rel=1e-3)
    speeds = np.linspace(0.05, 3.75, 40)
    assert (np.diff([rotating_wave(0.8, 0.2, x)[0] for x in speeds[speeds > 0.5]]) < 0).all()


@pytest.mark.parametrize("b, ridge", [(0.9, 0.1), (0.3, 0.1), (0.8, 0.2)])
def test_overshoot(b, ridge):
    best = b**0.5 - ridge
    peaks = [overshoot(b, ridge, x) for x in (0.01, 0.03, 0.1, 0.3, 1.0, 4.0, 40.0)]
    assert (np.diff(peaks) <= 1e-8).all() and peaks[-1] == pytest.approx(1, abs=1e-8)
    assert peaks[0] == pytest.approx(2 * best / 0.01, rel=0.01)
    for speed, peak in ((0.3, peaks[3]), (1.0, peaks[4])): # plain steps with running averages
        assert max(lagging_steps(b, ridge, 1e-3, speed * 1e-3, 1e-6, 30_000)) / best == pytest.approx(peak, rel=0.01) # a first-order scheme of step 0.001


def test_overshoot_worked_values():
    assert overshoot(0.9, 0.1, 1.0) == pytest.approx(1.93495, abs=1e-5) and overshoot(0.9, 0.1, 0.1) == pytest.approx(17.18981, abs=1e-5)


def test_refusals():
    W = start(3, 2, 0)
    for arguments, words in (((W, TIED, 0, 1, 1), "ridge"), ((W, TIED, 0.1, 0, 1), "speed"), ((W, TIED, 0.1, float("nan"), 1), "speed"), ((W, TIED, 0.1, 1, 0), "duration"),
                             ((W[:2], TIED, 0.1, 1, 1), "W must have shape"), ((W, torch.triu(TIED), 0.1, 1, 1), "symmetric"), ((W * float("inf"), TIED, 0.1, 1, 1), "finite")):
        with pytest.raises(ValueError, match=words): slow_predictor_flow(*arguments)
    for call, words in ((lambda: slow_predictor_rates([0.9], 0.1, (0,), 1, 0), "speed"), (lambda: slow_predictor_rates([0.005], 0.1, (0,), 1, 1), "ridge"), (lambda: critical_speed([0.9], 0.1, 0), "dim"),
                        (lambda: critical_speed([0.9], -1, 1), "ridge"), (lambda: critical_speed([float("nan")], 0.1, 1), "eigenvalues"), (lambda: rotating_wave(0.8, 0.2, 3.8), "speed"),
                        (lambda: rotating_wave(0.04, 0.2, 0.1), "eigenvalue"), (lambda: overshoot(0.9, 0.1, 0), "speed"), (lambda: overshoot(0.01, 0.1, 1), "eigenvalue"), (lambda: overshoot(0.9, 0, 1), "ridge")):
        with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize("ridge, share", [(0.2, 0.13), (0.1, 0.24), (0.01, 0.24), (1e-6, 0.24)])
def test_rotation_solves_its_equations_for_small_ridges_and_far_beyond_twice_the_optimum(ridge, share):
    b = 0.8
    speed = share * (b / ridge - ridge)
    s, velocity = rotating_wave(b, ridge, speed)
    phi = np.arctan(2 * velocity / speed)
    C, D = np.cos(phi / 2) ** 2, np.sin(phi / 2) ** 2
    assert C / (s * C + ridge) ** 2 + D / (s * D + ridge) ** 2 == pytest.approx(1 / b, rel=1e-8)
    assert ridge * b * s * (s + 2 * ridge) * np.cos(phi) ** 2 / ((s * C + ridge) * (s * D + ridge)) ** 2 == pytest.approx(speed, rel=1e-6)
    assert type(s) is type(velocity) is float
    if ridge == 0.01: assert s / (b**0.5 - ridge) == pytest.approx(22.6, abs=0.1)


def test_rotation_of_a_small_ridge_from_the_flow():
    "Nearly three times the optimum, where the slow limit is two."
    share, velocity = rotating_wave(0.8, 0.1, 1.9)
    path = slow_predictor_flow(torch.tensor([[0.01, 0.002], [0.005, -0.01]], dtype=torch.float64), diagonal(0.8, 0), 0.1, 1.9, 300).path[-21:, 0].numpy()
    assert share > 2.9 * (0.8**0.5 - 0.1)
    assert (path**2).sum(1) == pytest.approx(share, abs=1e-5)


def test_rotation_within_rounding_of_its_branch_point():
    b = 0.01 + 1e-12
    share, velocity = rotating_wave(b, 0.1, (b / 0.1 - 0.1) * (1 - 1e-15))
    assert abs(share - (b**0.5 - 0.1)) < 1e-13 and abs(velocity) < 1e-13
