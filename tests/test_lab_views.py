"lab.views: against torchvision, against loops over pixels in float64, and the laws of the random draws."
import dataclasses
import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from oracles import blurred_pixel, recoloured, warped_pixel
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as reference

from peira_krepes.lab import views as module
from peira_krepes.lab.data import ImageData, load_images
from peira_krepes.lab.columns import ColumnEncoder
from peira_krepes.lab.corruption import CorruptionPolicy, corrupt
from peira_krepes.lab.distortions import solarise
from peira_krepes.lab.policies import POLICIES, byol_policies, policy_from_record, simclr_policy
from peira_krepes.lab.streams import ImageStream
from peira_krepes.lab.tables import TableData, load_table
from peira_krepes.lab.views import COLOUR, DIGITS, GREY, ViewPolicy, affine_maps, augment, blur, colour_matrices, policy_for, two_views, view_seed, warp

ALL = ViewPolicy(crop=(0.2, 1), flip=0.5, rotation=30, shear=10, translation=0.2, jitter=0.8, brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2,
                 grayscale=0.2, blur=(0.1, 2), blurred=0.5, solarise=0.3, threshold=0.6, noise=0.1, erase=0.5)
ONE_BY_ONE = [dict(crop=(0.2, 0.9)), dict(flip=0.5), dict(rotation=30), dict(shear=20), dict(translation=0.3), dict(brightness=0.4), dict(contrast=0.4),
              dict(saturation=0.4), dict(hue=0.3), dict(grayscale=0.5), dict(blur=(0.5, 2)), dict(solarise=0.5), dict(noise=0.1), dict(erase=0.6)]


def generator(seed=0): return torch.Generator().manual_seed(seed)


def photographs(n=6, size=32, dtype=torch.float32):
    "Real colour patches (n,3,size,size)."
    photos = [torch.tensor(p).permute(2, 0, 1).to(dtype)/255 for p in load_sample_images().images]
    return torch.stack([photos[k % 2][:, 60*k:60*k + size, 90*k:90*k + size] for k in range(n)])


# ---- geometry --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('size', [(8, 8), (28, 28), (32, 48), (33, 17)])
def test_crop_equals_torchvisions_resized_crop(size):
    h, w = size
    images = torch.rand(40, 3, h, w, generator=generator())
    r = np.random.RandomState(0)
    height, width = r.randint(1, h + 1, 40), r.randint(1, w + 1, 40)
    top, left = [r.randint(0, h - b + 1) for b in height], [r.randint(0, w - b + 1) for b in width]
    ours = warp(images, torch.tensor(np.stack([top, left, height, width], 1), dtype=torch.float32))
    theirs = torch.stack([reference.resized_crop(x, int(t), int(l), int(b), int(c), [h, w], antialias=False)
                          for x, t, l, b, c in zip(images, top, left, height, width)])
    assert (ours - theirs).abs().max() < 1e-4


def test_crop_in_double_precision_equals_torchvisions_to_rounding():
    images = photographs(2, 40, torch.float64)
    ours = warp(images, torch.tensor([[3.0, 7, 20, 11], [0, 0, 40, 40]], dtype=torch.float64))
    assert (ours[0] - reference.resized_crop(images[0], 3, 7, 20, 11, [40, 40], antialias=False)).abs().max() < 1e-10
    assert (ours[1] - images[1]).abs().max() < 1e-10


def test_warp_equals_the_loop_over_pixels():
    "Fractional boxes, turns, shears, shifts and a mirrored map on oblong images."
    g = generator()
    images = torch.rand(5, 1, 6, 9, generator=g, dtype=torch.float64)
    boxes = torch.tensor([[0, 0, 6, 9], [1.3, 2.6, 3.1, 4.4], [0.2, 5.5, 5.7, 3.5], [2, 2.5, 1, 3], [0, 0, 6, 9]], dtype=torch.float64)
    maps = affine_maps(torch.tensor([0.0, 25, -70, 10, 180], dtype=torch.float64), torch.tensor([0.0, 12, -20, 5, 0], dtype=torch.float64),
                       torch.rand(5, 2, generator=g, dtype=torch.float64) - 0.5, 6, 9)
    maps[3, :, 0] *= -1
    ours = warp(images, boxes, maps)
    pixels = [[[warped_pixel(x[0], b.tolist(), m.tolist(), i, j) for j in range(9)] for i in range(6)] for x, b, m in zip(images, boxes, maps)]
    wanted = torch.tensor(pixels, dtype=torch.float64)
    assert (ours[:, 0] - wanted).abs().max() < 1e-10


@pytest.mark.parametrize('angle', [10.0, -35.0, 90.0])
def test_turn_equals_torchvisions_rotate_inside(angle):
    "A disc in the middle does not depend on how the corners are filled."
    image = photographs(2, 41)
    ours = warp(image, torch.tensor([[0.0, 0, 41, 41]]*2), affine_maps(torch.full((2,), angle), torch.zeros(2), torch.zeros(2, 2), 41, 41))
    theirs = reference.rotate(image, angle, interpolation=v2.InterpolationMode.BILINEAR)
    y, x = torch.meshgrid(torch.arange(41), torch.arange(41), indexing='ij')
    inside = (x - 20)**2 + (y - 20)**2 < 18**2
    assert (ours - theirs)[:, :, inside].abs().max() < 1e-4


