"lab.encoders: shapes, counts, the three rules for layer-by-layer kernels, seeds, and every refusal."
import inspect
import subprocess
import sys

import pytest
import torch
from oracles import convolved
from torch import nn
from torch.func import functional_call, grad, vmap
from torchvision import models

from peira_krepes.lab.data import load_images
from peira_krepes.lab import backbones
from peira_krepes.lab.backbones import from_torchvision, vit_mini
from peira_krepes.lab.encoders import ENCODERS, ConvEncoder, MLPEncoder, Predictor, Projector, TableEncoder, build_encoder, evaluating, output_width

OWN = [('conv', {}), ('conv', dict(width=8, depth=1)), ('conv', dict(depth=4)), ('mlp', {}), ('mlp', dict(width=16, depth=1)), ('resnet18', {})]
ids = lambda v: '-'.join([v] if isinstance(v, str) else [f'{k}{x}' for k, x in v.items()] or ['default'])


def images(n=3, channels=1, height=8, width=None, dtype=torch.float32):
    return torch.rand(n, channels, height, width or height, generator=torch.Generator().manual_seed(0), dtype=dtype)


def count(net): return sum(p.numel() for p in net.parameters())


def trained(net, x):
    "The net after one pass in training mode, so that its running statistics are no longer zero and one; in evaluation mode."
    net.train()(x)
    return net.eval()


# ---- shapes and counts ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('channels, height, width', [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 32, 32), (2, 33, 47), (3, 64, 64), (1, 1, 1)])
@pytest.mark.parametrize('name', ['conv', 'mlp'])
def test_features_have_shape_n_dim(name, channels, height, width):
    net = build_encoder(name, channels, 10, image_size=(height, width))
    assert net(images(2, channels, height, width)).shape == (2, 10)


@pytest.mark.parametrize('c, w, h, depth', [(1, 32, 64, 3), (3, 16, 5, 3), (1, 8, 7, 1), (3, 4, 6, 5)])
def test_convolutional_parameter_count(c, w, h, depth):
    "3x3 weights, two numbers a channel for BatchNorm, a linear layer on four quadrants."
    wide = 2*w if depth > 1 else w
    wanted = 9*c*w + 2*w + (9*w*wide + 2*wide if depth > 1 else 0) + max(0, depth - 2)*(9*wide*wide + 2*wide) + (4*wide + 1)*h
    assert count(ConvEncoder(c, w, h, depth)) == wanted


def test_default_net_for_digits_has_the_promised_size(): assert 50_000 < count(build_encoder('conv', 1)) < 100_000


def test_perceptron_parameter_count(): assert count(MLPEncoder(3, 20, 7, 3, image_size=(4, 5))) == 61*20 + 2*21*20 + 21*7


def test_resnet18_with_the_small_stem():
    "Torchvision's 11,689,512, less the 7x7 stem and the 1000 classes, plus a 3x3 stem and the features."
    small, large = build_encoder('resnet18', 1, 64, image_size=32), build_encoder('resnet18', 3, 64, image_size=224)
    whole = count(models.resnet18())
    assert count(large) == whole - 513*1000 + 513*64
    assert count(small) == count(large) - 64*3*49 + 64*1*9
    assert small.conv1.stride == (1, 1) and small.conv1.kernel_size == (3, 3) and isinstance(small.maxpool, nn.Identity) and small.conv1.bias is None
    assert large.conv1.stride == (2, 2) and isinstance(large.maxpool, nn.MaxPool2d)
    maps = {}
    small.layer4.register_forward_hook(lambda m, i, o: maps.update(size=o.shape[2:]))
    assert small.eval()(images(2, 1, 32)).shape == (2, 64) and maps['size'] == (4, 4)
    assert isinstance(build_encoder('resnet18', 3).maxpool, nn.Identity)                    # no size given: small


@pytest.mark.parametrize('name', ['mobilenet_v3_small', 'shufflenet_v2_x0_5', 'regnet_y_400mf', 'densenet121', 'efficientnet_b0'])
def test_other_torchvision_classifiers_become_encoders(name):
    net = trained(build_encoder(name, 1, 12, image_size=64), images(4, 1, 64))
    assert net(images(2, 1, 64)).shape == (2, 12)
    assert not any(getattr(m, 'inplace', False) for m in net.modules())
    net.train(); x = images(4, 1, 64)
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm): m.eval()
    assert torch.equal(net(x), net(x))                                                       # nothing random is left


