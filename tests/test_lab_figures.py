"Pictures and page of a result: only the JSON, the same bytes, honest axes, marked smoke runs, a page that fetches nothing. All numbers here are made up."
import base64
import copy
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave

from peira_krepes.lab import pictures
from peira_krepes.lab.figures import QUICKSTART, demand, draw, page
from peira_krepes.lab.pictures import draw_bars, draw_coverage, draw_energy, draw_image, draw_probes, draw_rank, draw_spectrum, draw_strips, picture, scale_of

NASTY = '<script>alert("x")</script>'


def png(seed, channels=1):
    image = np.random.default_rng(seed).random((12, 12, 3) if channels == 3 else (12, 12))
    imsave(buffer := io.BytesIO(), image, format='png', cmap='gray', vmin=0, vmax=1)
    return base64.b64encode(buffer.getvalue()).decode()


def made_up(smoke=False, classes=('left', 'right', NASTY)):
    shown = lambda i, score=0.0: {'index': i, 'label': classes[i % len(classes)], 'score': score, 'image': png(i)}
    audit = lambda objective: {
        'objective': objective, 'n_landmarks': 20, 'rank': 19, 'dim': 8, 'seconds': 1.0,
        'history': [{'step': 1, 'loss_before': -1.0, 'loss': -2.0, 'damping': 0.001, 'attempts': 1, 'cg_residual': 1e-7, 'cg_iterations': 9, 'cg_converged': True}],
        'examples': [{**shown(i), 'attracting': [shown(i + j, 0.03/(j + 1)) for j in range(5)], 'repelling': [shown(i + j + 9, -0.01/(j + 1)) for j in range(i)]} for i in range(3)],
        'confidence_drop': {'top': 0.3, 'top_se': 0.02, 'random': -0.01, 'random_se': 0.01, 'norm_matched': 0.05, 'norm_matched_se': 0.01, 'n_deleted': 10, 'k': 50},
        'coverage': {'kappa': 4, 'expected': 5.5, 'p_value': 0.4, 'n_classes': 3, 'n_landmarks': 20}}
    epoch = lambda e: {'epoch': e, 'step': e, 'energy': -float(e), 'effective_rank': 3.0 + e, 'effective_rank_covariance': 2.0 + e, 'trace_N': 1.0,
                       'spectrum': [0.1, 0.9, 0.5, 0.01], 'stationarity': 0.1, 'learning_rate': 0.001, 'skipped_steps': 0}
    return {'experiment': 'quickstart', 'smoke': smoke, 'data': {'name': 'made up', 'checksum': 'f'*64, 'n_train': 30, 'n_test': 12, 'classes': list(classes), 'image_shape': [1, 12, 12]},
            'provenance': {'command': 'peira-run nbs/experiments/quickstart.ipynb out.ipynb', 'parameters': {'epochs': 4}, 'commit': 'c0ffee'*6, 'dirty': True, 'seeds': [0, 1],
                           'machine': {'cpu': 'A processor', 'gpu': None}, 'versions': {'torch': '9.9'}, 'started': '2026-01-02T03:04:05+00:00', 'seconds': 12.5},
            'training': {'method': 'peira', 'ridge': 0.1, 'dim': 4, 'center': False, 'epochs': 4, 'seconds': 5.0, 'history': [epoch(e) for e in range(1, 5)],
                         'collapse': {'alarm': False, 'reason': ''}},
            'probes': [{'features': f, 'knn': 0.8, 'knn_se': 0.02, 'linear': 0.7, 'linear_se': 0.03} for f in ('raw pixels', 'untrained encoder', 'PEIRA encoder')],
            'audits': [audit('PEIRA'), audit('BarlowTwins')], 'findings': ['A finding with <b>marks</b> & signs.']}


def written(folder, result):
    folder.mkdir(exist_ok=True)
    (folder/'result.json').write_text(json.dumps(result))
    return folder


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    "The full and the smoke run, drawn: {smoke: {file name: bytes}}."
    folders = {smoke: written(tmp_path_factory.mktemp(str(smoke)), made_up(smoke)) for smoke in (False, True)}
    return {smoke: {p.name: p.read_bytes() for p in draw(folder)} for smoke, folder in folders.items()}