def test_turn_shear_shift_apply_in_that_order():
    "The inverse map sends the moved picture's points back: composition of the three, checked on points in pixels."
    h, w, a, s = 30, 50, math.radians(20), math.tan(math.radians(15))
    M = affine_maps(torch.tensor([20.0]), torch.tensor([15.0]), torch.tensor([[0.1, -0.2]]), h, w)[0].double()
    D = torch.tensor([w/2, h/2], dtype=torch.float64)
    turn = torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]], dtype=torch.float64)      # y points down: counter-clockwise to the eye
    shear = torch.tensor([[1, -s], [0, 1]], dtype=torch.float64)                                             # the top, negative y, to the right
    for point in torch.rand(5, 2, generator=generator(), dtype=torch.float64)*2 - 1:
        moved = (shear @ turn @ (point*D) + torch.tensor([0.1*w, -0.2*h], dtype=torch.float64))/D
        assert torch.allclose(M[:, :2] @ moved + M[:, 2], point, atol=1e-6)


def test_flip_is_exact():
    images = photographs(50 // 9 + 1, 28).repeat(9, 1, 1, 1)
    assert torch.equal(augment(images, ViewPolicy(flip=1), generator()), images.flip(-1))
    view = augment(images, ViewPolicy(flip=0.5), generator())
    kept, turned = [torch.tensor([torch.equal(v, x) for v, x in zip(view, other)]) for other in (images, images.flip(-1))]
    assert (kept ^ turned).all() and 0 < kept.sum() < len(images)


def test_flip_within_a_crop_is_the_flipped_crop():
    images, policy = photographs(), ViewPolicy(crop=(0.3, 0.8))
    assert torch.allclose(augment(images, dataclasses.replace(policy, flip=1), generator(3)), augment(images, policy, generator(3)).flip(-1), atol=1e-5)


def boxes_of(policy, n=20000, h=40, w=60, seed=0): return module._boxes(policy, torch.empty(n, 1, h, w), generator(seed)).double()


def test_crops_follow_torchvisions_law_where_no_draw_is_rejected():
    "Means of area, log-ratio and centre within 5 standard errors of torchvision's sampler; areas up to 3/4."
    boxes = boxes_of(ViewPolicy(crop=(0.08, 0.75)), h=400, w=400)
    state = torch.get_rng_state(); torch.manual_seed(0)
    sampler = v2.RandomResizedCrop(400, scale=(0.08, 0.75))
    theirs = torch.tensor([[p['top'], p['left'], p['height'], p['width']] for p in (sampler.make_params([torch.empty(1, 400, 400)]) for _ in range(4000))], dtype=torch.float64)
    torch.set_rng_state(state)
    def summary(b): return torch.stack([b[:, 2]*b[:, 3]/400**2, (b[:, 3]/b[:, 2]).log(), b[:, 0], b[:, 1], (b[:, 2]*b[:, 3]/400**2)**2, (b[:, 3]/b[:, 2]).log()**2], 1)
    ours, theirs = summary(boxes), summary(theirs)
    error = (ours.var(0)/len(ours) + theirs.var(0)/len(theirs)).sqrt()
    # torchvision rounds to whole pixels: up to half a pixel in 400, relative 1/400 for area and log-ratio
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 5*error + torch.tensor([1e-3, 1e-3, 0.5, 0.5, 1e-3, 1e-3])).all()


@pytest.mark.parametrize('policy', [ViewPolicy(crop=(0.08, 1)), ViewPolicy(crop=(0.9, 1)), ViewPolicy(crop=(1, 1), ratio=(2, 2)), ViewPolicy(crop=(0.5, 1), ratio=(0.2, 0.3)),
                                    ViewPolicy(crop=(0.001, 0.01))])
def test_every_crop_lies_inside_the_image_with_its_area(policy):
    top, left, height, width = boxes_of(policy).T
    assert top.min() >= 0 and left.min() >= 0 and (top + height).max() <= 40 + 1e-4 and (left + width).max() <= 60 + 1e-4
    area = height*width/2400
    assert min(height.min(), width.min()) >= 1 and area.min() >= policy.crop[0] - 1e-6
    if policy.crop[1] < 0.02: return                                              # some boxes were one pixel thin: their area is larger
    assert area.max() <= policy.crop[1] + 1e-6
    assert abs(area.mean() - sum(policy.crop)/2) < 5*(policy.crop[1] - policy.crop[0])/math.sqrt(12*20000) + 1e-6
    ratio, bound = (width/60)/(height/40), 1/area
    low, high = (torch.full_like(area, r).clamp(1/bound, bound) for r in policy.ratio)
    assert (ratio >= low*(1 - 1e-5)).all() and (ratio <= high*(1 + 1e-5)).all()


