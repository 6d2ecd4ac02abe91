"Parameters of a notebook, provenance and results, and the launcher: what it refuses, skips, keeps and leaves alone."
import configparser
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, List, Optional, Union

import nbformat
import pytest

from peira_krepes.lab import results, runs
from peira_krepes.lab.parameters import _accepts, check_parameters, known_parameters, read_parameters
from peira_krepes.lab.results import PARTS, declare, part, provenance, without_folders, write_result
from peira_krepes.lab.runs import main, run, up_to_date

ROOT = Path(__file__).resolve().parents[1]
TOY = '''from typing import Optional
epochs: int = 3  # passes over the data
ridge: float = 0.1
limit: Optional[int] = None  # None takes all
layers: list = [8, 4]
name: str = "plain"
quiet: bool = False
untyped = None'''
WORK = '''import json, os, sys
from pathlib import Path
from peira_krepes.lab.results import COMMAND, declare
print("half way", epochs)
Path("made.json").write_text(json.dumps({"epochs": epochs, "layers": layers, "limit": limit, "executable": sys.executable, "tty": sys.stderr.isatty(), "command": os.environ[COMMAND]}))
declare("made.json")
if name == "fail": raise RuntimeError("two\\nlines")
if name == "die": os.kill(os.getpid(), 9)'''


def notebook(path, *cells, parameters=TOY, tags=('parameters',)):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(parameters, metadata={'tags': list(tags)}), *map(nbformat.v4.new_code_cell, cells)])
    nb.metadata.kernelspec = {'name': 'python3', 'language': 'python', 'display_name': 'python3'}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


@pytest.fixture
def toy(tmp_path): return notebook(tmp_path/'a {b} c'/'toy.ipynb', WORK)  # papermill would fill in the braces


@pytest.fixture
def out(tmp_path): return tmp_path/'out {1}'/'toy.ipynb'


def made(toy): return json.loads((toy.parent/'made.json').read_text())
def call(*words): return main([str(w) for w in words])


# ---- parameters ------------------------------------------------------------------------------------------------------
def test_known_parameters_are_what_the_cell_says(toy):
    known = known_parameters(toy)
    assert list(known) == ['epochs', 'ridge', 'limit', 'layers', 'name', 'quiet', 'untyped']
    assert [p.default for p in known.values()] == [3, 0.1, None, [8, 4], 'plain', False, None]
    assert [p.allowed for p in known.values()] == [int, float, Optional[int], list, str, bool, Any]
    assert known['epochs'].help == 'passes over the data'


@pytest.mark.parametrize('name, text, value', [
    ('epochs', '5', 5), ('epochs', '-5', -5), ('ridge', '1', 1), ('ridge', '1e-3', 1e-3), ('limit', 'None', None), ('limit', 'none', None), ('limit', '7', 7),
    ('layers', '[1, 2]', [1, 2]), ('name', '123', '123'), ('name', 'None', 'None'), ('name', "'quoted'", 'quoted'), ('name', '', ''), ('name', 'a=b', 'a=b'),
    ('quiet', 'true', True), ('quiet', 'False', False), ('untyped', 'x', 'x'), ('untyped', '1', 1)])
def test_text_is_read_as_the_parameters_type(toy, name, text, value):
    read = read_parameters(toy, {name: text})[name]
    assert read == value and type(read) is type(value)
    check_parameters(toy, {name: read})


@pytest.mark.parametrize('name, value', [('epochs', 1.0), ('epochs', True), ('epochs', '3'), ('ridge', True), ('ridge', '0.1'), ('ridge', None), ('limit', 1.5),
                                         ('limit', True), ('layers', (1, 2)), ('name', 3), ('name', None), ('quiet', 1), ('quiet', 'yes')])
def test_a_value_of_the_wrong_type_is_refused_by_name(toy, name, value):
    with pytest.raises(ValueError, match=f'^{name} must be .*{type(value).__name__}$'): check_parameters(toy, {name: value})


