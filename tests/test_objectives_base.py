"The base of all objectives, through one small objective defined here."
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from conformance import MomentConformance, ObjectiveConformance, paired
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.objectives import Curvature, MomentObjective, Objective, from_config
from peira_krepes.core.reduction import process_sum
from peira_krepes.objectives.base import batch_views, direction, fixed_point, refuse_together, union_mean, union_rows, unit_rows


@dataclass(frozen=True)
class Agreement(MomentObjective):
    "Mean squared distance of the views."
    weight: float = 1.0
    rotation_invariant: ClassVar[bool] = True

    def value(self, moments): return self.weight * (moments.S_N - moments.S_s).trace()

    def curvature(self, A, moments):
        A, moments = fixed_point(A, moments)
        H = self.weight * (moments.S_N - moments.S_s)
        return Curvature((A * (H @ A)).sum(), 2 * H @ A, lambda D: 2 * H @ direction(D, A))


class TestAgreement(MomentConformance):
    "The conformance tests hold for an objective that is right by inspection."
    objectives = [Agreement(), Agreement(weight=2.5)]

    @staticmethod
    def inner(objective, W_a, W_b): return (W_a - W_b).flatten()

    @staticmethod
    def outer(objective, g): return objective.weight * g.square().sum() / 9


@dataclass(frozen=True)
class WrongCurvature(Agreement):
    "Misses a factor of two in the product, as a slip would."
    def curvature(self, A, moments):
        right = super().curvature(A, moments)
        return Curvature(right.value, right.gradient, lambda D: right.ggn(D) / 2)


def test_conformance_notices_a_wrong_product():
    suite = TestAgreement()
    suite.test_gradient_and_ggn_are_those_of_dense_automatic_differentiation(Agreement())
    for test in (suite.test_gradient_and_ggn_are_those_of_dense_automatic_differentiation, suite.test_ggn_against_curvlinops):
        with pytest.raises((AssertionError, pytest.skip.Exception)): test(WrongCurvature())


def test_value_of_the_smallest_example_by_hand():
    z_a, z_b = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 0.0], [0.0, -1.0]])
    assert Agreement(weight=2.0).loss(z_a, z_b).item() == pytest.approx(2 * (1 + 9) / 2, abs=1e-6)


def test_an_objective_without_curvature_trains_and_says_what_it_lacks():
    @dataclass(frozen=True)
    class Valued(MomentObjective):
        rotation_invariant: ClassVar[bool] = True
        def value(self, moments): return moments.S_N.trace()
    z_a, z_b = paired()
    moments = TwoViewMoments.from_features(z_a, z_b)
    torch.testing.assert_close(Valued().loss(z_a, z_b), (z_a.square().sum() + z_b.square().sum()) / len(z_a), rtol=1e-12, atol=0)
    with pytest.raises(NotImplementedError, match="Valued has no curvature"): Valued().curvature(torch.ones(5, 2), moments)


def test_an_incomplete_objective_cannot_be_built():
    class Nothing(MomentObjective): pass
    for cls in (Nothing, MomentObjective, Objective):
        with pytest.raises(TypeError, match="abstract"): cls()
    with pytest.raises(ValueError, match="name must be one of"): from_config({"name": "Nothing"})


@pytest.mark.parametrize("config, words", [({"name": "peira"}, "PEIRA"), ({"ridge": 0.1}, "name"), ("PEIRA", "dictionary"), ({"name": "PEIRA", "rigde": 0.2}, "rigde"),
                                           ({"name": "PEIRA", "ridge": -1}, "ridge"), ({"name": "MomentObjective"}, "name must be one of")])
def test_bad_configurations_are_refused(config, words):
    with pytest.raises(ValueError, match=words): from_config(config)


def test_half_precision_views_are_upcast_with_their_graph():
    z = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    a, b = batch_views(z, z)
    assert a.dtype == torch.float32 and b.requires_grad
    z = z.detach().double()
    assert batch_views(z, z)[0] is z


def test_a_large_mean_costs_no_digits():
    "Float32 features with mean 1000 and views 0.1 apart: rounding the moments to float32 loses the answer."
    z_a, z_b = paired(512, 4, shift=1000.0, noise=0.1, dtype=torch.float32)
    exact = (z_a.double() - z_b.double()).square().sum(1).mean()
    assert abs(Agreement().loss(z_a, z_b) - exact) < 1e-3 * exact
    narrow = Agreement().value(TwoViewMoments.from_features(z_a, z_b, dtype=torch.float32))
    assert abs(narrow - exact) > 1e-2 * exact


