// XLA FFI handlers on CPUs, for decoding weights that are stored as codes, and for products with them.
//
// Each row of a weight is a stream of codes of `bits` bits, in which every block of codes shares a scale:
//     value = scale * number(code) + offset,    number(code) = table[code] or code - bias
// We start by converting a row's scales and offsets to float32 from whichever form they are stored in. After this, we
// unpack vectors of codes, look up or convert their values, scale them, and multiply them by rows of x or store them.
//
// This file includes itself, so as to compile everything below `#else` once for each instruction set. We use the vector
// extensions of GCC and Clang, so instruction sets only differ in how codes are unpacked and looked up.
#ifndef QL_NAME
#include <cstring>
#include <vector>
#include "share.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
namespace {
// How numbers are stored. Bytes can hold two of them: a scale in the low nibble, and a minimum in the high one.
enum Kind { kFloat32, kBfloat16, kFloat16, kUint8, kInt8, kE4m3, kE8m0, kE8m0Half, kLow, kHigh, kMapped };
enum Scales { kByType, kE4m3Bytes, kE8m0Bytes, kE8m0HalfBytes, kNibbles, kNested };  // must match block_matmul/cpu.py
enum Zeros { kNone, kPoints, kPlus, kMinus };

struct Format {  // the attributes of a call, as in `Codec` and `Product` in Python
  int64_t rows, bits, block, bias, scales, group, zeros;  // group: -1 for no outer scales, 0 for one per row
  bool is_signed, high_first, lookup, over, flat;
};

struct Numbers { const void* data; int64_t count; Kind kind; };
struct Rows { const float* data; int64_t count, stride; };  // of x, padded with zeros to whole vectors
struct Result { void* data; int64_t stride; bool is_bfloat16; };  // rows of `stride` elements
struct Weight {
  Format format;
  int64_t columns, bytes;
  const uint8_t* codes;
  Numbers table, scale, outer, zero, outer_zero, map;
  // Sizes per row, set by `complete`. A run is the part of a block that lies within a single row.
  int64_t row_bytes, run, runs, groups;
  alignas(64) float values[256];
};

// Derives all sizes from the shapes. Returns whether the operands are consistent, which prevents out-of-bounds reads.
bool complete(Weight& w) {
  const Format& f = w.format;
  const bool nested = f.scales == kNested, zeros = f.zeros != kNone && f.scales != kNibbles;
  const bool tabled = f.bits <= 4 || f.lookup, grouped = f.flat && f.group > 0;
  if (f.bits < 2 || f.bits > 8 || f.bits == 7 || (f.lookup && (f.bits == 5 || f.bits == 6))) return false;
  if (f.block < 1 || f.rows < 0 || unsigned(f.scales) > kNested || unsigned(f.zeros) > kMinus) return false;
  if (f.flat && (w.columns * f.bits % 8 || f.group == 0 || f.zeros || w.outer_zero.count)) return false;
  w.row_bytes = up(w.columns * f.bits, 8);
  w.run = f.flat ? std::gcd(w.columns, f.block) : f.block;
  w.runs = up(w.columns, w.run);
  w.groups = f.group > 0 ? up(w.runs, f.group) : f.group == 0 ? std::min<int64_t>(w.runs, 1) : 0;
  if (w.runs > 1 && w.run % 16) return false;
  const int64_t scales = f.flat ? up(f.rows * w.columns, f.block) : f.rows * w.runs;
  const int64_t outers = grouped ? up(scales, f.group) : f.rows * w.groups;
  if (w.bytes != f.rows * w.row_bytes || w.scale.count != scales || w.outer.count != outers) return false;
  if (w.zero.count != (nested ? 1 : zeros ? scales : 0) || w.map.count != (nested ? 256 : 0)) return false;
  if (w.outer_zero.count && w.outer_zero.count != outers) return false;
  if (tabled && (w.table.count != 1 << f.bits || w.table.kind != kFloat32)) return false;
  if ((nested && (w.zero.kind || w.map.kind)) || (f.scales != kByType && w.scale.kind != kUint8)) return false;
  const Kind kinds[] = {w.scale.kind, kE4m3, kE8m0, kE8m0Half, kLow, kMapped};
  w.scale.kind = kinds[f.scales];
  if (f.scales == kNibbles) w.zero = {w.scale.data, w.scale.count, kHigh};
  // Small tables are repeated, so that the bits above a code don't matter when looking up its value.
  const float* table = static_cast<const float*>(w.table.data);
  for (int i = 0; tabled && i < (f.bits == 8 ? 256 : 16); i++) w.values[i] = table[i % (1 << f.bits)];
  return true;
}
template <class To, class From> inline __attribute__((always_inline)) To bits_as(From from) {
  To to;
  return memcpy(&to, &from, sizeof to), to;
}
inline uint16_t to_bfloat16(float value) {  // rounded to nearest, ties to even
  const uint32_t bits = bits_as<uint32_t>(value);
  return value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
}
inline void put(Result y, int64_t m, int64_t n, float value) {
  if (y.is_bfloat16) static_cast<uint16_t*>(y.data)[m * y.stride + n] = to_bfloat16(value);
  else static_cast<float*>(y.data)[m * y.stride + n] = value;
}

// The prefetch distance in bytes. We prefetch to L2, as there are too few line fill buffers for L1.
inline int64_t distance(int64_t bytes) { return std::max<int64_t>(bytes, 1 << 14); }
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}
// Returns a thread-local scratch buffer, of which there is one per ID, aligned to cache lines.
template <class T, int> T* scratch(size_t count) {
  static thread_local std::vector<T> space;
  if (space.size() < count + 64) space.resize(count + 64);
  return reinterpret_cast<T*>(up(reinterpret_cast<intptr_t>(space.data()), 64) * 64);
}

