"Pretraining: reproducible, resumable bit for bit, whole checkpoints, steps that fail without a trace, one-line refusals."
import inspect, itertools, json, math, random, subprocess, sys, warnings
from pathlib import Path

import numpy as np, pytest, torch
from torch import nn

from oracles import energy_by_inverse
from peira_krepes.lab import data, methods, pretrain as door, training
from peira_krepes.lab.data import ImageData, load_images
from peira_krepes.lab.methods import ObjectiveMethod, statistics
from peira_krepes.lab.pretrain import main, parser, pretrain
from peira_krepes.lab.probes import collapse_alarm
from peira_krepes.lab.optimizers import learning_rate_at, parameter_groups
from peira_krepes.lab.randomness import own_random_numbers
from peira_krepes.lab.training import Run, Settings
from peira_krepes.lab.views import ViewPolicy, policy_for, two_views
from peira_krepes.objectives.peira import PEIRA

pytestmark = pytest.mark.filterwarnings("ignore:the features have collapsed") # runs of two epochs prove nothing
ROOT = Path(__file__).resolve().parents[1]
DIGITS = load_images("digits", limit=72)
TINY = dict(epochs=3, batch_size=32, dim=8, hidden=16, encoder_options={"width": 4})


def tiny(**changes): return pretrain(DIGITS, **{**TINY, **changes})

def new_run(**changes):
    values = dict(data=DIGITS.checksum, method="peira", encoder="conv", accumulate=1, optimizer="adamw", learning_rate=5e-3, weight_decay=1e-4, warmup=0.1, clip=1.0, clip_from=1, seed=0,
                  method_options={}, policy=policy_for(DIGITS), autocast=False, processes=1)
    run = Run(DIGITS, Settings(**{**values, **TINY, **changes}), torch.device("cpu"))
    run.modules.train()
    return run

def trained(run): return [p for p in run.modules.parameters() if p.requires_grad]

def same(a, b):
    "Whether two nested states are equal bit for bit."
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b

def saved(folder): return torch.load(folder/"checkpoint.pt", weights_only=True)
def weights(run): return [p for m in (run.encoder, run.projector, run.method) for p in m.state_dict().values()]

def stop_at(monkeypatch, batch, error=KeyboardInterrupt):
    "Raise when the views of the batch of this number, counted from 1 over all epochs, are asked for."
    count = itertools.count(1)
    def views(*args):
        if next(count) == batch: raise error
        return two_views(*args)
    monkeypatch.setattr(training, "two_views", views)


# resuming ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"method_options": {"center": True, "rate": 0.1}}, {"method_options": {"rate": 0.3, "carry": True}}, {"method": "barlow_twins"}, {"method": "byol"}, {"method": "sigreg", "optimizer": "lars"},
                                     {"autocast": True}, {"accumulate": 4, "clip_from": 3}], ids=str)
def test_a_resumed_run_equals_a_straight_one_bit_for_bit(tmp_path, monkeypatch, options):
    straight = tiny(out=tmp_path/"straight", **options)
    for batch, epochs in ((4, 1), (3, 2)): # two batches an epoch: stopped within the second epoch, then one epoch after that
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_at(patch, batch * options.get("accumulate", 1))
            tiny(out=tmp_path/"split", **options)
        assert len(saved(tmp_path/"split")["history"]) == epochs
    resumed = tiny(out=tmp_path/"split", **options)
    assert same(saved(tmp_path/"straight"), saved(tmp_path/"split"))
    assert same(weights(straight), weights(resumed)) and straight.history == resumed.history

def test_without_a_folder_the_result_is_the_same(tmp_path):
    assert same(weights(tiny()), weights(tiny(out=tmp_path)))

def test_a_finished_run_returns_from_its_checkpoint(tmp_path, monkeypatch):
    first = tiny(out=tmp_path)
    monkeypatch.setattr(Run, "epoch", lambda *args: pytest.fail("it trained again"))
    again = tiny(out=tmp_path)
    assert same(weights(first), weights(again)) and first.history == again.history
    assert not any(m.training for run in (first, again) for m in (*run.encoder.modules(), *run.projector.modules(), *run.method.modules()))

def test_resume_false_starts_over(tmp_path):
    tiny(out=tmp_path, seed=1)
    assert same(weights(tiny(out=tmp_path, resume=False)), weights(tiny()))

@pytest.mark.parametrize("batch, folder, note", [(1, True, "no epoch had ended"), (3, True, "1 of 3 epochs are in"), (3, False, "pass out=")])
def test_an_interruption_travels_on_and_says_where_to_resume(tmp_path, monkeypatch, batch, folder, note):
    state = torch.get_rng_state()
    stop_at(monkeypatch, batch)
    with pytest.raises(KeyboardInterrupt) as stop: tiny(out=tmp_path if folder else None)
    assert any(note in line for line in stop.value.__notes__) and torch.equal(torch.get_rng_state(), state)

