"""Device half of the state formats: one tile of a checkpoint in, fp32 out, and back."""

import triton
import triton.language as tl


@triton.jit
def load_state(p_state, o_v, o_k, m_k, K: tl.constexpr):
    """One fp32 tile [BV, BK] of a stored [V, K] state; masked channels are 0."""
    return tl.load(p_state + o_v[:, None] * K + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_state(p_state, o_v, o_k, m_k, s, K: tl.constexpr):
    """Round an fp32 tile [BV, BK] to the stored format (nearest even) and store it."""
    tl.store(p_state + o_v[:, None] * K + o_k[None, :], s.to(p_state.dtype.element_ty), mask=m_k[None, :])