# ---- the three rules -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name, options', OWN, ids=ids)
def test_every_parameter_is_in_a_plain_module_called_once(name, options):
    net, calls = build_encoder(name, 1, 6, image_size=8, **options), {}
    owners = [m for m in net.modules() if list(m.parameters(recurse=False))]
    assert {type(m) for m in owners} <= {nn.Conv2d, nn.Linear, nn.BatchNorm2d}
    for m in owners: m.register_forward_hook(lambda m, *_: calls.update({m: calls.get(m, 0) + 1}))
    net(images(4))
    assert set(calls) == set(owners) and set(calls.values()) == {1}
    assert not any(isinstance(m, nn.Dropout) and m.p or getattr(m, 'inplace', False) for m in net.modules())


@pytest.mark.parametrize('name, options', OWN, ids=ids)
def test_no_module_overwrites_its_input(name, options):
    net, seen = build_encoder(name, 1, 6, image_size=8, **options), []
    def keep(m, inputs, output): seen.append((type(m).__name__, inputs[0], inputs[0].detach().clone()))
    for m in net.modules():
        if not list(m.children()): m.register_forward_hook(keep)
    net(images(4))
    assert seen and all(torch.equal(now, then) for _, now, then in seen)


@pytest.mark.parametrize('name, options', OWN, ids=ids)
def test_features_of_an_image_do_not_depend_on_its_batch(name, options):
    x = images(5)
    net = trained(build_encoder(name, 1, 6, image_size=8, seed=0, **options), x).double()
    with torch.no_grad():
        whole = net(x.double())
        assert (torch.cat([net(r[None].double()) for r in x]) - whole).abs().max() < 1e-10
        assert torch.equal(net(x.double()), whole)


@pytest.mark.parametrize('name, options', OWN, ids=ids)
def test_layout_in_memory_does_not_matter(name, options):
    x = images(4)
    net = trained(build_encoder(name, 1, 6, image_size=8, **options), x)
    wide = torch.zeros(4, 1, 12, 12); wide[:, :, 2:10, 2:10] = x
    for other in (wide[:, :, 2:10, 2:10], x.to(memory_format=torch.channels_last), x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)):
        assert torch.allclose(net(other), net(x), atol=1e-5)


@pytest.mark.parametrize('name, options', OWN, ids=ids)
def test_gradients_of_single_images_exist_and_reach_every_parameter(name, options):
    "`torch.func` differentiates each encoder per sample; they sum to the gradient of the batch."
    x = images(4, dtype=torch.float64)
    net = trained(build_encoder(name, 1, 2, image_size=8, seed=0, **options).double(), x)
    p, b = dict(net.named_parameters()), dict(net.named_buffers())
    single = vmap(grad(lambda p, r: functional_call(net, (p, b), (r[None],)).sum()), in_dims=(None, 0))(p, x)
    net(x).sum().backward()
    for key, value in single.items():
        whole = net.get_parameter(key).grad
        assert (value.sum(0) - whole).abs().max() <= 1e-10*max(1, whole.abs().max()) and whole.abs().max() > 0, key


