// An XLA FFI handler on CPUs, for products of a few rows with a weight stored as compressed sparse rows.
#include <cstring>
#include <type_traits>
#include <vector>
#include "share.h"
namespace {
struct Csr {
  const float* data;
  const int32_t *column, *row_ptr;
  int64_t rows, columns, elements;
};
// Multiplies rows `begin` to `end` of the weight by `count` <= P rows of x, which are interleaved as `x[k * P + p]`.
// Elements are accumulated into several independent sums, so that no addition has to wait for the previous one.
template <int P> void multiply_rows(const Csr& w, const float* x, int64_t count, float* y, int64_t begin, int64_t end) {
  typedef float Vector __attribute__((vector_size(16)));
  using Terms = std::conditional_t<P == 1, float, Vector>;
  static_assert(sizeof(Terms) == P * sizeof(float));
  constexpr int kSums = 4;
  const auto term = [&](int64_t i) __attribute__((always_inline)) {
    const uint32_t k = w.column[i];
    Terms terms = {};
    if (__builtin_expect(k >= w.columns, 0)) return terms;  // padding, which is treated as zero
    memcpy(&terms, x + k * int64_t(P), sizeof terms);
    return w.data[i] * terms;
  };
  for (int64_t n = begin; n < end; n++) {
    const int64_t last = std::clamp<int64_t>(w.row_ptr[n + 1], 0, w.elements);
    int64_t i = std::clamp<int64_t>(w.row_ptr[n], 0, w.elements);
    Terms sums[kSums] = {};
    for (; i + kSums <= last; i += kSums)
      for (int to = 0; to < kSums; to++) sums[to] += term(i + to);
    for (; i < last; i++) sums[0] += term(i);
    const Terms sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float found[P];
    memcpy(found, &sum, sizeof sum);
    for (int64_t p = 0; p < count; p++) y[p * w.rows + n] = found[p];
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
ffi::Error csr_multiply(ffi::ThreadPool pool, F32 x, F32 data, S32 column, S32 row_ptr, ffi::Result<F32> y) {
  const int64_t m = x.dimensions()[0], columns = x.dimensions()[1], rows = y->dimensions()[1], elements = data.element_count();
  if (int64_t(row_ptr.element_count()) != rows + 1 || int64_t(column.element_count()) != elements || y->dimensions()[0] != m)
    return ffi::Error::InvalidArgument("operands do not fit the rows of a sparse weight");
  const Csr w{data.typed_data(), column.typed_data(), row_ptr.typed_data(), rows, columns, elements};
  // If x has several rows, then these are interleaved and multiplied four at a time.
  const int64_t groups = up(m, 4);
  std::vector<float> fours(m > 1 ? groups * 4 * columns : 0);
  for (int64_t p = 0; m > 1 && p < m; p++)
    for (int64_t k = 0; k < columns; k++) fours[(p / 4 * columns + k) * 4 + p % 4] = x.typed_data()[p * columns + k];
  share(pool, rows, up(elements, std::max<int64_t>(1, rows)) * m, [&](int64_t begin, int64_t end) {
    if (m == 1) return multiply_rows<1>(w, x.typed_data(), 1, y->typed_data(), begin, end);
    for (int64_t p = 0; p < m; p += 4)
      multiply_rows<4>(w, fours.data() + p * columns, std::min<int64_t>(4, m - p), y->typed_data() + p * rows, begin, end);
  });
  return ffi::Error::Success();
}
}  // namespace
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quaxlike_csr_multiply, guarded(csr_multiply),
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Ret<F32>());
