"""Training steps a second: digits and Fashion-MNIST, float32 and bfloat16, the methods side by side.

    OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_training.py --benchmark-json=training.json
    python benchmarks/bench_training.py                     # images per second of wall time at the threads given, all cases in one run

A step is everything: views, one forward pass of both, loss, backward pass, clipping, AdamW. Images are counted once, though each is seen in two views. Cases take turns and the fastest
turn of each counts, because a busy machine slows whichever runs at that moment. Fashion-MNIST is left out where it is not installed.
"""
import sys, time

import pytest
import torch

from peira_krepes.lab.data import load_images
from peira_krepes.lab.pretrain import prepared
from peira_krepes.lab.views import view_seed

SETTINGS = dict(data_options=None, encoder=None, out=None, epochs=1, accumulate=1, optimizer="adamw", learning_rate=1e-4, weight_decay=1e-4, warmup=0.1, clip=1.0, clip_from=1, seed=0,
                method_options=None, policy=None, workers=0)
SIZES = {"digits": dict(batch_size=128, dim=64, hidden=512, encoder_options=None), "fashion_mnist": dict(batch_size=256, dim=128, hidden=512, encoder_options={"dim": 128})}
METHODS = ("peira", "vicreg", "barlow_twins", "simclr", "byol", "sigreg")


def available():
    def there(name):
        try: return load_images(name, limit=1024)
        except FileNotFoundError: return None
    return {name: data for name in SIZES if (data := there(name)) is not None}


def step_of(data, name, method, autocast):
    "A function that takes one training step on the first batch, and the images it takes."
    run = prepared(SETTINGS | SIZES[name] | {"data": data, "method": method, "autocast": autocast}, torch.device("cpu"))
    run.modules.train()
    rows = torch.arange(run.micro_batch)
    batch, count = next(iter(data.batches([rows]))), iter(range(10**9))
    def step():
        energy, reason = run.step([batch], [view_seed(0, 0, next(count))])
        if reason: raise FloatingPointError(reason)
    return step, len(rows)


DATA = available()
CASES = [(name, method, autocast) for name in DATA for method in METHODS for autocast in (False, True)]


@pytest.mark.parametrize("name, method, autocast", CASES)
def test_step(benchmark, name, method, autocast):
    step, images = step_of(DATA[name], name, method, autocast)
    benchmark.group = f"{name}, {'bfloat16' if autocast else 'float32'}"
    benchmark.extra_info.update(method=method, images=images, threads=torch.get_num_threads(), torch=torch.__version__)
    benchmark.pedantic(step, warmup_rounds=2, rounds=5)


def main(turns=6):
    steps = {case: step_of(DATA[case[0]], *case) for case in CASES}
    best = dict.fromkeys(CASES, float("inf"))
    for turn in range(turns + 1):                           # the first turn warms up
        for case, (step, _) in steps.items():
            start = time.perf_counter()
            step()
            if turn: best[case] = min(best[case], time.perf_counter() - start)
    print(f"{torch.get_num_threads()} thread(s), images per second")
    print(f"{'':16}{'':14}{'float32':>10}{'bfloat16':>10}{'ratio':>8}")
    for name in DATA:
        for method in METHODS:
            slow, fast = (steps[name, method, a][1] / best[name, method, a] for a in (False, True))
            print(f"{name:16}{method:14}{slow:10.0f}{fast:10.0f}{fast / slow:8.2f}")


if __name__ == "__main__": sys.exit(main())