# ---- colour ----------------------------------------------------------------------------------------------------------
def test_colour_chain_equals_five_steps_over_pixels(monkeypatch):
    "The composed matrix and offset of `augment`, with the draws it made, against one step after the other on each pixel."
    images = photographs(6, 8, torch.float64)*0.2 + 0.4                       # far from 0 and 1, so that no clamp acts
    drawn = {}
    original, factor = colour_matrices, module._factor
    def spy_matrices(saturation, turn, grey):
        drawn.update(saturation=saturation, turn=turn, grey=grey)
        return original(saturation, turn, grey)
    def spy_factor(*args):
        drawn.setdefault('factors', []).append(factor(*args))
        return drawn['factors'][-1]
    monkeypatch.setattr(module, 'colour_matrices', spy_matrices); monkeypatch.setattr(module, '_factor', spy_factor)
    ours = augment(images, ViewPolicy(jitter=0.7, brightness=0.2, contrast=0.3, saturation=0.4, hue=0.2, grayscale=0.4), generator(1))
    brightness, contrast, saturation = (f.flatten() for f in drawn['factors'])
    assert 0 < drawn['grey'].sum() < 6 and torch.equal(saturation, drawn['saturation']) and 0 < (drawn['turn'] == 0).sum() < 6
    for i in range(6):
        wanted = recoloured(images[i], *(float(v[i]) for v in (brightness, contrast, saturation, drawn['turn'], drawn['grey'])))
        assert (ours[i] - wanted).abs().max() < 1e-10


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('kind', ['brightness', 'contrast'])
def test_scalar_jitter_equals_torchvisions(kind, channels, monkeypatch):
    images = photographs(4, 16)[:, :channels]*0.3 + 0.35
    monkeypatch.setattr(module, '_factor', lambda amount, applied, *_: torch.full(applied.shape, 1.25 if amount else 1.0))
    ours = augment(images, ViewPolicy(**{kind: 0.5}), generator())
    theirs = torch.stack([getattr(reference, f'adjust_{kind}')(x, 1.25) for x in images])
    assert (ours - theirs).abs().max() < 1e-4


def test_saturation_and_grey_equal_torchvisions_up_to_its_luma_weights():
    "Torchvision's weights sum to 0.9999; a pixel in [0, 1] changes by at most 1e-4 times the factor."
    images = photographs(4, 16)*0.3 + 0.35
    apply = lambda M: torch.einsum('ij,njhw->nihw', M[0], images)
    no = torch.tensor([False])
    for s in (0.0, 0.6, 1.3): assert (apply(colour_matrices(torch.tensor([s]), torch.zeros(1), no)) - reference.adjust_saturation(images, s)).abs().max() < 1e-4*max(1, abs(1 - s))
    assert (apply(colour_matrices(torch.ones(1), torch.zeros(1), ~no)) - reference.rgb_to_grayscale(images, 3)).abs().max() < 1e-4


@pytest.mark.parametrize('turn', [-1/3, 0.0, 1/3])
def test_hue_equals_torchvisions_at_thirds_of_the_circle(turn):
    images = photographs(4, 16)
    M = colour_matrices(torch.ones(1), torch.tensor([turn]), torch.tensor([False]))[0]
    assert (torch.einsum('ij,njhw->nihw', M, images) - torch.stack([reference.adjust_hue(x, turn) for x in images])).abs().max() < 1e-4


