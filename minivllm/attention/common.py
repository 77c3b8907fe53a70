"""What the three attention kernels share: the online softmax, the masks, the merge of partial results.

For one tile of queries (rows i) and a stream of key tiles (columns j) every kernel keeps three running
values,

    s   = q k^T                                  raw scores of this tile
    m'  = max(m, scale max_j s)                  running maximum, in units of log2
    p   = exp2(scale s - m')
    l'  = l exp2(m - m') + sum_j p               running denominator
    acc = acc exp2(m - m') + p v                 running numerator

and ends with out = acc / l and lse = ln 2 (m + log2 l) (FlashAttention-2, Dao 2023). scale holds log2(e),
because exp2 is one instruction where exp is two. -inf - -inf is NaN and arises in three places: a row that
has seen no key yet, a split without keys, and a merge of such splits. Each is guarded here, once.
"""

from minivllm.triton_env import INTERPRET, tl, triton

LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(LOG2E)
_NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def dot(a, b, acc):
    """acc + a b, summed in float32: no TF32 for float32 operands, no bfloat16 arithmetic when interpreted."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x, float32, rounded to dtype, to nearest even; the interpreter by itself would cut bfloat16 off."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def cap_scores(s, scale, softcap):
    """softcap tanh(scale s / softcap) in units of log2, the cap of Gemma 2; tanh x = 1 - 2 / (e^2x + 1)."""
    e_2x = tl.exp2(s * (scale / softcap * 2.0 * _LOG2E))
    return softcap * (1.0 - 2.0 / (e_2x + 1.0)) * _LOG2E


@triton.jit
def online_softmax(s, m, l, scale):
    """One step of the formulas above: s [M, N], m and l [M] -> p [M, N], alpha = exp2(m - m'), m', l'."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    # A row that has seen no key has m' = -inf: any finite stand-in makes its p and alpha exp2(-inf) = 0.
    m_safe = tl.where(m_new == _NEG_INF, 0.0, m_new)
    p = tl.exp2(s * scale - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def finish(acc, m, l):
    """out = acc / l and its natural-log lse; 0 and -inf for a row that has seen no key."""
    l_safe = tl.where(l == 0.0, 1.0, l)
    lse = tl.where(l == 0.0, _NEG_INF, (m + tl.log2(l_safe)) * _LN2)
    return acc / l_safe[:, None], lse


@triton.jit
def seen(position, key, s_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """[M, N] mask: which keys a row sees; position [M] is its own place among the keys, i + s_k - s_q."""
    mask = (key < s_k)[None, :]
    if HAS_LEFT:
        mask = mask & (key[None, :] >= position[:, None] - left)
    if HAS_RIGHT:
        mask = mask & (key[None, :] <= position[:, None] + right)
    return mask


@triton.jit
def key_range(first, last, s_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Keys [lo, hi) that rows with positions first .. last see: the bounds of the loop over key tiles."""
    lo = 0
    hi = s_k
    if HAS_LEFT:
        lo = tl.maximum(first - left, 0)
    if HAS_RIGHT:
        hi = tl.minimum(last + right + 1, s_k)
    return lo, hi


@triton.jit
def load_pages(table, n, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page numbers of the keys n .. n + BLOCK_N: one for all if pages hold whole tiles, else one a key.

    Entries for keys from hi on are not read. Loops call this a tile ahead and carry the result: a load that waits
    for another load in the same iteration would take a stage of the pipeline away from K and V.
    """
    if BLOCK_SIZE >= BLOCK_N:
        page = tl.load(table + n // BLOCK_SIZE, mask=n < hi, other=0)
    else:
        key = n + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // BLOCK_SIZE, mask=key < hi, other=0)
    return page.to(tl.int64)


@triton.jit
def merge_parts(o, lse, first, count, stride_o, stride_lse, columns, in_row, BLOCK_P: tl.constexpr):
    """Merge parts first .. first + count of one row: o + part stride_o + columns, lse + part stride_lse.

    out = sum_i exp(lse_i - lse) o_i: an online softmax whose scores are the parts' lse and whose values are
    their outputs. A part without keys has lse = -inf and its o was never written, so it is not read.
    """
    m = _NEG_INF
    l = 0.0
    acc = tl.zeros([columns.shape[0]], tl.float32)
    for start in range(0, count, BLOCK_P):
        i = start + tl.arange(0, BLOCK_P)
        part = (first + i).to(tl.int64)
        s = tl.load(lse + part * stride_lse, mask=i < count, other=_NEG_INF)
        m_new = tl.maximum(m, tl.max(s, 0))
        m_safe = tl.where(m_new == _NEG_INF, 0.0, m_new)
        w = tl.exp2((s - m_safe) * _LOG2E)
        alpha = tl.exp2((m - m_safe) * _LOG2E)
        written = (s > _NEG_INF)[:, None] & in_row[None, :]
        o_i = tl.load(o + part[:, None] * stride_o + columns[None, :], mask=written, other=0.0)
        acc = acc * alpha + tl.sum(w[:, None] * o_i, 0)
        l = l * alpha + tl.sum(w, 0)
        m = m_new
    l_safe = tl.where(l == 0.0, 1.0, l)
    return acc / l_safe, tl.where(l == 0.0, _NEG_INF, m + tl.log2(l_safe) * _LN2)