def test_whole_numbers_for_floats_become_floats(toy):
    value = check_parameters(toy, {'ridge': 1, 'epochs': 1})
    assert type(value['ridge']) is float and type(value['epochs']) is int


def test_unknown_names_are_listed_with_the_nearest_and_all_known(toy):
    with pytest.raises(ValueError, match="'epohcs', did you mean 'epochs'.*'zzz';.*epochs: int = 3.*ridge: float = 0.1"):
        check_parameters(toy, {'epohcs': 1, 'zzz': 2})


def test_containers_are_looked_into():
    assert _accepts(List[float], [1, 2.0]) and not _accepts(List[float], [1, 'a']) and not _accepts(list[int], [True])
    assert _accepts(Union[int, str], 'a') and _accepts(int | None, None) and not _accepts(int | None, 1.0) and _accepts(dict[str, int], {'a': 1})


@pytest.mark.parametrize('line', ['rate: float = 0.5  # eta = 0.5', 'limit: int | None = None', 'text: str = "a=b"'])
def test_a_parameter_papermill_cannot_read_is_an_error_not_a_default(tmp_path, line):
    nb = notebook(tmp_path/'nb.ipynb', parameters=f'epochs: int = 3\n{line}')
    with pytest.raises(ValueError, match=f'cannot read {line.split(":")[0]} '): known_parameters(nb)


def test_parameters_survive_nbdev_clean_with_our_settings_and_only_with_them(tmp_path):
    for keep in (True, False):
        folder = tmp_path/str(keep)
        nb = notebook(folder/'nbs'/'nb.ipynb', WORK)
        settings = configparser.ConfigParser()
        settings.read(ROOT/'settings.ini')
        if not keep: del settings['DEFAULT']['allowed_cell_metadata_keys']
        with open(folder/'settings.ini', 'w') as f: settings.write(f)
        subprocess.run([sys.executable, '-c', 'from nbdev.clean import nbdev_clean; nbdev_clean()'], cwd=folder, check=True, capture_output=True)
        if keep:
            run(nb, folder/'out.ipynb', epochs=11)
            assert made(nb)['epochs'] == 11
        else:
            with pytest.raises(ValueError, match='no cell tagged'): known_parameters(nb)


# ---- running ---------------------------------------------------------------------------------------------------------
def test_a_passed_parameter_changes_the_result_and_the_record_repeats_the_run(toy, out, capfd):
    assert call(toy, out, '-p', 'epochs', '7', '-p', 'layers', '[1, 2]', '-p', 'name', '/home/somebody/x y') == 0
    result = made(toy)
    assert (result['epochs'], result['layers'], result['limit']) == (7, [1, 2], None)
    assert Path(result['executable']).samefile(sys.executable)
    assert 'half way 7' in capfd.readouterr().out and not result['tty']
    words = shlex.split(result['command'])
    assert words == ['peira-run', 'toy.ipynb', 'toy.ipynb', '-p', 'epochs', '7', '-p', 'layers', '[1, 2]', '-p', 'name', 'x y']
    assert [p.name for p in out.parent.iterdir()] == ['toy.ipynb']


def test_skip_and_everything_that_ends_it(toy, out, tmp_path, monkeypatch, capsys):
    package = shutil.copytree(runs.PACKAGE, tmp_path/'peira_krepes', ignore=shutil.ignore_patterns('__pycache__'))
    monkeypatch.setattr(runs, 'PACKAGE', package)
    run(toy, out, epochs=5)
    stamp = lambda: out.stat().st_mtime_ns
    before = stamp()
    assert call(toy, out, '-p', 'epochs', '5', '-p', 'ridge', '0.1') == 0 and stamp() == before  # a default passed is the same run
    assert 'up to date' in capsys.readouterr().out
    assert up_to_date(toy, out, epochs=5) and not up_to_date(toy, out, epochs=6) and not up_to_date(toy, tmp_path/'other.ipynb', epochs=5)
    content = (toy.parent/'made.json').read_text()
    (toy.parent/'made.json').write_text('{}')
    assert not up_to_date(toy, out, epochs=5)  # another run wrote there
    (toy.parent/'made.json').unlink()
    assert not up_to_date(toy, out, epochs=5)
    (toy.parent/'made.json').write_text(content)
    assert up_to_date(toy, out, epochs=5)
    source = package/'core'/'files.py'
    content = source.read_text()
    source.write_text(content + '\n# corrected\n')
    assert not up_to_date(toy, out, epochs=5)  # the library changed
    source.write_text(content)
    shutil.move(package, tmp_path/'elsewhere')
    monkeypatch.setattr(runs, 'PACKAGE', tmp_path/'elsewhere')
    assert up_to_date(toy, out, epochs=5)  # where it lies does not matter
    run(toy, out, epochs=5)
    assert stamp() == before
    assert call('--force', toy, out, '-p', 'epochs', '5') == 0 and stamp() != before
    notebook(toy, WORK, 'x = 1')
    assert not up_to_date(toy, out, epochs=5)
    out.write_text('{"cells": [')
    assert not up_to_date(toy, out, epochs=5)


