"The empirical tangent kernel against plain loops, for every kind of layer and every way a layer can be unusual."
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oracles import tangent_kernel_by_loops
from peira_krepes.krepes.entk import entk, tiles
from peira_krepes.krepes.layerwise import WORK, contract, grouped, recognise

D = torch.float64


@pytest.fixture(autouse=True)
def seed(): torch.manual_seed(0)


def relative(a, b): return ((a - b).norm() / b.norm()).item()


def settled(net):
    "Evaluation mode, float64, running statistics and affine parameters that are not trivial."
    for m in net.modules():
        if getattr(m, 'running_mean', None) is not None: m.running_mean.uniform_(-.5, .5); m.running_var.uniform_(.5, 2)
        if isinstance(m, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)) and m.weight is not None:
            nn.init.uniform_(m.weight, .5, 2)
            if m.bias is not None: nn.init.normal_(m.bias)
    return net.eval().double()


def images(n, side=6, channels=2): return torch.randn(n, channels, side, side, dtype=D)


def image_net(*layers, width=4): return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4*width, 3))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2, self.conv3 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(4, 3)
    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        z = self.bn2(self.conv2(x))
        z += x
        x = self.relu(z)
        return self.out((x + self.conv3(x)).mean((2, 3)))


class Tokens(nn.Module):
    "(n,T,4): linear and LayerNorm on tokens."
    def __init__(self): super().__init__(); self.a, self.norm, self.b, self.out = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False), nn.Linear(5, 3)
    def forward(self, x): return self.out(torch.tanh(self.b(self.norm(self.a(x)))).mean(1))


LAYERWISE = {
    'linear only': (lambda: nn.Linear(4, 3), (4,)),
    'mlp': (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), (4,)),
    'mlp without bias': (lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)), (4,)),
    'mlp ending in an activation': (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3), nn.Tanh()), (4,)),
    'wide output': (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 9)), (4,)),
    'tokens': (Tokens, (5, 4)),
    'images of tokens': (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)), (2, 3, 4)),
    'conv': (lambda: image_net(nn.Conv2d(2, 4, 3)), (2, 6, 6)),
    'conv flattened': (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 20)), (2, 6, 6)),
    'conv stride padding': (lambda: image_net(nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0))), (2, 6, 6)),
    'conv dilation': (lambda: image_net(nn.Conv2d(2, 4, 2, dilation=2, bias=False)), (2, 6, 6)),
    'conv same, even kernel': (lambda: image_net(nn.Conv2d(2, 4, 4, padding='same')), (2, 6, 6)),
    'conv reflect': (lambda: image_net(nn.Conv2d(2, 4, 3, padding=2, padding_mode='reflect')), (2, 6, 6)),
    'conv circular': (lambda: image_net(nn.Conv2d(2, 4, 3, padding=1, padding_mode='circular')), (2, 6, 6)),
    'conv replicate': (lambda: image_net(nn.Conv2d(2, 4, 3, padding=1, padding_mode='replicate')), (2, 6, 6)),
    'many channels': (lambda: image_net(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)), (2, 6, 6)),
    'batchnorm2d': (lambda: image_net(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), (2, 6, 6)),
    'batchnorm2d not affine': (lambda: image_net(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False)), (2, 6, 6)),
    'batchnorm1d': (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), (4,)),
    'batchnorm1d of sequences': (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(20, 3)), (5, 4)),
    'layernorm over two axes': (lambda: nn.Sequential(nn.LayerNorm((5, 4)), nn.Flatten(), nn.Linear(20, 3)), (5, 4)),
    'layernorm without bias': (lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 3)), (4,)),
    'residual': (Residual, (2, 6, 6)),
    'dropout at rest': (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Tanh(), nn.Linear(6, 3)), (4,)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize('kind', ['trace', 'sum'])
