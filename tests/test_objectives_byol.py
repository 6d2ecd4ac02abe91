"BYOL and SimSiam: the papers' equations, targets that are never differentiated, the identity between the two, and lightly's version."
import pytest
import torch

from conformance import ObjectiveConformance, paired, value_and_gradients
from oracles import byol_by_loops, simsiam_by_loops
from peira_krepes.objectives.byol import BYOL, SimSiam

ALL = [BYOL(), BYOL(normalize=False), SimSiam()]


def four(n=7, d=4):
    "Two predictions and two targets, all different."
    return *paired(n, d), *paired(n, d, seed=9, shift=-0.2)


class SelfDistillationConformance(ObjectiveConformance):
    names = ("p_a", "p_b")

    @staticmethod
    def differentiated(objective, z_a, z_b): return lambda p_a, p_b: objective.loss(p_a, p_b, targets=(z_a, z_b))


class TestBYOL(SelfDistillationConformance): objectives = [BYOL(), BYOL(normalize=False)]
class TestSimSiam(SelfDistillationConformance): objectives = [SimSiam()]


def test_values_against_plain_loops():
    p_a, p_b, t_a, t_b = four()
    for targets, used in (((t_a, t_b), (t_a, t_b)), (None, (p_a, p_b))):
        for normalize in (True, False): assert BYOL(normalize).loss(p_a, p_b, targets).item() == pytest.approx(byol_by_loops(p_a, p_b, *used, normalize), abs=1e-10)
        assert SimSiam().loss(p_a, p_b, targets).item() == pytest.approx(simsiam_by_loops(p_a, p_b, *used), abs=1e-10)


def test_values_by_hand():
    "Prediction a (3,4) against target b (1,0): cosine .6; prediction b (0,2) against target a (0,-1): cosine -1. Same in both rows."
    rows = lambda *x: torch.tensor([x, x], dtype=torch.float64)
    arguments = rows(3.0, 4.0), rows(0.0, 2.0), (rows(0.0, -1.0), rows(1.0, 0.0))
    assert BYOL().loss(*arguments).item() == pytest.approx(0.8 + 4, abs=1e-12)
    assert BYOL(normalize=False).loss(*arguments).item() == pytest.approx(4 + 16 + 9, abs=1e-12)
    assert SimSiam().loss(*arguments).item() == pytest.approx((-0.6 + 1) / 2, abs=1e-12)
    crossed = arguments[0], arguments[1], arguments[2][::-1]                 # each view its own target: another number
    assert BYOL().loss(*crossed).item() == pytest.approx(2 - 2 * -0.8 + 2 - 0, abs=1e-12)


def test_defaults_are_pinned():
    assert BYOL() == BYOL(normalize=True) and BYOL().config() == {"name": "BYOL", "normalize": True} and SimSiam().config() == {"name": "SimSiam"}
    assert BYOL.rotation_invariant and SimSiam.rotation_invariant


@pytest.mark.parametrize("given", [True, False])
def test_byol_is_four_plus_four_simsiam(given):
    p_a, p_b, *targets = four()
    p_a.requires_grad_(), p_b.requires_grad_()
    results = []
    for objective in (BYOL(), SimSiam()):
        value = objective.loss(p_a, p_b, targets if given else None)
        results.append((value.detach(), *torch.autograd.grad(value, [p_a, p_b])))
    byol, simsiam = results
    torch.testing.assert_close(byol[0], 4 + 4 * simsiam[0], rtol=0, atol=1e-10)
    for b, s in zip(byol[1:], simsiam[1:]): torch.testing.assert_close(b, 4 * s, rtol=0, atol=1e-10)


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_the_gradient_is_that_of_fixed_targets_and_half_the_derivative_of_the_value(objective):
    "Without targets the value is a function V of the batch, written here without any stop; SimSiam's and BYOL's pairs are symmetric in it."
    p_a, p_b = paired(6, 3)
    value, *gradients = value_and_gradients(objective, p_a, p_b)
    a, b = p_a.clone().requires_grad_(), p_b.clone().requires_grad_()
    unit = lambda z: z / z.norm(dim=1, keepdim=True) if objective != BYOL(normalize=False) else z
    pairs = lambda p, t: -(unit(p) * unit(t)).sum(1) / 2 if isinstance(objective, SimSiam) else (unit(p) - unit(t)).square().sum(1)
    V = (pairs(a, b) + pairs(b, a)).mean()
    torch.testing.assert_close(value, V.detach(), rtol=0, atol=1e-10)
    stopped = (pairs(a, b.detach()) + pairs(b, a.detach())).mean()
    for g, s, v in zip(gradients, torch.autograd.grad(stopped, [a, b]), torch.autograd.grad(V, [a, b])):
        torch.testing.assert_close(g, s, rtol=0, atol=1e-10)
        torch.testing.assert_close(2 * g, v, rtol=0, atol=1e-10)
        assert g.norm() > 1e-3


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_targets_are_never_differentiated(objective):
    p_a, p_b, *targets = (z.requires_grad_() for z in four())
    objective.loss(p_a, p_b, targets).backward()
    assert p_a.grad.norm() > 1e-3 and p_b.grad.norm() > 1e-3 and all(t.grad is None for t in targets)
    assert not objective.loss(p_a.detach(), p_b.detach(), targets).requires_grad
    shared = p_a * 1.0                                                       # a target that is the prediction itself is cut as well
    g, = torch.autograd.grad(objective.loss(shared, p_b.detach(), (shared, shared)), shared)
    w, = torch.autograd.grad(objective.loss(shared, p_b.detach(), (shared.detach(), shared.detach())), shared)
    assert torch.equal(g, w)