def test_every_colour_matrix_fixes_greys_and_hue_keeps_lengths():
    g = generator()
    u = lambda: torch.rand(200, generator=g, dtype=torch.float64)
    M = colour_matrices(u()*2, u() - 0.5, u() < 0.3)
    assert (M.sum(2) - 1).abs().max() < 1e-10
    H = colour_matrices(torch.ones(200, dtype=torch.float64), u() - 0.5, torch.zeros(200, dtype=torch.bool))
    assert (H @ H.mT - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-10 and (torch.linalg.det(H) - 1).abs().max() < 1e-10


def test_factors_and_turns_stay_in_their_range_and_skip_unjittered_images():
    applied = torch.arange(10000).view(-1, 1, 1) % 2 == 0
    f = module._factor(0.4, applied, torch.empty(0), generator())
    assert (f[~applied] == 1).all() and f.min() >= 0.6 and f.max() <= 1.4 and abs(f[applied].mean() - 1) < 5*0.8/math.sqrt(12*5000)
    images = photographs(6, 8)
    assert (augment(images, ViewPolicy(jitter=0, brightness=0.9, hue=0.5, saturation=1, contrast=1), generator()) - images).abs().max() < 1e-6


def test_grayscale_is_lost_in_the_stated_share():
    views = augment(photographs(1, 8).repeat(2000, 1, 1, 1), ViewPolicy(grayscale=0.2), generator())
    share = (views.amax(1) - views.amin(1)).flatten(1).amax(1).lt(1e-5).double().mean()
    assert abs(share - 0.2) < 5*math.sqrt(0.2*0.8/2000)


def test_colour_of_grey_images_and_of_other_channel_counts():
    grey = torch.rand(5, 1, 8, 8, generator=generator())
    assert torch.allclose(augment(grey, ViewPolicy(saturation=0.5, hue=0.5, grayscale=1), generator()), grey, atol=1e-6)
    many = torch.rand(5, 4, 8, 8, generator=generator())
    assert augment(many, ViewPolicy(brightness=0.4, contrast=0.4, crop=(0.2, 1)), generator()).shape == many.shape
    for policy in (ViewPolicy(hue=0.1), ViewPolicy(saturation=0.1), ViewPolicy(grayscale=0.1)):
        with pytest.raises(ValueError, match='1 or 3 channels; got 4'): augment(many, policy, generator())


# ---- blur, noise, erasing ----------------------------------------------------------------------------------------------
def test_blur_equals_the_double_sum():
    images, sigma = photographs(3, 9, torch.float64)[:, :, :, :7], torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
    ours = blur(images, sigma)
    for n, c, i, j in itertools.product(range(3), (0, 2), (0, 4, 8), (0, 3, 6)):
        assert abs(ours[n, c, i, j] - blurred_pixel(images[n, c], float(sigma[n]), i, j)) < 1e-10


def test_blur_equals_torchvisions_away_from_the_border():
    images = photographs(2, 61)
    ours, theirs = blur(images, torch.tensor([1.0, 1.5])), [reference.gaussian_blur(x, [25, 25], [s, s]) for x, s in zip(images, (1.0, 1.5))]
    assert (ours - torch.stack(theirs))[:, :, 13:-13, 13:-13].abs().max() < 1e-4


def test_blur_of_width_zero_is_exact_and_constant_images_stay():
    images = photographs(3)
    assert torch.equal(blur(images, torch.zeros(3)), images)
    assert torch.allclose(blur(torch.full((2, 1, 8, 8), 0.3), torch.tensor([1.0, 9.0])), torch.tensor(0.3), atol=1e-6)
    kept = augment(photographs(1).repeat(1000, 1, 1, 1), ViewPolicy(blur=(1, 2), blurred=0.5), generator())
    share = (kept == photographs(1)).flatten(1).all(1).double().mean()
    assert abs(share - 0.5) < 5*math.sqrt(0.25/1000)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('threshold', [0.0, 0.3, 0.5, 1.0])
def test_solarise_equals_torchvisions_bit_for_bit(threshold, dtype):
    images = photographs(4, dtype=dtype)
    images[0, :, :4] = threshold                                                  # at the threshold itself: inverted
    assert torch.equal(solarise(images, threshold), reference.solarize(images, threshold)) and (solarise(images, threshold)[0, :, :4] == 1 - threshold).all()


def test_solarise_takes_its_share_of_images_and_leaves_the_others_alone():
    "One draw an image against torchvision's `RandomSolarize` with a draw of its own for each: the same share, the same two outcomes."
    images = photographs(1).repeat(2000, 1, 1, 1)
    view = augment(images, ViewPolicy(solarise=0.2, threshold=0.4), generator())
    dark = torch.where(images[0] >= 0.4, 1 - images[0], images[0])
    hit, kept = [(view == other).flatten(1).all(1) for other in (dark, images[0])]
    assert (hit ^ kept).all() and abs(hit.double().mean() - 0.2) < 5*math.sqrt(0.16/2000)
    state = torch.get_rng_state(); torch.manual_seed(0)
    theirs = torch.stack([v2.RandomSolarize(0.4, p=0.2)(x) for x in images])
    torch.set_rng_state(state)
    their_hit = (theirs == dark).flatten(1).all(1)
    assert (their_hit | (theirs == images).flatten(1).all(1)).all() and abs(hit.double().mean() - their_hit.double().mean()) < 5*math.sqrt(2*0.16/2000)


def test_solarising_before_the_last_clamp_equals_clamping_first():
    "Values that a jitter left outside [0, 1] end where a clamp before the inversion would have put them."
    wild = torch.linspace(-0.5, 1.7, 500)
    for threshold in (0.3, 0.5, 1.0): assert torch.equal(solarise(wild, threshold).clamp(0, 1), solarise(wild.clamp(0, 1), threshold))


def test_blur_of_a_chosen_few_equals_blurring_all_with_width_zero(monkeypatch):
    images = torch.rand(16, 3, 12, 10, generator=generator())
    seen = []
    monkeypatch.setattr(module, 'blur', lambda x, sigma: (seen.append((x, sigma)), blur(x, sigma))[1])
    view = augment(images, ViewPolicy(blur=(0.5, 2), blurred=0.4), generator(3))
    (x, sigma), = seen
    rows = [next(i for i in range(16) if torch.equal(images[i], y)) for y in x]
    whole = torch.zeros(16); whole[rows] = sigma
    assert 0 < len(rows) < 16 and torch.allclose(view, blur(images, whole), atol=1e-6)
    assert torch.equal(augment(images, ViewPolicy(blur=(1, 1), blurred=1e-9), generator()), images)


def test_noise_has_its_standard_deviation():
    noise = augment(torch.full((50, 3, 32, 32), 0.5), ViewPolicy(noise=0.05), generator()) - 0.5
    n = noise.numel()
    assert abs(noise.mean()) < 5*0.05/math.sqrt(n) and abs(noise.std() - 0.05) < 5*0.05/math.sqrt(2*n)


def test_erasing_takes_one_rectangle_from_the_stated_share():
    views = augment(torch.ones(3000, 2, 20, 30), ViewPolicy(erase=0.4, erased=(0.1, 0.3)), generator())
    gone = views == 0
    assert torch.equal(gone[:, 0], gone[:, 1]) and ((views == 0) | (views == 1)).all()
    hit = gone[:, 0].flatten(1).any(1)
    assert abs(hit.double().mean() - 0.4) < 5*math.sqrt(0.24/3000)
    rows, columns = gone[hit, 0].any(2).sum(1), gone[hit, 0].any(1).sum(1)
    area = gone[hit, 0].flatten(1).sum(1)
    assert torch.equal(area, rows*columns)                                        # a full rectangle
    assert abs(area.double().mean()/600 - 0.2) < 5*0.1/math.sqrt(len(area))


# ---- augment and two_views ---------------------------------------------------------------------------------------------
def test_identity_policy_returns_the_images_bit_for_bit():
    for images in (photographs(), photographs()[:, :, ::2, 1:], torch.rand(2, 1, 5, 5).half()):
        view = augment(images, ViewPolicy(), generator())
        assert torch.equal(view, images) and view.dtype == images.dtype
        assert all(torch.equal(v, images) for v in two_views(images, ViewPolicy(), 0))


@pytest.mark.parametrize('change', ONE_BY_ONE + [dataclasses.asdict(ALL)], ids=lambda c: next(iter(c)) if len(c) == 1 else 'all')
@pytest.mark.parametrize('channels', [1, 3])
def test_views_stay_in_the_unit_interval_and_differ_by_image_and_draw(change, channels):
    images = photographs(1, 32).repeat(16, 1, 1, 1)[:, :channels]
    images[:, :, ::3] = images[:, :, ::3].round()                                # extremes 0 and 1 as well
    a, b = two_views(images, ViewPolicy(**change), seed=5)
    assert a.shape == images.shape and a.dtype == images.dtype
    assert min(a.min(), b.min()) >= 0 and max(a.max(), b.max()) <= 1
    if channels == 1 and next(iter(change)) in ('saturation', 'hue', 'grayscale'): return
    assert len({x.numpy().tobytes() for x in a}) > 1 and not torch.equal(a, b)   # draws are per image, and views are independent


def test_views_repeat_with_the_seed_and_leave_the_global_generator_alone():
    images = photographs()
    before = torch.get_rng_state()
    first, again, other = two_views(images, ALL, 7), two_views(images, ALL, 7), two_views(images, ALL, 8)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert all(torch.equal(x, y) for x, y in zip(first, again)) and all(torch.equal(x, y) for x, y in zip(first, two_views(images, ALL, 7)))
    assert not torch.equal(first[0], other[0])


def test_views_do_not_depend_on_the_layout_in_memory():
    images = photographs()
    wide = torch.zeros(6, 3, 40, 40); wide[:, :, 4:36, 4:36] = images
    reversed_ = images.flip(0).contiguous().flip(0)
    for other in (images.to(memory_format=torch.channels_last), wide[:, :, 4:36, 4:36], images.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), reversed_):
        assert torch.allclose(augment(other, ALL, generator(2)), augment(images, ALL, generator(2)), atol=1e-6)


