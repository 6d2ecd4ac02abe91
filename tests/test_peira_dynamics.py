"""The two flows: where they end, what separates them, and what is refused."""
from itertools import combinations, product

import numpy as np
import pytest
import torch

from oracles import distillation_jacobian, principal_angles_by_projection
from peira_krepes.peira import dynamics
from peira_krepes.peira.critical_points import critical_points, is_strict_saddle
from peira_krepes.peira.dynamics import canonical_angles, distillation_fixed_points, distillation_rates, peira_flow, self_distillation_flow
from peira_krepes.peira.energy import energy, gradient, minimum_energy
from test_peira_cca import binary_pair, random_table, tied_table

TIED = tied_table(0.8, 0.5).operator(tied=True)


def start(rows, dim, seed, norm=None):
    W = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return W if norm is None else W * norm / W.norm()


@pytest.mark.parametrize("seed", range(3))
def test_three_state_table_one_flow_dies_and_the_other_arrives(seed):
    W0 = start(3, 2, seed, norm=0.1)
    assert self_distillation_flow(W0, TIED, 0.2, 0.05, 400).W.norm() < 1e-6
    flow = peira_flow(W0, TIED, 0.2, 300)
    assert flow.energies[-1].item() == pytest.approx(-0.3696932, abs=1e-7) == minimum_energy([0.8, 0.5], 0.2, 2)


@pytest.mark.parametrize("rho, center, tied, dim, expected", [(0.25, True, False, 1, -0.08), (0.25, False, False, 2, -0.485), (-0.8, True, False, 1, -0.3155573), (-0.8, True, True, 1, 0.0), (0.0, False, False, 2, -0.405)])
def test_worked_minima_are_reached(rho, center, tied, dim, expected):
    B = binary_pair(rho).operator(tied=tied, center=center)
    flow = peira_flow(start(len(B), dim, 1), B, 0.1, 400)
    assert flow.energies[-1].item() == pytest.approx(expected, abs=1e-7)


def test_peira_flow_descends_and_reports_its_path():
    B = random_table(3, 4).operator(center=False)
    W0 = start(7, 2, 0)
    flow = peira_flow(W0, B, 0.2, 50)
    assert flow.times[0] == 0 and flow.times[-1] == 50 and torch.equal(flow.path[-1], flow.W)
    torch.testing.assert_close(flow.path[0], W0, rtol=0, atol=1e-12)
    assert (flow.energies.diff() <= 1e-12).all()
    for i in (0, 100, 200): assert flow.energies[i].item() == pytest.approx(energy(flow.path[i], B, 0.2).item(), abs=1e-12)
    slope = -gradient(flow.path[0], B, 0.2)
    short = peira_flow(W0, B, 0.2, 1e-6)
    torch.testing.assert_close((short.W - W0) / 1e-6, slope, rtol=1e-4, atol=1e-5)


def test_peira_flow_ends_at_a_minimum_and_escapes_a_saddle():
    B = TIED
    saddle = critical_points(B, 0.2, 2)[1].W
    assert is_strict_saddle(saddle, B, 0.2)
    escaped = peira_flow(saddle + 1e-3 * start(3, 2, 5), B, 0.2, 300)
    assert not is_strict_saddle(escaped.W, B, 0.2) and escaped.energies[-1].item() == pytest.approx(minimum_energy([0.8, 0.5], 0.2, 2), abs=1e-8)


def test_zero_and_duplicate_columns_are_invariant():
    W0 = start(3, 2, 0); W0[:, 1] = 0
    assert peira_flow(W0, TIED, 0.2, 100).W[:, 1].abs().max() == 0
    W0[:, 1] = W0[:, 0] # for a while: rounding separates them in the end, since the set is unstable
    W = peira_flow(W0, TIED, 0.2, 3).W
    torch.testing.assert_close(W[:, 0], W[:, 1], rtol=0, atol=1e-8)
    assert torch.linalg.eigvalsh(W.T @ W)[0].abs() < 1e-8