struct Kernels {  // for an instruction set and a number of bits per code
  void (*product)(const Weight&, Rows x, Result y, int64_t begin, int64_t end);
  void (*decode[2])(const Weight&, int64_t first, Result out, int64_t begin, int64_t end);  // to float32, bfloat16
};
struct Set {
  const char* name;
  bool mixes_nibbles;  // unpacks 4-bit codes i and i + 8, out of 16, to lanes 2i and 2i + 1
  void (*dense[2])(const void* w, int64_t columns, Rows x, Result y, int64_t begin, int64_t end);  // of float32, bfloat16
  void (*stacked[2])(const void* w, int64_t rows, int64_t columns, int64_t group, Rows x, Result y, int64_t begin, int64_t end);
  Kernels kernels[7];
  const Kernels& of(const Format& f) const { return kernels[f.bits == 8 ? 5 + f.lookup : f.bits - 2]; }
};
#define QL_INLINE QL_TARGET static inline __attribute__((always_inline))
#define QL_LAMBDA QL_TARGET __attribute__((always_inline))
#define QL_UNROLL _Pragma("GCC unroll 16")
#define QL_QUOTED(name) #name
#define QL_STRING(name) QL_QUOTED(name)
#define QL_EACH(T, VALUE)                                                                        \
  for (int64_t i = 0; i < count; i++) {                                                          \
    T v;                                                                                         \
    memcpy(&v, static_cast<const char*>(from.data) + (first + i) * int64_t(sizeof v), sizeof v); \
    out[i] = VALUE;                                                                              \
  }                                                                                              \
  return;
#define PLAIN 0
#define AVX2 1
#define AVX512 2
#define NEON 3
#define QL_NAME plain
#define QL_SET PLAIN
#define QL_TARGET
#include __FILE__
#if defined(__x86_64__)
#define QL_NAME avx2
#define QL_SET AVX2
#define QL_TARGET __attribute__((target("avx2,fma,f16c")))
#include __FILE__
#define QL_NAME avx512
#define QL_SET AVX512
#define QL_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#include __FILE__
#elif defined(__aarch64__)
#define QL_NAME neon
#define QL_SET NEON
#define QL_TARGET
#include __FILE__
#endif

// The instruction sets supported by this processor, in order of increasing speed.
std::vector<const Set*> sets() {
  std::vector<const Set*> found = {&plain::set};
#if defined(__x86_64__)
#define QL_HAS __builtin_cpu_supports
  if (QL_HAS("avx2") && QL_HAS("fma")) found.push_back(&avx2::set);
  if (QL_HAS("avx512bw") && QL_HAS("avx512vl") && QL_HAS("avx512dq")) found.push_back(&avx512::set);
#elif defined(__aarch64__)
  found.push_back(&neon::set);
#endif
  return found;
}
const Set& set() { static const Set* fastest = sets().back(); return *fastest; }
}  // namespace
#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)  // compilers and assemblers supporting all of AVX-512
#define QL_MORE
#endif
#include "integers.h"
#include "rounded.h"
#ifdef QL_MORE
#include "pairs.h"
#endif
namespace {
#ifdef QL_MORE
bool has_vnni() { return QL_HAS("avx512vnni") && QL_HAS("avx512vbmi") && &set() == &avx512::set; }
#endif
#if defined(__x86_64__)
// Returns the products of one row using bytes, or null if this processor has none.
const integers::Functions* by_bytes() {
#ifdef QL_MORE
  if (has_vnni()) return &avx512::integers::functions;
#endif
  return &set() == &plain::set ? nullptr : &avx2::integers::functions;
}
#endif
// Returns the products of several rows using bytes, in order of increasing speed.
std::vector<const rounded::Functions*> by_rounding() {
  std::vector<const rounded::Functions*> found = {&plain::rounded::functions};
#if defined(__x86_64__)
  if (&set() != &plain::set) found.push_back(&avx2::rounded::functions);
#ifdef QL_MORE
  if (has_vnni()) found.push_back(&avx512::rounded::functions);
#endif
#endif
  return found;
}
const rounded::Functions& rounding() { static const rounded::Functions* fastest = by_rounding().back(); return *fastest; }
bool read_weight(const ffi::RemainingArgs& args, const Format& format, int64_t columns, Weight& w) {
  Numbers codes, *all[] = {&codes, &w.table, &w.scale, &w.outer, &w.zero, &w.outer_zero, &w.map};
  const ffi::DataType types[] = {ffi::DataType::F32, ffi::DataType::BF16, ffi::DataType::F16, ffi::DataType::U8,
                                 ffi::DataType::S8};  // in the order of `Kind`
  for (int i = 0; i < 7; i++) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return false;
    const auto type = std::find(std::begin(types), std::end(types), buffer->element_type());
    if (type == std::end(types)) return false;
    *all[i] = {buffer->untyped_data(), int64_t(buffer->element_count()), Kind(type - types)};
  }
  w.format = format, w.columns = columns, w.codes = static_cast<const uint8_t*>(codes.data), w.bytes = codes.count;
  return (codes.kind == kUint8 || codes.kind == kInt8) && complete(w);
}
bool is_bfloat16(const ffi::AnyBuffer& x) { return x.element_type() == ffi::DataType::BF16; }
bool is_floating(const ffi::AnyBuffer& x) { return is_bfloat16(x) || x.element_type() == ffi::DataType::F32; }
Result result_of(ffi::AnyBuffer& out) { return {out.untyped_data(), out.dimensions()[1], is_bfloat16(out)}; }
ffi::Error refused() { return ffi::Error::InvalidArgument("operands do not fit the format of a weight"); }

