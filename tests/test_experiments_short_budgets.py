"""The experiment on short budgets: a smoke run is complete and marked as such, and its parameters matter."""
import json
from pathlib import Path

import pytest

from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'short_budgets.ipynb'
SMALL = {'dataset': 'digits', 'limit': 120, 'dim': 8, 'batch_size': 40}


@pytest.fixture(scope='module')
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp('short_budgets')
    run(NOTEBOOK, folder/'run.ipynb', folder=str(folder/'found'), budgets=[1, 2], n_seeds=2, **SMALL)
    return json.loads((folder/'found'/'result.json').read_text()) | {'picture': folder/'found'/'short_budgets.png'}


def test_result_is_complete_and_marked_as_smoke(result):
    check_result(result)
    assert result['smoke'] is True and result['picture'].stat().st_size > 10_000
    assert {(r['arm'], r['epochs'], r['seed']) for r in result['runs']} == {
        *((arm, 1, seed) for arm in ('batch', 'carried', 'vicreg', 'plain 0.3', 'plain 0.05') for seed in (0, 1)), *((arm, 2, seed) for arm in ('batch', 'vicreg') for seed in (0, 1))}
    assert result['dim'] == 8 and result['allowed_trace'] == pytest.approx(7.2) and all(len(r['history']) == r['epochs'] for r in result['runs'])


def test_the_arms_differ_in_their_statistics_and_seeds_in_everything(result):
    values = {(r['arm'], r['seed']): r['energy'] for r in result['runs'] if r['epochs'] == 1}
    assert len(set(values.values())) == len(values)


def test_differences_are_those_of_the_same_seeds(result):
    for c in result['comparison']:
        rows = lambda arm: {r['seed']: r[c['probe']] for r in result['runs'] if (r['arm'], r['epochs']) == (arm, c['epochs'])}
        ours, theirs = rows(c['arm']), rows('vicreg')
        assert c['mean'] == pytest.approx(sum(ours[s] - theirs[s] for s in ours) / len(ours)) and c['level'] == (c['mean'] >= -2 * c['se'])


@pytest.mark.parametrize('bad, message', [({'budgets': [0]}, 'budgets'), ({'ridge': 0.0}, 'ridge'), ({'n_seeds': -1}, 'n_seeds')])
def test_bad_parameters_stop_the_run_before_training(tmp_path, bad, message):
    with pytest.raises(Exception, match=message): run(NOTEBOOK, tmp_path/'run.ipynb', folder=str(tmp_path/'found'), **SMALL, **bad)
    assert not (tmp_path/'found').exists()
