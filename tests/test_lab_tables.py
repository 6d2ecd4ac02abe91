"lab.columns and lab.tables: against a loop over cells, every source against the frame it was written from, and what is refused."
import dataclasses
import gzip
import hashlib
import pickle
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from lab_fixtures import write_covtype, write_openml
from oracles import encoded_table
from sklearn.datasets import fetch_covtype, fetch_openml, load_breast_cancer

from peira_krepes.lab import tables as module
from peira_krepes.lab.columns import ColumnEncoder, category_text
from peira_krepes.lab.tables import TableData, load_table, read_table

CANCER = load_breast_cancer(as_frame=True).frame


def mixed(n=200, seed=0):
    "Real measurements with gaps, a constant, words, a code, a truth value and a label."
    r = np.random.RandomState(seed)
    f = CANCER.iloc[r.permutation(len(CANCER))[:n]].reset_index(drop=True)
    f = f[['mean texture', 'mean area', 'mean smoothness', 'target']].rename(columns={'mean texture': 'texture', 'mean area': 'area', 'mean smoothness': 'smoothness'})
    f.loc[r.rand(n) < 0.1, 'texture'] = np.nan
    f['flat'] = 7
    f['code'] = r.choice([1, 2, 30], n)
    f['word'] = pd.Series(r.choice(['a', 'b', 'c', 'd', 'e'], n, p=[0.4, 0.3, 0.2, 0.06, 0.04])).where(r.rand(n) > 0.15)
    f['big'] = f['area'] > 600
    f['label'] = f.pop('target').map({0: 'malignant', 1: 'benign'})
    return f


def cells(frame): return [[None if pd.isna(v) else v for v in row] for row in frame.itertuples(index=False)]


# ---- the encoder -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('most', [3, 4, 64])
def test_encoding_equals_the_loop_over_cells(most):
    frame = mixed().drop(columns='label')
    train, test = frame[:150], frame[150:].assign(word=lambda f: f['word'].where(f.index != 160, 'unseen'))
    encoder = ColumnEncoder(['code'], max_categories=most).fit(train)
    words = [list(frame).index(c) for c in ('code', 'word', 'big')]
    for part in (train, test):
        wanted = torch.tensor(encoded_table(cells(train), cells(part), words, most), dtype=torch.float64)
        assert encoder.transform(part).dtype == torch.float32 and (encoder.transform(part) - wanted).abs().max() < 1e-4
    row = encoder.transform(test)[10]
    assert (row[encoder.groups == list(frame).index('word')] == 0).all()                     # a category that training did not have


def test_groups_and_names_describe_the_columns():
    encoder = ColumnEncoder(['code'], max_categories=4).fit(mixed().drop(columns='label'))
    assert encoder.features == ('texture', 'area', 'smoothness', 'flat', 'code', 'word', 'big')
    assert encoder.columns == ('texture', 'texture is missing', 'area', 'smoothness', 'flat', 'code=1', 'code=2', 'code=30', 'word=(missing)', 'word=a', 'word=b', 'word=(rare)', 'big=False', 'big=True') or \
        encoder.columns[8:12] == ('word=a', 'word=b', 'word=c', 'word=(rare)')
    assert encoder.groups.tolist() == [0, 0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6] and encoder.groups.dtype == torch.int64


def test_statistics_are_of_the_fitted_rows_and_constant_columns_stay_finite():
    frame = mixed().drop(columns='label')
    encoder = ColumnEncoder().fit(frame[:100])
    values = encoder.transform(frame[:100])
    number = torch.tensor([c in ('texture', 'area', 'smoothness') for c in encoder.columns])
    assert values[:, number].mean(0).abs().max() < 1e-5 and (values[:, number].std(0, correction=0) - 1).abs().max() < 1e-4
    assert (values[:, encoder.columns.index('flat')] == 0).all()
    assert torch.equal(encoder.transform(frame)[:100], values) and torch.equal(encoder.transform(frame[:1])[0], values[0])
    huge = ColumnEncoder().fit(pd.DataFrame({'x': [1e9 + 0.25]*10, 'y': [1e-30]*10}))
    assert (huge.transform(pd.DataFrame({'x': [1e9 + 0.25], 'y': [1e-30]})) == 0).all()