// Copies rows of x to this thread's memory, as float32, with column k at position `place(k)`.
template <class Place> Rows rows_of(const ffi::AnyBuffer& x, Place place) {
  const int64_t m = x.dimensions()[0], columns = x.dimensions()[1];
  const int64_t stride = up(columns, 32) * 32 + 16;  // one additional cache line, so that rows don't evict each other
  const float* floats = static_cast<const float*>(x.untyped_data());
  const uint16_t* halves = static_cast<const uint16_t*>(x.untyped_data());
  float* copy = scratch<float, 2>(m * stride);
  for (int64_t i = 0; i < m; i++) {
    float* row = copy + i * stride;
    std::fill(row + columns / 32 * 32, row + stride, 0.f);
    for (int64_t k = 0; k < columns; k++)
      row[place(k)] = is_bfloat16(x) ? bits_as<float>(uint32_t(halves[i * columns + k]) << 16) : floats[i * columns + k];
  }
  return {copy, m, stride};
}

// Reads a weight and prefetches it. Returns whether it fits x and y.
bool read_product(const ffi::RemainingArgs& args, const Format& format, ffi::AnyBuffer x, ffi::AnyBuffer y, Weight& w) {
  if (!read_weight(args, format, x.dimensions()[1], w) || !is_floating(x) || !is_floating(y)) return false;
  fetch(w.codes, std::min(w.bytes, distance(0)));
  return y.dimensions()[0] == x.dimensions()[0] && y.dimensions()[1] == format.rows;
}
// Multiplies one row of x, written using this many digits. Returns whether this is possible.
bool multiply_row(ffi::ThreadPool& pool, const Weight& w, ffi::AnyBuffer x, int count, Result y) {
#if defined(__x86_64__)
  static const integers::Functions* const of_bytes = by_bytes();
  static thread_local integers::Digits of_thread;
  integers::Digits& digits = of_thread;  // other threads read these, too
  if (!of_bytes || !integers::in_steps(w)) return false;
  const integers::Codes codes = integers::codes_of(w, count < 3, of_bytes->shift);
  const float* floats = static_cast<const float*>(x.untyped_data());
  const uint16_t* halves = static_cast<const uint16_t*>(x.untyped_data());
  if (!codes.known || !of_bytes->write(floats, is_bfloat16(x) ? halves : nullptr, w, codes, count, digits)) return false;
  share(pool, w.format.rows, w.columns, [&](int64_t begin, int64_t end) {
    of_bytes->of(w, codes, digits)(w, codes, digits, y, begin, end);
  });
  return true;
#else
  return false;
#endif
}

// Multiplies several rows of x, written using this many digits. Returns whether this is possible.
bool multiply_rows(ffi::ThreadPool& pool, const Weight& w, ffi::AnyBuffer x, int count, Result y) {
  const integers::Codes codes = integers::codes_of(w, count == 1, rounding().shift);
  if (!codes.known) return false;
  const int64_t m = x.dimensions()[0];
  const float* floats = static_cast<const float*>(x.untyped_data());
  const uint16_t* halves = is_bfloat16(x) ? static_cast<const uint16_t*>(x.untyped_data()) : nullptr;
  rounded::Digits digits(w, m, count);
  share(pool, m, w.columns, [&](int64_t begin, int64_t end) { rounding().round(floats, halves, w, codes, digits, begin, end); });
  if (count > 1 && digits.special) return false;
  share(pool, w.format.rows, w.columns * m, [&](int64_t begin, int64_t end) {
    rounding().product(w, codes, digits, y, begin, end);
  });
  return true;
}

ffi::Error multiply(ffi::ThreadPool pool, Format format, ffi::AnyBuffer x, ffi::RemainingArgs args,
                    ffi::Result<ffi::AnyBuffer> y) {
  const int64_t m = x.dimensions()[0], columns = x.dimensions()[1];
  Weight w;
  if (!read_product(args, format, x, *y, w)) return refused();
  const uint16_t* halves = static_cast<const uint16_t*>(x.untyped_data());
  const bool mixed = set().mixes_nibbles && format.bits == 4, narrow = is_bfloat16(x);
  const auto place = [&](int64_t k) { return mixed ? k / 16 * 16 + k % 8 * 2 + k % 16 / 8 : k; };  // as codes are unpacked
#ifdef QL_MORE
  if (has_vnni() && narrow && m > 1 && multiply_rows(pool, w, x, 2, result_of(*y))) return ffi::Error::Success();
  if (pairs::here() && narrow && m > 1 && columns % 32 == 0) {
    std::vector<uint16_t> copy(m * columns);
    for (int64_t i = 0; i < m; i++)
      for (int64_t k = 0; k < columns; k++) copy[i * columns + place(k)] = halves[i * columns + k];
    share(pool, format.rows, columns, [&](int64_t begin, int64_t end) {
      pairs::of(format)(w, copy.data(), m, result_of(*y), begin, end);
    });
    return ffi::Error::Success();
  }
#endif
  if (m == 1 && multiply_row(pool, w, x, narrow ? 2 : 3, result_of(*y))) return ffi::Error::Success();
  const Rows copy = rows_of(x, place);
  share(pool, format.rows, columns, [&](int64_t begin, int64_t end) {
    set().of(format).product(w, copy, result_of(*y), begin, end);
  });
  return ffi::Error::Success();
}
// As above, but rounds rows of x to 8 bits.
ffi::Error multiply_rounded(ffi::ThreadPool pool, Format format, ffi::AnyBuffer x, ffi::RemainingArgs args,
                            ffi::Result<ffi::AnyBuffer> y) {
  const int64_t m = x.dimensions()[0], columns = x.dimensions()[1];
  Weight w;
  if (!read_product(args, format, x, *y, w)) return refused();
  if (m == 1 && multiply_row(pool, w, x, 1, result_of(*y))) return ffi::Error::Success();
  return multiply_rows(pool, w, x, 1, result_of(*y)) ? ffi::Error::Success() : refused();
}
ffi::Error multiply_dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t rows = w.dimensions()[0], columns = w.dimensions()[1];
  if (x.dimensions()[1] != columns || y->dimensions()[0] != x.dimensions()[0] || y->dimensions()[1] != rows) return refused();
  if (!is_floating(x) || !is_floating(w) || !is_floating(*y)) return refused();
  fetch(w.untyped_data(), std::min<int64_t>(w.size_bytes(), distance(0)));
  const Rows copy = rows_of(x, [](int64_t k) { return k; });
  share(pool, rows, columns, [&](int64_t begin, int64_t end) {
    set().dense[is_bfloat16(w)](w.untyped_data(), columns, copy, result_of(*y), begin, end);
  });
  return ffi::Error::Success();
}
// Multiplies each matrix of a stack by the same number of rows of x. The rows of the matrices are contracted.
ffi::Error multiply_stacked(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t count = w.dimensions()[0], rows = w.dimensions()[1], columns = w.dimensions()[2], m = x.dimensions()[0];
  if (!is_floating(x) || !is_floating(w) || !is_floating(*y) || !count || m % count) return refused();
  if (x.dimensions()[1] != rows || y->dimensions()[0] != m || y->dimensions()[1] != columns) return refused();
  const Rows copy = rows_of(x, [](int64_t k) { return k; });
  share(pool, count, rows * columns * (m / count), [&](int64_t begin, int64_t end) {
    set().stacked[is_bfloat16(w)](w.untyped_data(), rows, columns, m / count, copy, result_of(*y), begin, end);
  });
  return ffi::Error::Success();
}
// `x` isn't read. It is an operand so that decoding depends on it: XLA would otherwise decode all weights up front.
ffi::Error decode(ffi::ThreadPool pool, Format format, ffi::AnyBuffer, ffi::Buffer<ffi::S32> start,
                  ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> part) {
  const int64_t rows = part->dimensions()[0], columns = part->dimensions()[1], first = *start.typed_data();
  Weight w;
  if (!read_weight(args, format, columns, w) || !is_floating(*part)) return refused();
  if (first < 0 || first + rows > format.rows) return refused();
  share(pool, rows, columns, [&](int64_t begin, int64_t end) {
    set().of(format).decode[is_bfloat16(*part)](w, first, result_of(*part), begin, end);
  });
  return ffi::Error::Success();
}
}  // namespace

