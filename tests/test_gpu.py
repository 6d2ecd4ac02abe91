"Training on a CUDA device: every method, the CPU's numbers, checkpoints that move between devices. Run with `pytest -m gpu` on a machine that has one."
import math

import pytest, torch

from peira_krepes.lab.data import load_images
from peira_krepes.lab.methods import METHODS
from peira_krepes.lab.pretrain import pretrain
from peira_krepes.lab.views import ViewPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DIGITS = load_images("digits", limit=160)
TINY = dict(epochs=2, batch_size=64, dim=8, hidden=32, encoder_options={"width": 8})


@pytest.mark.filterwarnings("ignore:the features have collapsed")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_the_device(method, autocast):
    run = pretrain(DIGITS, method, device="cuda", autocast=autocast, **TINY)
    assert all(math.isfinite(h["energy"]) and not h["skipped_steps"] for h in run.history)
    assert run.method.N.device.type == "cuda" and all(p.device.type == "cuda" for p in run.encoder.parameters())

@pytest.mark.filterwarnings("ignore:the features have collapsed")
@pytest.mark.parametrize("method", METHODS)
def test_one_step_agrees_with_the_cpu(method):
    "One step without chance: weights are drawn on the CPU, views (drawn on the device) are the images themselves, so only rounding differs."
    options = TINY | dict(epochs=1, batch_size=160, optimizer="lars", learning_rate=0.1, policy=ViewPolicy())
    (cpu, gpu) = (pretrain(DIGITS, method, device=d, autocast=False, **options) for d in ("cpu", "cuda"))
    assert gpu.history[0]["energy"] == pytest.approx(cpu.history[0]["energy"], rel=1e-3, abs=1e-3)
    for a, b in zip(cpu.encoder.state_dict().values(), gpu.encoder.state_dict().values()): torch.testing.assert_close(a, b.cpu(), atol=1e-3, rtol=1e-3)

@pytest.mark.filterwarnings("ignore:the features have collapsed")
def test_a_checkpoint_moves_between_devices(tmp_path):
    first = pretrain(DIGITS, out=tmp_path, device="cuda", autocast=False, **TINY)
    again = pretrain(DIGITS, out=tmp_path, device="cpu", autocast=False, **TINY)
    assert first.history == again.history and all(p.device.type == "cpu" for p in again.encoder.parameters())
