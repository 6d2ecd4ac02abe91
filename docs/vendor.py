"Put MathJax 3 (PyPI package django-static-mathjax; no Django needed) into docs/_static, so that the site opens from disk."
import importlib.util
import shutil
from pathlib import Path

target = Path(__file__).parent/'_static/mathjax'
source = Path(importlib.util.find_spec('mathjax').submodule_search_locations[0])/'static/mathjax/es5'
if not (target/'output').exists():
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(source/'tex-chtml-full.js', target)
    shutil.copytree(source/'output/chtml/fonts/woff-v2', target/'output/chtml/fonts/woff-v2')
