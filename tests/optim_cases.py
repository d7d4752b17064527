"""What the tests of the optimizers share.

An oracle in float64, snapshots, and the combinations of master and codec.
"""

import itertools
import math

import stepwell
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODECS = ["fp32", "bf16", "q8"]
LAYOUTS = [(dtype, moments) for dtype, moments in itertools.product(DTYPES, CODECS)]
LAYOUT_IDS = [f"{str(dtype).removeprefix('torch.')}-{moments}" for dtype, moments in LAYOUTS]
SPECIALS = [math.nan, math.inf, -math.inf]


def parameter(*shape, dtype=torch.float32):
    """A random parameter with a random gradient."""
    param = torch.nn.Parameter(torch.randn(shape).to(dtype))
    param.grad = torch.randn(shape).to(dtype)
    return param


def bits(tensor):
    """The tensor as integers, so that equality is that of bits (NaN equals itself, 0 is not -0)."""
    tensor = tensor.detach().contiguous()
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    ).clone()


def snapshot(optimizer):
    """All bits that a step may change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        (index, name): bits(value)
        for index, param in enumerate(params)
        for name, value in {"param": param, **optimizer.state.get(param, {})}.items()
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key in before:
        assert torch.equal(before[key], after[key]), key


def master(optimizer, param):
    """The float32 master of a parameter."""
    state = optimizer.state[param]
    if param.dtype == torch.float32:
        return param.detach().clone()
    if param.dtype == torch.float16:
        return state["master"].clone()
    high = param.detach().contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + state["trailing"].to(torch.int32)).view(torch.float32)


class Oracle:
    """Adam(W) in float64.

    Kingma and Ba, 2015, algorithm 1; Loshchilov and Hutter, 2019, algorithm 2.
    """

    def __init__(self, start):
        self.param = start.detach().double()
        self.exp_avg = torch.zeros_like(self.param)
        self.exp_avg_sq = torch.zeros_like(self.param)
        self.step_count = 0
        # How much larger than their sum the gradient and the L2 decay were, at worst: what rounding
        # is multiplied with.
        self.cancellation = torch.ones_like(self.param)

    def step(self, grad, *, lr, betas, eps, weight_decay, decoupled=True, maximize=False):
        grad = grad.double() * (-1 if maximize else 1)
        self.step_count += 1
        if decoupled:
            self.param *= 1 - lr * weight_decay
        else:
            decayed = grad + weight_decay * self.param
            summands = grad.abs() + (weight_decay * self.param).abs()
            self.cancellation = torch.maximum(
                self.cancellation, (summands / decayed.abs()).nan_to_num(1.0)
            )
            grad = decayed
        self.exp_avg = betas[0] * self.exp_avg + (1 - betas[0]) * grad
        self.exp_avg_sq = betas[1] * self.exp_avg_sq + (1 - betas[1]) * grad.square()
        corrected = self.exp_avg / (1 - betas[0] ** self.step_count)
        denominator = (self.exp_avg_sq / (1 - betas[1] ** self.step_count)).sqrt() + eps
        self.param -= lr * corrected / denominator


def stepped(param, *, steps=3, **options):
    """An optimizer over `param` that has taken some steps."""
    optimizer = stepwell.AdamW([param], **options)
    for _ in range(steps):
        param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()
    return optimizer