def test_a_column_without_any_value_and_one_that_gets_its_first_gap_later():
    train = pd.DataFrame({'empty': [np.nan]*4, 'full': [1.0, 2, 3, 6]})
    encoder = ColumnEncoder().fit(train)
    assert encoder.columns == ('empty', 'empty is missing', 'full')
    out = encoder.transform(pd.DataFrame({'empty': [5.0, np.nan], 'full': [np.nan, 2.5]}))
    assert out.isfinite().all() and out[0, 2] == out[1, 2]                                     # the median, 2.5
    assert out[:, 1].tolist() == [0, 1]


@pytest.mark.parametrize('kind', ['object', 'category', 'string', 'str'])
def test_words_of_every_pandas_type_encode_alike(kind):
    frame = mixed()[['area', 'word']]
    reference = ColumnEncoder().fit(frame)
    other = frame.astype({'word': kind})
    encoder = ColumnEncoder().fit(other)
    assert encoder.columns == reference.columns and torch.equal(encoder.transform(other), reference.transform(frame))


@pytest.mark.parametrize('kind', ['float32', 'Int64', 'Float64', 'int8', 'uint16'])
def test_numbers_of_every_pandas_type_encode_alike(kind):
    frame = pd.DataFrame({'x': [1, 5, 2, 7, 100]})
    plain, other = ColumnEncoder().fit(frame), ColumnEncoder().fit(frame.astype(kind))
    assert torch.equal(plain.transform(frame), other.transform(frame.astype(kind)))
    if kind[0] in 'IF':
        gaps = pd.DataFrame({'x': pd.array([1, None, 2, 7, 100], dtype=kind)})
        assert ColumnEncoder().fit(gaps).transform(gaps)[:, 1].tolist() == [0, 1, 0, 0, 0]


def test_a_code_stays_the_same_category_when_pandas_makes_it_a_float():
    assert category_text(pd.Series([3, 4])).tolist() == category_text(pd.Series([3.0, 4.0, None]))[:2].tolist() == ['3', '4']
    assert category_text(pd.Series([0.5, 3.0, np.nan])).tolist() == ['0.5', '3', '(missing)'] and category_text(pd.Series([True, None], dtype=object)).tolist() == ['True', '(missing)']
    encoder = ColumnEncoder(['c']).fit(pd.DataFrame({'c': [1, 2, 2]}))
    assert encoder.transform(pd.DataFrame({'c': [2.0, np.nan]})).tolist() == [[0, 1], [0, 0]]


def test_the_encoder_can_be_stored_and_leaves_the_frame_alone():
    frame = mixed().drop(columns='label')
    copy = frame.copy()
    encoder = ColumnEncoder(['code']).fit(frame)
    values = encoder.transform(frame)
    pd.testing.assert_frame_equal(frame, copy)
    again = pickle.loads(pickle.dumps(encoder))
    assert torch.equal(again.transform(frame), values) and again.columns == encoder.columns
    assert torch.equal(encoder.transform(frame[list(frame)[::-1]].assign(more=1)), values)     # order does not matter, further columns neither


@pytest.mark.parametrize('error, match, change', [
    (ValueError, r"lacks the columns \['area'\]", lambda f: f.drop(columns='area')), (ValueError, "'area' was numeric in the training rows", lambda f: f.assign(area='large')),
    (ValueError, "'area' holds infinity in row 0", lambda f: f.assign(area=np.inf))])
def test_rows_that_do_not_fit_name_the_column(error, match, change):
    encoder = ColumnEncoder().fit(mixed())
    with pytest.raises(error, match=match): encoder.transform(change(mixed()))