def axes_of(draw_panel, *args):
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_panel(axes, *args)
    return axes


# ---- what is drawn ---------------------------------------------------------------------------------------------------
def test_every_picture_and_the_page_are_drawn_small_and_1400_wide(drawn):
    assert list(drawn[False]) == ['overview.png', 'training.png', 'probes.png', 'influence_PEIRA.png', 'influence_BarlowTwins.png', 'audit.png', 'report.html']
    for name, content in drawn[False].items():
        if not name.endswith('.png'): continue
        height, width = imread(io.BytesIO(content), format='png').shape[:2]
        assert width == 1400 and 300 < height < 1400 and len(content) < 150_000, name


def test_the_same_result_gives_the_same_bytes_whatever_the_user_has_set(drawn, tmp_path):
    with matplotlib.rc_context({'font.size': 30, 'axes.facecolor': 'black', 'savefig.dpi': 20, 'figure.dpi': 30, 'lines.linewidth': 9}):
        again = {p.name: p.read_bytes() for p in draw(written(tmp_path, made_up()))}
    assert again == drawn[False]


def test_the_users_settings_and_backend_are_left_alone(tmp_path):
    code = f'''import json, sys, matplotlib
matplotlib.use("svg")
matplotlib.rcParams["font.size"] = 17
before = dict(matplotlib.rcParams)
from peira_krepes.lab.pictures import picture
with picture({str(tmp_path/"p.png")!r}, True, "t", 1) as figure: figure.subplots().plot([1, 2])
assert dict(matplotlib.rcParams) == before and matplotlib.get_backend() == "svg" and "matplotlib.pyplot" not in sys.modules
try:
    with picture({str(tmp_path/"q.png")!r}, True, "t", 1): raise KeyError
except KeyError: assert dict(matplotlib.rcParams) == before'''
    subprocess.run([sys.executable, '-c', code], check=True)
    assert (tmp_path/'p.png').exists() and not (tmp_path/'q.png').exists()


def test_a_smoke_run_is_marked_in_every_picture(drawn):
    red = lambda content: (np.abs(imread(io.BytesIO(content), format='png')[:50, 1000:, :3] - [0xD5/255, 0x5E/255, 0]).max(-1) < 0.03).sum()
    for name in drawn[True]:
        if name.endswith('.png'): assert red(drawn[True][name]) > 3000 > 100 > red(drawn[False][name]), name


def test_a_run_with_odd_shapes_is_drawn(tmp_path):
    "One epoch, one audit, colour images, no landmark on one side, equal scores of zero, an unmeasured value, an alarm."
    result = made_up(classes=('a class with quite a long name', 'b'))
    result['training']['history'] = [{**result['training']['history'][0], 'effective_rank_covariance': 2.0, 'stationarity': None}]
    result['training']['collapse'] = {'alarm': True, 'reason': 'effective rank 1.1 is below 2'}
    result['audits'] = result['audits'][:1]
    for e in result['audits'][0]['examples']:
        e['image'], e['repelling'] = png(0, 3), []
        for l in e['attracting']: l['score'] = 0.0
    draw(written(tmp_path, result))
    text = (tmp_path/'report.html').read_text()
    assert 'effective rank 1.1 is below 2' in text and 'Collapse alarm' in text and 'a class with quite a long name' in text


# ---- honest panels ---------------------------------------------------------------------------------------------------
def test_bars_begin_at_zero_and_are_as_long_as_their_numbers():
    values = [(0.981, 0.004), (0.975, 0.003)]
    axes = axes_of(draw_bars, ['a', 'b'], {'one': ('red', values)})
    assert axes.get_xlim()[0] == 0 and [p.get_width() for p in axes.patches] == [0.981, 0.975] and all(p.get_x() == 0 for p in axes.patches)
    assert [t.get_text() for t in axes.texts] == ['0.981', '0.975']
    segments = axes.collections[0].get_segments()  # the error bars
    assert [(s[0, 0], s[1, 0]) for s in segments] == [pytest.approx((v - e, v + e)) for v, e in values]
    negative = axes_of(draw_bars, ['a'], {'one': ('red', [(-0.2, 0.1)])})
    assert negative.get_xlim()[0] <= -0.3 and negative.texts[0].get_text() == '−0.200'
    assert axes_of(draw_bars, ['a'], {'one': ('red', [(0.0, 0.0)])}).get_xlim() == (0, 1)


