"""The collapse experiment: the known law does what theory says also in a smoke run, the loss is the equation's, and parameters matter."""
from pathlib import Path

import pytest

from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run
from smoke import smoke_runs
from peira_krepes.peira.dynamics import distillation_fixed_points
from peira_krepes.peira.energy import minimum_energy

NOTEBOOK = Path(__file__).resolve().parents[1]/'nbs'/'experiments'/'collapse.ipynb'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "Two runs on few images for one epoch: the default law, and another one with another ridge, decay and factor."
    return smoke_runs(tmp_path_factory, 'collapse', {'plain': {}, 'other': {'spectrum': [0.8, 0.5], 'ridge': 0.2, 'decay': 0.1, 'heavy': 0.5, 'scales': [0.05], 'dim': 8}}, limit=60, epochs=1)


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and (result['folder']/'collapse.png').stat().st_size > 10_000
        assert len(result['runs']) == len(list((result['folder']/'work').glob('*/checkpoint.pt'))) == 11 # two sizes of two methods, two decays, two without warm-up, three methods without one
        assert all(len(r['history']) == 1 for r in result['runs']) and set(result['shown']) == {r['arm'] for r in result['runs']}


def test_the_law_does_what_theory_says(results):
    for result in results.values():
        law = result['law']
        assert all(law['held'].values())
        for mode in law['modes']:
            points = distillation_fixed_points(mode['correlation'], result['ridge'], result['decay'])
            if not points: assert mode['edge'] is None and mode['measured_end'] < 1e-10
            else:
                assert mode['measured_edge'] == pytest.approx(points[0][1], rel=0.01) # twelve halvings of two decades and more
                assert mode['measured_end'] == pytest.approx(points[1][1], rel=1e-8)
        assert law['minimum'] == pytest.approx(minimum_energy(law['spectrum'], result['ridge'], 2), abs=1e-12)
        assert any(s['below_the_edge'] for s in law['starts']) and any(s['distilled'] > 0.1 for s in law['starts'])
        for s in law['starts']: assert s['peira_energy'] == pytest.approx(law['minimum'], abs=1e-6)


def test_the_loss_is_that_of_the_equation(results):
    for result in results.values(): assert result['gradient_is_the_field'] < 1e-10


def test_expectations_follow_from_the_start(results):
    for result in results.values():
        assert result['edge'] == pytest.approx(distillation_fixed_points(1.0, result['ridge'], result['decay'])[0][1], rel=1e-12)
        for r in result['runs']:
            assert r['start']['after_a_step'] >= r['start']['trace_N'] > 0
            if r['arm'].startswith('distilled') and r['scale'] < 1: assert r['expected'] == ('collapses' if r['start']['after_a_step'] < result['edge'] else None)
        by_arm = {r['arm']: r for r in result['runs']}
        small, = (r['scale'] for r in result['runs'] if r['arm'].startswith('distilled') and r['scale'] < 1)
        assert by_arm['SGD, no warm-up']['start']['trace_N'] == pytest.approx(small**2 * by_arm['distilled × 1']['start']['trace_N'], rel=1e-4)
        assert by_arm['heavy decay × 1']['expected'] == by_arm['no predictor']['expected'] == 'collapses' and by_arm['PEIRA × 1']['expected'] == 'lives'
        for w in result['network']['where']: assert w['whole'] == pytest.approx(w['last_layer'] + w['input'] + w['directions'], abs=1e-9)


def test_a_passed_parameter_changes_the_result(results):
    plain, other = results['plain'], results['other']
    assert plain['law']['checksum'] != other['law']['checksum'] and (plain['dim'], other['dim']) == (32, 8)
    assert {r['scale'] for r in plain['runs']} == {0.02, 1.0} and {r['scale'] for r in other['runs']} == {0.05, 1.0}
    assert plain['runs'][0]['history'] != other['runs'][0]['history']


def test_bad_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match='ridge must be'): run(NOTEBOOK, tmp_path/'a.ipynb', ridge='small')
    with pytest.raises(ValueError, match='decai'): run(NOTEBOOK, tmp_path/'a.ipynb', decai=0.1)
