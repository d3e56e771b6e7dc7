// Products of a few bfloat16 rows of x. Values are rounded to bfloat16, and multiplied in pairs using AVX-512 BF16.
// (Not all processors with AVX-512 support this.) product.cc includes this file.
#pragma once
namespace {
// Use assembly, because compilers do not inline functions into functions targeting more instructions. (We need to
// inline `avx512::walk`.)
#define QL_WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
namespace pairs {
QL_WIDE inline __attribute__((always_inline)) __m512i rounded(__m512 low, __m512 high) {  // to bfloat16
  __m512i both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
  return both;
}
QL_WIDE inline __attribute__((always_inline)) __m512 add(__m512 sum, __m512i a, __m512i b) {  // adds products of pairs
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
template <int B, bool LOOKUP, int M>
QL_WIDE void tile(const Weight& w, const avx512::Tile& t, const uint16_t* x, int64_t count, int64_t m, Result y) {
  constexpr int R = 16 / M;  // such that all sums fit in registers
  const uint16_t* x_rows[M];
  for (int i = 0; i < M; i++) x_rows[i] = x + std::min(m + i, count - 1) * w.columns;
  for (int first = 0; first < avx512::Tile::kRows; first += R) {
    __m512 sums[R][M] = {}, before[R];
    const auto take = [&](int64_t k, const avx512::F* numbers, const avx512::F* scale, const avx512::F* offset) QL_WIDE __attribute__((always_inline)) {
      if (k % 32 == 0) {
        QL_UNROLL for (int r = 0; r < R; r++) before[r] = numbers[r] * scale[r] + offset[r];
        return;
      }
      __m512i values[R];
      QL_UNROLL for (int r = 0; r < R; r++) values[r] = rounded(before[r], numbers[r] * scale[r] + offset[r]);
      QL_UNROLL for (int i = 0; i < M; i++) {
        const __m512i part = _mm512_loadu_si512(x_rows[i] + k - 16);
        QL_UNROLL for (int r = 0; r < R; r++) sums[r][i] = add(sums[r][i], values[r], part);
      }
    };
    avx512::walk<B, LOOKUP, R>(w, t.rows + first, t.scale + first, t.offset + first, take, [](const auto*, const auto*) {});
    QL_UNROLL for (int r = 0; r < R; r++)
      for (int i = 0; i < M && m + i < count; i++) put(y, m + i, t.rows[first + r], _mm512_reduce_add_ps(sums[r][i]));
  }
}
template <int B, bool LOOKUP = false>
QL_WIDE void product(const Weight& w, const uint16_t* x, int64_t count, Result y, int64_t begin, int64_t end) {
  avx512::each_tile(w, begin, end, [&](const avx512::Tile& t) {
    for (int64_t m = 0; m < count; m += 8) (count - m <= 4 ? tile<B, LOOKUP, 4> : tile<B, LOOKUP, 8>)(w, t, x, count, m, y);
  });
}
using Product = void (*)(const Weight&, const uint16_t*, int64_t, Result, int64_t, int64_t);
inline Product of(const Format& f) {
  constexpr Product each[] = {product<2>, product<3>, product<4>, product<5>, product<6>, product<8>, product<8, true>};
  return each[f.bits == 8 ? 5 + f.lookup : f.bits - 2];
}
inline bool here() {
  static const bool has = __builtin_cpu_supports("avx512bf16") && &set() == &avx512::set;
  return has;
}
}  // namespace pairs
}  // namespace
