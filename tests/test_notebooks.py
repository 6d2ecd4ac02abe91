"Notebook hygiene: clean, exported, parameters that survive and matter."
import configparser
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import papermill
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/'.ci'))
import nbs

NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
EXPERIMENTS = [p for p in NOTEBOOKS if p.parent.name == 'experiments']
name = lambda p: str(p.relative_to(ROOT/'nbs'))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=name)
def test_notebook_is_clean(path):
    assert nbs.read(path) == nbs.cleaned(nbs.read(path))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=name)
def test_text_side_round_trips(path):
    nb = nbs.read(path)
    assert nbs.cleaned(jupytext.reads(nbs.to_text(nb), nbs.PERCENT)) == nb


def test_an_output_or_stray_metadata_is_noticed():
    nb = nbs.read(NOTEBOOKS[0])
    code = next(c for c in nb.cells if c.cell_type == 'code')
    code.metadata['papermill'] = {'duration': 1.0}
    code.outputs = [nbformat.v4.new_output('stream', text='seen')]
    assert nb != nbs.cleaned(nb)


@pytest.mark.parametrize('path', EXPERIMENTS, ids=name)
def test_parameters_survive_nbdev_clean(path, tmp_path):
    "nbdev strips cell metadata unless settings.ini allows tags; papermill then silently uses the defaults."
    shutil.copy(ROOT/'settings.ini', tmp_path)
    (tmp_path/'nbs').mkdir()
    copy = shutil.copy(path, tmp_path/'nbs')
    before = papermill.inspect_notebook(str(copy))
    subprocess.run([sys.executable, '-c', 'from nbdev.clean import nbdev_clean; nbdev_clean()'], cwd=tmp_path, check=True, capture_output=True)
    assert before and papermill.inspect_notebook(str(copy)) == before


@pytest.mark.parametrize('path', EXPERIMENTS, ids=name)
def test_parameters_are_typed_and_readable(path):
    assert nbs.lost_parameters(path) == []
    found = papermill.inspect_notebook(str(path))
    assert found and all(p['inferred_type_name'] not in (None, 'None') for p in found.values())
    assert '- skip_exec: true' in nbs.read(path).cells[0].source


def test_settings_keep_tags():
    settings = configparser.ConfigParser()
    settings.read(ROOT/'settings.ini')
    assert settings['DEFAULT']['allowed_cell_metadata_keys'].split() == ['tags']


def test_committed_results_are_complete():
    "Every committed figure folder has the result it was drawn from, marked as a full run with its provenance."
    for folder in (p for p in (ROOT/'figures').iterdir() if p.is_dir() and not p.name.endswith('-smoke')):
        result = json.loads((folder/'result.json').read_text())
        assert result['smoke'] is False and {'command', 'parameters', 'commit', 'seeds', 'machine', 'versions', 'started', 'seconds'} <= result['provenance'].keys()
        assert result['data']['checksum']