def test_normalised_gradients_turn_and_do_not_shrink():
    p_a, p_b, *targets = four()
    for objective in (BYOL(), SimSiam()):
        p = p_a.clone().requires_grad_()
        g, = torch.autograd.grad(objective.loss(p, p_b, targets), p)
        assert (g * p_a).sum(1).abs().max() < 1e-12


def test_lengths_of_rows_do_not_matter_when_normalised():
    p_a, p_b, t_a, t_b = four()
    for objective in (BYOL(), SimSiam()):
        torch.testing.assert_close(objective.loss(1e100 * p_a, 1e-100 * p_b, (3 * t_a, 1e200 * t_b)), objective.loss(p_a, p_b, (t_a, t_b)), rtol=0, atol=1e-12)
    assert abs(BYOL(False).loss(2 * p_a, p_b, (t_a, t_b)) - BYOL(False).loss(p_a, p_b, (t_a, t_b))) > 1e-2


def test_close_predictions_keep_their_digits_in_float32():
    x = paired(16, 8, dtype=torch.float32)[0]
    y = x + 1e-4 * paired(16, 8, seed=1, dtype=torch.float32)[0]
    exact = BYOL().loss(x.double(), y.double()).item()
    assert BYOL().loss(x, y).item() == pytest.approx(exact, rel=1e-2) and exact < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_rows_and_collapse(dtype):
    one, zero = torch.ones(5, 3, dtype=dtype), torch.zeros(5, 3, dtype=dtype)
    for objective, constant, dead in ((BYOL(), 0, 2), (BYOL(False), 0, 6), (SimSiam(), -1, 0)):
        assert objective.loss(one, one).item() == pytest.approx(constant, abs=1e-6)
        p = zero.clone().requires_grad_()
        value = objective.loss(p, p, (one, one))
        value.backward()
        assert value.item() == pytest.approx(dead, abs=1e-6) and torch.isfinite(p.grad).all() and bool(p.grad.any()) == (objective == BYOL(False))
        assert torch.isfinite(objective.loss(one, one, (zero, zero)))


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_half_precision_targets(objective):
    p_a, p_b, *targets = (z.bfloat16() for z in four())
    value = objective.loss(p_a, p_b, targets)
    assert value.dtype == torch.float32
    assert torch.equal(value, objective.loss(p_a.float(), p_b.float(), [t.float() for t in targets])) and torch.equal(value, objective.loss(p_a.float(), p_b.float(), targets))
    with torch.autocast("cpu", dtype=torch.bfloat16): assert torch.equal(value, objective.loss(p_a.float(), p_b.float(), targets))


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_bad_targets_are_refused_by_name(objective):
    p_a, p_b, t_a, t_b = four()
    broken = t_b.clone()
    broken[3, 1] = float("nan")
    for targets, words in (((t_a, broken), r"targets\[1\] .* row 3"), ((broken, t_b), r"targets\[0\] .* row 3"), ((t_a[:5], t_b), r"targets\[0\] must have the same shape as p_a"),
                           ((t_a, t_b[:, :2]), r"targets\[1\] must have the same shape"), ((t_a, t_b.float()), r"targets\[1\] must share dtype")):
        with pytest.raises(ValueError, match=words): objective.loss(p_a, p_b, targets)
    for targets, words in ((t_a, "targets must be a pair"), ((t_a,), "targets must be a pair"), ((t_a, None), r"targets\[1\]"), ((t_a.long(), t_b), r"targets\[0\]")):
        with pytest.raises(TypeError, match=words): objective.loss(p_a, p_b, targets)
    with pytest.raises(ValueError, match="p_b must have the same shape as p_a"): objective.loss(p_a, p_b[:4], (t_a, t_b))


def test_overflow_of_targets_names_their_size():
    p_a, p_b, t_a, t_b = (z.float() for z in four())
    with pytest.raises(FloatingPointError, match=r"BYOL .*e\+30.*overflow"): BYOL(normalize=False).loss(p_a, p_b, (t_a, 1e30 * t_b))


@pytest.mark.parametrize("normalize", [0, 1, "yes", None])
def test_bad_parameters(normalize):
    with pytest.raises(ValueError, match="normalize"): BYOL(normalize)


def test_against_lightly():
    "One direction of SimSiam there; detaching, crossing and halving is the caller's."
    lightly = pytest.importorskip("lightly.loss")
    theirs = lightly.NegativeCosineSimilarity()
    p_a, p_b, t_a, t_b = four(16, 6)
    p_a.requires_grad_(), p_b.requires_grad_()
    wanted = (theirs(p_a, t_b) + theirs(p_b, t_a)) / 2
    ours = SimSiam().loss(p_a, p_b, (t_a, t_b))
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(BYOL().loss(p_a, p_b, (t_a, t_b)), 4 + 4 * wanted, rtol=0, atol=1e-10)
    for g, w in zip(torch.autograd.grad(ours, [p_a, p_b]), torch.autograd.grad(wanted, [p_a, p_b])): torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


def test_how_lightly_differs():
    "It does not stop gradients, and its floor of 1e-8 on lengths shrinks the cosine of short rows."
    lightly = pytest.importorskip("lightly.loss")
    theirs, (p, t, *_) = lightly.NegativeCosineSimilarity(), four()
    theirs(p, t.requires_grad_()).backward()
    assert t.grad.norm() > 1e-3
    t = t.detach()
    assert abs(theirs(1e-9 * p, 1e-9 * p).item()) < 0.9 and SimSiam().loss(1e-9 * p, 1e-9 * p).item() == pytest.approx(-1, abs=1e-12)