def test_augment_does_not_change_its_input():
    for policy in [ALL] + [ViewPolicy(**c) for c in ONE_BY_ONE]:
        images = photographs(); copy = images.clone()
        augment(images, policy, generator()); assert torch.equal(images, copy)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    images = photographs().to(dtype)
    assert torch.equal(augment(images, ALL, generator()), augment(images.float(), ALL, generator()).to(dtype))


def test_double_precision_stays_double_and_agrees_with_single_where_draws_are_equal():
    images = photographs(dtype=torch.float64)
    assert augment(images, ALL, generator()).dtype == torch.float64
    box = torch.tensor([[2.0, 3, 20, 20]]*6)
    assert (warp(images, box.double()) - warp(images.float(), box)).abs().max() < 1e-4


def test_images_of_one_pixel_and_oblong_images():
    assert augment(torch.rand(3, 3, 1, 1), ALL, generator()).shape == (3, 3, 1, 1)
    assert augment(torch.rand(3, 1, 5, 60), ALL, generator()).isfinite().all()


@pytest.mark.parametrize('error, match, images', [
    (TypeError, r'torch.uint8. Convert bytes with images.float\(\) / 255', torch.zeros(2, 1, 4, 4, dtype=torch.uint8)),
    (TypeError, 'floating tensor; got float64', np.zeros((2, 1, 4, 4))),
    (ValueError, r'\(n, c, h, w\).*got \(1, 4, 4\)', torch.zeros(1, 4, 4)),
    (ValueError, 'none of them zero', torch.zeros(0, 1, 4, 4)),
    (ValueError, r'in \[0, 1\]; got -1 to 1. Normalise after', torch.linspace(-1, 1, 32).view(2, 1, 4, 4)),
    (ValueError, r'in \[0, 1\]; got 0 to 255', torch.linspace(0, 255, 32).view(2, 1, 4, 4)),
    (ValueError, 'nan', torch.full((2, 1, 4, 4), float('nan')))])