def test_probes_show_chance_and_coverage_shows_what_a_random_order_needs():
    axes = axes_of(draw_probes, made_up()['probes'], 4)
    assert axes.collections[-1].get_segments()[0][:, 0] == pytest.approx([0.25, 0.25])
    assert {t.get_text() for t in axes.get_legend().get_texts()} == {'kNN', 'linear', 'chance'}
    axes = axes_of(draw_coverage, made_up()['audits'])
    assert [l.get_xdata()[0] for l in axes.lines] == [5.5, 5.5] and [p.get_width() for p in axes.patches] == [4, 4] and 'p = 0.4' in axes.texts[0].get_text()


def test_curves_are_the_history_with_gaps_where_nothing_was_measured():
    training = made_up()['training']
    training['history'][1]['energy'] = None
    assert np.array_equal(axes_of(draw_energy, training).lines[0].get_ydata(), [-1, math.nan, -3, -4], equal_nan=True)
    ranks = axes_of(draw_rank, training)
    assert [list(l.get_ydata()) for l in ranks.lines] == [[4, 5, 6, 7], [3, 4, 5, 6]] and ranks.get_ylim()[0] == 0
    training['history'][-1]['correlations'] = [0.2, 0.8, 0.4]
    spectrum = axes_of(draw_spectrum, training)
    measured, bound, floor = (list(l.get_ydata()) for l in spectrum.lines)
    assert [p.get_height() for p in spectrum.patches] == [0.9, 0.5, 0.1, 0.01]
    assert measured == [0.8, 0.4, 0.2] and bound == [1, 1] and floor == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize('score, power', [(0.05, -2), (0.5, 0), (1.0, 0), (99.0, 0), (5000.0, 3), (-2e-7, -7), (0.0, 0)])
def test_one_power_of_ten_is_taken_out_of_all_scores(score, power):
    examples = [{'label': 'a', 'image': png(0), 'attracting': [], 'repelling': [{'label': 'a', 'score': score, 'image': png(1)}]}]
    assert scale_of(examples) == power
    figure = Figure(figsize=(7, 2))
    draw_strips(figure, examples, power)
    words = [t.get_text() for t in figure.axes[0].texts]
    shown = float(words[-1].replace('−', '-'))
    assert shown*10.0**power == pytest.approx(score, abs=0.006*10.0**power)
    header = next(w for w in words if 'attract' in w)
    assert ('scores in 10' in header) == (power != 0) and ('10⁻⁷' in header) == (power == -7)
    assert 'none' in words


def test_an_image_that_is_not_square_keeps_its_shape():
    imsave(buffer := io.BytesIO(), np.zeros((4, 8)), format='png', cmap='gray')
    axes = Figure(figsize=(7, 2)).subplots()
    draw_image(axes, {'label': 'wide', 'image': base64.b64encode(buffer.getvalue()).decode()}, 1.0, 0.5)
    left, right, bottom, top = axes.images[0].get_extent()
    assert right - left == pytest.approx(2*(bottom - top)) == pytest.approx(pictures.CELL) and (bottom + top)/2 == pytest.approx(0.5 + pictures.CELL/2)


def test_only_landmarks_of_the_test_images_class_are_bold():
    example = made_up()['audits'][0]['examples'][0]
    figure = Figure(figsize=(7, 2))
    draw_strips(figure, [example], 0)
    labels = [t for t in figure.axes[0].texts if t.get_text() in ('left', 'right', NASTY[:11] + '…')]
    assert [t.get_weight() == 'bold' for t in labels] == [True] + [l['label'] == example['label'] for l in example['attracting']]
    assert len(figure.axes[0].images) == 6


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('place', QUICKSTART)
def test_a_missing_key_is_named_before_anything_is_drawn(tmp_path, place):
    result = made_up()
    *above, key = place.replace('[]', '').split('.')
    at, where = result, ''
    for name in above:
        at, where = at[name], f'{where}{name}'
        if isinstance(at, list): at, where = at[-1], f'{where}[{len(at) - 1}]'
        where += '.'
    del at[key]
    with pytest.raises(ValueError, match=re.escape(f"no '{where}{key}'")): draw(written(tmp_path, result))
    assert [p.name for p in tmp_path.iterdir()] == ['result.json']