@pytest.mark.parametrize('name', LAYERWISE)
def test_every_layer_equals_the_plain_loops(name, kind):
    make, shape = LAYERWISE[name]
    net, x, y = settled(make()), torch.randn(5, *shape, dtype=D), torch.randn(7, *shape, dtype=D)
    assert recognise(net, x[:2]).rest == {}
    assert relative(entk(net, x, y, kind=kind), tangent_kernel_by_loops(net, x, y, kind)) < 1e-10


@pytest.mark.parametrize('name', LAYERWISE)
def test_single_precision(name):
    make, shape = LAYERWISE[name]
    net, x = settled(make()), torch.randn(5, *shape, dtype=D)
    want = tangent_kernel_by_loops(net, x)
    got = entk(net.float(), x.float())
    assert got.dtype == torch.float32 and relative(got, want) < 1e-4


# ---- parameters on the general way -----------------------------------------------------------------------------------
class Own(nn.Module):
    def __init__(self): super().__init__(); self.weight, self.out = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)
    def forward(self, x): return self.out(torch.sin(x * self.weight))


class Words(nn.Module):
    def __init__(self): super().__init__(); self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)
    def forward(self, x): return self.out(torch.tanh(self.embed(x)).mean(1))


class TiedWords(Words):
    "The embedding's weight is the output layer's weight."
    def __init__(self): super().__init__(); self.out = nn.Linear(4, 7); self.out.weight = self.embed.weight


class Attention(nn.Module):
    def __init__(self): super().__init__(); self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
    def forward(self, x): return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first, self.body, self.out = batch_first, nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first), nn.Linear(4, 3)
    def forward(self, x):
        return self.out(self.body(x).mean(1) if self.batch_first else self.body(x.transpose(0, 1)).mean(0))


class Twice(nn.Module):
    def __init__(self): super().__init__(); self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x): return self.out(self.a(torch.tanh(self.a(x))))


class SameModuleTwoNames(Twice):
    def __init__(self): super().__init__(); self.b = self.a
    def forward(self, x): return self.out(torch.tanh(self.b(x)))


class Tied(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3); self.b.weight = self.a.weight
    def forward(self, x): return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Functional(Twice):
    def forward(self, x): return self.out(F.linear(torch.tanh(self.a(x)), self.a.weight))


class OnlyFunctional(Twice):
    def forward(self, x): return self.out(torch.tanh(F.linear(x, self.a.weight, self.a.bias)))


class PositionsFirst(Twice):
    "With as many positions as samples, shapes look right."
    def forward(self, x): return self.out(torch.tanh(self.a(x.transpose(0, 1))).mean(0))


class Reversed(Twice):
    "Rows of the layer's input are samples in another order."
    def forward(self, x): return self.out(torch.tanh(self.a(x.flip(0))).flip(0))


class Keyword(Twice):
    def forward(self, x): return self.out(torch.tanh(self.a(input=x)))


class Doubled(nn.Linear):
    def forward(self, x): return 2 * super().forward(x)


def hooked():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].register_forward_hook(lambda m, args, out: out * m.weight.sum())
    return net


class Branching(Twice):
    "A forward pass that vmap cannot batch."
    def forward(self, x): return self.out(torch.stack([torch.sin(F.linear(row, self.a.weight)) if row.sum() > 0 else row for row in x]))


