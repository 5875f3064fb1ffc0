"""On a GPU: the CPU computes some of the experts that are trained."""

import pytest
import torch

import overspill
from overspill.compute.cpu_kernel import cpu_isa
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from tests.moe.gpu_training import CONFIG, batches, delays
from tests.moe.streaming.policies import random_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("measured_roughly"),
    pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler"),
]
STEPS = 12


def losses(model: GPTMoE, optimizer: torch.optim.Optimizer, clip: float | None) -> list[float]:
    """Of steps with two small micro-batches each."""
    found = []
    for tokens in batches(STEPS, seed=5):
        for number in range(2):
            few = tokens[number : number + 1, :25]
            loss = model(few[:, :-1], few[:, 1:]).loss
            assert loss is not None
            if isinstance(optimizer, overspill.AdamW) and number == 0:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
            found.append(loss.item())
        if clip is not None and not isinstance(optimizer, overspill.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_any_split_trains_as_plain_pytorch(clip: float | None, late: bool) -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda")
    plain = losses(model, torch.optim.AdamW(model.parameters(), lr=3e-3), clip)
    model = GPTMoE(CONFIG, seed=5, device="cuda")
    settings = Settings(
        cpu_experts=True,
        cpu_training=True,
        cpu_policy=random_policy(5),
        inject=delays if late else None,
    )
    overspill.offload(model, settings=settings, gpu_memory="2GiB", mode="host", slots=6, quiet=True)
    engine = model.overspill
    try:
        engine.recorder.start()
        found = losses(model, overspill.AdamW(model, lr=3e-3, max_grad_norm=clip), clip)
        assert any(span.row == "cpu compute" for span in engine.recorder.spans())
        engine.check_conserved()
    finally:
        engine.close()
    assert found == pytest.approx(plain, rel=2e-4)
