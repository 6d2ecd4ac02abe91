"LARS against plain loops and another library; groups, schedule, refusals."
import math

import pytest, torch
from torch import nn

from peira_krepes.lab.optimizers import LARS, OPTIMIZERS, build_optimizer, learning_rate_at, parameter_groups


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()

def train(net, optimizer, steps=10):
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - x[:, :3]).square().sum().backward()
        optimizer.step()

def lars_by_loops(w, grads, lr, momentum, decay, trust, adapt):
    "Algorithm 1 of arXiv 1708.03888 entry by entry."
    m = [0.0] * len(w)
    for g in grads:
        size, slope = math.sqrt(sum(v * v for v in w)), math.sqrt(sum(v * v for v in g))
        r = trust * size / (slope + decay * size) if adapt and size > 0 and slope > 0 else 1.0
        m = [momentum * a + r * (b + decay * v) for a, b, v in zip(m, g, w)]
        w = [v - lr * a for v, a in zip(w, m)]
    return w

@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("start", ["random", "zero"])
def test_lars_is_the_algorithm(adapt, start):
    g = torch.Generator().manual_seed(0)
    w, grads = torch.randn(6, generator=g, dtype=torch.float64) * (start == "random"), torch.randn(5, 6, generator=g, dtype=torch.float64)
    grads[2] = 0
    p = nn.Parameter(w.view(2, 3).clone())
    optimizer = LARS([{"params": [p], "adapt": adapt}], lr=0.4, momentum=0.8, weight_decay=0.01, trust=0.02)
    for row in grads:
        p.grad = row.view(2, 3).clone()
        optimizer.step()
    wanted = lars_by_loops(w.tolist(), grads.tolist(), 0.4, 0.8, 0.01, 0.02, adapt)
    torch.testing.assert_close(p.detach().flatten(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)

def test_lars_against_lightly():
    theirs = pytest.importorskip("lightly.utils.lars").LARS
    ours, other = network(), network()
    weights, rest = ([p for p in other.parameters() if (p.ndim > 1) == flag] for flag in (True, False))
    peer = theirs([{"params": weights, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}], lr=0.5, momentum=0.9, trust_coefficient=1e-3, eps=0.0)
    train(ours, build_optimizer("lars", ours, 0.5, 1e-3))
    train(other, peer)
    # the peer adapts groups with decay only, which is the same split here
    for a, b in zip(ours.parameters(), other.parameters()): torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_goes_on_bit_for_bit(name):
    straight, split = network(), network()
    train(straight, build_optimizer(name, straight, 0.01, 1e-2), 6)
    first = build_optimizer(name, split, 0.01, 1e-2)
    train(split, first, 2)
    second = build_optimizer(name, split, 0.01, 1e-2)
    second.load_state_dict(first.state_dict())
    train(split, second, 4)
    assert all(torch.equal(a, b) for a, b in zip(straight.state_dict().values(), split.state_dict().values()))

def test_biases_and_normalisation_are_neither_decayed_nor_adapted():
    net = network()
    nn.init.zeros_(net[0].bias)
    for group in parameter_groups(net, 0.5): assert all((p.ndim > 1) == group["adapt"] == (group["weight_decay"] > 0) for p in group["params"])
    optimizer = build_optimizer("lars", net, 1.0, 0.5)
    for p in net.parameters(): p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    for p, old in zip(net.parameters(), before):
        moved = (old - p.detach()).norm()
        if p.ndim <= 1: torch.testing.assert_close(p.detach(), old - 1)
        else: assert 0 < moved < 2e-3 * old.norm() + 1e-3

def test_frozen_parameters_are_in_no_group():
    net = network()
    net[0].requires_grad_(False)
    held = [id(p) for g in parameter_groups(net, 0.1) for p in g["params"]]
    assert len(held) == 4 and not {id(p) for p in net[0].parameters()} & set(held)

def test_a_parameter_without_gradient_is_left_alone():
    net = network()
    optimizer = LARS(parameter_groups(net, 0.1), lr=1.0)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters())) and not optimizer.state

def test_a_closure_is_called_with_gradients_on():
    net, x = network(), torch.ones(4, 5, dtype=torch.float64)
    optimizer = LARS(parameter_groups(net, 0.0), lr=0.1)
    def closure():
        loss = net(x).square().sum()
        loss.backward()
        return loss
    assert optimizer.step(closure) > 0 and net[0].weight.grad is not None

@pytest.mark.parametrize("options", [{"lr": -1}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1}, {"trust": 0}])
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))): LARS([nn.Parameter(torch.zeros(2))], **options)

def test_another_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="optimizer must be one of 'adamw', 'lars'"): build_optimizer("sgd", network(), 0.1, 0.0)

@pytest.mark.parametrize("warmup, steps", [(0.0, 10), (0.1, 100), (0.5, 7), (1.0, 5)])
def test_the_schedule_climbs_and_falls(warmup, steps):
    rates = [learning_rate_at(i, steps, 2.0, warmup) for i in range(steps)]
    top = max(range(steps), key=lambda i: rates[i])
    assert all(a < b for a, b in zip(rates[:top], rates[1:top + 1])) and all(a >= b for a, b in zip(rates[top:], rates[top + 1:])) and rates[-1] < rates[top] + (len(rates) == top + 1)
    assert 0 < min(rates) and max(rates) <= 2.0
