"""Genuine-format data sets made of real images and rows, for the loaders' tests.

Images are patches of scikit-learn's two colour photographs and its digits, rows are its breast cancer and digits tables. Where a loader verifies MD5 sums, a
subclass under a name of its own carries the sums of our files: parsing and verification run as they are, and tampering fails. None of these is the data set its format comes from.
"""
import gzip
import hashlib
import json
import pickle
import struct
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torchvision import datasets

PHOTOS = load_sample_images().images
DIGITS = (load_digits().images/16*255).round().astype(np.uint8)
TARGETS = load_digits().target


def save(pixels, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def patch(k, height=24, width=24):
    "The k-th patch of the two colour photographs."
    photo = PHOTOS[k % 2]
    top, left = 17*k % (photo.shape[0] - height), 29*k % (photo.shape[1] - width)
    return photo[top:top + height, left:left + width]


def md5(path): return hashlib.md5(path.read_bytes()).hexdigest()


# ---- idx files: MNIST and its relatives -----------------------------------------------------------------------------------------
def upscaled(k): return np.asarray(Image.fromarray(DIGITS[k]).resize((28, 28), Image.Resampling.BILINEAR))


IMAGES = {'train': np.stack([upscaled(k) for k in range(60)]), 'test': np.stack([upscaled(k) for k in range(60, 80)])}
LABELS = {'train': TARGETS[:60].astype(np.uint8), 'test': TARGETS[60:80].astype(np.uint8)}


def write_idx(folder, suffix=''):
    "The four files in the layout of MNIST and its relatives, made of digits enlarged to 28x28."
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in (('train', 'train'), ('test', 't10k')):
        for kind, array in (('images-idx3', IMAGES[split]), ('labels-idx1', LABELS[split])):
            data = struct.pack('>HBB', 0, 8, array.ndim) + struct.pack(f'>{array.ndim}I', *array.shape) + array.tobytes()
            (folder/f'{stem}-{kind}-ubyte{suffix}').write_bytes(gzip.compress(data) if suffix else data)


# ---- CIFAR ---------------------------------------------------------------------------------------------------------------------
class CIFAR10Fixture(datasets.CIFAR10):
    "CIFAR-10's format and integrity check on files of our own, hence with their own MD5 sums. Not CIFAR-10."
    train_list, test_list, meta = [], [], None


class CIFAR100Fixture(datasets.CIFAR100):
    "CIFAR-100's format and integrity check on files of our own, hence with their own MD5 sums. Not CIFAR-100."
    train_list, test_list, meta = [], [], None


def write_cifar(root, kind, monkeypatch):
    "Pickled batches of patches for `kind`; the pixels of each file as (6,3072)."
    hundred = issubclass(kind, datasets.CIFAR100)
    folder, label = root/kind.base_folder, 'fine_labels' if hundred else 'labels'
    folder.mkdir(parents=True)
    def write(name, content):
        (folder/name).write_bytes(pickle.dumps(content))
        return [name, md5(folder/name)]
    names = ('train', 'test') if hundred else ('data_batch_1', 'data_batch_2', 'test_batch')
    pixels = {name: np.stack([patch(k + s, 32, 32).transpose(2, 0, 1).ravel() for k in range(6)]) for s, name in enumerate(names)}
    entries = [write(name, {'data': x, label: [k % 2 for k in range(6)]}) for name, x in pixels.items()]
    key = 'fine_label_names' if hundred else 'label_names'
    name, digest = write('meta' if hundred else 'batches.meta', {key: ['temple', 'flower']})
    monkeypatch.setattr(kind, 'train_list', entries[:-1])
    monkeypatch.setattr(kind, 'test_list', entries[-1:])
    monkeypatch.setattr(kind, 'meta', {'filename': name, 'key': key, 'md5': digest})
    return pixels


# ---- STL-10 --------------------------------------------------------------------------------------------------------------------
class STL10Fixture(datasets.STL10):
    "STL-10's format and integrity check on files of our own, hence with their own MD5 sums. Not STL-10."
    train_list, test_list = [], []


def write_stl10(root, monkeypatch):
    "Binary files of 96x96 patches, stored column by column with labels from 1; the patches of each split (n,96,96,3)."
    folder = root/STL10Fixture.base_folder
    folder.mkdir(parents=True)
    patches = {split: np.stack([patch(k + s, 96, 96) for k in range(n)]) for s, (split, n) in enumerate((('train', 6), ('test', 4), ('unlabeled', 5)))}
    sums = {}
    def write(name, array):
        (folder/name).write_bytes(array.astype(np.uint8).tobytes())
        sums[name] = [name, md5(folder/name)]
    for split, x in patches.items(): write(f'{split}_X.bin', x.transpose(0, 3, 2, 1))
    for split in ('train', 'test'): write(f'{split}_y.bin', np.arange(len(patches[split])) % 2 + 1)
    (folder/'class_names.txt').write_text('temple\nflower\n')
    monkeypatch.setattr(STL10Fixture, 'train_list', [sums['train_X.bin'], sums['train_y.bin'], sums['unlabeled_X.bin']])
    monkeypatch.setattr(STL10Fixture, 'test_list', [sums['test_X.bin'], sums['test_y.bin']])
    return patches


# ---- ImageNet ------------------------------------------------------------------------------------------------------------------
CRANES = {'n02012849': ('crane',), 'n02017213': ('European gallinule', 'Porphyrio porphyrio'), 'n03126707': ('crane',)}


def write_imagenet(root, count=4):
    "Extracted ImageNet as torchvision leaves it: meta.bin, train/ and val/, JPEG files of different shapes, three of its classes."
    for split, start in (('train', 0), ('val', 50)):
        for c, number in enumerate(CRANES):
            for k in range(count):
                name = f'{number}_{k}.JPEG' if split == 'train' else f'ILSVRC2012_val_{1 + k*3 + c:08d}.JPEG'
                save(patch(start + 7*c + k, 60 + 5*k, 90 - 3*c), root/split/number/name, quality=90)
    torch.save((CRANES, [number for _ in range(count) for number in CRANES]), root/'meta.bin')


# ---- tables --------------------------------------------------------------------------------------------------------------------
def write_openml(home, frame, name, target, version=1, data_id=9001):
    "A data set in the cache of `fetch_openml` below `home`: four gzip files with the service's answers and the table as ARFF, its MD5 sum in the description."
    base = home/'openml'/'openml.org'
    def put(path, data):
        file = Path(f'{base}/{path}.gz')             # the listing's address ends with a slash, hence its file is called .gz
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(data if isinstance(data, bytes) else json.dumps(data).encode()))
        return file
    nominal = {c: sorted(frame[c].dropna().unique()) for c in frame if not pd.api.types.is_numeric_dtype(frame[c])}
    kinds = [f"@ATTRIBUTE {c} {'{' + ','.join(nominal[c]) + '}' if c in nominal else 'REAL'}" for c in frame]
    rows = [','.join('?' if pd.isna(v) else str(v) for v in row) for row in frame.itertuples(index=False)]
    arff = '\n'.join([f'@RELATION {name}', '', *kinds, '', '@DATA', *rows, '']).encode()
    listing = {'data': {'dataset': [{'did': data_id, 'name': name, 'version': version, 'status': 'active'}]}}
    put(f'api/v1/json/data/list/data_name/{name}/limit/2/status/active/', listing)
    put(f'api/v1/json/data/list/data_name/{name}/limit/2/data_version/{version}', listing)
    put(f'api/v1/json/data/{data_id}', {'data_set_description': {
        'id': str(data_id), 'name': name, 'version': str(version), 'format': 'ARFF', 'description': 'A fixture.', 'status': 'active', 'file_id': str(data_id), 'default_target_attribute': target,
        'url': f'https://www.openml.org/data/v1/download/{data_id}/{name}.arff', 'md5_checksum': hashlib.md5(arff).hexdigest()}})
    put(f'api/v1/json/data/features/{data_id}', {'data_features': {'feature': [
        {'index': str(i), 'name': c, 'data_type': 'nominal' if c in nominal else 'numeric', 'is_target': str(c == target).lower(), 'is_ignore': 'false', 'is_row_identifier': 'false',
         'number_of_missing_values': str(int(frame[c].isna().sum())), **({'nominal_value': nominal[c]} if c in nominal else {})} for i, c in enumerate(frame)]}})
    put(f'api/v1/json/data/qualities/{data_id}', {'data_qualities': {'quality': [{'name': 'NumberOfInstances', 'value': str(float(len(frame)))}]}})
    return put(f'data/v1/download/{data_id}/{name}.arff', arff)


def write_covtype(home, count=300):
    "The cache of `fetch_covtype` below `home`: 54 columns and targets 1 to 7, here pixels and labels of digits. Not CoverType."
    x, y = load_digits(return_X_y=True)
    folder = home/'covertype'
    folder.mkdir(parents=True)
    x, y = x[y < 7][:count, 5:59], (y[y < 7][:count] + 1).astype(np.int32)
    joblib.dump(x, folder/'samples_py3', compress=9)
    joblib.dump(y, folder/'targets_py3', compress=9)
    return x, y