using ffi::AnyBuffer, ffi::StructMember;
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    Format, StructMember<int64_t>("rows"), StructMember<int64_t>("bits"), StructMember<int64_t>("block"),
    StructMember<int64_t>("bias"), StructMember<int64_t>("scales"), StructMember<int64_t>("group"),
    StructMember<int64_t>("zeros"), StructMember<bool>("is_signed"), StructMember<bool>("high_first"),
    StructMember<bool>("lookup"), StructMember<bool>("over"), StructMember<bool>("flat"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_multiply, guarded(multiply),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Format>().Arg<AnyBuffer>().RemainingArgs().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_multiply_rounded, guarded(multiply_rounded),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Format>().Arg<AnyBuffer>().RemainingArgs().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_multiply_dense, guarded(multiply_dense),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_multiply_stacked, guarded(multiply_stacked),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_decode, guarded(decode),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Format>().Arg<AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>()
        .RemainingArgs().Ret<AnyBuffer>());
extern "C" const char* quaxlike_set() { return set().name; }
extern "C" const char* quaxlike_rounding() { return rounding().name; }
extern "C" bool quaxlike_bfloat16() {  // whether this processor has instructions for bfloat16
#ifdef QL_MORE
  return pairs::here();
#else
  return false;
#endif
}
#else  // one instruction set
namespace QL_NAME {
constexpr int kLanes = QL_SET == AVX512 ? 16 : 8;
template <int L> struct Floats {
  typedef float Vector __attribute__((vector_size(4 * L)));
};
typedef Floats<kLanes>::Vector F;
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
// As `bits_as` above, but for vectors. Clang only passes these between functions with the same target.
template <class To, class From> QL_INLINE To bits_as(From from) {
  To to;
  return memcpy(&to, &from, sizeof to), to;
}
QL_INLINE F all(float x) { return x - F{}; }
template <class V> QL_INLINE V load(const void* at) {
  V v;
  return memcpy(&v, at, sizeof v), v;
}
template <int L = kLanes> QL_INLINE float sum_of(typename Floats<L>::Vector v) {
  if constexpr (L == 2) return v[0] + v[1];
  else {
    typename Floats<L / 2>::Vector halves[2];
    memcpy(halves, &v, sizeof v);
    return sum_of<L / 2>(halves[0] + halves[1]);
  }
}
QL_INLINE void store(float* out, F v) { memcpy(out, &v, sizeof v); }
QL_INLINE void store(uint16_t* out, F v) {  // as `to_bfloat16`
  U bits = bits_as<U>(v);
  bits = v == v ? bits + (0x7FFFu + (bits >> 16 & 1u)) : U{} + 0x7FC00000u;
  const H rounded = __builtin_convertvector(bits >> 16, H);
  memcpy(out, &rounded, sizeof rounded);
}
// The amount by which to shift each lane's word to obtain its code; see `codes`.
template <int B> QL_INLINE U shifts(bool high_first) {
  U out = {};
  for (int i = 0; i < kLanes; i++) {
    const int of_nibble = (kLanes == 8 ? i * 4 : i * 2) ^ (high_first ? 4 : 0);
    out[i] = B == 4 ? (kLanes == 16 && i % 2 ? 0 : of_nibble) : kLanes == 8 ? i % 4 * B : i * B % 16;
  }
  return out;
}
// Unpacks a vector of codes. The bits above each code are unspecified.
#if QL_SET == AVX512
template <int B> QL_INLINE __m512i words() {  // for each lane, the two 16-bit words that contain its code
  alignas(64) int16_t of[32];
  for (int i = 0; i < 32; i++) of[i] = i / 2 * B / 16 + i % 2;
  return _mm512_load_si512(of);
}
template <int B> QL_INLINE U codes(const uint8_t* at, U shift) {
  if constexpr (B == 8) return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  if constexpr (B == 4) {  // all eight words have all 16 codes, and lanes 2i and 2i + 1 select codes i and i + 8
    const __m512i word = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return (U)_mm512_srlv_epi64(word, (__m512i)shift);
  }
  const __m128i stream = _mm_maskz_loadu_epi8((1u << 2 * B) - 1, at);
  return (U)_mm512_permutexvar_epi16(words<B>(), _mm512_castsi128_si512(stream)) >> shift;
}
QL_INLINE F look_up(const float* table, U code) {
  return _mm512_permutexvar_ps((__m512i)code, _mm512_load_ps(table));
}
#else
template <int B> QL_INLINE U codes(const uint8_t* at, U shift) {
  uint32_t low = 0, high;  // the words in which the first four codes, and the last four codes begin
  memcpy(&low, at, B < 4 ? B : 4);
  memcpy(&high, B < 4 ? reinterpret_cast<const uint8_t*>(&low) : at + B - 4, 4);
  high >>= B < 4 ? 4 * B : B == 4 ? 0 : 32 - 4 * B;
#if QL_SET == AVX2
  if (B == 8) return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  return (U)_mm256_set_m128i(_mm_set1_epi32(high), _mm_set1_epi32(low)) >> shift;
#else
  if (B == 8) return U{at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
  return U{low, low, low, low, high, high, high, high} >> shift;
#endif
}
QL_INLINE F look_up(const float* table, U code) {
#if QL_SET == AVX2
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)code);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), (__m256i)code);
  return _mm256_blendv_ps(low, high, (__m256)(code << 28));  // selects using bit 3
