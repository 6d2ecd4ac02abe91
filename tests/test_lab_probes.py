"Probes: frozen features, accuracies, label-free diagnostics and the collapse alarm, against loops and scikit-learn."
import json, math

import numpy as np, pytest, torch
from torch import nn

from oracles import alignment_loop, entropy_rank_loop, knn_loop, stationarity_loop
from peira_krepes.lab.probes import (accuracy_error, collapse_alarm, diagnose, effective_rank, embed, entropy_rank, evaluating, feature_correlations,
                                     knn_accuracy, linear_probe, sigma_n_alignment, spectrum_estimate, stationarity)


def double(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

def stationary(c, ridge, modes=None, seed=0):
    "Sigma and N of the stationary point that fills `modes` of the correlations `c`, in a random basis."
    c = torch.as_tensor(c, dtype=torch.float64)
    s = (c.sqrt() - ridge).clamp_min(0)
    if modes is not None: s = s * torch.tensor([i in modes for i in range(len(c))])
    R = torch.linalg.qr(double(len(c), len(c), seed=seed))[0]
    return R @ (c * s).diag() @ R.T, R @ s.diag() @ R.T

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5))


# embed -----------------------------------------------------------------------------------------------------------------

def test_embed_is_one_evaluation_forward_whatever_the_batch_size():
    encoder, x = net(), torch.randn(9, 2, 4, 4)
    encoder.eval(); expected = encoder(x).detach(); encoder.train()
    state = {k: v.clone() for k, v in encoder.state_dict().items()}
    for size in (1, 4, 8, 9, 512): # 4 and 8 leave a last batch of one, which must not be dropped
        torch.testing.assert_close(embed(encoder, x, size), expected, atol=1e-5, rtol=0)
    assert not embed(encoder, x).requires_grad
    assert all(torch.equal(v, state[k]) for k, v in encoder.state_dict().items())

def test_embed_takes_any_layout_and_precision():
    encoder, x = net(), torch.randn(6, 2, 4, 4)
    torch.testing.assert_close(embed(encoder, x.to(memory_format=torch.channels_last)), embed(encoder, x), atol=1e-5, rtol=0)
    torch.testing.assert_close(embed(encoder, x.flip(0)[::2]), embed(encoder, x)[[5, 3, 1]], atol=1e-5, rtol=0)
    assert embed(encoder.double(), x.double()).dtype == torch.float64

def test_modes_are_restored_module_by_module_even_after_an_error():
    encoder = net().train(); encoder[1].eval()
    before = [m.training for m in encoder.modules()]
    with pytest.raises(RuntimeError): embed(encoder, torch.randn(3, 7, 4, 4))
    assert [m.training for m in encoder.modules()] == before
    with evaluating(encoder): assert not any(m.training for m in encoder.modules())
    assert [m.training for m in encoder.modules()] == before


# accuracies -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_knn_equals_a_loop(dtype):
    z, y = double(60, 4).to(dtype), torch.arange(60) % 3
    z[y == 1] += 0.7
    for k in (1, 5, 20): assert knn_accuracy(z[:45], y[:45], z[45:], y[45:], k) == pytest.approx(knn_loop(z[:45], y[:45], z[45:], y[45:], k), abs=1e-12)

def test_knn_ignores_the_length_of_features():
    z, y = double(40, 3), torch.arange(40) % 4
    lengths = 1e-3 * double(40, 1, seed=1).exp()
    assert knn_accuracy(z[:30] * lengths[:30], y[:30], z[30:], y[30:], 3) == knn_accuracy(z[:30], y[:30], z[30:], y[30:], 3)

def test_knn_in_blocks_and_with_any_labels(monkeypatch):
    "Blocks of one row, of three, and all at once; class numbers with gaps; a class that only the test rows have."
    from peira_krepes.lab import probes
    z, y = double(70, 4), torch.tensor([7, -2, 40])[torch.arange(70) % 3]
    z[y == 7] += 0.7
    y_test = y[50:].clone(); y_test[0] = 99
    expected = knn_accuracy(z[:50], y[:50], z[50:], y_test, 5)
    assert expected == pytest.approx(knn_loop(z[:50], (y[:50] + 2).tolist(), z[50:], (y_test + 2).tolist(), 5), abs=1e-12) and 0 < expected < 1
    for limit in (1, 50, 150, 2**24):
        monkeypatch.setattr(probes, "SIMILARITIES", limit)
        assert knn_accuracy(z[:50].T.contiguous().T, y[:50], z[50:], y_test, 5) == expected

