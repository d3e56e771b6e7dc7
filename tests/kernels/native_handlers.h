// Calls the handlers of XLA's FFI as XLA does, on drawn shapes, with threads of their own, and where allocations
// fail: each time another one, alone or with all that follow. A call either gives the same result, or an error.
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>

namespace allocations {
std::atomic<int64_t> left{-1};  // until one fails; below zero, none does
std::atomic<bool> all_fail{false}, failed{false};
thread_local bool exempt = false;
}  // namespace allocations

void* operator new(size_t size) {
  using namespace allocations;
  if (!exempt && left >= 0 && left.fetch_sub(1) <= 0) {
    failed = true;
    left = all_fail ? 0 : -1;
    throw std::bad_alloc();
  }
  if (void* found = std::malloc(size ? size : 1)) return found;
  throw std::bad_alloc();
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, size_t) noexcept { std::free(at); }

namespace handlers {
struct Exempt {
  Exempt() { allocations::exempt = true; }
  ~Exempt() { allocations::exempt = false; }
};

// A pool of three threads, each of which is new: memory of a thread is allocated in every call.
std::mutex of_threads;
std::vector<std::thread> threads;
XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  const Exempt harness;
  const std::lock_guard<std::mutex> lock(of_threads);
  threads.emplace_back([task = args->task, data = args->data] { task(data); });
  return nullptr;
}
XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) { return *args->num_threads = 3, nullptr; }

int64_t draw(int64_t count) { return random_number() % count; }
template <class T> T draw_from(std::initializer_list<T> all) { return all.begin()[draw(all.size())]; }
int64_t drawn_rows() { return draw(3) ? draw(80) : 500 + draw(200); }  // of many, several threads take parts
bool as_bfloat16(XLA_FFI_DataType type) { return type == XLA_FFI_DataType_BF16; }

