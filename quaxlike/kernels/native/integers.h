// Products of one row of x with integer codes, as sums of byte products. product.cc includes this file.
//
// Each 32 columns of x are written as scale * (a * 2^14 + b * 2^7 + c), with byte digits a, b and c. The error is less
// than 2^-20 of the largest column. If x is bfloat16, they are written as scale * (a * 2^s + b), with an error of
// 2^-(2s-1), where s is `kShift`. If x is rounded to 8 bits (rounded.h), they are written as scale * a. Byte products
// are summed exactly, in 32-bit integers. Each sum has at most eight codes up to 255 (minus their bias), times such a
// number, and so stays below 2^31.
//
// If x is bfloat16, we also support codes of at most 4 bits with arbitrary values (NF4). Each value is written
// as scale * (h * 2^s + l), with an error of at most 2^-2s of the largest value. We then compute three out of the four
// byte products, omitting the smallest.
//
// As in product.cc, everything below `#else` is compiled once for each instruction set.
#ifndef QL_NAME
#include <cmath>
namespace {
namespace integers {
constexpr int64_t kUnit = 32;
struct Digits {  // of a row of x
  int count;                    // three, two or one
  std::vector<int8_t> of;       // for each step: vectors of a, b and c
  std::vector<int32_t> bias;    // for each lane of a step (and each digit, if codes have two bytes): what the bias adds
  std::vector<float> scale;     // for each unit
  std::vector<float> sum;       // for each run of the weight: the sum of x, as represented by its digits
};

// The conversion of codes to bytes, which is either `code ^ flip` or `bytes[code]`. Values are then given by
// (byte - bias) * factor, or if `fine` by (byte - bias + low[code] / 2^s) * factor.
struct Codes {
  bool known = false, looked_up = false, fine = false;
  int32_t bias = 0;
  float factor = 1;
  uint8_t flip = 0;
  alignas(64) uint8_t bytes[64] = {}, low[64] = {};
};

// Returns whether products of one row of x support this weight's columns and blocks.
inline bool in_steps(const Weight& w) { return w.columns % 64 == 0 && (w.run % kUnit == 0 || w.run == 16); }
Codes codes_of(const Weight& w, bool may_round, int shift) {
  const Format& f = w.format;
  Codes out;
  if (f.bits == 8 && f.lookup) return out;
  if (f.bits > 4) {
    out.known = true, out.flip = f.bits == 8 && f.is_signed ? 128 : 0, out.bias = int32_t(f.bias) + out.flip;
    return out;
  }
  const int count = 1 << f.bits;
  bool even = w.values[0] == std::nearbyint(w.values[0]);  // consecutive integers
  for (int i = 0; i < count; i++) even &= w.values[i] == w.values[0] + i;
  for (int of_one = 1; of_one <= 2 && !out.known; of_one++) {  // integers, or else multiples of a half
    out.known = true, out.factor = 1.f / of_one;
    for (int i = 0; i < count; i++) {
      const float value = of_one * w.values[i];
      out.known &= value == std::nearbyint(value) && std::abs(value) < 128;
    }
    for (int i = 0; i < 64 && out.known; i++) out.bytes[i] = int(of_one * w.values[i % count]) + 128;
  }
  out.looked_up = !even, out.bias = even ? -int32_t(w.values[0]) : 128;
  float most = 0, none = 0;
  for (int i = 0; i < count; i++) most = std::max(most, std::abs(w.values[i])), none += w.values[i] * 0;
  if (out.known || !may_round || none != 0 || most < 1e-30f || most > 1e30f) return out;
  const int unit = 1 << shift, largest = 128 * unit - 1;
  out.known = out.fine = out.looked_up = true, out.bias = 128, out.factor = most / largest * unit;
  for (int i = 0; i < 64; i++) {
    const int whole = int(std::nearbyint(w.values[i % count] / most * largest)) + 128 * unit;
    out.bytes[i] = whole / unit, out.low[i] = whole % unit;
  }
  return out;
}
using Product = void (*)(const Weight&, const Codes&, const Digits&, Result, int64_t, int64_t);
struct Functions {  // for an instruction set
  int shift;  // its `kShift`
  bool (*write)(const float* x, const uint16_t* narrow, const Weight&, const Codes&, int count, Digits&);
  Product (*of)(const Weight&, const Codes&, const Digits&);
};
}  // namespace integers
#define QL_BYTES_INLINE QL_BYTES static inline __attribute__((always_inline))
#define QL_BYTES_LAMBDA QL_BYTES __attribute__((always_inline))
#if defined(__x86_64__)
#define QL_NAME avx2
#define QL_SET AVX2
#define QL_BYTES __attribute__((target("avx2,fma,f16c")))
#include "integers.h"
#ifdef QL_MORE
#define QL_NAME avx512
#define QL_SET AVX512
#define QL_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")))
#include "integers.h"
#endif
#endif
}  // namespace
#else  // one instruction set
namespace QL_NAME {
namespace integers {
using namespace ::integers;
constexpr int kBytes = 4 * kLanes;
// The number of byte vectors of codes that are multiplied together. For 4 bits, these are the low and high halves.
constexpr int vectors(int64_t bits) { return bits == 4 ? 2 : 1; }
constexpr int64_t step(int64_t bits) { return kBytes * vectors(bits); }
// The number of bits per digit. AVX2 adds pairs of products in 16 bits, which would overflow for 8-bit digits.
constexpr int kShift = QL_SET == AVX2 ? 7 : 8;
constexpr int shift(int digits) { return digits == 3 ? 7 : digits == 2 ? kShift : 8; }
// Whether to use signed bytes. For AVX2, pairs of products of unsigned bytes and 8-bit digits would overflow.
constexpr bool turns(int64_t bits, int digits, bool looked_up) { return QL_SET == AVX2 && digits == 1 && (bits == 8 || looked_up); }
constexpr int32_t largest(int digits) { return ((1 << (shift(digits) - 1)) - 1) << shift(digits) * (digits - 1); }
QL_BYTES_INLINE I lanes() {
  I out = {};
  for (int i = 0; i < kLanes; i++) out[i] = i;
  return out;
}
#if QL_SET == AVX512
typedef __m512i Bytes;
QL_BYTES_INLINE Bytes read(const void* at) { return _mm512_loadu_si512(at); }
QL_BYTES_INLINE Bytes everywhere(uint8_t byte) { return _mm512_set1_epi8(byte); }
QL_BYTES_INLINE Bytes look_up(Bytes table, Bytes codes) { return _mm512_permutexvar_epi8(codes, table); }
QL_BYTES_INLINE F chosen(F from, I lanes) { return _mm512_permutexvar_ps((__m512i)lanes, from); }
QL_BYTES_INLINE float most_of(F v) { return _mm512_reduce_max_ps(v); }
QL_BYTES_INLINE I nearest(F v) { return (I)_mm512_cvtps_epi32(v); }
QL_BYTES_INLINE F in_pairs(F a, F b) { return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b); }
QL_BYTES_INLINE F in_fours(F a, F b) { return (F)(_mm512_unpacklo_pd((__m512d)a, (__m512d)b)) + (F)(_mm512_unpackhi_pd((__m512d)a, (__m512d)b)); }
QL_BYTES_INLINE __m256 halved(F v) { return _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1); }
QL_BYTES_INLINE I dot(I sum, Bytes codes, Bytes digits) { return (I)_mm512_dpbusd_epi32((__m512i)sum, codes, digits); }
QL_BYTES_INLINE __m256i narrowed(const I* unit) {
  return _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)unit[1]), _mm512_cvtepi32_epi8((__m512i)unit[0]));
}
QL_BYTES_INLINE I dot_signed(I sum, Bytes codes, Bytes digits) { return dot(sum, codes, digits); }  // see `turns`
template <int V, int D> QL_BYTES_INLINE I products(const Bytes* codes, const int8_t* digits, I bias, bool) {
  I sum = {};
  QL_UNROLL for (int d = 0; d < D; d++) {
    I of_digit = d == D - 1 ? bias : I{};
    QL_UNROLL for (int v = 0; v < V; v++) of_digit = dot(of_digit, codes[v], read(digits + (d * V + v) * kBytes));
    sum = d ? (sum << shift(D)) + of_digit : of_digit;
  }
  return sum;
}
// The positions of the codes in a step: for each byte of the result, which byte of the stream to copy to its word, and
// the first bit of its code within that word.
template <int B> struct Places {
  alignas(64) uint8_t bytes[64] = {}, bits[64] = {};
  constexpr Places() {
    for (int i = 0; i < 64; i++) bytes[i] = i / 8 * B + (i % 8 < B ? i % 8 : B - 1), bits[i] = i % 8 * B;
  }
};
template <int B> constexpr Places<B> places;
// Unpacks the codes of a step to one per byte. For 4-bit codes, only reads the first half of them unless `whole`.
template <int B> QL_BYTES_INLINE void unpack(const uint8_t* at, bool whole, Bytes* codes) {
  const Bytes low = everywhere((1 << B) - 1);
  if constexpr (B == 8) codes[0] = read(at);
  else if constexpr (B == 4) {
    const Bytes both = whole ? read(at) : _mm512_maskz_loadu_epi8(0xFFFFFFFF, at);
    codes[0] = both & low, codes[1] = _mm512_srli_epi16(both, 4) & low;
  } else {
    const Bytes stream = _mm512_maskz_loadu_epi8((1ull << 8 * B) - 1, at);
    const Bytes words = _mm512_permutexvar_epi8(read(places<B>.bytes), stream);
    codes[0] = _mm512_multishift_epi64_epi8(read(places<B>.bits), words) & low;
  }
}
// Moves the scales of a step (at most eight) to the lanes that they apply to.
QL_BYTES_INLINE F spread(const float* scale, I of) { return chosen(_mm512_broadcast_f32x8(_mm256_loadu_ps(scale)), of); }
#else
typedef __m256i Bytes;
QL_BYTES_INLINE Bytes read(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
QL_BYTES_INLINE Bytes everywhere(uint8_t byte) { return _mm256_set1_epi8(byte); }
QL_BYTES_INLINE Bytes look_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }  // of 16 bytes
QL_BYTES_INLINE F chosen(F from, I lanes) { return _mm256_permutevar8x32_ps(from, (__m256i)lanes); }
QL_BYTES_INLINE float most_of(F v) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return std::max<float>(most[0], most[1]);
}
QL_BYTES_INLINE I nearest(F v) { return (I)_mm256_cvtps_epi32(v); }
QL_BYTES_INLINE F in_pairs(F a, F b) { return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b); }
QL_BYTES_INLINE F in_fours(F a, F b) { return (F)(_mm256_unpacklo_pd((__m256d)a, (__m256d)b)) + (F)(_mm256_unpackhi_pd((__m256d)a, (__m256d)b)); }
QL_BYTES_INLINE __m256 halved(F v) { return v; }
QL_BYTES_INLINE I dot(I sum, Bytes codes, Bytes digits) {
  return sum + (I)_mm256_madd_epi16(_mm256_maddubs_epi16(codes, digits), _mm256_set1_epi16(1));
}
QL_BYTES_INLINE __m256i narrowed(const I* unit) {
  const __m256i low = _mm256_packs_epi32((__m256i)unit[0], (__m256i)unit[1]);
  const __m256i both = _mm256_packs_epi16(low, _mm256_packs_epi32((__m256i)unit[2], (__m256i)unit[3]));
  return _mm256_permutevar8x32_epi32(both, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}
QL_BYTES_INLINE I dot_signed(I sum, Bytes codes, Bytes digits) {
  return dot(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(digits, codes));
}
// If codes are `small`, two 16-bit products can be added directly.
template <int V, int D> QL_BYTES_INLINE I products(const Bytes* codes, const int8_t* digits, I bias, bool small) {
  I sum = bias;
  if (D == 1 && !small) {
    QL_UNROLL for (int v = 0; v < V; v++) sum = dot_signed(sum, codes[v], read(digits + v * kBytes));
    return sum;
  }
  QL_UNROLL for (int d = 0; d < D; d++) {
    const __m256i unit = _mm256_set1_epi16(1 << shift(D) * (D - 1 - d));
    __m256i first = _mm256_maddubs_epi16(codes[0], read(digits + d * V * kBytes));
    if constexpr (V == 2) {
      const __m256i second = _mm256_maddubs_epi16(codes[1], read(digits + (d * V + 1) * kBytes));
      if (small) first = _mm256_add_epi16(first, second);
      else sum += (I)_mm256_madd_epi16(second, unit);
    }
    sum += (I)_mm256_madd_epi16(first, unit);
  }
  return sum;
}
// A step's codes are loaded as two parts of 8 or 16 bytes, with the second one ending where the codes end. These are
// the bytes that make up the 16-bit words of eight codes, and the factors that shift a code to the top of its word.
template <int B> constexpr int kSecond = 4 * B - (B < 4 ? 8 : 16);
template <int B> struct Words {
  alignas(32) uint8_t bytes[2][32] = {};
  alignas(32) uint16_t units[16] = {};
  constexpr Words() {
    for (int i = 0; i < 32; i++) {
      const int bit = i * B, byte = bit / 8 - (i < 16 ? 0 : kSecond<B>), at = i / 16 * 16 + i % 8 * 2;
      bytes[i / 8 % 2][at] = byte, bytes[i / 8 % 2][at + 1] = byte < 15 ? byte + 1 : 128;  // 128: none
      units[i % 16] = 1 << (16 - B - bit % 8);
    }
  }
};
template <int B> constexpr Words<B> words;
template <int B> QL_BYTES_INLINE void unpack(const uint8_t* at, bool, Bytes* codes) {
  const Bytes low = everywhere((1 << B) - 1);
  if constexpr (B == 8) codes[0] = read(at);
  else if constexpr (B == 4) codes[0] = read(at) & low, codes[1] = _mm256_srli_epi16(read(at), 4) & low;
  else {  // each half has 16 codes, for which we need the words of the first eight and of the last eight
    const auto part = [](const uint8_t* from) QL_BYTES_LAMBDA {
      return B < 4 ? _mm_loadl_epi64((const __m128i*)from) : _mm_loadu_si128((const __m128i*)from);
    };
    const __m256i stream = _mm256_set_m128i(part(at + kSecond<B>), part(at));
    const auto eight = [&](int i) QL_BYTES_LAMBDA {
      const __m256i of = _mm256_shuffle_epi8(stream, read(words<B>.bytes[i]));
      return _mm256_srli_epi16(_mm256_mullo_epi16(of, read(words<B>.units)), 16 - B);
    };
    codes[0] = _mm256_packus_epi16(eight(0), eight(1));
  }
}
QL_BYTES_INLINE F spread(const float* scale, I of) {  // at most four
  return _mm256_permutevar_ps(_mm256_broadcast_ps((const __m128*)scale), (__m256i)of);
}
#endif

// Writes a row of x, in float32 or bfloat16 (`narrow`), using this many digits. Returns whether this is possible, i.e.
// that there are no NaNs, infinities, or values that are too small.
QL_BYTES static bool write(const float* x, const uint16_t* narrow, const Weight& w, const Codes& codes, int count, Digits& out) {
  constexpr int kParts = kUnit / kLanes;
  const int64_t units = w.columns / kUnit, in_step = step(w.format.bits), steps = up(w.columns, in_step);
  const int many = vectors(w.format.bits), by = shift(count), odd = w.format.high_first ? 0 : kBytes;
  const int32_t half = 1 << (by - 1), low = (1 << by) - 1;
  const __m256i in_turn = _mm256_broadcastsi128_si256(_mm_set_epi8(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0));
  out.count = count, out.of.assign(steps * in_step * count, 0), out.bias.resize(steps * kLanes * count);
  out.scale.resize(units + 16), out.sum.assign(w.runs + 16, 0);
  for (int64_t u = 0; u < units; u++) {
    F parts[kParts], sizes = {}, rest = {};
    QL_UNROLL for (int i = 0; i < kParts; i++) {
      const int64_t k = u * kUnit + i * kLanes;
      parts[i] = narrow ? widened(narrow + k) : widened(x + k);
      const F size = bits_as<F>(bits_as<U>(parts[i]) & 0x7FFFFFFFu);
      sizes = size > sizes ? size : sizes, rest += parts[i] - parts[i];
    }
    const float most = most_of(sizes);
    if (sum_of(rest) != 0 || (most != 0 && most < 1e-25f)) return false;
    out.scale[u] = most / largest(count) * codes.factor;
    I whole[kParts], last[kParts];
    QL_UNROLL for (int i = 0; i < kParts; i++) {
      whole[i] = nearest(parts[i] * all(most ? largest(count) / most : 0));
      out.sum[(u * kUnit + i * kLanes) / w.run] += sum_of(__builtin_convertvector(whole[i], F)) * (most / largest(count));
    }
    int8_t* to = &out.of[u * kUnit / in_step * in_step * count + u * kUnit % in_step / many];
    for (int digit = count - 1; digit >= 0; digit--) {
      QL_UNROLL for (int i = 0; i < kParts; i++) {
        last[i] = digit ? ((whole[i] + half) & low) - half : whole[i];
        whole[i] = (whole[i] - last[i]) >> by;
      }
      int8_t* at = to + digit * in_step;
      const __m256i bytes = narrowed(last), apart = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, in_turn), 0xD8);
      if (many == 1) _mm256_storeu_si256((__m256i*)at, bytes);
      else {  // separate even columns from odd ones
        _mm_storeu_si128((__m128i*)(at + (kBytes - odd)), _mm256_castsi256_si128(apart));
        _mm_storeu_si128((__m128i*)(at + odd), _mm256_extracti128_si256(apart, 1));
      }
    }
  }
  for (int64_t s = 0; s < steps; s++) {
    I sum = {};
    for (int digit = 0; digit < count; digit++) {
      sum = codes.fine ? I{} : sum << by;
      for (int i = 0; i < many; i++) sum = dot(sum, everywhere(1), read(&out.of[((s * count + digit) * many + i) * kBytes]));
      const I bias = sum * ((turns(w.format.bits, count, codes.looked_up) ? 128 : 0) - codes.bias);
      memcpy(&out.bias[(codes.fine ? s * count + digit : s) * kLanes], &bias, sizeof bias);
    }
  }
  return true;
}

