"lab.data: genuine files written to disk and read back, compared with scikit-learn, torchvision and Pillow."
import dataclasses
import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_fixtures import (CRANES, DIGITS, IMAGES, LABELS, TARGETS, CIFAR10Fixture, CIFAR100Fixture, STL10Fixture, patch, save, write_cifar, write_idx,
                          write_imagenet, write_stl10)
from oracles import webster_seats
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from torchvision import datasets
from torchvision.transforms.v2 import functional as reference

from peira_krepes.lab import data as module
from peira_krepes.lab.data import ImageData, load_images, stratified
from peira_krepes.lab.rows import check_rows, held_out
from peira_krepes.lab.streams import ImageStream

@pytest.fixture
def colour_folder(tmp_path):
    "train/ and test/ with two classes of 24x24 colour PNGs."
    for split, count in (('train', 6), ('test', 3)):
        for k in range(count): save(patch(k + 10*(split == 'test')), tmp_path/'photos'/split/('temple', 'flower')[k % 2]/f'{k}.png')
    return tmp_path/'photos'


# ---- digits ----------------------------------------------------------------------------------------------------------
def test_digits_are_scikit_learns_divided_by_sixteen():
    train, test = load_images('digits'), load_images('digits', 'test')
    rows = sorted((x.numpy().tobytes(), int(y)) for d in (train, test) for x, y in zip(d.images, d.labels))
    assert rows == sorted(((x/16).astype(np.float32).tobytes(), int(y)) for x, y in zip(load_digits().images, TARGETS))
    assert train.images.shape == (1437, 1, 8, 8) and len(test) == 360
    assert train.classes == tuple('0123456789') and (train.name, train.split, test.split) == ('digits', 'train', 'test')


def test_digits_split_is_fixed_for_ever():
    assert load_images('digits').checksum == '91a0a89e56d7b45a044bf5923701f28118cd2515debe3917e870ba67a85e1ef7'
    assert load_images('digits', 'test').checksum == '343d0592855317e4eb1d91f03f6108c26b5da04d48c6a800b70f2de4bc333789'


def test_digits_split_keeps_every_classs_share():
    seats = load_images('digits', 'test').labels.bincount().tolist()
    assert all(abs(s - 360*m/1797) < 1 for s, m in zip(seats, np.bincount(TARGETS)))


def test_loading_leaves_the_global_generators_alone():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    load_images('digits', limit=50)
    assert torch.equal(before, torch.get_rng_state()) and (np.random.get_state()[1] == numpy_before).all()


