"""Notebooks as text. `python .ci/nbs.py sync|export|clean|check [NAME ...]`, NAME like krepes/10_entk; none = all.

sync    nbs/**/*.ipynb <-> text/**/*.py (py:percent, git-ignored), compared by content, never by time stamp: the side
        changed since the last sync wins; both changed is an error, and the difference is printed.
export  write the package's module from each notebook (all notebooks: the same as nbdev_export).
clean   strip outputs, execution counts and metadata; tags and the kernel's name stay.
check   exit 1 unless every notebook is clean, papermill can read its parameters, and the package is what they export.
"""
import copy, difflib, hashlib, subprocess, sys
from pathlib import Path

import jupytext, nbformat

ROOT = Path(__file__).resolve().parents[1]
NBS, TEXT, PACKAGE = ROOT/'nbs', ROOT/'text', ROOT/'peira_krepes'
PERCENT = {'extension': '.py', 'format_name': 'percent'}
FILTERS = {'notebook_metadata_filter': '-all', 'cell_metadata_filter': 'tags,-all'}
KERNEL = {'display_name': 'python3', 'language': 'python', 'name': 'python3'}


def digest(text): return hashlib.sha256(text.encode()).hexdigest()[:16]
def read(path): return nbformat.read(path, 4)


def names(wanted):
    "Notebook names without suffix, e.g. krepes/10_entk, of both sides; only `wanted` ones if any are given."
    found = {p.relative_to(NBS).with_suffix('') for p in NBS.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts}
    found |= {p.relative_to(TEXT).with_suffix('') for p in TEXT.rglob('*.py')}
    return sorted(str(n) for n in found if not wanted or str(n) in wanted)


def cleaned(nb):
    "A copy of `nb` as it is committed. Cell ids come from the content, so that the same text gives the same file."
    nb, seen = copy.deepcopy(nb), {}
    for c in nb.cells:
        tags = c.metadata.get('tags')
        c.metadata = nbformat.from_dict({'tags': tags} if tags else {})
        c.pop('attachments', None)
        if c.cell_type == 'code': c.outputs, c.execution_count = [], None
        key = digest(c.cell_type + c.source)[:8]
        seen[key] = seen.get(key, 0) + 1
        c.id = key if seen[key] == 1 else f'{key}-{seen[key]}'
    nb.metadata = nbformat.from_dict({'kernelspec': KERNEL})
    nb.nbformat, nb.nbformat_minor = 4, 5
    return nb


def write(nb, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)


def to_text(nb):
    nb = copy.deepcopy(nb)
    nb.metadata['jupytext'] = FILTERS
    return jupytext.writes(nb, PERCENT)


def sync(wanted):
    failed = 0
    for n in names(wanted):
        nb_path, text_path, state = NBS/f'{n}.ipynb', TEXT/f'{n}.py', TEXT/f'{n}.synced'
        base = state.read_text() if state.exists() else None
        a = to_text(read(nb_path)) if nb_path.exists() else None
        b = text_path.read_text(encoding='utf-8') if text_path.exists() else None
        if a is None and digest(b) == base:
            text_path.unlink(); state.unlink(); print(f'removed text/{n}.py, as its notebook is gone'); continue
        if a != b:
            if b is None or digest(b) == base:
                text_path.parent.mkdir(parents=True, exist_ok=True)
                text_path.write_text(a, encoding='utf-8'); print(f'wrote text/{n}.py')
            elif a is None or digest(a) == base:
                write(cleaned(jupytext.reads(b, PERCENT)), nb_path); print(f'wrote nbs/{n}.ipynb')
                a = to_text(read(nb_path)); text_path.write_text(a, encoding='utf-8')
            else:
                failed = 1
                print(f'CONFLICT {n}: notebook and text both changed; make one like the other, or delete text/{n}.py')
                sys.stdout.writelines(difflib.unified_diff(b.splitlines(True), a.splitlines(True), f'text/{n}.py', f'nbs/{n}.ipynb'))
                continue
        state.write_text(digest(a))
    return failed


def export(wanted):
    if not wanted: return subprocess.run([Path(sys.executable).with_name('nbdev_export')], cwd=ROOT).returncode
    from nbdev.export import nb_export
    for n in names(wanted): nb_export(NBS/f'{n}.ipynb', lib_path=PACKAGE)
    return 0


def clean(wanted):
    for n in names(wanted):
        path = NBS/f'{n}.ipynb'
        if path.exists() and (nb := read(path)) != (c := cleaned(nb)): write(c, path); print(f'cleaned nbs/{n}.ipynb')
    return 0


def lost_parameters(path):
    "Names assigned in the parameters cell that papermill cannot read (it trips over '=' in a comment or string)."
    import papermill
    cells = [c.source for c in read(path).cells if 'parameters' in c.metadata.get('tags', [])]
    lines = [l for s in cells for l in s.splitlines() if '=' in l and not l.startswith('#')]
    return sorted({l.split(':')[0].split('=')[0].strip() for l in lines} - set(papermill.inspect_notebook(str(path)) if cells else ()))


def check(wanted):
    bad = []
    for n in names(wanted):
        path = NBS/f'{n}.ipynb'
        if not path.exists(): continue
        if (nb := read(path)) != cleaned(nb): bad.append(f'nbs/{n}.ipynb: outputs or metadata left (make sync)')
        if lost := lost_parameters(path): bad.append(f'nbs/{n}.ipynb: papermill cannot read parameter(s) {lost}')
    modules = lambda: {p.relative_to(ROOT): p.read_bytes() for p in PACKAGE.rglob('*.py')}
    before = modules(); export([]); after = modules()
    bad += [f'{p}: not what the notebooks export (make sync)' for p in sorted(before.keys() | after.keys()) if before.get(p) != after.get(p)]
    print('\n'.join(bad) or 'notebooks are clean and exported')
    return bool(bad)


if __name__ == '__main__':
    commands = {'sync': sync, 'export': export, 'clean': clean, 'check': check}
    if len(sys.argv) < 2 or sys.argv[1] not in commands: sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