def test_columns_that_have_no_encoding_are_named():
    for value in (pd.Timestamp('2020-01-01'), pd.Timedelta('1D'), 1j):
        with pytest.raises(TypeError, match="column 'when' has type .* leave it out"): ColumnEncoder().fit(pd.DataFrame({'when': [value]*3}))
    with pytest.raises(ValueError, match=r"categorical names \['planet'\]"): ColumnEncoder(['planet']).fit(mixed())
    with pytest.raises(ValueError, match='max_categories'): ColumnEncoder(max_categories=1)


def test_an_encoding_larger_than_memory_is_refused_with_its_bytes(monkeypatch):
    encoder = ColumnEncoder().fit(mixed())
    monkeypatch.setattr('os.sysconf', lambda name: 100)
    with pytest.raises(ValueError, match=rf'200 rows of {len(encoder.columns)} encoded columns take [\d,]+ bytes, more than half .* 10,000'): encoder.transform(mixed())


# ---- load_table ------------------------------------------------------------------------------------------------------
def test_both_splits_share_columns_classes_and_statistics():
    frame = mixed()
    train, test = (load_table(frame, 'label', split) for split in ('train', 'test'))
    assert sorted([*train.table.index, *test.table.index]) == list(range(200)) and len(test) == 40
    assert train.columns == test.columns and train.classes == test.classes == ('benign', 'malignant')
    for data in (train, test):
        assert [data.classes[y] for y in data.labels] == frame.loc[data.table.index, 'label'].tolist()
        assert torch.equal(data.values, ColumnEncoder().fit(frame.loc[train.table.index].drop(columns='label')).transform(data.table))
    shares = test.labels.bincount()*200/40 - torch.tensor(frame['label'].value_counts()[['benign', 'malignant']].tolist())
    assert shares.abs().max() <= 5 and not any(c.startswith('label') for c in train.columns)


def test_split_fraction_seed_and_limit():
    frame = mixed()
    assert len(load_table(frame, 'label', 'test', test_fraction=0.5)) == 100
    checks = {load_table(frame, 'label', seed=s).checksum for s in (0, 1)} | {load_table(frame, 'label').checksum}
    assert len(checks) == 2
    whole, part = load_table(frame, 'label'), load_table(frame, 'label', limit=30)
    assert len(part) == 30 and set(part.table.index) < set(whole.table.index) and part.columns == whole.columns
    rows = [list(whole.table.index).index(i) for i in part.table.index]
    assert torch.equal(part.values, whole.values[rows]) and part.checksum == whole.subset(rows).checksum != whole.checksum
    with pytest.raises(ValueError, match='limit must be between 1 and 160; got 161'): load_table(frame, 'label', limit=161)


def test_a_test_source_of_its_own():
    first, second = mixed(100, 1), mixed(50, 2)
    train, test = load_table(first, 'label', test=second), load_table(first, 'label', 'test', test=second)
    assert (len(train), len(test)) == (100, 50)
    assert torch.equal(test.values, train.encoder.transform(second)) and [test.classes[y] for y in test.labels] == second['label'].tolist()
    with pytest.raises(ValueError, match=r"same columns; only one of them has \['flat'\]"): load_table(first, 'label', test=second.drop(columns='flat'))


def test_columns_left_out_stay_in_the_raw_table():
    data = load_table(mixed(), 'label', leave_out=['word', 'code'])
    assert data.encoder.features == ('texture', 'area', 'smoothness', 'flat', 'big') and {'word', 'code', 'label'} <= set(data.table)
    assert load_table(mixed(), 'label', leave_out='word').columns == load_table(mixed().drop(columns='word'), 'label').columns
    assert load_table(mixed(), 'label', categorical=['code']).columns != load_table(mixed(), 'label').columns
    assert data.missing == {'texture': int(data.table['texture'].isna().sum())} and data.missing['texture'] > 0