# ---- objectives of samples -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Turned(Objective):
    "Mean squared distance of the directions, to a power: no function of the moments."
    power: float = 1.0
    rotation_invariant: ClassVar[bool] = True
    def _loss(self, z_a, z_b): return union_mean(((unit_rows(z_a) - unit_rows(z_b)).square().sum(1) + 1e-2) ** self.power)


class TestTurned(ObjectiveConformance):
    "An objective without moments inherits what all promise, and nothing about moments or curvature."
    objectives = [Turned(), Turned(power=2.0)]


@dataclass(frozen=True)
class Stopped(Turned):
    "The same with the second view held fixed, which finite differences of the loss itself contradict."
    def _loss(self, z_a, z_b): return super()._loss(z_a, z_b) / 2 + super()._loss(z_a, z_b.detach()) / 2


class Differentiated(ObjectiveConformance):
    @staticmethod
    def differentiated(objective, z_a, z_b): return lambda a, b: (Turned().loss(a, b) + Turned().loss(a, z_b)) / 2


def test_conformance_notices_a_gradient_that_is_no_derivative():
    with pytest.raises((AssertionError, RuntimeError)): ObjectiveConformance().test_loss_is_a_scalar_with_the_gradient_of_finite_differences(Stopped())
    Differentiated().test_loss_is_a_scalar_with_the_gradient_of_finite_differences(Stopped())


@pytest.mark.parametrize("dtype, scale", [(torch.float64, 1e200), (torch.float64, 1e-150), (torch.float32, 1e30), (torch.float32, 1e-15), (torch.float64, 1.0)])
def test_unit_rows_are_directions_at_every_scale(dtype, scale):
    z = paired(9, 5, dtype=dtype)[0]
    wanted = z / z.norm(dim=1, keepdim=True)
    z.mul_(scale).requires_grad_()
    u = unit_rows(z)
    torch.testing.assert_close(u.detach(), wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)
    weights = torch.ones_like(z)
    gradient, = torch.autograd.grad((u * weights).sum(), z)
    torch.testing.assert_close(gradient * scale, (weights - (weights * wanted).sum(1, keepdim=True) * wanted) / (z.detach() / scale).norm(dim=1, keepdim=True), rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_unit_rows_of_rows_without_direction():
    for dtype, small in ((torch.float64, 1e-160), (torch.float32, 1e-25)):
        z = torch.tensor([[0.0, 0.0, 0.0], [small, 0.0, -small], [3.0, 0.0, -4.0]], dtype=dtype, requires_grad=True)
        u = unit_rows(z)
        u.square().mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        assert not u[:2].any() and not z.grad[:2].any() and z.grad[2].any() and torch.isfinite(z.grad).all()
    z = paired(4, 3)[0].requires_grad_()
    assert torch.autograd.gradcheck(unit_rows, z) and torch.autograd.gradgradcheck(unit_rows, z)


def test_unions_of_one_process_are_the_process():
    z = paired()[0]
    assert union_rows(z)[0] is z and union_rows(z)[1] == 0 and process_sum(z) is z
    torch.testing.assert_close(union_mean(z[:, 0]), z[:, 0].mean(), rtol=1e-14, atol=0)
    assert union_mean(z[:, 0].float()).dtype == torch.float32


def test_a_refusal_is_raised_as_it_came():
    def bad(): raise ValueError("row 3")
    with pytest.raises(ValueError, match="^row 3$"): refuse_together(bad, None)
    def slip(): raise KeyError("not a refusal")
    with pytest.raises(KeyError): refuse_together(slip, None)
    assert refuse_together(lambda: 7, None) == 7


def test_a_direction_must_be_a_tensor_of_the_right_shape():
    A = torch.zeros(3, 2, dtype=torch.float64)
    assert direction(torch.ones(3, 2), A).dtype == torch.float64
    with pytest.raises(TypeError, match="D must be a tensor"): direction([[1.0, 2.0]] * 3, A)
    with pytest.raises(ValueError, match="shape of A"): direction(torch.ones(2, 3), A)