// Stores the sum of each of four vectors.
QL_BYTES_INLINE void sums_of(const F* four, float* out) {
  const __m256 half = halved(in_fours(in_pairs(four[0], four[1]), in_pairs(four[2], four[3])));
  _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}
// Computes the scales of units (or their halves) for a row of the weight: its runs' scales times those of x.
QL_BYTES_INLINE void scales_of_units(const Weight& w, const float* runs, const Digits& x, int64_t count, float* out) {
  const bool halves = w.run == 16;
  const int64_t per_run = halves ? 1 : w.run / kUnit;
  const int shift = w.runs == 1 ? 31 : __builtin_ctzll(per_run);
  if (w.runs > 1 && per_run != int64_t(1) << shift) {
    for (int64_t i = 0; i < count; i++) out[i] = runs[i / per_run] * x.scale[i];
    return;
  }
  const I of_run = lanes() >> shift, of_unit = lanes() >> 1;
  for (int64_t i = 0; i < count; i += kLanes) {  // the last vector can extend past the end
    F scales = load<F>(runs + (i >> shift)), of_x = load<F>(&x.scale[halves ? i / 2 : i]);
    if (shift) scales = chosen(scales, of_run);
    if (halves) of_x = chosen(of_x, of_unit);
    scales *= of_x;
    memcpy(out + i, &scales, sizeof scales);
  }
}