#elif QL_SET == NEON
  struct Halves { uint8x16_t of[2]; };
  const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
  const Halves at = bits_as<Halves>((code & 15) * 0x04040404u + 0x03020100u);  // four bytes of each value
  return bits_as<F>(Halves{vqtbl4q_u8(bytes, at.of[0]), vqtbl4q_u8(bytes, at.of[1])});
#else
  F out;
  for (int i = 0; i < kLanes; i++) out[i] = table[code[i] & 15];
  return out;
#endif
}
#endif
// Undoes the permutation of values that results from unpacking with `codes`.
template <int B> QL_INLINE F in_order(F values) {
#if QL_SET == AVX512
  const __m512i lanes = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
  if (B == 4) return _mm512_permutexvar_ps(lanes, values);
#endif
  return values;
}
// Returns the values of a vector of codes.
template <int B, bool LOOKUP> QL_INLINE F numbers(const Weight& w, const uint8_t* at, U shift) {
  const U code = codes<B>(at, shift);
  if constexpr (B <= 4) return look_up(w.values, code);
  F out;
  for (int i = 0; i < kLanes; i++) out[i] = w.values[code[i] & 255];
  if constexpr (LOOKUP) return out;
  const int32_t flip = B == 8 && w.format.is_signed ? 128 : 0;
  return __builtin_convertvector((I(code & ((1u << B) - 1)) ^ flip) - (int32_t(w.format.bias) + flip), F);
}
// Conversions to float32. These are free of branches, so that loops over them can be vectorised.
QL_INLINE float from_float16(uint16_t h) {
  const uint32_t bits = h & 0x7FFFu, small = bits_as<uint32_t>(float(int32_t(bits)) * 0x1p-24f);
  const uint32_t normal = (bits << 13) + (bits < 0x7C00 ? 112u << 23 : 0x7F800000u - (31u << 23));
  return bits_as<float>((bits < 0x400 ? small : normal) | uint32_t(h & 0x8000) << 16);
}
QL_INLINE float from_e4m3(uint8_t byte) {
  const uint32_t bits = byte & 127u, small = bits_as<uint32_t>(float(int32_t(bits)) * 0x1p-9f);
  const uint32_t normal = bits < 127 ? (bits << 20) + (120u << 23) : 0x7FC00000u;
  return bits_as<float>((bits < 8 ? small : normal) | uint32_t(byte & 128) << 24);
}
QL_INLINE float power_of_two(uint32_t byte, uint32_t halved) {  // 2 ** (byte - 127 - halved)
  const uint32_t small = byte < halved ? 0x200000u : 0x400000u, bits = byte <= halved ? small : (byte - halved) << 23;
  return bits_as<float>(byte == 255 && !halved ? 0x7FC00000u : bits);
}
#define QL_VECTORS __attribute__((optimize("O3"))) QL_TARGET  // so that GCC vectorises the loops in a function
QL_VECTORS static void read(const Numbers& from, int64_t first, int64_t count, float* out, const float* map) {
  switch (from.kind) {
    case kFloat32: QL_EACH(float, v)
    case kBfloat16: QL_EACH(uint16_t, bits_as<float>(uint32_t(v) << 16))
    case kFloat16:
#if QL_SET == AVX2 || QL_SET == AVX512  // there's an instruction for this, but GCC doesn't use it
      for (; count >= 8; first += 8, count -= 8, out += 8) {
        const __m128i* eight = reinterpret_cast<const __m128i*>(static_cast<const char*>(from.data) + first * 2);
        _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(eight)));
      }