def test_knn_holds_no_more_similarities_than_it_says(monkeypatch):
    from peira_krepes.lab import probes
    monkeypatch.setattr(probes, "SIMILARITIES", 1000)
    seen, topk = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, *a, **k: seen.append(self.numel()) or topk(self, *a, **k))
    knn_accuracy(double(90, 3), torch.arange(90) % 2, double(64, 3, seed=1), torch.arange(64) % 2, 3)
    assert max(seen) <= 1000 and sum(seen) == 90 * 64

def test_knn_equals_scikit_learn():
    from sklearn.neighbors import KNeighborsClassifier
    z, y = double(300, 6), torch.arange(300) % 5
    z += double(5, 6, seed=9)[y]
    for k in (1, 7, 20):
        peer = KNeighborsClassifier(k, metric="cosine").fit(z[:200].numpy(), y[:200].numpy()).score(z[200:].numpy(), y[200:].numpy())
        assert knn_accuracy(z[:200], y[:200], z[200:], y[200:], k) == pytest.approx(peer, abs=1e-12)

def test_ties_between_classes_go_to_the_smaller():
    z = torch.tensor([[1.0, 0.1], [1.0, -0.1], [1.0, 0.2], [1.0, -0.2]])
    assert knn_accuracy(z, [3, 1, 3, 1], torch.tensor([[1.0, 0.0]]), [1], 4) == 1.0

def test_probes_take_half_precision_and_mixed_precision():
    z, y = double(60, 4), torch.arange(60) % 3
    z[y == 1] += 2
    for probe in (knn_accuracy, linear_probe):
        wanted = probe(z[:40].bfloat16().float(), y[:40], z[40:].bfloat16().float(), y[40:])
        assert probe(z[:40].bfloat16(), y[:40], z[40:].bfloat16(), y[40:]) == wanted
        probe(z[:40].float(), y[:40], z[40:], y[40:])

def test_linear_probe_equals_the_scikit_learn_pipeline():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    z, y = double(90, 5), torch.arange(90) % 3
    z += y[:, None] * double(1, 5, seed=3)
    peer = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(z[:60].numpy(), y[:60].numpy())
    ours = linear_probe(z[:60], y[:60], z[60:], y[60:])
    assert ours == peer.score(z[60:].numpy(), y[60:].numpy()) and 0.4 < ours < 1

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_columns_do_not_disturb_the_linear_probe(dtype):
    z, y = double(90, 5).to(dtype), torch.arange(90) % 3
    z[:, 0] += y
    noise = 0.3 + torch.finfo(dtype).eps * double(90, 4, seed=5).to(dtype) # a constant up to rounding, of another value in test
    noise[60:] += 0.2
    wide = torch.cat([z, noise, torch.zeros(90, 2, dtype=dtype)], 1)
    assert linear_probe(wide[:60], y[:60], wide[60:], y[60:]) == linear_probe(z[:60], y[:60], z[60:], y[60:])

def test_a_collapsed_encoder_scores_the_largest_class():
    z, y = torch.full((30, 4), 0.1), torch.tensor([0] * 12 + [1] * 8 + [0, 1] * 5)
    assert linear_probe(z[:20], y[:20], z[20:], y[20:]) == 0.5
    assert knn_accuracy(0 * z[:20], y[:20], 0 * z[20:], y[20:], k=20) == 0.5

def test_accuracy_error_is_the_spread_of_repeated_tests():
    hits = np.random.default_rng(0).binomial(360, 0.93, size=20000) / 360
    assert abs(hits.std() - accuracy_error(0.93, 360)) < 5 * hits.std() / math.sqrt(2 * 20000)

@pytest.mark.parametrize("probe", [knn_accuracy, linear_probe])
@pytest.mark.parametrize("change, message", [
    (dict(train_y=torch.zeros(5, dtype=int)), "train_y"), (dict(test_y=[0.0, 1.0, 1.0]), "test_y"), (dict(test_z=torch.ones(3, 4)), "test_z"),
    (dict(train_z=torch.full((6, 2), float("nan"))), "train_z")])
def test_probes_name_the_wrong_argument(probe, change, message):
    good = dict(train_z=torch.randn(6, 2), train_y=[0, 1] * 3, test_z=torch.randn(3, 2), test_y=[0, 1, 1])
    with pytest.raises(ValueError, match=message): probe(**{**good, **change})

