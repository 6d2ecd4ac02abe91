"""What every objective promises, as classes to inherit.

    class TestMine(MomentConformance):
        objectives = [Mine(), Mine(weight=2.0)]

        @staticmethod
        def inner(objective, W_a, W_b): ...     # the inner map g of the documented cut, from the embeddings (n,h), as one vector
        @staticmethod
        def outer(objective, g): ...            # the convex outer function: outer(inner(...)) is the loss

`ObjectiveConformance` asks what all objectives promise of `loss`, and is all that an objective of samples inherits;
`MomentConformance` adds value, gradient and Gauss–Newton product of moment objectives, against dense automatic differentiation
in float64 that never sees a moment. An objective with a stop-gradient states in `differentiated` of which function its gradient
is the derivative. Many processes: list the objective in test_objectives_distributed.py.
"""
import dataclasses
import json

import pytest
import torch

from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.objectives import from_config


def paired(n=11, d=5, seed=0, shift=0.3, noise=0.5, dtype=torch.float64):
    "Two correlated views with means away from zero."
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    z = normal(n, d) @ normal(d, d) / d**0.5
    return tuple((z + noise * normal(n, d) + shift).to(dtype) for _ in range(2))


def value_and_gradients(objective, z_a, z_b, autocast=False):
    "Loss and both gradients; with autocast around the forward pass, as PyTorch asks for, and not the backward one."
    z_a, z_b = (z.detach().clone(memory_format=torch.preserve_format).requires_grad_() for z in (z_a, z_b))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast): value = objective.loss(z_a, z_b)
    return value.detach(), *torch.autograd.grad(value, [z_a, z_b])


def rotation(d, seed=0):
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


