"Training in two gloo processes: the steps of one process on the union, joint skips, bit-exact resume, and the program under torchrun."
import itertools, json, os, subprocess, sys
from datetime import timedelta
from pathlib import Path

import pytest, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from peira_krepes.lab import methods, training
from peira_krepes.lab.data import load_images
from peira_krepes.lab.pretrain import pretrain

ROOT = Path(__file__).resolve().parents[1]
DIGITS = load_images("digits", limit=72)
OPTIONS = dict(epochs=2, batch_size=32, dim=4, hidden=8, learning_rate=1e-2, encoder_options={"width": 4}, device="cpu")
METHODS = ("peira", "vicreg", "simclr", "byol", "sigreg")


class Plain(nn.Module):
    "An encoder without batch normalisation, which CPU processes do not share."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 8))
    def forward(self, x): return self.layers(x)

def comparable(method):
    "A run whose steps do not depend on how rows are shared: views without chance, no batch normalisation anywhere."
    patched = {"two_views": lambda x, policy, seed: (x, 0.9 * x.flip(-1)), "Projector": lambda i, hidden, o: nn.Linear(i, o)}
    before = {name: getattr(training, name) for name in patched}
    for name, value in patched.items(): setattr(training, name, value)
    options = {"sigreg": {"n_directions": 16}}.get(method, {})
    predictor, methods.Predictor = methods.Predictor, lambda dim, hidden: nn.Linear(dim, dim)
    try: run = pretrain(DIGITS, method, Plain(), epochs=2, batch_size=32, dim=4, hidden=8, optimizer="lars", learning_rate=5.0, method_options=options, device="cpu") # AdamW would magnify the rounding of gradients that are zero
    finally:
        methods.Predictor = predictor
        for name, value in before.items(): setattr(training, name, value)
    return {"history": run.history, "weights": [v for m in (run.encoder, run.projector, run.method) for v in m.state_dict().values()]}

def resumed(folder):
    "A straight run, and one stopped in its second epoch and called again, with the views of this process."
    views, count = training.two_views, itertools.count(1)
    def stopped(*args):
        if next(count) == 4: raise KeyboardInterrupt
        return views(*args)
    pretrain(DIGITS, out=f"{folder}/straight", **OPTIONS)
    training.two_views = stopped
    try: pretrain(DIGITS, out=f"{folder}/split", **OPTIONS)
    except KeyboardInterrupt: pass
    training.two_views = views
    run = pretrain(DIGITS, out=f"{folder}/split", **OPTIONS)
    return [v for m in (run.encoder, run.projector, run.method) for v in m.state_dict().values()]

def poisoned(rank):
    "Skipped steps when the views of process 1 alone are not finite in the second step."
    views, count = training.two_views, itertools.count(1)
    def broken(*args):
        a, b = views(*args)
        return (a * float("nan"), b) if next(count) == 2 and rank == 1 else (a, b)
    training.two_views = broken
    run = pretrain(DIGITS, **OPTIONS)
    training.two_views = views
    return [h["skipped_steps"] for h in run.history]

def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    seen = []
    views = training.two_views
    training.two_views = lambda *args: (seen.append(views(*args)), seen[-1])[1]
    try:
        results = {"resumed": resumed(folder), "poisoned": poisoned(rank)}
        results["views"] = seen[:4]
        training.two_views = views
        results |= {name: comparable(name) for name in METHODS}
        torch.save(results, f"{folder}/{rank}.pt")
        dist.barrier()
    finally: dist.destroy_process_group()
    os._exit(0) # all is written; gloo's threads now and then abort in the interpreter's teardown


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=2)
    return folder, [torch.load(folder/f"{r}.pt", weights_only=False) for r in range(2)]

@pytest.mark.filterwarnings("ignore:the features have collapsed")
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_take_the_steps_of_one(two, method):
    alone = comparable(method)
    for found in two[1]:
        assert [h["step"] for h in found[method]["history"]] == [h["step"] for h in alone["history"]]
        for a, b in zip(found[method]["weights"], alone["weights"]): torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
        for a, b in zip(found[method]["history"], alone["history"]): assert a["energy"] == pytest.approx(b["energy"], abs=1e-3)

def test_a_resumed_run_of_two_processes_equals_a_straight_one_bit_for_bit(two):
    folder, (first, second) = two
    straight, split = (torch.load(folder/name/"checkpoint.pt", weights_only=True) for name in ("straight", "split"))
    assert straight["history"] == split["history"] and straight["settings"]["processes"] == 2
    assert all(torch.equal(a, b) for a, b in zip(straight["modules"].values(), split["modules"].values()))
    assert all(torch.equal(a, b) for a, b in zip(first["resumed"], second["resumed"]))
    assert len((folder/"split"/"log.jsonl").read_text().splitlines()) == 2

def test_one_bad_process_makes_both_skip(two):
    assert two[1][0]["poisoned"] == two[1][1]["poisoned"] == [1, 0]

def test_processes_see_different_rows_and_views(two):
    for (a, b), (c, d) in zip(two[1][0]["views"], two[1][1]["views"]): assert len(a) == len(c) == 16 and not torch.equal(a, c) and not torch.equal(b, d)

@pytest.mark.filterwarnings("ignore:the features have collapsed")
def test_a_checkpoint_of_two_processes_is_not_continued_by_one(two):
    with pytest.raises(ValueError, match="processes was 2 and is now 1"): pretrain(DIGITS, out=two[0]/"straight", **OPTIONS)

def test_the_program_runs_under_torchrun(tmp_path):
    words = "--dataset digits --epochs 1 --batch-size 512 --dim 4 --hidden 8 --device cpu".split() + ["--encoder-options", '{"width": 2}', "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "peira_krepes.lab.pretrain", *words],
                          capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "epoch 1, energy" in done.stdout
    line = json.loads((tmp_path/"log.jsonl").read_text())
    assert line["processes"] == 2 and (tmp_path/"checkpoint.pt").exists()
