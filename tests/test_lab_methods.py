"Methods: objectives as training losses, their statistics, the table and its refusals."
import inspect

import numpy as np, pytest, torch
from torch import nn

from oracles import moments_by_loops
from peira_krepes.lab.methods import METHODS, ObjectiveMethod, build_method, statistics
from peira_krepes.objectives import BYOL, PEIRA, BarlowTwins, PEIRALoss, SIGReg, SimCLR, SimSiam, SpectralContrastive, VICReg


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
    assert all(torch.equal(v, before[k]) for k, v in method.state_dict().items())
    if name in ("simclr", "byol", "simsiam"): return # they normalise rows, and survive what overflows the others
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
    first, second = build_method(name, 5), build_method(name, 5)
    second.load_state_dict(first.state_dict())
    if name in ("byol", "simsiam"): # the predictor is a network, and computes in bfloat16 under autocast like any other: the objective's precision is what is tested
        first.predictor = second.predictor = nn.Identity()
    with torch.autocast("cpu", torch.bfloat16): half = first(z_a, z_b)
    full = second.double()(z_a.double(), z_b.double())
    assert half.dtype == torch.float32 and full.dtype == torch.float64
    assert float(half) == pytest.approx(float(full), rel=1e-4)

def test_options_reach_the_objective():
    peira = build_method("peira", 5, ridge=0.3, rate=0.2, center=True)
    assert isinstance(peira, PEIRALoss) and peira.objective == PEIRA(0.3, True) and peira.rate == 0.2 and statistics_ridge(peira) == 0.3
    assert build_method("barlow_twins", 5, redundancy=0.1).objective == BarlowTwins(0.1)

def statistics_ridge(method):
    method(*views())
    return statistics(method)[2]

def test_defaults_are_the_objectives_own_with_the_stated_exceptions():
    objectives = {name: build_method(name, 8).objective for name in METHODS}
    assert objectives == {"peira": PEIRA(), "vicreg": VICReg.as_released(8), "barlow_twins": BarlowTwins(), "spectral": SpectralContrastive(), "simclr": SimCLR(), "byol": BYOL(), "simsiam": SimSiam(),
                          "sigreg": SIGReg(weight=0.05, n_directions=256)}
    peira = build_method("peira", 8)
    assert (peira.rate, peira.previous) == (PEIRALoss(8).rate, False)

@pytest.mark.parametrize("name, options, message", [
    ("bralow", {}, "method must be one of 'peira', 'vicreg', 'barlow_twins'"), ("peira", {"rat": 0.1}, "ridge, rate, center, carry; got 'rat'"),
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


def test_a_teacher_climbs_to_one_along_half_a_cosine():
    byol = build_method("byol", 5, momentum=0.9)
    assert byol.teacher == pytest.approx(0.9)
    for progress, wanted in ((0.0, 0.9), (1 / 3, 0.925), (0.5, 0.95), (1.0, 1.0)):
        byol.begin(7, progress)
        assert byol.teacher == pytest.approx(wanted)
    siam = build_method("simsiam", 5)
    siam.begin(7, 0.5)
    assert siam.teacher is None

@pytest.mark.parametrize("name", ["byol", "simsiam"])
def test_predictions_are_compared_with_the_targets_and_no_gradient_reaches_them(name):
    method, (z_a, z_b), (t_a, t_b) = build_method(name, 5), (z.requires_grad_() for z in views()), (z.flip(0).clone().requires_grad_() for z in views())
    loss = method(z_a, z_b, (t_a, t_b))
    method.eval(); method.train()
    p_a, p_b = method.predictor(torch.cat([z_a, z_b])).split(len(z_a))
    torch.testing.assert_close(loss, method.objective.loss(p_a, p_b, (t_a, t_b)))
    loss.backward()
    assert t_a.grad is None and t_b.grad is None and z_a.grad.any() and all(p.grad is not None for p in method.predictor.parameters())
    torch.testing.assert_close(build_method(name, 5).objective.loss(p_a, p_b, (z_a, z_b)), method(z_a, z_b))

def test_directions_are_new_in_each_step_and_the_same_in_a_resumed_run():
    method, again, (z_a, z_b) = build_method("sigreg", 5), build_method("sigreg", 5), views()
    values = []
    for step in (0, 1, 2):
        method.begin(step, 0.0)
        values.append(float(method(z_a, z_b)))
    again.begin(2, 0.9)
    assert len(set(values)) == 3 and float(again(z_a, z_b)) == values[2]

def test_peira_carries_its_statistics_only_if_asked():
    now, before = views(), tuple(0.5 * z for z in views())
    carried, plain = build_method("peira", 5, rate=0.3, carry=True), build_method("peira", 5, rate=0.3)
    for method in (carried, plain): method(*before, None)
    carried(*now, before); plain(*now, None)
    wanted = build_method("peira", 5)
    wanted(*now, None)
    torch.testing.assert_close(carried.N, wanted.N) # one batch, embedded by the present network, whatever the network was before
    assert not torch.allclose(plain.N, wanted.N)