def test_without_a_target_there_is_one_class_and_every_column_is_encoded():
    data = load_table(mixed())
    assert data.classes == ('unlabeled',) and (data.labels == 0).all() and 'label=benign' in data.columns and len(data) == 160


def test_numeric_targets_become_classes_in_numeric_order():
    data = load_table(mixed().assign(label=lambda f: f['label'].map({'benign': 10, 'malignant': 9.0})), 'label')
    assert data.classes == ('9', '10')


@pytest.mark.parametrize('error, match, change', [
    (ValueError, r"no column \['planet'\]; it has \['texture'", dict(target='planet')), (ValueError, r"no column \['x', 'y'\]", dict(leave_out=['y', 'x'])),
    (ValueError, "target 'texture' is missing in [0-9]+ rows", dict(target='texture')), (ValueError, "class '[0-9.]+' has one row", dict(target='area')),
    (ValueError, 'test_fraction', dict(test_fraction=0)), (ValueError, 'test_fraction', dict(test_fraction=1)), (ValueError, 'split', dict(split='val')),
    (ValueError, 'no column left to encode', dict(leave_out=[c for c in mixed() if c != 'label']))])
def test_load_table_refuses(error, match, change):
    with pytest.raises(error, match=match): load_table(**{'source': mixed(), 'target': 'label', **change})


# ---- sources -----------------------------------------------------------------------------------------------------------
def test_the_embedded_table_is_scikit_learns():
    train, test = load_table('breast_cancer'), load_table('breast_cancer', split='test')
    pd.testing.assert_frame_equal(pd.concat([train.table, test.table]).sort_index(), CANCER)
    assert (train.name, train.split, train.classes, train.sample_shape) == ('breast_cancer', 'train', ('0', '1'), (30,))


@pytest.mark.parametrize('ending', ['csv', 'csv.gz', 'csv.zip', 'tsv', 'CSV.txt'])
def test_text_files(tmp_path, ending):
    frame, path = mixed(), tmp_path/f'cells.{ending}'
    if ending == 'CSV.txt':
        path.write_text('a,b\n1,2\n')
        with pytest.raises(ValueError, match='must end in .csv, .tsv or .parquet'): load_table(path)
        return
    frame.to_csv(path, index=False, sep='\t' if ending == 'tsv' else ',')
    got = load_table(str(path), 'label')
    assert got.name == 'cells' and got.columns == load_table(frame, 'label').columns and torch.allclose(got.values, load_table(frame, 'label').values, atol=1e-6)


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='no such file: .*none.csv'): load_table(tmp_path/'none.csv')
    for name, content in (('ragged.csv', b'a,b\n1,2\n1,2,3\n'), ('empty.csv', b''), ('cut.csv.gz', gzip.compress(b'a,b\n1,2\n')[:-9]), ('bytes.csv', b'a\n\xff\xfe\n')):
        (tmp_path/name).write_bytes(content)
        with pytest.raises(ValueError, match=f'{name} cannot be read as CSV (?s:.*)Repair'): load_table(tmp_path/name)
    (tmp_path/'head.csv').write_text('a,b\n')
    with pytest.raises(ValueError, match='head has no rows'): load_table(tmp_path/'head.csv')
    with pytest.raises(ValueError, match="unique; 'a' comes twice"): read_table(pd.DataFrame([[1, 2]], columns=['a', 'a']))


def test_parquet_files(tmp_path):
    pytest.importorskip('pyarrow')
    frame = mixed()
    frame.to_parquet(tmp_path/'cells.parquet')
    assert load_table(tmp_path/'cells.parquet', 'label').checksum == load_table(frame, 'label').checksum
    (tmp_path/'bad.parquet').write_bytes(b'PAR1 not really')
    with pytest.raises(ValueError, match='bad.parquet cannot be read as PARQUET'): load_table(tmp_path/'bad.parquet')


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    for engine in ('pyarrow', 'fastparquet'): monkeypatch.setitem(sys.modules, engine, None)
    (tmp_path/'cells.parquet').write_bytes(b'PAR1')
    with pytest.raises(ImportError, match='cells.parquet needs pyarrow: pip install pyarrow. Or save the table as CSV'): load_table(tmp_path/'cells.parquet')


