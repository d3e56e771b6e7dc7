// Products by instructions that not every processor with AVX-512 has; product.cc includes it.
//
// One row and codes that stand for whole numbers: by VNNI, for bytes. Each 32 columns of x are written as
// scale * (a * 2^14 + b * 2^7 + c), whose digits a, b and c are bytes, with an error of less than 2^-20 of the largest
// of them; or, where x and y are bfloat16, as scale * (a * 2^8 + b), with one of 2^-15. Products of bytes are summed
// exactly, as integers of 32 bits: at most eight codes up to 255, less their bias, times such a number stay below 2^31.
//
// Where x and y are bfloat16, so are codes of at most 4 bits that stand for any numbers (NF4): each is written as
// scale * (h * 2^8 + l), with an error of 2^-16 of the largest, and of the four products of bytes the smallest is left out.
//
// Some rows in bfloat16: values are rounded to it, and multiplied in pairs.
#pragma once
#include <cmath>
#define QL_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")))
#define QL_BYTES_INLINE_LAMBDA QL_BYTES __attribute__((always_inline))
#define QL_BYTES_INLINE QL_BYTES inline __attribute__((always_inline))
namespace {
namespace integers {
constexpr int64_t kUnit = 32;
// The codes that are multiplied at once, in vectors of bytes: of 4 bits, those of the low and of the high halves.
constexpr int vectors(int64_t bits) { return bits == 4 ? 2 : 1; }
constexpr int64_t step(int64_t bits) { return 64 * vectors(bits); }
constexpr int shift(int digits) { return digits == 3 ? 7 : 8; }
constexpr int32_t largest(int digits) { return digits == 3 ? 63 << 14 : 127 << 8; }
struct Digits {  // of a row of x
  int count;                    // three, or two
  std::vector<int8_t> of;       // of each step: vectors of a, of b and of c
  std::vector<int32_t> bias;    // of each lane of a step: what the bias of codes adds; of each digit, for codes of two bytes
  std::vector<float> scale;     // of each unit
  std::vector<float> sum;       // of each run of the weight: that of x, as its digits have it
};

// How codes become bytes: `code ^ flip`, or `bytes[code]`. A byte less `bias`, times `factor`, is the number; or, if
// `fine`, with `low[code] / 256` added to it.
struct Codes {
  bool known = false, looked_up = false, fine = false;
  int32_t bias = 0;
  float factor = 1;
  uint8_t flip = 0;
  alignas(64) uint8_t bytes[64] = {}, low[64] = {};
};

Codes codes_of(const Weight& w, bool may_round) {
  const Format& f = w.format;
  Codes out;
  if (w.columns % 64 || (w.run % kUnit && w.run != 16) || (f.bits == 8 && f.lookup)) return out;
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
  float most = 0, none = 0;
  for (int i = 0; i < count; i++) most = std::max(most, std::abs(w.values[i])), none += w.values[i] * 0;
  if (out.known || !may_round || none != 0 || most < 1e-30f || most > 1e30f) return out;
  out.known = out.fine = out.looked_up = true, out.bias = 128, out.factor = most / 32767 * 256;
  for (int i = 0; i < 64; i++) {
    const int whole = int(std::nearbyint(w.values[i % count] / most * 32767)) + (128 << 8);
    out.bytes[i] = whole >> 8, out.low[i] = whole & 255;
  }
  return out;
}

QL_BYTES_INLINE __m512i load(const void* at) { return _mm512_loadu_si512(at); }
QL_BYTES_INLINE __m512 widened(const uint16_t* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// Whether a row of x, in float32 or in bfloat16 (`narrow`), can be written in so many digits, which it is not if it
// holds NaN, infinity, or too small numbers.
QL_BYTES bool write(const float* x, const uint16_t* narrow, const Weight& w, const Codes& codes, int count, Digits& out) {
  const int64_t units = w.columns / kUnit, in_step = step(w.format.bits), steps = up(w.columns, in_step);
  const int many = vectors(w.format.bits), by = shift(count), odd = w.format.high_first ? 0 : 64;
  const __m512i half = _mm512_set1_epi32(1 << (by - 1)), low = _mm512_set1_epi32((1 << by) - 1);
  const __m128i in_turn = _mm_set_epi8(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
  out.count = count, out.of.assign(steps * in_step * count, 0), out.bias.resize(steps * 16 * count);
  out.scale.resize(units + 16), out.sum.assign(w.runs, 0);
  for (int64_t u = 0; u < units; u++) {
    __m512 parts[2];
    for (int i = 0; i < 2; i++) parts[i] = narrow ? widened(narrow + u * kUnit + i * 16) : _mm512_loadu_ps(x + u * kUnit + i * 16);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(parts[0]), _mm512_abs_ps(parts[1])));
    const float finite = _mm512_reduce_add_ps(parts[0] - parts[0] + (parts[1] - parts[1]));
    if (finite != 0 || (most != 0 && most < 1e-25f)) return false;
    out.scale[u] = most / largest(count) * codes.factor;
    for (int i = 0; i < 2; i++) {
      const int64_t k = u * kUnit + i * 16;
      __m512i whole = _mm512_cvtps_epi32(parts[i] * _mm512_set1_ps(most ? largest(count) / most : 0));
      out.sum[k / w.run] += _mm512_reduce_add_epi32(whole) * (most / largest(count));
      int8_t* to = &out.of[k / in_step * in_step * count + k % in_step / many];
      for (int digit = count - 1; digit >= 0; digit--) {
        const __m512i last = digit ? _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(whole, half), low), half) : whole;
        const __m128i bytes = _mm512_cvtepi32_epi8(last);
        if (many == 1) _mm_storeu_si128((__m128i*)(to + digit * 64), bytes);
        else {
          const __m128i apart = _mm_shuffle_epi8(bytes, in_turn);  // even columns, and odd ones
          _mm_storel_epi64((__m128i*)(to + digit * 128 + (64 - odd)), apart);
          _mm_storel_epi64((__m128i*)(to + digit * 128 + odd), _mm_unpackhi_epi64(apart, apart));
        }
        whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, last), by);
      }
    }
  }
  for (int64_t s = 0; s < steps; s++) {
    __m512i sum = __m512i{};
    for (int digit = 0; digit < count; digit++) {
      sum = codes.fine ? __m512i{} : _mm512_slli_epi32(sum, by);
      for (int i = 0; i < many; i++)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), load(&out.of[((s * count + digit) * many + i) * 64]));
      int32_t* to = &out.bias[(codes.fine ? s * count + digit : s) * 16];
      _mm512_storeu_si512(to, _mm512_mullo_epi32(sum, _mm512_set1_epi32(-codes.bias)));
    }
  }
  return true;
}

