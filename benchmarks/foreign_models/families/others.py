"""Families of images, volumes, sets, graphs, fields and densities."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.foreign_models.families.text import WIDTH, CausalAttention, FeedForward


class DitBlock(nn.Module):
    """Norms scaled and shifted by what the model's own call of `modulate` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attention, self.feed = CausalAttention(), FeedForward()
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = parts
        x = x + gate * self.attention(self.norm_1(x) * (1 + scale) + shift)
        return x + gate_2 * self.feed(self.norm_2(x) * (1 + scale_2) + shift_2)


class DitFinal(nn.Module):
    """Holds the parts that the model calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 4)
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))


class Dit(nn.Module):
    """A diffusion transformer, which calls a block's modulation and its last layer's parts from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time = nn.Linear(4, WIDTH), nn.Linear(8, WIDTH)
        self.blocks, self.final = nn.ModuleList(DitBlock() for _ in range(3)), DitFinal()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(4, device=t.device) / 2.0)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))[:, None]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, block.modulate(condition).chunk(6, dim=-1))
        shift, scale = self.final.modulate(condition).chunk(2, dim=-1)
        return self.final.linear(self.final.norm(x) * (1 + scale) + shift)


class Perceiver(nn.Module):
    """Learned latents that read a long input again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.enter, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 10)
        self.reads = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.feeds = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.enter(x), self.latents.expand(len(x), -1, -1)
        for read, feed in zip(self.reads, self.feeds, strict=True):
            z = z + read(z, x, x, need_weights=False)[0]
            z = z + feed(z)
        return self.head(z.mean(1))


class Stage(nn.Module):
    """A residual block with BatchNorm; ReLU in place, as torchvision's."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv_1, self.bn_1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv_2, self.bn_2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn_2(self.conv_2(self.relu(self.bn_1(self.conv_1(x)))))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


class Backbone(nn.Module):
    """Layers as attributes with numbers, as torchvision's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1, self.layer2 = nn.Sequential(Stage(8, 8)), nn.Sequential(Stage(8, 16, 2))
        self.layer3 = nn.Sequential(Stage(16, 16), Stage(16, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        middle = self.layer2(x)
        return middle, self.layer3(middle)


class ImageClassifier(nn.Module):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.fc = Backbone(), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x)[1].mean((2, 3)))


class Detector(nn.Module):
    """A pyramid with shared heads for classes and boxes at two scales, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.lateral, self.top = Backbone(), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.classes = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 3, 3, 1, 1))
        self.boxes = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 4, 3, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle, top = self.backbone(x)
        low = self.top(F.max_pool2d(top, 2))
        high = self.lateral(middle) + F.interpolate(low, scale_factor=2.0, mode="nearest")
        scales = (high, low)
        return {
            "classes": torch.cat([self.classes(s).flatten(2) for s in scales], -1),
            "boxes": torch.cat([self.boxes(s).flatten(2) for s in scales], -1),
        }


class DenseNet(nn.Sequential):
    """A plain Sequential; each part concatenates its input to its output."""

    class Part(nn.Module):
        """BatchNorm, ReLU, a convolution, and the input beside it."""

        def __init__(self, inner: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(inner), nn.Conv2d(inner, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.conv(F.relu(self.norm(x), inplace=True))], 1)

    def __init__(self) -> None:
        parts = [DenseNet.Part(8 + 4 * n) for n in range(3)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 10)]
        super().__init__(nn.Conv2d(3, 8, 3, 1, 1), *parts, *head)