GENERAL = {
    'own weight': (Own, (4,), ['weight']),
    'embedding': (Words, 'words', ['embed.weight']),
    'embedding tied to the output': (TiedWords, 'words', ['embed.weight']),
    'attention': (Attention, (5, 4), ['attention.in_proj_weight', 'attention.in_proj_bias', 'attention.out_proj.weight', 'attention.out_proj.bias']),
    'transformer': (Transformer, (5, 4), [f'body.self_attn.{k}' for k in ('in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias')]),
    'transformer, positions first': (lambda: Transformer(False), (5, 4), None),
    'groupnorm': (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), (2, 6, 6), ['1.weight', '1.bias']),
    'grouped conv': (lambda: image_net(nn.Conv2d(2, 4, 3, groups=2)), (2, 6, 6), ['0.weight', '0.bias']),
    'conv1d': (lambda: nn.Sequential(nn.Conv1d(5, 4, 2), nn.Flatten(), nn.Linear(12, 3)), (5, 4), ['0.weight', '0.bias']),
    'weight norm': (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3)), (4,), None),
    'called twice': (Twice, (4,), ['a.weight', 'a.bias']),
    'one module under two names': (SameModuleTwoNames, (4,), ['a.weight', 'a.bias']),
    'tied': (Tied, (4,), ['a.weight']),
    'used by a function too': (Functional, (4,), ['a.weight', 'a.bias']),
    'used by a function only': (OnlyFunctional, (4,), ['a.weight', 'a.bias']),
    'positions first': (PositionsFirst, (4, 4), ['a.weight', 'a.bias']),
    'rows in another order': (Reversed, (4,), ['a.weight', 'a.bias']),
    'called with a keyword': (Keyword, (4,), ['a.weight', 'a.bias']),
    'subclass': (lambda: nn.Sequential(Doubled(4, 4), nn.Tanh(), nn.Linear(4, 3)), (4,), ['0.weight', '0.bias']),
    'hook that changes the output': (hooked, (4,), ['0.weight', '0.bias']),
    'unused parameters': (lambda: Unused(), (4,), ['spare.weight', 'spare.bias']),
}


class Unused(Twice):
    def __init__(self): super().__init__(); self.spare = nn.Linear(9, 9)
    def forward(self, x): return self.out(torch.tanh(self.a(x)))


def general(name, n):
    make, shape, rest = GENERAL[name]
    x = torch.randint(7, (n, 5)) if shape == 'words' else torch.randn(n, *shape, dtype=D)
    return settled(make()), x, rest


@pytest.mark.filterwarnings('ignore:There is a performance drop', 'ignore:enable_nested_tensor')
@pytest.mark.parametrize('name', GENERAL)
def test_the_general_way_equals_the_plain_loops(name):
    net, x, rest = general(name, 8)
    plan = recognise(net, x[:4])
    if rest is not None: assert list(plan.rest) == rest
    for kind in ('trace', 'sum'): # four rows: as many as positions in one of the cases
        assert relative(entk(net, x[:4], x[4:], kind=kind), tangent_kernel_by_loops(net, x[:4], x[4:], kind)) < 1e-10


@pytest.mark.parametrize('make', [Branching, lambda: Recurrent()], ids=['branching', 'LSTM'])
def test_what_cannot_be_batched_goes_row_by_row_with_a_warning(make):
    net, x = make().double(), torch.randn(4, *((4,) if make is Branching else (5, 4)), dtype=D)
    with pytest.warns(UserWarning, match='one at a time'): K = entk(net, x)
    assert relative(K, tangent_kernel_by_loops(net, x)) < 1e-10


class Recurrent(nn.Module):
    def __init__(self): super().__init__(); self.body, self.out = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)
    def forward(self, x): return self.out(self.body(x)[0].mean(1))


@pytest.mark.filterwarnings('ignore:There is a performance drop')
@pytest.mark.parametrize('name', GENERAL)
def test_the_general_way_leaves_the_encoder_alone(name):
    net, x, _ = general(name, 4)
    before, held = state(net), [id(t) for m in net.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    entk(net, x)
    assert same_state(state(net), before) and held == [id(t) for m in net.modules() for t in (*m._parameters.values(), *m._buffers.values())]


def test_a_tied_weight_keeps_its_cross_terms():
    net, x = settled(Tied()), torch.randn(6, 4, dtype=D)
    apart = copy.deepcopy(net)
    apart.b.weight = nn.Parameter(net.a.weight.detach().clone())
    assert relative(entk(apart, x), entk(net, x)) > 1e-2


@pytest.mark.parametrize('freeze', [['0.weight'], ['0.bias', '1.weight'], ['1.bias', '3.weight'], ['3.weight', '3.bias', '0.weight', '0.bias'], ['0.weight', '1.weight', '1.bias', '3.bias']])
def test_only_parameters_that_require_gradients_count(freeze):
    net, x = settled(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))), images(5)
    for key, p in net.named_parameters(): p.requires_grad_(key not in freeze)
    assert recognise(net, x).rest == {}
    assert relative(entk(net, x), tangent_kernel_by_loops(net, x)) < 1e-10
    assert {k for k, p in net.named_parameters() if not p.requires_grad} == set(freeze)