# ---- the convolutional net against loops ---------------------------------------------------------------------------------
def test_convolutional_net_equals_loops():
    x = images(4, 2, 9, 6, dtype=torch.float64)
    net = trained(ConvEncoder(2, 3, 5).double(), x)
    layers = list(net.layers)
    with torch.no_grad(): ours = net(x)[0]
    value = x[0]
    for k, stride in ((0, 1), (3, 2), (6, 2)):
        norm = layers[k + 1]
        value = convolved(value, layers[k].weight.detach(), stride)
        scale = norm.weight/(norm.running_var + norm.eps).sqrt()
        value = (value - norm.running_mean[:, None, None])*scale.detach()[:, None, None] + norm.bias.detach()[:, None, None]
        value = value.clamp(min=0)
    assert value.shape == (6, 3, 2)
    bins = lambda size: [(i*size//2, -(-(i + 1)*size//2)) for i in (0, 1)]
    pooled = torch.stack([value[:, a:b, c:d].mean((1, 2)) for a, b in bins(3) for c, d in bins(2)], 1).flatten()
    assert (layers[-1].weight.detach() @ pooled + layers[-1].bias.detach() - ours).abs().max() < 1e-10


def test_pooling_keeps_where_things_are():
    "Filters blind to direction, then one global average: a digit and the digit turned by 180 degrees are the same. Quadrants differ."
    net = ConvEncoder(1, depth=1).eval()
    net.layers[0].weight.data[:] = net.layers[0].weight.data.mean((2, 3), keepdim=True)
    digits = load_images('digits', limit=200)
    six = digits.images[digits.labels == 6][:1]
    turned = six.flip(2, 3)
    with torch.no_grad():
        assert torch.allclose(net.layers[:3](six).mean((2, 3)), net.layers[:3](turned).mean((2, 3)), atol=1e-6)
        assert (net(six) - net(turned)).abs().max() > 1e-2


# ---- projector -----------------------------------------------------------------------------------------------------------
def test_projector_is_three_layers_with_norms_inside_only():
    head = Projector(6, 16, 4)
    assert [type(m) for m in head.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU]*2 + [nn.Linear]
    assert all(m.bias is None for m in head.layers if isinstance(m, nn.Linear)) and count(head) == 6*16 + 16*16 + 16*4 + 4*16
    z = images(50, 1, 1, 6)[:, 0, 0]
    normed = lambda u: torch.relu((u - u.mean(0))/(u.var(0, unbiased=False) + 1e-5).sqrt())
    hidden = normed(normed(z @ head.layers[0].weight.T) @ head.layers[3].weight.T)
    assert torch.allclose(head(z), hidden @ head.layers[6].weight.T, atol=1e-4)
    assert (head(z) < 0).any()                                                               # nothing after the last layer


@pytest.mark.parametrize('sizes, name', [((0, 4, 4), 'in_dim'), ((4, 0, 4), 'hidden'), ((4, 4, -1), 'out_dim')])
def test_projector_names_the_size(sizes, name):
    with pytest.raises(ValueError, match=name): Projector(*sizes)


# ---- seeds, names, options -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name', ['conv', 'mlp', 'resnet18'])
def test_seed_decides_the_weights_and_spares_the_global_generator(name):
    before = torch.get_rng_state()
    nets = [build_encoder(name, 1, 4, image_size=8, seed=s) for s in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    weights = [torch.cat([p.flatten() for p in n.parameters()]) for n in nets]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    torch.manual_seed(0)
    outside = torch.cat([p.flatten() for p in build_encoder(name, 1, 4, image_size=8).parameters()])
    assert torch.equal(outside, weights[0]) and not torch.equal(torch.get_rng_state(), before)


def test_encoder_is_returned_in_training_mode_and_saves_and_loads(tmp_path):
    net = build_encoder('conv', 3, 9, width=8, depth=2)
    assert net.training
    torch.save(net.state_dict(), tmp_path/'net.pt')
    again = build_encoder('conv', 3, 9, width=8, depth=2)
    again.load_state_dict(torch.load(tmp_path/'net.pt', weights_only=True))
    assert torch.equal(again.eval()(images(2, 3)), net.eval()(images(2, 3)))


def test_size_is_given_as_side_or_pair():
    assert count(build_encoder('mlp', 1, 4, image_size=6)) == count(build_encoder('mlp', 1, 4, image_size=(6, 6))) == count(build_encoder('mlp', 1, 4, image_size=[4, 9]))
    assert build_encoder('resnet18', 3, 4, image_size=(64, 65)).conv1.stride == (2, 2) and build_encoder('resnet18', 3, 4, image_size=(64, 64)).conv1.stride == (1, 1)


@pytest.mark.parametrize('error, match, arguments, options', [
    (ValueError, "'conv', 'mlp', 'table', 'vit_mini', a torchvision classifier, 'timm:NAME' or an nn.Module; got 'resnet_18'. Did you mean 'resnet18'", ('resnet_18', 3), {}),
    (ValueError, "Did you mean 'conv' or 'mlp' or 'resnet18'", ('zzz', 3), {}),
    (ValueError, 'got None', (None, 3), {}),
    (TypeError, "'conv' has no option widht; it has depth, width", ('conv', 3), dict(widht=3)),
    (TypeError, "'mlp' has no option kernel", ('mlp', 3), dict(kernel=3, image_size=4)),
    (TypeError, 'bogus', ('resnet18', 3), dict(bogus=3)),
    (ValueError, 'image_size must be given', ('mlp', 3), {}),
    (ValueError, 'image_size', ('mlp', 3), dict(image_size=0)),
    (ValueError, 'channels must be at least 1', ('conv', 0), {}),
    (TypeError, 'dim must be a whole number', ('conv', 1, 2.5), {}),
    (ValueError, 'width', ('conv', 1), dict(width=0)),
    (ValueError, 'depth', ('conv', 1), dict(depth=0)),
    (ValueError, 'no linear layer at its end', ('squeezenet1_0', 3), {}),
    (TypeError, "'table' has no option patch_size; it has batch_norm, depth, width", ('table', 3), dict(patch_size=3)),
    (TypeError, "'vit_mini' has no option layers; it has depth, heads, patch_size, width", ('vit_mini', 3), dict(layers=3, image_size=8)),
    (ValueError, 'batch_norm must be one of', ('table', 3), dict(batch_norm=1)),
    (ValueError, 'image_size must be given and square', ('vit_mini', 3), {}),
    (ValueError, 'image_size must be given and square', ('vit_mini', 3), dict(image_size=(28, 32))),
    (ValueError, 'patch_size must be given for a side of 29 pixels', ('vit_mini', 3), dict(image_size=29)),
    (ValueError, 'patch_size must be a divisor of 28', ('vit_mini', 3), dict(image_size=28, patch_size=5)),
    (ValueError, 'heads must divide width', ('vit_mini', 3), dict(image_size=28, width=10, heads=3)),
    (TypeError, 'options width came with a ready network', (nn.Flatten(), 3), dict(width=3)),
    (ValueError, 'dim must be None for a ready network', (nn.Flatten(), 3, 5), {})])
def test_build_encoder_refuses(error, match, arguments, options):
    with pytest.raises(error, match=match): build_encoder(*arguments, **options)


@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_networks_with_auxiliary_outputs_are_refused():
    with pytest.raises(ValueError, match='auxiliary outputs'): build_encoder('googlenet', 3, init_weights=False)


def test_encoders_registry_is_complete():
    assert set(ENCODERS) == {'conv', 'mlp', 'table', 'vit_mini'}
    for build in ENCODERS.values(): assert {'channels', 'dim', 'width', 'depth'} <= inspect.signature(build).parameters.keys()


# ---- widths --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name, shape, width', [
    ('conv', (1, 8, 8), 64), ('mlp', (1, 8, 8), 64), ('table', (54,), 64), ('vit_mini', (3, 32, 32), 128), ('resnet18', (3, 32, 32), 512),
    ('resnet50', (1, 32, 32), 2048), ('mobilenet_v3_small', (3, 32, 32), 1024)])
def test_own_width_when_dim_is_none_and_the_asked_one_otherwise(name, shape, width):
    size = shape[1:] or None
    assert output_width(build_encoder(name, shape[0], image_size=size), shape) == width
    assert output_width(build_encoder(name, shape[0], 10, image_size=size), shape) == 10


def test_output_width_leaves_no_trace():
    net = build_encoder('conv', 1); net.layers[1].eval()
    modes, state = [m.training for m in net.modules()], {k: v.clone() for k, v in net.state_dict().items()}
    before = torch.get_rng_state()
    assert output_width(net, (1, 8, 8)) == 64 and output_width(net.double(), (1, 8, 8)) == 64
    assert torch.equal(before, torch.get_rng_state()) and [m.training for m in net.modules()] == modes
    assert all(torch.equal(v, net.state_dict()[k].to(v.dtype)) for k, v in state.items())
    with pytest.raises(ValueError, match='cannot take samples'): output_width(net, (3, 8, 8))
    assert [m.training for m in net.modules()] == modes
    assert output_width(nn.Flatten(), (2, 3)) == 6                                             # a network without parameters


@pytest.mark.parametrize('net, got', [(nn.Identity(), '(2, 3, 4, 4)'), (nn.Flatten(0), '(96,)')])
def test_output_width_refuses_maps(net, got):
    with pytest.raises(ValueError, match='encoder must return one row') as e: output_width(net, (3, 4, 4))
    assert got in str(e.value)


def test_a_ready_network_is_returned_as_it_is():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).eval()
    assert build_encoder(net, 1) is net and build_encoder(net, 1, image_size=8, seed=3) is net and not net.training


