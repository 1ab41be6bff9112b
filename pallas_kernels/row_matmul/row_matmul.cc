// y = x W^T on a CPU, for weights [n, k] in several storages, on XLA's own threads. api.py describes it and calls it.
//
// Only XLA's C interface is used (xla_ffi.h, a copy of OpenXLA's c_api.h), so the library depends neither on a Python version nor
// on jaxlib's C++ classes.

#include <atomic>
#include <memory>
#include <cstdint>
#include <cstring>

#include "xla_ffi.h"

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
#endif
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

struct Product {
  const float* x;          // [m, k]
  const uint8_t* weights;  // n rows of `stride` bytes
  const float* scales;     // [n], or null
  float* y;                // [m, n]
  int64_t m, n, k, stride;
};

// Up to this many rows of x, each tile unpacks its weights for itself; for more, they are unpacked once.
constexpr int64_t UNPACKED_AGAIN = 4;

using Chunk = void (*)(const Product&, int64_t first, int64_t last, float* unpacked);
enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, KINDS };

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace avx512 {
constexpr int TILE = 24;
INLINE float half_at(const void* from) { uint16_t bits; memcpy(&bits, from, 2); return _cvtsh_ss(bits); }
INLINE __m512 from_halves(const void* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from))); }
#include "tiles.inc"
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
constexpr int TILE = 4;
typedef float Sixteen __attribute__((vector_size(64)));
INLINE float half_at(const void* from) { uint16_t bits; memcpy(&bits, from, 2); return _cvtsh_ss(bits); }
INLINE Sixteen from_halves(const void* from) {
  const __m128i* halves = static_cast<const __m128i*>(from);
  __m256 both[2] = {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  Sixteen floats;
  memcpy(&floats, both, sizeof floats);
  return floats;
}
#include "tiles.inc"
}  // namespace avx2
#pragma GCC pop_options

const Chunk* chunks_here() {
  __builtin_cpu_init();
#if !defined(WITHOUT_AVX512)  // which tests define
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return avx512::CHUNKS;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return avx2::CHUNKS;
  return nullptr;
}
#elif defined(__aarch64__)
namespace neon {
constexpr int TILE = 4;
typedef float Sixteen __attribute__((vector_size(64)));
INLINE float half_at(const void* from) { __fp16 half; memcpy(&half, from, 2); return half; }
INLINE Sixteen from_halves(const void* from) {
  Sixteen floats;
  for (int i = 0; i < 16; i++) floats[i] = half_at(static_cast<const char*>(from) + 2 * i);
  return floats;
}
#include "tiles.inc"
}  // namespace neon

const Chunk* chunks_here() { return neon::CHUNKS; }
#else
const Chunk* chunks_here() { return nullptr; }
#endif

const Chunk* const CHUNKS = chunks_here();

// Weights and bytes of a block.
struct Block { int64_t weights, size; };
constexpr Block BLOCKS[KINDS] = {{1, 4}, {1, 2}, {1, 2}, {1, 1}, {1, 1}, {32, 34}, {32, 18}, {32, 20}, {256, 144}, {256, 210}};

// A product cut in chunks, which the caller and XLA's threads take from a counter. Nobody waits for a thread that has not begun: one
// that comes late finds no chunk.
struct Work {
  Product product;
  Chunk run;
  int64_t rows, chunks;  // rows of weights in a chunk, and how many chunks there are
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  void take() {
    std::unique_ptr<float[]> unpacked;
    for (int64_t each; (each = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
      if (product.m > UNPACKED_AGAIN && !unpacked) unpacked.reset(new float[rows * product.k]);
      int64_t last = (each + 1) * rows;
      run(product, each * rows, last < product.n ? last : product.n, unpacked.get());
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) done.notify_all();
    }
  }
  void wait() {
    for (int64_t found; (found = done.load(std::memory_order_acquire)) < chunks;) done.wait(found, std::memory_order_acquire);
  }
};

XLA_FFI_Error* error(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return api->XLA_FFI_Error_Create(&args);
}

int64_t threads_of(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx, &threads};
  if (XLA_FFI_Error* failed = frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) {
    XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, failed};
    frame->api->XLA_FFI_Error_Destroy(&destroy);
  }
  return threads;
}

void run_task(void* data) {
  std::unique_ptr<std::shared_ptr<Work>> work(static_cast<std::shared_ptr<Work>*>(data));
  (*work)->take();
}

void share(const XLA_FFI_CallFrame* frame, const std::shared_ptr<Work>& work) {
  int64_t helpers = threads_of(frame) - 1;
  if (helpers > work->chunks - 1) helpers = work->chunks - 1;
  for (int64_t helper = 0; helper < helpers; helper++) {
    auto* shared = new std::shared_ptr<Work>(work);
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, run_task, shared};
    if (XLA_FFI_Error* failed = frame->api->XLA_FFI_ThreadPool_Schedule(&args)) {
      XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, failed};
      frame->api->XLA_FFI_Error_Destroy(&destroy);
      delete shared;
      break;
    }
  }
  work->take();
  work->wait();
}