@pytest.fixture
def openml_frame(): return mixed().drop(columns='big').rename(columns={'label': 'diagnosis'})


def test_openml_cache_is_read_by_scikit_learn(tmp_path, openml_frame):
    write_openml(tmp_path, openml_frame, 'cells', 'diagnosis')
    data = load_table('openml:cells', root=tmp_path)
    theirs = fetch_openml('cells', version=1, data_home=tmp_path, as_frame=True).frame
    assert data.classes == ('benign', 'malignant') and data.name == 'cells'
    pd.testing.assert_frame_equal(data.table, theirs.loc[data.table.index])
    assert torch.allclose(data.values, load_table(openml_frame, 'diagnosis').values, atol=1e-6) and data.columns == load_table(openml_frame, 'diagnosis').columns
    assert load_table('openml:cells@1', 'code', root=tmp_path).classes == ('1', '2', '30')
    assert load_table('openml:cells@1', root=tmp_path).checksum == data.checksum == load_table('openml:CELLS', root=tmp_path).checksum


def test_an_openml_table_that_was_tampered_with_fails(tmp_path, openml_frame, monkeypatch):
    "The genuine MD5 check runs; scikit-learn then drops the file and asks the network, which is cut here."
    arff = write_openml(tmp_path, openml_frame, 'cells', 'diagnosis')
    arff.write_bytes(gzip.compress(gzip.decompress(arff.read_bytes()).replace(b'malignant', b'malignanT')))
    def cut(*args, **kwargs): raise module.URLError('no network')
    monkeypatch.setattr('sklearn.datasets._openml.urlopen', cut)
    with pytest.warns(RuntimeWarning, match='Invalid cache'), pytest.raises(FileNotFoundError, match='not, or not intact'): load_table('openml:cells', root=tmp_path)
    assert not arff.exists()


def test_absent_openml_data_is_not_asked_for_over_the_network(tmp_path, openml_frame, monkeypatch):
    def fail(*args, **kwargs): raise AssertionError('went to the network')
    monkeypatch.setattr('sklearn.datasets._openml.urlopen', fail)
    write_openml(tmp_path, openml_frame, 'cells', 'diagnosis')
    for name in ('adult', 'adult@2', 'cells@2'):
        with pytest.raises(FileNotFoundError) as e: load_table(f'openml:{name}', root=tmp_path)
        for part in (f'openml:{name}', str(tmp_path), f"fetch_openml('{name.split('@')[0]}', version=", 'PEIRA_KREPES_DATA', '"breast_cancer"'): assert part in str(e.value)


def test_covtype_cache_is_read_by_scikit_learn(tmp_path):
    x, y = write_covtype(tmp_path)
    data = load_table('covtype', root=tmp_path)
    theirs = fetch_covtype(data_home=tmp_path, download_if_missing=False, as_frame=True).frame
    assert len(data) == 240 and data.classes == tuple('1234567') and len(data.encoder.features) == 54 and data.columns[0] == 'Elevation'
    pd.testing.assert_frame_equal(data.table, theirs.loc[data.table.index])
    assert np.array_equal(data.table.drop(columns='Cover_Type').to_numpy(), x[data.table.index]) and [int(data.classes[k]) for k in data.labels] == y[data.table.index].tolist()
    with pytest.raises(FileNotFoundError, match="covtype is not, or not intact.*fetch_covtype.data_home="): load_table('covtype', root=tmp_path/'none')


def test_the_folder_of_the_cache(tmp_path, monkeypatch):
    write_covtype(tmp_path/'a'); write_covtype(tmp_path/'b', 200)
    monkeypatch.setenv('SCIKIT_LEARN_DATA', str(tmp_path/'a')); monkeypatch.delenv('PEIRA_KREPES_DATA', raising=False)
    assert len(load_table('covtype')) == 240
    monkeypatch.setenv('PEIRA_KREPES_DATA', str(tmp_path/'b'))
    assert len(load_table('covtype')) == 160