def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    straight, count, write = tiny(), itertools.count(1), torch.save
    def half(state, path):
        if next(count) < 3: return write(state, path)
        path.write_bytes(b"PK half of it")
        raise OSError("no space left")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(torch, "save", half)
        tiny(out=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt", "log.jsonl"] and len(saved(tmp_path)["history"]) == 2
    assert same(weights(tiny(out=tmp_path)), weights(straight))

@pytest.mark.parametrize("change", [
    {"epochs": 4}, {"batch_size": 16}, {"dim": 4}, {"hidden": 8}, {"learning_rate": 1e-3}, {"weight_decay": 0.0}, {"warmup": 0.0}, {"clip": 2.0}, {"clip_from": 2}, {"seed": 1}, {"accumulate": 2}, {"optimizer": "lars"},
    {"method": "barlow_twins"}, {"method_options": {"rate": 0.5}}, {"encoder_options": {"width": 5}}, {"encoder": "resnet18", "encoder_options": {}},
    {"policy": ViewPolicy(flip=0.5)}, {"autocast": True}], ids=lambda c: next(iter(c)))
def test_a_checkpoint_of_other_settings_is_refused_by_name(checkpoint, change):
    before = (checkpoint/"checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=f"other settings: .*{next(iter(change))} was .*resume=False"): tiny(out=checkpoint, **change)
    assert (checkpoint/"checkpoint.pt").read_bytes() == before

@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with warnings.catch_warnings(action="ignore"): tiny(out=folder)
    return folder

def test_a_checkpoint_of_other_images_is_refused(checkpoint):
    with pytest.raises(ValueError, match="other settings: data was"): pretrain(DIGITS.subset(range(71)), out=checkpoint, **TINY)

@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_file_that_is_no_checkpoint_is_refused_and_kept(tmp_path, content):
    path = tmp_path/"checkpoint.pt"
    if content is None: torch.save({"weights": torch.zeros(2)}, path)
    else: path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not a checkpoint"): tiny(out=tmp_path)
    assert path.read_bytes() == before


# randomness ------------------------------------------------------------------------------------------------------------------

def test_the_seed_decides_and_the_global_state_does_not():
    torch.manual_seed(1); np.random.seed(1); random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = tiny(seed=3)
    assert torch.equal(torch.get_rng_state(), states[0]) and (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]
    torch.manual_seed(2); np.random.seed(2); random.seed(2)
    assert same(weights(tiny(seed=3)), weights(first))
    assert not same(weights(tiny(seed=4)), weights(first))

def test_drawing_inside_the_network_is_reproducible_too(monkeypatch):
    class Dropping(nn.Sequential):
        def __init__(self, channels): super().__init__(nn.Flatten(), nn.Linear(64 * channels, 8), nn.Dropout(0.5))
    monkeypatch.setattr(training, "build_encoder", lambda name, channels, image_size, **options: Dropping(channels))
    torch.manual_seed(1); first = tiny()
    torch.manual_seed(2); assert same(weights(tiny()), weights(first))

def test_order_and_views_differ_from_epoch_to_epoch_and_every_batch_is_whole(monkeypatch):
    seen, seeds = [], []
    def views(images, policy, seed):
        pair = two_views(images, policy, seed)
        seen.append((images, *pair))
        seeds.append(seed)
        return pair
    monkeypatch.setattr(training, "two_views", views)
    tiny() # 72 images: two batches of 32, and 8 left over
    assert len(seen) == 6 and all(len(x) == 32 for batch in seen for x in batch)
    epochs = [torch.cat([seen[i][0], seen[i + 1][0]]) for i in (0, 2, 4)]
    assert all(len(e.unique(dim=0)) == 64 for e in epochs) # nothing twice within an epoch
    assert not any(torch.equal(e, f) for e, f in itertools.combinations(epochs, 2))
    assert len(set(seeds)) == 6 and not any(torch.equal(a, b) for _, a, b in seen)

@pytest.mark.parametrize("n, batch_size, sizes", [(33, 32, [32]), (5, 256, [5]), (3, 2, [2]), (2, 2, [2])])
def test_no_batch_of_one(monkeypatch, n, batch_size, sizes):
    seen = []
    monkeypatch.setattr(training, "two_views", lambda images, *rest: (seen.append(len(images)), two_views(images, *rest))[1])
    pretrain(DIGITS.subset(range(n)), **{**TINY, "epochs": 1, "batch_size": batch_size})
    assert seen == sizes


# one step -----------------------------------------------------------------------------------------------------------------------

def test_both_views_go_through_the_network_once_and_together():
    run, shapes = new_run(), []
    run.modules["encoder"].register_forward_hook(lambda m, args, out: shapes.append(tuple(args[0].shape)))
    run.step([DIGITS.images[:32]], [0])
    assert shapes == [(64, 1, 8, 8)]

@pytest.mark.parametrize("method", ["peira", "barlow_twins"])
def test_the_energy_of_an_epoch_is_the_mean_of_the_objectives_value(method):
    run, values = new_run(method=method), []
    def value(module, views, loss):
        Sigma, N, ridge = statistics(module)
        values.append(loss.item() if ridge is None else energy_by_inverse(Sigma.numpy(), N.numpy(), ridge))
    run.modules["method"].register_forward_hook(value)
    entry = run.epoch(door.tqdm(disable=True))
    assert len(values) == 2 and entry["energy"] == pytest.approx(np.mean(values), abs=1e-4)

def poison(run, term):
    "Make one term of each further step not finite."
    if term == "embedding": return run.modules["encoder"].register_forward_hook(lambda m, args, out: out * float("inf"))
    if term == "loss": return run.modules["method"].register_forward_hook(lambda m, args, out: out * float("nan"))
    def hook(module, args, out): out.register_hook(lambda g: g * float("inf"))
    return run.modules["projector"].register_forward_hook(hook)

@pytest.mark.parametrize("term", ["embedding", "loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_no_trace(term):
    run = new_run()
    assert run.step([DIGITS.images[:32]], [0])[1] is None
    before = {k: v.clone() for k, v in run.modules.state_dict().items()}
    moments = {k: {name: v.clone() for name, v in s.items()} for k, s in run.optimizer.state_dict()["state"].items()}
    handle = poison(run, term)
    assert run.step([DIGITS.images[32:64]], [1]) == (None, term)
    assert same(dict(run.modules.state_dict()), before) and same(run.optimizer.state_dict()["state"], moments)
    handle.remove()
    energy, reason = run.step([DIGITS.images[32:64]], [1])
    assert reason is None and math.isfinite(energy)

def test_an_overflow_inside_the_method_is_a_skipped_step():
    run = new_run()
    run.modules["projector"].register_forward_hook(lambda m, args, out: out * 1e30)
    assert run.step([DIGITS.images[:32]], [0]) == (None, "loss")

def test_skipped_steps_are_counted_and_training_goes_on(monkeypatch):
    count, forward = itertools.count(1), methods.PEIRALoss.forward
    monkeypatch.setattr(methods.PEIRALoss, "forward", lambda self, *z: forward(self, *z) * (float("nan") if next(count) in (2, 3, 5) else 1))
    run = tiny(batch_size=16) # four batches an epoch
    assert [h["skipped_steps"] for h in run.history] == [2, 1, 0] and all(math.isfinite(h["energy"]) for h in run.history)
    assert all(torch.isfinite(v).all() for v in weights(run))

@pytest.mark.parametrize("batch_size, steps", [(16, 4), (4, 10)])
def test_many_skipped_steps_in_a_row_are_an_error_that_names_the_term(tmp_path, monkeypatch, batch_size, steps):
    tried = []
    monkeypatch.setattr(Run, "step", lambda self, batches, seeds: (tried.append(1), (None, "gradient"))[1])
    with pytest.raises(FloatingPointError, match=f"gradient was not finite in {steps} steps in a row"): tiny(batch_size=batch_size, out=tmp_path)
    assert len(tried) == steps and not (tmp_path/"checkpoint.pt").exists()

def test_skipped_steps_that_are_not_in_a_row_are_no_error(monkeypatch):
    count = itertools.count(1)
    monkeypatch.setattr(Run, "step", lambda self, batches, seeds: (None, "loss") if next(count) % 2 else (1.0, None))
    assert tiny(batch_size=3, epochs=1, method="barlow_twins").history[0]["skipped_steps"] == 12 > training.PATIENCE

def test_decay_spares_biases_and_normalisation():
    run = new_run(weight_decay=0.5)
    groups = run.optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"]) and all(p.ndim <= 1 for p in groups[1]["params"])
    held, all_parameters = [id(p) for g in groups for p in g["params"]], [id(p) for p in trained(run)]
    assert sorted(held) == sorted(all_parameters) and groups[1]["params"]
    for p in trained(run): p.grad = torch.zeros_like(p)
    before = [[p.detach().clone() for p in g["params"]] for g in groups]
    run.optimizer.step()
    shrink = 1 - 0.5 * groups[0]["lr"]
    for p, old in zip(groups[0]["params"], before[0]): torch.testing.assert_close(p.detach(), shrink * old)
    for p, old in zip(groups[1]["params"], before[1]): assert torch.equal(p.detach(), old)

def test_weights_of_a_method_are_trained_and_saved(monkeypatch, tmp_path):
    class Predicting(ObjectiveMethod):
        def __init__(self, dim):
            super().__init__(PEIRA(), dim)
            self.predictor = nn.Linear(dim, dim)
        def forward(self, z_a, z_b): return super().forward(self.predictor(z_a), z_b)
    monkeypatch.setitem(methods.METHODS, "predicting", Predicting)
    run = tiny(method="predicting", out=tmp_path)
    initial = new_run(method="predicting").modules["method"].predictor.weight
    assert not torch.equal(run.method.predictor.weight, initial)
    assert torch.equal(saved(tmp_path)["modules"]["method.predictor.weight"], run.method.predictor.weight)

def test_gradients_are_clipped_at_their_norm():
    for clip in (1e-3, 1e3):
        run = new_run(clip=clip)
        run.backward([DIGITS.images[:32]], [0])
        norm = torch.cat([p.grad.flatten() for p in trained(run)]).norm()
        assert float(norm) == pytest.approx(1e-3, rel=1e-3) if clip < 1 else 1e-3 < norm < 1e3

@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
def test_the_learning_rate_climbs_then_falls(warmup):
    rates, climb = [learning_rate_at(i, 50, 2.0, warmup) for i in range(50)], round(50 * warmup)
    np.testing.assert_allclose(rates[:climb], [2.0 * (i + 1) / climb for i in range(climb)], atol=1e-12)
    np.testing.assert_allclose(rates[climb:], [1 + math.cos(math.pi * i / (50 - climb)) for i in range(50 - climb)], atol=1e-12)
    assert max(rates) == 2 and min(rates) > 0

def test_history_follows_the_schedule_and_is_json():
    history = tiny(learning_rate=0.01).history
    assert [h["epoch"] for h in history] == [1, 2, 3] and [h["step"] for h in history] == [2, 4, 6]
    assert [h["learning_rate"] for h in history] == [learning_rate_at(i, 6, 0.01, 0.1) for i in (1, 3, 5)]
    assert json.loads(json.dumps(history, allow_nan=False)) == history
    assert {"energy", "effective_rank", "effective_rank_covariance", "trace_N", "spectrum", "stationarity", "skipped_steps"} <= history[0].keys()
    assert len(history[0]["spectrum"]) == 8 and tiny(method="barlow_twins").history[0]["spectrum"] is None

def test_bfloat16_in_the_network_leaves_weights_and_losses_in_float32():
    run, seen = new_run(autocast=True), []
    run.modules["projector"].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    run.modules["method"].register_forward_hook(lambda m, args, loss: seen.append(loss.dtype))
    assert run.step([DIGITS.images[:32]], [0])[1] is None and seen == [torch.bfloat16, torch.float32]
    assert all(p.dtype == torch.float32 for p in run.modules.parameters())

def test_colour_images_in_any_memory_layout():
    images = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(40, dtype=torch.int64)
    runs = [pretrain(ImageData(x, labels, ("a",), "noise", "train"), **{**TINY, "epochs": 1}) for x in (images, images.to(memory_format=torch.channels_last))]
    assert same(*map(weights, runs))
    assert runs[0].encoder(images).shape == (40, 64)


# learning and collapsing ------------------------------------------------------------------------------------------------------

def test_a_short_run_learns_and_does_not_alarm():
    with warnings.catch_warnings(action="error"): run = pretrain(load_images("digits", limit=512), epochs=5, batch_size=128, dim=16, hidden=64, encoder_options={"width": 8})
    energies = [h["energy"] for h in run.history]
    assert energies[-1] < energies[0] - 0.5 and run.history[-1]["effective_rank"] > 8 and not collapse_alarm(*statistics(run.method))

class Invariance(ObjectiveMethod):
    "The distance of the views and nothing against collapse; PEIRA only lends its ridge to the diagnostics."
    def __init__(self, dim): super().__init__(PEIRA(), dim)
    def forward(self, z_a, z_b):
        super().forward(z_a, z_b) # records the statistics
        return (z_a - z_b).square().sum(1).mean()

@pytest.mark.parametrize("options", [{"method": "invariance"}, {"method_options": {"ridge": 1.5}}], ids=["no term against collapse", "a ridge above every correlation"])
@pytest.mark.filterwarnings("default:the features have collapsed")
def test_a_collapsed_run_is_reported(monkeypatch, options):
    monkeypatch.setitem(methods.METHODS, "invariance", Invariance)
    with pytest.warns(UserWarning, match="collapsed"):
        run = pretrain(load_images("digits", limit=256), epochs=20, batch_size=128, dim=16, hidden=32, encoder_options={"width": 4}, learning_rate=0.02, **options)
    assert run.history[-1]["alarm"] == "complete" and collapse_alarm(*statistics(run.method))


# the door ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, error, message", [
    ({"method": "bralow"}, ValueError, "method must be one of 'peira'"), ({"encoder": "covn"}, ValueError, "conv"), ({"epochs": 0}, ValueError, "epochs"),
    ({"epochs": 2.5}, TypeError, "epochs"), ({"batch_size": 1}, ValueError, "batch_size"), ({"dim": 0}, ValueError, "dim"), ({"hidden": 0}, ValueError, "hidden"),
    ({"learning_rate": 0}, ValueError, "learning_rate"), ({"learning_rate": float("nan")}, ValueError, "learning_rate"), ({"weight_decay": -1}, ValueError, "weight_decay"),
    ({"warmup": 1.5}, ValueError, "warmup"), ({"clip": 0}, ValueError, "clip"), ({"clip_from": 0}, ValueError, "clip_from"), ({"accumulate": 0}, ValueError, "accumulate"), ({"accumulate": 17}, ValueError, "micro-batches"), ({"optimizer": "sgd"}, ValueError, "optimizer"), ({"workers": -1}, ValueError, "workers"), ({"seed": -1}, ValueError, "seed"), ({"method_options": {"rat": 1}}, ValueError, "rate"),
    ({"method_options": [1]}, TypeError, "method_options"), ({"encoder_options": {"widht": 1}}, TypeError, "width"), ({"policy": "none"}, TypeError, "policy"),
    ({"device": "gpu"}, ValueError, "device"), ({"device": "meta"}, ValueError, "device"), ({"autocast": 1}, TypeError, "autocast")])
def test_bad_arguments_are_named_and_write_nothing(tmp_path, change, error, message):
    with pytest.raises(error, match=message): tiny(out=tmp_path, **change)
    assert not any(tmp_path.iterdir())

def test_a_file_in_the_place_of_the_folder_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "epoch", lambda *args: pytest.fail("it trained"))
    (tmp_path/"run").write_text("")
    with pytest.raises(FileExistsError): tiny(out=tmp_path/"run")

def test_data_by_name_take_options_and_tables_are_known_by_their_names(tmp_path):
    import pandas as pd
    few = pretrain("digits", data_options={"limit": 40}, **{**TINY, "epochs": 1})
    assert few.settings["data"] == load_images("digits", limit=40).checksum
    g = np.random.default_rng(0)
    pd.DataFrame({"x": g.normal(size=90), "y": g.choice(["no", "yes"], 90)}).to_csv(tmp_path/"people.csv", index=False)
    run = pretrain(str(tmp_path/"people.csv"), data_options={"target": "y"}, epochs=1, batch_size=32, dim=2, hidden=8)
    assert run.settings["encoder"] == "table"
    with pytest.raises(TypeError, match="data_options"): tiny(data_options={"limit": 40})

def test_bad_data_are_refused():
    with pytest.raises(TypeError, match="data must be an ImageData"): pretrain(DIGITS.images, **TINY)
    with pytest.raises(ValueError, match="samples in data"): pretrain(DIGITS.subset([0]), **TINY)
    with pytest.raises(ValueError, match="digits"): pretrain("digtis", **TINY)

def test_the_command_line_has_the_functions_parameters_and_defaults():
    parameters = dict(inspect.signature(pretrain).parameters)
    del parameters["policy"]
    parsed = vars(parser().parse_args(["--dataset", "digits"]))
    assert parsed == {name: "digits" if name == "data" else p.default for name, p in parameters.items()} | {"preset": None, "show": False}
    words = "--dataset d --batch-size 8 --learning-rate 1e-3 --method-options {\"rate\":0.5} --no-resume --autocast --device cpu --out x --seed 3"
    parsed = vars(parser().parse_args(words.split()))
    assert parsed["method_options"] == {"rate": 0.5} and parsed["resume"] is False and parsed["autocast"] is True and parsed["batch_size"] == 8 and parsed["seed"] == 3
    assert "at its peak" in parser().format_help() # the help is the signature's comments

SMALL = "--dataset digits --epochs 1 --batch-size 512 --dim 4 --hidden 8 --device cpu".split() + ["--encoder-options", '{"width": 2}']

def test_command_line_statuses(tmp_path, capsys, monkeypatch):
    assert main(SMALL + ["--out", str(tmp_path)]) == 0
    assert "peira on digits: epoch 1, energy" in capsys.readouterr().out and (tmp_path/"checkpoint.pt").exists()
    for words in (["--epochs", "two"], ["--method", "bralow"], ["--method-options", "[1]"], ["--clip", "-1"], ["--dataset", "digtis"], ["--bogus"], ["--out", str(tmp_path), "--seed", "1"]):
        with pytest.raises(SystemExit) as exit: main(SMALL + words)
        error = capsys.readouterr().err
        assert exit.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error
    stop_at(monkeypatch, 1)
    assert main(SMALL + ["--seed", "2"]) == 130 and "stopped" in capsys.readouterr().err

def test_the_module_runs_as_a_program():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "peira_krepes.lab.pretrain"]
    bad = subprocess.run(command + SMALL + ["--dim", "0"], capture_output=True, text=True, cwd=ROOT)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "dim" in bad.stderr and not bad.stdout, bad.stderr


