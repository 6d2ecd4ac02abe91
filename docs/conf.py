"The site: Sphinx + myst-nb over the repository root; every library notebook is executed while it is built."
import os
import re
import sys
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
os.environ['PYTHONPATH'] = str(ROOT)                   # the kernels import the package from the checkout

project, author = 'peira_krepes', 'The peira_krepes developers'
copyright = f'2026 onwards, {author}'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode', 'sphinx.ext.mathjax']
root_doc = 'index'                                     # the top-level index.md
include_patterns = ['index.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'nbs/**', 'docs/*.md', 'docs/decisions/*.md']
exclude_patterns = ['**/.ipynb_checkpoints']

myst_enable_extensions = ['dollarmath', 'amsmath', 'colon_fence', 'deflist']
myst_heading_anchors = 3
myst_dmath_double_inline = True                         # $$ formulas may stand inside a paragraph
nb_custom_formats = {'.ipynb': ['nbdev_reader.read', {'package': str(ROOT/'peira_krepes')}, False]}
nb_execution_mode = 'cache'
nb_execution_excludepatterns = ['nbs/experiments/*']   # shown with the figures of their last full run
nb_execution_cache_path = str(ROOT/'_build/jupyter_cache')
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
suppress_warnings = ['mystnb.unknown_mime_type']      # `declare` speaks to peira-run in a MIME type of its own, beside plain text
nb_ipywidgets_js = {}                                  # nothing is fetched when a page opens

autodoc_default_options = {'members': True, 'undoc-members': True, 'show-inheritance': True}
autodoc_typehints = 'description'
math_eqref_format = '({number})'

html_theme = 'furo'
html_title = 'peira_krepes'
html_static_path = ['_static']
mathjax_path = 'mathjax/tex-chtml-full.js'             # put into _static by docs/vendor.py


SPAN = re.compile(r'(?<!\\)\$([^$]+)\$|``[^`]+``|:\w+:`[^`]+`|`([^`]+)`(?!_)')


def as_rst(match):
    "One span of a docstring, in one pass: the end of one must not be taken for the start of the next."
    formula, code = match.groups()
    return f':math:`{formula}`' if formula else f'``{code}``' if code else match[0]


def docstring_as_in_notebooks(app, what, name, obj, options, lines):
    "Docstrings are written as in the notebooks: `$x$` is mathematics and `x` in backticks is code."
    lines[:] = [SPAN.sub(as_rst, line) for line in lines]


def setup(app):
    app.connect('autodoc-process-docstring', docstring_as_in_notebooks, priority=400)
