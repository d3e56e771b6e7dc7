// Products by instructions that not every processor with AVX-512 has; product.cc includes it.
//
// One row and codes that stand for whole numbers: by VNNI, for bytes. Each 32 columns of x are written as scale * (a * 2^14 + b * 2^7 + c), whose digits a, b and c are bytes, with an error
// of less than 2^-20 of the largest of them. Products of bytes are summed exactly, as integers of 32 bits: four codes up
// to 255 times digits up to 64 stay below 2^31 when they are shifted.
//
// Some rows in bfloat16: values are rounded to it, and multiplied in pairs.
#pragma once
#include <cmath>
#define QL_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")))
#define QL_BYTES_INLINE QL_BYTES inline __attribute__((always_inline))
namespace {
namespace integers {
constexpr int64_t kUnit = 32, kStep = 64, kLargest = 63 << 14;
struct Digits {  // of a row of x
  std::vector<int8_t> of;       // of each step: 64 of a, of b and of c
  std::vector<int32_t> bias;    // of each four columns: what the bias of codes adds
  std::vector<float> scale;     // of each unit
  std::vector<float> sum;       // of each run of the weight: that of x, as its digits have it
};

// How codes become bytes: `code ^ flip`, or `bytes[code]`. A byte less `bias`, times `factor`, is the number.
struct Codes {
  bool known = false, looked_up = false;
  int32_t bias = 0;
  float factor = 1;
  uint8_t flip = 0;
  alignas(64) uint8_t bytes[64] = {};
};

Codes codes_of(const Weight& w) {
  const Format& f = w.format;
  Codes out;
  if (w.columns % kStep || (w.run % kUnit && w.run != 16) || (f.bits == 8 && f.lookup)) return out;
  if (f.bits > 4) {
    out.known = true, out.flip = f.bits == 8 && f.is_signed ? 128 : 0, out.bias = int32_t(f.bias) + out.flip;
    return out;
  }
  const int count = 1 << f.bits;
  bool even = w.values[0] == std::nearbyint(w.values[0]);  // whole numbers one apart, or else halves
  out.known = true;
  for (int i = 0; i < count; i++) {
    const float doubled = 2 * w.values[i];
    even &= w.values[i] == w.values[0] + i;
    out.known &= doubled == std::nearbyint(doubled) && std::abs(doubled) < 128;
  }
  out.looked_up = !even, out.bias = even ? -int32_t(w.values[0]) : 128, out.factor = even ? 1.f : .5f;
  for (int i = 0; i < 64 && out.known; i++) out.bytes[i] = int(2 * w.values[i % count]) + 128;
  return out;
}

QL_BYTES_INLINE __m512i load(const void* at) { return _mm512_loadu_si512(at); }
QL_BYTES_INLINE void store(int8_t* to, __m512i digits) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(digits)); }

QL_BYTES_INLINE __m512 widened(const uint16_t* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// Whether a row of x, in float32 or in bfloat16 (`narrow`), can be written in digits, which it is not if it holds NaN, infinity, or too small numbers.
QL_BYTES bool write(const float* x, const uint16_t* narrow, const Weight& w, const Codes& codes, Digits& out) {
  const int64_t units = w.columns / kUnit;
  const __m512i half = _mm512_set1_epi32(64), low = _mm512_set1_epi32(127), ones = _mm512_set1_epi8(1);
  out.of.resize(3 * w.columns), out.bias.resize(w.columns / 4), out.scale.resize(units + 16), out.sum.assign(w.runs, 0);
  for (int64_t u = 0; u < units; u++) {
    __m512 parts[2];
    for (int i = 0; i < 2; i++) parts[i] = narrow ? widened(narrow + u * kUnit + i * 16) : _mm512_loadu_ps(x + u * kUnit + i * 16);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(parts[0]), _mm512_abs_ps(parts[1])));
    const float finite = _mm512_reduce_add_ps(parts[0] - parts[0] + (parts[1] - parts[1]));
    if (finite != 0 || (largest != 0 && largest < 1e-25f)) return false;
    out.scale[u] = largest / kLargest * codes.factor;
    for (int i = 0; i < 2; i++) {
      const __m512i whole = _mm512_cvtps_epi32(parts[i] * _mm512_set1_ps(largest ? kLargest / largest : 0));
      const __m512i c = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(whole, half), low), half);
      const __m512i rest = _mm512_srai_epi32(_mm512_sub_epi32(whole, c), 7);
      const __m512i b = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(rest, half), low), half);
      int8_t* to = &out.of[u / 2 * 3 * kStep + u % 2 * kUnit + i * 16];
      store(to, _mm512_srai_epi32(_mm512_sub_epi32(rest, b), 7)), store(to + kStep, b), store(to + 2 * kStep, c);
      out.sum[(u * kUnit + i * 16) / w.run] += _mm512_reduce_add_epi32(whole) * (largest / kLargest);
    }
  }
  for (int64_t s = 0; s < w.columns / kStep; s++) {
    __m512i sum = __m512i{};
    for (int i = 0; i < 3; i++) sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 7), ones, load(&out.of[(3 * s + i) * kStep]));
    _mm512_storeu_si512(&out.bias[s * 16], _mm512_mullo_epi32(sum, _mm512_set1_epi32(-codes.bias)));
  }
  return true;
}

