"The Gauss-Newton step: exact where it can be, never uphill anywhere, and honest about how it ended."
import dataclasses
import json
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.krepes.newton import gauss_newton
from peira_krepes.krepes.nystrom import whiten
from peira_krepes.objectives import PEIRA, BarlowTwins
from peira_krepes.objectives.base import Curvature, MomentObjective

KEYS = {"step", "status", "loss_before", "loss", "damping", "attempts", "promised", "gradient_norm", "cg_residual", "cg_iterations", "cg_converged"}


@dataclass(frozen=True)
class PullToMean(MomentObjective):
    "Tr S_N / 2 - sum of the means of view a: exactly quadratic in the coefficients, with the curvature S_N."
    rotation_invariant: ClassVar[bool] = False
    def value(self, moments): return moments.S_N.trace() / 2 - moments.mean_a.sum()
    def curvature(self, A, moments):
        gradient = moments.S_N @ A - moments.mean_a[:, None].expand_as(A)
        return Curvature(self.value(moments.project(A)), gradient, lambda D: moments.S_N @ D)


def views(n=200, d=6, noise=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) + 0.5
    return tuple(x + noise * torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2))


def start(d=6, h=3, scale=1.0, seed=1): return scale * torch.randn(d, h, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_coordinates(m=30, noise=0.2):
    "Moments of whitened Gaussian-kernel coordinates of two noisy views of points in the plane, and the start in eight dimensions: large, so that Newton overshoots."
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=g, dtype=torch.float64)
    w = whiten(4 * gaussian(4 * x[:m], 4 * x[:m]))
    views = (4 * x + noise * torch.randn(400, 2, generator=g, dtype=torch.float64) for _ in range(2))
    return TwoViewMoments.from_features(*(w.coordinates(4 * gaussian(v, 4 * x[:m])) for v in views)), w.start(8)


def dense_change(objective, moments, Theta, damping):
    c = objective.curvature(Theta, moments)
    H = torch.stack([c.ggn(e.view_as(Theta)).flatten() for e in torch.eye(Theta.numel(), dtype=torch.float64)])
    return -torch.linalg.solve(H + damping * torch.eye(len(H)), c.gradient.flatten()).view_as(Theta)


# ---- the step --------------------------------------------------------------------------------------------------------
def test_a_quadratic_loss_is_solved_in_one_step():
    a, b = views()
    m = TwoViewMoments.from_features(a, b)
    step = gauss_newton(PullToMean(), m, start(), damping=1e-12, tol=1e-12)
    minimum = torch.linalg.solve((a.T @ a + b.T @ b) / len(a), a.mean(0))[:, None].expand(6, 3)
    torch.testing.assert_close(step.Theta, minimum, rtol=1e-8, atol=1e-8)
    record = step.history[0]
    assert abs(record["loss_before"] - record["loss"] - record["promised"]) < 1e-8      # the model is the loss


def test_the_damped_step_of_a_quadratic_and_its_promise():
    m, Theta, damping = TwoViewMoments.from_features(*views()), start(), 0.7
    step = gauss_newton(PullToMean(), m, Theta, damping=damping, tol=1e-12)
    gradient = m.S_N @ Theta - m.mean_a[:, None]
    D = -torch.linalg.solve(m.S_N + damping * torch.eye(6), gradient)
    torch.testing.assert_close(step.Theta - Theta, D, rtol=1e-8, atol=1e-8)
    model = (gradient * D).sum() + (D * (m.S_N @ D)).sum() / 2 + damping / 2 * D.square().sum()
    assert abs(step.history[0]["promised"] + model.item()) < 1e-10
    assert abs(step.history[0]["gradient_norm"] - gradient.norm().item()) < 1e-10


