"Alignment gap: agreement by its definition, chance by listing subsets, intervals that cover and p-values that hold under hubs."
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from oracles import agreement_by_loops, alignment_by_subsets
from scipy.stats import binom

from peira_krepes.krepes.alignment import agreement, alignment_gap

COLUMNS = ["gap", "low", "high", "gap_normalised", "p_value", "n_used"]


def mixed(n, seed):
    "A table with every kind of column, some values missing."
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"number": rng.normal(size=n), "whole": rng.integers(0, 5, n), "flag": rng.random(n) < 0.3, "word": rng.choice(["a", "b", "c"], n),
                          "category": pd.Categorical(rng.choice([10, 20, 30], n)), "gappy": rng.normal(size=n), "gappy word": rng.choice(["x", "y"], n).astype(object)})
    table.loc[rng.choice(n, n // 4, replace=False), "gappy"] = np.nan
    table.loc[rng.choice(n, n // 4, replace=False), "gappy word"] = None
    return table


def listed(column): return [None if pd.isna(v) else v for v in column.tolist()]


# ---- agreement -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(mixed(4, 0)))
def test_agreement_is_its_definition(name):
    samples, landmarks = mixed(12, 1)[name], mixed(9, 2)[name]
    values = lambda column: [str(v) for v in column] if name == "category" else listed(column)
    expected = np.array(agreement_by_loops(values(samples), values(landmarks)), dtype=float)
    np.testing.assert_allclose(agreement(samples, landmarks), expected, atol=1e-10)


def test_span_of_numbers():
    x, landmarks = pd.Series([0.0, 5.0]), pd.Series([0.0, 10.0])
    np.testing.assert_allclose(agreement(x, landmarks), [[1, 0], [0.5, 0.5]])
    np.testing.assert_allclose(agreement(x, landmarks, span=20), [[1, 0.5], [0.75, 0.75]])
    np.testing.assert_allclose(agreement(x, landmarks, span=2), [[1, 0], [0, 0]])
    np.testing.assert_allclose(agreement(pd.Series([3, 3]), pd.Series([3])), [[1], [1]])
    np.testing.assert_allclose(agreement(pd.Series([3, 4]), pd.Series([3]), span=0), [[1], [0]])


def test_categories_compare_as_raw_values_across_different_category_sets():
    x = pd.Series(pd.Categorical(["b", "c"], categories=["c", "b"]))
    landmarks = pd.Series(pd.Categorical(["a", "b"], categories=["a", "b", "z"]))
    assert agreement(x, landmarks).tolist() == [[0, 1], [0, 0]]
    assert agreement(x, pd.Series(["c", "b"])).tolist() == [[0, 1], [1, 0]]


def test_columns_that_are_numbers_in_disguise():
    "Nullable integers and object columns of plain numbers are numbers."
    np.testing.assert_allclose(agreement(pd.Series([1, 2, None], dtype="Int64"), pd.Series([1.0, 3.0], dtype=object)), [[1, 0], [0.5, 0.5], [np.nan] * 2])


def test_agreement_refuses_what_it_cannot_compare():
    days = pd.Series(pd.to_datetime(["2020-01-01", "2020-01-02"]), name="day")
    with pytest.raises(TypeError, match="feature 'day' must hold numbers"): agreement(days, days)
    with pytest.raises(TypeError, match="feature 'f' must be of one kind; got int64 for the samples"): agreement(pd.Series([1, 2]), pd.Series(["1", "2"], name="f"))
    with pytest.raises(TypeError, match="of one kind"): agreement(pd.Series([0, 1]), pd.Series([True, False], name="f"))
    with pytest.raises(ValueError, match="feature 'f' must be finite; got infinity in row 1"): agreement(pd.Series([1.0, np.inf]), pd.Series([1.0], name="f"))
    with pytest.raises(ValueError, match="span of 'f' must be"): agreement(pd.Series([1.0]), pd.Series([1.0], name="f"), span=-1)


# ---- the gap ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_gap_is_top_less_all_subsets(top_k):
    landmarks, samples = mixed(9, 3), mixed(15, 4)
    influences = np.random.default_rng(5).random((15, 9))
    table = alignment_gap(influences, landmarks, samples, top_k=top_k, n_boot=20)
    assert list(table.columns) == COLUMNS and table.index.name == "feature" and list(table.index) == list(landmarks)
    for name in landmarks:
        v = [[None if np.isnan(c) else c for c in row] for row in agreement(samples[name], landmarks[name])]
        gap, chance, used = alignment_by_subsets(influences, v, top_k)
        assert abs(table.loc[name, "gap"] - gap) < 1e-10 and table.loc[name, "n_used"] == used
        assert abs(table.loc[name, "gap_normalised"] - gap / (1 - chance)) < 1e-10
    assert table["n_used"].min() < 15


def planted(beta=0.75, q=4, per_cell=6):
    cells = pd.DataFrame([(g, e) for g in "ab" for e in (True, False)], columns=["g", "e"])
    landmarks, samples = cells.loc[cells.index.repeat(q)], cells.loc[cells.index.repeat(per_cell)]
    same = lambda f: samples[f].to_numpy()[:, None] == landmarks[f].to_numpy()
    return beta * same("g") + (1 - beta) * same("e"), landmarks, samples


@pytest.mark.parametrize("q", [1, 4, 10])
def test_planted_toy(q):
    for k, expected in ((q, (0.5, 0.5)), (2 * q, (0.5, 0)), (4 * q, (0, 0))):
        table = alignment_gap(*planted(q=q), top_k=k, n_boot=50)
        np.testing.assert_allclose(table["gap"], expected, atol=1e-10)
        np.testing.assert_allclose(table["gap_normalised"], np.array(expected) * 2, atol=1e-10)
        np.testing.assert_allclose(table[["low", "high"]], np.array([expected] * 2).T, atol=1e-10)      # every sample has the same gap


@pytest.mark.parametrize("constant, other", [(0.1, 0.7), ("x", "y"), (True, False), (7, 9)])
def test_a_constant_feature_has_exactly_no_gap(constant, other):
    influences, landmarks = np.random.default_rng(0).random((30, 25)), pd.DataFrame({"c": [constant] * 25})
    for samples in ([constant] * 30, [constant, other, other] * 10):                                   # constant altogether, or over the landmarks alone
        row = alignment_gap(influences, landmarks, pd.DataFrame({"c": samples}), n_boot=50).loc["c"]
        assert row.tolist() == [0, 0, 0, 0, 1, 30]


def test_ties_in_influence_go_by_position():
    landmarks = pd.DataFrame({"f": ["a", "a", "b", "b"]})
    gap = lambda table: alignment_gap(torch.zeros(1, 4), table, pd.DataFrame({"f": ["a"]}), top_k=2, n_boot=2).loc["f", "gap"]
    assert gap(landmarks) == 0.5 and gap(landmarks[::-1]) == -0.5


def test_only_the_order_of_rows_matters_not_index_or_columns():
    influences, (landmarks, samples) = np.random.default_rng(0).random((20, 14)), (mixed(14, 1), mixed(20, 2))
    expected = alignment_gap(influences, landmarks, samples, top_k=3, n_boot=100)
    landmarks.index, samples = landmarks.index[::-1], samples[samples.columns[::-1]]
    again = alignment_gap(torch.from_numpy(influences).float().double(), landmarks, samples, top_k=3, n_boot=100)
    pd.testing.assert_frame_equal(expected, alignment_gap(influences, landmarks, samples, top_k=3, n_boot=100))
    pd.testing.assert_frame_equal(expected, again)
    alone = alignment_gap(influences, landmarks[["gappy"]], samples[["gappy"]], top_k=3, n_boot=100)
    pd.testing.assert_frame_equal(expected.loc[["gappy"]], alone)                                      # a feature's row does not depend on its neighbours
    other = alignment_gap(influences, landmarks, samples, top_k=3, n_boot=100, seed=1)
    assert (other["gap"] == expected["gap"]).all() and (other["p_value"] != expected["p_value"]).any() and (other["low"] != expected["low"]).any()


def test_spans_can_be_given():
    influences, (landmarks, samples) = np.random.default_rng(0).random((20, 14)), (mixed(14, 1), mixed(20, 2))
    plain, wide = (alignment_gap(influences, landmarks, samples, top_k=3, n_boot=10, spans=s) for s in (None, {"number": 1000.0}))
    both = pd.concat([landmarks["number"], samples["number"]])
    assert abs(wide.loc["number", "gap"] * 1000 - plain.loc["number", "gap"] * (both.max() - both.min())) < 1e-10
    assert wide.loc["whole", "gap"] == plain.loc["whole", "gap"]


# ---- missing values and small groups ---------------------------------------------------------------------------------
def test_missing_values_are_dropped_for_their_feature_only():
    rng = np.random.default_rng(0)
    influences, landmarks, samples = rng.random((10, 8)), pd.DataFrame({"f": rng.normal(size=8), "g": 1.0 * np.arange(8)}), pd.DataFrame({"f": rng.normal(size=10), "g": 1.0 * np.arange(10)})
    landmarks.loc[[1, 5], "f"], samples.loc[[0, 9], "f"] = np.nan, np.nan
    table = alignment_gap(influences, landmarks, samples, top_k=3, n_boot=50)
    keep_l, keep_x = landmarks["f"].notna().to_numpy(), samples["f"].notna().to_numpy()
    direct = alignment_gap(influences[keep_x][:, keep_l], landmarks[keep_l][["f"]], samples[keep_x][["f"]], top_k=3, n_boot=50)
    assert table.loc["f", "n_used"] == 8 and table.loc["g", "n_used"] == 10
    for column in ("gap", "gap_normalised", "p_value"): assert abs(table.loc["f", column] - direct.loc["f", column]) < 1e-12


@pytest.mark.parametrize("landmark_values, sample_values, used", [([None] * 6, [1.0] * 5, 0), ([1.0] * 6, [None] * 5, 0), ([1.0, 2.0] + [None] * 4, [1.0] * 5, 0)])
def test_nothing_to_compare_is_nan_with_a_warning(landmark_values, sample_values, used):
    with pytest.warns(UserWarning, match="feature 'f' has no sample or fewer than 3 landmarks"):
        row = alignment_gap(torch.rand(5, 6), pd.DataFrame({"f": landmark_values}), pd.DataFrame({"f": sample_values}), top_k=3, n_boot=10).loc["f"]
    assert row[:5].isna().all() and row["n_used"] == used


def test_one_usable_sample_has_a_gap_and_no_interval():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = alignment_gap(torch.rand(5, 6), pd.DataFrame({"f": [1.0, 2, 3, 4, 5, 6]}), pd.DataFrame({"f": [1.0] + [None] * 4}), top_k=3, n_boot=50).loc["f"]
    assert row["n_used"] == 1 and np.isfinite(row["gap"]) and np.isnan(row["low"]) and np.isnan(row["high"]) and 0 < row["p_value"] <= 1


def test_a_rare_feature_survives_resamples_without_it():
    "Two of two hundred samples have a value: about one resample in seven has none of them."
    samples = pd.DataFrame({"f": [1.0, 6.0] + [np.nan] * 198})
    row = alignment_gap(torch.rand(200, 6), pd.DataFrame({"f": [1.0, 2, 3, 4, 5, 6]}), samples, top_k=2, n_boot=500).loc["f"]
    assert row["n_used"] == 2 and row["low"] <= row["gap"] <= row["high"]


# ---- interval and p-value --------------------------------------------------------------------------------------------
def test_interval_is_the_percentile_bootstrap():
    "Against a loop over resamples drawn with another generator: both ends within five standard errors of a percentile."
    rng = np.random.default_rng(0)
    influences, landmarks, samples = rng.random((40, 12)), pd.DataFrame({"f": rng.normal(size=12)}), pd.DataFrame({"f": rng.normal(size=40)})
    row = alignment_gap(influences, landmarks, samples, top_k=3, n_boot=4000, level=0.9).loc["f"]
    v = agreement(samples["f"], landmarks["f"])
    gaps = np.take_along_axis(v, np.argsort(-influences, 1)[:, :3], 1).mean(1) - v.mean(1)
    means = np.array([gaps[rng.integers(0, 40, 40)].mean() for _ in range(4000)])
    for end, share in (("low", 0.05), ("high", 0.95)):
        assert abs((means <= row[end]).mean() - share) < 5 * (2 * 0.05 * 0.95 / 4000) ** 0.5


def test_interval_covers_when_influences_are_independent():
    "Samples drawn from a population whose gap is known by a large draw; ninety percent intervals."
    rng = np.random.default_rng(1)
    landmarks = pd.DataFrame({"f": rng.normal(size=30)})
    def draw(n):
        x = rng.normal(size=n)
        return -np.abs(x[:, None] - landmarks["f"].to_numpy()) + rng.normal(size=(n, 30)), pd.DataFrame({"f": x})
    influences, samples = draw(20_000)
    truth = alignment_gap(influences, landmarks, samples, n_boot=2, spans={"f": 5.0}).loc["f", "gap"]
    hits = 0
    for seed in range(60):
        influences, samples = draw(60)
        row = alignment_gap(influences, landmarks, samples, n_boot=200, level=0.9, spans={"f": 5.0}, seed=seed).loc["f"]
        hits += row["low"] <= truth <= row["high"]
    assert binom.cdf(hits, 60, 0.9) > 3e-7 and binom.sf(hits - 1, 60, 0.9) > 3e-7 and hits < 60


def test_p_value_counts_permutations_of_the_landmarks_values():
    rng = np.random.default_rng(0)
    influences, landmarks, samples = rng.random((7, 9)), pd.DataFrame({"f": rng.normal(size=9)}), pd.DataFrame({"f": rng.normal(size=7)})
    table = alignment_gap(influences, landmarks, samples, top_k=2, n_boot=300, seed=4)
    orders = np.random.default_rng([4, 1]).permuted(np.tile(np.arange(9), (300, 1)), axis=1)
    gaps = [alignment_gap(influences, landmarks.iloc[o], samples, top_k=2, n_boot=1).loc["f", "gap"] for o in orders]
    far = sum(abs(g) >= abs(table.loc["f", "gap"]) - 1e-12 for g in gaps)
    assert table.loc["f", "p_value"] == (1 + far) / 301


def test_p_value_holds_when_the_same_landmarks_influence_everybody():
    "Noise features under hub landmarks: p <= .1 in at most a tenth of the trials up to five standard errors, though the interval excludes zero in most."
    rng, small, excluded, trials = np.random.default_rng(3), 0, 0, 120
    for seed in range(trials):
        influences = rng.random(40) + 0.02 * rng.random((100, 40))
        row = alignment_gap(influences, pd.DataFrame({"f": rng.normal(size=40)}), pd.DataFrame({"f": rng.normal(size=100)}), n_boot=99, seed=seed).loc["f"]
        small, excluded = small + (row["p_value"] <= 0.1), excluded + (not row["low"] <= 0 <= row["high"])
    assert abs(small - 0.1 * trials) < 5 * (0.1 * 0.9 * trials) ** 0.5 and excluded > trials / 2


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_refusals_name_the_argument():
    influences, landmarks, samples = torch.rand(5, 6), mixed(6, 0), mixed(5, 1)
    with pytest.raises(ValueError, match=r"landmark_table must have 6 rows, as influences has shape \(5, 6\); got 5"): alignment_gap(influences, samples, samples)
    with pytest.raises(ValueError, match="x_table must have 5 rows"): alignment_gap(influences, landmarks, landmarks)
    with pytest.raises(ValueError, match=r"same columns; \['flag'\] are in one only"): alignment_gap(influences, landmarks, samples.drop(columns="flag"))
    with pytest.raises(ValueError, match="top_k must be between 1 and 6; got 10"): alignment_gap(influences, landmarks, samples)
    with pytest.raises(TypeError, match="landmark_table must be a pandas DataFrame; got dict"): alignment_gap(influences, dict(landmarks), samples)
    with pytest.raises(ValueError, match=r"distinct column names; got \['flag'\]"): alignment_gap(influences, pd.concat([landmarks, landmarks[["flag"]]], axis=1), samples)
    with pytest.raises(ValueError, match="influences must be finite"): alignment_gap(influences * torch.nan, landmarks, samples)
    with pytest.raises(ValueError, match="level must be"): alignment_gap(influences, landmarks, samples, top_k=2, level=1.0)
    with pytest.raises(ValueError, match="n_boot must be at least 1"): alignment_gap(influences, landmarks, samples, top_k=2, n_boot=0)
