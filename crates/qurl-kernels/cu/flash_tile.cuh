// A tile of attention for one query of up to eight heads: see flash.cuh, and flash_decode.cu, which folds
// them.
//
// Two MMAs, with the left operand in rows of 16 and the right one in columns of eight. Keys are the rows of
// the first MMA and columns of values those of the second, heads the columns: queries as rows would waste
// half of 16 with groups of five to eight heads. The sums are the same: only the operands have changed
// places.
#pragma once
#include "flash.cuh"

// Where the 16-byte chunk of a value's COLUMNS lies in shared memory, without bank conflicts: of bf16
// `load_transposed` reads eight rows at a time, of eight bits (64 columns apart from the others) a lane 8
// bytes of every second row.
template <int FORMAT, int COLUMNS>
__device__ __forceinline__ u32 value_place(u32 row, u32 chunk) {
    if (FORMAT != KV_BF16)
        return chunk / 4 * FLASH_TILE * 64 + (row ^ (row >> 2 & 1)) * 64 + (chunk % 4 ^ (row & 2)) * 16;
    return row * COLUMNS * 2 + (chunk ^ (COLUMNS < 64 ? row / 2 & 3 : row & 7)) * 16;
}

// The same of a key: of bf16 `load_matrices` reads eight rows at a time, of eight bits a lane 16 bytes.
template <int FORMAT, int HD>
__device__ __forceinline__ u32 key_place(u32 row, u32 chunk) {
    if (FORMAT == KV_BF16) return row * HD * 2 + (chunk ^ (row & 7)) * 16;
    return key_chunk<HD>(row, chunk);
}

// An 8 x 8 matrix of 16-bit numbers, transposed: a lane gives and gets row lane / 4, columns 2 (lane % 4) +
// {0, 1}.
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// Where numbers that a lane has of a query, as right operands of the steps over its HD numbers, lie: the pair
// `half` of step s. Of bf16 a step takes 16 neighbouring numbers; of eight bits a lane has HD / 4
// neighbouring ones in all steps.
template <int FORMAT, int HD>
__device__ __forceinline__ u32 query_pair(int s, int half) {
    u32 quad = threadIdx.x % 4;
    return FORMAT == KV_BF16 ? s * 16 + half * 8 + quad * 2 : quad * (HD / 4) + s * 4 + half * 2;
}

// COUNT neighbouring numbers.
template <int COUNT>
struct Columns {
    float x[COUNT];
    __device__ __forceinline__ void load(const float* from) {
        if (COUNT == 4) {
            float4 four = *reinterpret_cast<const float4*>(from);
            x[0] = four.x, x[1] = four.y, x[2 % COUNT] = four.z, x[3 % COUNT] = four.w;
        } else {
            float2 pair = *reinterpret_cast<const float2*>(from);
            x[0] = pair.x, x[1] = pair.y;
        }
    }
    __device__ __forceinline__ void store(float* to) const {
        if (COUNT == 4) {
            *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2 % COUNT], x[3 % COUNT]);
        } else {
            *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
        }
    }
};

// What the two warps of a team exchange about their tile.
struct Board {
    float2 m[2][4], l[2][4];  // of heads 2 i and 2 i + 1
    uint2 weights[4][WARP];
};

// A tile of keys and values, by a warp alone or a team of two: for the scores each warp has its part of the
// keys, for the values its part of the columns. Keys are the rows of the first MMA and columns of values
// those of the second: eight heads are all the columns there are, where a group as rows would waste half of
// 16. A lane has the keys lane / 4 + {0, 8, ..} of the warp for the heads 2 (lane % 4) + {0, 1}.
template <int FORMAT, int HD, int TEAM>
struct Tile {
    static const bool SCALED = FORMAT != KV_BF16;
    static const int BYTES = Row<FORMAT, HD>::BYTES;
    static const int KEYS = FLASH_TILE / TEAM, COLUMNS = HD / TEAM;  // of a warp
    static const int SIXTEENS = KEYS / 16;
    static_assert(!SCALED || COLUMNS % 64 == 0, "a lane has eight values of eight bits");
    float s[SIXTEENS][4];  // of 16 keys: key, head in the order (0, 0), (0, 1), (8, 0), (8, 1)
    float m[2], l[2];
    float part[COLUMNS / 16][4];