def test_fixed_points_of_one_mode():
    (low, s_low), (high, s_high) = distillation_fixed_points(0.8, 0.2, 0.05)
    assert s_low == pytest.approx(0.01868, abs=5e-6) and low * high == pytest.approx(0.05, abs=1e-14) and low + high == pytest.approx(0.8, abs=1e-14)
    for p, s in ((low, s_low), (high, s_high)): assert p == pytest.approx(0.8 * s / (s + 0.2), abs=1e-12)
    assert distillation_fixed_points(0.4, 0.2, 0.05) == () and distillation_fixed_points(-0.8, 0.2, 0.05) == () and distillation_fixed_points(0.5, 0.2, 0.0625) == ()
    assert distillation_fixed_points(1.0, 0.2, 1e-14)[0][0] == pytest.approx(1e-14, rel=1e-10)


@pytest.mark.parametrize("factor, survives", [(0.98, False), (1.02, True)])
def test_the_lower_fixed_point_separates(factor, survives):
    "One mode started just below dies, just above arrives at the upper fixed point."
    _, vectors = torch.linalg.eigh(TIED)
    (_, low), (_, high) = distillation_fixed_points(0.8, 0.2, 0.05)
    W0 = (factor * low) ** 0.5 * vectors[:, 2:]
    share = self_distillation_flow(W0, TIED, 0.2, 0.05, 800).W.square().sum().item()
    assert share == pytest.approx(high if survives else 0.0, abs=1e-8)


def test_without_decay_the_norm_grows_without_bound():
    norms = self_distillation_flow(start(3, 2, 0, norm=0.1), TIED, 0.2, 0.0, 2000).path.flatten(1).norm(dim=1)
    assert (norms.diff() > 0).all() and norms[-1] > 2 * norms[20] > 1


def test_large_starts_find_the_leading_modes_in_both_flows():
    W0 = start(3, 1, 3)
    for flow in (peira_flow(W0, TIED, 0.2, 300), self_distillation_flow(W0, TIED, 0.2, 0.05, 300)):
        direction = flow.W[:, 0] / flow.W.norm()
        assert abs(direction @ TIED @ direction - 0.8) < 1e-8


@pytest.mark.parametrize("p_index, mode, b, others", [(0, 2, 0.8, (0.5, 0.0)), (1, 2, 0.8, (0.5, 0.0)), (1, 1, 0.5, (0.8, 0.0))])
def test_linearisation_of_self_distillation(p_index, mode, b, others):
    "Rates measured from the flow itself: a small displacement, followed for a short time."
    p, s = distillation_fixed_points(b, 0.2, 0.05)[p_index]
    _, vectors = torch.linalg.eigh(TIED)
    W = torch.zeros(3, 2, dtype=torch.float64); W[:, 0] = s**0.5 * vectors[:, mode]
    duration, size, columns = 1e-3, 1e-4, []
    for H in torch.eye(6, dtype=torch.float64).view(6, 3, 2):
        ends = [self_distillation_flow(W + sign * size * H, TIED, 0.2, 0.05, duration).W for sign in (1, -1)]
        columns.append(((ends[0] - ends[1]) / (2 * size)).flatten())
    rates = torch.log(torch.linalg.eigvals(torch.stack(columns, 1)).real).sort().values / duration
    predicted = torch.tensor([-0.1 * (2 * p - b) / b, -0.05, -0.05, 0.0] + [(c - b) * p for c in others], dtype=torch.float64).sort().values
    torch.testing.assert_close(rates, predicted, rtol=0, atol=1e-5)


def test_refusals():
    W = start(3, 2, 0)
    for flow in (lambda W, B, r, t: peira_flow(W, B, r, t), lambda W, B, r, t: self_distillation_flow(W, B, r, 0.1, t)):
        for arguments, words in (((W, TIED, 0, 1), "ridge"), ((W, TIED, 0.1, 0), "duration"), ((W, TIED, 0.1, float("inf")), "duration"), ((W[:2], TIED, 0.1, 1), "W must have shape"),
                                 ((W, torch.triu(TIED), 0.1, 1), "symmetric"), ((W * float("nan"), TIED, 0.1, 1), "finite")):
            with pytest.raises(ValueError, match=words): flow(*arguments)
    with pytest.raises(ValueError, match="decay"): self_distillation_flow(W, TIED, 0.1, -0.1, 1)
    with pytest.raises(ValueError, match="decay"): distillation_fixed_points(0.5, 0.1, 0)


