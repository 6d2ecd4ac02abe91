"""Training one method: settings are the preset's with what was given on top, a checkpoint of several processes is picked up, and nothing needs labels."""
import json
import shlex
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer

from peira_krepes.lab.pretrain import main
from peira_krepes.lab.results import check_result
from peira_krepes.lab.runs import run

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT/'nbs'/'experiments'/'pretrain_one.ipynb'
SMALL = {'epochs': 2, 'dim': 8, 'hidden': 16, 'batch_size': 40}
PRESET = {'preset': 'peira-cifar10', 'encoder': 'conv', 'limit': 80, 'ridge': 0.2, **SMALL}


def command(executed):
    "The words after the module's name in the command that the notebook printed."
    text = '\n'.join(o['text'] for c in nbformat.read(executed, 4).cells for o in c.get('outputs', []) if o.output_type == 'stream')
    line = next(line for line in text.splitlines() if line.startswith('torchrun'))
    words = shlex.split(line)
    return words[words.index('peira_krepes.lab.pretrain') + 1:]


def trained_by_two(out):
    "The preset's run by the command line, with a checkpoint that says two processes made it."
    words = ['--preset', 'peira-cifar10', '--dataset', 'digits', '--encoder', 'conv', '--epochs', '2', '--dim', '8', '--hidden', '16', '--batch-size', '40', '--device', 'cpu',
             '--data-options', '{"limit": 80}', '--method-options', '{"ridge": 0.2, "rate": 0.05}', '--out', str(out)]
    assert main(words) == 0
    state = torch.load(out/'checkpoint.pt', weights_only=True)
    torch.save(state | {'settings': state['settings'] | {'processes': 2, 'autocast': True}}, out/'checkpoint.pt')


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "Digits by the defaults; digits by a preset, trained before by two processes; a table without labels by VICReg."
    folder = tmp_path_factory.mktemp('pretrain_one')
    trained_by_two(folder/'preset'/'work')
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (folder/'preset'/'work').iterdir()}
    bunch = load_breast_cancer()
    pd.DataFrame(bunch.data[:100, :6], columns=[name.replace(' ', '_') for name in bunch.feature_names[:6]]).to_csv(folder/'rows.csv', index=False)
    found = {}
    for name, parameters in (('plain', {'limit': 120, **SMALL}), ('preset', PRESET), ('table', {'dataset': str(folder/'rows.csv'), 'method': 'vicreg', 'limit': 60, **SMALL})):
        run(NOTEBOOK, folder/f'{name}.ipynb', folder=str(folder/name), device='cpu', **parameters)
        found[name] = json.loads((folder/name/'result.json').read_text()) | {'folder': folder/name, 'words': command(folder/f'{name}.ipynb')}
    found['preset']['before'] = before
    return found


def test_result_is_complete_and_marked_as_smoke(results):
    for result in results.values():
        check_result(result)
        assert result['smoke'] is True and (result['folder']/'pretrain_one.png').stat().st_size > 10_000
        assert [h['epoch'] for h in result['history']] == [1, 2] and [s['epoch'] for s in result['spectra']] == [1, 2]
        assert result['alarm']['verdict'] == result['history'][-1]['alarm'] and result['settings']['dim'] == 8
        log = [json.loads(line) for line in (result['folder']/'work'/'log.jsonl').read_text().splitlines()]
        timings = result['timings']
        assert timings['seconds'] == pytest.approx(sum(line['seconds'] for line in log)) and timings['device'] == 'cpu'
        assert min(line['samples_per_second'] for line in log) <= timings['samples_per_second'] <= timings['best_epoch']


def test_the_minimum_bounds_the_energy(results):
    for result in results.values():
        held = result['held_out']
        assert held['minimum'] - 1e-6 <= held['energy'] and held['share'] == pytest.approx(held['energy'] / held['minimum'])
        assert held['minimum'] <= -(1 - result['ridge'])**2 / 2 + 1e-12 # the constant's part alone


def test_labels_are_optional(results):
    assert [e['features'] for e in results['plain']['evaluation']] == ['untrained network', 'trained network']
    assert results['plain']['data']['classes'] == 10 and results['table']['data']['classes'] == 0 and results['table']['evaluation'] == []
    assert results['table']['settings']['method'] == 'vicreg' and results['table']['settings']['encoder'] == 'table'
    assert results['table']['settings']['policy']['rate'] > 0 # corrupted rows, not views of images


def test_given_values_replace_those_of_the_preset(results):
    settings, plain = results['preset']['settings'], results['plain']['settings']
    assert (settings['optimizer'], settings['learning_rate'], settings['clip_from'], settings['warmup']) == ('lars', 0.3, 4, 0.01) and settings['policy']['hue'] == 0.1
    assert (settings['encoder'], settings['epochs'], settings['hidden'], settings['batch_size']) == ('conv', 2, 16, 40) and settings['method_options'] == {'ridge': 0.2, 'rate': 0.05}
    assert (plain['optimizer'], plain['learning_rate'], plain['method'], plain['method_options']) == ('adamw', 0.005, 'peira', {}) and results['plain']['ridge'] == 0.1
    assert results['preset']['ridge'] == 0.2 and results['preset']['history'] != results['plain']['history']


def test_a_checkpoint_of_two_processes_is_picked_up_untouched(results):
    result = results['preset']
    assert result['settings']['processes'] == 2 and result['settings']['autocast'] is True
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (result['folder']/'work').iterdir()} == result['before']


def test_the_printed_command_has_the_settings_of_the_run(results, capsys):
    for result in results.values():
        assert main([*result['words'], '--show']) == 0
        shown, settings = json.loads(capsys.readouterr().out), result['settings']
        for name in ('method', 'epochs', 'batch_size', 'accumulate', 'dim', 'hidden', 'optimizer', 'learning_rate', 'weight_decay', 'warmup', 'clip', 'clip_from', 'seed'): assert shown[name] == settings[name]
        assert (shown['method_options'] or {}) == settings['method_options'] and (shown['encoder'] or settings['encoder']) == settings['encoder']
        assert Path(shown['out']) == result['folder']/'work' and shown['data_options']['limit'] == result['data']['train']


@pytest.mark.slow
def test_an_unfinished_run_of_several_processes_is_not_continued_by_one(results, tmp_path):
    state = torch.load(results['preset']['folder']/'work'/'checkpoint.pt', weights_only=True)
    (tmp_path/'work').mkdir()
    torch.save(state | {'history': state['history'][:1]}, tmp_path/'work'/'checkpoint.pt')
    with pytest.raises(Exception, match='unfinished run of 2 processes'): run(NOTEBOOK, tmp_path/'out.ipynb', folder=str(tmp_path), device='cpu', **PRESET)


def test_bad_parameters_are_refused(tmp_path):
    with pytest.raises(Exception, match='preset must be one of'): run(NOTEBOOK, tmp_path/'out.ipynb', folder=str(tmp_path/'found'), preset='peira-mnist')
    assert not (tmp_path/'found').exists()
    with pytest.raises(ValueError, match='epochs must be'): run(NOTEBOOK, tmp_path/'out.ipynb', epochs='many')