#endif
      QL_EACH(uint16_t, from_float16(v))
    case kUint8: QL_EACH(uint8_t, float(v))
    case kInt8: QL_EACH(int8_t, float(v))
    case kE4m3: QL_EACH(uint8_t, from_e4m3(v))
    case kE8m0: QL_EACH(uint8_t, power_of_two(v, 0))
    case kE8m0Half: QL_EACH(uint8_t, power_of_two(v, 1))
    case kLow: QL_EACH(uint8_t, float(v & 15))
    case kHigh: QL_EACH(uint8_t, float(v >> 4))
    case kMapped: QL_EACH(uint8_t, map[v])
  }
}
// Multiplies (or divides) the inner scales of blocks, starting from `first`, by the outer scales of their groups.
template <int G> QL_INLINE void times_whole(float* inner, const float* outer, int64_t groups) {
  typedef float Eight __attribute__((vector_size(32)));
  for (int64_t g = 0; g < groups; g++)
    QL_UNROLL for (int i = 0; i < G; i += 8) {
      Eight part;
      memcpy(&part, inner + g * G + i, sizeof part), part *= outer[g], memcpy(inner + g * G + i, &part, sizeof part);
    }
}
QL_VECTORS static void times_outer(float* inner, const float* outer, int64_t first, int64_t count, int64_t group, bool over) {
  const bool whole = !over && first == 0 && group > 0 && count % group == 0;
  if (whole && group == 8) return times_whole<8>(inner, outer, count / 8);
  if (whole && group == 16) return times_whole<16>(inner, outer, count / 16);
  for (int64_t i = 0, end = group ? group - first % group : count; i < count; i = end, end += group, outer++) {
    const float by = *outer;
    const int64_t stop = std::min(end, count);
    int64_t k = i;
    for (; k + 8 <= stop && !over; k += 8) QL_UNROLL for (int lane = 0; lane < 8; lane++) inner[k + lane] *= by;
    for (; k < stop; k++) inner[k] = over ? inner[k] / by : inner[k] * by;
  }
}
QL_VECTORS static void negate(float* offset, const float* scale, int64_t count) {  // also multiplies by any scales
  if (scale) for (int64_t i = 0; i < count; i++) offset[i] *= -scale[i];
  else for (int64_t i = 0; i < count; i++) offset[i] = -offset[i];
}
struct Scratch {  // the scales and offsets of each run, for several consecutive rows
  float *scale, *offset, *outer;
  bool no_offsets;  // whether offsets may be left out, if the weight has none
  Scratch(const Weight& w, int64_t rows, bool no_offsets = false) : no_offsets(no_offsets) {
    const int64_t count = rows * w.runs + 16;  // these are read as whole vectors, and rows can split two blocks
    scale = scratch<float, 0>(3 * count), offset = scale + count, outer = offset + count;
  }
};
QL_TARGET static void scales_of(const Weight& w, int64_t row, int64_t rows, Scratch& s, int64_t at = 0) {
  const Format& f = w.format;
  const float* map = static_cast<const float*>(w.map.data);
  const bool cut = f.flat && w.columns % f.block;  // whether blocks can cross rows
  if (cut && rows > 1) {
    for (int64_t r = 0; r < rows; r++) scales_of(w, row + r, 1, s, r * w.runs);
    return;
  }
  float *scale = s.scale + at, *offset = s.offset + at, *outer = s.outer;
  const int64_t first = cut ? row * w.columns / f.block : row * w.runs;
  const int64_t count = cut && w.runs ? ((row + 1) * w.columns - 1) / f.block + 1 - first : rows * w.runs;
  const bool runs_on = f.flat && f.group > 0 && count;  // whether groups can cross rows
  const int64_t group = runs_on ? first / f.group : row * w.groups;
  const int64_t groups = runs_on ? (first + count - 1) / f.group + 1 - group : rows * w.groups;
  const auto times_groups = [&](float* inner, bool over) QL_LAMBDA {
    if (runs_on) return times_outer(inner, outer, first, count, f.group, over);
    if (w.runs == w.groups * f.group) return times_outer(inner, outer, 0, count, f.group, over);
    for (int64_t r = 0; r < rows; r++) times_outer(inner + r * w.runs, outer + r * w.groups, 0, w.runs, f.group, over);
  };
  // Reads scales or offsets, and prefetches those of the next rows.
  const int64_t ahead = up(distance(0), rows * std::max<int64_t>(w.row_bytes, 1));
  const auto take = [&](const Numbers& from, int64_t first, int64_t count, float* out) QL_LAMBDA {
    const int64_t size = from.kind == kFloat32 ? 4 : from.kind <= kFloat16 ? 2 : 1;
    fetch(static_cast<const char*>(from.data) + (first + ahead * count) * size, count * size);
    read(from, first, count, out, map);
  };
  take(w.scale, first, count, scale);
  if (w.outer.count) {
    take(w.outer, group, groups, outer);
    times_groups(scale, f.over);
  }
  if (f.zeros != kNone) take(w.zero, first, count, offset);
  else if (!s.no_offsets || w.outer_zero.count) std::fill(offset, offset + rows * w.runs, 0.f);
  if (w.outer_zero.count) {
    take(w.outer_zero, group, groups, outer);
    times_groups(offset, false);
  }
  if (f.zeros == kPoints || f.zeros == kMinus) negate(offset, f.zeros == kPoints ? scale : nullptr, count);
  for (int64_t i = 0; i < count && f.scales == kNested; i++) scale[i] += *static_cast<const float*>(w.zero.data);
  if (cut)  // backwards, since the scale of a run is never stored after it
    for (int64_t i = w.runs; i-- > 0;) scale[i] = scale[(row * w.columns + i * w.run) / f.block - first];
}
// Calls `sink(i, numbers, scales, offsets)` for each vector of numbers in R rows, where i is its first column. Numbers
// past the end of a row are unspecified. Calls `ended(scales, offsets)` after each run, i.e. before these change.
template <int B, bool LOOKUP, int R, class Sink, class Ended>
QL_INLINE void walk(const Weight& w, const int64_t* rows, float* const* scales, float* const* offsets, Sink sink, Ended ended) {
  const U shift = shifts<B>(w.format.high_first);
  const int64_t whole = w.columns / kLanes * kLanes, ahead = distance(R * w.row_bytes);
  const uint8_t* at[R];
  uint8_t last[R][16];
  QL_UNROLL for (int r = 0; r < R; r++) at[r] = w.codes + rows[r] * w.row_bytes;
  // If the last codes in a row don't fill a vector, then they are handled in a second iteration, after padding a copy.
  for (int64_t begin = 0, end = whole ? whole : w.columns; begin < w.columns; begin = end, end = w.columns) {
    if (begin == whole)
      QL_UNROLL for (int r = 0; r < R; r++) {
        memset(last[r], 0, 16);
        memcpy(last[r], at[r] + whole * B / 8, w.row_bytes - whole * B / 8);
        at[r] = last[r];
      }
    for (int64_t run = begin / w.run, i = begin; i < end; run++) {
      F scale[R], offset[R];
      QL_UNROLL for (int r = 0; r < R; r++) scale[r] = all(scales[r][run]), offset[r] = all(offsets[r][run]);
      const int64_t stop = std::min((run + 1) * w.run, end);
      for (int64_t k = (i - begin) * B >> 3; k < (stop - begin) * B >> 3; k += 64)
        QL_UNROLL for (int r = 0; r < R; r++) __builtin_prefetch(at[r] + k + ahead, 0, 2);
      for (; i < stop; i += kLanes) {
        F values[R];
        QL_UNROLL for (int r = 0; r < R; r++)
          values[r] = numbers<B, LOOKUP>(w, at[r] + ((i - begin) * B >> 3), shift);
        sink(i, values, scale, offset);
      }
      ended(scale, offset);
    }
  }
}
struct Tile {  // rows of a weight to be multiplied together
  static constexpr int kRows = 4;
  int64_t rows[kRows];
  float *scale[kRows], *offset[kRows];
};
template <int B, bool LOOKUP, int M>
QL_TARGET static void tile(const Weight& w, const Tile& t, Rows x, int64_t m, Result y) {
  constexpr int R = std::min(Tile::kRows, (QL_SET == AVX512 ? 16 : 8) / M);  // such that all sums fit in registers
  const float* x_rows[M];
  for (int i = 0; i < M; i++) x_rows[i] = x.data + std::min(m + i, x.count - 1) * x.stride;
  for (int first = 0; first < Tile::kRows; first += R) {
    F sums[R][M] = {}, of_run[R] = {}, of_x = {};
    const auto add = [&](int64_t k, F* values, const F* scale, const F* offset) QL_LAMBDA {
      QL_UNROLL for (int r = 0; r < R && M > 1; r++) values[r] = values[r] * scale[r] + offset[r];
      QL_UNROLL for (int i = 0; i < M; i++) {
        const F part = load<F>(x_rows[i] + k);
        QL_UNROLL for (int r = 0; r < R; r++) (M > 1 ? sums[r][i] : of_run[r]) += values[r] * part;
        if (M == 1) of_x += part;
      }
    };
    // With just one row of x, it's cheaper to scale the sums instead of the values, which is done once per run.
    walk<B, LOOKUP, R>(w, t.rows + first, t.scale + first, t.offset + first, add, [&](F* scale, F* offset) QL_LAMBDA {
      QL_UNROLL for (int r = 0; r < R && M == 1; r++) {
        sums[r][0] += of_run[r] * scale[r] + of_x * offset[r];
        of_run[r] = F{};
      }
      of_x = F{};
    });
    QL_UNROLL for (int r = 0; r < R; r++)
      QL_UNROLL for (int i = 0; i < M; i++) {
        if (m + i >= x.count) break;
        put(y, m + i, t.rows[first + r], sum_of(sums[r][i]));
      }
  }
}
// Calls `work` on each tile of rows.
template <class Work> QL_TARGET static void each_tile(const Weight& w, int64_t begin, int64_t end, Work work) {
  Scratch s(w, Tile::kRows);
  for (int64_t n = begin; n < end; n += Tile::kRows) {
    Tile t;
    for (int64_t r = 0; r < Tile::kRows; r++) {  // past the end, repeat the last row
      const int64_t row = std::min(n + r, end - 1);
      t.rows[r] = row, t.scale[r] = s.scale + (row - n) * w.runs, t.offset[r] = s.offset + (row - n) * w.runs;
    }
    scales_of(w, n, std::min<int64_t>(Tile::kRows, end - n), s);
    work(t);
  }
}
template <int B, bool LOOKUP>
QL_TARGET static void product(const Weight& w, Rows x, Result y, int64_t begin, int64_t end) {
  constexpr int M = QL_SET == PLAIN ? 1 : 4;
  each_tile(w, begin, end, [&](const Tile& t) {
    for (int64_t m = 0; m < x.count; m += M)
      (x.count - m == 1 ? tile<B, LOOKUP, 1> : tile<B, LOOKUP, M>)(w, t, x, m, y);
  });
}
template <int B, bool LOOKUP, class T>
QL_TARGET static void decoded(const Weight& w, int64_t first, Result out, int64_t begin, int64_t end) {
  Scratch s(w, 1);
  for (int64_t n = begin, row; n < end; n++) {
    scales_of(w, row = first + n, 1, s);
    T* to = static_cast<T*>(out.data) + n * out.stride;
    const auto write = [&](int64_t k, const F* values, const F* scale, const F* offset) QL_LAMBDA {
      T last[kLanes];
      const bool whole = k + kLanes <= w.columns;
      store(whole ? to + k : last, in_order<B>(*values * *scale + *offset));
      if (!whole) memcpy(to + k, last, (w.columns - k) * sizeof(T));
    };
    walk<B, LOOKUP, 1>(w, &row, &s.scale, &s.offset, write, [](const F*, const F*) {});
  }
}
// Products with dense weights, reading each cache line just once.
QL_INLINE F widened(const float* at) { return load<F>(at); }
QL_INLINE F widened(const uint16_t* at) { return bits_as<F>(__builtin_convertvector(load<H>(at), U) << 16); }
template <class T, int M>
QL_TARGET static void dense_tile(const T* w, int64_t columns, Rows x, int64_t m, Result y, int64_t n, int64_t end) {
  constexpr int R = std::min(4, (QL_SET == AVX512 ? 16 : 8) / M), kLine = 64 / sizeof(T);
  const int64_t ahead = distance(R * columns * sizeof(T)) / sizeof(T);
  const float* x_rows[M];
  for (int i = 0; i < M; i++) x_rows[i] = x.data + std::min(m + i, x.count - 1) * x.stride;
  for (; n < end; n += R) {
    F sums[R][M] = {};
    const T* at[R];
    QL_UNROLL for (int r = 0; r < R; r++) at[r] = w + std::min(n + r, end - 1) * columns;  // then repeat the last row
    const auto add = [&](int64_t k, const T* const* from) QL_LAMBDA {
      for (int v = 0; v < kLine; v += kLanes) {
        F values[R];
        QL_UNROLL for (int r = 0; r < R; r++) values[r] = widened(from[r] + v);
        QL_UNROLL for (int i = 0; i < M; i++) {
          const F part = load<F>(x_rows[i] + k + v);
          QL_UNROLL for (int r = 0; r < R; r++) sums[r][i] += values[r] * part;
        }
      }
    };
    int64_t k = 0;
    for (; k + kLine <= columns; k += kLine) {
      const T* from[R];
      QL_UNROLL for (int r = 0; r < R; r++) from[r] = at[r] + k, __builtin_prefetch(from[r] + ahead, 0, 2);
      add(k, from);
    }
    if (k < columns) {
      T last[R][kLine] = {};
      const T* from[R];
      for (int r = 0; r < R; r++) from[r] = last[r], memcpy(last[r], at[r] + k, (columns - k) * sizeof(T));
      add(k, from);
    }
    for (int r = 0; r < R && n + r < end; r++)
      for (int i = 0; i < M && m + i < x.count; i++) put(y, m + i, n + r, sum_of(sums[r][i]));
  }
}
template <class T> QL_TARGET static void dense(const void* w, int64_t columns, Rows x, Result y, int64_t begin, int64_t end) {
  constexpr int kFew = QL_SET == PLAIN ? 1 : 4, kMany = QL_SET == AVX512 || QL_SET == AVX2 ? 8 : kFew;
  constexpr int kRows = 16;  // rows of the weight to keep in L1, whilst iterating over rows of x
  // With AVX2, each row of the weight is multiplied by many rows of x, all of which need to fit in L1.
  const int most = QL_SET == AVX2 && columns * kMany * sizeof(float) > 32 << 10 ? kFew : kMany;
  for (int64_t n = begin; n < end; n += kRows)
    for (int64_t m = 0; m < x.count; m += most)
      (x.count - m == 1 ? dense_tile<T, 1> : std::min<int64_t>(x.count - m, most) <= kFew ? dense_tile<T, kFew> : dense_tile<T, kMany>)(
          static_cast<const T*>(w), columns, x, m, y, n, std::min(n + kRows, end));
}
// Computes V vectors of the result for a row of x. Its elements are multiplied by a matrix's rows as these are read.
template <class T, int V>
QL_INLINE void stacked_part(const T* w, int64_t rows, int64_t columns, const float* x, Result y, int64_t m, int64_t n) {
  F sums[V] = {};
  for (int64_t k = 0; k < rows; k++) {
    const F by = all(x[k]);
    const T* from = w + k * columns;
    fetch(from + 8 * columns, V * kLanes * sizeof(T));
    QL_UNROLL for (int v = 0; v < V; v++) sums[v] += by * widened(from + v * kLanes);
  }
  QL_UNROLL for (int v = 0; v < V; v++) {
    const int64_t at = m * y.stride + n + v * kLanes;
    if (y.is_bfloat16) store(static_cast<uint16_t*>(y.data) + at, sums[v]);
    else store(static_cast<float*>(y.data) + at, sums[v]);
  }
}
template <class T>
QL_TARGET static void stacked(const void* w, int64_t rows, int64_t columns, int64_t group, Rows x, Result y, int64_t begin, int64_t end) {
  constexpr int V = QL_SET == AVX512 ? 16 : 8;
  for (int64_t i = begin; i < end; i++) {
    const T* matrix = static_cast<const T*>(w) + i * rows * columns;
    int64_t n = 0;
    const auto each = [&](auto part) QL_LAMBDA { for (int64_t m = i * group; m < (i + 1) * group; m++) part(m, x.data + m * x.stride); };
    for (; n + V * kLanes <= columns; n += V * kLanes)
      each([&](int64_t m, const float* row) QL_LAMBDA { stacked_part<T, V>(matrix + n, rows, columns, row, y, m, n); });
    for (; n + 64 <= columns; n += 64)
      each([&](int64_t m, const float* row) QL_LAMBDA { stacked_part<T, 64 / kLanes>(matrix + n, rows, columns, row, y, m, n); });
    for (; n + kLanes <= columns; n += kLanes)
      each([&](int64_t m, const float* row) QL_LAMBDA { stacked_part<T, 1>(matrix + n, rows, columns, row, y, m, n); });
    for (; n < columns; n++)
      each([&](int64_t m, const float* row) QL_LAMBDA {
        float sum = 0;
        for (int64_t k = 0; k < rows; k++)
          sum += row[k] * (sizeof(T) == 4 ? float(matrix[k * columns + n]) : bits_as<float>(uint32_t(matrix[k * columns + n]) << 16));
        put(y, m, n, sum);
      });
  }
}
template <int B, bool LOOKUP = false>
constexpr Kernels kernels = {product<B, LOOKUP>, {decoded<B, LOOKUP, float>, decoded<B, LOOKUP, uint16_t>}};
constexpr Set set = {QL_STRING(QL_NAME), QL_SET == AVX512, {dense<float>, dense<uint16_t>}, {stacked<float>, stacked<uint16_t>},
                     {kernels<2>, kernels<3>, kernels<4>, kernels<5>, kernels<6>, kernels<8>, kernels<8, true>}};
}  // namespace QL_NAME
#undef QL_NAME
#undef QL_SET
#undef QL_TARGET
#undef QL_VECTORS
#endif