// Where the codes of a step are: for each byte of the result, the byte of the stream that its word shall have, and the
// first bit of the code in that word.
template <int B> struct Places {
  alignas(64) uint8_t bytes[64] = {}, bits[64] = {}, high_first[64] = {};
  constexpr Places() {
    for (int i = 0; i < 64; i++) {
      bytes[i] = i / 8 * B + (i % 8 < B ? i % 8 : B - 1);
      bits[i] = i % 8 * B, high_first[i] = i % 8 * B ^ (B == 4 ? 4 : 0);
    }
  }
};
template <int B> constexpr Places<B> places;
// The codes of a step, one in each byte, in order.
template <int B> QL_BYTES_INLINE __m512i unpack(const uint8_t* at, __m512i bits) {
  if constexpr (B == 8) return load(at);
  const __m512i stream = B == 4 ? _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))
                                : _mm512_maskz_loadu_epi8((1ull << 8 * B) - 1, at);
  const __m512i words = _mm512_permutexvar_epi8(load(places<B>.bytes), stream);
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(bits, words), _mm512_set1_epi8((1 << B) - 1));
}
template <bool HALVES> QL_BYTES_INLINE __m512 spread(const float* scale) {  // those of a step
  const __m512i units = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i runs = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  if (HALVES) return _mm512_permutexvar_ps(runs, _mm512_broadcast_f32x4(_mm_loadu_ps(scale)));
  double two;
  memcpy(&two, scale, sizeof two);
  return _mm512_permutexvar_ps(units, _mm512_castpd_ps(_mm512_set1_pd(two)));
}

// The scales of units, or of their halves, for a row of the weight: those of its runs times those of x.
template <bool HALVES>
QL_BYTES_INLINE void scales_of_units(const Weight& w, const float* runs, const Digits& x, int64_t count, float* out) {
  const int64_t per_run = HALVES ? 1 : w.run / kUnit;
  const int shift = w.runs == 1 ? 62 : __builtin_ctzll(per_run);
  if (w.runs > 1 && per_run != int64_t(1) << shift) {
    for (int64_t i = 0; i < count; i++) out[i] = runs[i / per_run] * x.scale[i];
    return;
  }
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i of_run = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(shift)), of_unit = _mm512_srli_epi32(lane, HALVES);
  for (int64_t i = 0; i < count; i += 16) {  // vectors, of which the last may reach beyond
    const __m512 scales = _mm512_permutexvar_ps(of_run, _mm512_loadu_ps(runs + (i >> shift)));
    _mm512_storeu_ps(out + i, scales * _mm512_permutexvar_ps(of_unit, _mm512_loadu_ps(&x.scale[HALVES ? i / 2 : i])));
  }
}