# ---- TableData ---------------------------------------------------------------------------------------------------------
def plain(n=6): return TableData(torch.randn(n, 3, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 2, ('a', 'b'), 'noise', 'train')


def test_checksum_is_sha256_of_values_then_labels():
    data = load_table(mixed(), 'label')
    assert data.checksum == hashlib.sha256(data.values.numpy().tobytes() + data.labels.numpy().tobytes()).hexdigest()
    assert dataclasses.replace(data, values=data.values.T.contiguous().T).checksum == data.checksum != dataclasses.replace(data, values=data.values*2).checksum


def test_values_without_an_encoder_stand_for_themselves():
    data = plain()
    assert data.groups.tolist() == [0, 1, 2] and data.columns == ('x0', 'x1', 'x2') and data.missing == {} and data.table is None and (len(data), data.sample_shape) == (6, (3,))
    assert repr(data) == f'TableData(noise/train: 6 rows, 3 encoded columns, 2 classes, sha256 {data.checksum[:12]})'


def test_batches_and_subset():
    data = load_table(mixed(), 'label')
    for r, x in zip([[5, 5], torch.tensor([0])], data.batches([[5, 5], torch.tensor([0])], workers=2)): assert torch.equal(x, data.values[r])
    with pytest.raises(ValueError, match=r'rows\[0\]'): data.batches([[160]])
    part = data.subset([9, 4])
    assert torch.equal(part.values, data.values[[9, 4]]) and part.table.index.tolist() == data.table.index[[9, 4]].tolist() and part.columns == data.columns
    with pytest.raises(ValueError, match='indices'): data.subset([160])


@pytest.mark.parametrize('error, match, change', [
    (TypeError, 'values must be a float32 tensor; got torch.float64', dict(values=torch.zeros(6, 3).double())), (TypeError, 'float32', dict(values=np.zeros((6, 3), np.float32))),
    (ValueError, 'values must be finite', dict(values=torch.full((6, 3), float('nan')))), (ValueError, r'values must have shape \(n, d\)', dict(values=torch.zeros(6))),
    (TypeError, 'int64', dict(labels=torch.zeros(6))), (ValueError, r'labels must have shape \(6,\)', dict(labels=torch.zeros(5).long())),
    (ValueError, 'positions in the 1 classes', dict(classes=('a',))), (ValueError, 'table must have one row for each of the 6', dict(table=pd.DataFrame({'a': [1]}))),
    (ValueError, r'\(n, 2\)', dict(encoder=ColumnEncoder().fit(pd.DataFrame({'a': [1, 2], 'b': [3, 4]}))))])
def test_table_data_refuses(error, match, change):
    with pytest.raises(error, match=match): dataclasses.replace(plain(), **change)

@pytest.mark.parametrize("frame, options, error, message", [
    ({"a": [[1], [2]] * 9}, {}, TypeError, "column 'a'"), ({"a": [1e308, 1.0] * 9}, {}, ValueError, "column 'a'"), ({"a": [1.0, 2.0] * 9}, {"target": ["a"]}, TypeError, "target must"), (3, {}, TypeError, "source must")])
def test_columns_and_sources_of_no_use_are_named(frame, options, error, message):
    with pytest.raises(error, match=message): load_table(pd.DataFrame(frame) if isinstance(frame, dict) else frame, **options)

def test_a_file_separated_by_another_sign_is_refused(tmp_path):
    (tmp_path/"semi.csv").write_text("a;b\n" + "1;2\n" * 9)
    with pytest.raises(ValueError, match="sep=';'"): load_table(tmp_path/"semi.csv")

def test_columns_named_by_numbers_can_be_targets():
    assert load_table(pd.DataFrame({0: range(8), 1: [0, 1] * 4}), target=1).columns == ("0",)
