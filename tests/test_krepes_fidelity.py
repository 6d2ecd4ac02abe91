"Fidelity: each number by its definition, each baseline by counting, and the paper's coverage next to chance."
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from oracles import confidence_by_loops, coverage_expectation_by_inclusion_exclusion, kendall_by_pairs

from peira_krepes.krepes.fidelity import (class_coverage, confidence_drop, coverage_distribution, neighbour_shares, precision_at_1, probe,
                                          probe_fidelity, spectral_entropy)


def toy(t=60, n=150, m=30, seed=0):
    "Kernel rows of samples and references, coefficients, and labels of three clusters."
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (t + n,), generator=g)
    x = 3 * torch.eye(3)[y].double()[:, :2] + torch.randn(t + n, 2, generator=g)
    K = torch.exp(-torch.cdist(x, x[t:t + m]).square() / 2)
    A = torch.eye(3).double()[y[t:t + m]] + 0.3 * torch.randn(m, 3, generator=g)
    return K[:t], A, K[t:] @ A, y[t:], y[:t]


# ---- confidence drop -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [7, 1024])
def test_neighbour_shares(rows):
    K, A, reference, y, _ = toy()
    expected = confidence_by_loops((K @ A).tolist(), reference.tolist(), y.tolist(), 15)
    shares = neighbour_shares(K @ A, reference, y.numpy(), 15, rows=rows)
    np.testing.assert_allclose(shares, [[row[c] for c in range(3)] for row in expected], atol=1e-10)


def test_neighbour_shares_agree_with_scikit_learn():
    peer = pytest.importorskip("sklearn.neighbors").KNeighborsClassifier(50)
    K, A, reference, y, _ = toy()
    np.testing.assert_allclose(neighbour_shares(K @ A, reference, y.numpy(), 50), peer.fit(reference.numpy(), y).predict_proba((K @ A).numpy()), atol=1e-10)


def test_drop_is_confidence_lost_by_deleting_the_top():
    K, A, reference, y, _ = toy()
    scores = K * A.norm(dim=1)
    drop = confidence_drop(K, A, scores, reference, y, n_deleted=4, k=20)
    lost, before = [], []
    for x in range(len(K)):
        top = sorted(range(len(A)), key=lambda l: -scores[x, l].item())[:4]
        z = (K[x] @ A).tolist()
        deleted = (K[x] @ A - sum(K[x, l] * A[l] for l in top)).tolist()
        one, two = confidence_by_loops([z, deleted], reference.tolist(), y.tolist(), 20)
        original = max(one, key=lambda c: (one[c], -c))
        before.append(one[original]); lost.append(one[original] - two[original])
    assert abs(drop["top"] - np.mean(lost)) < 1e-10 and abs(drop["confidence"] - np.mean(before)) < 1e-10
    assert abs(drop["top_se"] - np.std(lost, ddof=1) / len(lost) ** 0.5) < 1e-10
    assert (drop["n_samples"], drop["n_deleted"], drop["k"]) == (60, 4, 20)


def test_scores_of_noise_cost_what_random_costs():
    K, A, reference, y, _ = toy(t=300, n=300)
    drop = confidence_drop(K, A, torch.rand(300, 30, generator=torch.Generator().manual_seed(1)), reference, y, n_deleted=5, k=20, draws=20)
    assert abs(drop["top"] - drop["random"]) < 5 * math.hypot(drop["top_se"], drop["random_se"])
    good = confidence_drop(K, A, K * A.norm(dim=1), reference, y, n_deleted=5, k=20)
    assert good["top"] > good["random"] + 5 * math.hypot(good["top_se"], good["random_se"])


def test_norm_matched_deletion_separates_length_from_direction():
    "Contributions of one length everywhere: nothing to match, so matched and random deletions of one landmark are the same."
    K, A, reference, y, _ = toy()
    A = A / A.norm(dim=1, keepdim=True)
    K = torch.ones_like(K)
    drop = confidence_drop(K, A, torch.rand(K.shape), reference, y, n_deleted=1, k=20)
    assert drop["norm_matched"] == drop["random"] and drop["norm_matched_se"] == drop["random_se"]