class ObjectiveConformance:
    "Every objective: the loss of a batch."
    objectives = []                                 # instances; two with different parameters at least, if it has any
    names = ("z_a", "z_b")                          # of the two arguments, as refusals call them

    @staticmethod
    def differentiated(objective, z_a, z_b):
        "The function of the views whose derivative at (z_a, z_b) is the loss's gradient there: the loss, unless gradients are stopped."
        return objective.loss

    def pytest_generate_tests(self, metafunc):
        if "objective" in metafunc.fixturenames: metafunc.parametrize("objective", self.objectives, ids=repr)

    def test_there_are_objectives_with_different_parameters(self):
        assert len(set(self.objectives)) >= (2 if dataclasses.fields(self.objectives[0]) else 1)

    def test_loss_is_a_scalar_with_the_gradient_of_finite_differences(self, objective):
        z_a, z_b = paired(6, 3)
        function = self.differentiated(objective, z_a.clone(), z_b.clone())
        value, *gradients = value_and_gradients(objective, z_a, z_b)
        assert value.shape == ()
        z_a.requires_grad_(), z_b.requires_grad_()
        assert torch.autograd.gradcheck(function, (z_a, z_b), atol=1e-6)
        torch.testing.assert_close(function(z_a, z_b).detach(), value, rtol=0, atol=1e-10)
        for g, w in zip(torch.autograd.grad(function(z_a, z_b), [z_a, z_b]), gradients): torch.testing.assert_close(g, w, rtol=0, atol=1e-10)

    def test_rotation_invariance_is_as_claimed(self, objective):
        z_a, z_b = paired()
        R = rotation(5)
        change = abs(objective.loss(z_a @ R, z_b @ R) - objective.loss(z_a, z_b)).item()
        assert (change < 1e-10) if objective.rotation_invariant else (change > 1e-3)

    def test_order_of_samples_and_memory_layout_do_not_matter(self, objective):
        z_a, z_b = paired()
        wanted = value_and_gradients(objective, z_a, z_b)
        rows = torch.randperm(len(z_a), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(objective.loss(z_a[rows], z_b[rows]), wanted[0], rtol=0, atol=1e-10)
        wide = torch.zeros(len(z_a), 10, dtype=z_a.dtype)
        wide[:, ::2], strided = z_a, z_b.T.contiguous().T
        assert not wide[:, ::2].is_contiguous() and not strided.is_contiguous()
        for got, w in zip(value_and_gradients(objective, wide[:, ::2], strided), wanted): torch.testing.assert_close(got, w, rtol=0, atol=1e-10)

    def test_float32_is_close_to_float64(self, objective):
        z_a, z_b = paired(64, 8, dtype=torch.float32)
        got, wanted = value_and_gradients(objective, z_a, z_b), value_and_gradients(objective, z_a.double(), z_b.double())
        assert got[0].dtype == torch.float32
        for g, w in zip(got, wanted): torch.testing.assert_close(g.double(), w, rtol=0, atol=1e-4 * max(w.abs().max().item(), 1e-2))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_and_autocast_compute_in_float32(self, objective, dtype):
        z_a, z_b = (z.to(dtype) for z in paired(32, 4))
        wanted = value_and_gradients(objective, z_a.float(), z_b.float())
        got = value_and_gradients(objective, z_a, z_b)
        assert got[0].dtype == torch.float32 and got[1].dtype == dtype
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got[1].float(), wanted[1].to(dtype).float(), rtol=2e-2, atol=1e-6)
        inside = value_and_gradients(objective, z_a.float(), z_b.float(), autocast=True)
        for g, w in zip(inside, wanted): torch.testing.assert_close(g, w, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["zero", "all rows equal", "duplicated columns", "one constant column", "two rows", "fewer rows than columns", "one view constant"])
    def test_degenerate_batches_have_finite_loss_and_gradient(self, objective, kind, dtype):
        z_a, z_b = paired(12, 4)
        if kind == "zero": z_a, z_b = z_a * 0, z_b * 0
        if kind == "all rows equal": z_a, z_b = (z[:1].repeat(12, 1) for z in (z_a, z_b))
        if kind == "duplicated columns": z_a, z_b = (z[:, :1].repeat(1, 4) for z in (z_a, z_b))
        if kind == "one constant column": z_a, z_b = (torch.cat([z[:, :3], torch.full((12, 1), 0.1, dtype=z.dtype)], 1) for z in (z_a, z_b))
        if kind == "one view constant": z_a = z_a[:1].repeat(12, 1)
        if kind == "two rows": z_a, z_b = z_a[:2], z_b[:2]
        if kind == "fewer rows than columns": z_a, z_b = z_a[:3], z_b[:3]
        for result in value_and_gradients(objective, z_a.to(dtype), z_b.to(dtype)): assert torch.isfinite(result).all()

    def test_bad_batches_are_refused_by_name(self, objective):
        z_a, z_b = paired()
        broken = z_b.clone()
        broken[7, 2] = float("inf")
        for a, b, words in ((z_a[:1], z_b[:1], "at least 2 row"), (z_a, z_b[:9], "same shape"), (z_a, broken, f"{self.names[1]} .* row 7"), (z_a, z_b.float(), "dtype"), (z_a[0], z_b[0], "shape")):
            with pytest.raises(ValueError, match=words): objective.loss(a, b)
        with pytest.raises(TypeError, match=self.names[0]): objective.loss(z_a.long(), z_b.long())

    def test_overflow_is_an_error_and_not_a_number(self, objective):
        "Standardising losses survive large features; nothing returns NaN or infinity for them."
        z_a, z_b = paired(dtype=torch.float32)
        try: value = objective.loss(z_a * 1e30, z_b * 1e30)
        except FloatingPointError as e: assert "overflow" in str(e) and type(objective).__name__ in str(e)
        else: assert torch.isfinite(value)

    def test_configuration_round_trip(self, objective):
        written = json.loads(json.dumps(objective.config()))
        assert written["name"] == type(objective).__name__ and from_config(written) == objective
        assert from_config({"name": written["name"]}) == type(objective)()
        with pytest.raises(ValueError, match="no_such_parameter"): from_config(written | {"no_such_parameter": 1})

    def test_parameters_are_frozen(self, objective):
        for name in [*(field.name for field in dataclasses.fields(objective)), "anything"]:
            with pytest.raises(dataclasses.FrozenInstanceError): setattr(objective, name, 1.0)


