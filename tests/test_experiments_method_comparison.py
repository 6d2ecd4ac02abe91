"""The comparison of methods: every run is there, differences are those of equal seeds and rates, a diverged run is recorded, and parameters matter."""
from pathlib import Path

import pytest

from peira_krepes.lab.methods import METHODS
from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run
from smoke import smoke_runs

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'method_comparison.ipynb'
SMALL = {'limit': 80, 'epochs': 1, 'dim': 8, 'hidden': 16, 'batch_size': 20}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "All methods with one seed; and three of them with two seeds and a grid of rates, of which the last is absurd."
    return smoke_runs(tmp_path_factory, 'method_comparison', {'all': {}, 'grid': {'methods': ['byol', 'vicreg'], 'n_seeds': 2, 'learning_rates': [0.005, 0.001, 1e30], 'ridge': 0.2}}, **SMALL)


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and (result['folder']/'method_comparison.png').stat().st_size > 10_000
        assert all(len(r['history']) == 1 and r['alarm'] in ('healthy', 'dimensional', 'complete') for r in result['runs'])
    assert [r['method'] for r in results['all']['runs']] == list(METHODS) and not results['all']['diverged']
    assert {(r['method'], r['learning_rate'], r['seed']) for r in results['grid']['runs'] + results['grid']['diverged']} == {
        (m, rate, seed) for m in ('peira', 'vicreg', 'byol') for rate in (0.001, 0.005, 1e30) for seed in (0, 1)}


def test_the_energy_is_above_what_the_correlations_allow(results):
    for result in results.values():
        for r in result['runs']: assert r['energy'] >= r['allowed_energy'] - 1e-5 and 1 <= r['feature_rank'] <= 64


def test_a_diverged_run_is_recorded_and_has_no_row(results):
    grid = results['grid']
    assert {d['learning_rate'] for d in grid['diverged']} == {1e30} and all('learning_rate' in d['diverged'] for d in grid['diverged'])
    lost = {(d['method'], d['learning_rate']) for d in grid['diverged']}
    assert {(row['method'], row['learning_rate']) for row in grid['table']} == {(r['method'], r['learning_rate']) for r in grid['runs']} - lost
    assert lost and all(row['knn']['n'] == 2 for row in grid['table'])


def test_differences_are_those_of_equal_seeds_and_rates(results):
    grid = results['grid']
    assert {(c['method'], c['learning_rate']) for c in grid['comparison']} >= {(m, rate) for m in ('vicreg', 'byol') for rate in (0.001, 0.005)}
    for c in grid['comparison']:
        rows = lambda method: {r['seed']: r[c['probe']] for r in grid['runs'] if (r['method'], r['learning_rate']) == (method, c['learning_rate'])}
        ours, theirs = rows(c['method']), rows('peira')
        assert c['mean'] == pytest.approx(sum(ours[s] - theirs[s] for s in ours) / 2, abs=1e-12)
        assert c['word'] == ('level' if abs(c['mean']) <= 2 * c['se'] else 'above' if c['mean'] > 0 else 'below')
    assert len(results['all']['comparison']) == 14 and all(c['word'] is None and c['se'] is None for c in results['all']['comparison']) # one seed decides nothing


def test_methods_seeds_and_parameters_change_the_runs(results):
    energies = [r['energy'] for r in results['all']['runs']]
    assert len(set(energies)) == len(energies)
    of = lambda result, *key: next(r for r in result['runs'] if (r['method'], r['learning_rate'], r['seed']) == key)
    assert of(results['grid'], 'peira', 0.005, 0)['history'] != of(results['all'], 'peira', 0.005, 0)['history'] # another ridge
    assert of(results['grid'], 'byol', 0.005, 0)['history'] == of(results['all'], 'byol', 0.005, 0)['history'] # which BYOL has not
    assert of(results['grid'], 'byol', 0.005, 0)['knn'] == of(results['all'], 'byol', 0.005, 0)['knn']
    assert of(results['grid'], 'byol', 0.005, 1)['history'] != of(results['grid'], 'byol', 0.005, 0)['history']


@pytest.mark.parametrize('bad, message', [({'methods': ['moco']}, 'methods')])
def test_bad_parameters_stop_the_run_before_training(tmp_path, bad, message):
    with pytest.raises(Exception, match=message): run(NOTEBOOK, tmp_path/'run.ipynb', folder=str(tmp_path/'found'), **SMALL, **bad)
    assert not (tmp_path/'found').exists()


def test_an_unknown_parameter_is_refused(tmp_path):
    with pytest.raises(ValueError, match='did you mean'): run(NOTEBOOK, tmp_path/'run.ipynb', learning_rate=0.1)
