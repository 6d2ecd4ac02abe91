"SimCLR: the paper's equation, the ends of its range, attraction and repulsion, small temperatures, rows without direction, and lightly's version."
import math

import pytest
import torch

from conformance import ObjectiveConformance, paired, value_and_gradients
from oracles import simclr_by_loops
from peira_krepes.objectives.base import unit_rows
from peira_krepes.objectives.simclr import SimCLR, surprises


class TestSimCLR(ObjectiveConformance):
    objectives = [SimCLR(), SimCLR(temperature=0.1)]


@pytest.mark.parametrize("temperature", [0.02, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("n, d", [(2, 3), (7, 4), (5, 1)])
def test_value_against_plain_loops(temperature, n, d):
    z_a, z_b = paired(n, d)
    assert SimCLR(temperature).loss(z_a, z_b).item() == pytest.approx(simclr_by_loops(z_a, z_b, temperature), rel=1e-10, abs=1e-10)


def test_value_by_hand():
    "Two samples in opposite directions, both views equal: one right score of 1/tau, two wrong ones of -1/tau."
    z = torch.tensor([[2.0, 0.0], [-0.5, 0.0]], dtype=torch.float64)
    for tau in (0.25, 0.5, 2.0): assert SimCLR(tau).loss(z, z).item() == pytest.approx(math.log1p(2 * math.exp(-2 / tau)), abs=1e-12)
    crossed = torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)     # partners orthogonal: scores 0 (right), 0, -1/tau
    assert SimCLR(0.5).loss(z, crossed).item() == pytest.approx(math.log(2 + math.exp(-2)), abs=1e-12)


def test_default_temperature_is_pinned():
    assert SimCLR() == SimCLR(0.5) and SimCLR().config() == {"name": "SimCLR", "temperature": 0.5} and SimCLR.rotation_invariant


@pytest.mark.parametrize("n", [2, 5, 40])
def test_collapse_is_blind_guessing(n):
    for z in (torch.zeros(n, 3), torch.ones(n, 3), torch.full((n, 3), -1e-30)):
        assert SimCLR(0.1).loss(z, z).item() == pytest.approx(math.log(2 * n - 1), rel=1e-5)


def test_the_simplex_is_the_minimum():
    "Regular simplex with equal views has the value of the formula; descent from random features ends there and never below."
    n, tau = 4, 0.5
    least = math.log(1 + (2 * n - 2) * math.exp(-n / (n - 1) / tau))
    z = torch.eye(n, dtype=torch.float64) - 1 / n
    assert SimCLR(tau).loss(z, z).item() == pytest.approx(least, abs=1e-12)
    assert all(g.abs().max() < 1e-12 for g in value_and_gradients(SimCLR(tau), z, z)[1:])
    free = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.LBFGS([free], max_iter=300, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe")
    def closure():
        optimiser.zero_grad()
        value = SimCLR(tau).loss(*free)
        value.backward()
        return value
    optimiser.step(closure)
    assert SimCLR(tau).loss(*free).item() == pytest.approx(least, abs=1e-8)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_gradient_is_attraction_and_repulsion(temperature):
    z_a, z_b = paired(6, 4)
    _, *gradients = value_and_gradients(SimCLR(temperature), z_a, z_b)
    z = torch.cat([z_a, z_b])
    u, size = z / z.norm(dim=1, keepdim=True), len(z)
    p = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            if i != j: p[i, j] = math.exp(u[i] @ u[j] / temperature)
        p[i] /= p[i].sum()
    for i in range(size):
        force = sum((p[i, j] + p[j, i] - 2 * (j == (i + 6) % 12)) * u[j] for j in range(size) if j != i) / (size * temperature)
        wanted = (force - (force @ u[i]) * u[i]) / z[i].norm()
        torch.testing.assert_close(torch.cat(gradients)[i], wanted, rtol=0, atol=1e-10)
        assert abs(torch.cat(gradients)[i] @ z[i]) < 1e-12              # rows turn and do not grow


def test_lengths_of_rows_do_not_matter():
    z_a, z_b = paired(6, 4)
    lengths = torch.tensor([1e-100, 1e-3, 1.0, 7.0, 1e30, 1e150], dtype=torch.float64)[:, None]
    torch.testing.assert_close(SimCLR().loss(z_a * lengths, z_b / lengths), SimCLR().loss(z_a, z_b), rtol=0, atol=1e-12)
    a, b = (z.float() for z in (z_a, z_b))
    torch.testing.assert_close(SimCLR().loss(1e30 * a, 1e-15 * b), SimCLR().loss(a, b), rtol=1e-5, atol=0)


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-6])
def test_small_temperatures_stay_finite_in_float32(temperature):
    "exp(1/temperature) is beyond float32; scores carry a relative error of float32, the loss no more than that."
    z_a, z_b = paired(32, 4, noise=2.0, dtype=torch.float32)
    value, *gradients = value_and_gradients(SimCLR(temperature), z_a, z_b)
    exact = SimCLR(temperature).loss(z_a.double(), z_b.double()).item()
    assert value.item() == pytest.approx(exact, abs=1e-6 / temperature) and all(torch.isfinite(g).all() for g in gradients)
    assert SimCLR(temperature).loss(z_a, z_a).item() >= 0


