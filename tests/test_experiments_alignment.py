"""The alignment experiment: a smoke run holds what is true by construction, and its parameters matter."""
from pathlib import Path

import pytest

from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run
from smoke import smoke_runs

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'alignment.ipynb'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "Two runs on few images: the defaults, and centred moments with another width, ridge and number of epochs."
    return smoke_runs(tmp_path_factory, 'alignment', {'plain': {'epochs': 4}, 'other': {'epochs': 2, 'dim': 8, 'ridge': 0.2, 'center': True, 'n_points': 2, 'n_views': 2, 'n_seeds': 2}}, limit=80)


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and result['picture'].stat().st_size > 10_000
        assert len(result['predictions']) == 5


def test_every_point_of_one_schedule_is_there(results):
    for result, epochs, seeds in ((results['plain'], 4, 1), (results['other'], 2, 2)):
        points = result['points']
        assert points[0] == 0 and points[-1] == epochs and points == sorted(set(points))
        assert [(r['seed'], r['method'], r['epoch']) for r in result['rows']] == [(s, m, e) for s in range(seeds) for m in ('peira', 'vicreg') for e in points]
        first = {r['method']: r for r in result['rows'] if r['epoch'] == 0 and r['seed'] == 0}
        assert first['peira']['held_out'] == first['vicreg']['held_out'] # the same network before training
        assert all((r['batch_residual'] is None) == (r['epoch'] == 0 or r['method'] == 'vicreg') for r in result['rows'])


def test_measures_keep_their_bounds(results):
    for result in results.values():
        for row in result['rows']:
            for where in ('training', 'held_out'):
                s = row[where]
                assert len(s['alpha']) == len(s['estimated']) == result['dim'] >= len(s['measured'])
                assert all(-1e-9 <= a <= 1 + 1e-9 for a in s['alpha']) # N is positive semidefinite
                assert all(e >= result['ridge']**2 - 1e-12 for e in s['estimated']) and all(abs(c) <= 1 + 1e-6 for c in s['measured'])
                assert s['measured'] == sorted(s['measured'], reverse=True) and s['residual'] >= 0
                expected = sum(abs(a - b) for a, b in zip(s['estimated'], s['measured'])) / len(s['measured'])
                assert s['error'] == pytest.approx(expected, abs=1e-12)
            held = row['held_out']
            assert all(abs(c) <= 1 + 1e-6 for c in held['cca'])
            assert held['cca'][0] <= held['measured'][0] + 0.05 # the best direction of a set scores at least as well on it as any fitted on half of it, up to how the halves are averaged


def test_alignment_alone_is_not_sufficient(results):
    for result in results.values():
        d = result['doubled']
        assert d['change_of_alpha'] < 1e-10 and d['residual'] < 1e-10 and d['residual_doubled'] > 1e-3 # how much depends on the size of N


def test_a_passed_parameter_changes_the_result(results):
    plain, other = results['plain'], results['other']
    assert (plain['dim'], other['dim'], other['center'], other['ridge']) == (32, 8, True, 0.2)
    assert plain['rows'][0]['training']['alpha'] != other['rows'][0]['training']['alpha'] and other['provenance']['seeds'] == [0, 1]


def test_bad_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match='ridge must be'): run(NOTEBOOK, tmp_path/'a.ipynb', ridge='small')
    with pytest.raises(ValueError, match='n_point'): run(NOTEBOOK, tmp_path/'a.ipynb', n_point=3)