    // Adds queries times keys: 16 neighbouring numbers a step.
    __device__ __forceinline__ void sum_bf16(const u32 (&q)[HD / 16][2], const u8* keys) {
        u32 lane = threadIdx.x % WARP, row = lane % 16;
        u32 rows[2][SIXTEENS][4];
        auto load = [&](int k) {
#pragma unroll
            for (int i = 0; i < SIXTEENS; ++i) {
                u32 place = key_place<FORMAT, HD>(i * 16 + row, 2 * k + lane / 16);
                load_matrices(rows[k % 2][i], smem_address(keys) + place);
            }
        };
        load(0);
#pragma unroll
        for (int k = 0; k < HD / 16; ++k) {
            if (k + 1 < HD / 16) load(k + 1);
#pragma unroll
            for (int i = 0; i < SIXTEENS; ++i) mma<false>(s[i], rows[k % 2][i], q[k][0], q[k][1]);
        }
    }

    // The same of eight bits: a lane takes HD / 4 neighbouring numbers of a key through all steps.
    __device__ __forceinline__ void sum_quantized(const u32 (&q)[HD / 16][2], const u8* keys) {
        const int CHUNKS = BYTES / 64, STEPS = HD / 16 / CHUNKS;
        u32 lane = threadIdx.x % WARP, quad = lane % 4;
        u32 words[2][KEYS / 8][4];
        auto load = [&](int c) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
                u32* w = words[c % 2][j];
                u32 from = smem_address(keys) + key_place<FORMAT, HD>(j * 8 + lane / 4, quad * CHUNKS + c);
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                             : "r"(from)
                             : "memory");
            }
        };
        load(0);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c + 1 < CHUNKS) load(c + 1);
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
#pragma unroll
                for (int i = 0; i < SIXTEENS; ++i) {
                    u32 rows[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        u32 four = bias_codes<FORMAT>(words[c % 2][2 * i + h][k % 4]);
                        rows[h] = codes_f16<FORMAT, 0>(four);
                        rows[h + 2] = codes_f16<FORMAT, 1>(four);
                    }
                    mma<true>(s[i], rows, q[c * STEPS + k][0], q[c * STEPS + k][1]);
                }
            }
        }
    }

    // Scores as in `tile_scores`. The warp's first key has this offset from the first of the `seen` keys that
    // the row sees, wrapped around where it comes before it; keys that are not among them are masked.
    __device__ __forceinline__ void score(
        const u32 (&q)[HD / 16][2], const u8* keys, const float* key_scales, float scale, u32 offset, u32 seen
    ) {
        u32 lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][e] = 0.0f;
        }
        if constexpr (SCALED) {
            sum_quantized(q, keys);
        } else {
            sum_bf16(q, keys);
        }
        m[0] = m[1] = -INFINITY_F;
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                u32 key = i * 16 + e / 2 * 8 + lane / 4;
                float factor = SCALED ? __fmul_rn(scale, key_scales[key]) : scale;
                s[i][e] = offset + key < seen ? __fmul_rn(s[i][e], factor) : -INFINITY_F;
                m[e % 2] = fmaxf(m[e % 2], s[i][e]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int d = 4; d < WARP; d *= 2) m[h] = fmaxf(m[h], __shfl_xor_sync(FULL, m[h], d));
        }
    }

    // Weights and their sums as in `tile_weights`: every 32 keys on their own.
    template <typename Sync>
    __device__ __forceinline__ void weigh(Board& board, u32 side, const Sync& team_sync) {
        u32 lane = threadIdx.x % WARP, quad = lane % 4;
        if (TEAM > 1) {
            if (lane < 4) board.m[side][quad] = make_float2(m[0], m[1]);
            team_sync();
            float2 other = board.m[side ^ 1][quad];
            m[0] = fmaxf(m[0], other.x);
            m[1] = fmaxf(m[1], other.y);
        }
        float base[2] = {m[0] == -INFINITY_F ? 0.0f : m[0], m[1] == -INFINITY_F ? 0.0f : m[1]};
#pragma unroll
        for (int half = 0; half < KEYS / 32; ++half) {
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[i][e] = exp2_fast(__fsub_rn(s[i][e], base[e % 2]));
                    sum[e % 2] = __fadd_rn(sum[e % 2], s[i][e]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int d = 4; d < WARP; d *= 2)
                    sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(FULL, sum[h], d));
                l[h] = half == 0 ? sum[h] : __fadd_rn(l[h], sum[h]);
            }
        }
    }

    // The weights of all keys of the tile as right operands, times the scales of the warp's values.
    template <typename Sync>
    __device__ __forceinline__ void share(
        Board& board, u32 side, const Sync& team_sync, const float* value_scales, u32 (&p)[4][2]
    ) {
        u32 lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = s[i][2 * h], y = s[i][2 * h + 1];
                if (SCALED) {
                    float factor = value_scales[i * 16 + h * 8 + lane / 4];
                    x = __fmul_rn(x, factor);
                    y = __fmul_rn(y, factor);
                }
                p[i][h] = transposed(two<SCALED>(x, y));
            }
        }
        if constexpr (TEAM > 1) {
#pragma unroll
            for (int i = 0; i < SIXTEENS; ++i)
                board.weights[side * SIXTEENS + i][lane] = make_uint2(p[i][0], p[i][1]);
            if (lane < 4) board.l[side][quad] = make_float2(l[0], l[1]);
            team_sync();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                uint2 both = board.weights[k][lane];
                p[k][0] = both.x, p[k][1] = both.y;
            }
            float2 first = board.l[0][quad], second = board.l[1][quad];
            l[0] = __fadd_rn(first.x, second.x);
            l[1] = __fadd_rn(first.y, second.y);
        }
    }

    // The warp's columns of values for the two heads of the lane: of 16 the first eight, and the others.
    __device__ __forceinline__ void combine(const u8* values, const u32 (&p)[4][2]) {
        u32 lane = threadIdx.x % WARP, quad = lane % 4, eighth = lane / 4;
#pragma unroll
        for (int t = 0; t < COLUMNS / 16; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[t][e] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (FORMAT == KV_BF16) {
                u32 row = k * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
                for (int t = 0; t < COLUMNS / 16; ++t) {
                    u32 columns[4];
                    load_transposed(
                        columns,
                        smem_address(values) + value_place<FORMAT, COLUMNS>(row, 2 * t + lane / 8 % 2)
                    );
                    mma<false>(part[t], columns, p[k][0], p[k][1]);
                }
            } else {
                // Of 64 columns a lane has eight neighbouring ones of keys k * 16 + 2 quad + {0, 1, 8, 9},
                // two for every MMA.
#pragma unroll
                for (int c = 0; c < COLUMNS / 64; ++c) {
                    u32 rows[4][2];
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        u32 key = k * 16 + quad * 2 + r % 2 + r / 2 * 8;
                        uint2 eight = *reinterpret_cast<const uint2*>(
                            values + value_place<FORMAT, COLUMNS>(key, c * 4 + eighth / 2) + eighth % 2 * 8
                        );
                        rows[r][0] = bias_codes<FORMAT>(eight.x), rows[r][1] = bias_codes<FORMAT>(eight.y);
                    }
#pragma unroll
                    for (int t = 0; t < 4; ++t) {
                        u32 columns[4];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            // Columns 2 t and 2 t + 1 of two keys, side by side.
                            u32 four = __byte_perm(
                                rows[2 * h][t / 2], rows[2 * h + 1][t / 2], t % 2 ? 0x7362 : 0x5140
                            );
                            columns[2 * h] = codes_f16<FORMAT, 0>(four);
                            columns[2 * h + 1] = codes_f16<FORMAT, 1>(four);
                        }
                        mma<true>(part[c * 4 + t], columns, p[k][0], p[k][1]);
                    }
                }
            }
        }
    }

    // Folds the tile that comes after this one in.
    __device__ __forceinline__ void fold_in(const Tile& later) {
        float keep[2], take[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) fold(m[h], l[h], later.m[h], later.l[h], keep[h], take[h]);
#pragma unroll
        for (int t = 0; t < COLUMNS / 16; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                part[t][e] = folded(part[t][e], later.part[t][e], keep[e % 2], take[e % 2]);
        }
    }

    // Of no keys.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h) m[h] = -INFINITY_F, l[h] = 0.0f;