def test_a_zero_row_answers_with_cosine_zero_and_stays():
    z_a, z_b = paired(5, 3)
    z_a[2] = 0
    value, g_a, g_b = value_and_gradients(SimCLR(0.2), z_a, z_b)
    assert value.item() == pytest.approx(simclr_by_loops(z_a, z_b, 0.2), abs=1e-10)
    assert not g_a[2].any() and all(g.abs().max() < 10 for g in (g_a, g_b))


def test_own_rows_against_everybody_are_the_rows_of_the_whole():
    "What each of three processes computes, without processes."
    z_a, z_b = paired(9, 4)
    shares = [slice(0, 2), slice(2, 3), slice(3, 9)]
    blocks = [unit_rows(torch.cat([z_a[s], z_b[s]])) for s in shares]
    terms = [surprises(block, torch.cat(blocks), first, 0.3) for block, first in zip(blocks, (0, 4, 6))]
    torch.testing.assert_close(torch.cat(terms).mean(), SimCLR(0.3).loss(z_a, z_b), rtol=0, atol=1e-12)
    with pytest.raises(AssertionError): torch.testing.assert_close(surprises(blocks[1], torch.cat(blocks), 0, 0.3), terms[1])


def test_views_are_interchangeable():
    z_a, z_b = paired()
    torch.testing.assert_close(SimCLR().loss(z_a, z_b), SimCLR().loss(z_b, z_a), rtol=0, atol=1e-12)


def test_second_derivatives():
    z_a, z_b = paired(3, 2)
    assert torch.autograd.gradgradcheck(SimCLR().loss, (z_a.requires_grad_(), z_b.requires_grad_()), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_against_lightly(temperature):
    lightly = pytest.importorskip("lightly.loss")
    z_a, z_b = paired(16, 6)
    ours, theirs = SimCLR(temperature), lightly.NTXentLoss(temperature=temperature)
    a, b = (z.requires_grad_() for z in (z_a, z_b))
    torch.testing.assert_close(ours.loss(a, b), theirs(a, b), rtol=0, atol=1e-10)
    for g, w in zip(torch.autograd.grad(ours.loss(a, b), [a, b]), torch.autograd.grad(theirs(a, b), [a, b])): torch.testing.assert_close(g, w, rtol=0, atol=1e-8)


def test_how_lightly_differs():
    "A zero row: its gradient is of order 1e12 there, and none here."
    lightly = pytest.importorskip("lightly.loss")
    z_a, z_b = paired(5, 3)
    z_a[2] = 0
    theirs, = torch.autograd.grad(lightly.NTXentLoss(temperature=0.5)(z_a.requires_grad_(), z_b), z_a)
    assert theirs[2].norm() > 1e9 and not value_and_gradients(SimCLR(), z_a, z_b)[1][2].any()


@pytest.mark.parametrize("temperature", [0, -0.1, float("nan"), float("inf"), "0.5", True])
def test_bad_parameters(temperature):
    with pytest.raises((ValueError, TypeError), match="temperature"): SimCLR(temperature)


def test_a_temperature_beyond_the_arithmetic_is_an_error():
    z_a, z_b = paired(4, 3, dtype=torch.float32)
    with pytest.raises(FloatingPointError, match="SimCLR"): SimCLR(1e-45).loss(z_a, z_b)
