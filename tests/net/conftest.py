"""Each program runs on the host, and on an accelerator where there is one."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device(request.param)