// Rows of weights in a chunk: an eighth of the matrix, but 24 to 128 KB; at most 256 KB when they are unpacked.
int64_t rows_of_chunk(const Product& p) {
  int64_t bytes = p.n * p.stride / 8, most = p.m > UNPACKED_AGAIN ? (1 << 18) / (4 * p.k) : p.n;
  bytes = bytes < 24576 ? 24576 : bytes > 131072 ? 131072 : bytes;
  int64_t rows = bytes / p.stride;
  if (rows > most) rows = most;
  rows = rows / 4 * 4;
  return rows < 4 ? 4 : rows;
}

bool is_matrix(const XLA_FFI_Buffer* buffer, XLA_FFI_DataType dtype) { return buffer->rank == 2 && buffer->dtype == dtype; }

XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, Kind kind, XLA_FFI_DataType dtype, bool scaled) {
  for (XLA_FFI_InternalExtension* each = frame->extension_start; each; each = each->next)
    if (each->type == XLA_FFI_Extension_Metadata) {  // XLA asks which interface the library was built for
      XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(each)->metadata;
      metadata->api_version.major_version = XLA_FFI_API_MAJOR;
      metadata->api_version.minor_version = XLA_FFI_API_MINOR;
      metadata->traits = 0;
      return nullptr;
    }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  const XLA_FFI_Api* api = frame->api;
  if (frame->args.size != 2 + scaled || frame->rets.size != 1) return error(api, "row_matmul: wrong number of arguments");
  auto* x = static_cast<XLA_FFI_Buffer*>(frame->args.args[0]);
  auto* weights = static_cast<XLA_FFI_Buffer*>(frame->args.args[1]);
  auto* scales = scaled ? static_cast<XLA_FFI_Buffer*>(frame->args.args[2]) : nullptr;
  auto* y = static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0]);
  if (!is_matrix(x, XLA_FFI_DataType_F32) || !is_matrix(weights, dtype) || !is_matrix(y, XLA_FFI_DataType_F32) ||
      (scales && (scales->rank != 1 || scales->dtype != XLA_FFI_DataType_F32)))
    return error(api, "row_matmul: wrong ranks or dtypes");
  int64_t m = x->dims[0], k = x->dims[1], n = weights->dims[0];
  int64_t item = dtype == XLA_FFI_DataType_F32 ? 4 : dtype == XLA_FFI_DataType_BF16 || dtype == XLA_FFI_DataType_F16 ? 2 : 1;
  int64_t stride = weights->dims[1] * item;
  if (k % BLOCKS[kind].weights || stride != k / BLOCKS[kind].weights * BLOCKS[kind].size || y->dims[0] != m || y->dims[1] != n ||
      (scales && scales->dims[0] != n))
    return error(api, "row_matmul: sizes do not fit");
  if (m == 0 || n == 0) return nullptr;
  auto* out = static_cast<float*>(y->data);
  if (k == 0) return memset(out, 0, m * n * sizeof(float)), nullptr;
  auto work = std::make_shared<Work>();
  work->product = {static_cast<const float*>(x->data), static_cast<const uint8_t*>(weights->data),
                   scales ? static_cast<const float*>(scales->data) : nullptr, out, m, n, k, stride};
  work->run = CHUNKS[kind];
  work->rows = rows_of_chunk(work->product);
  work->chunks = (n + work->rows - 1) / work->rows;
  share(frame, work);
  return nullptr;
}

}  // namespace

// What api.py loads: 1 if this CPU has the instructions that the kernels need, and a handler for each storage.
extern "C" {
#define EXPORT __attribute__((visibility("default")))
EXPORT int row_matmul_runs_here() { return CHUNKS != nullptr; }
#define HANDLER(name, kind, dtype, scaled) \
  EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return call(frame, kind, XLA_FFI_DataType_##dtype, scaled); }
HANDLER(row_matmul_float32, FLOAT32, F32, false)
HANDLER(row_matmul_bfloat16, BFLOAT16, BF16, false)
HANDLER(row_matmul_float16, FLOAT16, F16, false)
HANDLER(row_matmul_int8, INT8, S8, true)
HANDLER(row_matmul_float8, FLOAT8, F8E4M3FN, true)
HANDLER(row_matmul_q8_0, Q8_0, U8, false)
HANDLER(row_matmul_q4_0, Q4_0, U8, false)
HANDLER(row_matmul_q4_1, Q4_1, U8, false)
HANDLER(row_matmul_q4_k, Q4_K, U8, false)
HANDLER(row_matmul_q6_k, Q6_K, U8, false)
}
