// Attention over pages and a window, in float32. api.py describes it, cpu.py calls it.

#include "../cpu/common.h"

namespace {

struct Attention {
  const float *q, *k_pages, *v_pages;           // [b, rows, heads, head_dim], [pages, page, kv_heads, head_dim]
  const int32_t *page_table, *start, *length;   // [b, entries], [b], [b]
  const float *k_window, *v_window;             // [b, window, kv_heads, head_dim]
  const bool* mask;                             // [b, rows, window]
  float* out;                                   // as q
  int64_t batch, rows, heads, head_dim, pages, page, kv_heads, entries, window;
};

using Head = void (*)(const Attention&, int64_t sequence, int64_t head, int64_t* offsets, float* scores);
constexpr int64_t HEAD_DIMS[] = {16, 32, 64, 96, 128, 256};

#define KERNELS "../tree_attention/rows.inc"
#include "../cpu/sets.inc"

const Head* const HEADS = HERE(HEAD_OF);

// A chunk is one sequence and head.
struct Job {
  Attention attention;
  Head head;

  void run(int64_t number, std::unique_ptr<float[]>& scratch) const {
    const Attention& a = attention;
    int64_t keys = a.entries * a.page + a.window;
    if (!scratch) scratch.reset(new float[3 * keys + 32]);  // offsets take two floats each
    head(a, number / a.heads, number % a.heads, reinterpret_cast<int64_t*>(scratch.get()), scratch.get() + 2 * keys);
  }
};

}  // namespace

EXPORT XLA_FFI_Error* tree_attention_float32(XLA_FFI_CallFrame* frame) {
  if (is_question(frame)) return nullptr;
  if (frame->args.size != 9 || frame->rets.size != 1) return error(frame, "tree_attention: wrong number of arguments");
  constexpr XLA_FFI_DataType F32 = XLA_FFI_DataType_F32, S32 = XLA_FFI_DataType_S32;
  const XLA_FFI_Buffer *q = argument(frame, 0), *pages = argument(frame, 1), *table = argument(frame, 3), *window = argument(frame, 6);
  if (!is_array(q, F32, 4) || !is_array(pages, F32, 4) || !is_array(table, S32, 2) || !is_array(window, F32, 4))
    return error(frame, "tree_attention: wrong ranks or dtypes");
  Attention a = {};
  a.batch = q->dims[0], a.rows = q->dims[1], a.heads = q->dims[2], a.head_dim = q->dims[3];
  a.pages = pages->dims[0], a.page = pages->dims[1], a.kv_heads = pages->dims[2], a.entries = table->dims[1], a.window = window->dims[1];
  const auto cache = {a.pages, a.page, a.kv_heads, a.head_dim}, beside = {a.batch, a.window, a.kv_heads, a.head_dim};
  if (!has_shape(pages, F32, cache) || !has_shape(argument(frame, 2), F32, cache) || !has_shape(table, S32, {a.batch, a.entries}) ||
      !has_shape(argument(frame, 4), S32, {a.batch}) || !has_shape(argument(frame, 5), S32, {a.batch}) ||
      !has_shape(window, F32, beside) || !has_shape(argument(frame, 7), F32, beside) ||
      !has_shape(argument(frame, 8), XLA_FFI_DataType_PRED, {a.batch, a.rows, a.window}) ||
      !has_shape(result(frame), F32, {a.batch, a.rows, a.heads, a.head_dim}) || !a.pages || !a.kv_heads || a.heads % a.kv_heads)
    return error(frame, "tree_attention: sizes do not fit");
  auto data = [frame](int64_t number) { return argument(frame, number)->data; };
  a.q = static_cast<const float*>(data(0)), a.k_pages = static_cast<const float*>(data(1)), a.v_pages = static_cast<const float*>(data(2));
  a.page_table = static_cast<const int32_t*>(data(3)), a.start = static_cast<const int32_t*>(data(4));
  a.length = static_cast<const int32_t*>(data(5)), a.k_window = static_cast<const float*>(data(6));
  a.v_window = static_cast<const float*>(data(7)), a.mask = static_cast<const bool*>(data(8)), a.out = static_cast<float*>(result(frame)->data);
  for (int64_t i = 0; i < int64_t(sizeof(HEAD_DIMS) / sizeof(*HEAD_DIMS)); i++)
    if (HEAD_DIMS[i] == a.head_dim) return share(frame, Job{a, HEADS[i]}, a.batch * a.heads), nullptr;
  return error(frame, "tree_attention: no kernel for this head_dim");
}
