"Judging a run: probes and energy recomputed by hand, errors by NumPy, refusals."
import json, warnings

import numpy as np, pytest, torch

from oracles import peira_energy_by_loops
from peira_krepes.lab.data import load_images
from peira_krepes.lab.evaluation import VIEWS, evaluate, held_out, label_probes, paired, spread, written
from peira_krepes.lab.pretrain import pretrain
from peira_krepes.lab.probes import embed, knn_accuracy, linear_probe
from peira_krepes.lab.views import policy_for, two_views

TRAIN, TEST = load_images("digits", limit=120), load_images("digits", "test", limit=60)


@pytest.fixture(scope="module")
def run():
    with warnings.catch_warnings(action="ignore"): return pretrain(TRAIN, epochs=2, batch_size=40, dim=4, hidden=16, encoder_options={"width": 4, "dim": 6})

def test_the_energy_is_that_of_held_out_views_written_as_loops(run):
    a, b = two_views(TEST.images, policy_for(TEST), VIEWS)
    z_a, z_b = (run.projector(embed(run.encoder, v)).detach() for v in (a, b))
    assert held_out(run, TEST, ridge=0.2)["energy"] == pytest.approx(peira_energy_by_loops([(z_a.double(), z_b.double())], [1.0], 0.2), abs=1e-4)
    assert held_out(run, TEST)["trace_N"] == pytest.approx(float((z_a.square().sum() + z_b.square().sum()) / len(z_a)), rel=1e-4)

def test_a_run_is_judged_by_the_probes_of_its_features_and_json_takes_it(run):
    report = evaluate(run, TRAIN, TEST)
    a, b = embed(run.encoder, TRAIN.images), embed(run.encoder, TEST.images)
    assert report["knn"] == knn_accuracy(a, TRAIN.labels, b, TEST.labels) and report["linear"] == linear_probe(a, TRAIN.labels, b, TEST.labels)
    assert json.loads(json.dumps(report)) == report and report == evaluate(run, TRAIN, TEST)
    assert not run.encoder.training and len(report["correlations"]) <= 4

def test_limit_takes_the_first_rows_and_few_rows_get_few_neighbours(run):
    assert held_out(run, TEST, limit=30) == held_out(run, TEST.subset(range(30)))
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    few = TRAIN.subset(range(5))
    assert 0 <= label_probes(z, z, few, few)["knn"] <= 1
    with pytest.raises(ValueError, match="limit"): held_out(run, TEST, limit=1)

def test_spread_and_paired_are_numpys():
    g = np.random.default_rng(0)
    a, b = g.normal(size=6), g.normal(size=6)
    for found, values in ((spread(a), a), (paired(a, b), a - b)):
        assert found["mean"] == pytest.approx(values.mean()) and found["se"] == pytest.approx(values.std(ddof=1) / 6**0.5) and found["n"] == 6

@pytest.mark.parametrize("ours, level", [([1.0, 1.1, 0.9], True), ([0.9, 1.0, 0.8], False), ([0.9, 1.2, 0.8], True)])
def test_level_is_two_standard_errors_of_the_difference(ours, level): assert paired(ours, [1.0, 1.1, 0.9])["level"] is level

def test_one_seed_has_no_error_and_none_is_refused():
    assert spread([0.5]) == {"mean": 0.5, "se": None, "n": 1} and paired([0.5], [0.4])["level"] is None
    assert written(spread([0.5])) == "0.500" and written(spread([1.0, 2.0]), "+.1f") == "+1.5 ± 0.5"
    with pytest.raises(ValueError, match="at least one"): spread([])
    with pytest.raises(ValueError, match="same seeds"): paired([1.0], [1.0, 2.0])
