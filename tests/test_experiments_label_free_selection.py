"""The experiment on selection without labels: a smoke run holds what is true by construction, and its parameters matter."""
from pathlib import Path
from statistics import mean

import pytest
from scipy.stats import spearmanr

from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run
from smoke import smoke_runs

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'label_free_selection.ipynb'
SMALL = {'limit': 100, 'dim': 8, 'lengths': [1, 2, 3], 'grid_epochs': 1, 'batch_sizes': [25], 'hiddens': [16]}
SCORES, PROBES = ('negative_energy', 'rankme', 'lidar', 'lejepa'), ('linear', 'knn')


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "Two runs on few images: the defaults, and centred moments with another ridge, two seeds and three learning rates at one strength."
    return smoke_runs(tmp_path_factory, 'label_free_selection', {'plain': {}, 'other': {'center': True, 'ridge': 0.2, 'n_seeds': 2, 'learning_rates': [0.0005, 0.002, 0.008], 'strengths': [1], 'n_pairs': 1}}, **SMALL)


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and (result['folder']/'label_free_selection.png').stat().st_size > 10_000
        assert len(result['predictions']) == 6


def test_every_network_of_both_families_is_there(results):
    for name, rates, strengths, seeds in (('plain', [0.0005, 0.008], [0.25, 1], 1), ('other', [0.0005, 0.002, 0.008], [1], 2)):
        runs = results[name]['runs']
        expected = [(s, *setting) for s in range(seeds) for setting in [*(('lengths', e, 0.005, 1) for e in (1, 2, 3)), *(('grid', 1, rate, strength) for rate in rates for strength in strengths)]]
        assert [(r['seed'], r['family'], r['epochs'], r['learning_rate'], r['strength']) for r in runs] == expected
        assert len({r['negative_energy'] for r in runs}) == len(runs) == len([*(results[name]['folder']/'work').iterdir()]) # no network stands in for another


def test_all_scores_were_taken_under_the_same_conditions(results):
    for name, ridge, center, views in (('plain', 0.1, False, 4), ('other', 0.2, True, 2)):
        for r in results[name]['runs'] + results[name]['settings']:
            assert (r['ridge'], r['dim'], r['center'], r['views']) == (ridge, 8, center, views) and r['rows'] == results[name]['data']['test']


def test_settings_are_means_over_seeds(results):
    for result in results.values():
        seeds = result['provenance']['seeds']
        for s in result['settings']:
            rows = [r for r in result['runs'] if all(r[k] == s[k] for k in ('family', 'epochs', 'learning_rate', 'strength'))]
            assert [r['seed'] for r in rows] == seeds
            for k in (*SCORES, *PROBES): assert s[k] == pytest.approx(mean(r[k] for r in rows), abs=1e-12)


def test_correlations_are_spearmans_of_their_group(results):
    "Against scipy, group by group; a group without an order has no number."
    numbers = 0
    for result in results.values():
        for c in result['correlations']:
            for unit, rows in (('settings', result['settings']), ('networks', result['runs'])):
                family, _, strength = c['group'].partition(', strength ')
                chosen = [r for r in rows if r['family'] == family and (not strength or r['strength'] == float(strength))]
                x, y = ([r[k] for r in chosen] for k in (c['score'], c['probe']))
                if c[unit] is None: assert len(chosen) < 3 or len({*x}) == 1 or len({*y}) == 1
                else:
                    assert c[unit]['value'] == pytest.approx(spearmanr(x, y).statistic, abs=1e-10) and c[unit]['n'] == len(chosen)
                    assert -1 <= c[unit]['low'] <= c[unit]['high'] <= 1
                    numbers += 1
        assert {(c['probe'], c['score']) for c in result['correlations']} == {(a, s) for a, b in (PROBES, PROBES[::-1]) for s in (*SCORES, b)}
    assert numbers > 20


def test_a_choice_is_the_setting_with_the_highest_score(results):
    for result in results.values():
        grid = [s for s in result['settings'] if s['family'] == 'grid']
        for c in result['choices']:
            top = max(grid, key=lambda s: s[c['score']])
            assert c['accuracy'] == top[c['probe']] <= c['best'] == max(s[c['probe']] for s in grid) and all(top[k] == v for k, v in c['chosen'].items())


@pytest.mark.parametrize('bad, message', [({'batch_sizes': [60]}, 'batch_sizes must be at most half'), ({'learning_rates': [0.01], 'strengths': [1, 0.5]}, 'at least three settings')])
def test_bad_parameters_stop_the_run_before_training(tmp_path, bad, message):
    with pytest.raises(Exception, match=message): run(NOTEBOOK, tmp_path/'run.ipynb', folder=str(tmp_path/'found'), **SMALL | bad)
    assert not (tmp_path/'found').exists()