struct Buffer {  // of exactly its size
  std::vector<int64_t> dims;
  int64_t count = 1, bytes;
  void* data;
  XLA_FFI_Buffer buffer{};
  Buffer(XLA_FFI_DataType type, std::vector<int64_t> shape) : dims(shape) {
    for (const int64_t size : dims) count *= size;
    bytes = count * ffi::ByteWidth(ffi::DataType(type));
    data = std::malloc(bytes);
    for (int64_t i = 0; i < bytes; i++) static_cast<uint8_t*>(data)[i] = random_number();
    buffer = {sizeof buffer, nullptr, type, data, int64_t(dims.size()), dims.data()};
    for (int64_t i = 0; i < count; i++) {  // neither NaN nor far from 1
      const float value = random_number() % 64 / 32.f - 1;
      if (as_bfloat16(type)) static_cast<uint16_t*>(data)[i] = to_bfloat16(value);
      if (type == XLA_FFI_DataType_F32) static_cast<float*>(data)[i] = value;
      if (type == XLA_FFI_DataType_F16) static_cast<uint16_t*>(data)[i] = 0x3C00 + random_number() % 512;
    }
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
  float operator[](int64_t i) const {
    if (!as_bfloat16(buffer.dtype)) return static_cast<float*>(data)[i];
    return bits_as<float>(uint32_t(static_cast<uint16_t*>(data)[i]) << 16);
  }
  operator ffi::AnyBuffer() const { return ffi::AnyBuffer(&buffer); }
};

int failures = 0;
int64_t calls = 0, errors = 0;
void expect(bool good, const char* handler, const char* what) {
  if (!good) failures++, printf("%s: %s\n", handler, what);
}

// Calls a handler in a thread of its own, until no allocation of it fails.
template <class Call> void each_failure(const char* name, const Buffer& y, Call call) {
  XLA_FFI_Api api{};
  api.struct_size = sizeof api;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  api.XLA_FFI_ThreadPool_NumThreads = num_threads;
  const auto run = [&](int64_t until) {
    ffi::Error error;
    memset(y.data, 0xFF, y.bytes);
    std::thread([&] {
      ffi::DiagnosticEngine diagnostics;
      const auto pool = ffi::CtxDecoding<ffi::ThreadPool>::Decode(&api, nullptr, diagnostics);
      allocations::failed = false, allocations::left = until;
      error = call(*pool);
      allocations::left = -1;
    }).join();
    while (!threads.empty()) threads.back().join(), threads.pop_back();
    return calls++, error;
  };
  expect(run(-1).success(), name, "an error without a failure");
  const std::vector<uint8_t> expected(static_cast<uint8_t*>(y.data), static_cast<uint8_t*>(y.data) + y.bytes);
  for (const bool all : {false, true}) {
    allocations::all_fail = all;
    for (int64_t until = 0;; until++) {
      const ffi::Error error = run(until);
      if (error.failure()) errors++;
      expect(error.success() || error.errc() == ffi::ErrorCode::kResourceExhausted, name, "another error");
      expect(error.success() || allocations::failed, name, "an error without a failure");
      const bool same = std::equal(expected.begin(), expected.end(), static_cast<uint8_t*>(y.data));
      expect(error.failure() || same, name, "another result after a failure");
      if (!allocations::failed) break;
    }
  }
}

// `y = x @ w.T` for some rows of a matrix in float32. Each x may be rounded, by so much of the largest one in its row.
void expect_product(const char* name, const Buffer& y, const Buffer& x, const std::vector<float>& w, int64_t rows, double rounded = 0) {
  const int64_t m = x.dims[0], columns = x.dims[1];
  const double error = as_bfloat16(y.buffer.dtype) || as_bfloat16(x.buffer.dtype) ? 1.0 / 64 : 1e-4;
  for (int64_t i = 0; i < m * rows; i++) {
    double sum = 0, size = 1e-3, most = 0, of_weight = 10;  // not 0, since scaled codes can cancel an offset
    for (int64_t k = 0; k < columns; k++) {
      const double of_x = x[i / rows * columns + k], of_w = w[i % rows * columns + k];
      sum += of_x * of_w, size += std::abs(of_x * of_w);
      most = std::max(most, std::abs(of_x)), of_weight += std::abs(of_w);
    }
    if (!(std::abs(y[i] - sum) <= error * size + rounded * most * of_weight)) return expect(false, name, "another product");
  }
}

void of_codes() {
  const int64_t rows = drawn_rows(), bits = draw_from<int64_t>({2, 3, 4, 5, 6, 8}), block = draw_from<int64_t>({16, 32, 64});
  const bool flat = bits == 4 && draw(3) == 0;
  const int64_t columns = flat ? 16 * (1 + draw(20)) : draw_from<int64_t>({1, 16, 33, 64, 100, 192, 256, 300});
  const int64_t run = flat ? std::gcd(columns, block) : block, blocks = up(columns, run);
  const int64_t scales = flat ? up(rows * columns, block) : rows * blocks;
  Format f{rows, bits, block, int64_t(1) << (bits - 1), kByType, -1, kNone, false, false, false, false, flat};
  if (bits == 8) f.lookup = draw(2);
  if (!flat) f.zeros = draw(4);
  f.high_first = bits == 4 && draw(2);
  const bool nested = flat && draw(2);
  if (nested) f.scales = kNested, f.group = 256;
  const auto F32 = XLA_FFI_DataType_F32, U8 = XLA_FFI_DataType_U8, BF16 = XLA_FFI_DataType_BF16;
  const auto of_scales = nested ? U8 : draw_from({F32, BF16, XLA_FFI_DataType_F16, U8});
  const Buffer codes(U8, {rows * up(columns * bits, 8)}), table(F32, {bits <= 4 || f.lookup ? 1 << bits : 0});
  const Buffer scale(of_scales, {scales}), outer(F32, {nested ? up(scales, 256) : 0});
  const Buffer zero(F32, {nested ? 1 : f.zeros != kNone ? scales : 0}), none(F32, {0}), map(F32, {nested ? 256 : 0});
  void* args[] = {(void*)&codes.buffer, (void*)&table.buffer, (void*)&scale.buffer, (void*)&outer.buffer,
                  (void*)&zero.buffer, (void*)&none.buffer, (void*)&map.buffer};
  XLA_FFI_ArgType types[7];
  std::fill(types, types + 7, XLA_FFI_ArgType_BUFFER);
  const XLA_FFI_Args all{sizeof all, nullptr, 7, types, args};
  const ffi::RemainingArgs weight(&all, 0);

  const Buffer start(XLA_FFI_DataType_S32, {}), whole(F32, {rows, columns});
  static_cast<int32_t*>(start.data)[0] = 0;
  const Buffer x(draw_from({F32, BF16}), {draw_from<int64_t>({0, 1, 1, 2, 5, 17}), columns});
  const ffi::Buffer<ffi::S32> first(&start.buffer);
  each_failure("decode", whole, [&](ffi::ThreadPool pool) {
    return guarded(decode)(pool, f, x, first, weight, ffi::Result<ffi::AnyBuffer>(whole));
  });
  const Buffer y(draw_from({F32, BF16}), {x.dims[0], rows});
  each_failure("multiply", y, [&](ffi::ThreadPool pool) {
    return guarded(multiply)(pool, f, x, weight, ffi::Result<ffi::AnyBuffer>(y));
  });
  const float* values = static_cast<float*>(whole.data);
  expect_product("multiply", y, x, {values, values + whole.count}, rows);
  if (bits == 8 && f.lookup) return;
  each_failure("multiply_rounded", y, [&](ffi::ThreadPool pool) {
    return guarded(multiply_rounded)(pool, f, x, weight, ffi::Result<ffi::AnyBuffer>(y));
  });
  expect_product("multiply_rounded", y, x, {values, values + whole.count}, rows, 1.0 / 250);
}

void of_numbers() {
  const auto F32 = XLA_FFI_DataType_F32, BF16 = XLA_FFI_DataType_BF16;
  const int64_t m = draw(20), rows = drawn_rows(), columns = draw(130), count = 1 + draw(4);
  const Buffer x(draw_from({F32, BF16}), {m, columns}), w(draw_from({F32, BF16}), {rows, columns}), y(F32, {m, rows});
  each_failure("multiply_dense", y, [&](ffi::ThreadPool pool) {
    return guarded(multiply_dense)(pool, x, w, ffi::Result<ffi::AnyBuffer>(y));
  });
  std::vector<float> values(w.count);
  for (int64_t i = 0; i < w.count; i++) values[i] = w[i];
  expect_product("multiply_dense", y, x, values, rows);
  const Buffer stack(draw_from({F32, BF16}), {count, rows, columns}), each(F32, {count * m, rows}), out(F32, {count * m, columns});
  each_failure("multiply_stacked", out, [&](ffi::ThreadPool pool) {
    return guarded(multiply_stacked)(pool, each, stack, ffi::Result<ffi::AnyBuffer>(out));
  });
  const int64_t elements = draw(300);
  const Buffer data(F32, {elements}), column(XLA_FFI_DataType_S32, {elements}), row_ptr(XLA_FFI_DataType_S32, {rows + 1});
  const Buffer floats(F32, {m, columns}), found(F32, {m, rows});
  for (int64_t i = 0; i < elements; i++) static_cast<int32_t*>(column.data)[i] = draw(columns + 2);
  for (int64_t i = 0; i <= rows; i++) static_cast<int32_t*>(row_ptr.data)[i] = draw(elements + 1);
  each_failure("csr_multiply", found, [&](ffi::ThreadPool pool) {
    return guarded(csr_multiply)(pool, ffi::Buffer<ffi::F32>(&floats.buffer), ffi::Buffer<ffi::F32>(&data.buffer), ffi::Buffer<ffi::S32>(&column.buffer), ffi::Buffer<ffi::S32>(&row_ptr.buffer), ffi::Result<ffi::Buffer<ffi::F32>>(ffi::Buffer<ffi::F32>(&found.buffer)));
  });
}

int check(int64_t number) {
  for (int64_t i = 0; i < number; i++) of_codes(), of_numbers();
  printf("%d faults of handlers, in %d calls, of which %d ended in an error\n", failures, int(calls), int(errors));
  return failures != 0 || !errors;
}
}  // namespace handlers