def test_a_diverged_run_is_refused_and_the_program_says_so_in_one_line(capsys):
    options = dict(epochs=1, batch_size=20, dim=8, hidden=16, learning_rate=1e30, device='cpu')
    with pytest.raises(FloatingPointError, match='learning_rate'): pretrain(load_images('digits', limit=60), **options)
    words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    assert main(['--dataset', 'digits', *words]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize('every, warns', [(2, True), (3, False)])
def test_an_epoch_with_half_of_its_steps_skipped_is_reported(monkeypatch, every, warns):
    count = itertools.count()
    monkeypatch.setattr(Run, 'step', lambda self, batches, seeds: (1.0, None) if next(count) % every else (None, 'loss'))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        tiny(batch_size=12, epochs=1, method='barlow_twins')  # six steps
    assert any('3 of 6 steps of the last epoch' in str(w.message) for w in caught) == warns
    assert any('were skipped' in str(w.message) for w in caught) == warns


@pytest.mark.parametrize('error', [FloatingPointError, ZeroDivisionError, RuntimeError, torch.OutOfMemoryError])
def test_a_failed_training_is_one_line_and_status_1(monkeypatch, capsys, error):
    def fails(*args): raise error('out of\nmemory')
    monkeypatch.setattr(Run, 'epoch', fails)
    assert main(SMALL) == 1
    assert capsys.readouterr().err == 'python -m peira_krepes.lab.pretrain: out of memory\n'


# accumulation, clipping from an epoch, companions, the log, one's own encoder -----------------------------------------------------

@pytest.mark.parametrize("method", ["simsiam", "peira"])
def test_accumulation_averages_the_gradients_of_micro_batches_and_is_not_the_larger_batch(method):
    whole, split = new_run(method=method, clip=1e9, optimizer="lars"), new_run(method=method, clip=1e9, optimizer="lars", accumulate=2)
    halves = [DIGITS.images[:16], DIGITS.images[16:32]]
    split.backward(halves, [0, 1])
    gradients, wanted = [p.grad.clone() for p in trained(split)], None
    fresh = new_run(method=method, clip=1e9) # the same micro-batches one after the other, by hand
    for half, seed in zip(halves, [0, 1]):
        views = torch.cat(two_views(half, fresh.settings.policy, seed)).contiguous(memory_format=torch.channels_last)
        parts = torch.autograd.grad(fresh.modules(views), trained(fresh))
        wanted = parts if wanted is None else [a + b for a, b in zip(wanted, parts)]
    for g, w in zip(gradients, wanted): torch.testing.assert_close(g, w / 2)
    whole.backward([DIGITS.images[:32]], [0])
    assert any(not torch.allclose(a.grad, b.grad) for a, b in zip(trained(whole), trained(split)))

def test_gradients_are_clipped_from_the_chosen_epoch_on():
    run, norm = new_run(clip=1e-3, clip_from=2), lambda r: float(torch.cat([p.grad.flatten() for p in trained(r)]).norm())
    run.backward([DIGITS.images[:32]], [0])
    assert norm(run) > 1e-2
    run.history.append({})
    run.backward([DIGITS.images[:32]], [0])
    assert norm(run) == pytest.approx(1e-3, rel=1e-3)

def parameters(*networks): return [p.detach().clone() for n in networks for p in n.parameters()]

def test_a_teacher_follows_the_network_after_each_step():
    run = new_run(method="byol", method_options={"momentum": 0.9})
    teacher = parameters(*run.modules["companion"])
    for step in range(3):
        run.modules["method"].begin(step, step / 4)
        run.step([DIGITS.images[:32]], [step])
        tau, network = run.modules["method"].teacher, parameters(run.modules["encoder"], run.modules["projector"])
        teacher = [tau * t + (1 - tau) * n for t, n in zip(teacher, network)]
        for t, p in zip(teacher, run.modules["companion"].parameters()): torch.testing.assert_close(p, t)
    assert run.modules["method"].teacher > 0.9 and not any(p.requires_grad for p in run.modules["companion"].parameters())

def test_the_previous_network_is_one_step_behind_and_a_skipped_step_leaves_it():
    run = new_run(method_options={"carry": True})
    for step in range(2):
        before = parameters(run.modules["encoder"], run.modules["projector"])
        run.step([DIGITS.images[:32]], [step])
        assert same(before, parameters(*run.modules["companion"])) and not same(before, parameters(run.modules["encoder"], run.modules["projector"]))
    handle, before = poison(run, "gradient"), parameters(*run.modules["companion"])
    run.step([DIGITS.images[:32]], [2])
    handle.remove()
    assert same(before, parameters(*run.modules["companion"]))

def test_methods_without_need_have_no_companion():
    assert all(("companion" in new_run(method=name).modules) == (name == "byol") for name in methods.METHODS)
    assert "companion" in new_run(method_options={"carry": True}).modules

@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_trains_and_ends_finite(method):
    run = tiny(method=method, method_options={"n_directions": 16} if method == "sigreg" else {})
    assert all(math.isfinite(h["energy"]) for h in run.history) and all(torch.isfinite(v).all() for v in weights(run)) and not run.history[-1]["skipped_steps"]

def test_the_log_has_a_line_for_each_epoch_and_survives_interruption(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 4)
        tiny(out=tmp_path)
    run = tiny(out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path/"log.jsonl").read_text().splitlines()]
    assert [{k: line[k] for k in entry} for line, entry in zip(lines, run.history)] == run.history and len(lines) == 3
    assert all(line["seconds"] > 0 and line["samples_per_second"] > 0 and line["processes"] == 1 and line["device"] == "cpu" for line in lines)