template <int B, int D, bool FINE = false>
QL_BYTES static void product(const Weight& w, const Codes& codes, const Digits& x, Result y, int64_t begin, int64_t end) {
  constexpr int R = 4, kRows = 16;  // how many rows to multiply at a time, and for how many to read scales at a time
  constexpr int V = vectors(B);
  const int per_unit = w.run == 16 ? 2 : 1, per_step = step(B) / kUnit * per_unit;  // scales
  const int64_t steps = up(w.columns, step(B)), scales = w.columns / kUnit * per_unit;
  const bool offset = w.format.zeros != kNone || w.outer_zero.count, cut = w.columns % step(B);
  const Bytes turned = everywhere(turns(B, D, codes.looked_up) ? 128 : 0), low = read(codes.low);
  const Bytes flip = everywhere(codes.flip) ^ turned, bytes = read(codes.bytes) ^ turned;
  const I of_lane = lanes() * per_step / kLanes;
  Scratch s(w, kRows, true);
  float* scale = scratch<float, 1>(kRows * steps * per_step + 16);
  for (int64_t batch = begin; batch < end; batch += kRows) {
    const int64_t count = std::min<int64_t>(kRows, end - batch);
    scales_of(w, batch, count, s);
    for (int64_t r = 0; r < count; r++) {
      scales_of_units(w, s.scale + r * w.runs, x, scales, scale + r * steps * per_step);
      std::fill(scale + r * steps * per_step + scales, scale + (r + 1) * steps * per_step, 0.f);
    }
    for (int64_t n = 0; n < count; n += R) {
      const uint8_t* at[R];
      const float* scale_at[R];
      F sums[R];
      QL_UNROLL for (int r = 0; r < R; r++) {  // past the end, repeat the last row
        const int64_t row = std::min(n + r, count - 1);
        at[r] = w.codes + (batch + row) * w.row_bytes, scale_at[r] = scale + row * steps * per_step, sums[r] = F{};
      }
      const int64_t ahead = distance(R * w.row_bytes);
      const auto add = [&](int64_t i, bool whole, bool looked_up) QL_BYTES_LAMBDA {
        const int8_t* digits = &x.of[i * D * V * kBytes];
        const int32_t* bias = &x.bias[i * (FINE ? D : 1) * kLanes];
        QL_UNROLL for (int r = 0; r < R; r++) {
          const uint8_t* from = at[r] + i * (step(B) * B / 8);
          __builtin_prefetch(from + ahead, 0, 2);
          Bytes code[V];
          unpack<B>(from, whole, code);
          if (FINE) {  // h * a, and h * b + l * a
            I sum = load<I>(bias), rest = D == 2 ? load<I>(bias + kLanes) : I{};
            QL_UNROLL for (int v = 0; v < V; v++) {
              const Bytes high = look_up(bytes, code[v]), a = read(digits + v * kBytes);
              sum = D == 2 ? dot(sum, high, a) : dot_signed(sum, high, a);
              if (D == 2) rest = dot(rest, high, read(digits + (V + v) * kBytes));
              rest = dot(rest, look_up(low, code[v]), a);
            }
            constexpr float unit = D == 2 ? 1 << kShift : 1;
            const F both = __builtin_convertvector(sum, F) * unit + __builtin_convertvector(rest, F) * (unit / (1 << kShift));
            sums[r] += both * spread(scale_at[r] + i * per_step, of_lane);
            continue;
          }
          QL_UNROLL for (int v = 0; v < V; v++) {
            if (B <= 4 && looked_up) code[v] = look_up(bytes, code[v]);
            if (B == 8) code[v] ^= flip;
          }
          const I sum = products<V, D>(code, digits, load<I>(bias), B <= 6 && !looked_up);
          sums[r] += __builtin_convertvector(sum, F) * spread(scale_at[r] + i * per_step, of_lane);
        }
      };
      const auto each = [&](bool looked_up) QL_BYTES_LAMBDA {
        for (int64_t i = 0; i < steps - cut; i++) add(i, true, looked_up);
        if (B == 4 && cut) add(steps - 1, false, looked_up);
      };
      if (B <= 4 && codes.looked_up) each(true);
      else each(false);
      QL_UNROLL for (int r = 0; r < R; r++) {
        if (n + r >= count) break;
        for (int64_t i = 0; offset && i < w.runs; i += kLanes) {  // mask offsets past the end, as these are other rows'
          const F of_runs = load<F>(s.offset + (n + r) * w.runs + i);
          sums[r] += (lanes() < int32_t(w.runs - i) ? of_runs : F{}) * load<F>(&x.sum[i]);
        }
      }
      float out[R];
      sums_of(sums, out);
      for (int r = 0; r < R && n + r < count; r++) put(y, 0, batch + n + r, out[r]);
    }
  }
}
static Product of(const Weight& w, const Codes& codes, const Digits& x) {
#define QL_ALL(B) {product<B, 1>, product<B, 2>, product<B, 3>}
#define QL_FINE(B) {product<B, 1, true>, product<B, 2, true>}
  constexpr Product each[][3] = {QL_ALL(2), QL_ALL(3), QL_ALL(4), QL_ALL(5), QL_ALL(6), {}, QL_ALL(8)};
  constexpr Product fine[][2] = {QL_FINE(2), QL_FINE(3), QL_FINE(4)};
  return codes.fine ? fine[w.format.bits - 2][x.count - 1] : each[w.format.bits - 2][x.count - 1];
}
constexpr Functions functions = {kShift, write, of};
}  // namespace integers
}  // namespace QL_NAME
#undef QL_NAME
#undef QL_SET
#undef QL_BYTES
#endif