@pytest.mark.parametrize('how, says', [('fail', 'In [3] failed: RuntimeError: two lines'), ('die', 'kernel died')])
def test_a_failed_run_is_kept_beside_and_leaves_the_good_one(toy, out, capfd, how, says):
    out.parent.mkdir()
    good = b'an older good run'
    out.write_bytes(good)
    assert call(toy, out, '-p', 'name', how) == 1
    err = capfd.readouterr().err
    assert says in err and str(out.with_suffix('.failed.ipynb')) in err and err.count('\n') == 1 and 'Traceback' not in err
    failed = out.with_suffix('.failed.ipynb')
    assert out.read_bytes() == good and sorted(out.parent.iterdir()) == sorted([out, failed])
    outputs = [o for c in nbformat.read(failed, 4).cells for o in c.get('outputs', [])]
    assert any(o.output_type == 'error' for o in outputs) == (how == 'fail')
    shutil.copy(failed, out)
    assert not up_to_date(toy, out, name=how)  # even where its metadata says "completed"
    if how == 'fail':
        run(toy, out)
        assert not failed.exists() and up_to_date(toy, out)


def test_wrong_calls_are_one_line_and_status_2(toy, tmp_path, capfd, monkeypatch):
    plain, broken = notebook(tmp_path/'plain.ipynb', tags=()), tmp_path/'broken.ipynb'
    broken.write_text('{')
    (tmp_path/'file').touch()
    for words in ((tmp_path/'none.ipynb', 'o.ipynb'), ('quickstrat', 'o.ipynb'), (toy, 'o.ipynb', '-p', 'epohcs', '3'), (toy, 'o.ipynb', '-p', 'epochs', 'x'),
                  (plain, 'o.ipynb'), (broken, 'o.ipynb'), (toy, 'o.txt'), (toy, tmp_path), (toy, toy), (toy, tmp_path/'file'/'o.ipynb'), (toy,)):
        assert call(*words) == 2, words
        err = capfd.readouterr().err
        assert err.startswith('peira-run: ') and err.count('\n') == 1 and 'Traceback' not in err
    for words in ((), (toy, 'o.ipynb', '--no-such'), (toy, 'o.ipynb', '-p', 'epochs')):
        with pytest.raises(SystemExit) as stop: call(*words)
        err = capfd.readouterr().err
        assert stop.value.code == 2 and err.startswith('peira-run: ') and err.count('\n') == 1
    assert not (tmp_path/'o.ipynb').exists()


def test_the_callers_signals_and_log_are_as_before(toy):
    state = lambda: (signal.getsignal(signal.SIGTERM), logging.getLogger('papermill').level)
    before = state()
    assert call(toy, '--list') == 0 and call(toy) == 2 and state() == before


def test_list_prints_every_parameter_with_default_and_help(toy, capsys):
    assert call(toy, '--list') == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[0].split() == 'epochs: int = 3 passes over the data'.split() and lines[2].startswith('limit: Optional[int] = None')
    assert lines[0].index('passes') == lines[2].index('None takes')