class MobileNet(nn.Module):
    """torchvision's form: a Sequential of features with modules of several classes, and a classifier."""

    def __init__(self) -> None:
        super().__init__()

        def depthwise(inner: int, outer: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                *(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner), nn.BatchNorm2d(inner), nn.ReLU6(True)),
                *(nn.Conv2d(inner, outer, 1), nn.BatchNorm2d(outer), nn.ReLU6(True)),
            )

        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(True)),
            *(depthwise(8, 16, 1), depthwise(16, 16, 2), depthwise(16, 32, 1)),
        )
        self.classifier = nn.Sequential(nn.Linear(32, 16), nn.Hardswish(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Volume(nn.Module):
    """A 3D U-Net with encoders and decoders in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()

        def block(inner: int, outer: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv3d(inner, outer, 3, padding=1), nn.InstanceNorm3d(outer), nn.ReLU())

        self.parts = nn.ModuleDict(
            {"down_0": block(1, 4), "down_1": block(4, 8), "bottom": block(8, 8), "up_0": block(12, 4)}
        )
        self.up, self.head = nn.ConvTranspose3d(8, 8, 2, 2), nn.Conv3d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.parts["down_0"](x)
        low = self.parts["bottom"](self.parts["down_1"](F.max_pool3d(high, 2)))
        return self.head(self.parts["up_0"](torch.cat([high, self.up(low)], 1)))


class Vae(nn.Module):
    """Noise comes with the batch; outputs in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(32, 8), nn.Linear(32, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 192))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + noise * (0.5 * log_variance).exp()
        return self.decoder(z).view(x.shape), mean, log_variance


class VqVae(nn.Module):
    """A learned codebook, the nearest code passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        distances = flat.square().sum(1, keepdim=True) - 2 * flat @ self.codes.weight.T
        nearest = self.codes((distances + self.codes.weight.square().sum(1)).argmin(1)).view(z.shape)
        passed = z + (nearest - z).detach()
        return self.decoder(passed.permute(0, 3, 1, 2)), z, nearest


class Capsules(nn.Module):
    """Three rounds of routing by agreement (Sabour et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 4, 4)
        self.votes = nn.Parameter(torch.randn(16, 10, 4, 4) * 0.3)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True)
        return x * norm / (1 + norm) / (norm + 1e-6).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        primary = self.squash(self.conv(x).reshape(len(x), 16, 4))
        votes = torch.einsum("nid,ijdk->nijk", primary, self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            out = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * out[:, None]).sum(-1)
        return (out.square().sum(-1) + 1e-8).sqrt()


class _Reverse(torch.autograd.Function):
    """Computes the inputs again from the outputs, and keeps no activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, block: ReversibleBlock, *weights: Tensor) -> Any:
        ctx.block, ctx.weights = block, weights
        with torch.no_grad():
            y_1 = x + block.f(y)
            y_2 = y + block.g(y_1)
        ctx.save_for_backward(y_1, y_2)
        return y_1, y_2

    @staticmethod
    def backward(ctx: Any, d_1: Tensor, d_2: Tensor) -> Any:
        y_1, y_2 = ctx.saved_tensors
        block = ctx.block
        with torch.enable_grad():
            y_1 = y_1.detach().requires_grad_()
            g = block.g(y_1)
            d_g = torch.autograd.grad(g, [y_1, *block.g.parameters()], d_2)
            x_2 = (y_2 - g).detach().requires_grad_()
            f = block.f(x_2)
            d_1 = d_1 + d_g[0]
            d_f = torch.autograd.grad(f, [x_2, *block.f.parameters()], d_1)
        return d_1, d_2 + d_f[0], None, *d_f[1:], *d_g[1:]


class ReversibleBlock(nn.Module):
    """Two halves, each changed by a function of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = FeedForward(), FeedForward()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return _Reverse.apply(x, y, self, *self.f.parameters(), *self.g.parameters())


class RevNet(nn.Module):
    """Reversible blocks, whose backward calls their modules again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(12, WIDTH), nn.Linear(2 * WIDTH, 10)
        self.blocks = nn.ModuleList(ReversibleBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.enter(x)
        for block in self.blocks:
            x, y = block(x, y)
        return self.head(torch.cat([x, y], -1).mean(1))


class Coupling(nn.Module):
    """An affine coupling with its logarithm of the volume."""

    def __init__(self, flips: bool) -> None:
        super().__init__()
        self.net, self.flips = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), flips

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flips else (a, b)
        scale, shift = self.net(a).chunk(2, -1)
        b = b * scale.tanh().exp() + shift
        return torch.cat((b, a) if self.flips else (a, b), -1), volume + scale.tanh().sum(-1)


class Flow(nn.Module):
    """A normalising flow (RealNVP): the loss is a density."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling(bool(n % 2)) for n in range(4))
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for flow in self.flows:
            x, volume = flow(x, volume)
        x, volume = x * self.scale.exp(), volume + self.scale.sum()
        return 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1) - volume