def test_deleting_all_landmarks_is_the_same_for_every_order():
    K, A, reference, y, _ = toy()
    drop = confidence_drop(K, A, K, reference, y, n_deleted=30, k=20)
    at_zero = confidence_by_loops([[0.0] * 3], reference.tolist(), y.tolist(), 20)[0]
    before = neighbour_shares(K @ A, reference, y.numpy(), 20)
    expected = np.mean([b.max() - at_zero[int(b.argmax())] for b in before])
    for name in ("top", "random", "norm_matched"): assert abs(drop[name] - expected) < 1e-10


def test_a_kernel_of_zero_moves_nothing():
    K, A, reference, y, _ = toy()
    drop = confidence_drop(torch.zeros_like(K), A, K, reference, y)
    assert drop["top"] == drop["random"] == drop["norm_matched"] == 0


def test_drop_is_seeded_leaves_the_global_state_and_fits_json():
    K, A, reference, y, _ = toy()
    state = torch.get_rng_state()
    one, two, other = (confidence_drop(K, A, K, reference, y, seed=s) for s in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert one == two == json.loads(json.dumps(one, allow_nan=False)) and one["random"] != other["random"] and one["top"] == other["top"]
    names = np.array(["ant", "bee", "cat"])[y]
    for labels in (names, pd.Series(names, index=range(len(y), 0, -1)), names.tolist(), y.int()): assert confidence_drop(K, A, K, reference, labels, seed=0) == one
    again = confidence_drop(K.float(), A.float(), K, reference.float(), y)
    assert abs(again["top"] - one["top"]) < 2 / 50                   # a neighbour may change with float32 rounding


def test_confidence_drop_refusals():
    K, A, reference, y, _ = toy()
    good = dict(K_x=K, A=A, scores=K, reference=reference, reference_labels=y)
    for change, message in ((dict(A=A[:-1]), "A must have shape"), (dict(scores=K[:, :3]), "scores must have shape"), (dict(reference=reference[:, :2]), "reference must have shape"),
                            (dict(reference_labels=y[:-1]), "reference_labels must hold 150 labels"), (dict(n_deleted=31), "n_deleted must be between 1 and 30"),
                            (dict(k=151), "k must be between 1 and 150"), (dict(K_x=K[:1]), "K_x must have at least 2"), (dict(draws=0), "draws must be"),
                            (dict(reference_labels=[float("nan")] * 150), "must not have missing labels")):
        with pytest.raises(ValueError, match=message): confidence_drop(**(good | change))


# ---- class coverage --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("counts", [[1], [1, 1], [3, 2, 2], [5, 1, 4], [7] * 5, [1, 2, 3, 4, 5, 6], [40, 1]])
def test_expectation_by_inclusion_exclusion(counts):
    distribution = coverage_distribution(counts)
    assert len(distribution) == sum(counts) + 1 and abs(distribution[-1] - 1) < 1e-10 and (np.diff(distribution) > -1e-12).all()
    assert (distribution[:len(counts)] == 0).all()
    assert abs((1 - distribution).sum() - float(coverage_expectation_by_inclusion_exclusion(counts))) < 1e-10


def test_the_worked_value_of_ten_balanced_classes():
    "29.29 in the limit of a large pool, the harmonic sum; the exact expectation comes up to it from below."
    harmonic = 10 * sum(1 / i for i in range(1, 11))
    expected = []
    for n in (5, 50, 500):
        c = class_coverage(torch.rand(10 * n), np.repeat(np.arange(10), n))
        assert abs(c["expected_large_pool"] - harmonic) < 1e-8 and round(c["expected_large_pool"], 2) == 29.29
        expected.append(c["expected"])
    assert expected[0] < expected[1] < expected[2] < harmonic and harmonic - expected[2] < 0.1


def test_large_pool_of_unequal_classes():
    "Against inclusion-exclusion of the limit: sum over sets of classes of (-1)^(size+1) / p(set)."
    import itertools
    counts = np.array([1, 10, 200, 1000])
    p = counts / counts.sum()
    limit = sum((-1) ** (s + 1) / sum(c) for s in range(1, 5) for c in itertools.combinations(p, s))
    assert abs(class_coverage(torch.rand(1211), np.repeat(list("abcd"), counts))["expected_large_pool"] / limit - 1) < 1e-8


def test_kappa_and_its_p_value():
    norms = torch.tensor([0.1, 5.0, 3.0, 4.0, 0.2, 2.0])
    c = class_coverage(norms, ["a", "a", "b", "a", "c", "b"])                       # order: a a b b c a
    assert c["kappa"] == 5 and c["n_classes"] == 3 and c == json.loads(json.dumps(c, allow_nan=False))
    assert abs(c["p_value"] - coverage_distribution([3, 2, 1])[5]) < 1e-12
    assert class_coverage(torch.ones(4), [0, 0, 1, 0])["kappa"] == 3                 # equal norms keep their order
    assert class_coverage(torch.ones(3), ["x"] * 3) == {"kappa": 1, "expected": 1.0, "expected_large_pool": pytest.approx(1.0), "p_value": 1.0, "n_classes": 1}


def test_p_value_is_uniform_enough_under_random_order():
    "P(p <= P(kappa <= r)) = P(kappa <= r) exactly; the mean of 400 random kappas is within five standard errors of the expectation."
    labels, g = np.repeat([0, 1, 2, 3], [2, 5, 9, 30]), torch.Generator().manual_seed(0)
    runs = [class_coverage(torch.rand(46, generator=g), labels) for _ in range(400)]
    kappas = np.array([r["kappa"] for r in runs])
    assert abs(kappas.mean() - runs[0]["expected"]) < 5 * kappas.std() / 20
    share = coverage_distribution([2, 5, 9, 30])[20]
    assert abs((np.array([r["p_value"] for r in runs]) <= share + 1e-12).mean() - share) < 5 * (share * (1 - share) / 400) ** 0.5


def test_the_papers_numbers_are_chance():
    distribution = coverage_distribution([100] * 10)
    assert 0.3 < distribution[26] < distribution[27] < 0.7


def test_many_classes_and_a_large_pool_stay_exact():
    distribution = coverage_distribution([30] * 100)
    assert abs(distribution[-1] - 1) < 1e-8 and (distribution >= 0).all()
    c = class_coverage(torch.rand(3000), np.arange(3000) % 100)
    assert 400 < c["expected"] < c["expected_large_pool"] < 520                      # 100 x H_100 = 518.7


def test_class_coverage_refusals():
    with pytest.raises(ValueError, match="landmark_labels must hold 4 labels"): class_coverage(torch.rand(4), [0, 1])
    with pytest.raises(ValueError, match="landmark_norms must be finite"): class_coverage(torch.tensor([1.0, torch.inf]), [0, 1])


# ---- probes ----------------------------------------------------------------------------------------------------------
def embeddings(n=300, noise=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    z = torch.eye(3)[y] * 2 + torch.randn(n, 3, generator=g)
    return z, z @ torch.randn(3, 5, generator=g) + noise * torch.randn(n, 5, generator=g), y


def test_accuracy_gap_and_tau_by_their_definitions():
    z, s, y = embeddings(noise=1.0)
    train, test = slice(0, 200), slice(200, None)
    f = probe_fidelity(z[train], s[train], y[train], z[test], s[test], y[test])
    p, q = probe(z[train], y[train].numpy(), z[test]), probe(s[train], y[train].numpy(), s[test])
    truth = y[test].numpy()
    right_p, right_q = p.argmax(1) == truth, q.argmax(1) == truth
    assert abs(f["accuracy_network"] - right_p.mean()) < 1e-12 and abs(f["accuracy_surrogate"] - right_q.mean()) < 1e-12
    assert abs(f["accuracy_gap"] - (right_q.mean() - right_p.mean())) < 1e-12
    assert abs(f["accuracy_gap_se"] - np.std(right_q * 1.0 - right_p, ddof=1) / 10) < 1e-12
    assert abs(f["kendall_tau"] - kendall_by_pairs(p[np.arange(100), truth], q[np.arange(100), truth])) < 1e-10
    assert f["accuracy_network"] > f["accuracy_surrogate"] and f == json.loads(json.dumps(f, allow_nan=False))


def test_probe_is_the_stationary_point_of_its_loss():
    "Standardised features, cross-entropy sum + |W|^2 / 2 with a free intercept: the gradient vanishes at the fitted probabilities."
    z, _, y = embeddings()
    x = ((z - z.mean(0)) / z.std(0, correction=0)).double()
    residual = torch.from_numpy(probe(z, y.numpy(), z)) - torch.eye(3)[y]
    W = -(x.T @ residual)                                            # at the optimum, from d/dW = X^T (P - Y) + W = 0
    logits = x @ W
    log_p = torch.from_numpy(probe(z, y.numpy(), z)).log()
    gap = (log_p - logits) - (log_p - logits).mean(1, keepdim=True)  # equal to the intercepts, the same for every row
    assert (gap - gap.mean(0)).abs().max() < 1e-4 and residual.sum(0).abs().max() < 1e-4


def test_scale_and_shift_of_an_embedding_do_not_matter():
    z, s, y = embeddings()
    one = probe_fidelity(z, s, y, z, s, y)
    two = probe_fidelity(z * 100 + 3, s * 0.01 - 5, y, z * 100 + 3, s * 0.01 - 5, y)
    for key in ("accuracy_network", "accuracy_surrogate"): assert one[key] == two[key]
    assert abs(one["kendall_tau"] - two["kendall_tau"]) < 1e-3


def test_a_network_is_faithful_to_itself_and_a_constant_has_no_order():
    z, _, y = embeddings()
    f = probe_fidelity(z, z, y, z, z, y)
    assert f["accuracy_gap"] == f["accuracy_gap_se"] == 0 and abs(f["kendall_tau"] - 1) < 1e-12
    flat = probe_fidelity(z, torch.zeros(300, 2), torch.arange(300) % 2, z[::2], torch.zeros(150, 2), torch.zeros(150))
    assert flat["kendall_tau"] is None


def test_probe_refusals():
    z, s, y = embeddings()
    with pytest.raises(ValueError, match="test_labels holds 3, which does not occur"): probe_fidelity(z, s, y, z, s, y + 1)
    with pytest.raises(ValueError, match="surrogate must have shape"): probe_fidelity(z, s[:-1], y, z, s, y)
    with pytest.raises(ValueError, match="test_surrogate must have shape"): probe_fidelity(z, s, y, z, z, y)
    with pytest.raises(ValueError, match="at least two classes"): probe_fidelity(z, s, y * 0, z, s, y)
    with pytest.raises(ValueError, match="labels must hold 300 labels"): probe_fidelity(z, s, y[:2], z, s, y)


# ---- companions ------------------------------------------------------------------------------------------------------
def test_precision_at_1():
    scores = torch.tensor([[0.1, 0.9, 0.2], [0.5, 0.5, 0.1], [-1.0, -2.0, -0.5], [0.0, 0.0, 0.0]])
    p = precision_at_1(scores, ["a", "b", "c"], ["b", "b", "c", "a"])
    assert p["precision"] == 0.75 and abs(p["precision_se"] - np.std([1, 0, 1, 1], ddof=1) / 2) < 1e-12
    with pytest.raises(ValueError, match="landmark_labels must hold 3 labels"): precision_at_1(scores, ["a"], ["b"] * 4)


def test_spectral_entropy():
    assert abs(spectral_entropy(torch.eye(7)) - 1) < 1e-10
    assert spectral_entropy(torch.diag(torch.tensor([2.0, 0, 0]))) == 0 == spectral_entropy(torch.tensor([[3.0]]))
    p = np.array([0.5, 0.3, 0.2])
    R = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    S = R @ torch.diag(torch.from_numpy(p * 17)) @ R.T
    assert abs(spectral_entropy(S) + (p * np.log(p)).sum() / np.log(3)) < 1e-10
    with pytest.raises(ValueError, match="S must not be zero"): spectral_entropy(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="S must have shape"): spectral_entropy(torch.ones(2, 3))
