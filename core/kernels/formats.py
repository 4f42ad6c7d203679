"""Device half of the state formats: a tile of a checkpoint in, fp32 chunks [BV, BK] out, and back."""

import triton
import triton.language as tl


@triton.jit
def load_state(p_state, o_v, d):
    """Rows o_v of a stored [V, K] state as fp32 chunks."""
    s = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
        s += (tl.load(p_state + o_v[:, None] * d.K + o_k[None, :]).to(tl.float32),)
    return s


@triton.jit
def store_state(p_state, o_v, s, d):
    """Round fp32 chunks to the stored format (nearest even) and store them."""
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
        tl.store(p_state + o_v[:, None] * d.K + o_k[None, :], s[i_k].to(p_state.dtype.element_ty))