# ---- stratified ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('sizes', [(700, 250, 45, 5), (1, 1, 1000), (7, 11, 13), (5,), (2, 3, 4, 101, 60)])
@pytest.mark.parametrize('share', [0.05, 0.2, 0.37, 0.8, 1.0])
def test_stratified_hands_out_websters_seats(sizes, share):
    labels = np.random.RandomState(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    places = max(len(sizes), round(share*len(labels)))
    chosen = stratified(labels, places, seed=3)
    assert sorted(set(chosen.tolist())) == chosen.tolist()
    seats = np.bincount(labels[chosen.numpy()], minlength=len(sizes)).tolist()
    assert sum(seats) == places and min(seats) >= 1
    weakest_seat = min([m/(2*s - 1) for m, s in zip(sizes, seats) if s > 1], default=np.inf)
    strongest_claim = max([m/(2*s + 1) for m, s in zip(sizes, seats) if s < m], default=0)
    assert weakest_seat >= strongest_claim                                        # with a tie, either class may have the last seat
    if weakest_seat > strongest_claim: assert seats == webster_seats(sizes, places)


def test_stratified_subsets_are_nested_and_seeded():
    subsets = [set(stratified(TARGETS, k).tolist()) for k in (10, 50, 51, 400, 1797)]
    assert all(a < b for a, b in zip(subsets, subsets[1:])) and subsets[-1] == set(range(1797))
    assert torch.equal(stratified(TARGETS, 100), stratified(torch.from_numpy(TARGETS), 100))
    assert not torch.equal(stratified(TARGETS, 100), stratified(TARGETS, 100, seed=1))


def test_stratified_draws_all_members_of_a_class_equally_often():
    "Each of 40 rows is in a subset of 10 with probability 1/4: 400 seeds, binomial standard error, 5 of them."
    labels = np.repeat([0, 1], 20)
    counts = sum(np.bincount(stratified(labels, 10, seed=s), minlength=40) for s in range(400))
    assert (np.abs(counts - 100) < 5*np.sqrt(400*0.25*0.75)).all()


def test_stratified_refuses_more_than_there_are():
    with pytest.raises(ValueError, match='between 1 and 3'): stratified([0, 1, 1], 4)


@pytest.mark.parametrize('sizes', [(2, 2), (2, 3, 4), (2,)*7, (2, 2, 1000), (5, 0, 7), (50, 50)])
@pytest.mark.parametrize('fraction', [0.001, 0.2, 0.5, 0.8, 0.999])
def test_both_sides_of_a_split_have_every_class(sizes, fraction):
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    mask = held_out(labels, [str(k) for k in range(len(sizes))], fraction)
    for side in (mask, ~mask): assert set(labels[side.numpy()]) == set(labels)
    classes = np.count_nonzero(sizes)
    assert int(mask.sum()) in (round(fraction*len(labels)), len(labels) - round((1 - fraction)*len(labels)), classes, len(labels) - classes)


def test_batches_of_row_numbers_are_checked():
    data = load_images('digits', limit=20)
    rows = [torch.tensor([3, 3, 0]), np.array([19]), [1, 2]]
    for r, x in zip(rows, data.batches(rows, workers=3)): assert torch.equal(x, data.images[torch.as_tensor(r)])
    assert list(data.batches([])) == [] and data.sample_shape == (1, 8, 8)
    for error, match, wrong in ((ValueError, r'rows\[1\] must lie in 0..19; got 20', [[0], [20]]), (ValueError, r'rows\[0\] must be a non-empty', [[]]),
                                (TypeError, 'split', torch.arange(5)), (TypeError, 'whole numbers', [[0.5]])):
        with pytest.raises(error, match=match): data.batches(wrong)
    with pytest.raises(ValueError, match='workers'): data.batches([[0]], workers=-1)
    assert [r.tolist() for r in check_rows(torch.arange(5).split(2), 5)] == [[0, 1], [2, 3], [4]]


# ---- limit and image_size --------------------------------------------------------------------------------------------
def test_limit_is_a_stratified_subset_with_its_own_checksum():
    whole, part = load_images('digits'), load_images('digits', limit=200)
    positions = stratified(whole.labels, 200)
    assert torch.equal(part.images, whole.images[positions]) and torch.equal(part.labels, whole.labels[positions])
    assert part.checksum != whole.checksum == load_images('digits', limit=1437).checksum
    with pytest.raises(ValueError, match='limit must be between 1 and 1437; got 2000'): load_images('digits', limit=2000)
    with pytest.raises(ValueError, match='limit must be between 1'): load_images('digits', limit=0)


def test_resized_digits_are_torchvisions():
    ours = load_images('digits', 'test', image_size=5).images
    theirs = reference.resize(load_images('digits', 'test').images, [5, 5], antialias=True)
    assert torch.allclose(ours, theirs, atol=1e-6)
    with pytest.raises(ValueError, match='image_size'): load_images('digits', image_size=0)
    with pytest.raises(TypeError, match='image_size'): load_images('digits', image_size=(8, 8))


# ---- image folders ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('split', ['train', 'test'])
def test_plain_folder_equals_torchvisions_image_folder(colour_folder, split):
    theirs, ours = datasets.ImageFolder(colour_folder/split), load_images(colour_folder, split)
    assert torch.equal(ours.images, torch.stack([reference.to_image(x) for x, _ in theirs]).float()/255)
    assert ours.labels.tolist() == theirs.targets and list(ours.classes) == theirs.classes
    assert (ours.name, ours.split) == ('photos', split)


def test_folder_as_text_relative_and_under_root(colour_folder, monkeypatch):
    checksum = load_images(str(colour_folder)).checksum
    monkeypatch.chdir(colour_folder.parent)
    assert load_images('photos').checksum == load_images('./photos').checksum == checksum
    assert load_images('photos', root=colour_folder.parent).checksum == checksum
    os.rename('photos', 'digits')
    assert load_images(Path('digits')).checksum == load_images('./digits').checksum == checksum != load_images('digits').checksum


def test_jpegs_are_read_as_pillow_decodes_them(tmp_path):
    paths = [save(patch(k), tmp_path/'jpegs'/'ab'[k % 2]/f'{k}.JPG', format='JPEG', quality=70) for k in range(6)]
    ours = torch.cat([load_images(tmp_path/'jpegs', s).images for s in ('train', 'test')])
    theirs = [np.asarray(Image.open(p), np.float32).transpose(2, 0, 1)/255 for p in paths]
    assert sorted(x.numpy().tobytes() for x in ours) == sorted(x.tobytes() for x in theirs)


def test_grey_images_have_one_channel_and_keep_their_bytes(tmp_path):
    for k in range(40): save(DIGITS[k], tmp_path/'scans'/str(TARGETS[k])/f'{k:02d}.png')
    both = [load_images(tmp_path/'scans', s) for s in ('train', 'test')]
    assert both[0].images.shape[1:] == (1, 8, 8) and len(both[0]) + len(both[1]) == 40
    rows = sorted(x.numpy().tobytes() for d in both for x in d.images)
    assert rows == sorted((DIGITS[k].astype(np.float32)/255).tobytes() for k in range(40))


def test_single_folder_is_split_eighty_twenty_by_class(tmp_path):
    for k in range(60): save(patch(k, 8, 8), tmp_path/'pool'/('many' if k < 50 else 'few')/f'{k}.png')
    train, test = load_images(tmp_path/'pool'), load_images(tmp_path/'pool', 'test')
    assert train.labels.bincount().tolist() == [8, 40] and test.labels.bincount().tolist() == [2, 10]
    assert train.classes == test.classes == ('few', 'many')
    assert load_images(tmp_path/'pool').checksum == train.checksum


FULL = np.array([[0, 1000], [40000, 65535]], np.uint16)
FORMATS = {  # file name: (image, options, expected (h,w) or (h,w,3) values in [0, 1])
    'sixteen.png': (FULL, {}, FULL/65535),
    'sixteen.tiff': (FULL, {}, FULL/65535),
    'thirtytwo.tiff': (FULL.astype(np.int32), {}, FULL/65535),
    'float.tiff': (np.float32([[0, 0.25], [0.5, 1]]), {}, np.float32([[0, 0.25], [0.5, 1]])),
    'bit.png': (Image.fromarray(np.uint8([[0, 255], [255, 0]])).convert('1'), {}, np.array([[0, 1], [1, 0]])),
    'grey-alpha.png': (Image.fromarray(np.uint8([[[0, 255], [0, 0]], [[100, 255], [100, 0]]]), 'LA'), {}, np.array([[0, 255], [100, 255]])/255),
    'clear.png': (np.uint8([[[255, 0, 0, 255], [255, 0, 0, 0]], [[0, 0, 255, 255], [0, 0, 255, 51]]]), {},
                  np.array([[[255, 0, 0], [255, 255, 255]], [[0, 0, 255], [204, 204, 255]]])/255),
    'palette.png': (Image.fromarray(np.uint8([[[255, 0, 0], [0, 128, 0]], [[0, 0, 255], [9, 9, 9]]])).quantize(4), {},
                    np.array([[[255, 0, 0], [0, 128, 0]], [[0, 0, 255], [9, 9, 9]]])/255),
    'colours.bmp': (np.uint8([[[255, 0, 0], [0, 128, 0]], [[0, 0, 255], [9, 9, 9]]]), {}, np.array([[[255, 0, 0], [0, 128, 0]], [[0, 0, 255], [9, 9, 9]]])/255),
}


@pytest.mark.parametrize('name', FORMATS)
def test_pixels_of_each_kind_of_file(name, tmp_path):
    image, options, wanted = FORMATS[name]
    for k in range(2): save(image, tmp_path/'one'/'class'/f'{k}-{name}', **options)
    got = load_images(tmp_path/'one').images[0]
    wanted = torch.as_tensor(wanted, dtype=torch.float32)
    assert torch.allclose(got, wanted[None] if wanted.ndim == 2 else wanted.permute(2, 0, 1), atol=1e-6)


def test_transparent_palette_is_shown_on_white(tmp_path):
    image = Image.new('P', (2, 1))
    image.putpalette([0, 0, 0, 10, 200, 30]); image.putdata([0, 1])
    for k in range(2): save(image, tmp_path/'p'/'c'/f'{k}.png', transparency=0)
    assert (load_images(tmp_path/'p').images[0]*255).round().flatten(1).T.tolist() == [[255, 255, 255], [10, 200, 30]]


def test_cmyk_photographs_become_rgb(tmp_path):
    for k in range(2): save(Image.fromarray(patch(k)).convert('CMYK'), tmp_path/'p'/'c'/f'{k}.jpg', quality=95)
    assert load_images(tmp_path/'p').images.shape == (1, 3, 24, 24)


def test_camera_orientation_is_honoured(tmp_path):
    upright = Image.fromarray(patch(3, 24, 16))
    tag = Image.Exif(); tag[0x0112] = 6          # stored turned by a quarter; to be turned back clockwise
    for k in range(2): save(upright.transpose(Image.Transpose.ROTATE_90), tmp_path/'p'/'c'/f'{k}.png', exif=tag)
    assert torch.equal(load_images(tmp_path/'p').images[0], reference.to_image(upright).float()/255)


def test_one_colour_image_in_training_makes_three_channels(tmp_path):
    for split in ('train', 'test'):
        for k in range(3): save(patch(k)[:, :, 1], tmp_path/'p'/split/'c'/f'{k}.png')
    assert load_images(tmp_path/'p').images.shape[1] == 1
    save(patch(5), tmp_path/'p'/'test'/'c'/'colour.png')
    test = load_images(tmp_path/'p', 'test')
    grey = np.asarray(Image.fromarray(patch(5)).convert('L'), np.float32)/255
    assert test.images.shape[1] == 1 and any((x[0].numpy() == grey).all() for x in test.images)      # follows the training split
    save(patch(5), tmp_path/'p'/'train'/'c'/'colour.png')
    both = load_images(tmp_path/'p'), load_images(tmp_path/'p', 'test')
    assert [d.images.shape[1] for d in both] == [3, 3]
    assert torch.equal(both[0].images[0, 0], both[0].images[0, 2])                                    # a grey one, three times the same


def test_sixteen_bit_image_among_colours_is_repeated_over_channels(tmp_path):
    save(FULL, tmp_path/'p'/'train'/'c'/'a.png'); save(patch(0, 2, 2), tmp_path/'p'/'train'/'c'/'b.png'); save(FULL, tmp_path/'p'/'test'/'c'/'a.png')
    image = load_images(tmp_path/'p').images[0]
    assert torch.allclose(image, torch.from_numpy(FULL/65535).float().expand(3, 2, 2), atol=1e-7)


def test_hidden_folders_and_stray_files_are_ignored(colour_folder):
    before = load_images(colour_folder).checksum
    train = colour_folder/'train'
    for hidden in ('.ipynb_checkpoints', '__MACOSX'): save(patch(0), train/hidden/'0.png')
    (train/'flower'/'._0.png').write_bytes(b'resource fork'); (train/'flower'/'readme.txt').write_text('text'); (train/'labels.csv').write_text('a,b')
    (train/'flower'/'Thumbs.db').write_bytes(b'\0')
    assert load_images(colour_folder).checksum == before


def test_images_in_deeper_folders_belong_to_their_class(colour_folder):
    save(patch(7), colour_folder/'train'/'temple'/'2024'/'may'/'x.png')
    assert load_images(colour_folder).labels.bincount().tolist() == [3, 4]


def test_val_serves_as_test_when_there_is_no_test(colour_folder):
    checksum = load_images(colour_folder, 'test').checksum
    (colour_folder/'test').rename(colour_folder/'val')
    assert load_images(colour_folder, 'test').checksum == checksum


def test_train_folder_alone(colour_folder):
    (colour_folder/'test').rename(colour_folder.parent/'elsewhere')
    assert len(load_images(colour_folder)) == 6
    with pytest.raises(FileNotFoundError, match='neither test/ nor val/'): load_images(colour_folder, 'test')


def test_sizes_that_differ_are_named_and_image_size_helps(tmp_path):
    for k, (h, w) in enumerate([(24, 24), (30, 40), (24, 24), (50, 20)]): save(patch(k, h, w), tmp_path/'p'/'c'/f'{k}.png')
    with pytest.raises(ValueError, match=r'images differ in size: .*\.png has 24x24 pixels .* has 30x40.*image_size'): load_images(tmp_path/'p')
    assert load_images(tmp_path/'p', image_size=16).images.shape == (3, 3, 16, 16)


def test_resizing_crops_centrally_and_keeps_proportions(tmp_path):
    "A disc in a wide picture stays a disc: equal extent along both axes."
    y, x = np.mgrid[:60, :120]
    disc = np.uint8(255*((x - 59.5)**2 + (y - 29.5)**2 < 20**2))
    for k in range(2): save(disc, tmp_path/'p'/'c'/f'{k}.png')
    image = load_images(tmp_path/'p', image_size=30).images[0, 0]
    assert torch.allclose(image.sum(0), image.sum(1), atol=0.05)
    assert abs(float(image.sum()) - np.pi*10**2) < 3


def test_downscaling_averages_instead_of_aliasing(tmp_path):
    "A one-pixel chequerboard has no structure at half size: it is grey, not black or white."
    board = np.uint8(255*(np.indices((32, 32)).sum(0) % 2))
    for k in range(2): save(board, tmp_path/'p'/'c'/f'{k}.png')
    assert (load_images(tmp_path/'p', image_size=16).images - 0.5).abs().max() < 0.02


@pytest.mark.parametrize('damage', ['truncated png', 'truncated jpeg', 'text', 'empty'])
def test_a_corrupt_file_is_named(colour_folder, damage):
    path = colour_folder/'train'/'flower'/('bad.jpg' if 'jpeg' in damage else 'bad.png')
    if 'truncated' in damage:
        save(patch(0, 200, 200), path)
        path.write_bytes(path.read_bytes()[:path.stat().st_size//2])
    else: path.write_bytes(b'' if damage == 'empty' else b'not an image')
    with pytest.raises(ValueError, match=rf'{path.name} cannot be decoded'): load_images(colour_folder, image_size=24)


def test_float_files_outside_the_unit_interval_are_named(tmp_path):
    for k in range(2): save(np.float32([[0, 300]]), tmp_path/'p'/'c'/f'{k}.tiff')
    with pytest.raises(ValueError, match=r'\.tiff cannot be decoded .*values from 0 to 300'): load_images(tmp_path/'p')


def test_an_empty_class_is_named(colour_folder):
    (colour_folder/'train'/'boats').mkdir()
    with pytest.raises(FileNotFoundError, match='boats'): load_images(colour_folder)


def test_classes_that_differ_between_splits_are_named(colour_folder):
    save(patch(1), colour_folder/'test'/'zebra'/'0.png')
    for split in ('train', 'test'):
        with pytest.raises(ValueError, match="same classes; only one of them has .'zebra'"): load_images(colour_folder, split)


def test_a_class_with_one_image_cannot_be_split(tmp_path):
    for k in range(5): save(patch(k), tmp_path/'p'/('lonely' if k == 0 else 'many')/f'{k}.png')
    with pytest.raises(ValueError, match="class 'lonely' has one row or image"): load_images(tmp_path/'p')


def test_images_without_class_folders_are_explained(tmp_path):
    save(patch(0), tmp_path/'flat'/'0.png')
    with pytest.raises(FileNotFoundError, match='no subfolders.*one class if there are no labels'): load_images(tmp_path/'flat')


def test_limit_decodes_only_what_it_keeps(tmp_path):
    for k in range(50): save(patch(k, 8, 8), tmp_path/'p'/'ab'[k % 2]/f'{k:02d}.png')
    whole, part = load_images(tmp_path/'p'), load_images(tmp_path/'p', limit=6)
    kept = stratified(whole.labels, 6)
    assert torch.equal(part.images, whole.images[kept])
    unread = next(i for i in range(len(whole)) if i not in kept and i > 0)      # the first file's header is read
    target = next(p for p in sorted((tmp_path/'p').rglob('*.png')) if (np.asarray(Image.open(p)).transpose(2, 0, 1)/np.float32(255) == whole.images[unread].numpy()).all())
    target.write_bytes(target.read_bytes()[:60])
    assert load_images(tmp_path/'p', limit=6).checksum == part.checksum
    with pytest.raises(ValueError, match=target.name): load_images(tmp_path/'p')


def test_a_data_set_larger_than_memory_is_refused_with_its_bytes(colour_folder, monkeypatch):
    monkeypatch.setattr(module.os, 'sysconf', lambda name: 100 if name == 'SC_PHYS_PAGES' else 512)
    with pytest.raises(ValueError, match=r'take 41,472 bytes, more than half .* 51,200'): load_images(colour_folder)
    assert len(load_images(colour_folder, image_size=8)) == 6


# ---- torchvision's data sets ------------------------------------------------------------------------------------------
@pytest.fixture
def no_debian(monkeypatch, tmp_path): monkeypatch.setattr(module, 'DEBIAN', tmp_path/'none')


@pytest.mark.parametrize('layout', ['torchvision', 'compressed'])
def test_idx_files_in_both_layouts(tmp_path, layout):
    write_idx(tmp_path if layout == 'compressed' else tmp_path/'FashionMNIST'/'raw', '.gz' if layout == 'compressed' else '')
    for split in ('train', 'test'):
        got = load_images('fashion_mnist', split, root=tmp_path)
        assert torch.equal(got.images[:, 0], torch.from_numpy(IMAGES[split]).float()/255) and got.labels.tolist() == LABELS[split].tolist()
        assert len(got.classes) == 10 and got.images.dtype == torch.float32 and got.labels.dtype == torch.int64


def test_root_comes_from_the_environment_then_from_data(tmp_path, monkeypatch, no_debian):
    write_idx(tmp_path/'a'/'FashionMNIST'/'raw'); write_idx(tmp_path/'data'/'FashionMNIST'/'raw')
    monkeypatch.chdir(tmp_path); monkeypatch.setenv('PEIRA_KREPES_DATA', str(tmp_path/'a'))
    assert len(load_images('fashion_mnist')) == 60
    (tmp_path/'a').rename(tmp_path/'b')
    with pytest.raises(FileNotFoundError, match=str(tmp_path/'a')): load_images('fashion_mnist')
    monkeypatch.delenv('PEIRA_KREPES_DATA')
    assert len(load_images('fashion_mnist', 'test')) == 20


def test_debians_folder_is_the_fall_back_unless_a_root_was_named(tmp_path, monkeypatch):
    write_idx(tmp_path/'debian', '.gz')
    monkeypatch.setattr(module, 'DEBIAN', tmp_path/'debian'); monkeypatch.delenv('PEIRA_KREPES_DATA', raising=False); monkeypatch.chdir(tmp_path)
    assert len(load_images('fashion_mnist')) == 60
    with pytest.raises(FileNotFoundError): load_images('fashion_mnist', root=tmp_path/'mistyped')


def test_missing_data_names_folder_command_and_alternative(tmp_path, monkeypatch, no_debian):
    monkeypatch.chdir(tmp_path); monkeypatch.delenv('PEIRA_KREPES_DATA', raising=False)
    with pytest.raises(FileNotFoundError) as e: load_images('fashion_mnist')
    for part in (str(tmp_path/'data'), str(tmp_path/'none'), 'FashionMNIST as D', "D('data', download=True)", 'apt-get install dataset-fashion-mnist', '"digits"', 'PEIRA_KREPES_DATA'):
        assert part in str(e.value)
    with pytest.raises(FileNotFoundError) as e: load_images('cifar10', root=tmp_path/'x')
    assert 'CIFAR10 as D' in str(e.value) and 'apt-get' not in str(e.value)


@pytest.mark.parametrize('damage', ['cut gz', 'cut idx', 'text'])
def test_damaged_idx_files_are_called_damaged(tmp_path, damage):
    folder = tmp_path if damage == 'cut gz' else tmp_path/'FashionMNIST'/'raw'
    write_idx(folder, '.gz' if damage == 'cut gz' else '')
    path = next(folder.glob('train-images*'))
    path.write_bytes(b'<html>not here</html>' if damage == 'text' else path.read_bytes()[:path.stat().st_size//2])
    with pytest.raises(ValueError, match='damaged.*Fetch it again'): load_images('fashion_mnist', root=tmp_path)


def test_idx_files_of_different_lengths_are_refused(tmp_path):
    write_idx(tmp_path/'FashionMNIST'/'raw')
    raw = tmp_path/'FashionMNIST'/'raw'
    (raw/'train-labels-idx1-ubyte').write_bytes((raw/'t10k-labels-idx1-ubyte').read_bytes())
    with pytest.raises(ValueError, match='damaged.*60 images and 20 labels'): load_images('fashion_mnist', root=tmp_path)


@pytest.mark.parametrize('kind', [CIFAR10Fixture, CIFAR100Fixture])
def test_cifar_format_is_read_and_checked(kind, tmp_path, monkeypatch):
    pixels = write_cifar(tmp_path, kind, monkeypatch)
    monkeypatch.setitem(module.TORCHVISION, 'cifar_fixture', kind)
    train, test = (load_images('cifar_fixture', s, root=tmp_path) for s in ('train', 'test'))
    assert train.images.shape == (6*(len(pixels) - 1), 3, 32, 32) and train.classes == ('temple', 'flower') and test.labels.tolist() == [0, 1]*3
    assert torch.equal(test.images, torch.from_numpy(list(pixels.values())[-1]).reshape(-1, 3, 32, 32).float()/255)
    batch = tmp_path/kind.base_folder/list(pixels)[-2]
    batch.write_bytes(batch.read_bytes()[:-1] + b'x')
    with pytest.raises(FileNotFoundError, match='not, or not intact'): load_images('cifar_fixture', root=tmp_path)
    batch.unlink()
    with pytest.raises(FileNotFoundError, match=f'{kind.__name__} as D'): load_images('cifar_fixture', 'test', root=tmp_path)


def test_stl10_format_is_read_and_checked(tmp_path, monkeypatch):
    patches = write_stl10(tmp_path, monkeypatch)
    monkeypatch.setitem(module.TORCHVISION, 'stl10', STL10Fixture)
    for split in ('train', 'test', 'unlabeled'):
        data = load_images('stl10', split, root=tmp_path)
        assert torch.equal(data.images, torch.from_numpy(patches[split]).permute(0, 3, 1, 2).float()/255) and data.split == split
        assert data.labels.tolist() == [0 if split == 'unlabeled' else k % 2 for k in range(len(data))]
        assert data.classes == (('unlabeled',) if split == 'unlabeled' else ('temple', 'flower'))
    assert len(load_images('stl10', 'unlabeled', root=tmp_path, limit=3)) == 3 and load_images('stl10', 'unlabeled', root=tmp_path, image_size=32).sample_shape == (3, 32, 32)
    names = tmp_path/STL10Fixture.base_folder/'class_names.txt'
    names.rename(names.with_suffix('.bak'))
    with pytest.raises(ValueError, match='stl10: a file under .* is damaged .*class_names.txt is missing'): load_images('stl10', root=tmp_path)
    names.with_suffix('.bak').rename(names)
    x = names.with_name('unlabeled_X.bin')
    x.write_bytes(x.read_bytes()[:-1] + b'x')
    with pytest.raises(FileNotFoundError, match='STL10Fixture as D'): load_images('stl10', root=tmp_path)


def test_only_stl10_has_unlabelled_images():
    with pytest.raises(ValueError, match="split must be one of 'train', 'test'; got 'unlabeled'"): load_images('cifar10', 'unlabeled')
    with pytest.raises(ValueError, match="'train', 'test', 'unlabeled'; got 'val'"): load_images('stl10', 'val')


def test_mnist_in_torchvisions_layout_only(tmp_path):
    write_idx(tmp_path/'MNIST'/'raw')
    for split in ('train', 'test'):
        got, theirs = load_images('mnist', split, root=tmp_path), datasets.MNIST(tmp_path, train=split == 'train')
        assert torch.equal(got.images[:, 0], theirs.data.float()/255) and torch.equal(got.labels, theirs.targets) and list(got.classes) == theirs.classes
    write_idx(tmp_path/'packed', '.gz')                       # might as well be Fashion-MNIST
    with pytest.raises(FileNotFoundError, match='MNIST as D'): load_images('mnist', root=tmp_path/'packed')


# ---- ImageNet -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('below', ['.', 'imagenet'])
def test_imagenet_is_read_as_torchvision_reads_it(tmp_path, below):
    write_imagenet(tmp_path/below)
    for split, theirs in (('train', 'train'), ('test', 'val')):
        ours, theirs = load_images('imagenet', split, root=tmp_path, image_size=32), datasets.ImageNet(tmp_path/below, theirs)
        assert ours.labels.tolist() == theirs.targets and ours.name == 'imagenet' and len(ours) == 12
        assert [c.split(' ', 1)[0] for c in ours.classes] == theirs.wnids and [tuple(c.split(' ', 1)[1].split(', ')) for c in ours.classes] == theirs.classes
        wanted = [np.asarray(ImageOps.fit(x, (32, 32), Image.Resampling.BILINEAR)) for x, _ in theirs]
        assert torch.equal(ours.images, torch.from_numpy(np.stack(wanted)).permute(0, 3, 1, 2).float()/255)
    assert len(set(ours.classes)) == 3                        # although two of them are called crane
    assert load_images(tmp_path/below, image_size=32).classes == ours.classes


def test_imagenet_without_meta_is_a_plain_folder(tmp_path):
    write_imagenet(tmp_path)
    whole = load_images('imagenet', root=tmp_path, image_size=16)
    (tmp_path/'meta.bin').unlink()
    with pytest.raises(FileNotFoundError) as e: load_images('imagenet', root=tmp_path)
    for part in (str(tmp_path), str(tmp_path/'imagenet'), 'image-net.org', 'ImageNet as D', '"digits"'): assert part in str(e.value)
    plain = load_images(tmp_path, image_size=16)
    assert torch.equal(plain.images, whole.images) and plain.classes == tuple(CRANES)


@pytest.mark.parametrize('content', [b'', b'not a torch file', None])
def test_a_meta_file_that_does_not_fit_is_called_damaged(tmp_path, content):
    write_imagenet(tmp_path)
    if content is None: torch.save(({'n02012849': ('crane',)}, []), tmp_path/'meta.bin')
    else: (tmp_path/'meta.bin').write_bytes(content)
    with pytest.raises(ValueError, match='meta.bin is damaged, or not about these folders'): load_images('imagenet', root=tmp_path, image_size=16)


# ---- streams ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('split', ['train', 'test'])
def test_a_streamed_folder_equals_the_same_folder_in_memory(colour_folder, split):
    memory, stream = load_images(colour_folder, split, image_size=16), load_images(colour_folder, split, image_size=16, stream=True)
    assert isinstance(memory, ImageData) and isinstance(stream, ImageStream)
    assert torch.equal(torch.cat(list(stream.batches([range(len(stream))]))), memory.images) and torch.equal(stream.labels, memory.labels)
    assert (stream.classes, stream.name, stream.split, stream.sample_shape, len(stream)) == (memory.classes, memory.name, memory.split, memory.sample_shape, len(memory))
    part = load_images(colour_folder, split, image_size=16, stream=True, limit=2)
    assert torch.equal(next(part.batches([[0, 1]])), load_images(colour_folder, split, image_size=16, limit=2).images)


def test_large_folders_stream_by_themselves_and_say_so(colour_folder, monkeypatch):
    monkeypatch.setattr(module, 'STREAM_ABOVE', 6*3*16*16*4 - 1)
    with pytest.warns(UserWarning, match='would take 18,432 bytes: photos is read from its files as needed') as caught: data = load_images(colour_folder, image_size=16)
    assert isinstance(data, ImageStream) and caught[0].filename == __file__
    assert isinstance(load_images(colour_folder, image_size=16, stream=False), ImageData) and isinstance(load_images(colour_folder), ImageData)
    monkeypatch.setattr(module, 'STREAM_ABOVE', 6*3*16*16*4)
    assert isinstance(load_images(colour_folder, image_size=16), ImageData)


def test_streams_need_a_size_and_a_folder(colour_folder):
    with pytest.raises(ValueError, match='a stream needs image_size'): load_images(colour_folder, stream=True)
    with pytest.raises(ValueError, match='stream=True is for image folders; digits is one array'): load_images('digits', stream=True)


def test_real_fashion_mnist():
    folder = Path('/usr/share/datasets/fashion-mnist')
    if not folder.is_dir(): pytest.skip('dataset-fashion-mnist is not installed')
    test = load_images('fashion_mnist', 'test', root=folder)
    assert test.checksum == '85becac1ad785a4af13d68041f78ad7bbc4d7dd9091c4d8e90869bb47bb80296'
    assert test.labels.bincount().tolist() == [1000]*10 and test.images.shape == (10000, 1, 28, 28)
    raw = np.frombuffer(gzip.open(folder/'t10k-images-idx3-ubyte.gz').read(), np.uint8, offset=16)
    assert (test.images.numpy().ravel() == raw.astype(np.float32)/np.float32(255)).all()


# ---- names ------------------------------------------------------------------------------------------------------------
def test_unknown_names_list_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'digits', 'mnist', 'fashion_mnist', 'cifar10', 'cifar100', 'stl10', 'imagenet', or the path of an image folder; got 'imagenette'"): load_images('imagenette')
    with pytest.raises(FileNotFoundError, match='no such folder: .*no/where'): load_images('no/where')
    with pytest.raises(FileNotFoundError, match='no such folder'): load_images(Path('nowhere'))
    with pytest.raises(ValueError, match="split must be one of 'train', 'test'; got 'val'"): load_images('digits', 'val')


# ---- ImageData ---------------------------------------------------------------------------------------------------------
def make(images=None, labels=None, classes=('a', 'b')):
    images = torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0)) if images is None else images
    return ImageData(images, torch.tensor([0, 1, 1, 0]) if labels is None else labels, classes, 'noise', 'train')


def test_checksum_is_sha256_of_images_then_labels():
    data = make()
    assert data.checksum == hashlib.sha256(data.images.numpy().tobytes() + data.labels.numpy().tobytes()).hexdigest()
    assert make(data.images.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)).checksum == data.checksum        # layout in memory does not matter
    flipped = data.images.clone(); flipped[0, 0, 0, 0] = 1 - flipped[0, 0, 0, 0]
    assert len({data.checksum, make(flipped).checksum, make(labels=torch.tensor([1, 1, 1, 0])).checksum}) == 3


def test_subset_and_replace_recompute_the_checksum():
    data = make()
    part = data.subset([2, 0])
    assert torch.equal(part.images, data.images[[2, 0]]) and part.labels.tolist() == [1, 0] and part.checksum != data.checksum
    assert data.subset(range(4)).checksum == data.checksum == dataclasses.replace(data, name='other').checksum
    assert dataclasses.replace(data, images=data.images/2).checksum != data.checksum
    with pytest.raises(ValueError, match='indices'): data.subset([4])


def test_image_data_is_frozen_and_short_to_print():
    data = make()
    with pytest.raises(dataclasses.FrozenInstanceError): data.images = data.images*2
    assert len(data) == 4 and repr(data) == f'ImageData(noise/train: 4 images 1x3x3, 2 classes, sha256 {data.checksum[:12]})'


@pytest.mark.parametrize('error, match, change', [
    (TypeError, 'float32 tensor; got torch.uint8.*/ 255', lambda x, y: (x.byte(), y)),
    (TypeError, 'float32 tensor; got torch.float64', lambda x, y: (x.double(), y)),
    (TypeError, 'float32', lambda x, y: (x.numpy(), y)),
    (ValueError, r'\(n, c, h, w\)', lambda x, y: (x[:, 0], y)),
    (ValueError, r'\(n, c, h, w\)', lambda x, y: (x[:0], y[:0])),
    (ValueError, r'values in \[0, 1\]', lambda x, y: (x*255, y)),
    (ValueError, r'values in \[0, 1\]', lambda x, y: (x - 0.5, y)),
    (ValueError, r'values in \[0, 1\]; got nan', lambda x, y: (x.log()*0/0, y)),
    (TypeError, 'int64 tensor; got torch.int32', lambda x, y: (x, y.int())),
    (ValueError, r'labels must have shape \(4,\)', lambda x, y: (x, y[:3])),
    (ValueError, 'positions in the 2 classes; got 0 to 2', lambda x, y: (x, y*2)),
    (ValueError, 'positions in the 2 classes; got -1 to 0', lambda x, y: (x, y - 1))])
def test_image_data_refuses(error, match, change):
    data = make()
    with pytest.raises(error, match=match): make(*change(data.images, data.labels))

def test_sizes_beyond_the_memory_are_refused_before_anything_is_decoded(tmp_path):
    (tmp_path/"a").mkdir()
    for i in range(3): Image.new("L", (4, 4)).save(tmp_path/"a"/f"{i}.png")
    for name in (tmp_path, "digits"):
        with pytest.raises(ValueError, match="smaller image_size"): load_images(name, image_size=10**6)