def test_augment_refuses(error, match, images):
    with pytest.raises(error, match=match): augment(images, ALL, generator())


def test_augment_refuses_a_seed_in_place_of_a_generator():
    for wrong in (0, None):
        with pytest.raises(TypeError, match=r'generator must be a torch.Generator; got .*manual_seed\(0\)'): augment(photographs(), ALL, wrong)


@pytest.mark.gpu
def test_views_on_a_gpu():
    images = photographs(64).cuda()
    a, b = two_views(images, ALL, 3)
    assert a.device == images.device and torch.equal(a, two_views(images, ALL, 3)[0]) and not torch.equal(a, b) and 0 <= a.min() and a.max() <= 1
    geometry = ViewPolicy(crop=(0.2, 1), flip=0.5, rotation=20, brightness=0.4, hue=0.1)        # a generator on the CPU draws the same everywhere
    assert torch.allclose(augment(images, geometry, generator()).cpu(), augment(images.cpu(), geometry, generator()), atol=1e-4)


# ---- seeds and policies ------------------------------------------------------------------------------------------------
def test_view_seeds_differ_in_the_bits_that_count():
    "The CPU generator uses the lower 32 bits only; 60,000 counters collide there less than 5 standard errors above chance."
    seeds = [view_seed(s, e, i) for s in range(3) for e in range(100) for i in range(200)]
    assert len(set(seeds)) == 60000 and all(0 <= s < 2**63 for s in seeds[:100])
    collisions, chance = 60000 - len({s % 2**32 for s in seeds}), 60000**2/2/2**32
    assert collisions < chance + 5*math.sqrt(chance)
    assert view_seed(0, 1, 2) == view_seed(np.int64(0), torch.tensor(1), 2) and view_seed(0, 1, 2) != view_seed(0, 1, 2, 0) != view_seed(0, 1, 2, 1)


def test_view_seed_is_fixed_for_ever():
    "Half of the first eight bytes of SHA-256 of the text '(0, 0, 0)'."
    assert view_seed(0, 0, 0) == 151133529135046365


@pytest.mark.parametrize('error, change', [(ValueError, dict(crop=(0, 1))), (ValueError, dict(crop=(0.5, 1.1))), (ValueError, dict(crop=(0.9, 0.5))), (TypeError, dict(crop=0.5)),
    (TypeError, dict(crop=(0.1, 0.2, 0.3))), (ValueError, dict(ratio=(0, 1))), (ValueError, dict(flip=1.1)), (ValueError, dict(flip=-0.1)), (ValueError, dict(rotation=200)),
    (ValueError, dict(hue=0.6)), (ValueError, dict(solarise=1.1)), (ValueError, dict(threshold=-0.1)), (ValueError, dict(noise=-1)), (ValueError, dict(noise=float('nan'))), (ValueError, dict(blur=(-1, 1))), (TypeError, dict(brightness='much')), (TypeError, dict(flip=True))])
def test_policies_out_of_range_name_the_field(error, change):
    with pytest.raises(error, match=next(iter(change))): ViewPolicy(**change)


def test_view_seeds_differ_by_epoch_step_and_rank_and_so_do_the_views():
    images = photographs(2)
    seeds = [view_seed(0, e, s, r) for e in range(3) for s in range(3) for r in range(3)]
    assert len({two_views(images, ALL, s)[0].numpy().tobytes() for s in seeds}) == 27


def test_a_pair_of_policies_gives_each_view_its_own():
    images, first, second = photographs(), ViewPolicy(flip=1), ViewPolicy(solarise=1)
    a, b = two_views(images, (first, second), 0)
    assert torch.equal(a, images.flip(-1)) and torch.equal(b, solarise(images))
    assert all(torch.equal(x, y) for x, y in zip(two_views(images, (ALL, ALL), 3), two_views(images, ALL, 3))) and all(torch.equal(x, y) for x, y in zip(two_views(images, [ALL, ALL], 3), two_views(images, ALL, 3)))
    for wrong in ('strong', None, (ALL,), (ALL, ALL, ALL), (ALL, CorruptionPolicy()), dataclasses.asdict(ALL)):
        with pytest.raises(TypeError, match='policy must be a ViewPolicy, a pair of them, or a CorruptionPolicy'): two_views(images, wrong, 0)


