// RMS norm of float32 rows, after an addition or alone. api.py describes it, cpu.py calls it.

#include "../cpu/common.h"

namespace {

struct Norm {
  const float *x, *added;  // [rows, size]; nothing is added if `total` is null
  const float* weight;     // [size]
  float eps;
  float *total, *y;  // [rows, size]
  int64_t rows, size;
};

using Row = void (*)(const Norm&, int64_t row);

#define KERNELS "../rms_norm/norm.inc"
#include "../cpu/sets.inc"

const Row NORM = HERE(NORM_ROW);

XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, bool adds) {
  if (is_question(frame)) return nullptr;
  if (frame->args.size != 3 + adds || frame->rets.size != 1 + adds) return error(frame, "rms_norm: wrong number of arguments");
  constexpr XLA_FFI_DataType F32 = XLA_FFI_DataType_F32;
  const XLA_FFI_Buffer *x = argument(frame, 0), *weight = argument(frame, 1 + adds), *eps = argument(frame, 2 + adds);
  if (!is_array(x, F32, 2)) return error(frame, "rms_norm: wrong rank or dtype");
  const auto shape = {x->dims[0], x->dims[1]};
  if ((adds && (!has_shape(argument(frame, 1), F32, shape) || !has_shape(result(frame, 1), F32, shape))) ||
      !has_shape(weight, F32, {x->dims[1]}) || !has_shape(eps, F32, {}) || !has_shape(result(frame), F32, shape))
    return error(frame, "rms_norm: sizes do not fit");
  Norm norm = {};
  norm.rows = x->dims[0], norm.size = x->dims[1];
  if (!norm.rows || !norm.size) return nullptr;
  norm.x = static_cast<const float*>(x->data), norm.weight = static_cast<const float*>(weight->data);
  norm.eps = *static_cast<const float*>(eps->data), norm.y = static_cast<float*>(result(frame, adds)->data);
  if (adds) norm.added = static_cast<const float*>(argument(frame, 1)->data), norm.total = static_cast<float*>(result(frame)->data);
  share_rows(frame, norm, NORM, norm.size);
  return nullptr;
}

}  // namespace

EXPORT XLA_FFI_Error* rms_norm_float32(XLA_FFI_CallFrame* frame) { return call(frame, false); }
EXPORT XLA_FFI_Error* add_norm_float32(XLA_FFI_CallFrame* frame) { return call(frame, true); }