// Where the codes of a step are: for each byte of the result, the byte of the stream that its word shall have, and the
// first bit of the code in that word.
template <int B> struct Places {
  alignas(64) uint8_t bytes[64] = {}, bits[64] = {};
  constexpr Places() {
    for (int i = 0; i < 64; i++) bytes[i] = i / 8 * B + (i % 8 < B ? i % 8 : B - 1), bits[i] = i % 8 * B;
  }
};
template <int B> constexpr Places<B> places;
// The codes of a step, one in each byte: a whole one, or half of one of 4 bits.
template <int B> QL_BYTES_INLINE void unpack(const uint8_t* at, bool whole, __m512i* codes) {
  const __m512i low = _mm512_set1_epi8((1 << B) - 1);
  if constexpr (B == 8) codes[0] = load(at);
  else if constexpr (B == 4) {
    const __m512i both = whole ? load(at) : _mm512_maskz_loadu_epi8(0xFFFFFFFF, at);
    codes[0] = _mm512_and_si512(both, low), codes[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  } else {
    const __m512i stream = _mm512_maskz_loadu_epi8((1ull << 8 * B) - 1, at);
    const __m512i words = _mm512_permutexvar_epi8(load(places<B>.bytes), stream);
    codes[0] = _mm512_and_si512(_mm512_multishift_epi64_epi8(load(places<B>.bits), words), low);
  }
}
template <int N> QL_BYTES_INLINE __m512 spread(const float* scale) {  // N of a step, each to as many lanes
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  double two;
  memcpy(&two, scale, sizeof two);
  const __m512 all = N == 8   ? _mm512_broadcast_f32x8(_mm256_loadu_ps(scale))
                     : N == 4 ? _mm512_broadcast_f32x4(_mm_loadu_ps(scale))
                              : _mm512_castpd_ps(_mm512_set1_pd(two));
  return _mm512_permutexvar_ps(_mm512_srli_epi32(lane, N == 8 ? 1 : N == 4 ? 2 : 3), all);
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
  for (int64_t i = 0; i < count && per_run == 1 && !HALVES; i += 16)
    _mm512_storeu_ps(out + i, _mm512_loadu_ps(runs + i) * _mm512_loadu_ps(&x.scale[i]));
  if (per_run == 1 && !HALVES) return;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i of_run = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(shift)), of_unit = _mm512_srli_epi32(lane, HALVES);
  for (int64_t i = 0; i < count; i += 16) {  // vectors, of which the last may reach beyond
    const __m512 scales = _mm512_permutexvar_ps(of_run, _mm512_loadu_ps(runs + (i >> shift)));
    _mm512_storeu_ps(out + i, scales * _mm512_permutexvar_ps(of_unit, _mm512_loadu_ps(&x.scale[HALVES ? i / 2 : i])));
  }
}

