"lab.sgd_probe: every step against torch.optim and plain loops, top-5 by sorting, the converged optimum against scikit-learn."
import numpy as np
import pytest
import torch
from torch import nn

from oracles import momentum_softmax_by_loops
from peira_krepes.lab import sgd_probe
from peira_krepes.lab.sgd_probe import linear_probe_sgd


def data(n=60, d=4, classes=3, seed=0, dtype=torch.float64, gap=1.0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    z = torch.randn(n, d, generator=g, dtype=torch.float64) + gap*torch.randn(classes, d, generator=g, dtype=torch.float64)[y]
    return z.to(dtype), y


def batches(n, size, epochs, seed):
    g = torch.Generator().manual_seed(seed)
    return [b for _ in range(epochs) for b in torch.randperm(n, generator=g).split(size)]


def test_weights_equal_plain_loops():
    z, y = data(23, 3)
    W = sgd_probe._fit(z, y, 3, 4, 0.5, 7, 1, False)
    order = batches(23, 7, 4, 1)
    weights, bias = momentum_softmax_by_loops(z.numpy(), y.tolist(), [b.tolist() for b in order], len(order), 0.5, 3)
    assert len(order) == 16
    np.testing.assert_allclose(W[:-1], weights, atol=1e-10); np.testing.assert_allclose(W[-1], bias, atol=1e-10)


def test_weights_equal_torchs_optimiser_and_schedule():
    z, y = data(50, 5)
    layer = nn.Linear(5, 3).double(); nn.init.zeros_(layer.weight); nn.init.zeros_(layer.bias)
    order = batches(50, 16, 6, 3)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, len(order))
    for b in order:
        optimiser.zero_grad(); nn.functional.cross_entropy(layer(z[b]), y[b]).backward(); optimiser.step(); schedule.step()
    W = sgd_probe._fit(z, y, 3, 6, 0.3, 16, 3, False)
    torch.testing.assert_close(W[:-1], layer.weight.detach().T, atol=1e-10, rtol=0)
    torch.testing.assert_close(W[-1], layer.bias.detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_result_equals_sorting_the_scores(dtype):
    z, y = data(160, 6, classes=8, dtype=dtype)
    y = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89])[y]
    probe = linear_probe_sgd(z[:100], y[:100], z[100:], y[100:], epochs=5, batch_size=32, progress=False)
    work = z.to(torch.promote_types(dtype, torch.float32))
    mean, std = work[:100].double().mean(0), work[:100].double().std(0, correction=0)
    x = ((work.double() - mean)/std).to(work)
    W = sgd_probe._fit(x[:100], (y[:100, None] == y.unique()).int().argmax(1), 8, 5, 0.1, 32, 0, False)
    ranked = [y.unique()[s.argsort(descending=True)].tolist() for s in x[100:] @ W[:-1] + W[-1]]
    assert probe.top1 == pytest.approx(np.mean([r[0] == t for r, t in zip(ranked, y[100:].tolist())]), abs=1e-12)
    assert probe.top5 == pytest.approx(np.mean([t in r[:5] for r, t in zip(ranked, y[100:].tolist())]), abs=1e-12)
    assert probe.top1 < probe.top5 < 1
    loss = nn.functional.cross_entropy((x[:100] @ W[:-1] + W[-1]).double(), (y[:100, None] == y.unique()).int().argmax(1))
    assert probe.loss == pytest.approx(loss.item(), abs=1e-4)


def test_long_runs_reach_scikit_learns_unpenalised_optimum():
    from sklearn.linear_model import LogisticRegression
    z, y = data(300, 3, gap=0.6)
    peer = LogisticRegression(C=1e8, max_iter=5000, tol=1e-10).fit(((z - z.mean(0))/z.std(0, correction=0)).numpy(), y.numpy())
    p = peer.predict_proba(((z - z.mean(0))/z.std(0, correction=0)).numpy())
    best = -np.log(p[np.arange(300), y.numpy()]).mean()
    probe = linear_probe_sgd(z, y, z, y, epochs=300, batch_size=300, learning_rate=1.0, progress=False)
    assert best - 1e-6 <= probe.loss <= best + 1e-4 and probe.loss > 0.3


def test_seed_decides_the_order_and_the_global_generator_is_spared():
    z, y = data(90, 5)
    run = lambda seed: linear_probe_sgd(z[:60], y[:60], z[60:], y[60:], epochs=2, batch_size=8, seed=seed, progress=False)
    before = torch.get_rng_state()
    assert run(0) == run(0) and run(0).loss != run(1).loss
    assert torch.equal(before, torch.get_rng_state())


def test_scale_layout_and_constant_columns_do_not_matter():
    z, y = data(90, 5)
    run = lambda z: linear_probe_sgd(z[:60], y[:60], z[60:], y[60:], epochs=5, batch_size=16, progress=False)
    wanted = run(z)
    for same in (1e4*z + 3, z.T.contiguous().T, torch.cat([z, torch.full((90, 3), 0.7, dtype=torch.float64)], 1)):
        assert run(same)[0] == wanted[0] and run(same).loss == pytest.approx(wanted.loss, abs=1e-8)


def test_a_class_of_the_test_rows_alone_is_never_right():
    z, y = data(40, 3)
    y_test = y[:20].clone(); y_test[:] = 7
    assert linear_probe_sgd(z, y, z[:20], y_test, epochs=2, progress=False).top1 == 0
    assert linear_probe_sgd(z, y, z[:20], y[:20], epochs=2, progress=False).top5 is None


def test_features_with_a_graph_are_left_alone():
    z, y = data(40, 3)
    z.requires_grad_()
    assert linear_probe_sgd(z, y, z, y, epochs=2, progress=False).top1 > 0.3 and z.grad is None


@pytest.mark.parametrize('error, match, change', [
    (ValueError, 'train_y', dict(train_y=[0, 1])), (ValueError, 'two classes', dict(train_y=[1]*6)), (ValueError, 'test_z', dict(test_z=torch.ones(3, 4))),
    (ValueError, 'train_z', dict(train_z=torch.full((6, 2), float('inf')))), (ValueError, 'epochs', dict(epochs=0)), (ValueError, 'batch_size', dict(batch_size=0)),
    (ValueError, 'learning_rate', dict(learning_rate=-1.0)), (ValueError, 'seed', dict(seed=-1))])
def test_refusals(error, match, change):
    good = dict(train_z=data(6, 2)[0], train_y=[0, 1]*3, test_z=data(3, 2)[0], test_y=[0, 1, 1], progress=False)
    with pytest.raises(error, match=match): linear_probe_sgd(**{**good, **change})


@pytest.mark.parametrize('rate', [1e6, 1e38])
def test_a_rate_far_too_large_is_refused(rate):
    z, y = data(200, 2, classes=2, gap=0.0, dtype=torch.float32)
    with pytest.raises(FloatingPointError, match='diverged at learning_rate=1e'): linear_probe_sgd(z, y, z, y, epochs=5, batch_size=20, learning_rate=rate, progress=False)
    assert linear_probe_sgd(z, y, z, y, epochs=5, progress=False).loss < 0.7
