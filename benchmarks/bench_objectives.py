"""The loss step (forward, and backward to the features) of PEIRA beside VICReg, Barlow Twins, SimCLR and SIGReg: ours, and lightly's where there is one.

    OMP_NUM_THREADS=1 python benchmarks/bench_objectives.py [--full] [--batches 256 512] [--dims 256 1024] [--rounds 3] [--json OUT.json]
    OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_objectives.py --benchmark-json=benchmarks/objectives.json

The script prints one row a size, CPU time of one thread and peak memory, each as a ratio to PEIRALoss, and can write everything as JSON. Sides take turns and the
smallest of their repetitions counts, because a busy machine slows whichever runs at that moment. Sizes whose largest side would take long are left out
unless --full is given. Memory is the peak of the resident set during one step in a process forked for it, beyond what it was before the step with both
views in place; every such process is forked before anything else has run, so that no freed memory is there to be reused. Compare within a row, not between machines.
"""
import argparse
import json
import multiprocessing
import platform
import resource
import sys
import time

import lightly.loss
import pytest
import torch
from lightly.loss.lejepa_loss import LeJEPALoss
from tqdm import tqdm

from peira_krepes.objectives import PEIRA, BarlowTwins, PEIRALoss
from peira_krepes.objectives.sigreg import SIGReg
from peira_krepes.objectives.simclr import SimCLR
from peira_krepes.objectives.vicreg import VICReg

BATCHES, DIMS = (256, 512, 1024, 2048), (256, 1024, 2048, 8192)
REFERENCE = "PEIRALoss"


def lejepa():
    "lightly's LeJEPA on two views, both of them global."
    loss = LeJEPALoss()
    return lambda a, b: loss(local_proj=torch.stack([a, b]), global_proj=torch.stack([a, b]))


LOSSES = {"PEIRALoss": lambda dim: PEIRALoss(dim), "PEIRALoss centred": lambda dim: PEIRALoss(dim, center=True), "PEIRA.loss": lambda dim: PEIRA().loss,
          "VICReg": lambda dim: VICReg().loss, "VICReg (lightly)": lambda dim: lightly.loss.VICRegLoss(),
          "BarlowTwins": lambda dim: BarlowTwins().loss, "Barlow Twins (lightly)": lambda dim: lightly.loss.BarlowTwinsLoss(),
          "SimCLR": lambda dim: SimCLR(0.5).loss, "SimCLR (lightly)": lambda dim: lightly.loss.NTXentLoss(temperature=0.5),
          "SIGReg": lambda dim: SIGReg().loss, "SIGReg (lightly)": lambda dim: lejepa()}
TABLE = [name for name in LOSSES if name not in ("PEIRALoss centred", "PEIRA.loss")]


def step_of(name, batch, dim):
    "A function that runs one forward and backward pass of the named loss."
    z_a, z_b = (z.requires_grad_() for z in torch.randn(2, batch, dim, generator=torch.Generator().manual_seed(0)).unbind())
    loss = LOSSES[name](dim)
    def step():
        z_a.grad = z_b.grad = None
        loss(z_a, z_b).backward()
    return step


@pytest.mark.parametrize("batch, dim", [(256, 64), (256, 256), (256, 1024), (1024, 256)])
@pytest.mark.parametrize("name", list(LOSSES))
def test_step(benchmark, name, batch, dim):
    torch.set_num_threads(1)
    benchmark.group = f"batch {batch}, dim {dim}"
    benchmark.extra_info.update(loss=name, dim=dim, batch=batch, torch=torch.__version__, lightly=lightly.__version__)
    benchmark.pedantic(step_of(name, batch, dim), warmup_rounds=2, rounds=3, iterations=max(1, 512 // dim))


# ---- memory ----------------------------------------------------------------------------------------------------------
def peak():
    "Largest resident set so far, in bytes."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak():
    "Make the peak the present size, where the system can (Linux); else a step below the old peak reads as zero."
    try:
        with open("/proc/self/clear_refs", "w") as f: f.write("5")
    except OSError: pass


def measure_memory(name, batch, dim, connection):
    torch.set_num_threads(1)
    step_of(name, 16, 8)()                                  # what a first call of anything allocates once
    step = step_of(name, batch, dim)
    forget_peak()
    before = peak()
    step()
    connection.send(peak() - before)


def memory_of(name, batch, dim):
    "Peak bytes of one step beyond the features, in a process of its own; None if that process was killed, as for want of memory."
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=measure_memory, args=(name, batch, dim, there))
    process.start()
    there.close()
    try: return here.recv()
    except EOFError: return None
    finally: process.join()


# ---- time ------------------------------------------------------------------------------------------------------------
def times_of(names, batch, dim, rounds):
    "Smallest CPU seconds of a step of each loss, sides taking turns; more than one step a turn while steps are short."
    steps = {name: step_of(name, batch, dim) for name in names}
    best, repeats = dict.fromkeys(names, float("inf")), {}
    for turn in range(rounds + 1):                          # the first turn warms up and says how many steps fill a hundredth of a second
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(repeats.get(name, 1)): step()
            spent = (time.process_time() - start) / repeats.get(name, 1)
            if turn: best[name] = min(best[name], spent)
            else: repeats[name] = max(1, min(20, int(0.01 / max(spent, 1e-6))))
    return best


def affordable(batch, dim):
    "Whether every loss takes about a second or less: d x d matrices, batch x batch matrices, and products with the features."
    return dim <= 2048 and batch * dim <= 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each loss at each size")
    parser.add_argument("--full", action="store_true", help="every size, the largest included: tens of minutes and tens of GB")
    parser.add_argument("--json", help="file to write all numbers to")
    options = parser.parse_args()
    sizes = [(b, d) for b in options.batches for d in options.dims if options.full or affordable(b, d)]
    if not sizes: parser.error("every size asked for is left out by default; add --full")
    cases = [(name, b, d) for b, d in sizes for name in TABLE]
    memory = {case: memory_of(*case) for case in tqdm(cases, desc="memory", disable=None)}
    torch.set_num_threads(1)
    cases = [case for case in cases if memory[case] is not None]
    seconds = {(b, d): times_of([n for n in TABLE if (n, b, d) in cases], b, d, options.rounds) for b, d in tqdm(sizes, desc="time", disable=None)}
    ratio = lambda x, reference: x / reference if reference else None
    rows = [{"loss": n, "batch": b, "dim": d, "cpu_seconds": seconds[b, d][n], "peak_bytes": memory[n, b, d], "time_ratio": ratio(seconds[b, d][n], seconds[b, d].get(REFERENCE)),
             "memory_ratio": ratio(memory[n, b, d], memory[REFERENCE, b, d])} for n, b, d in cases]
    for b, d in sizes:
        print(f"\nbatch {b}, dim {d}{'':12}{'CPU ms':>10}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}")
        for r in (r for r in rows if (r["batch"], r["dim"]) == (b, d)):
            print(f"  {r['loss']:28}{r['cpu_seconds'] * 1e3:10.2f}{r['time_ratio'] or float('nan'):8.2f}{r['peak_bytes'] / 2**20:10.1f}{r['memory_ratio'] or float('nan'):8.2f}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"reference": REFERENCE, "rounds": options.rounds, "command": " ".join(sys.argv), "threads": 1, "torch": torch.__version__, "lightly": lightly.__version__,
                       "python": platform.python_version(), "machine": platform.machine(), "rows": rows}, f, indent=1)


if __name__ == "__main__": main()