def test_other_refusals():
    z = torch.randn(6, 2)
    with pytest.raises(ValueError, match="^k must"): knn_accuracy(z, [0, 1] * 3, z, [0, 1] * 3, k=7)
    with pytest.raises(ValueError, match="two classes"): linear_probe(z, [1] * 6, z, [1] * 6)
    with pytest.raises(ValueError, match="power"): effective_rank(z, 3)
    with pytest.raises(ValueError, match="images"): embed(net(), torch.randn(0, 2, 4, 4))
    with pytest.raises(ValueError, match="encoder"): embed(nn.Identity(), torch.randn(3, 2, 4, 4))
    with pytest.raises(ValueError, match="Sigma"): stationarity(torch.eye(3), torch.eye(2), 0.1)
    with pytest.raises(ValueError, match="N"): spectrum_estimate(torch.randn(3, 2), 0.1)
    with pytest.raises(ValueError, match="ridge"): collapse_alarm(torch.eye(2), torch.eye(2), ridge=-1)


# label-free --------------------------------------------------------------------------------------------------------------

def test_effective_rank_worked_values():
    z = torch.linalg.qr(double(7, 4))[0] @ torch.diag(torch.tensor([4.0, 2, 1, 0]).double())
    assert effective_rank(z) == pytest.approx(2.6005, abs=5e-5) and effective_rank(z, 2) == pytest.approx(1.9504, abs=5e-5)

@pytest.mark.parametrize("shape", [(50, 6), (4, 9)])
def test_effective_rank_equals_a_loop_and_ignores_rotation_and_scale(shape):
    z = double(*shape) * torch.arange(1, shape[1] + 1)
    R = torch.linalg.qr(double(shape[1], shape[1], seed=2))[0]
    for power in (1, 2):
        expected = entropy_rank_loop([s**power for s in np.linalg.svd(z.numpy(), compute_uv=False)])
        for same in (z, 1e-30 * z @ R, z.T.contiguous().T): assert effective_rank(same, power) == pytest.approx(expected, abs=1e-10)
    assert effective_rank(z, 2) < effective_rank(z) <= min(shape)

def test_entropy_rank_at_the_edges():
    assert entropy_rank(torch.zeros(4)) == 0 and entropy_rank(torch.tensor([-1e-9, 0.0])) == 0
    assert entropy_rank(torch.full((5,), 1e-300, dtype=torch.float64)) == pytest.approx(5, abs=1e-10)
    assert effective_rank(torch.ones(1, 3)) == pytest.approx(1, abs=1e-10)

@pytest.mark.parametrize("modes", [(0, 1, 2), (0, 2), (1,)])
def test_spectrum_is_read_back_at_every_stationary_point(modes):
    c, ridge = [0.9, 0.5, 0.2, 0.005], 0.1
    Sigma, N = stationary(c, ridge, modes)
    expected = sorted([c[i] for i in modes] + [ridge**2] * (4 - len(modes)), reverse=True)
    torch.testing.assert_close(spectrum_estimate(N, ridge), torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=0)
    assert stationarity(Sigma, N, ridge) < 1e-10
    torch.testing.assert_close(sigma_n_alignment(Sigma, N), torch.ones(4).double(), atol=1e-10, rtol=0)
    torch.testing.assert_close(feature_correlations(Sigma, N), torch.tensor([c[i] for i in modes], dtype=torch.float64), atol=1e-10, rtol=0)

def test_statistics_off_the_stationary_point_equal_loops():
    z_a, z_b = double(40, 5), double(40, 5, seed=1)
    Sigma, N = (z_a.T @ z_b + z_b.T @ z_a) / 40, (z_a.T @ z_a + z_b.T @ z_b) / 40
    assert stationarity(Sigma, N, 0.2) == pytest.approx(stationarity_loop(Sigma.numpy(), N.numpy(), 0.2), abs=1e-10)
    np.testing.assert_allclose(sigma_n_alignment(Sigma, N), alignment_loop(Sigma.numpy(), N.numpy()), atol=1e-10)
    scipy = pytest.importorskip("scipy.linalg")
    np.testing.assert_allclose(feature_correlations(Sigma, N), scipy.eigh(Sigma.numpy(), N.numpy(), eigvals_only=True)[::-1], atol=1e-10)