def test_an_experiments_bare_name_and_the_folder_it_runs_in(tmp_path, monkeypatch):
    root = tmp_path/'checkout'
    nb = notebook(root/'nbs'/'experiments'/'quick.ipynb', WORK)
    (root/'docs').mkdir()
    monkeypatch.chdir(root/'docs')
    assert run('quick', 'out.ipynb', epochs=2) == Path('out.ipynb') and (root/'docs'/'out.ipynb').exists()  # OUT is the shell's
    assert json.loads((root/'made.json').read_text())['epochs'] == 2  # the notebook works in the checkout's root
    assert json.loads((root/'made.json').read_text())['command'] == 'peira-run nbs/experiments/quick.ipynb docs/out.ipynb -p epochs 2'
    assert up_to_date(nb, 'out.ipynb', epochs=2)


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_nothing_half_written_and_no_kernel(tmp_path, signum):
    slow = notebook(tmp_path/'slow.ipynb', 'import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)')
    (tmp_path/'out').mkdir()
    (tmp_path/'out'/'o.ipynb').write_text('older')
    p = subprocess.Popen([sys.executable, '-m', 'peira_krepes.lab.runs', str(slow), str(tmp_path/'out'/'o.ipynb')],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # ignored where the tests themselves run in the background
    try:
        kernel = int(p.stdout.readline())  # what the notebook prints arrives while it runs
        p.send_signal(signum)
        out, err = p.communicate(timeout=30)
    finally: p.kill()
    assert p.returncode == 130 and err == 'peira-run: stopped; nothing was written\n' and out == ''
    assert [f.name for f in (tmp_path/'out').iterdir()] == ['o.ipynb'] and (tmp_path/'out'/'o.ipynb').read_text() == 'older'
    with pytest.raises(ProcessLookupError): os.kill(kernel, 0)


def test_the_kernel_is_this_interpreter_whatever_python3_is_installed(toy, out, tmp_path):
    spec = tmp_path/'jupyter'/'kernels'/'python3'/'kernel.json'
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({'argv': ['false'], 'display_name': 'old', 'language': 'python'}))
    env = {**os.environ, 'JUPYTER_PATH': str(tmp_path/'jupyter')}
    found = subprocess.run([sys.executable, '-c', "from jupyter_client.kernelspec import get_kernel_spec; print(get_kernel_spec('python3').argv)"],
                           env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['false']"  # what papermill alone would start
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, '-m', 'peira_krepes.lab.runs', str(toy), str(out)], env=env, check=True, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(ours), os.close(theirs)
    assert Path(made(toy)['executable']).samefile(sys.executable)
    assert made(toy)['tty']  # on a terminal progress bars show


# ---- where a result comes from -----------------------------------------------------------------------------------------
@pytest.fixture
def result(): return {'experiment': 'toy', 'smoke': True, 'data': {'name': 'd', 'checksum': 'c'}, 'provenance': {**provenance({'ridge': 0.1}, 0, True), 'seconds': 1.0}}


def test_provenance_has_its_parts_and_names_nobody():
    p = provenance({'root': '/home/somebody/images', 'list': ['/a/b', 'c/d'], 'path': Path('/x/y')}, seeds=(1, 2), smoke=False)
    assert p['parameters'] == {'root': 'images', 'list': ['b', 'c/d'], 'path': 'y'} and p['seeds'] == [1, 2] and p['smoke'] is False
    assert {k.split('.')[1] for k in PARTS if k.startswith('provenance.')} - {'seconds'} <= p.keys()
    assert p['versions'].keys() == {'python', 'torch', 'numpy', 'scikit-learn', 'peira_krepes'} and all(p['versions'].values())
    assert p['machine'].keys() == {'cpu', 'system', 'cores', 'threads', 'memory_gib', 'gpu'} and p['machine']['cores'] >= 1
    text = json.dumps(p)
    assert str(Path.home()) not in text and (platform.node() or '/') not in text and str(ROOT) not in text
    assert p['started'].endswith('+00:00')