# ---- the papers' policies ----------------------------------------------------------------------------------------------
def test_constants_of_simclr():
    "arXiv 2002.05709v3, appendix A (ImageNet, strength 1) and B.9 (CIFAR-10, strength 1/2, no blur)."
    p = simclr_policy()
    assert p == POLICIES['simclr_imagenet'] and p.ratio == (3/4, 4/3) and p.solarise == p.noise == p.erase == p.rotation == p.shear == p.translation == 0
    assert (p.crop, p.flip, p.jitter, p.grayscale, p.blur, p.blurred) == ((0.08, 1), 0.5, 0.8, 0.2, (0.1, 2), 0.5)
    assert (p.brightness, p.contrast, p.saturation, p.hue) == (0.8, 0.8, 0.8, 0.2)
    c = POLICIES['simclr_cifar']
    assert (c.brightness, c.contrast, c.saturation, c.hue, c.blurred) == (0.4, 0.4, 0.4, 0.1, 0)
    images = photographs()
    assert all(torch.equal(x, y) for x, y in zip(two_views(images, c, 1), two_views(images, COLOUR, 1)))
    assert simclr_policy(112).blur == (0.05, 1)
    for wrong in (dict(strength=1.3), dict(strength=-1), dict(image_size=0), dict(blurred=2)):
        with pytest.raises(ValueError): simclr_policy(**wrong)


def test_constants_of_byol():
    "arXiv 2006.07733v3, appendix B: the two views differ in blur and solarisation only."
    a, b = byol_policies()
    assert (a, b) == POLICIES['byol_imagenet'] and dataclasses.replace(a, blurred=0.1, solarise=0.2) == b
    assert (a.crop, a.ratio, a.flip, a.jitter, a.grayscale, a.blur, a.threshold) == ((0.08, 1), (3/4, 4/3), 0.5, 0.8, 0.2, (0.1, 2), 0.5)
    assert (a.brightness, a.contrast, a.saturation, a.hue) == (0.4, 0.4, 0.2, 0.1)
    assert (a.blurred, b.blurred, a.solarise, b.solarise) == (1, 0.1, 0, 0.2)
    assert [p.blurred for p in POLICIES['byol_cifar']] == [0, 0] and POLICIES['byol_cifar'][1].solarise == 0.2


def test_policies_come_back_from_json():
    import json
    for policy in (*POLICIES.values(), ALL, CorruptionPolicy(0.3, (0, 1, 1), True)):
        record = [dataclasses.asdict(p) for p in policy] if isinstance(policy, tuple) else dataclasses.asdict(policy)
        assert policy_from_record(json.loads(json.dumps(record))) == policy
    for wrong in ('simclr', [1], None):
        with pytest.raises(TypeError, match='record must be'): policy_from_record(wrong)


# ---- tables ------------------------------------------------------------------------------------------------------------
def marked(n, d): return torch.arange(float(n))[:, None].expand(n, d)           # every value says which row it is from


@pytest.mark.parametrize('rate, columns, count', [(0.6, 10, 6), (0.6, 5, 3), (0.29, 100, 29), (0.7, 10, 7), (0.5, 3, 1), (0, 4, 0), (1, 4, 4)])
def test_exactly_the_floor_of_rate_times_columns_is_drawn_in_each_row(rate, columns, count):
    n = 400
    view = corrupt(marked(n, columns), CorruptionPolicy(rate), generator())
    changed = (view != marked(n, columns)).sum(1)
    assert changed.max() <= count and abs(changed.double().mean() - count*(1 - 1/n)) < 5*math.sqrt(count/n/n) + 1e-9   # a value drawn from its own row, chance 1/n, shows no change


def test_columns_and_sources_are_drawn_equally_often():
    n, m, rounds = 20, 5, 2000
    g = generator()
    hits, sources = torch.zeros(m), torch.zeros(n, n)
    for _ in range(rounds):
        view = corrupt(marked(n, m), CorruptionPolicy(0.4), g)
        hits += (view != marked(n, m)).double().mean(0)
        sources[torch.arange(n), view[:, 0].long()] += (view[:, 0] != torch.arange(n)).double()
    share, error = 0.4*(1 - 1/n), math.sqrt(0.24/rounds)                            # rows within a batch are dependent: one independent draw a batch, at least
    assert (hits/rounds - share).abs().max() < 5*error
    p = 0.4/n
    off = ~torch.eye(n, dtype=torch.bool)
    assert (sources[off]/rounds - p).abs().max() < 5*math.sqrt(p*(1 - p)/rounds)