template <int B, bool HALVES>
QL_BYTES void product(const Weight& w, const Codes& codes, const Digits& x, Result y, int64_t begin, int64_t end) {
  constexpr int R = 4, kRows = 16;  // rows at once, and rows whose scales are read at once
  const int64_t steps = w.columns / kStep, scales = steps * (HALVES ? 4 : 2);
  const int64_t ahead = std::max<int64_t>(R * w.row_bytes, 4096);
  const bool offset = w.format.zeros != kNone || w.outer_zero.count;
  const __m512i bits = load(w.format.high_first ? places<B>.high_first : places<B>.bits);
  const __m512i flip = _mm512_set1_epi8(codes.flip), bytes = load(codes.bytes);
  avx512::Scratch s(w, kRows);
  std::vector<float> scale(kRows * scales + 16);
  for (int64_t batch = begin; batch < end; batch += kRows) {
    const int64_t count = std::min<int64_t>(kRows, end - batch);
    avx512::scales_of(w, batch, count, s);
    for (int64_t r = 0; r < count; r++) scales_of_units<HALVES>(w, s.scale + r * w.runs, x, scales, &scale[r * scales]);
    for (int64_t n = 0; n < count; n += R) {
      const uint8_t* at[R];
      const float* scale_at[R];
      __m512 sums[R];
      QL_UNROLL for (int r = 0; r < R; r++) {  // behind the last row, that one again
        const int64_t row = std::min(n + r, count - 1);
        at[r] = w.codes + (batch + row) * w.row_bytes, scale_at[r] = &scale[row * scales], sums[r] = __m512{};
      }
      for (int64_t i = 0; i < steps; i++) {
        const int8_t* digits = &x.of[i * 3 * kStep];
        const __m512i a = load(digits), b = load(digits + kStep), c = load(digits + 2 * kStep), bias = load(&x.bias[i * 16]);
        QL_UNROLL for (int r = 0; r < R; r++) {
          const uint8_t* from = at[r] + i * 8 * B;
          __m512i code = unpack<B>(from, bits);
          __builtin_prefetch(from + ahead);
          if (B <= 4 && codes.looked_up) code = _mm512_permutexvar_epi8(code, bytes);
          if (B == 8) code = _mm512_xor_si512(code, flip);
          __m512i sum = _mm512_dpbusd_epi32(__m512i{}, code, a);
          sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 7), code, b);
          sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 7), code, c);
          const __m512 whole = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, bias));
          sums[r] = _mm512_fmadd_ps(whole, spread<HALVES>(scale_at[r] + i * (HALVES ? 4 : 2)), sums[r]);
        }
      }
      QL_UNROLL for (int r = 0; r < R; r++) {
        if (n + r >= count) break;
        for (int64_t i = 0; offset && i < w.runs; i += 16) {
          const __mmask16 some = w.runs - i < 16 ? (1u << (w.runs - i)) - 1 : 0xFFFF;
          const __m512 of_runs = _mm512_maskz_loadu_ps(some, s.offset + (n + r) * w.runs + i);
          sums[r] = _mm512_fmadd_ps(of_runs, _mm512_maskz_loadu_ps(some, &x.sum[i]), sums[r]);
        }
        put(y, 0, batch + n + r, _mm512_reduce_add_ps(sums[r]));
      }
    }
  }
}
using Product = void (*)(const Weight&, const Codes&, const Digits&, Result, int64_t, int64_t);
inline Product of(const Weight& w) {
#define QL_BOTH(B) {product<B, false>, product<B, true>}
  constexpr Product each[][2] = {QL_BOTH(2), QL_BOTH(3), QL_BOTH(4), QL_BOTH(5), QL_BOTH(6), {}, QL_BOTH(8)};
  return each[w.format.bits - 2][w.run == 16];
}
inline bool here() {
  static const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && &set() == &avx512::set;
  return has;
}
}  // namespace integers

// By name, since compilers do not inline functions for fewer instructions around those for more.
#define QL_WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
namespace pairs {
QL_WIDE inline __attribute__((always_inline)) __m512i rounded(__m512 low, __m512 high) {  // to bfloat16
  __m512i both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
  return both;
}
QL_WIDE inline __attribute__((always_inline)) __m512 add(__m512 sum, __m512i a, __m512i b) {  // products of pairs
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
template <int B, bool LOOKUP, int M>
QL_WIDE void tile(const Weight& w, const avx512::Tile& t, const uint16_t* x, int64_t count, int64_t m, Result y) {
  constexpr int R = 16 / M;  // as registers hold sums
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
