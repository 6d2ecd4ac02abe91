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
from peira_krepes.core.reduction import process_sum
from peira_krepes.objectives.base import union_mean, union_rows
from peira_krepes.objectives.byol import BYOL, SimSiam
from peira_krepes.objectives.sigreg import SIGReg
from peira_krepes.objectives.simclr import SimCLR
from peira_krepes.objectives.spectral import SpectralContrastive
from peira_krepes.objectives.vicreg import VICReg


def taught(objective):
    "The objective with targets that a teacher would make of the same rows."
    return lambda a, b: objective.loss(a, b, targets=(a.sin() + 0.5, b.cos() - a))


# new objectives join here
OBJECTIVES = {"PEIRA": PEIRA().loss, "PEIRA centred": PEIRA(0.3, center=True).loss, "BarlowTwins": BarlowTwins(0.1).loss, "VICReg": VICReg().loss,
              "SpectralContrastive": SpectralContrastive().loss, "SIGReg": SIGReg().loss, "SimCLR": SimCLR().loss, "SimCLR cold": SimCLR(0.05).loss,
              "BYOL": BYOL().loss, "BYOL taught": taught(BYOL()), "BYOL unnormalised": BYOL(False).loss, "BYOL unnormalised, taught": taught(BYOL(False)),
              "SimSiam": SimSiam().loss, "SimSiam taught": taught(SimSiam())}
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
    for name, loss in OBJECTIVES.items(): found[name] = steps(loss, rows, wrap, 1)
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


def unions(rank):
    "What the operations on several processes give here: rows and their place, a mean, derivatives of first and second order."
    x = batch(0)[0][ROWS[rank]].requires_grad_()
    rows, first = union_rows(x)
    total = (process_sum((x ** 3).sum()) ** 2 + (rows.sum(1) ** 3).sum())
    gradient, = torch.autograd.grad(total, x, create_graph=True)
    second, = torch.autograd.grad(gradient.sum(), x)
    strided = process_sum(x[:5].T[::2])
    return {"rows": rows.detach(), "first": first, "mean": union_mean(x[:, 0]).detach(), "float32 mean": union_mean(x[:, 0].float()).detach(),
            "gradient": gradient.detach(), "second": second, "strided": strided.detach(), "own strided": x[:5].T[::2].detach()}


def refusals(rank):
    "What each process says when only process 1 has a bad batch, and whether training goes on afterwards."
    z_a, z_b = (z[ROWS[rank], :3].clone() for z in batch(0))
    bad = z_a.clone()
    if rank == 1: bad[2, 1] = float("nan")
    loss, said = PEIRALoss(3), []
    for attempt in (lambda: loss(bad, z_b), lambda: PEIRA().loss(bad, z_b), lambda: BarlowTwins().loss(z_a[:1] if rank == 1 else z_a, z_b[:1] if rank == 1 else z_b),
                    lambda: loss(z_a * (1e200 if rank == 1 else 1), z_b),
                    lambda: SimCLR().loss(bad, z_b), lambda: BYOL().loss(z_a, z_b, (z_a, bad)), lambda: SimSiam().loss(z_a, z_b, (z_a, z_b)[:2 - rank]),
                    lambda: BYOL(False).loss(z_a, z_b, (z_a, z_b * (1e200 if rank == 1 else 1))),
                    lambda: loss(*(z[:, :3 - rank] for z in (z_a, z_b))), lambda: loss(z_a, z_b, previous=(z_a[:5 - rank], z_b))):
        try: attempt()
        except (TypeError, ValueError, FloatingPointError) as e: said.append(str(e))
        else: said.append("")
    return said, float(loss.ema_weight), float(loss(z_a, z_b))


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        results = run(ROWS[rank], DistributedDataParallel), refusals(rank), unions(rank)
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
    for found, *_ in two_processes:
        for key, wanted in union[name].items(): torch.testing.assert_close(found[name][key], wanted, rtol=0, atol=1e-10)


def test_the_operations_behind_objectives_of_samples(two_processes):
    "Rows come in the order of ranks; a mean weighs shares; the derivative of R equal losses is R times that of one, of any order."
    x = batch(0)[0].requires_grad_()
    total = (x ** 3).sum() ** 2 + (x.sum(1) ** 3).sum()
    gradient, = torch.autograd.grad(total, x, create_graph=True)
    for rank, (_, _, found) in enumerate(two_processes):
        assert torch.equal(found["rows"], x) and found["first"] == ROWS[rank].start
        torch.testing.assert_close(found["mean"], x[:, 0].mean(), rtol=0, atol=1e-12)
        torch.testing.assert_close(found["float32 mean"], x[:, 0].float().mean(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found["gradient"], 2 * gradient[ROWS[rank]], rtol=1e-10, atol=0)
        torch.testing.assert_close(found["strided"], two_processes[0][2]["own strided"] + two_processes[1][2]["own strided"], rtol=1e-12, atol=0)
    # second order: each process differentiates the sum of its own gradient, so the union's is that of both sums, twice, by the inner factor
    second, = torch.autograd.grad(2 * gradient.sum(), x)
    torch.testing.assert_close(torch.cat([found["second"] for *_, found in two_processes]), second, rtol=1e-10, atol=0)


@pytest.fixture(scope="module")
def alone(): return [run(rows, lambda net: net) for rows in ROWS]


@pytest.mark.parametrize("name", [*OBJECTIVES, *LOSSES])
def test_shares_alone_would_give_another_gradient(union, alone, name):
    "The test above can fail: the average of the processes' own gradients is not the gradient of the union."
    own = [found[name]["gradients"][0] for found in alone]
    whole = union[name]["gradients"][0]
    assert ((own[0] + own[1]) / 2 - whole).norm() > 1e-2 * whole.norm()


def test_a_bad_batch_of_one_process_is_refused_by_all(two_processes):
    (said_0, weight_0, value_0), (said_1, weight_1, value_1) = (refused for _, refused, _ in two_processes)
    assert "row 2" in said_1[0] and "row 2" in said_1[1] and "at least 2 row" in said_1[2]
    for message in said_0[:3]: assert "other process" in message
    for message in (said_0[3], said_1[3], said_0[7], said_1[7]): assert "overflow" in message
    assert "z_a" in said_1[4] and "row 2" in said_1[4] and "targets[1]" in said_1[5] and "row 2" in said_1[5] and "must be a pair" in said_1[6]
    for message in said_0[4:7] + said_0[8:10]: assert "other process" in message
    assert "must have 3 columns" in said_1[8] and "previous[0]" in said_1[9]
    assert weight_0 == weight_1 == 0 and value_0 == value_1
