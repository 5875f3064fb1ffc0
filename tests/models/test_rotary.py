import pytest
import torch

from overspill.models import rotary
from overspill.models.rotary import rotate, rotate_packed


def tables(length: int, width: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(length), 10.0 ** -torch.arange(width // 2))
    return angles.cos().float().to(device), angles.sin().float().to(device)


def test_queries_and_keys_turn_and_values_pass() -> None:
    cos, sin = tables(5, 8)
    qkv = torch.randn(2, 5, 3, 4, 8)
    turned = rotate_packed(qkv, cos, sin)
    wide = cos.view(5, 1, -1), sin.view(5, 1, -1)
    for part in (0, 1):
        assert torch.equal(turned[part], rotate(qkv[:, :, part], *wide))
    assert torch.equal(turned[2], qkv[:, :, 2])


def through_kernel(source: torch.Tensor, upstream: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rotated q, k and v and the gradient, by the Triton kernel."""
    pytest.importorskip("triton")
    x = source.clone().requires_grad_()
    cos, sin = tables(source.shape[1], source.shape[-1], str(source.device))
    parts = rotary._Rotate.apply(x, cos, sin)
    torch.autograd.backward(parts, upstream)
    assert x.grad is not None
    return [*(part.detach() for part in parts), x.grad]


def through_torch(source: torch.Tensor, upstream: list[torch.Tensor]) -> list[torch.Tensor]:
    x = source.clone().requires_grad_()
    cos, sin = (table.unsqueeze(1) for table in tables(source.shape[1], source.shape[-1]))
    cos, sin = cos.to(source), sin.to(source)
    q, k, v = x.unbind(2)
    parts = [rotate(q, cos, sin), rotate(k, cos, sin), v]
    torch.autograd.backward(parts, upstream)
    assert x.grad is not None
    return [*(part.detach() for part in parts), x.grad]


LAYOUTS = {
    "token, head": lambda parts: parts,
    "head, token": lambda parts: [p.transpose(1, 2).contiguous().transpose(1, 2) for p in parts],
    "packed": lambda parts: list(torch.stack(parts, dim=2).unbind(2)),
    "all different": lambda parts: [
        layout(parts)[number] for number, layout in enumerate(list(LAYOUTS.values())[:3])
    ],
    "one number": lambda parts: [p.new_ones(()).expand(p.shape) for p in parts],
}


def assert_kernel_equals_torch(
    heads: int, width: int, layout: str, device: str, dtype: torch.dtype
) -> None:
    source = torch.randn(2, 3, 3, heads, width, device=device).to(dtype)
    upstream = LAYOUTS[layout]([torch.randn_like(source[:, :, 0]) for _ in range(3)])
    near = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    results = through_kernel(source, upstream), through_torch(source, upstream)
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, **near)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 8)])
def test_gradients_of_any_layout_are_packed_by_the_kernel(
    heads: int, width: int, layout: str
) -> None:
    assert_kernel_equals_torch(heads, width, layout, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_torch_path(heads: int, dtype: torch.dtype, layout: str) -> None:
    assert_kernel_equals_torch(heads, 64, layout, "cuda", dtype)