@pytest.mark.parametrize("objective", [PEIRA(), PEIRA(ridge=0.3, center=True), BarlowTwins(), BarlowTwins(redundancy=0.5)], ids=str)
def test_conjugate_gradients_solve_the_dense_system(objective):
    m, Theta = TwoViewMoments.from_features(*views()), start(scale=0.3)
    step = gauss_newton(objective, m, Theta, damping=0.5, tol=1e-10)
    assert step.history[0]["attempts"] == 1 and step.history[0]["cg_converged"] and step.history[0]["cg_residual"] <= 1e-10
    torch.testing.assert_close(step.Theta - Theta, dense_change(objective, m, Theta, 0.5), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("objective", [PEIRA(), BarlowTwins()], ids=str)
def test_the_change_balances_the_gradient_of_the_loss_itself(objective):
    "With autograd's gradient of the value, not the objective's own: (GGN + damping) D = -gradient."
    m, Theta = TwoViewMoments.from_features(*views()), start(scale=0.3).requires_grad_()
    objective.value(m.project(Theta)).backward()
    step = gauss_newton(objective, m, Theta, damping=0.5, tol=1e-10)
    D = step.Theta - Theta.detach()
    torch.testing.assert_close(objective.curvature(Theta, m).ggn(D) + 0.5 * D, -Theta.grad, rtol=1e-8, atol=1e-8)


def test_losses_in_the_history_are_the_objectives():
    m, Theta = TwoViewMoments.from_features(*views()), start()
    step = gauss_newton(PEIRA(), m, Theta, steps=3)
    assert abs(step.history[0]["loss_before"] - PEIRA().value(m.project(Theta)).item()) < 1e-12
    assert abs(step.history[-1]["loss"] - PEIRA().value(m.project(step.Theta)).item()) < 1e-12
    for one, two in zip(step.history, step.history[1:]): assert one["loss"] == two["loss_before"]


# ---- never uphill ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("objective", [PEIRA(), PEIRA(center=True), BarlowTwins(), PullToMean()], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_the_loss_never_ends_higher(objective, scale):
    m = TwoViewMoments.from_features(*views())
    for seed in range(5):
        for damping in (1e-9, 1e-3, 10.0):
            step = gauss_newton(objective, m, start(scale=scale, seed=seed), damping=damping, steps=3)
            losses = [step.history[0]["loss_before"]] + [h["loss"] for h in step.history]
            assert all(b <= a for a, b in zip(losses, losses[1:]))
            assert all((h["loss"] < h["loss_before"]) == (h["status"] == "lowered") for h in step.history)


def test_damping_is_raised_exactly_as_often_as_needed():
    m, Theta = kernel_coordinates()
    record = gauss_newton(PEIRA(), m, Theta, damping=1e-6).history[0]
    loss = lambda damping: PEIRA().value(m.project(Theta + dense_change(PEIRA(), m, Theta, damping))).item()
    assert record["attempts"] > 1 and record["damping"] == pytest.approx(1e-6 * 10 ** (record["attempts"] - 1))
    for attempt in range(record["attempts"] - 1): assert loss(1e-6 * 10**attempt) >= record["loss_before"]
    assert loss(record["damping"]) < record["loss_before"]


def test_damping_relaxes_after_success_but_not_below_the_one_asked_for():
    history = gauss_newton(PEIRA(), *kernel_coordinates(), damping=1e-4, steps=8).history
    assert history[0]["damping"] > 1e-3
    for one, two in zip(history, history[1:]): assert two["damping"] == pytest.approx(max(1e-4, one["damping"] / 10) * 10 ** (two["attempts"] - 1))
    assert history[-1]["damping"] == pytest.approx(1e-4)


def test_many_steps_reach_a_stationary_point():
    m = TwoViewMoments.from_features(*views())
    step = gauss_newton(BarlowTwins(), m, start(), damping=1e-6, steps=500)
    assert step.status == "stationary" and len(step.history) < 500
    Theta = step.Theta.clone().requires_grad_()
    BarlowTwins().value(m.project(Theta)).backward()
    assert Theta.grad.norm() < 1e-6


# ---- honest ends -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("objective, Theta", [(PEIRA(), torch.zeros(6, 2)), (PEIRA(center=True), torch.zeros(6, 2)), (BarlowTwins(), torch.zeros(6, 2))])
def test_a_stationary_start_is_left_alone_and_named(objective, Theta):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = gauss_newton(objective, TwoViewMoments.from_features(*views()), Theta, steps=5)
    assert step.status == "stationary" and not step.Theta.any() and len(step.history) == 1
    assert step.history[0]["loss"] == step.history[0]["loss_before"] and step.history[0]["attempts"] == 1


def with_curvature(change):
    "PEIRA with what `change` makes of its curvature."
    class Changed(PEIRA):
        def curvature(self, A, moments): return change(super().curvature(A, moments), A)
    return Changed()


def test_a_gradient_that_points_uphill_is_reported():
    m = TwoViewMoments.from_features(*views())
    Theta = gauss_newton(PEIRA(), m, start(scale=0.1), steps=5).Theta
    backwards = with_curvature(lambda c, A: dataclasses.replace(c, gradient=-c.gradient))
    with pytest.warns(RuntimeWarning, match="step 1 is zero: no damping"): step = gauss_newton(backwards, m, Theta, steps=3)
    assert step.status == "failed" and torch.equal(step.Theta, Theta) and len(step.history) == 1
    assert step.history[0]["loss"] == step.history[0]["loss_before"] and step.history[0]["attempts"] > 3


def test_overflow_and_nan_on_the_way_are_refused_attempts():
    m, Theta = TwoViewMoments.from_features(*views()), start(scale=0.1)
    free = gauss_newton(PEIRA(), m, Theta, damping=1e-6)
    reach = (free.Theta - Theta).norm() / 2

    def overflow(c, A):
        if (A - Theta).norm() > reach: raise FloatingPointError("too large")
        return c
    nan = lambda c, A: dataclasses.replace(c, value=c.value * float("nan") if (A - Theta).norm() > reach else c.value)
    for change in (overflow, nan):
        step = gauss_newton(with_curvature(change), m, Theta, damping=1e-6)
        assert step.status == "lowered" and (step.Theta - Theta).norm() <= reach and step.history[0]["attempts"] > 1


def test_a_curvature_of_nan_is_a_failure_and_not_a_stationary_point():
    broken = with_curvature(lambda c, A: dataclasses.replace(c, ggn=lambda D: c.ggn(D) * float("nan")))
    with pytest.warns(RuntimeWarning, match="step 1 is zero"): step = gauss_newton(broken, TwoViewMoments.from_features(*views()), start())
    assert step.status == "failed" and torch.equal(step.Theta, start())
    json.dumps(step.history, allow_nan=False)


def test_an_unfinished_solve_is_taken_if_it_helps_and_said():
    m, Theta = TwoViewMoments.from_features(*views()), start(scale=0.1)
    with pytest.warns(RuntimeWarning, match="step 1: conjugate gradients stopped at a relative residual"):
        step = gauss_newton(PEIRA(), m, Theta, max_iter=2, tol=1e-10)
    record = step.history[0]
    assert not record["cg_converged"] and record["cg_iterations"] == 2 and record["cg_residual"] > 1e-10
    assert record["loss"] < record["loss_before"]
    D = step.Theta - Theta
    c = PEIRA().curvature(Theta, m)
    rest = (c.ggn(D) + record["damping"] * D + c.gradient).norm() / c.gradient.norm()
    assert abs(rest - record["cg_residual"]) < 1e-8


def test_history_is_complete_and_fits_json():
    for Theta in (start(), torch.zeros(6, 2)):
        history = gauss_newton(PEIRA(), TwoViewMoments.from_features(*views()), Theta, steps=2).history
        assert all(set(h) == KEYS for h in history)
        assert json.loads(json.dumps(history, allow_nan=False)) == history


# ---- inputs ----------------------------------------------------------------------------------------------------------
def test_an_objective_of_samples_gets_the_pair():
    class OfSamples(PEIRA):
        def curvature(self, A, K_a, K_b): return PEIRA().curvature(A, TwoViewMoments.from_features(K_a, K_b))
    a, b = views()
    by_moments = gauss_newton(PEIRA(), TwoViewMoments.from_features(a, b), start())
    by_samples = gauss_newton(OfSamples(), (a, b), start())
    torch.testing.assert_close(by_samples.Theta, by_moments.Theta, rtol=1e-10, atol=1e-10)
    assert gauss_newton(OfSamples(), (a.float(), b.float()), start().float()).Theta.dtype == torch.float64


def test_float64_throughout_and_inputs_untouched():
    m, Theta = TwoViewMoments.from_features(*views()), start().float().requires_grad_()
    before = Theta.detach().clone()
    step = gauss_newton(PEIRA(), m.to(torch.float32), Theta)
    assert step.Theta.dtype == torch.float64 and not step.Theta.requires_grad
    assert torch.equal(Theta.detach(), before) and Theta.grad is None
    torch.testing.assert_close(step.Theta, gauss_newton(PEIRA(), m, before).Theta, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gauss_newton(PEIRA(), m, start().T.contiguous().T).Theta, gauss_newton(PEIRA(), m, start()).Theta, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("change, error, message", [
    (dict(Theta=start(5)), ValueError, r"Theta must have shape \(6, d\)"), (dict(damping=0), ValueError, "damping must be"), (dict(damping=-1.0), ValueError, "damping must be"),
    (dict(steps=0), ValueError, "steps must be at least 1"), (dict(tol=0), ValueError, "tol must be"), (dict(moments=start()), TypeError, "moments must be TwoViewMoments, or a pair"),
    (dict(moments=(start(6, 6), start(5, 6))), ValueError, r"moments\[1\] must have shape \(6, 6\)"), (dict(Theta=start() * torch.nan), ValueError, "Theta must be finite")])
def test_refusals_name_the_argument(change, error, message):
    arguments = dict(moments=TwoViewMoments.from_features(*views()), Theta=start()) | change
    with pytest.raises(error, match=message): gauss_newton(PEIRA(), **arguments)


# ---- what the damping measures ---------------------------------------------------------------------------------------
def gaussian(x, y): return torch.exp(-torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / 4)


def test_scaling_the_kernel_rescales_the_damping():
    (a, b), c = views(), 7.0
    def embeddings(scale, damping):
        w = whiten(scale * gaussian(a[:10], a[:10]))
        m = TwoViewMoments.from_features(*(w.coordinates(scale * gaussian(v, a[:10])) for v in (a, b)))
        step = gauss_newton(PEIRA(), m, w.start(4) / scale**0.5, damping=damping, tol=1e-10)
        assert step.history[0]["attempts"] == 1
        return w.coordinates(scale * gaussian(a, a[:10])) @ step.Theta
    torch.testing.assert_close(embeddings(c, 3.0 * c), embeddings(1.0, 3.0), rtol=1e-8, atol=1e-8)
    assert (embeddings(c, 3.0) - embeddings(1.0, 3.0)).abs().max() > 1e-3


def test_copies_matter_to_damping_on_A_only():
    a, b = views()
    def inner_products(rows, whitened):
        w, K_a, K_b = whiten(gaussian(a[rows], a[rows]), floor=1e-9), gaussian(a, a[rows]), gaussian(b, a[rows])
        T, Theta = (w.T, w.start(8)) if whitened else (torch.eye(len(rows), dtype=torch.float64), w.T[:, :8])
        f = K_a @ T @ gauss_newton(PEIRA(), TwoViewMoments.from_features(K_a @ T, K_b @ T), Theta, damping=1e-2, tol=1e-10).Theta
        return f @ f.T
    once, twice = [*range(8)], [*range(8), 3]
    assert (inner_products(once, True) - inner_products(twice, True)).abs().max() < 1e-8
    assert (inner_products(once, False) - inner_products(twice, False)).abs().max() > 1e-3