def test_a_frozen_backbone_under_no_grad():
    class Probe(Twice):
        def forward(self, x):
            with torch.no_grad(): x = torch.tanh(self.a(x))
            return self.out(x)
    net, x = Probe().double(), torch.randn(5, 4, dtype=D)
    net.a.requires_grad_(False)
    assert relative(entk(net, x), tangent_kernel_by_loops(net, x)) < 1e-10


# ---- the two ways of a contraction, and the shortcut -----------------------------------------------------------------
@pytest.mark.parametrize('n,m,t,s,q,c,d', [(3, 4, 1, 1, 2, 3, 5), (7, 5, 2, 3, 3, 4, 9), (30, 40, 6, 6, 2, 3, 4), (1, 1, 8, 8, 1, 2, 3), (60, 3, 12, 12, 1, 3, 20)])
def test_both_ways_of_a_contraction(n, m, t, s, q, c, d, monkeypatch):
    a, g, b, e = (torch.randn(*shape, dtype=D) for shape in ((n, t, d), (q, c, n, t), (m, s, d), (q, c, m, s)))
    want = torch.einsum('ntk,qcnt,msk,qcms->nm', a, g, b, e)
    for work in (WORK, 1): # 1: blocks of a single row
        monkeypatch.setattr('peira_krepes.krepes.layerwise.WORK', work)
        assert relative(contract((a, g), (b, e)), want) < 1e-12


def test_long_inner_products_keep_their_digits():
    a, b = torch.rand(400_000, 3), torch.rand(400_000, 2)
    assert relative(contract(a, b), a.double().T @ b.double()) < 1e-6


@pytest.mark.parametrize('q,cells', [(5, 1), (5, 3), (2, 3)])
def test_grouped_factors_have_the_gram_matrices_of_the_groups(q, cells):
    W = torch.randn(q, 4*cells, dtype=D)
    R = grouped(W, cells)
    assert R.shape == (min(q, cells), 4*cells)
    for k in range(4):
        part = slice(k*cells, (k + 1)*cells)
        assert torch.allclose(R[:, part].T @ R[:, part], W[:, part].T @ W[:, part], rtol=1e-10, atol=1e-12)


def test_the_shortcut_is_found_where_channels_stay_apart():
    net = settled(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 9)))
    plan = recognise(net, images(4))
    assert plan.last.module is net[8] and {type(l.module): l.cells for l in plan.layers if l.cells} == {nn.Conv2d: 4, nn.BatchNorm2d: 4}
    assert [l.cells for l in plan.layers] == [0, 0, 4, 4, 0]
    assert recognise(net, images(4), share=False).last is None


def test_a_batch_that_breaks_the_shortcut_is_noticed():
    "On the first rows only one unit of each layer lives, so that channels look separate; later rows mix them."
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 4)).double()
    with torch.no_grad(): net[0].weight.copy_(torch.tensor([[1.], [-1.]])); net[2].weight.copy_(torch.tensor([[1., 1.], [-1., 1.]]))
    x = torch.tensor([[1.], [2.], [-1.], [-3.]], dtype=D)
    assert recognise(net, x[:2]).layers[0].cells == 1
    assert relative(entk(net, x), tangent_kernel_by_loops(net, x)) < 1e-10


# ---- invariances -----------------------------------------------------------------------------------------------------
def small(): return settled(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)))