def test_groups_move_together_and_values_stay_in_their_column():
    frame = pd.DataFrame({'x': np.arange(50.0), 'c': list('abcde')*10, 'y': [None, *range(49)]})
    encoder = ColumnEncoder().fit(frame)
    rows = encoder.transform(frame)
    policy = policy_for(TableData(rows, torch.zeros(50).long(), ('u',), 't', 'train', frame, encoder))
    assert policy == CorruptionPolicy(0.6, (0, 1, 1, 1, 1, 1, 2, 2), False)
    whole = {g: {tuple(r) for r in rows[:, encoder.groups == g].tolist()} for g in range(3)}
    for seed in range(20):
        view = corrupt(rows, policy, generator(seed))
        for g in range(3): assert {tuple(r) for r in view[:, encoder.groups == g].tolist()} <= whole[g]
        assert (view[:, 1:6].sum(1) == 1).all()                                    # still one-hot
    alone = corrupt(rows, CorruptionPolicy(0.6), generator())
    assert (alone[:, 1:6].sum(1) != 1).any()                                       # which single columns would not keep


def test_a_full_corruption_keeps_every_columns_values():
    rows = torch.randn(64, 9, generator=generator(), dtype=torch.float64)
    view = corrupt(rows, CorruptionPolicy(1), generator(1))
    assert torch.equal(view.sort(0).values, rows.sort(0).values) and view.dtype == rows.dtype and not torch.equal(view, rows)
    assert torch.equal(corrupt(rows.T.contiguous().T, CorruptionPolicy(0.6), generator(1)), corrupt(rows, CorruptionPolicy(0.6), generator(1)))


def test_views_of_rows_repeat_with_the_seed_and_one_stays_clean():
    data = load_table('breast_cancer', limit=60)
    policy, before = policy_for(data), torch.get_rng_state()
    (a, b), (c, d) = two_views(data.values, policy, 5), two_views(data.values, policy, 6)
    assert torch.equal(a, data.values) and torch.equal(c, data.values) and torch.equal(b, two_views(data.values, policy, 5)[1]) and not torch.equal(b, d)
    e, f = two_views(data.values, dataclasses.replace(policy, both=True), 5)
    assert not torch.equal(e, data.values) and not torch.equal(e, f)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize('error, match, change', [(ValueError, 'rate', dict(rate=1.1)), (ValueError, 'rate', dict(rate=-0.1)), (TypeError, 'rate', dict(rate='0.6')), (TypeError, 'both', dict(both=1)),
    (ValueError, 'every number from 0', dict(groups=(0, 2))), (ValueError, 'every number from 0', dict(groups=())), (ValueError, 'every number from 0', dict(groups=(-1, 0)))])
def test_corruption_policies_out_of_range_name_the_field(error, match, change):
    with pytest.raises(error, match=match): CorruptionPolicy(**change)


@pytest.mark.parametrize('match, rows', [('at least 2 row', torch.zeros(1, 3)), (r'\(n, 3\); got \(4, 2\)', torch.zeros(4, 2)), ('finite', torch.full((4, 3), float('nan')))])
def test_corrupt_refuses(match, rows):
    with pytest.raises(ValueError, match=match): corrupt(rows, CorruptionPolicy(groups=(0, 1, 1)), generator())


def test_policy_for_a_stream_is_that_of_its_images(tmp_path):
    from lab_fixtures import patch, save
    save(patch(0), tmp_path/'c'/'0.png')
    def stream(channels, side): return ImageStream([tmp_path/'c'/'0.png'], torch.tensor([0]), ('c',), 'photos', 'train', channels, side)
    def memory(channels, side): return ImageData(torch.zeros(1, channels, side, side), torch.tensor([0]), ('c',), 'photos', 'train')
    for shape in ((3, 32), (3, 224), (1, 96)): assert policy_for(stream(*shape)) == policy_for(memory(*shape))


def test_policy_is_frozen_and_survives_json():
    import json
    with pytest.raises(dataclasses.FrozenInstanceError): COLOUR.flip = 0
    assert ViewPolicy(**json.loads(json.dumps(dataclasses.asdict(ALL)))) == ALL


def test_policy_for_each_kind_of_data():
    def data(name, c, side): return ImageData(torch.zeros(2, c, side, side), torch.tensor([0, 0]), ('x',), name, 'train')
    assert policy_for(load_images('digits', limit=10)) == DIGITS and DIGITS.flip == 0 and 0 < DIGITS.rotation <= 15
    assert policy_for(data('fashion_mnist', 1, 28)) == GREY and GREY.flip == 0.5
    assert policy_for(data('cifar10', 3, 32)) == COLOUR and COLOUR.blur == (0, 0)
    assert (COLOUR.crop, COLOUR.jitter, COLOUR.brightness, COLOUR.hue, COLOUR.grayscale) == ((0.08, 1), 0.8, 0.4, 0.1, 0.2)
    large = policy_for(data('photos', 3, 224))
    assert large.blur == (0.1, 2) and large.blurred == 0.5 and dataclasses.replace(large, blur=(0, 0), blurred=1) == COLOUR
    with pytest.raises(TypeError, match='ImageData'): policy_for(torch.zeros(2, 1, 8, 8))
