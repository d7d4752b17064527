"""Programs (`net_programs`) beside torch, and with the same bits beside a device as without."""

import pytest
import stepwell
import torch
from net_cases import (
    Face,
    MasterAdamW,
    TorchAdamW,
    assert_near,
    assert_same_bits,
    batch,
    result,
    train,
    weights,
)
from net_faces import WHOLE, cases, check
from net_models import Mlp, Slopes
from net_programs import PROGRAMS

# What is new and said once is no error here.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_with_torch(name, device):
    ours, theirs = (PROGRAMS[name](face, device) for face in (Face(), Face(TorchAdamW)))
    assert_near(ours, theirs)


@pytest.mark.parametrize(("name", "face"), cases(WHOLE))
def test_a_program_has_the_bits_of_each_face(name, face, device, tmp_path):
    if face == "host" and device.type != "cpu":
        pytest.skip("its parameters are in host memory")
    check(name, face, device, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_of_16_bits_is_its_rounded_master(dtype, device):
    nets, found = [Slopes(24).to(device, dtype) for _ in range(3)], []
    for net in nets:
        net.load_state_dict(nets[0].state_dict())
    faces = (MasterAdamW, stepwell.OffloadAdamW, stepwell.AdamW)
    for net, cls in zip(nets, faces, strict=True):
        if cls is not stepwell.AdamW or device.type == "cpu":
            optimizer = cls(net.parameters(), lr=1e-2)
            for step in range(20):
                optimizer.zero_grad()
                net(batch(step, device).to(dtype)).backward()
                optimizer.step()
            found.append(result(net, *([optimizer] if cls is not MasterAdamW else [])))
    # One unit in the last place, where the fp32 masters lie beside the middle of two.
    ulp = torch.finfo(dtype).eps
    count = len(found[0])
    assert_near(found[1][:count], found[0], rtol=ulp, atol=1e-3 * ulp)
    for index, (one, other) in enumerate(zip(found[1], found[0], strict=False)):
        assert (one == other).float().mean() > 0.99, index
    if len(found) == 3:
        assert_same_bits(found[1], found[2])


def test_adam_with_l2_decay_ends_as_with_torch():
    nets = Mlp(24), Mlp(24)
    nets[1].load_state_dict(nets[0].state_dict())
    for net, cls in zip(nets, (stepwell.Adam, torch.optim.Adam), strict=True):
        train(net, cls(net.parameters(), lr=1e-2, weight_decay=0.1), 8)
    assert_near(*map(weights, nets))