@pytest.mark.parametrize('option', [dict(batch_size=1), dict(batch_size=4), dict(batch_size=100), dict(memory=100_000), dict(memory=30_000)])
@pytest.mark.parametrize('rest', [False, True])
@pytest.mark.parametrize('same', [False, True])
def test_tiles_do_not_change_the_kernel(option, rest, same):
    net = settled(Own()) if rest else small()
    x, y = (torch.randn(n, 4, dtype=D) if rest else images(n) for n in (11, 7))
    y = None if same else y
    assert relative(entk(net, x, y, **option), tangent_kernel_by_loops(net, x, y)) < 1e-10


def test_without_y_the_kernel_is_symmetric_to_the_last_bit():
    net, x = small().float(), images(13).float()
    for option in ({}, dict(batch_size=3)):
        K = entk(net, x, **option)
        assert torch.equal(K, K.T) and relative(K, entk(net, x, x)) < 1e-5
        assert torch.linalg.eigvalsh(K.double())[0] > -1e-6 * K.trace()


@pytest.mark.parametrize('n,m', [(1, 1), (1, 6), (6, 1), (2, 9)])
def test_few_rows(n, m):
    net, x, y = small(), images(n), images(m)
    assert relative(entk(net, x, y), tangent_kernel_by_loops(net, x, y)) < 1e-10


def test_memory_layout_of_the_input_does_not_matter():
    net, x = small(), images(5)
    K = entk(net, x)
    strided = torch.randn(5, 2, 12, 12, dtype=D)[:, :, ::2, ::2].copy_(x)
    for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3), strided, x.expand(5, 2, 6, 6)):
        assert relative(entk(net, other), K) < 1e-10
    net.to(memory_format=torch.channels_last)
    assert relative(entk(net, x.contiguous(memory_format=torch.channels_last)), K) < 1e-10


def test_the_trace_form_ignores_rotations_of_the_outputs_and_the_sum_form_does_not():
    net, x = small(), images(6)
    turn = nn.Linear(5, 5, bias=False).double().requires_grad_(False)
    turn.weight.copy_(torch.linalg.qr(torch.randn(5, 5, dtype=D)).Q)
    turned = nn.Sequential(net, turn)
    assert relative(entk(turned, x), entk(net, x)) < 1e-10
    assert relative(entk(turned, x, kind='sum'), entk(net, x, kind='sum')) > 1e-2


def test_random_signs_shared_by_all_samples_average_to_the_trace_form():
    net, x = small(), images(4)
    signs = torch.cartesian_prod(*[torch.tensor([-1., 1.], dtype=D)]*5)
    total = torch.zeros(4, 4, dtype=D)
    for s in signs:
        flip = nn.Linear(5, 5, bias=False).double().requires_grad_(False)
        flip.weight.copy_(s.diag())
        total += entk(nn.Sequential(net, flip), x, kind='sum')
    assert relative(total / len(signs), entk(net, x)) < 1e-10


@pytest.mark.parametrize('m', [1, 38, 1000, 10**6])
@pytest.mark.parametrize('h', [1, 64, 512])
@pytest.mark.parametrize('memory', [10**6, 2**28])
@pytest.mark.parametrize('batch_size', [None, 1, 50])
def test_tiles_stay_within_memory(m, h, memory, batch_size):
    once, each = 3000, 800
    found = tiles(m, h, once, each, memory, batch_size)
    assert found is not None
    rows, outputs, kept = found
    assert 1 <= outputs <= h and rows == (batch_size or rows) and rows * (once + outputs * each) <= memory / 4
    assert kept == 1 or kept * rows * (once + outputs * each) <= memory / 2
    assert tiles(m, h, once, each, 4 * (once + each) - 1, None) is None


# ---- what is left behind ---------------------------------------------------------------------------------------------
class Failing(nn.Module):
    "Raises in the forward pass number `after`, counted from one."
    def __init__(self, after): super().__init__(); self.after, self.calls, self.a, self.b = after, 0, nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()
    def forward(self, x):
        self.calls += 1
        z = self.a(x)
        if self.calls == self.after: raise RuntimeError('broken on purpose')
        return self.b(z)


