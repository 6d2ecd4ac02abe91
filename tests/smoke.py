"""Smoke runs of an experiment notebook, for its tests."""
import json
from pathlib import Path

from peira_krepes.lab.runs import run

EXPERIMENTS = Path(__file__).resolve().parents[1]/'nbs'/'experiments'


def smoke_runs(tmp_path_factory, experiment, variants, **common):
    "The result of each variant (its name -> its parameters, beside the common ones), with the folder it lies in and its picture."
    base, found = tmp_path_factory.mktemp(experiment), {}
    for name, parameters in variants.items():
        folder = base/name
        run(EXPERIMENTS/f'{experiment}.ipynb', base/f'{name}.ipynb', folder=str(folder), **common, **parameters)
        found[name] = json.loads((folder/'result.json').read_text()) | {'folder': folder, 'picture': folder/f'{experiment}.png'}
    return found
