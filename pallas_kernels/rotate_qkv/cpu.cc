// The fused projection's rows split into queries, keys and values, and the first two rotated, in float32. api.py describes it, cpu.py
// calls it.

#include "../cpu/common.h"

namespace {

struct Rotation {
  const float *qkv, *cos, *sin;  // [rows, (heads + 2 * kv_heads) * head_dim], [rows, head_dim / 2]
  float *q, *k, *v;              // [rows, heads, head_dim], [rows, kv_heads, head_dim]
  int64_t rows, heads, kv_heads, head_dim;
};

using Row = void (*)(const Rotation&, int64_t row);

#define KERNELS "../rotate_qkv/rotate.inc"
#include "../cpu/sets.inc"

const Row ROTATE = HERE(ROTATE_ROW);

}  // namespace

EXPORT XLA_FFI_Error* rotate_qkv_float32(XLA_FFI_CallFrame* frame) {
  if (is_question(frame)) return nullptr;
  if (frame->args.size != 3 || frame->rets.size != 3) return error(frame, "rotate_qkv: wrong number of arguments");
  constexpr XLA_FFI_DataType F32 = XLA_FFI_DataType_F32;
  const XLA_FFI_Buffer *qkv = argument(frame, 0), *q = result(frame), *k = result(frame, 1);
  if (!is_array(qkv, F32, 2) || !is_array(q, F32, 3) || !is_array(k, F32, 3)) return error(frame, "rotate_qkv: wrong rank or dtype");
  Rotation r = {};
  r.rows = q->dims[0], r.heads = q->dims[1], r.kv_heads = k->dims[1], r.head_dim = q->dims[2];
  const auto angles = {r.rows, r.head_dim / 2}, keys = {r.rows, r.kv_heads, r.head_dim};
  if (r.head_dim % 2 || !has_shape(qkv, F32, {r.rows, (r.heads + 2 * r.kv_heads) * r.head_dim}) ||
      !has_shape(argument(frame, 1), F32, angles) || !has_shape(argument(frame, 2), F32, angles) || !has_shape(k, F32, keys) ||
      !has_shape(result(frame, 2), F32, keys))
    return error(frame, "rotate_qkv: sizes do not fit");
  if (!r.rows || !r.head_dim) return nullptr;
  r.qkv = static_cast<const float*>(qkv->data), r.cos = static_cast<const float*>(argument(frame, 1)->data);
  r.sin = static_cast<const float*>(argument(frame, 2)->data), r.q = static_cast<float*>(q->data);
  r.k = static_cast<float*>(k->data), r.v = static_cast<float*>(result(frame, 2)->data);
  share_rows(frame, r, ROTATE, qkv->dims[1]);
  return nullptr;
}