def state(net):
    return ([(k, p.requires_grad, p._version, None if p.grad is None else p.grad.clone()) for k, p in net.named_parameters()], [m.training for m in net.modules()],
            [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in net.modules()], [b._version for b in net.buffers()])


def same_state(a, b):
    return str(a) == str(b)


@pytest.mark.parametrize('after', [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize('grad', [True, False])
def test_the_encoder_is_left_as_it_was_also_after_an_error(after, grad):
    net, x = Failing(after), torch.randn(9, 4)
    net.a.bias.requires_grad_(False)
    net.a.weight.grad = torch.randn(4, 4)
    net.a.register_forward_hook(lambda *args: None)
    before, random = state(net), torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        if after:
            with pytest.raises(RuntimeError, match='on purpose'): entk(net, x, batch_size=4)
        else: assert not entk(net, x, batch_size=4).requires_grad
        assert torch.is_grad_enabled() == grad
    assert same_state(state(net), before) and torch.equal(torch.get_rng_state(), random)


def test_called_under_inference_mode_no_grad_and_autocast():
    net, x = small(), images(5)
    K = entk(net, x)
    with torch.no_grad(): assert torch.equal(entk(net, x), K)
    with torch.inference_mode(): assert torch.equal(entk(net, x.clone()), K)
    with torch.autocast('cpu', dtype=torch.bfloat16): assert torch.equal(entk(net.float(), x.float()), entk(net.float(), x.float())) and relative(entk(net.float(), x.float()), K) < 1e-4
    assert not entk(net.double(), x.clone().requires_grad_()).requires_grad


def test_training_mode_is_fine_where_it_changes_nothing():
    net, x = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double(), torch.randn(4, 4, dtype=D)
    assert net.training
    K = entk(net, x)
    assert net.training and torch.equal(K, entk(net.eval(), x))


# ---- refusals --------------------------------------------------------------------------------------------------------
class Centred(nn.Linear):
    def forward(self, x): z = super().forward(x); return z - z.mean(0)


class Noisy(nn.Linear):
    def forward(self, x): return F.dropout(super().forward(x), 0.5, training=True)


class Counting(nn.Linear):
    def __init__(self, *args): super().__init__(*args); self.register_buffer('seen', torch.zeros(()))
    def forward(self, x): self.seen += len(x); return super().forward(x)


class Pair(nn.Linear):
    def forward(self, x): return super().forward(x), x


REFUSED = {
    'no module': (lambda: torch.tanh, TypeError, 'torch.nn.Module'),
    'batchnorm in training': (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), ValueError, r'1 \(BatchNorm1d\) is in training mode. Call encoder.eval\(\) first'),
    'batchnorm without statistics': (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval(), ValueError, 'track_running_stats=True'),
    'dropout': (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(.1)), ValueError, 'encoder.eval'),
    'dropout itself': (lambda: nn.Dropout(.1), ValueError, r'itself \(Dropout\)'),
    'attention with dropout': (lambda: nn.ModuleDict({'a': nn.MultiheadAttention(4, 2, dropout=.1)}), ValueError, r'a \(MultiheadAttention\)'),
    'recurrent with dropout': (lambda: nn.ModuleDict({'r': nn.LSTM(4, 2, 2, dropout=.1)}), ValueError, r'r \(LSTM\)'),
    'mixes samples': (lambda: Centred(4, 3), ValueError, 'rest of the batch'),
    'random': (lambda: Noisy(4, 60), ValueError, 'from call to call'),
    'writes to a buffer': (lambda: Counting(4, 3), ValueError, 'writes to seen'),
    'frozen': (lambda: nn.Linear(4, 3).requires_grad_(False), ValueError, r'requires_grad_\(True\)'),
    'half': (lambda: nn.Linear(4, 3).bfloat16(), ValueError, r'encoder.float\(\)'),
    'two precisions': (lambda: nn.Sequential(nn.Linear(4, 3).double(), nn.Linear(3, 3)), ValueError, 'all in float32 or all in float64'),
    'three axes': (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), ValueError, r'\(4, h\)'),
    'a tuple': (lambda: Pair(4, 3), ValueError, 'got tuple'),
    'infinite': (lambda: nn.Sequential(nn.Linear(4, 3), Scale(math.inf)), ValueError, 'finite outputs'),
}


