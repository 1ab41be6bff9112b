// What the C++ kernels for CPUs share: their calls from XLA, and work in chunks on XLA's own threads.
//
// Only XLA's C interface is used (xla_ffi.h, a copy of OpenXLA's c_api.h), so the library depends neither on a Python version nor
// on jaxlib's C++ classes.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "xla_ffi.h"

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
#endif
#include <immintrin.h>
#endif

// What follows FOR_AVX512 or FOR_AVX2 is compiled for CPUs that have it, up to FOR_ALL.
#if defined(__clang__)
#define FOR_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c\"))), apply_to = function)")
#define FOR_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,f16c\"))), apply_to = function)")
#define FOR_ALL _Pragma("clang attribute pop")
#else
#define FOR_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c\")")
#define FOR_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c\")")
#define FOR_ALL _Pragma("GCC pop_options")
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda
#define EXPORT extern "C" __attribute__((visibility("default")))

enum class Instructions { NONE, AVX2, AVX512, NEON };

// The best that this CPU has and the kernels are compiled for.
inline Instructions instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if !defined(WITHOUT_AVX512)  // which tests define
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Instructions::AVX512;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return Instructions::AVX2;
  return Instructions::NONE;
#elif defined(__aarch64__)
  return Instructions::NEON;
#else
  return Instructions::NONE;
#endif
}

inline XLA_FFI_Error* error(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether the call is no product yet: XLA asks which interface the library was built for, or prepares.
inline bool is_question(XLA_FFI_CallFrame* frame) {
  for (XLA_FFI_InternalExtension* each = frame->extension_start; each; each = each->next)
    if (each->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(each)->metadata;
      metadata->api_version.major_version = XLA_FFI_API_MAJOR;
      metadata->api_version.minor_version = XLA_FFI_API_MINOR;
      metadata->traits = 0;
      return true;
    }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

inline const XLA_FFI_Buffer* argument(const XLA_FFI_CallFrame* frame, int64_t number) {
  return static_cast<const XLA_FFI_Buffer*>(frame->args.args[number]);
}
inline const XLA_FFI_Buffer* result(const XLA_FFI_CallFrame* frame, int64_t number = 0) {
  return static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[number]);
}
inline bool is_array(const XLA_FFI_Buffer* buffer, XLA_FFI_DataType dtype, int64_t rank) {
  return buffer->rank == rank && buffer->dtype == dtype;
}

inline bool has_shape(const XLA_FFI_Buffer* buffer, XLA_FFI_DataType dtype, std::initializer_list<int64_t> shape) {
  if (!is_array(buffer, dtype, shape.size())) return false;
  int64_t number = 0;
  for (int64_t size : shape)
    if (buffer->dims[number++] != size) return false;
  return true;
}

// Work cut in chunks, which the caller and XLA's threads take from a counter. Nobody waits for a thread that has not begun: one that
// comes late finds no chunk. `Job` has `void run(int64_t chunk, std::unique_ptr<float[]>& scratch)`, where each thread's scratch is
// empty at first.
template <class Job>
struct Work {
  Job job;
  int64_t chunks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  Work(const Job& job, int64_t chunks) : job(job), chunks(chunks) {}

  void take() {
    std::unique_ptr<float[]> scratch;
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
      job.run(chunk, scratch);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) done.notify_all();
    }
  }
  void wait() {
    for (int64_t found; (found = done.load(std::memory_order_acquire)) < chunks;) done.wait(found, std::memory_order_acquire);
  }
};

inline bool failed(const XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  if (!error) return false;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
  return true;
}

template <class Job>
void take_part(void* data) {
  std::unique_ptr<std::shared_ptr<Work<Job>>> work(static_cast<std::shared_ptr<Work<Job>>*>(data));
  (*work)->take();
}

template <class Job>
void share(const XLA_FFI_CallFrame* frame, const Job& job, int64_t chunks) {
  auto work = std::make_shared<Work<Job>>(job, chunks);
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx, &threads};
  if (failed(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&count))) threads = 1;
  for (int64_t helper = 1; helper < threads && helper < chunks; helper++) {
    auto* shared = new std::shared_ptr<Work<Job>>(work);
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, take_part<Job>, shared};
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&task))) {
      delete shared;
      break;
    }
  }
  work->take();
  work->wait();
}

// Rows that don't depend on one another, in chunks of at least 16384 numbers: fewer are no work for a second thread.
template <class Arguments>
struct Rows {
  Arguments arguments;
  void (*run_row)(const Arguments&, int64_t row);
  int64_t rows, in_chunk;

  void run(int64_t chunk, std::unique_ptr<float[]>&) const {
    for (int64_t row = chunk * in_chunk; row < rows && row < (chunk + 1) * in_chunk; row++) run_row(arguments, row);
  }
};

template <class Arguments>
void share_rows(const XLA_FFI_CallFrame* frame, const Arguments& arguments, void (*run_row)(const Arguments&, int64_t), int64_t size) {
  int64_t in_chunk = 16384 / size + 1;
  share(frame, Rows<Arguments>{arguments, run_row, arguments.rows, in_chunk}, (arguments.rows + in_chunk - 1) / in_chunk);
}
