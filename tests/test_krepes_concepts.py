"Concepts: the direction against dense Newton, the guards against luck, and scores that balance."
import numpy as np
import pytest
import torch
from oracles import concept_logistic_direction, concept_scores
from scipy.stats import binom
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from peira_krepes.krepes.concepts import Concept, concept_influence


def planted(seed, p=60, q=90, h=5, shift=1.0):
    "Positives (p,h) shifted along coordinate 1, negatives (q,h)."
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(p + q, h, generator=g, dtype=torch.float64)
    z[:p, 1] += shift
    return z[:p], z[p:]


@pytest.mark.parametrize("sizes", [(60, 90), (5, 200), (3, 3)])
def test_logistic_direction_is_the_newton_solution(sizes):
    positive, negative = planted(0, *sizes)
    v = Concept(n_permutations=0).fit(positive, negative).direction
    assert torch.allclose(v, concept_logistic_direction(positive, negative), atol=1e-6)
    assert abs(v.norm() - 1) < 1e-12


def test_mean_direction_is_the_difference_of_means():
    positive, negative = planted(1)
    d = positive.mean(0) - negative.mean(0)
    assert torch.allclose(Concept("mean", n_permutations=0).fit(positive, negative).direction, d / d.norm(), atol=1e-10)


@pytest.mark.parametrize("method", ["logistic", "mean"])
def test_direction_points_at_the_positives_and_flips_with_them(method):
    positive, negative = planted(2)
    v = Concept(method, n_permutations=0).fit(positive, negative).direction
    assert (positive @ v).mean() > (negative @ v).mean()
    assert torch.allclose(Concept(method, n_permutations=0).fit(negative, positive).direction, -v, atol=1e-6)


@pytest.mark.parametrize("method", ["logistic", "mean"])
def test_direction_follows_rotation_scale_and_shift(method):
    positive, negative = planted(3)
    R = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    v = Concept(method, n_permutations=0).fit(positive, negative).direction
    w = Concept(method, n_permutations=0).fit(1e-4 * positive @ R + 3, 1e-4 * negative @ R + 3).direction
    assert torch.allclose(w, v @ R, atol=1e-6)


@pytest.mark.parametrize("method", ["logistic", "mean"])
def test_accuracy_is_that_of_unseen_examples(method):
    "At chance without signal even where the fit itself is perfect; close to Bayes with it; not fooled by unequal sizes."
    positive, negative = planted(4, 20, 20, h=60, shift=0.0)
    assert abs(Concept(method, n_permutations=0).fit(positive, negative).accuracy_ - 0.5) < 5 * (0.25 / 40) ** 0.5
    positive, negative = planted(4, 1000, 3000, shift=2.0)
    bayes = 0.8413447
    error = (bayes * (1 - bayes) * (1 / 1000 + 1 / 3000) / 4) ** 0.5
    assert abs(Concept(method, n_permutations=0).fit(positive, negative).accuracy_ - bayes) < 5 * error
    positive, negative = planted(5, 20, 2000, shift=0.0)
    assert abs(Concept(method, n_permutations=0).fit(positive, negative).accuracy_ - 0.5) < 5 * (0.25 * (1 / 20 + 1 / 2000) / 4) ** 0.5


def test_p_value_is_valid_for_meaningless_labels_and_small_for_a_real_concept():
    "9 shuffles: p <= .1 only for the most accurate labelling of 10, hence for at most a tenth of meaningless concepts."
    fits = [Concept("mean", n_permutations=9, n_folds=2, seed=s).fit(*planted(100 + s, 15, 15, shift=0.0)) for s in range(60)]
    assert sum(c.p_value_ <= 0.1 for c in fits) <= binom.ppf(1 - 1e-6, 60, 0.1)
    for c in fits: assert c.p_value_ == pytest.approx((1 + sum(a >= c.accuracy_ for a in c.null_accuracies_)) / 10)
    real = Concept("mean", n_permutations=19).fit(*planted(0, shift=3.0))
    assert real.p_value_ == pytest.approx(1 / 20) and len(real.null_accuracies_) == 19
    assert np.isnan(Concept(n_permutations=0).fit(*planted(0)).p_value_)


