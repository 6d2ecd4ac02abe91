"Read an nbdev notebook for Sphinx: act on its `#| ` directives, then drop them."
import hashlib
import re
from pathlib import Path

import nbformat

DIRECTIVE = re.compile(r'^#\|[ \t]*([\w-]+):?[ \t]*(.*?)[ \t]*\n?$', re.M)
TAGS = {'hide': 'remove-cell', 'default_exp': 'remove-cell', 'hide_input': 'remove-input', 'hide_output': 'remove-output'}
NEVER_RUN = {'slow', 'gpu'}                       # the same list as tst_flags in settings.ini


def package_hash(package):
    "One hash of the package's source. The cache of executed notebooks keys on their cells only."
    sources = sorted(Path(package).rglob('*.py'))
    return hashlib.sha256(b''.join(p.read_bytes() for p in sources)).hexdigest()[:12]


def read(text, package):
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type != 'code': continue
        found = dict(DIRECTIVE.findall(cell.source))
        tags = cell.metadata.setdefault('tags', [])
        tags += [TAGS[d] for d in found if d in TAGS]
        if NEVER_RUN & found.keys() or found.get('eval') == 'false': tags.append('skip-execution')
        cell.source = DIRECTIVE.sub('', cell.source).lstrip('\n')
    # A hidden first code cell with the package's hash: a change of the library runs the page again.
    stamp = nbformat.v4.new_code_cell(f'# {package_hash(package)}', metadata={'tags': ['remove-cell']}, id='package-hash')
    notebook.cells.insert(1, stamp)
    return notebook
