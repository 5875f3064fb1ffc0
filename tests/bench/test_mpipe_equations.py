"""The memory equations of MPipeMoE."""

from bench.mpipe_equations import pipelined_memory, saved_memory, saving_ratio, unpipelined_memory


def test_memory_is_that_of_the_equations() -> None:
    rows, d_model, d_hidden, n_experts, n = 1000, 10, 40, 8, 4
    plain = unpipelined_memory(rows, d_model, d_hidden, n_experts)
    assert plain == (4 * (80 + 800), 80_000, 50_000)
    pipelined = pipelined_memory(rows, d_model, d_hidden, n_experts)
    assert pipelined.buffers == pipelined.activations == 80_000
    # of T_DI and T_DO half remains, of T_M a quarter; as much of the buffers
    assert saved_memory(rows, d_model, d_hidden, n) == 2 * (10_000 + 30_000)
    assert saving_ratio(rows, d_model, d_hidden, n_experts, n) == 80_000 / (3520 + 160_000)
    assert saved_memory(rows, d_model, d_hidden, 1) == 0
