// y = x W^T for weights [n, k] in several storages. api.py describes it and calls it.

#include "../cpu/common.h"

namespace {

struct Product {
  const float* x;          // [m, k]
  const int64_t* places;   // [m]: the rows of y that belong to x's
  const uint8_t* weights;  // n rows of `stride` bytes
  const float* scales;     // [n], or null
  float* y;                // rows of n
  int64_t m, n, k, stride;
};

// Up to this many rows of x, each tile unpacks its weights for itself; for more, they are unpacked once into memory. `block`: weights
// in a block. (Two cores of an AMD EPYC, 29 November 2026: Q8_0 and Q4_1 with 12 rows take 0.5 to 0.8 times as long as unpacked once,
// with 32 rows 0.7 to 1.0; Q6_K with 16 rows 1.4 times. On 27 November 8 rows of bfloat16 took 0.6 times as long.)
constexpr int64_t most_unpacking(int64_t block) { return block <= 16 ? 16 : block == 32 ? 32 : 4; }

using Chunk = void (*)(const Product&, int64_t first, int64_t last, float* unpacked);
enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, FP8_BLOCKS, INT4_BLOCKS, KINDS };

#define KERNELS "../row_matmul/tiles.inc"
#include "../cpu/sets.inc"

const Chunk* const CHUNKS = HERE(CHUNK_OF);

// Weights and bytes of a block.
struct Block { int64_t weights, size; };
constexpr Block BLOCKS[KINDS] = {{1, 4}, {1, 2}, {1, 2}, {1, 1}, {1, 1}, {32, 34}, {32, 18}, {32, 20}, {256, 144}, {256, 210},
                                {32, 36}, {32, 20}};

struct Job {
  Product product;
  Chunk chunk;
  int64_t rows;  // of weights in a chunk
  bool unpacks;  // them once

  void run(int64_t number, std::unique_ptr<float[]>& unpacked) const {
    if (unpacks && !unpacked) unpacked.reset(new float[rows * product.k]);
    int64_t last = (number + 1) * rows;
    chunk(product, number * rows, last < product.n ? last : product.n, unpacked.get());
  }
};

// Rows of weights in a chunk: an eighth of the matrix, but 24 to 128 KB; at most 256 KB when they are unpacked.
int64_t rows_of_chunk(const Product& p, bool unpacks) {
  int64_t bytes = p.n * p.stride / 8, most = unpacks ? (1 << 18) / (4 * p.k) : p.n;
  bytes = bytes < 24576 ? 24576 : bytes > 131072 ? 131072 : bytes;
  int64_t rows = bytes / p.stride;
  if (rows > most) rows = most;
  rows = rows / 4 * 4;
  return rows < 4 ? 4 : rows;
}

// Looks at 64 numbers at once; of most rows only at the first ones.
bool is_zero(const float* row, int64_t k) {
  for (int64_t i = 0; i < k; i += 64) {
    bool found = false;
    for (int64_t j = i; j < (i + 64 < k ? i + 64 : k); j++) found |= row[j] != 0.0f;
    if (found) return false;
  }
  return true;
}

// x without its rows of zeros, whose products are zeros: places that have no token, as in a chunk that a prompt does not fill.
struct RowsOfX {
  const float* x;
  int64_t m = 0;
  std::unique_ptr<int64_t[]> places;
  std::unique_ptr<float[]> moved;

  RowsOfX(const float* all, int64_t number, int64_t k, float* y, int64_t n) : x(all), places(new int64_t[number]) {
    for (int64_t i = 0; i < number; i++)
      if (is_zero(all + i * k, k))
        memset(y + i * n, 0, n * sizeof(float));
      else
        places[m++] = i;
    if (m == 0 || places[m - 1] == m - 1) return;
    moved.reset(new float[m * k]);
    for (int64_t i = 0; i < m; i++) memcpy(moved.get() + i * k, all + places[i] * k, k * sizeof(float));
    x = moved.get();
  }
};

XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, Kind kind, XLA_FFI_DataType dtype, bool scaled) {
  if (is_question(frame)) return nullptr;
  if (frame->args.size != 2 + scaled || frame->rets.size != 1) return error(frame, "row_matmul: wrong number of arguments");
  const XLA_FFI_Buffer *x = argument(frame, 0), *weights = argument(frame, 1), *scales = scaled ? argument(frame, 2) : nullptr;
  const XLA_FFI_Buffer* y = result(frame);
  if (!is_array(x, XLA_FFI_DataType_F32, 2) || !is_array(weights, dtype, 2) || !is_array(y, XLA_FFI_DataType_F32, 2) ||
      (scales && !is_array(scales, XLA_FFI_DataType_F32, 1)))
    return error(frame, "row_matmul: wrong ranks or dtypes");
  int64_t m = x->dims[0], k = x->dims[1], n = weights->dims[0];
  int64_t item = dtype == XLA_FFI_DataType_F32 ? 4 : dtype == XLA_FFI_DataType_BF16 || dtype == XLA_FFI_DataType_F16 ? 2 : 1;
  int64_t stride = weights->dims[1] * item;
  if (k % BLOCKS[kind].weights || stride != k / BLOCKS[kind].weights * BLOCKS[kind].size || y->dims[0] != m || y->dims[1] != n ||
      (scales && scales->dims[0] != n))
    return error(frame, "row_matmul: sizes do not fit");
  if (m == 0 || n == 0) return nullptr;
  auto* out = static_cast<float*>(y->data);
  if (k == 0) return memset(out, 0, m * n * sizeof(float)), nullptr;
  RowsOfX given(static_cast<const float*>(x->data), m, k, out, n);
  m = given.m;
  if (m == 0) return nullptr;
  Product product = {given.x, given.places.get(), static_cast<const uint8_t*>(weights->data),
                     scales ? static_cast<const float*>(scales->data) : nullptr, out, m, n, k, stride};
  bool unpacks = kind != FLOAT32 && m > most_unpacking(BLOCKS[kind].weights);
  int64_t rows = rows_of_chunk(product, unpacks);
  share(frame, Job{product, CHUNKS[kind], rows, unpacks}, (n + rows - 1) / rows);
  return nullptr;
}

}  // namespace

// 1 if this CPU has the instructions that the kernels need.
EXPORT int kernels_run_here() { return CHUNKS != nullptr; }

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
HANDLER(row_matmul_fp8_32, FP8_BLOCKS, U8, false)
HANDLER(row_matmul_int4_32, INT4_BLOCKS, U8, false)
