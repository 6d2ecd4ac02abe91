"""One training step of PEIRA (statistics, solve, gradient) beside lightly's VICReg on the same features, and the plain losses.

    OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_objectives.py --benchmark-json=benchmarks/objectives.json
    OMP_NUM_THREADS=1 python benchmarks/bench_objectives.py            # the ratios, in alternation, on CPU time

Both sides get the features with a gradient, compute the loss and go back to the features. Times are CPU time of one thread:
compare within a row, not between machines. The script alternates the two sides and takes the smallest of each, because a
busy machine slows whichever runs at that moment.
"""
import time

import pytest
import torch

from peira_krepes.objectives import PEIRA, BarlowTwins, PEIRALoss

lightly = pytest.importorskip("lightly.loss")
BATCH, DIMS = 256, (64, 128, 256, 512, 1024)


def step_of(name, dim):
    "A function that runs one forward and backward pass of the named loss."
    z_a, z_b = (z.requires_grad_() for z in torch.randn(2, BATCH, dim, generator=torch.Generator().manual_seed(0)))
    loss = {"PEIRALoss": lambda: PEIRALoss(dim), "PEIRALoss centred": lambda: PEIRALoss(dim, center=True), "PEIRA.loss": lambda: PEIRA().loss,
            "BarlowTwins.loss": lambda: BarlowTwins().loss, "VICReg (lightly)": lightly.VICRegLoss, "Barlow Twins (lightly)": lightly.BarlowTwinsLoss}[name]()
    def step():
        z_a.grad = z_b.grad = None
        loss(z_a, z_b).backward()
    return step


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["PEIRALoss", "PEIRALoss centred", "PEIRA.loss", "BarlowTwins.loss", "VICReg (lightly)", "Barlow Twins (lightly)"])
def test_step(benchmark, name, dim):
    torch.set_num_threads(1)
    benchmark.group = f"batch {BATCH}, dim {dim}"
    benchmark.extra_info.update(loss=name, dim=dim, batch=BATCH, torch=torch.__version__)
    benchmark.pedantic(step_of(name, dim), warmup_rounds=3, rounds=5, iterations=max(2, 2048 // dim))


def ratios(name="PEIRALoss", baseline="VICReg (lightly)", rounds=15):
    "CPU time of `name` over that of `baseline` for each dimension."
    torch.set_num_threads(1)
    for dim in DIMS:
        steps, best = [step_of(n, dim) for n in (name, baseline)], [float("inf")] * 2
        for _ in range(rounds):
            for side, step in enumerate(steps):
                start = time.process_time()
                for _ in range(max(2, 2048 // dim)): step()
                best[side] = min(best[side], (time.process_time() - start) / max(2, 2048 // dim))
        print(f"batch {BATCH}, dim {dim:4}: {name} {best[0] * 1e3:7.2f} ms, {baseline} {best[1] * 1e3:7.2f} ms, ratio {best[0] / best[1]:.2f}")


if __name__ == "__main__": ratios()
