"""Batched views beside torchvision's transforms image by image; training steps of the small encoders.

    OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_views.py --benchmark-json=benchmarks/views.json
    OMP_NUM_THREADS=1 python benchmarks/bench_views.py            # the ratios, in alternation, on CPU time

Both sides do the same work on 256 images: a random resized crop without antialias, a flip, colour jitter for 80 % and loss of colour
for 20 % (colour images), or crop, flip, turn and jitter (grey ones), or all of SimCLR's ImageNet policy (stronger jitter, and a blur for half of the images)
or of BYOL's second view (a blur for a tenth, solarisation for a fifth). The peer's blur has a kernel of a tenth of the side, as in the papers. The peer gets float images, as ours does. Times are CPU time
of one thread. The script alternates the two sides and prints the ratio of the smallest times and the median of the ratios, because a
busy machine slows whichever runs at that moment.
"""
import statistics
import time

import pytest
import torch
from torchvision.transforms import v2

from peira_krepes.lab.encoders import Projector, build_encoder
from peira_krepes.lab.policies import byol_policies, simclr_policy
from peira_krepes.lab.views import COLOUR, GREY, augment

BATCH = 256
SIZES = {"colour 32x32": (3, 32), "colour 96x96": (3, 96), "grey 28x28": (1, 28), "SimCLR 32x32": (3, 32), "SimCLR 96x96": (3, 96), "SimCLR 224x224": (3, 224), "BYOL b 96x96": (3, 96)}


def images(channels, side): return torch.rand(BATCH, channels, side, side, generator=torch.Generator().manual_seed(0))


def policy_of(size):
    "The policy of one line of `SIZES`."
    kind, side = size.split()[0], SIZES[size][1]
    return {"colour": COLOUR, "grey": GREY, "SimCLR": simclr_policy(side), "BYOL": byol_policies(side)[1]}[kind]


def transforms(size):
    "Torchvision's transforms with the amounts of the policy."
    p, side = policy_of(size), SIZES[size][1]
    parts = [v2.RandomResizedCrop(side, scale=p.crop, antialias=False), v2.RandomHorizontalFlip(p.flip)]
    if p == GREY: return v2.Compose([*parts, v2.RandomRotation(p.rotation, interpolation=v2.InterpolationMode.BILINEAR), v2.ColorJitter(p.brightness, p.contrast)])
    parts += [v2.RandomApply([v2.ColorJitter(p.brightness, p.contrast, p.saturation, p.hue)], p=p.jitter), v2.RandomGrayscale(p.grayscale)]
    if p.blur[1]: parts.append(v2.RandomApply([v2.GaussianBlur(side // 20 * 2 + 1, p.blur)], p=p.blurred))
    if p.solarise: parts.append(v2.RandomSolarize(p.threshold, p.solarise))
    return v2.Compose(parts)


def sides(size):
    "Two functions that make one view of each image of a batch: ours and torchvision's."
    batch, generator, one_by_one, policy = images(*SIZES[size]), torch.Generator().manual_seed(0), transforms(size), policy_of(size)
    return {"augment": lambda: augment(batch, policy, generator), "torchvision v2": lambda: [one_by_one(x) for x in batch]}


def training_step(name):
    "A function that runs one forward and backward pass of encoder and projector on both views of a batch of digits."
    net, head, batch = build_encoder(name, 1, image_size=8, seed=0), Projector(64, 512, 64), images(1, 8).repeat(2, 1, 1, 1)
    def step(): head(net(batch)).square().mean().backward()
    return step


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", ["augment", "torchvision v2"])
def test_view(benchmark, side, size):
    torch.set_num_threads(1)
    benchmark.group = f"one view of {BATCH} images, {size}"
    benchmark.extra_info.update(batch=BATCH, torch=torch.__version__)
    benchmark.pedantic(sides(size)[side], warmup_rounds=2, rounds=5, iterations=5 if side == "augment" else 1)


@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_training_step(benchmark, name):
    torch.set_num_threads(1)
    benchmark.group = f"forward and backward, both views of {BATCH} digits"
    benchmark.pedantic(training_step(name), warmup_rounds=2, rounds=5, iterations=5)


def cpu_seconds(function, count):
    start = time.process_time()
    for _ in range(count): function()
    return (time.process_time() - start) / count


def compare(size, rounds=9):
    ours, theirs = sides(size).values()
    ours(), theirs()
    pairs = [(cpu_seconds(ours, 10 if SIZES[size][1] < 200 else 1), cpu_seconds(theirs, 1)) for _ in range(rounds)]
    a, b = (min(times) for times in zip(*pairs))
    print(f"{size:15s} augment {BATCH / a:9,.0f} images/s, torchvision v2 {BATCH / b:7,.0f} images/s: {b / a:5.1f} times (median of ratios {statistics.median(t / o for o, t in pairs):.1f})")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in SIZES: compare(size, rounds=9 if SIZES[size][1] < 200 else 3)
    for name in ("conv", "mlp"):
        step = training_step(name); step()
        rate = 2 * BATCH / min(cpu_seconds(step, 5) for _ in range(9))
        print(f"{name:14s} {rate:9,.0f} digits/s trained; 100 epochs of 1,437, two views each: {2 * 100 * 1437 / rate:.0f} s")