# ---- tables --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('batch_norm', [False, True])
def test_table_encoder_is_the_written_chain(dtype, batch_norm):
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    net = trained(TableEncoder(6, 8, 3, 2, batch_norm).to(dtype), x)
    value, layers = x, [m for m in net.layers]
    for m in layers:
        if isinstance(m, nn.Linear): value = value @ m.weight.T + (m.bias if m.bias is not None else 0)
        elif isinstance(m, nn.BatchNorm1d): value = (value - m.running_mean)/(m.running_var + m.eps).sqrt()*m.weight + m.bias
        else: value = value.clamp(min=0)
    assert [type(m) for m in layers] == ([nn.Linear] + [nn.BatchNorm1d]*batch_norm + [nn.ReLU])*2 + [nn.Linear]
    torch.testing.assert_close(net(x), value, atol=1e-4 if dtype == torch.float32 else 1e-10, rtol=0)
    torch.testing.assert_close(net(x.T.contiguous().T), net(x), atol=1e-6, rtol=0)
    assert net(x).dtype == dtype


def test_table_encoder_has_the_promised_size(): assert count(build_encoder('table', 54)) == 55*256 + 3*257*256 + 257*64


# ---- transformers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('side, patch', [(8, 1), (12, 2), (28, 4), (32, 4), (64, 8), (96, 12)])
def test_patches_are_the_smallest_that_leave_eight_by_eight(side, patch):
    assert patch == min(p for p in range(1, side) if side % p == 0 and side/p <= 8)
    net = vit_mini(2, 32, depth=1, image_size=side)
    assert net.patch_size == patch and net(images(2, 2, side)).shape == (2, 32)
    assert count(net) == 2*patch**2*32 + 32 + 32 + ((side//patch)**2 + 1)*32 + 12*32**2 + 13*32 + 64


def test_vit_mini_has_no_randomness_and_takes_any_layout():
    net = build_encoder('vit_mini', 1, 6, image_size=8, width=32, depth=2, seed=0).double()
    x = images(5, dtype=torch.float64)
    assert torch.equal(net(x), net(x))                                                         # training mode, no dropout
    net.eval()
    with torch.no_grad():
        assert (torch.cat([net(r[None]) for r in x]) - net(x)).abs().max() < 1e-10
        for other in (x.to(memory_format=torch.channels_last), x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)):
            assert (net(other) - net(x)).abs().max() < 1e-10


def test_vit_mini_equals_attention_written_out():
    net = vit_mini(1, 8, depth=1, image_size=4, patch_size=2, heads=2).double().eval()
    with torch.no_grad(): net.encoder.pos_embedding.normal_(); net.class_token.normal_()
    x, w = images(1, 1, 4, dtype=torch.float64), dict(net.named_parameters())
    block = 'encoder.layers.encoder_layer_0.'
    norm = lambda v, name: (v - v.mean(-1, keepdim=True))/(v.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()*w[name + '.weight'] + w[name + '.bias']
    patches = torch.stack([(w['conv_proj.weight'][:, 0]*x[0, 0, i:i + 2, j:j + 2]).sum((1, 2)) + w['conv_proj.bias'] for i in (0, 2) for j in (0, 2)])
    t = torch.cat([w['class_token'][0], patches]) + w['encoder.pos_embedding'][0]
    q, k, v = (norm(t, block + 'ln_1') @ w[block + 'self_attention.in_proj_weight'].T + w[block + 'self_attention.in_proj_bias']).split(8, 1)
    heads = [((q[:, s] @ k[:, s].T)/2).softmax(1) @ v[:, s] for s in (slice(0, 4), slice(4, 8))]
    t = t + torch.cat(heads, 1) @ w[block + 'self_attention.out_proj.weight'].T + w[block + 'self_attention.out_proj.bias']
    hidden = nn.functional.gelu(norm(t, block + 'ln_2') @ w[block + 'mlp.0.weight'].T + w[block + 'mlp.0.bias'])
    t = t + hidden @ w[block + 'mlp.3.weight'].T + w[block + 'mlp.3.bias']
    assert (net(x)[0] - norm(t, 'encoder.ln')[0]).abs().max() < 1e-10


def test_torchvision_transformer_keeps_its_width():
    net = from_torchvision('vit_b_32', 3, image_size=224)
    assert isinstance(net.heads.head, nn.Identity) and net.hidden_dim == 768


# ---- torchvision: pretrained weights, from a planted cache -----------------------------------------------------------------
@pytest.fixture
def planted(tmp_path, monkeypatch):
    "A torch hub cache that holds random numbers under the file name of ResNet-18's default weights."
    monkeypatch.setenv('TORCH_HOME', str(tmp_path)); monkeypatch.setattr(torch.hub, '_hub_dir', None)
    name = models.ResNet18_Weights.DEFAULT.url.rsplit('/', 1)[1]
    (tmp_path/'hub/checkpoints').mkdir(parents=True)
    torch.manual_seed(5)
    net = models.resnet18()
    torch.save(net.state_dict(), tmp_path/'hub/checkpoints'/name)
    return net.eval()


def test_pretrained_weights_survive(planted):
    x, full = images(2, 3, 64), planted
    full.fc = nn.Identity()
    net = build_encoder('resnet18', 3, image_size=32, weights='DEFAULT').eval()                # the stem of the weights, though the images are small
    assert net.conv1.stride == (2, 2) and torch.equal(net.conv1.weight, full.conv1.weight)
    assert torch.equal(net(x), full(x)) and net(x).shape == (2, 512)
    again = build_encoder('resnet18', 3, 7, image_size=32, weights='DEFAULT')
    assert again.fc.weight.shape == (7, 512) and torch.equal(again.layer4[1].conv2.weight, full.layer4[1].conv2.weight)


def test_pretrained_grey_sees_three_copies(planted):
    planted.fc = nn.Identity()
    net, x = build_encoder('resnet18', 1, weights='DEFAULT').eval(), images(2, 1, 64)
    torch.testing.assert_close(net(x), planted(x.expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)
    other = build_encoder('resnet18', 5, weights='DEFAULT').eval()
    assert other.conv1.weight.shape == (64, 5, 7, 7) and torch.equal(other.layer1[0].conv1.weight, planted.layer1[0].conv1.weight)


# ---- timm ----------------------------------------------------------------------------------------------------------------
def test_timm_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(backbones, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install timm'): build_encoder('timm:resnet18', 3)
    with pytest.raises(ValueError, match="got 'resnet10t'"): build_encoder('resnet10t', 3)


def test_timm_is_not_imported_unless_asked_for():
    if not backbones.has_timm(): pytest.skip('timm is not installed')
    code = "import sys, peira_krepes.lab.encoders; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


@pytest.mark.parametrize('name, options, width', [('resnet10t', {}, 512), ('vit_tiny_patch16_224', dict(img_size=32, patch_size=8), 192)])
def test_timm_networks_are_timms_own(name, options, width):
    timm = pytest.importorskip('timm')
    x = images(2, 3, 32)
    net = build_encoder(f'timm:{name}', 3, image_size=32, seed=3, **options).eval()
    with torch.random.fork_rng():
        torch.manual_seed(3); peer = timm.create_model(name, num_classes=0, in_chans=3, **options).eval()
    torch.testing.assert_close(net(x), peer(x)); assert net(x).shape == (2, width)
    assert output_width(build_encoder(name, 1, 9, **options), (1, 32, 32)) == 9                 # a plain name that torchvision does not have
    assert not any(getattr(m, 'inplace', False) for m in net.modules())
    with pytest.raises(ValueError, match='not a model of timm'): build_encoder('timm:resnet_17', 3)


# ---- heads ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('layers', [1, 2, 3, 5])
def test_projector_has_as_many_linear_layers_as_asked(layers):
    head = Projector(6, 16, 4, layers)
    assert [type(m) for m in head.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU]*(layers - 1) + [nn.Linear]
    assert head(torch.randn(5, 6)).shape == (5, 4)


def test_predictor_equals_its_formula():
    head, z = Predictor(6, 16), torch.randn(50, 6)
    assert [type(m) for m in head.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear] and count(head) == 2*6*16 + 2*16 + 6
    u = z @ head.layers[0].weight.T
    u = torch.relu((u - u.mean(0))/(u.var(0, unbiased=False) + 1e-5).sqrt())
    torch.testing.assert_close(head(z), u @ head.layers[3].weight.T + head.layers[3].bias, atol=1e-4, rtol=0)


@pytest.mark.parametrize('call, name', [(lambda: Projector(4, 4, 4, 0), 'layers'), (lambda: Predictor(0, 4), 'dim'), (lambda: Predictor(4, 0), 'hidden')])
def test_heads_name_the_size(call, name):
    with pytest.raises(ValueError, match=name): call()


def test_evaluating_is_the_probes_own():
    from peira_krepes.lab import probes
    assert probes.evaluating is evaluating
