"""The saddle-point experiment: a smoke run agrees with the theory, and its parameters matter."""
from pathlib import Path

import pytest

from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run
from smoke import smoke_runs
from peira_krepes.peira.energy import minimum_energy

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'saddle_points.ipynb'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "Two runs: the defaults, and a law with a tie, another ridge and one dimension."
    return smoke_runs(tmp_path_factory, 'saddle_points', {'plain': {}, 'other': {'spectrum': [0.6, 0.6], 'ridge': 0.3, 'dim': 1, 'n_seeds': 2}})


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and result['picture'].stat().st_size > 10_000
        assert result['provenance']['parameters']['ridge'] == result['ridge']


def test_theory_equals_measurement(results):
    for result in results.values():
        for row in result['table']:
            theory, measured = row['theory'], row['measured']
            assert measured['energy'] == pytest.approx(theory['energy'], abs=1e-10) and measured['gradient'] < 1e-10
            assert measured['hessian'] == pytest.approx(theory['hessian'], abs=1e-8) and measured['counts'] == theory['counts']
            if theory['escape_rate'] is None: assert measured['escape_rate'] is None
            else: assert measured['escape_rate'] == pytest.approx(theory['escape_rate'], rel=1e-4) # displaced by up to 1e-3, errors of second order
            assert measured['end_energy'] == pytest.approx(theory['minimum'], abs=1e-6)
        assert result['held'] is True


def test_a_passed_parameter_changes_the_result(results):
    plain, other = results['plain'], results['other']
    assert len(plain['table']) == 7 and len(other['table']) == 3 * 2 # collapse, and three singles and pairs; collapse, and either tied mode, twice
    assert plain['table'][0]['theory']['minimum'] == pytest.approx(minimum_energy([0.8, 0.5, 0.2], 0.2, 2), abs=1e-12)
    assert other['table'][0]['theory']['minimum'] == pytest.approx(minimum_energy([0.6], 0.3, 1), abs=1e-12)
    assert plain['data']['checksum'] != other['data']['checksum'] and other['provenance']['seeds'] == [0, 1]
    assert other['claims'] == {'strict_saddles': 2, 'saddles': 2, 'escaped_to_the_minimum': 2, 'minima': 4, 'minima_without_negative': 4, 'stayed': 4}
    assert [row['measured']['counts'] for row in other['table'] if len(row['modes'])] == 4 * [[0, 1, 3]]


def test_bad_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match='ridge must be'): run(NOTEBOOK, tmp_path/'a.ipynb', ridge='small')
    with pytest.raises(ValueError, match='spectrun'): run(NOTEBOOK, tmp_path/'a.ipynb', spectrun=[0.5])