template <int B, int D, bool HALVES, bool FINE = false>
QL_BYTES void product(const Weight& w, const Codes& codes, const Digits& x, Result y, int64_t begin, int64_t end) {
  constexpr int R = 4, kRows = 16;  // rows at once, and rows whose scales are read at once
  constexpr int V = vectors(B), N = step(B) / kUnit * (HALVES ? 2 : 1);
  const int64_t steps = up(w.columns, step(B)), scales = w.columns / kUnit * (HALVES ? 2 : 1);
  const bool offset = w.format.zeros != kNone || w.outer_zero.count, cut = w.columns % step(B);
  const __m512i flip = _mm512_set1_epi8(codes.flip), bytes = load(codes.bytes), low = load(codes.low);
  avx512::Scratch s(w, kRows);
  float* scale = scratch<float, 1>(kRows * steps * N + 16);
  for (int64_t batch = begin; batch < end; batch += kRows) {
    const int64_t count = std::min<int64_t>(kRows, end - batch);
    avx512::scales_of(w, batch, count, s);
    for (int64_t r = 0; r < count; r++) {
      scales_of_units<HALVES>(w, s.scale + r * w.runs, x, scales, scale + r * steps * N);
      std::fill(scale + r * steps * N + scales, scale + (r + 1) * steps * N, 0.f);
    }
    for (int64_t n = 0; n < count; n += R) {
      const uint8_t* at[R];
      const float* scale_at[R];
      __m512 sums[R];
      QL_UNROLL for (int r = 0; r < R; r++) {  // behind the last row, that one again
        const int64_t row = std::min(n + r, count - 1);
        at[r] = w.codes + (batch + row) * w.row_bytes, scale_at[r] = scale + row * steps * N, sums[r] = __m512{};
      }
      const int64_t ahead = distance(R * w.row_bytes);
      const auto add = [&](int64_t i, bool whole, bool looked_up) QL_BYTES_INLINE_LAMBDA {
        const int8_t* digits = &x.of[i * D * V * 64];
        const int32_t* bias = &x.bias[i * (FINE ? D : 1) * 16];
        QL_UNROLL for (int r = 0; r < R; r++) {
          const uint8_t* from = at[r] + i * (step(B) * B / 8);
          __builtin_prefetch(from + ahead, 0, 2);
          __m512i code[V], sum = __m512i{}, rest = load(bias + (FINE ? 16 : 0));
          unpack<B>(from, whole, code);
          if (FINE) {  // h * a, and h * b + l * a
            QL_UNROLL for (int v = 0; v < V; v++) {
              const __m512i high = _mm512_permutexvar_epi8(code[v], bytes), a = load(digits + v * 64);
              sum = _mm512_dpbusd_epi32(v ? sum : load(bias), high, a);
              rest = _mm512_dpbusd_epi32(rest, high, load(digits + (V + v) * 64));
              rest = _mm512_dpbusd_epi32(rest, _mm512_permutexvar_epi8(code[v], low), a);
            }
            const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(256), _mm512_cvtepi32_ps(rest));
            sums[r] = _mm512_fmadd_ps(both, spread<N>(scale_at[r] + i * N), sums[r]);
            continue;
          }
          QL_UNROLL for (int v = 0; v < V; v++) {
            if (B <= 4) code[v] = looked_up ? _mm512_permutexvar_epi8(code[v], bytes) : code[v];
            if (B == 8) code[v] = _mm512_xor_si512(code[v], flip);
          }
          QL_UNROLL for (int d = 0; d < D; d++) {
            if (d) sum = _mm512_slli_epi32(sum, shift(D));
            QL_UNROLL for (int v = 0; v < V; v++) sum = _mm512_dpbusd_epi32(sum, code[v], load(digits + (d * V + v) * 64));
          }
          sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum, rest)), spread<N>(scale_at[r] + i * N), sums[r]);
        }
      };
      const auto each = [&](bool looked_up) QL_BYTES_INLINE_LAMBDA {
        for (int64_t i = 0; i < steps - cut; i++) add(i, true, looked_up);
        if (B == 4 && cut) add(steps - 1, false, looked_up);
      };
      if (B <= 4 && codes.looked_up) each(true);
      else each(false);
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
inline Product of(const Weight& w, const Codes& codes, const Digits& x) {
#define QL_BOTH(B, D) {product<B, D, false>, product<B, D, true>}
#define QL_ALL(B) {QL_BOTH(B, 2), QL_BOTH(B, 3)}
  constexpr Product each[][2][2] = {QL_ALL(2), QL_ALL(3), QL_ALL(4), QL_ALL(5), QL_ALL(6), {}, QL_ALL(8)};
#define QL_FINE(B) {product<B, 2, false, true>, product<B, 2, true, true>}
  constexpr Product fine[][2] = {QL_FINE(2), QL_FINE(3), QL_FINE(4)};
  return codes.fine ? fine[w.format.bits - 2][w.run == 16] : each[w.format.bits - 2][x.count - 2][w.run == 16];
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
