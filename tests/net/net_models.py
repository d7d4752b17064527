"""Small models whose forward gives a loss, and parts of them."""

import torch
from torch import nn


class Mlp(nn.Module):
    """Its forward gives a loss."""

    layer = nn.Linear

    def __init__(self, width):
        super().__init__()
        self.first, self.middle = self.layer(8, width), self.layer(width, width)
        self.last = self.layer(width, 4)

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return (self.last(hidden) - 0.5).float().square().mean()


class Weight(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self):
        return self.weight.sum() * 1e-3


class Ballasted(Mlp):
    """Stepping the first parameter takes milliseconds, and the forward uses it last.

    A look at another one that does not wait finds an old weight.
    """

    def __init__(self, width):
        nn.Module.__init__(self)
        self.ballast = Weight(1 << 20)
        layers = Mlp(width)
        self.first, self.middle, self.last = layers.first, layers.middle, layers.last

    def forward(self, x):
        return super().forward(x) + self.ballast()


class Slope(nn.Linear):
    """Its gradients are made of the input alone, whatever the weights are."""

    def forward(self, x):
        index = torch.arange(self.weight.numel(), device=x.device, dtype=x.dtype)
        slopes = torch.sin(index + x.sum()).view_as(self.weight)
        return (self.weight * slopes).sum() + (self.bias * slopes[:, 0]).sum()


class Slopes(Mlp):
    """No gradient depends on a weight: late updates end where those in time do, to the bit."""

    layer = Slope

    def forward(self, x):
        return self.first(x) + self.middle(x) + self.last(x)


class Words(nn.Module):
    """Embeddings with a tied head, and what lies between them."""

    def __init__(self, between):
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.between = between
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        ids = (x.abs() * 50).long() % 11
        hidden = self.norm(self.between(self.words(ids)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


class First(nn.Module):
    """The first of what a module gives."""

    def __init__(self, module, copies):
        super().__init__()
        self.module, self.copies = module, copies

    def forward(self, x):
        return self.module(*[x] * self.copies)[0]


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
