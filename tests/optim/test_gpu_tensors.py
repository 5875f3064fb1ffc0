"""AdamW for many tensors in one launch, compared with one launch for each of them."""

import pytest
import torch
from torch import Tensor, nn

from overspill.optim.adamw import AdamW
from overspill.optim.arguments import AdamHyper, RecordState, RecordUpdate, adam_scalars

pytest.importorskip("triton")

BF16, FP32 = torch.bfloat16, torch.float32
HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
LENGTHS = (16, 2064, 1024)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which serves machines without a GPU")
    return str(request.param)


def update_of(length: int, weight: torch.dtype, moments: torch.dtype, device: str) -> RecordUpdate:
    low = torch.randint(-(2**15), 2**15, (length,), dtype=torch.int16, device=device)
    state = RecordState(
        torch.randn(length).to(device, weight),
        low if weight == BF16 else None,
        torch.randn(length).to(device, moments),
        torch.rand(length).to(device, moments),
    )
    return RecordUpdate(state, torch.randn(length).to(device, weight))


def copy_of(update: RecordUpdate) -> RecordUpdate:
    state = (None if tensor is None else tensor.clone() for tensor in update.state)
    return RecordUpdate(RecordState(*state), update.grad.clone())  # type: ignore[arg-type]


def assert_equal(mine: RecordState, theirs: RecordState) -> None:
    for one, other in zip(mine, theirs, strict=True):
        if one is not None and other is not None:
            assert torch.equal(one, other)


@pytest.mark.parametrize("weight", [FP32, BF16])
@pytest.mark.parametrize("moments", [FP32, BF16])
def test_the_bits_are_those_of_single_updates(
    weight: torch.dtype, moments: torch.dtype, device: str
) -> None:
    from overspill.optim.gpu_kernel import adamw_cuda_
    from overspill.optim.gpu_tensors import UpdateTable

    updates = [update_of(length, weight, moments, device) for length in LENGTHS]
    singles = [copy_of(update) for update in updates]
    table = UpdateTable()
    for _ in range(2):  # the second time with the same table
        table.run(updates, adam_scalars(HYPER))
        for state, grad in singles:
            adamw_cuda_(state, grad, adam_scalars(HYPER), 0, None)
    for update, single in zip(updates, singles, strict=True):
        assert_equal(update.state, single.state)


def test_a_table_follows_tensors_that_move(device: str) -> None:
    from overspill.optim.gpu_kernel import adamw_cuda_
    from overspill.optim.gpu_tensors import UpdateTable

    table = UpdateTable()
    updates = [update_of(length, BF16, FP32, device) for length in LENGTHS]
    held = [updates]  # else the next ones may get the same memory
    for count in (3, 3, 2):
        updates = [copy_of(update) for update in updates[:count]]
        held.append(updates)
        before = [copy_of(update) for update in updates]
        table.run(updates, adam_scalars(HYPER))
        for update, (state, grad) in zip(updates, before, strict=True):
            adamw_cuda_(state, grad, adam_scalars(HYPER), 0, None)
            assert_equal(update.state, state)


class AsOnGpu(Tensor):
    """A tensor that is updated as if it were on a GPU, by kernels in Triton's interpreter."""

    is_cuda = True


def parameters(device: str) -> list[nn.Parameter]:
    """Aligned and odd lengths, a matrix with columns as its rows, and one parameter that has the
    memory of another."""
    torch.manual_seed(0)
    shapes = [(64, 32), (7,), (48,), (16, 33)]
    values = [torch.randn(shape).to(device, BF16) for shape in shapes]
    values.append(torch.randn(32, 16).to(device, BF16).t())
    values.append(values[0])
    if device == "cpu":
        values = [value.as_subclass(AsOnGpu) for value in values]
    return [*map(nn.Parameter, values)]


def test_an_optimizer_updates_all_parameters_as_one_by_one(device: str) -> None:
    from overspill.optim.gpu_kernel import adamw_cuda_

    mine, theirs = parameters(device), parameters(device)
    optimizer = AdamW([{"params": mine[:2], "lr": 1e-1}, {"params": mine[2:]}], lr=1e-2)
    records: list[list[Tensor]] = [
        [torch.zeros(p.numel(), dtype=dtype, device=device) for dtype in (torch.int16, FP32, FP32)]
        for p in theirs
    ]
    for step in range(1, 4):
        grads = [torch.randn(p.shape).to(device, p.dtype) for p in mine]
        for parameter, grad in zip(mine, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        for number, (parameter, grad) in enumerate(zip(theirs, grads, strict=True)):
            hyper = AdamHyper(1e-1 if number < 2 else 1e-2, 0.9, 0.999, 1e-8, 0.01, step)
            flat = parameter.data.contiguous().view(-1)
            state = RecordState(flat, *records[number])
            adamw_cuda_(state, grad.reshape(-1), adam_scalars(hyper), 0, None)
            parameter.data.copy_(flat.view(parameter.shape))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    assert [optimizer.state[parameter]["step"] for parameter in mine] == [3] * len(mine)


def interpreted(values: Tensor) -> nn.Parameter:
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which serves machines without a GPU")
    parameter = nn.Parameter(values.as_subclass(AsOnGpu))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def test_parameters_that_overlap_are_updated_one_after_another() -> None:
    memory = torch.zeros(64)
    parts = memory[:48], memory[16:], memory.view(4, 16).t(), memory[32:64]
    AdamW([interpreted(part) for part in parts], lr=0.1, weight_decay=0.0).step()
    updates = torch.tensor([2.0, 3.0, 4.0, 3.0]).repeat_interleave(16)
    torch.testing.assert_close(memory, -0.1 * updates)


def test_a_state_of_another_dtype_is_refused_before_anything_is_written() -> None:
    parameter = interpreted(torch.ones(32))
    optimizer = AdamW([parameter])
    optimizer.step()
    parameter.data = parameter.data.bfloat16()  # its state has no low bits
    parameter.grad = torch.ones_like(parameter)
    before = parameter.detach().clone()
    with pytest.raises(AssertionError):
        optimizer.step()
    assert torch.equal(parameter, before)


@pytest.mark.gpu
def test_a_table_is_not_read_by_another_stream_before_it_is_there() -> None:
    from overspill.optim.gpu_tensors import UpdateTable

    table = UpdateTable()
    updates = [update_of(length, BF16, FP32, "cuda") for length in LENGTHS]
    single = [copy_of(update) for update in updates]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the first table arrives after this
    table.run(updates, adam_scalars(HYPER))
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        table.run(single, adam_scalars(HYPER))
    other.synchronize()
    want = [copy_of(update) for update in single]
    torch.cuda.synchronize()
    for update, first in zip(want, updates, strict=True):
        assert_equal(update.state, first.state)