class Scale(nn.Module):
    def __init__(self, s): super().__init__(); self.s = s
    def forward(self, x): return self.s * x


@pytest.mark.parametrize('name', REFUSED)
def test_refused_encoders(name):
    make, kind, message = REFUSED[name]
    net = make()
    before = state(net) if isinstance(net, nn.Module) else None
    with pytest.raises(kind, match=message): entk(net, torch.randn(6, 4))
    if before: assert same_state(state(net), before)


@pytest.mark.parametrize('call,kind,message', [
    (lambda net, x: entk(net, {'x': x}), TypeError, 'x must be one tensor .* got dict'),
    (lambda net, x: entk(net, x, (x, x)), TypeError, 'y must be one tensor .* got tuple'),
    (lambda net, x: entk(net, x.numpy()), TypeError, 'ndarray'),
    (lambda net, x: entk(net, x.double()), ValueError, 'x must fit .*float32.* got torch.float64'),
    (lambda net, x: entk(net, x, x.half()), ValueError, 'y must fit'),
    (lambda net, x: entk(net, x[:0]), ValueError, 'at least one sample'),
    (lambda net, x: entk(net, x, x[:, :3]), ValueError, r'\(4,\); got \(3,\)'),
    (lambda net, x: entk(net, x.index_fill(0, torch.tensor(2), math.nan)), ValueError, 'x must be finite; row 2'),
    (lambda net, x: entk(net, x, kind='full'), ValueError, "'trace', 'sum'"),
    (lambda net, x: entk(net, x, batch_size=0), ValueError, 'batch_size'),
    (lambda net, x: entk(net, x, batch_size=2.5), TypeError, 'batch_size'),
    (lambda net, x: entk(net, x, memory=100), ValueError, r'memory must allow a tile of 1 row\(s\) and one output, [\d,]+ bytes; got 100'),
    (lambda net, x: entk(net, x, batch_size=10**6, memory=10**6), ValueError, r'tile of 1000000 row\(s\)'),
])
def test_refused_arguments(call, kind, message):
    with pytest.raises(kind, match=message): call(nn.Linear(4, 3), torch.randn(6, 4))


# ---- peers and a large network ---------------------------------------------------------------------------------------
@pytest.mark.parametrize('name,tolerance', [('mlp', 1e-10), ('conv', 1e-6)]) # its convolutions round to float32 on the way: 2e-8 from the plain loops
def test_agrees_with_nngeometry(name, tolerance):
    pytest.importorskip('nngeometry')
    from nngeometry.gram import GramMatrix
    from nngeometry.layercollection import LayerCollection
    from torch.utils.data import DataLoader, TensorDataset
    net, x = settled(nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), nn.Linear(6, 5)) if name == 'mlp' else small()), images(6)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d): m.requires_grad_(False)
    layers = LayerCollection()
    for m in net.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)): layers.add_layer_from_model(net, m)
    full = GramMatrix(net, DataLoader(TensorDataset(x, torch.zeros(6)), batch_size=4), layer_collection=layers).to_torch() # (output, sample, output, sample)
    assert relative(entk(net, x), torch.einsum('jnjm->nm', full) / 5) < tolerance
    assert relative(entk(net, x, kind='sum'), full.sum((0, 2)) / 5) < tolerance


def test_resnet18_on_small_images():
    models = pytest.importorskip('torchvision.models')
    net, x = settled(models.resnet18(num_classes=2)), torch.rand(3, 3, 24, 24, dtype=D)
    plan = recognise(net, x)
    assert plan.rest == {} and len(plan.layers) == 41
    want = tangent_kernel_by_loops(net, x, x[:2])
    assert relative(entk(net, x, x[:2]), want) < 1e-10
    assert relative(entk(net.float(), x.float(), x[:2].float()), want) < 1e-4
