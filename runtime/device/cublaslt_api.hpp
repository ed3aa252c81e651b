// The table of the cuBLASLt functions that are used, filled from libcublasLt at first need.
#pragma once

#include <cublasLt.h>

#include "base/error.hpp"

namespace f8::runtime {

#define F8_CUBLASLT_FUNCTIONS(X)                            \
  X(create, cublasLtCreate)                                 \
  X(destroy, cublasLtDestroy)                               \
  X(get_version, cublasLtGetVersion)                        \
  X(status_name, cublasLtGetStatusName)                     \
  X(matmul, cublasLtMatmul)                                 \
  X(algo_heuristic, cublasLtMatmulAlgoGetHeuristic)         \
  X(algo_get, cublasLtMatmulAlgoConfigGetAttribute)         \
  X(desc_init, cublasLtMatmulDescInit_internal)             \
  X(desc_set, cublasLtMatmulDescSetAttribute)               \
  X(layout_init, cublasLtMatrixLayoutInit_internal)         \
  X(preference_init, cublasLtMatmulPreferenceInit_internal) \
  X(preference_set, cublasLtMatmulPreferenceSetAttribute)

struct CublasLt {
#define F8_CUBLASLT_FIELD(field, function) decltype(&::function) field = nullptr;
  F8_CUBLASLT_FUNCTIONS(F8_CUBLASLT_FIELD)
#undef F8_CUBLASLT_FIELD

  [[nodiscard]] Status check(cublasStatus_t status, const char* call) const;
};

// kEnvironment where libcublasLt.so.13 cannot be opened, or static objects are being destroyed.
[[nodiscard]] Result<const CublasLt*> cublaslt();
// Puts `table` in the library's place; null puts the real one back. For tests alone.
void set_cublaslt_for_testing(const CublasLt* table);

}  // namespace f8::runtime