class Nerf(nn.Module):
    """A field of colours and densities along rays, composed by products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inner, 32) for inner in (15, 32, 47, 32))
        self.density, self.colour = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, points: Tensor) -> Tensor:
        rates = 2.0 ** torch.arange(2, device=points.device)
        angles = (points[..., None] * rates).flatten(-2)
        x = given = torch.cat([points, angles.sin(), angles.cos()], -1)
        for number, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat([x, given], -1) if number == 2 else x))
        alpha = 1 - torch.exp(-F.softplus(self.density(x)[..., 0]) * 0.5)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * passed)[..., None] * self.colour(x).sigmoid()).sum(1)


class HyperNet(nn.Module):
    """Makes the weights of another network from an embedding, for each layer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.make = nn.Embedding(2, 8), nn.Linear(8, 16 * 16 + 16)
        self.enter, self.head, self.target = nn.Linear(12, 16), nn.Linear(16, 10), nn.Linear(16, 16)
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.mean(1))
        for code in self.codes.weight:
            made = self.make(code)
            weights = {"weight": made[:256].view(16, 16), "bias": made[256:]}
            x = x + torch.tanh(functional_call(self.target, weights, (x,)))
        return self.head(x)


class SpectralLayer(nn.Module):
    """Complex weights on the lowest frequencies."""

    def __init__(self, width: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.skip, self.modes = nn.Conv1d(width, width, 1), modes

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x)
        low = torch.einsum("bik,iok->bok", found[..., : self.modes], self.weight)
        out = F.pad(low, (0, found.shape[-1] - self.modes))
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


class FourierOperator(nn.Module):
    """A neural operator between functions on a line."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(2, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(SpectralLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.linspace(0, 1, x.shape[1], dtype=x.dtype, device=x.device)
        x = self.lift(torch.stack([x, place.expand_as(x)], -1)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.project(x.transpose(1, 2)).squeeze(-1)


class KanLayer(nn.Module):
    """A spline on each edge, by Gaussian bases on a grid in a buffer."""

    def __init__(self, inner: int, outer: int, count: int = 6) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, count))
        self.base, self.spline = nn.Linear(inner, outer), nn.Parameter(torch.randn(outer, inner, count) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        bases = torch.exp(-(((x[..., None] - self.grid) / 0.8) ** 2))
        return self.base(F.silu(x)) + torch.einsum("...ik,oik->...o", bases, self.spline)


class DeepSets(nn.Module):
    """A function of a set: a padded sum, and a network after it."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU())
        self.rho = nn.Sequential(nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1], device=x.device)[None] < counts[:, None]
        return self.rho((self.phi(x) * mask[..., None]).sum(1))[:, 0]


class GraphLayer(nn.Module):
    """Messages along edges, added by index (GCN), with attention by edge (GAT)."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.score = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.send(x)
        logits = F.leaky_relu(self.score(torch.cat([sent[source], sent[target]], -1)), 0.2).exp()
        total = x.new_zeros(len(x), 1).index_add_(0, target, logits)
        weights = logits / total[target]
        return F.elu(x + torch.zeros_like(sent).index_add_(0, target, weights * sent[source]))


class GraphNetwork(nn.Module):
    """Graphs of a batch joined to one; a ring and the batch's own edges."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(GraphLayer() for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        b, n, _ = x.shape
        first = torch.arange(b, device=x.device)[:, None] * n
        source, target = (edges[..., 0] + first).flatten(), (edges[..., 1] + first).flatten()
        h = self.enter(x).flatten(0, 1)
        for layer in self.layers:
            h = layer(h, source, target)
        pooled = h.new_zeros(b, WIDTH).index_add(0, torch.arange(b, device=x.device).repeat_interleave(n), h)
        return self.head(pooled)[:, 0]


class Siamese(nn.Module):
    """One encoder, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 8))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        a, b, c = self.encoder(x), self.encoder(y), self.encoder(z)
        return F.relu((a - b).square().sum(-1) - (a - c).square().sum(-1) + 1.0)


class NeuralOde(nn.Module):
    """One field, asked four times in each of three steps (Runge-Kutta)."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        def slope(t: float, x: Tensor) -> Tensor:
            return self.field(torch.cat([x, x.new_full((len(x), 1), t)], -1))

        for t in (0.0, 0.5, 1.0):
            k_1 = slope(t, x)
            k_2 = slope(t + 0.25, x + 0.25 * k_1)
            k_3 = slope(t + 0.25, x + 0.25 * k_2)
            x = x + 0.5 / 6 * (k_1 + 2 * k_2 + 2 * k_3 + slope(t + 0.5, x + 0.5 * k_3))
        return self.head(x)[:, 0]


class Recommender(nn.Module):
    """Tables with sparse gradients, and products between all pairs of features (DLRM)."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(40, 8, mode="sum", sparse=sparse) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = torch.stack([x, *(table(ids[:, n]) for n, table in enumerate(self.tables))], 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        pairs = (found @ found.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([x, pairs], -1))[:, 0]
