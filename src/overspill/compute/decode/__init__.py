"""Kernels of a decoding step: one new token of each sequence. A kernel reads weights once and does
as much as it can with them, because launches and gaps take longer than arithmetic.

Sums are float32. The host reads nothing back, so a whole step can be one CUDA graph.

Shapes: B sequences, D model, H hidden, E experts, K top-k, h heads, k heads of keys and values, d
width of a head. Keys and values are [slots, k, d]; the slot of a token is found in `blocks` [B, n],
the blocks of each sequence.
"""