@pytest.mark.parametrize("b, dim", [([0.8, 0.5, 0.0], 2), ([0.95, 0.8, 0.6, -0.7], 3), ([0.7], 1)])
def test_every_fixed_point_of_self_distillation_has_the_stated_rates(b, dim):
    "Against a Jacobian by differences, for all sets of modes and all choices of upper and lower fixed point."
    usable = [i for i, x in enumerate(b) if x > 0 and x**2 > 0.2]
    for modes in (m for r in range(dim + 1) for m in combinations(usable, r)):
        for lower in product((False, True), repeat=len(modes)):
            W = torch.zeros(len(b), dim, dtype=torch.float64)
            for column, (i, low) in enumerate(zip(modes, lower)): W[i, column] = distillation_fixed_points(b[i], 0.2, 0.05)[1 - low][1] ** 0.5
            found = np.linalg.eigvals(distillation_jacobian(W, np.diag(b), 0.2, 0.05))
            rates = distillation_rates(b, 0.2, 0.05, modes, dim, [i for i, low in zip(modes, lower) if low])
            assert np.sort(found.real)[::-1] == pytest.approx(rates.numpy(), abs=1e-6) and np.abs(found.imag).max() < 1e-4 # central differences, and square roots of them where rates repeat


def test_what_attracts_in_self_distillation():
    b = [0.8, 0.7, 0.5, 0.1]
    attracts = lambda modes, lower=(): bool(distillation_rates(b, 0.2, 0.05, modes, 3, lower)[0] <= 1e-12)
    assert all(attracts(top) for top in ((), (0,), (0, 1), (0, 1, 2))) # partial fills included
    assert not any(attracts(swapped) for swapped in ((1,), (0, 2), (1, 2)))
    assert not any(attracts(modes, lower) for modes in ((0,), (0, 1), (0, 1, 2)) for lower in ([0], list(modes)))


def test_a_partial_fill_attracts_self_distillation_and_not_peira():
    b, W = torch.diag(torch.tensor([0.8, 0.7, 0.5], dtype=torch.float64)), torch.zeros(3, 2, dtype=torch.float64)
    W[0, 0] = distillation_fixed_points(0.8, 0.2, 0.05)[1][1] ** 0.5
    kick = 1e-3 * start(3, 2, 4)
    stayed, left = self_distillation_flow(W + kick, b, 0.2, 0.05, 300).W, peira_flow(W + kick, b, 0.2, 300).W
    assert torch.linalg.svdvals(stayed)[1] < 1e-6 and torch.linalg.svdvals(left)[1] > 0.5


def test_angles_against_projections():
    B = random_table(4, 4, 2).operator()
    vectors = torch.linalg.eigh(B)[1].flip(1)
    for seed, r in ((0, 1), (1, 2), (2, 3)):
        W = start(8, r, seed)
        assert canonical_angles(W, B, r).tolist() == pytest.approx(principal_angles_by_projection(W, vectors[:, :r]), abs=1e-8)
        R = start(r, r, seed + 9)
        torch.testing.assert_close(canonical_angles(W @ R, B, r), canonical_angles(W, B, r), rtol=0, atol=1e-10)
        assert canonical_angles(vectors[:, :r] @ R, B, r).abs().max() < 1e-10


def test_angles_of_degenerate_embeddings():
    half = torch.pi / 2
    vectors = torch.linalg.eigh(TIED)[1].flip(1)
    assert canonical_angles(torch.zeros(3, 2, dtype=torch.float64), TIED, 2).tolist() == pytest.approx([half, half], abs=1e-12)
    assert canonical_angles(vectors[:, :1].repeat(1, 2), TIED, 2).tolist() == pytest.approx([half, 0], abs=1e-10)
    assert canonical_angles(vectors[:, 2:], TIED, 1).tolist() == pytest.approx([half], abs=1e-10)
    wide = vectors @ torch.diag(torch.tensor([2.0, 1.0, 0.1], dtype=torch.float64)) # more columns than modes asked for: the strongest count
    assert canonical_angles(wide, TIED, 2).abs().max() < 1e-10
    W = start(3, 2, 0)
    torch.testing.assert_close(canonical_angles(W.float(), TIED.float(), 1).double(), canonical_angles(W, TIED, 1), rtol=0, atol=1e-4)
    torch.testing.assert_close(canonical_angles(torch.stack([W, 2 * W]), TIED, 2)[1], canonical_angles(W.T.contiguous().T, TIED, 2), rtol=0, atol=1e-12)