def test_provenance_refuses_other_seeds_and_marks():
    with pytest.raises(TypeError, match='seeds'): provenance({}, ['a'], True)
    with pytest.raises(TypeError, match='smoke'): provenance({}, 0, 1)


def test_the_commit_is_the_packages_own(tmp_path, monkeypatch):
    git = lambda *words: subprocess.run(['git', '-C', str(tmp_path), '-c', 'user.name=t', '-c', 'user.email=t', *words], check=True, capture_output=True, text=True).stdout
    package = tmp_path/'peira_krepes'
    package.mkdir()
    monkeypatch.setattr(results, 'PACKAGE', package)
    commit = lambda: (p := provenance({}, 0, True)) and (p['commit'], p['dirty'])
    assert commit() == (None, None)
    git('init')
    (package/'a.py').write_text('a = 1')
    assert commit() == (None, None)  # no commit yet
    git('add', '.')
    git('commit', '-m', 'first')
    head = git('rev-parse', 'HEAD').strip()
    assert commit() == (head, False)
    (tmp_path/'figure.png').touch()
    assert commit() == (head, False)
    (package/'b.py').touch()
    assert commit() == (head, True)
    inside = tmp_path/'venv'/'peira_krepes'  # an installed copy within somebody's repository
    inside.mkdir(parents=True)
    monkeypatch.setattr(results, 'PACKAGE', inside)
    assert commit() == (None, None)
    monkeypatch.setenv('PATH', '')
    assert commit() == (None, None)  # no git at all


@pytest.mark.parametrize('place', PARTS)
def test_a_result_without_a_part_is_refused_by_name(tmp_path, result, place):
    *above, key = place.split('.')
    inside = part(result, above[0]) if above else result
    kept = inside.pop(key)
    with pytest.raises(ValueError, match=f"no '{place}'"): write_result(tmp_path, result)
    inside[key] = {1}
    with pytest.raises(TypeError, match=f"'{place}'"): write_result(tmp_path, result)
    assert not list(tmp_path.iterdir())
    inside[key] = kept
    assert json.loads(write_result(tmp_path/'new', result).read_text()) == result


def test_a_refused_result_leaves_the_old_one(tmp_path, result):
    write_result(tmp_path, result)
    with pytest.raises(ValueError, match=r'\$\.loss'): write_result(tmp_path, {**result, 'loss': float('nan')})
    assert json.loads((tmp_path/'result.json').read_text()) == result


def test_declaring_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match='Declare it after'): declare(tmp_path/'none')


def test_without_folders_leaves_other_things_alone():
    assert without_folders(['a/b', '', '/', 3, None, True, '~/x']) == ['a/b', '', '/', 3, None, True, 'x']


@pytest.mark.parametrize('text, reason', [('{"a": 1}', 'not a notebook'), ('[1]', 'not a notebook')])
def test_a_json_file_that_is_no_notebook_is_refused(tmp_path, text, reason):
    (tmp_path/'a.ipynb').write_text(text)
    with pytest.raises(ValueError, match=reason): known_parameters(tmp_path/'a.ipynb')


def test_a_parameters_cell_that_is_not_python_is_named(tmp_path):
    cell = nbformat.v4.new_code_cell('n: int = = 3', metadata={'tags': ['parameters']})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path/'a.ipynb')
    with pytest.raises(ValueError, match='parameters.*is not Python'): known_parameters(tmp_path/'a.ipynb')


@pytest.mark.parametrize('flags', [(), ('--list',)], ids=['run', 'list'])
@pytest.mark.parametrize('text', ['{"a": 1}', '[1]', 'null', None], ids=str)
def test_peira_run_refuses_what_is_no_notebook_in_one_line(tmp_path, capfd, text, flags):
    path = notebook(tmp_path/'a.ipynb', parameters='n: int = = 3')
    if text: path.write_text(text)
    assert call(path, tmp_path/'o.ipynb', *flags) == 2
    err = capfd.readouterr().err
    assert err.startswith('peira-run: ') and err.count('\n') == 1 and ('is not a notebook' if text else 'is not Python') in err
    assert not (tmp_path/'o.ipynb').exists()