def test_same_seed_same_result_and_clone():
    a, b = Concept(n_permutations=5, seed=3).fit(*planted(6)), clone(Concept(n_permutations=5, seed=3)).fit(*planted(6))
    assert torch.equal(a.direction, b.direction) and a.accuracy_ == b.accuracy_ and np.array_equal(a.null_accuracies_, b.null_accuracies_)
    assert repr(Concept("mean", seed=1)) == "Concept(method='mean', seed=1)"


def test_direction_has_the_dtype_of_the_examples_and_inputs_stay():
    positive, negative = (z.float() for z in planted(7))
    before = positive.clone()
    c = Concept(n_permutations=0).fit(positive.T.contiguous().T, negative.numpy())
    assert c.direction.dtype == torch.float32 and torch.equal(positive, before)
    big = Concept(n_permutations=0).fit(positive + 1e4, negative + 1e4)  # float32 keeps three digits of these differences
    assert big.direction @ c.direction > 0.999


def test_scores_match_loops_and_balance():
    g = torch.Generator().manual_seed(0)
    K_x, dA, v = (torch.randn(*s, generator=g, dtype=torch.float64) for s in [(6, 4), (4, 3), (3,)])
    s = concept_influence(K_x, dA, v)
    assert torch.allclose(s, concept_scores(K_x, dA, v), atol=1e-12)
    assert torch.allclose(s.sum(1), K_x @ dA @ (v / v.norm()), atol=1e-10)
    assert torch.allclose(concept_influence(K_x, dA, 7 * v), s, atol=1e-12)
    fitted = Concept(n_permutations=0).fit(torch.randn(9, 3, generator=g), torch.randn(9, 3, generator=g))
    assert torch.allclose(concept_influence(K_x, dA, fitted), concept_scores(K_x, dA, fitted.direction), atol=1e-6)
    assert concept_influence(K_x.float(), dA, v.numpy()).dtype == torch.float64


@pytest.mark.parametrize("change, message", [
    (lambda p, n: (p[:1], n), "positive must have at least 2"), (lambda p, n: (p, n[:, :2]), "negative must have shape"),
    (lambda p, n: (p, p), "same mean"), (lambda p, n: (torch.zeros(3, 2), torch.zeros(3, 2)), "one and the same point"),
    (lambda p, n: (torch.full((3, 2), 0.1), torch.full((3, 2), 0.1)), "one and the same point"),
    (lambda p, n: (p.index_fill(0, torch.tensor([4]), float("nan")), n), "row 4")])
def test_refused_examples(change, message):
    with pytest.raises(ValueError, match=message): Concept().fit(*change(*planted(8)))


def test_refused_options_and_directions():
    p, n = planted(9)
    with pytest.raises(ValueError, match="method must be one of 'logistic', 'mean'"): Concept("svm").fit(p, n)
    with pytest.raises(ValueError, match="n_folds"): Concept(n_folds=1).fit(p, n)
    with pytest.raises(ValueError, match="n_permutations"): Concept(n_permutations=-1).fit(p, n)
    with pytest.raises(TypeError, match="positive"): Concept().fit(p.long(), n)
    with pytest.raises(NotFittedError): Concept().direction
    K_x, dA = torch.ones(2, 4), torch.ones(4, 3)
    with pytest.raises(NotFittedError): concept_influence(K_x, dA, Concept())
    with pytest.raises(ValueError, match=r"shape \(3,\)"): concept_influence(K_x, dA, torch.ones(4))
    with pytest.raises(ValueError, match="not zero"): concept_influence(K_x, dA, torch.zeros(3))
    with pytest.raises(ValueError, match="finite"): concept_influence(K_x, dA, torch.tensor([1.0, float("nan"), 0.0]))
    with pytest.raises(ValueError, match="K_x"): concept_influence(K_x[:, :3], dA, torch.ones(3))
    with pytest.raises(ValueError, match="row 1"): concept_influence(K_x.index_fill(0, torch.tensor([1]), float("inf")), dA, torch.ones(3))