def test_both_flows_reach_the_canonical_subspace_from_a_large_start():
    W0 = start(3, 2, 0)
    peira, distilled = peira_flow(W0, TIED, 0.2, 60), self_distillation_flow(W0, TIED, 0.2, 0.05, 200)
    for flow in (peira, distilled):
        angles = canonical_angles(flow.path, TIED, 2)
        assert angles.shape == (201, 2) and angles[0, 0] > 0.1 and angles[-1].max() < 1e-8
    dead = self_distillation_flow(0.05 * W0, TIED, 0.2, 0.05, 200)
    assert dead.W.norm() < 0.01 and canonical_angles(dead.W, TIED, 2)[0] > 0.1


def test_more_refusals():
    W = start(3, 2, 0)
    for call, words in ((lambda: canonical_angles(W, torch.eye(3, dtype=torch.float64), 2), "equal eigenvalues"), (lambda: canonical_angles(W, TIED, 3), "n_modes"), (lambda: canonical_angles(W[:2], TIED, 1), "W must have shape"),
                        (lambda: distillation_rates([0.8, 0.3], 0.2, 0.05, (1,), 1), "2 sqrt"), (lambda: distillation_rates([0.8, 0.5], 0.2, 0.05, (0, 1), 1), "at most dim"), (lambda: distillation_rates([0.8], 0.2, 0, (0,), 1), "decay"),
                        (lambda: distillation_rates([0.8, 0.7], 0.2, 0.05, (0,), 1, (1,)), "separatrix"), (lambda: distillation_rates([0.8], 0.2, 0.05, (3,), 1), "modes must lie")):
        with pytest.raises(ValueError, match=words): call()


def test_rates_check_all_they_are_given():
    for call, words in ((lambda: distillation_rates([0.8], -1, 0.05, (), 1), "ridge"), (lambda: distillation_rates([], 0.2, 0.05, (), 1), "eigenvalues"),
                        (lambda: distillation_rates([0.8, float("nan")], 0.2, 0.05, (0,), 1), "eigenvalues"), (lambda: distillation_rates(torch.ones(2, 2), 0.2, 0.05, (), 1), "eigenvalues"),
                        (lambda: canonical_angles(torch.zeros(0, 3, 2, dtype=torch.float64), TIED, 1), "W must have shape")):
        with pytest.raises(ValueError, match=words): call()
    given = [0.8, 0.5], 0.2, 0.05, (0, 1), 2
    assert torch.equal(distillation_rates(*given, separatrix=torch.tensor([1])), distillation_rates(*given, separatrix=(1,)))


def test_arrays_are_taken():
    W = start(3, 2, 0)
    assert torch.equal(peira_flow(W.numpy(), TIED.numpy(), 0.2, 1.0).W, peira_flow(W, TIED, 0.2, 1.0).W)
    assert torch.equal(canonical_angles(W.numpy(), TIED.numpy(), 1), canonical_angles(W, TIED, 1))


def test_a_flow_that_takes_too_long_is_given_up(monkeypatch):
    W = start(3, 2, 0)
    monkeypatch.setattr(dynamics, "_MOST_RATES", 100)
    with pytest.raises(RuntimeError, match="in 100 evaluations.*Shorten"): peira_flow(W, TIED, 0.2, 100)
    with pytest.raises(RuntimeError, match="in 100 evaluations"): self_distillation_flow(W, TIED, 0.2, 0.05, 100)
    monkeypatch.undo()
    assert peira_flow(W, TIED, 0.2, 1e6).energies[-1].isfinite()
