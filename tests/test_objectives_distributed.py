"""Two processes with different rows equal one process with all of them: loss, gradient as DistributedDataParallel averages it,
statistics; and a bad batch of one process is refused by both. One start of the processes serves every objective."""
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from conformance import paired
from peira_krepes.objectives import PEIRA, BarlowTwins, PEIRALoss

OBJECTIVES = {"PEIRA": PEIRA(), "PEIRA centred": PEIRA(0.3, center=True), "BarlowTwins": BarlowTwins(0.1)}        # new objectives join here
LOSSES = {"PEIRALoss": lambda: PEIRALoss(3, rate=0.3), "PEIRALoss centred": lambda: PEIRALoss(3, rate=0.3, center=True)}
ROWS = [slice(0, 5), slice(5, 14)]                     # unequal shares of each batch
STEPS = 3


def batch(step): return paired(14, 4, seed=step, shift=1.0)


def encoder():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def run(rows, wrap):
    "Values and parameter gradients of every objective on this share of the rows; both views in one forward pass."
    found = {}
    for name, objective in OBJECTIVES.items(): found[name] = steps(lambda a, b, o=objective: o.loss(a, b), rows, wrap, 1)
    for name, make in LOSSES.items():
        loss = make()
        found[name] = steps(loss, rows, wrap, STEPS) | {"N": loss.N, "Sigma": loss.Sigma}
    return found


def steps(loss, rows, wrap, count):
    net, values, gradients = wrap(encoder()), [], []
    for step in range(count):
        x_a, x_b = (x[rows] for x in batch(step))
        net.zero_grad()
        value = loss(*net(torch.cat([x_a, x_b])).split(len(x_a)))
        value.backward()
        values.append(value.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    return {"values": torch.stack(values), "gradients": torch.stack(gradients)}


def refusals(rank):
    "What each process says when only process 1 has a bad batch, and whether training goes on afterwards."
    z_a, z_b = (z[ROWS[rank], :3].clone() for z in batch(0))
    bad = z_a.clone()
    if rank == 1: bad[2, 1] = float("nan")
    loss, said = PEIRALoss(3), []
    for attempt in (lambda: loss(bad, z_b), lambda: PEIRA().loss(bad, z_b), lambda: BarlowTwins().loss(z_a[:1] if rank == 1 else z_a, z_b[:1] if rank == 1 else z_b),
                    lambda: loss(z_a * (1e200 if rank == 1 else 1), z_b)):
        try: attempt()
        except (ValueError, FloatingPointError) as e: said.append(str(e))
        else: said.append("")
    return said, float(loss.ema_weight), float(loss(z_a, z_b))


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        results = run(ROWS[rank], DistributedDataParallel), refusals(rank)
        torch.save(results, os.path.join(folder, f"{rank}.pt"))
        dist.barrier()
    finally: dist.destroy_process_group()
    os._exit(0) # all is written; gloo's threads now and then abort in the interpreter's teardown


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(worker, (folder,), nprocs=2)
    return [torch.load(os.path.join(folder, f"{r}.pt")) for r in range(2)]


@pytest.fixture(scope="module")
def union(): return run(slice(None), lambda net: net)


@pytest.mark.parametrize("name", [*OBJECTIVES, *LOSSES])
def test_two_processes_equal_one_on_the_union(two_processes, union, name):
    for found, _ in two_processes:
        for key, wanted in union[name].items(): torch.testing.assert_close(found[name][key], wanted, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def alone(): return [run(rows, lambda net: net) for rows in ROWS]


@pytest.mark.parametrize("name", [*OBJECTIVES, *LOSSES])
def test_shares_alone_would_give_another_gradient(union, alone, name):
    "The test above can fail: the average of the processes' own gradients is not the gradient of the union."
    own = [found[name]["gradients"][0] for found in alone]
    whole = union[name]["gradients"][0]
    assert ((own[0] + own[1]) / 2 - whole).norm() > 1e-2 * whole.norm()


def test_a_bad_batch_of_one_process_is_refused_by_all(two_processes):
    (said_0, weight_0, value_0), (said_1, weight_1, value_1) = (refused for _, refused in two_processes)
    assert "row 2" in said_1[0] and "row 2" in said_1[1] and "at least 2 row" in said_1[2]
    for message in said_0[:3]: assert "other process" in message
    for message in (said_0[3], said_1[3]): assert "overflow" in message
    assert weight_0 == weight_1 == 0 and value_0 == value_1
