"""Exchanges state with DeepSpeedCPUAdam both ways, for each codec. For programs (deepspeed_run)."""

import copy

import stepwell
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from optim_cases import CODECS, bits, parameter, stepped


def exchange(moments, decoded):
    ours, theirs, back = (parameter(1000) for _ in range(3))
    optimizer = stepped(ours, lr=0.02, weight_decay=0.3, moments=moments)
    packed = copy.deepcopy(optimizer.decoded_state_dict() if decoded else optimizer.state_dict())
    reference = DeepSpeedCPUAdam([theirs])
    theirs.data.copy_(ours.data)
    reference.load_state_dict(packed)
    expected = optimizer.decoded_state_dict()["state"][0]
    assert torch.equal(reference.state[theirs]["exp_avg"], expected["exp_avg"])
    assert torch.equal(reference.state[theirs]["exp_avg_sq"], expected["exp_avg_sq"])
    ours.grad = torch.randn(1000)
    theirs.grad = ours.grad.clone()
    optimizer.step()
    reference.step()
    # DeepSpeed computes bias corrections in float32.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    returned = stepwell.AdamW([back], moments=moments)
    returned.load_state_dict(reference.state_dict())
    assert returned.state[back]["step"] == 4
    if moments == "fp32":
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                bits(returned.state[back][name]), bits(reference.state[theirs][name])
            )
    back.grad = torch.randn(1000)
    returned.step()


def exchange_all():
    torch.manual_seed(0)
    exchange("fp32", decoded=False)
    for codec in CODECS:
        exchange(codec, decoded=True)