def test_lists_that_must_not_be_empty_or_something_else():
    with pytest.raises(ValueError, match="'a' is empty"): demand({'a': []}, 'a[].b')
    with pytest.raises(ValueError, match="'a' must be a list; got int"): demand({'a': 3}, 'a[].b')
    with pytest.raises(ValueError, match=r"no 'a\[1\].b.c'"): demand({'a': [{'b': {'c': 1}}, {'b': 5}]}, 'a[].b.c')


def test_other_refusals_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match='run the experiment first'): draw(tmp_path)
    with pytest.raises(ValueError, match="'quikstart'; known: quickstart"): draw(written(tmp_path, {**made_up(), 'experiment': 'quikstart'}))
    broken = made_up()
    del broken['provenance']['seconds']
    with pytest.raises(ValueError, match='provenance.seconds'): draw(written(tmp_path, broken))


# ---- the page --------------------------------------------------------------------------------------------------------
class Page(HTMLParser):
    "Collects tags, their attributes, and text; fails on tags that do not nest."
    VOID = {'meta', 'img', 'br', 'link', 'hr', 'input'}

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], '', []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID: self.open.append(tag)

    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.text += data
    def named(self, tag): return [attrs for t, attrs in self.tags if t == tag]


def test_the_page_parses_and_fetches_nothing(drawn):
    text = drawn[False]['report.html'].decode()
    parsed = Page(text)
    assert parsed.open == [] and text.startswith('<!DOCTYPE html>') and parsed.named('html')[0]['lang'] == 'en'
    for tag, attrs in parsed.tags:
        for name in ('src', 'href', 'srcset', 'action', 'data', 'poster'):
            if name in attrs: assert attrs[name].startswith('data:image/png;base64,' if name == 'src' else '#'), (tag, name)
    assert not {'script', 'link', 'iframe', 'object', 'embed'} & {tag for tag, _ in parsed.tags}
    assert '://' not in text and 'url(' not in text and '@import' not in text
    assert {a['href'][1:] for a in parsed.named('a')} == {s['id'] for s in parsed.named('section')}


def test_the_page_holds_every_picture_with_words_for_it(drawn):
    images = Page(drawn[False]['report.html'].decode()).named('img')
    held = {base64.b64decode(i['src'].split(',')[1]) for i in images}
    assert held == {content for name, content in drawn[False].items() if name.endswith('.png')}
    assert all(len(i['alt']) > 60 for i in images)
    assert any('Energy from −1 to −4;' in i['alt'] for i in images)


def test_names_from_outside_are_text_and_never_marks(drawn):
    text = drawn[False]['report.html'].decode()
    assert '<script' not in text and NASTY in Page(text).text
    assert 'A finding with <b>marks</b> & signs.' in Page(text).text


def test_the_page_says_where_the_result_comes_from_and_what_it_is(drawn):
    full, smoke = (Page(drawn[s]['report.html'].decode()).text for s in (False, True))
    for words in ('c0ffee'*6, 'with uncommitted changes', 'f'*64, '0, 1', 'A processor', '9.9', '12.5', '2026-01-02', 'peira-run nbs/experiments/quickstart.ipynb out.ipynb',
                  '0.800 ± 0.020', '0.300 ± 0.020', '−0.010 ± 0.010', '4, random order 5.50, p = 0.4'): assert words in full, words
    assert pictures.SMOKE in smoke and pictures.SMOKE not in full


def test_the_page_knows_no_commit_and_refuses_a_gap(drawn):
    result = copy.deepcopy(made_up())
    result['provenance'].update(commit=None, dirty=None)
    alt = {name: ('words', b'') for name in drawn[False] if name.endswith('.png')}
    assert 'not from a checkout' in page(result, alt) and 'uncommitted' not in page(result, alt)
    del result['training']['epochs']
    with pytest.raises(Exception, match='epochs'): page(result, alt)