class Own(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.layer = nn.Linear(64, width)
    def forward(self, x): return self.layer(x.flatten(1)).relu()

def test_an_encoder_of_ones_own_is_copied_trained_and_recognised(tmp_path):
    torch.manual_seed(0)
    own = Own()
    before = parameters(own)
    run = tiny(encoder=own, encoder_options={}, out=tmp_path)
    assert same(before, parameters(own)) and not same(before, parameters(run.encoder)) and isinstance(run.encoder, Own) and run.settings["encoder"].startswith("Own ")
    assert same(weights(run), weights(tiny(encoder=own, encoder_options={}, out=tmp_path)))
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="encoder was 'Own"): tiny(encoder=Own(), encoder_options={}, out=tmp_path)

def test_a_table_is_trained_with_a_perceptron_by_default():
    import pandas as pd
    from peira_krepes.lab.tables import load_table
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"x": g.normal(size=120), "z": g.normal(size=120), "kind": g.choice(list("abc"), 120), "y": g.choice(["no", "yes"], 120)})
    table = load_table(frame, target="y")
    run = pretrain(table, epochs=2, batch_size=32, dim=4, hidden=16, encoder_options={"width": 16, "depth": 2, "dim": 6})
    assert run.settings["encoder"] == "table" and run.encoder(torch.from_numpy(np.asarray(table.values))[:5]).shape == (5, 6)

