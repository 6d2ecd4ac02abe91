"""Landmark selection beside scikit-learn's greedy k-means++, approximate beside exact leverage, factored beside materialised influence.

    OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_landmarks.py --benchmark-json=benchmarks/landmarks.json
    OMP_NUM_THREADS=1 python benchmarks/bench_landmarks.py [ROWS LANDMARKS [OUT.json]]     # ratios on CPU time; default 1000000 1000

Seeding is judged by two numbers: time, and the potential (mean squared distance to the nearest seed) over scikit-learn's. CPU time of one thread.
"""
import json
import sys
import time

import pytest
import torch

from peira_krepes.krepes.influence import influence
from peira_krepes.krepes.landmarks import leverage_scores, select_landmarks

sklearn = pytest.importorskip("sklearn")
from sklearn.cluster import kmeans_plusplus  # noqa: E402

DIM = 64
DATA = {"spectrum": lambda x, g: x * torch.arange(1, DIM + 1) ** -0.5,
        "clusters": lambda x, g: (torch.randn(500, DIM, generator=g) * 3)[torch.randint(500, (len(x),), generator=g)] + x * torch.rand(len(x), 1, generator=g),
        "heavy tails": lambda x, g: x / torch.rand(len(x), 1, generator=g).sqrt()}


def features(kind, n):
    g = torch.Generator().manual_seed(0)
    return DATA[kind](torch.randn(n, DIM, generator=g), g)


def potential(x, rows):
    "Mean squared distance of the rows of `x` to the nearest of the chosen ones."
    seeds = x[rows]
    reduced = lambda b: torch.addmm(seeds.square().sum(1), b, seeds.T, alpha=-2).amin(1)
    return sum((reduced(b) + b.square().sum(1)).clamp_min(0).sum().item() for b in x.split(4096)) / len(x)


SEEDERS = {"ours": lambda x, m: select_landmarks(x, m), "scikit-learn": lambda x, m: torch.from_numpy(kmeans_plusplus(x.numpy(), m, random_state=0)[1])}


@pytest.mark.parametrize("n, m", [(20_000, 142), (100_000, 317)])
@pytest.mark.parametrize("kind", list(DATA))
@pytest.mark.parametrize("name", list(SEEDERS))
def test_seeding(benchmark, name, kind, n, m):
    torch.set_num_threads(1)
    x = features(kind, n)
    benchmark.group = f"{m} seeds of {n} rows, {kind}"
    rows = benchmark.pedantic(SEEDERS[name], (x, m), warmup_rounds=1, rounds=2)
    benchmark.extra_info.update(name=name, potential=potential(x, rows), torch=torch.__version__, sklearn=sklearn.__version__)


def gaussian_kernel(n=2000):
    x = features("spectrum", n)[:, :6].double()
    d2 = torch.cdist(x, x).square()
    return torch.exp(-2 * d2 / d2.median())


@pytest.mark.parametrize("method", ["exact", "nystrom", "hutchinson"])
def test_leverage(benchmark, method):
    from scipy.stats import spearmanr
    torch.set_num_threads(1)
    K = gaussian_kernel()
    exact = leverage_scores(K, 1e-2, "exact")
    benchmark.group = "leverage of a kernel of 2000 rows"
    scores = benchmark.pedantic(leverage_scores, (K, 1e-2, method), warmup_rounds=1, rounds=2)
    benchmark.extra_info.update(method=method, spearman=spearmanr(scores, exact)[0], error=((scores - exact).norm() / exact.norm()).item())


def materialised(K_x, dA): return torch.linalg.vector_norm(K_x[:, :, None] * dA, dim=2)


@pytest.mark.parametrize("name", ["factored", "signed", "materialised"])
def test_influence(benchmark, name):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    K_x, dA = torch.randn(200, 1000, generator=g), torch.randn(1000, 64, generator=g)
    score = {"factored": influence, "signed": lambda K, A: influence(K, A, signed=True), "materialised": materialised}[name]
    benchmark.group = "influence of 1000 landmarks on 200 samples, 64 dimensions"
    benchmark.pedantic(score, (K_x, dA), warmup_rounds=1, rounds=5)


def timed(function, *arguments):
    start = time.process_time()
    return function(*arguments), time.process_time() - start


def ratios(n=1_000_000, m=1000, out=None):
    "Seconds and potentials of both seeders on every data set, printed and, if asked, written as JSON."
    torch.set_num_threads(1)
    results = []
    for kind in DATA:
        x = features(kind, n)
        rows, seconds = zip(*(timed(seeder, x, m) for seeder in SEEDERS.values()))
        p, q = (potential(x, r) for r in rows)
        results.append({"data": kind, "rows": n, "landmarks": m, "dim": DIM, "seconds": seconds[0], "seconds_sklearn": seconds[1], "potential": p, "potential_sklearn": q,
                        "torch": torch.__version__, "sklearn": sklearn.__version__, "threads": 1})
        print(f"{kind}: {seconds[0]:.1f} s against {seconds[1]:.1f} s ({seconds[1] / seconds[0]:.1f} times), potential {p / q:.3f} of scikit-learn's", flush=True)
    if out:
        with open(out, "w") as file: json.dump(results, file, indent=1)


if __name__ == "__main__": ratios(*map(int, sys.argv[1:3]), *sys.argv[3:4])
