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
        assert torch.equal(turned[:, :, part], rotate(qkv[:, :, part], *wide))
    assert torch.equal(turned[:, :, 2], qkv[:, :, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_torch_path(
    heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cos, sin = tables(17, 64, "cuda")
    source = torch.randn(3, 17, 3, heads, 64, device="cuda", dtype=dtype)
    upstream = torch.randn_like(source)
    results = []
    for kernel in (True, False):
        monkeypatch.setattr(rotary, "has_triton", lambda what, kernel=kernel: kernel)
        x = source.clone().requires_grad_()
        y = rotate_packed(x, cos, sin)
        y.backward(upstream)
        results.append((y.detach(), x.grad))
    loose = (
        {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, **loose)
