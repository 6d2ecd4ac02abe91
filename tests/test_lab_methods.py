"Methods: objectives as training losses, their statistics, the table and its refusals."
import inspect

import numpy as np, pytest, torch

from oracles import moments_by_loops
from peira_krepes.lab.methods import METHODS, RATE, ObjectiveMethod, build_method, statistics
from peira_krepes.objectives.barlow_twins import BarlowTwins
from peira_krepes.objectives.peira import PEIRA, PEIRALoss


def views(n=24, d=5, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(n, d, generator=g, dtype=torch.float64)
    return tuple((z + 0.5 * torch.randn(n, d, generator=g, dtype=torch.float64) + 0.3).to(dtype) for _ in range(2))

def numbers(method): return {k: v.clone() for k, v in method.state_dict().items()}


@pytest.mark.parametrize("objective", [BarlowTwins(), BarlowTwins(0.1), PEIRA(0.3, center=True)])
def test_an_objective_as_a_method_has_its_value_and_gradient(objective):
    z_a, z_b = (z.requires_grad_() for z in views())
    ours, theirs = ObjectiveMethod(objective, 5)(z_a, z_b), objective.loss(z_a, z_b)
    assert torch.equal(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, (z_a, z_b)), torch.autograd.grad(theirs, (z_a, z_b))): assert torch.equal(a, b)

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_those_of_the_last_batch_centred(dtype):
    method = ObjectiveMethod(BarlowTwins(), 5).to(dtype)
    method(*views(dtype=dtype))
    z_a, z_b = (z.flip(0)[::2] * 3 for z in views(dtype=dtype)) # a second batch, not contiguous
    method(z_a, z_b)
    m = moments_by_loops(z_a, z_b)
    a, b = m["mean_a"], m["mean_b"]
    Sigma, N, ridge = statistics(method)
    np.testing.assert_allclose(Sigma, m["S_ab"] + m["S_ab"].T - np.outer(a, b) - np.outer(b, a), atol=1e-4 if dtype == torch.float32 else 1e-10)
    np.testing.assert_allclose(N, m["S_aa"] + m["S_bb"] - np.outer(a, a) - np.outer(b, b), atol=1e-4 if dtype == torch.float32 else 1e-10)
    assert ridge is None and not Sigma.requires_grad

@pytest.mark.parametrize("name", METHODS)
def test_evaluation_and_refused_batches_leave_the_state(name):
    method = build_method(name, 5)
    method(*views())
    before = numbers(method)
    method.eval()(*(2 * z for z in views()))
    method.train()
    z_a, z_b = views()
    with pytest.raises(ValueError, match="z_a"): method(z_a.index_fill(0, torch.tensor([3]), float("nan")), z_b)
    with pytest.raises(FloatingPointError): method(z_a * 1e30, z_b * 1e30)
    assert all(torch.equal(v, before[k]) for k, v in method.state_dict().items())

@pytest.mark.parametrize("name", METHODS)
def test_all_state_is_in_the_state_dict(name):
    one, other = build_method(name, 5), build_method(name, 5)
    one(*views())
    other.load_state_dict(one.state_dict())
    z_a, z_b = (z.flip(1) for z in views())
    assert torch.equal(one(z_a, z_b), other(z_a, z_b))
    for a, b in zip(statistics(one), statistics(other)): assert (a is b is None) or torch.equal(torch.as_tensor(a), torch.as_tensor(b))

@pytest.mark.parametrize("name", METHODS)
def test_half_precision_features_give_a_float32_loss_close_to_the_full_one(name):
    z_a, z_b = (z.bfloat16() for z in views())
    with torch.autocast("cpu", torch.bfloat16): half = build_method(name, 5)(z_a, z_b)
    full = build_method(name, 5)(z_a.double(), z_b.double())
    assert half.dtype == torch.float32 and full.dtype == torch.float64
    assert float(half) == pytest.approx(float(full), rel=1e-4)

def test_options_reach_the_objective():
    peira = build_method("peira", 5, ridge=0.3, rate=0.2, center=True)
    assert isinstance(peira, PEIRALoss) and peira.objective == PEIRA(0.3, True) and peira.rate == 0.2 and statistics_ridge(peira) == 0.3
    assert build_method("barlow_twins", 5, redundancy=0.1).objective == BarlowTwins(0.1)

def statistics_ridge(method):
    method(*views())
    return statistics(method)[2]

def test_defaults_are_the_objectives_own_except_the_rate():
    assert build_method("peira", 5).rate == RATE != PEIRALoss(5).rate
    assert build_method("peira", 5).objective == PEIRA() and build_method("barlow_twins", 5).objective == BarlowTwins()

@pytest.mark.parametrize("name, options, message", [
    ("bralow", {}, "method must be one of 'peira', 'barlow_twins'"), ("peira", {"rat": 0.1}, "ridge, rate, center; got 'rat'"),
    ("barlow_twins", {"ridge": 0.1}, "redundancy; got 'ridge'"), ("peira", {"rate": 0}, "rate"), ("peira", {"ridge": -1}, "ridge")])
def test_unknown_names_and_options_are_refused_with_the_choices(name, options, message):
    with pytest.raises(ValueError, match=message): build_method(name, 5, **options)

@pytest.mark.parametrize("name", METHODS)
def test_every_entry_of_the_table_keeps_the_protocol(name):
    assert list(inspect.signature(METHODS[name]).parameters)[0] == "dim"
    method = build_method(name, 5)
    z_a, z_b = (z.requires_grad_() for z in views())
    loss = method(z_a, z_b)
    assert loss.ndim == 0 and all(torch.isfinite(g).all() and g.any() for g in torch.autograd.grad(loss, (z_a, z_b)))
    Sigma, N, _ = statistics(method)
    for S in (Sigma, N): torch.testing.assert_close(S, S.T)
    assert float(torch.linalg.eigvalsh(N)[0]) > 0
