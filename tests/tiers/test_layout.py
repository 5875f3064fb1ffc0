"""Records: sizes, alignment, and views that do not overlap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import ExpertShape
from overspill.tiers.layout import ALIGN, LowRanks, RecordLayout
from tests.tiers.mixed import mixed_layout

DTYPES = [torch.float32, torch.bfloat16]


def shapes() -> st.SearchStrategy[ExpertShape]:
    size = st.integers(1, 70)
    return st.builds(ExpertShape, d_model=size, d_hidden=size, gated=st.booleans())


layouts = st.builds(
    RecordLayout, shapes(), dtype=st.sampled_from(DTYPES), state_dtype=st.sampled_from(DTYPES)
)


@given(layouts)
def test_record_sizes_are_rounded_up_to_pages(layout: RecordLayout) -> None:
    weights = layout.shape.numel * layout.dtype.itemsize
    assert layout.weight_bytes % ALIGN == 0
    assert 0 <= layout.weight_bytes - weights < ALIGN
    states = layout.shape.numel * sum(section.dtype.itemsize for section in layout.sections)
    assert layout.state_bytes % ALIGN == 0
    assert 0 <= layout.state_bytes - states < ALIGN + 64 * len(layout.sections)


@given(layouts)
def test_sections_do_not_overlap_and_stay_inside_the_record(layout: RecordLayout) -> None:
    record = torch.zeros(layout.state_bytes, dtype=torch.uint8)
    for number, section in enumerate(layout.sections, start=1):
        assert section.offset % 64 == 0
        view = layout.state(record, section.name)
        assert view.dtype == section.dtype
        assert view.shape == (layout.shape.numel,)
        assert not view.view(torch.uint8).any(), "two sections share bytes"
        view.view(torch.uint8).fill_(number)


def test_a_master_is_a_weight_and_its_low_bits() -> None:
    shape = ExpertShape(64, 64, gated=True)
    fp32, bf16 = (RecordLayout(shape, dtype) for dtype in DTYPES)
    assert [section.name for section in fp32.sections] == ["exp_avg", "exp_avg_sq"]
    assert [section.name for section in bf16.sections] == ["low", "exp_avg", "exp_avg_sq"]
    # 12 bytes per parameter in both cases, and 8 with bf16 moments
    assert fp32.weight_bytes + fp32.state_bytes == 12 * shape.numel
    assert bf16.weight_bytes + bf16.state_bytes == 12 * shape.numel
    small = RecordLayout(shape, torch.bfloat16, torch.bfloat16)
    assert small.weight_bytes + small.state_bytes == 8 * shape.numel


def test_weights_are_a_view_of_one_or_several_records() -> None:
    layout = RecordLayout(ExpertShape(8, 4, gated=False), torch.bfloat16)
    records = torch.zeros(3, layout.weight_bytes, dtype=torch.uint8)
    layout.weights(records[1]).fill_(1.0)
    many = layout.weights(records)
    assert many.shape == (3, 64)
    assert many.sum(1).tolist() == [0.0, 64.0, 0.0]


def test_an_unknown_state_is_an_error() -> None:
    layout = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)
    with pytest.raises(KeyError):
        layout.state(torch.zeros(layout.state_bytes, dtype=torch.uint8), "low")


@pytest.mark.parametrize("ranks", [LowRanks(3, 20), LowRanks(0, 8), LowRanks(1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_matrices_follow_the_weights(dtype: torch.dtype, ranks: LowRanks) -> None:
    """Each has bytes of its own, from a cache line on, and unpacked weights are sums."""
    layout = RecordLayout(ExpertShape(10, 7, gated=True), dtype, ranks=ranks)
    bare = RecordLayout(layout.shape, dtype)
    assert layout.bare == bare.stored
    record = layout.weights(torch.zeros(layout.weight_bytes, dtype=torch.uint8))
    assert record.numel() * dtype.itemsize % 64 == 0
    expected = [torch.zeros(size) for size in layout.shape.sizes]
    for rank, planes, total in zip(ranks, layout.low_rank, expected, strict=True):
        assert (planes is None) is (rank == 0)
        if planes is None:
            continue
        a, b = (part[0] for part in planes.of(record[None]))
        assert a.shape[0] == b.shape[1] == planes.padded
        assert planes.padded % 8 == 0
        assert planes.padded - rank in range(8)
        for part in (a, b):
            assert part.data_ptr() % 64 == record.data_ptr() % 64
            assert not part.any(), "two matrices share bytes"
            part.fill_(1.0)
        total += planes.padded
    assert not record[: layout.shape.numel].any()
    out = torch.zeros(layout.shape.numel, dtype=dtype)
    layout.unpack(0, record, out)
    assert torch.equal(out.float(), torch.cat([total.flatten() for total in expected]))


def test_records_of_layers_may_differ_in_size() -> None:
    layout = mixed_layout([1, 3])
    assert [layout.weight_bytes_in(layer) for layer in (0, 1)] == [ALIGN, 3 * ALIGN]
    assert layout.weight_bytes == 3 * ALIGN
    record = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    assert [len(layout.weights(record, layer)) for layer in (0, 1)] == [ALIGN - 64, 3 * ALIGN - 64]
    adapted = mixed_layout([1, 3], LowRanks(2, 0))
    assert adapted.stored_in(0) == adapted.stored_in(1) == adapted.stored


def test_layers_of_one_size_have_it() -> None:
    layout = RecordLayout(ExpertShape(8, 4, gated=False), torch.bfloat16)
    assert layout.stored_in(5) == layout.stored
    assert layout.weight_bytes_in(5) == layout.weight_bytes
