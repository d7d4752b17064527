"""torch.optim.AdamW beside ours: it takes each step from the weights and moments that ours had.

Weights and moments are then within the errors of a few fp32 operations.
"""

import copy

import torch
from optim_cases import bits, master
from stepwell import _core

ULP = 2.0**-23
"""Of a float32, relative: twice the error of one rounding."""
TINY = 1e-37
"""Absolute: what rounding costs among the least numbers of fp32."""


def difference(one, other, where=""):
    """Where two values, or the tensors in them, differ by a bit; None if they do not."""
    if isinstance(one, dict) and one.keys() == other.keys():
        one, other = [(list(each.items())) for each in (one, {key: other[key] for key in one})]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        found = (
            difference(*pair, f"{where}[{index}]")
            for index, pair in enumerate(zip(one, other, strict=True))
        )
        return next(filter(None, found), None)
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) == (other.dtype, other.shape):
            wrong = bits(one) != bits(other)
            if not wrong.any():
                return None
            one, other = f"{wrong.sum()} of {one.numel()}: {one[wrong]}", other[wrong]
    elif one == other or str(one) == str(other) == "nan":
        return None
    return f"{where}: `{one}`, `{other}`"


def assert_same(one, other):
    where = difference(one, other)
    assert where is None, where


def assert_near(ours, theirs, bound):
    """Not farther apart than `bound`; finite where the other is."""
    ours, theirs = ours.detach(), theirs.detach()
    # torch's lerp makes NaN of two infinities, our sum another one.
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    excess = ((ours - theirs).abs() - bound).nan_to_num(0.0)
    assert not (excess > 0).any(), f"`{excess.max()}` beyond the bound"


class Torch:
    """torch.optim.AdamW over the masters of the parameters; takes each step from where ours was."""

    def __init__(self):
        self.optimizer = None
        # The weight that a step wrote, and the master of which it is the rounded form. Without an
        # entry a parameter is its own master.
        self.stamps = {}

    def add(self, params):
        """Another group."""
        group = {"params": [param.detach().float().clone() for param in params]}
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([group])
        else:
            self.optimizer.add_param_group(group)

    def tensors(self):
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    def _master(self, tensor, param):
        """The master of `param`, which may have been written since its last step."""
        written = param.detach().float().clone()
        if tensor not in self.stamps:
            return written
        weight, before = self.stamps[tensor]
        if param.dtype != torch.bfloat16:
            # By bits: 0 written over -0 is a write.
            return torch.where(bits(param) == bits(weight), before, written)
        # On purpose: trailing bits are kept or void by the chunk.
        for begin in range(0, param.numel(), _core.CHUNK_LEN):
            chunk = slice(begin, begin + _core.CHUNK_LEN)
            if torch.equal(bits(param).view(-1)[chunk], bits(weight).view(-1)[chunk]):
                written.view(-1)[chunk] = before.view(-1)[chunk]
        return written

    def step(self, run, weights, coefficient):
        """Steps the parameters that have a gradient, as `run` has just done, and compares.

        `weights`: the parameters of `run` before that. `coefficient`: of the gradients.
        """
        stepped = []
        groups = zip(self.optimizer.param_groups, run.optimizer.param_groups, strict=True)
        for own, group in groups:
            for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
                own[key] = group[key]
            for tensor, param in zip(own["params"], group["params"], strict=True):
                tensor.grad = None if param.grad is None else param.grad.float() * coefficient
                if tensor.grad is not None:
                    tensor.copy_(self._master(tensor, weights[param]))
                    exp_avg = self.optimizer.state.get(tensor, {}).get("exp_avg", 0 * tensor)
                    stepped.append((tensor, tensor.clone(), exp_avg.clone(), param, own))
        self.optimizer.step()
        for tensor, weight, exp_avg, param, group in stepped:
            self._check(tensor, weight, exp_avg, group, run.optimizer, param)
        self.adopt(run)

    def _check(self, tensor, weight, exp_avg, group, optimizer, param):
        """`param` was stepped as `tensor`, from `weight` and `exp_avg`.

        Both round every operation to fp32; the operations differ, for ours are fused. So an average
        is off by roundings of what is added up in it, and a weight by its own roundings, by those
        of its update, and by those of the average that the update is made of.
        """
        ours, theirs = optimizer.state[param], self.optimizer.state[tensor]
        assert ours["step"] == theirs["step"]
        assert ours["step"].dtype == torch.float32
        summands = exp_avg.abs() + tensor.grad.abs()
        if "exp_avg" in ours:
            # bf16 moments are rounded stochastically, to either neighbour.
            codec = 2.0**-7 if ours["exp_avg"].dtype == torch.bfloat16 else 0.0
            bound = 4 * ULP * summands + codec * theirs["exp_avg"].abs()
            assert_near(ours["exp_avg"], theirs["exp_avg"], bound)
            bound = (4 * ULP + codec) * theirs["exp_avg_sq"] + TINY
            assert_near(ours["exp_avg_sq"], theirs["exp_avg_sq"], bound)
        count, (beta1, beta2) = float(ours["step"]), group["betas"]
        root = (theirs["exp_avg_sq"] / (1 - beta2**count)).sqrt()
        largest_update = group["lr"] * summands / (1 - beta1**count) / (root + group["eps"])
        bound = 4 * ULP * (weight.abs() + tensor.abs()) + 16 * ULP * largest_update + TINY
        assert_near(master(optimizer, param), tensor, bound)

    def saved(self):
        return self.optimizer.state_dict(), [self.stamps.get(tensor) for tensor in self.tensors()]

    def load(self, saved):
        packed, stamps = saved
        self.optimizer.load_state_dict(packed)
        found = zip(self.tensors(), stamps, strict=True)
        self.stamps = {tensor: stamp for tensor, stamp in found if stamp is not None}

    def drop(self, tensor, param):
        """Its state is deleted."""
        self.optimizer.state.pop(tensor, None)
        if param.dtype != torch.float32:
            self.stamps.pop(tensor, None)

    def was_loaded(self, run):
        """`run` has loaded the state, which has no trailing bits and may be rounded there."""
        params = [param for group in run.optimizer.param_groups for param in group["params"]]
        for tensor, param in zip(self.tensors(), params, strict=True):
            if param.dtype != torch.float32:
                self.stamps.pop(tensor, None)
        decoded = run.optimizer.decoded_state_dict()
        if run.optimizer.param_groups:
            self.optimizer.load_state_dict(copy.deepcopy(decoded))

    def adopt(self, run):
        """Goes on from the masters and moments of `run`, all of which a step has just written."""
        decoded = run.optimizer.decoded_state_dict()["state"]
        params = [param for group in run.optimizer.param_groups for param in group["params"]]
        for index, (tensor, param) in enumerate(zip(self.tensors(), params, strict=True)):
            if param.grad is not None and index in decoded:
                self.stamps[tensor] = (param.detach().clone(), master(run.optimizer, param))
                for name in ("exp_avg", "exp_avg_sq"):
                    self.optimizer.state[tensor][name].copy_(decoded[index][name])