class MomentConformance(ObjectiveConformance):
    "Objectives of the moments: value, merge, and curvature in linear coordinates."

    @staticmethod
    def inner(objective, W_a, W_b): raise NotImplementedError("state the inner map of the cut")

    @staticmethod
    def outer(objective, g): raise NotImplementedError("state the outer function of the cut")

    def dense(self, objective, A, K_a, K_b):
        "Loss, gradient and J^T H J by automatic differentiation through data, the inner and the outer function."
        f = lambda a: self.inner(objective, K_a @ a, K_b @ a)
        J = torch.func.jacrev(f)(A).reshape(-1, A.numel())
        H = torch.func.hessian(lambda g: self.outer(objective, g))(f(A))
        loss = lambda a: objective.loss(K_a @ a, K_b @ a)
        a = A.clone().requires_grad_()
        return loss(A), torch.autograd.grad(loss(a), a)[0], J.T @ H @ J, self.outer(objective, f(A))

    def point(self, dtype=torch.float64):
        K_a, K_b = paired(9, 5, seed=3)
        A = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64) / 2
        return A.to(dtype), K_a.to(dtype), K_b.to(dtype)

    def matrix(self, curvature, like):
        eye = torch.eye(like.numel(), dtype=like.dtype).reshape(-1, *like.shape)
        return torch.stack([curvature.ggn(e).flatten() for e in eye], 1)

    def test_value_at_the_moments_is_the_loss_on_the_data(self, objective):
        A, K_a, K_b = self.point()
        moments = TwoViewMoments.from_features(K_a, K_b)
        wanted = objective.loss(K_a @ A, K_b @ A)
        for got in (objective.value(moments.project(A)), objective.curvature(A, moments).value): torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)

    def test_batches_merge_into_the_loss_of_the_union(self, objective):
        z_a, z_b = paired(23, 4)
        parts = [TwoViewMoments.from_features(z_a[i:j], z_b[i:j]) for i, j in ((0, 1), (1, 9), (9, 23))]
        torch.testing.assert_close(objective.value((parts[2] + parts[0]) + parts[1]), objective.loss(z_a, z_b), rtol=0, atol=1e-10)

    def test_gradient_and_ggn_are_those_of_dense_automatic_differentiation(self, objective):
        A, K_a, K_b = self.point()
        curvature = objective.curvature(A, TwoViewMoments.from_features(K_a, K_b))
        loss, gradient, ggn, composed = self.dense(objective, A, K_a, K_b)
        torch.testing.assert_close(composed, loss, rtol=0, atol=1e-10)               # the cut is a cut of this loss
        torch.testing.assert_close(curvature.gradient, gradient, rtol=0, atol=1e-8)
        torch.testing.assert_close(self.matrix(curvature, A), ggn, rtol=0, atol=1e-8)

    def test_ggn_is_symmetric_positive_and_has_the_gradient_in_its_range(self, objective):
        A, K_a, K_b = self.point()
        curvature = objective.curvature(A, TwoViewMoments.from_features(K_a, K_b))
        G, g = self.matrix(curvature, A), curvature.gradient.flatten()
        scale = G.abs().max()
        torch.testing.assert_close(G, G.T, rtol=0, atol=1e-10 * scale.item())
        assert torch.linalg.eigvalsh((G + G.T) / 2)[0] > -1e-10 * scale
        assert g.norm() > 1e-3
        assert (G @ torch.linalg.lstsq(G, g[:, None], driver="gelsd", rcond=1e-12).solution[:, 0] - g).norm() < 1e-8 * g.norm()

    def test_ggn_against_curvlinops(self, objective):
        ggn = pytest.importorskip("curvlinops.ggn")
        A, K_a, K_b = self.point()
        product = ggn.make_ggn_vector_product(lambda a, X: self.inner(objective, X[0] @ a, X[1] @ a), lambda g, y: self.outer(objective, g))
        curvature = objective.curvature(A, TwoViewMoments.from_features(K_a, K_b))
        D = torch.randn(5, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        torch.testing.assert_close(curvature.ggn(D), product((A,), (K_a, K_b), None, D)[0], rtol=0, atol=1e-8)

    def test_curvature_of_degenerate_coefficients_is_finite(self, objective):
        A, K_a, K_b = self.point()
        moments = TwoViewMoments.from_features(K_a, K_b)
        D = torch.randn(5, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        for a in (A * 0, A[:, :1].repeat(1, 3), A * torch.tensor([1.0, 0.0, 1.0])):
            curvature = objective.curvature(a, moments)
            leaf = a.clone().requires_grad_()
            gradient, = torch.autograd.grad(objective.value(moments.project(leaf)), leaf)
            for result in (curvature.value, curvature.gradient, curvature.ggn(D)): assert torch.isfinite(result).all()
            torch.testing.assert_close(curvature.gradient, gradient, rtol=0, atol=1e-8)

    def test_curvature_is_detached_and_in_the_moments_precision(self, objective):
        A, K_a, K_b = self.point()
        wanted = objective.curvature(A, TwoViewMoments.from_features(K_a, K_b))
        for dtype in (torch.float64, torch.float32):
            moments = TwoViewMoments.from_features(K_a.requires_grad_(), K_b, dtype=dtype)
            curvature = objective.curvature(A.float().requires_grad_(), moments)
            for result, w in ((curvature.value, wanted.value), (curvature.gradient, wanted.gradient), (curvature.ggn(A), wanted.ggn(A))):
                assert result.dtype == dtype and not result.requires_grad
                torch.testing.assert_close(result.double(), w, rtol=0, atol=1e-4 * max(1, w.abs().max().item()))

    def test_curvature_refuses_what_does_not_fit(self, objective):
        A, K_a, K_b = self.point()
        moments = TwoViewMoments.from_features(K_a, K_b)
        broken = A.clone()
        broken[2, 1] = float("nan")
        for bad, words in ((A[:4], "A must have shape"), (A[:, 0], "A must have shape"), (broken, "A .* row 2")):
            with pytest.raises(ValueError, match=words): objective.curvature(bad, moments)
        with pytest.raises(ValueError, match="shape of A"): objective.curvature(A, moments).ggn(A[:, :2])