def test_conventions_at_collapse():
    zero = torch.zeros(3, 3)
    assert stationarity(zero, zero, 0.1) == 0 and stationarity(zero, torch.eye(3), 0.1) == math.inf
    torch.testing.assert_close(sigma_n_alignment(zero, zero), torch.ones(3).double())
    assert feature_correlations(zero, zero).numel() == 0
    torch.testing.assert_close(spectrum_estimate(zero, 0.1), torch.full((3,), 0.01).double())

def test_diagnose_is_json_and_agrees_with_the_features():
    z_a, z_b = double(40, 5).float(), double(40, 5, seed=1).float()
    for Sigma, N in (((z_a.T @ z_b + z_b.T @ z_a) / 40, (z_a.T @ z_a + z_b.T @ z_b) / 40), (torch.zeros(5, 5), torch.zeros(5, 5)), (torch.zeros(5, 5), torch.eye(5))):
        for ridge in (0.1, None):
            report = diagnose(Sigma, N, ridge)
            assert json.loads(json.dumps(report, allow_nan=False)) == report and (report["spectrum"] is None) == (ridge is None)
    report = diagnose((z_a.T @ z_b + z_b.T @ z_a) / 40, (z_a.T @ z_a + z_b.T @ z_b) / 40)
    both = torch.cat([z_a, z_b])
    assert report["effective_rank"] == pytest.approx(effective_rank(both), abs=1e-4)
    assert report["effective_rank_covariance"] == pytest.approx(effective_rank(both, 2), abs=1e-4)
    assert report["trace_N"] == pytest.approx(float(both.square().sum()) / 40, rel=1e-4)


# the alarm ---------------------------------------------------------------------------------------------------------------

def test_no_alarm_at_the_minimum_whatever_the_spectrum():
    for c in ([0.9] * 8, [0.9, 0.03, 0.02, 0.011], [1.0, 0.2] + [0.001] * 14, np.linspace(1, 0, 32), [0.5]):
        assert collapse_alarm(*stationary(c, 0.1)).verdict == "healthy"

def features(scale, offset=0.0):
    U, V = (double(2000, 16) + 0.5 * double(2000, 16, seed=i) for i in (1, 2))
    U, V = U * torch.tensor(scale) + offset, V * torch.tensor(scale) + offset
    return (U.T @ V + V.T @ U) / 2000, (U.T @ U + V.T @ V) / 2000

@pytest.mark.parametrize("scale, offset, verdict", [
    ([0.5] * 16, 0, "healthy"), ([0.5] * 8 + [0.01] * 8, 0, "healthy"), ([0.5] * 2 + [0.01] * 14, 0, "dimensional"), ([0.01] * 16, 0.5, "dimensional"),
    ([1e-5] * 16, 0.5, "dimensional"), # the constant mode alone, all else below rounding
   
    ([1e-3] * 16, 0, "complete"), ([0.0] * 16, 0, "complete")])
def test_the_alarm_fires_on_collapse_and_only_then(scale, offset, verdict):
    alarm = collapse_alarm(*features(scale, offset))
    assert alarm.verdict == verdict and bool(alarm) == (verdict != "healthy") and verdict in str(alarm)

def test_without_a_ridge_only_rank_and_exact_constancy_count():
    assert not collapse_alarm(*features([1e-3] * 16), ridge=None)
    assert collapse_alarm(*features([1e-3] * 2 + [1e-5] * 14), ridge=None).verdict == "dimensional"
    constant = torch.full((64, 8), 0.3)
    z = constant - constant.mean(0) # rounding only
    assert collapse_alarm(z.T @ z / 32, z.T @ z / 32, ridge=None).verdict == "complete"

def test_a_ridge_above_every_correlation_makes_collapse_the_answer():
    assert collapse_alarm(*features([0.5] * 16), ridge=1.5).verdict == "complete"


# standardising ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_standardised_equals_scikit_learn_block_by_block(dtype, atol, monkeypatch):
    from sklearn.preprocessing import StandardScaler
    from peira_krepes.lab import probes
    z = (double(50, 4) * torch.tensor([1, 1e-3, 1e3, 1.0]) + torch.tensor([0, 1, 1e3, 5.0])).to(dtype)
    scaler = StandardScaler().fit(z[:30].double().numpy())
    for block in (1, 7, 10_000):
        monkeypatch.setattr(probes, "BLOCK", block)
        for out, part in zip(probes.standardised(z[:30], z[30:].T.contiguous().T, dtype), (z[:30], z[30:])):
            assert out.dtype == dtype
            np.testing.assert_allclose(out.numpy(), scaler.transform(part.double().numpy()), atol=atol)
