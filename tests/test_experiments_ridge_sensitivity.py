"""The experiment on the ridge: a smoke run holds what is true by construction, and its parameters matter."""
from pathlib import Path

import pytest

from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run
from smoke import smoke_runs
from peira_krepes.peira.energy import minimum_energy

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'ridge_sensitivity.ipynb'
SMALL = {'limit': 120, 'dim': 8, 'batch_size': 30}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "Two runs: the default values, and others with two seeds and weights of their own."
    return smoke_runs(tmp_path_factory, 'ridge_sensitivity', {'plain': {}, 'other': {'ridges': [0.4, 0.05], 'weights': [0.05, 0.3, 0.9], 'n_seeds': 2, 'epochs': 1, 'n_pairs': 1}}, **SMALL)


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and (result['folder']/'ridge_sensitivity.png').stat().st_size > 10_000
        assert len(result['predictions']) == 7 and result['dim'] == 8


def test_every_run_of_every_value_is_there(results):
    for name, ridges, weights, seeds in (('plain', [0.025, 0.1, 0.5], [0.025, 0.1, 0.5], 1), ('other', [0.05, 0.4], [0.05, 0.3, 0.9], 2)):
        expected = [(m, v, s) for s in range(seeds) for m, values in (('peira', ridges), ('sigreg', weights)) for v in values]
        assert [(r['method'], r['value'], r['seed']) for r in results[name]['runs']] == expected
        assert len({r['trace_N'] for r in results[name]['runs']}) == len(expected) # no run stands in for another
        assert {f'{m}-{v:g}-{s}' for m, v, s in expected} == {path.name for path in (results[name]['folder']/'work').iterdir()}


def test_counts_follow_from_the_spectra(results):
    for result in results.values():
        for r in (r for r in result['runs'] if r['method'] == 'peira'):
            widest = next(w for w in result['runs'] if w['method'] == 'peira' and w['seed'] == r['seed']) # ridges ascend
            cut = (r['value'] + result['on']) ** 2
            assert r['kept'] == sum(s > result['on'] for s in r['eigenvalues']) and len(r['eigenvalues']) == result['dim']
            assert (r['own'], r['wide']) == tuple(sum(c > cut for c in spectrum) for spectrum in (r['correlations'], widest['correlations']))
            assert r['eigenvalues'] == sorted(r['eigenvalues'], reverse=True) and all(abs(c) <= 1 + 1e-6 for c in r['correlations'])


def test_no_energy_is_below_the_least_that_its_correlations_allow(results):
    for result in results.values():
        for r in (r for r in result['runs'] if r['method'] == 'peira'):
            assert r['least_energy'] == pytest.approx(minimum_energy([min(max(c, 0), 1) for c in r['correlations']], r['value'], result['dim']), abs=1e-10)
            unseen = 0.5 * result['dim'] * 1e-6 * r['eigenvalues'][0] / r['value'] # what directions of N below the floor of the correlations could add
            assert r['energy'] >= r['least_energy'] - unseen - 1e-9
        assert not any('energy' in r or 'kept' in r for r in result['runs'] if r['method'] == 'sigreg')


def test_ranges_compare_the_extremes_seed_by_seed(results):
    for result in results.values():
        for x in result['ranges']:
            rows = lambda value: [r[x['probe']] for r in result['runs'] if (r['method'], r['value']) == (x['method'], value)]
            differences = [a - b for a, b in zip(rows(x['worst']), rows(x['best']))]
            means = [row[x['probe']]['mean'] for row in result['table'] if row['method'] == x['method']]
            assert x['mean'] == pytest.approx(sum(differences) / len(differences), abs=1e-12) == pytest.approx(min(means) - max(means), abs=1e-12)
            assert x['n'] == len(result['provenance']['seeds'])


@pytest.mark.parametrize('bad, message', [({'ridges': [0.1]}, 'ridges must hold at least two'), ({'ridges': [0.5, 2.0]}, r'weights\[1\]')])
def test_bad_parameters_stop_the_run_before_training(tmp_path, bad, message):
    with pytest.raises(Exception, match=message): run(NOTEBOOK, tmp_path/'run.ipynb', folder=str(tmp_path/'found'), **SMALL, **bad)
    assert not (tmp_path/'found').exists()


def test_unknown_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match='ridge'): run(NOTEBOOK, tmp_path/'a.ipynb', ridge=0.1)