def test_presets_are_arguments_of_pretrain_and_the_command_line_prints_them(capsys):
    from peira_krepes.lab.presets import PRESETS, preset
    known = inspect.signature(pretrain).parameters
    for name in PRESETS:
        assert preset(name).keys() <= known.keys()
        assert main(["--dataset", "digits", "--preset", name, "--epochs", "7", "--show"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["epochs"] == 7 and shown["dim"] == preset(name)["dim"] and known.keys() - shown.keys() <= {"policy"} and ("policy" in shown) == ("policy" in preset(name))
    with pytest.raises(SystemExit): main(["--dataset", "digits", "--preset", "piera"])

@pytest.mark.parametrize("name", ["peira-cifar10", "vicreg-cifar10", "barlow_twins-cifar10"])
def test_a_papers_cifar_preset_runs_on_cifars_file_format(name, tmp_path, monkeypatch):
    "The recipe as published but for its length and widths, from files as CIFAR-10 comes in."
    from lab_fixtures import CIFAR10Fixture, write_cifar
    from peira_krepes.lab.presets import preset
    write_cifar(tmp_path, CIFAR10Fixture, monkeypatch)
    monkeypatch.setitem(data.TORCHVISION, "cifar10", CIFAR10Fixture)
    run = pretrain("cifar10", **preset(name, epochs=1, batch_size=10, dim=8, hidden=16, data_options={"root": tmp_path}))
    assert run.encoder(torch.rand(2, 3, 32, 32)).shape == (2, 512) and run.settings["optimizer"] == "lars" and run.settings["clip_from"] == 4
    assert math.isfinite(run.history[0]["energy"]) and not run.history[0]["skipped_steps"]

@pytest.mark.parametrize("name", ["peira-imagenet", *(pytest.param(f"{m}-imagenet", marks=pytest.mark.slow) for m in ("vicreg", "barlow_twins"))])
def test_a_papers_imagenet_preset_runs_on_imagenets_file_layout(name, tmp_path):
    from lab_fixtures import write_imagenet
    from peira_krepes.lab.presets import preset
    write_imagenet(tmp_path)
    run = pretrain("imagenet", **preset(name, epochs=1, batch_size=4, dim=8, hidden=16, workers=1, data_options={"root": tmp_path, "image_size": 96, "stream": True}))
    assert run.encoder(torch.rand(2, 3, 96, 96)).shape == (2, 2048) and math.isfinite(run.history[0]["energy"]) and not run.history[0]["skipped_steps"]


# what careless and unlucky users meet ------------------------------------------------------------------------------------------

def own(*layers): return nn.Sequential(nn.Flatten(), *layers)

class HalfOfTheRows(nn.Module):
    "One row for each sample in evaluation mode, and for every other one in training mode."
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x): return self.linear(x.flatten(1))[::2 if self.training else 1]

def test_an_own_network_with_batch_normalisation_is_trained_and_resumed(tmp_path):
    net = own(nn.Linear(64, 8), nn.BatchNorm1d(8)) # whose count of batches has no axis
    settings = dict(encoder=net, out=tmp_path, encoder_options=None)
    assert same(weights(tiny(**settings)), weights(tiny(**settings)))

@pytest.mark.parametrize("net, error, message", [
    (own(nn.Linear(64, 8)).double(), TypeError, "float32"), (own(nn.Linear(64, 8)).bfloat16(), TypeError, "float32"), (own(nn.LazyLinear(8)), ValueError, "lazy"),
    (own(nn.Linear(63, 8)), ValueError, "shape .1, 8, 8"), (HalfOfTheRows(), ValueError, "one row for each sample in training mode"),
    (nn.Flatten, TypeError, "an instance"), (3, TypeError, "encoder must be")])
def test_own_networks_that_cannot_be_trained_are_named(net, error, message):
    with pytest.raises(error, match=message): tiny(encoder=net, encoder_options=None)

def test_own_networks_with_weights_that_are_not_finite_or_options_are_named():
    net = own(nn.Linear(64, 8))
    with pytest.raises(TypeError, match="encoder_options"): tiny(encoder=net)
    nn.init.constant_(net[1].bias, float("nan"))
    with pytest.raises(ValueError, match="1.bias"): tiny(encoder=net, encoder_options=None)

def test_a_network_without_anything_to_train_is_reported():
    with pytest.warns(UserWarning, match="only the projector"): tiny(encoder=nn.Flatten(), encoder_options=None)

@pytest.mark.parametrize("change, error, message", [
    ({"method_options": {"dim": 3}}, ValueError, "method_options"), ({"encoder_options": {"channels": 3}}, ValueError, "encoder_options"), ({"encoder": "table", "encoder_options": None}, ValueError, "cannot take samples"),
    ({"resume": "no"}, ValueError, "resume"), ({"out": 3}, TypeError, "out must"), ({"policy": (ViewPolicy(),) * 3}, TypeError, "policy"), ({"policy": door.CorruptionPolicy()}, TypeError, "policy")])
def test_arguments_that_do_not_fit_each_other_are_named(change, error, message):
    with pytest.raises(error, match=message): tiny(**change)

def test_options_of_loading_are_listed():
    with pytest.raises(TypeError, match="image_size"): pretrain("digits", data_options={"target": "y"})

@pytest.mark.parametrize("content", ["", "\n", '{"epoch": 1, "st', "[1]\n", '{"a": 1}\n', None])
def test_a_damaged_log_is_mended_from_the_history(tmp_path, monkeypatch, content):
    stop_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt): tiny(out=tmp_path)
    monkeypatch.setattr(training, "two_views", two_views)
    log = tmp_path/"log.jsonl"
    log.unlink() if content is None else log.write_text(content)
    tiny(out=tmp_path)
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [1, 2, 3]

def test_a_full_disk_says_what_is_saved_and_the_run_goes_on(tmp_path, monkeypatch):
    write, count = torch.save, itertools.count()
    def full(*args):
        if next(count): raise RuntimeError("basic_ios::clear: iostream error")
        write(*args)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="disk full") as stop: tiny(out=tmp_path)
    assert "1 of 3 epochs" in stop.value.__notes__[0]
    monkeypatch.setattr(torch, "save", write)
    assert same(weights(tiny(out=tmp_path)), weights(tiny()))

@pytest.mark.parametrize("part", ["optimizer", "modules", "history"])
def test_a_checkpoint_without_a_part_is_named(checkpoint, tmp_path, part):
    state = saved(checkpoint)
    del state[part]
    torch.save(state, tmp_path/"checkpoint.pt")
    with pytest.raises(ValueError, match="lacks parts of this run"): tiny(out=tmp_path)

def test_an_interruption_before_training_is_one_line(monkeypatch, capsys):
    def stop(*args, **options): raise KeyboardInterrupt
    monkeypatch.setattr(door, "checked_data", stop)
    assert main(["--dataset", "digits"]) == 130 and "stopped" in capsys.readouterr().err
