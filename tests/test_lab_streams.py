"lab.streams: the same pixels for any number of workers, in the caller's order, and the checksum of names."
import dataclasses
import hashlib
import pickle
import shutil

import numpy as np
import pytest
import torch
from lab_fixtures import patch, save
from PIL import Image, ImageOps

from peira_krepes.lab.data import load_images
from peira_krepes.lab.streams import ImageStream, _Files


@pytest.fixture
def folder(tmp_path):
    "Two classes of JPEG and PNG files of different shapes, and a grey one."
    for k in range(20): save(patch(k, 40 + k, 50 - k), tmp_path/'photos'/'ab'[k % 2]/f'{k:02d}.{("jpg", "png")[k % 3 == 0]}')
    save(patch(3)[:, :, 0], tmp_path/'photos'/'a'/'grey.png')
    return tmp_path/'photos'


def stream_of(folder, channels=3, size=16):
    paths = sorted(p for p in folder.rglob('*.*') if p.is_file())
    return ImageStream(paths, torch.tensor([int(p.parent.name == 'b') for p in paths]), ('a', 'b'), folder.name, 'train', channels, size)


@pytest.mark.parametrize('workers', [0, 1, 2])
def test_batches_are_pillows_pixels_in_the_callers_order(folder, workers):
    stream = stream_of(folder)
    rows = [torch.tensor([20, 3, 3]), [0], np.arange(5, 12), torch.arange(21)]
    got = list(stream.batches(rows, workers=workers))
    assert len(got) == 4 and all(x.dtype == torch.float32 for x in got)
    wanted = [ImageOps.fit(Image.open(p.decode()).convert('RGB'), (16, 16), Image.Resampling.BILINEAR) for p in stream.paths]
    wanted = torch.from_numpy(np.stack([np.asarray(x) for x in wanted])).permute(0, 3, 1, 2).float()/255
    for r, x in zip(rows, got): assert torch.equal(x, wanted[torch.as_tensor(r)])


def test_grey_streams_have_one_channel(folder):
    x = next(stream_of(folder, channels=1).batches([[0, 1]]))
    assert x.shape == (2, 1, 16, 16)


@pytest.mark.parametrize('workers', [0, 2])
def test_no_random_number_of_the_global_generator_is_used(folder, workers):
    before = torch.get_rng_state()
    list(stream_of(folder).batches(torch.arange(21).split(5), workers=workers))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize('workers', [0, 2])
def test_a_file_that_went_bad_is_named_and_the_others_are_still_read(folder, workers):
    stream = stream_of(folder)
    bad = folder/'b'/'05.jpg'
    bad.write_bytes(bad.read_bytes()[:300])
    row = [p.decode() for p in stream.paths].index(str(bad))
    with pytest.raises(ValueError, match='05.jpg cannot be decoded'): list(stream.batches([[0], [row]], workers=workers))
    assert len(list(stream.batches([[i for i in range(21) if i != row]], workers=workers))[0]) == 20


def test_rows_and_workers_are_checked_before_any_file_is_read(folder):
    stream = stream_of(folder)
    shutil.rmtree(folder)
    for error, match, wrong in ((ValueError, r'rows\[0\] must lie in 0..20; got 21', [[21]]), (ValueError, 'non-empty', [[]]), (TypeError, 'split', torch.arange(3))):
        with pytest.raises(error, match=match): stream.batches(wrong)
    with pytest.raises(ValueError, match='workers'): stream.batches([[0]], workers=-1)
    with pytest.raises(ValueError, match='cannot be decoded .FileNotFoundError'): list(stream.batches([[0]]))


def test_checksum_is_of_names_lengths_and_labels(folder, tmp_path):
    stream = stream_of(folder)
    text = '3 16\n' + ''.join(f'{y} {p.stat().st_size} {p.parent.name}/{p.name}\n' for p, y in zip(sorted(q for q in folder.rglob('*.*') if q.is_file()), stream.labels.tolist()))
    assert stream.checksum == hashlib.sha256(text.encode()).hexdigest()
    moved = shutil.copytree(folder, tmp_path/'elsewhere'/'copy')
    assert stream_of(moved).checksum == stream.checksum
    others = [stream_of(folder, channels=1), stream_of(folder, size=17), stream.subset(range(20)), stream.subset([1, 0, *range(2, 21)]), dataclasses.replace(stream, labels=1 - stream.labels)]
    save(patch(1, 60, 60), moved/'b'/'01.jpg')
    others.append(stream_of(moved))
    (folder/'b'/'01.jpg').rename(folder/'b'/'0x.jpg')
    others.append(stream_of(folder))
    assert len({stream.checksum, *(s.checksum for s in others)}) == 8


def test_subset_keeps_order_and_repr_is_short(folder):
    stream = stream_of(folder)
    part = stream.subset([7, 2])
    assert torch.equal(next(part.batches([[0, 1]])), next(stream.batches([[7, 2]]))) and part.labels.tolist() == stream.labels[[7, 2]].tolist()
    assert repr(part) == f'ImageStream(photos/train: 2 files as 3x16x16, 2 classes, sha256 of names {part.checksum[:12]})'
    assert (len(stream), stream.sample_shape) == (21, (3, 16, 16))
    with pytest.raises(ValueError, match='indices'): stream.subset([21])
    with pytest.raises(dataclasses.FrozenInstanceError): stream.channels = 1


def test_names_are_one_array_that_workers_can_be_sent(folder):
    "No Python object for each file; and what a worker gets can be pickled, as systems that do not fork require. Names may have any letters."
    name = save(patch(2), folder/'a'/'größe 字.png')
    stream = stream_of(folder)
    assert stream.paths.dtype.kind == 'S' and stream.paths.nbytes < 400*len(stream)
    files = pickle.loads(pickle.dumps(_Files(stream.paths, 3, 16)))
    row = [p.decode() for p in stream.paths].index(str(name))
    assert torch.equal(files[row], next(stream.batches([[row]]))[0])


@pytest.mark.parametrize('error, match, change', [
    (ValueError, 'channels must be one of 1, 3; got 4', dict(channels=4)), (ValueError, 'image_size', dict(image_size=0)), (TypeError, 'image_size', dict(image_size=None)),
    (ValueError, r'labels must have shape \(21,\)', dict(labels=torch.zeros(3).long())), (TypeError, 'int64', dict(labels=torch.zeros(21))),
    (ValueError, 'positions in the 1 classes', dict(classes=('a',))), (FileNotFoundError, 'none', dict(paths=['none']*21))])
def test_streams_refuse(folder, error, match, change):
    with pytest.raises(error, match=match): dataclasses.replace(stream_of(folder), **change)


def test_a_stream_follows_the_training_splits_channels(tmp_path):
    for split, pixels in (('train', patch(0)[:, :, 0]), ('test', patch(1))): save(pixels, tmp_path/'p'/split/'c'/'x.png')
    assert load_images(tmp_path/'p', 'test', image_size=8, stream=True).sample_shape == (1, 8, 8)

def test_a_refusal_in_a_worker_is_one_line(folder, workers=1):
    stream = load_images(folder, image_size=12, stream=True)
    whole = open(stream.paths[0], "rb").read()
    try:
        with open(stream.paths[0], "wb") as f: f.write(b"junk")
        with pytest.raises(ValueError, match="cannot be decoded") as refusal: list(stream.batches([[0]], workers))
    finally:
        with open(stream.paths[0], "wb") as f: f.write(whole)
    assert "\n" not in str(refusal.value)
