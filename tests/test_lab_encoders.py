"lab.encoders: shapes, counts, the three rules for layer-by-layer kernels, seeds, and every refusal."
import inspect

import pytest
import torch
from oracles import convolved
from torch import nn
from torch.func import functional_call, grad, vmap
from torchvision import models

from peira_krepes.lab.data import load_images
from peira_krepes.lab.encoders import ENCODERS, ConvEncoder, MLPEncoder, Projector, build_encoder

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
    (ValueError, "'conv', 'mlp' or a torchvision classifier; got 'resnet_18'. Did you mean 'resnet18'", ('resnet_18', 3), {}),
    (ValueError, "Did you mean 'conv' or 'mlp' or 'resnet18'", ('zzz', 3), {}),
    (ValueError, 'got None', (None, 3), {}),
    (TypeError, "'conv' has no option widht; it has width and depth", ('conv', 3), dict(widht=3)),
    (TypeError, "'mlp' has no option kernel", ('mlp', 3), dict(kernel=3, image_size=4)),
    (TypeError, 'bogus', ('resnet18', 3), dict(bogus=3)),
    (ValueError, 'image_size must be given', ('mlp', 3), {}),
    (ValueError, 'image_size', ('mlp', 3), dict(image_size=0)),
    (ValueError, 'channels must be at least 1', ('conv', 0), {}),
    (TypeError, 'dim must be a whole number', ('conv', 1, 2.5), {}),
    (ValueError, 'width', ('conv', 1), dict(width=0)),
    (ValueError, 'depth', ('conv', 1), dict(depth=0)),
    (ValueError, 'no linear layer at its end', ('squeezenet1_0', 3), {})])
def test_build_encoder_refuses(error, match, arguments, options):
    with pytest.raises(error, match=match): build_encoder(*arguments, **options)


@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_networks_with_auxiliary_outputs_are_refused():
    with pytest.raises(ValueError, match='auxiliary outputs'): build_encoder('googlenet', 3, init_weights=False)


def test_encoders_registry_is_complete():
    assert set(ENCODERS) == {'conv', 'mlp'}
    for build in ENCODERS.values(): assert {'channels', 'dim', 'width', 'depth'} <= inspect.signature(build).parameters.keys()