#pragma unroll
        for (int t = 0; t < COLUMNS / 16; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[t][e] = 0.0f;
        }
    }

    // Writes the warp's part of the result: [head][HD columns, m, l, 2 empty].
    __device__ __forceinline__ void leave(u32 side, u32 heads, float* to) const {
        u32 lane = threadIdx.x % WARP, eighth = lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 head = lane % 4 * 2 + h;
            if (head >= heads) continue;
            float *mine = to + head * (HD + 4), *own = mine + side * COLUMNS;
#pragma unroll
            for (int t = 0; t < COLUMNS / 16; t += 2) {
                if (SCALED) {
                    float4 four = {part[t][h], part[t][2 + h], part[t + 1][h], part[t + 1][2 + h]};
                    *reinterpret_cast<float4*>(own + t / 4 * 64 + eighth * 8 + t % 4 * 2) = four;
                } else {
                    own[16 * t + eighth] = part[t][h];
                    own[16 * t + 8 + eighth] = part[t][2 + h];
                    own[16 * t + 16 + eighth] = part[t + 1][h];
                    own[16 * t + 24 + eighth] = part[t + 1][2 + h];
                }
            }
            if (eighth == 0 && side == 0) {
                mine[HD] = m[h];
                mine[HD + 1] = l[h];
            }
        }
    }
};

// Writes the heads of a block of eight, a row of `parties` blocks of which this is number `me`: divides by
// the sums of weights and rounds as `a.output` says. Warp w has heads w, w + warps, .. of N, a lane HD / 32
// columns of each. In eight bits the blocks of a row publish their absmax for each other, so all must be
// resident.
template <int HD, int N>
__device__ __forceinline__ void finish_heads(
    const FlashArgs& a, u32 row, u32 first_head, u32 heads, u32 me, u32 parties, const float (&m)[N],
    const float (&l)[N], Columns<HD / WARP> (&o)[N]
) {
    const int OWN = HD / WARP;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u64 place = (u64)row * a.heads + first_head;
    auto each = [&](auto use) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (warp + i * warps >= heads) break;
            use(i, warp + i * warps);
        }
    };
    u32 absmax = 0;
    each([&](int i, u32 g) {
        if (a.lse && lane == 0) a.lse[place + g] = log_sum(m[i], l[i]);
        float inverse = __frcp_rn(l[i]);
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            o[i].x[c] = __fmul_rn(o[i].x[c], inverse);
            absmax = max(absmax, magnitude_bits(o[i].x[c]));
        }
    });
    float inverse = 1.0f;
    bool quantizes = a.output == DECODED_INT8 || a.output == DECODED_FP8;
        u32* published = a.absmax + (u64)row * parties * parties;
    if (quantizes) {
        __shared__ u32 warp_absmax[MAX_DECODE_WARPS];
        absmax = warp_max(absmax);
        if (lane == 0) warp_absmax[warp] = absmax;
        __syncthreads();
#pragma unroll 1
        for (u32 w = 0; w < warps; ++w) absmax = max(absmax, warp_absmax[w]);
        // Lane h of every warp waits for block h of the row; only the first warp publishes and, in the end,
        // clears.
        for (u32 h = lane; h < parties; h += WARP) {
            if (warp == 0) publish(published + h * parties + me, absmax);
        }
        u32 others = 0;
        for (u32 h = lane; h < parties; h += WARP)
            others = max(others, spin_wait(published + me * parties + h));
        absmax = warp_max(others);
        float scale = scale_of(absmax, a.output == DECODED_INT8 ? 127.0f : 448.0f);
        inverse = __fdiv_rn(1.0f, scale);
        if (threadIdx.x == 0 && me == 0) a.out_scales[row] = scale;
    }
    each([&](int i, u32 g) {
        u64 to = (place + g) * HD + lane * OWN;
        if (a.output == DECODED_F32) return o[i].store(a.out + to);
        if (a.output == DECODED_BF16) {
            u32* words = reinterpret_cast<u32*>(reinterpret_cast<u16*>(a.out) + to);
#pragma unroll
            for (int c = 0; c < OWN; c += 2) words[c / 2] = bf16_pair(o[i].x[c], o[i].x[c + 1]);
            return;
        }
        u32 word = 0;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            float v = __fmul_rn(o[i].x[c], inverse);
            word |= (u32)(a.output == DECODED_INT8 ? (u8)i8_code(v) : e4m3_code(v)) << 8 * c;
        }
        u8* bytes = reinterpret_cast<u8*>(a.out) + to;
        if (OWN == 4) {
            *reinterpret_cast<u32*>(bytes) = word;
        } else {
            *reinterpret_cast<u16*>(bytes) = (u16)word;
        }
    });
    if (quantizes) {
        __syncthreads();
        for (u32 h = lane; h < parties; h += WARP) {
            if (warp == 0) publish(published + me * parties + h, EMPTY);
        }
    }
}
