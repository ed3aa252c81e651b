#include "tests/unit/runtime/fake_cublaslt.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "recipes/dtype.hpp"

namespace f8::runtime::testing {
namespace {

FakeCublasLt* g_fake_cublaslt = nullptr;

// The contents of the opaque structs here.
struct Desc {
  cublasOperation_t op_a, op_b;
  const float* scale_a;
  const float* scale_b;
  int32_t mode_a, mode_b;
  int8_t fast;
  cublasLtEpilogue_t epilogue;
  const void* bias;  // one for each row of d
  cudaDataType bias_type;
};
struct Layout {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld;
};
struct Algo {
  int index;
};
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));

template <class T, class Opaque>
T read(const Opaque* from) {
  T out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
template <class T, class Opaque>
void write(Opaque* to, const T& value) {
  std::memcpy(to, &value, sizeof value);
}

cublasStatus_t create(cublasLtHandle_t* out) {
  if (g_fake_cublaslt->create_result != CUBLAS_STATUS_SUCCESS)
    return g_fake_cublaslt->create_result;
  ++g_fake_cublaslt->handles;
  *out = reinterpret_cast<cublasLtHandle_t>(uintptr_t{1});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t destroy(cublasLtHandle_t) {
  --g_fake_cublaslt->handles;
  return CUBLAS_STATUS_SUCCESS;
}
size_t get_version() {
  return 130100;
}
const char* status_name(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                               : "CUBLAS_STATUS_OTHER";
}

cublasStatus_t desc_init(cublasLtMatmulDesc_t desc, size_t, cublasComputeType_t compute,
                         cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  write(desc, Desc{});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t desc_set(cublasLtMatmulDesc_t opaque, cublasLtMatmulDescAttributes_t which,
                        const void* value, size_t bytes) {
  Desc desc = read<Desc>(opaque);
  const auto take = [&](auto& field) {
    if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&field, value, bytes);
    write(opaque, desc);
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(desc.op_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(desc.op_b);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return take(desc.scale_a);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return take(desc.scale_b);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
      return take(desc.mode_a);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
      return take(desc.mode_b);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return take(desc.fast);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take(desc.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(desc.bias);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return take(desc.bias_type);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t layout_init(cublasLtMatrixLayout_t layout, size_t, cudaDataType type, uint64_t rows,
                           uint64_t cols, int64_t ld) {
  write(layout, Layout{type, rows, cols, ld});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t preference_init(cublasLtMatmulPreference_t, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t preference_set(cublasLtMatmulPreference_t,
                              cublasLtMatmulPreferenceAttributes_t which, const void* value,
                              size_t) {
  if (which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    std::memcpy(&g_fake_cublaslt->asked_workspace, value, sizeof g_fake_cublaslt->asked_workspace);
  }
  return CUBLAS_STATUS_SUCCESS;
}

bool is_fp8(cudaDataType t) {
  return t == CUDA_R_8F_E4M3 || t == CUDA_R_8F_E5M2;
}

// The library's own rules for fp8 on Hopper.
bool supported(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  if (!is_fp8(a.type) && !is_fp8(b.type)) {
    return a.type == b.type && (d.type == a.type || d.type == CUDA_R_32F);
  }
  const bool bias = desc.epilogue == CUBLASLT_EPILOGUE_BIAS;
  if (bias && (desc.bias_type != d.type || d.type == CUDA_R_32F)) return false;
  return desc.op_a == CUBLAS_OP_T && desc.op_b == CUBLAS_OP_N && a.rows % 16 == 0 &&
         a.ld % 16 == 0 && b.ld % 16 == 0 && desc.scale_a != nullptr && desc.scale_b != nullptr &&
         !(a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2);
}

cublasStatus_t heuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                         cublasLtMatmulPreference_t, int most, cublasLtMatmulHeuristicResult_t* out,
                         int* count) {
  g_fake_cublaslt->asked_heuristics = most;
  if (g_fake_cublaslt->heuristic_result != CUBLAS_STATUS_SUCCESS)
    return g_fake_cublaslt->heuristic_result;
  if (!supported(read<Desc>(desc), read<Layout>(a), read<Layout>(b), read<Layout>(d))) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  *count = std::min(most, g_fake_cublaslt->offers);
  for (int i = 0; i < *count; ++i) {
    out[i] = {};
    write(&out[i].algo, Algo{i});
    out[i].workspaceSize = g_fake_cublaslt->workspace_bytes;
    out[i].state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t algo_get(const cublasLtMatmulAlgo_t* algo,
                        cublasLtMatmulAlgoConfigAttributes_t which, void* value, size_t bytes,
                        size_t* written) {
  if (g_fake_cublaslt->attribute_result != CUBLAS_STATUS_SUCCESS)
    return g_fake_cublaslt->attribute_result;
  const auto index = static_cast<size_t>(read<Algo>(algo).index);
  const FakeCublasLt::Attributes of = index < g_fake_cublaslt->attributes.size()
                                          ? g_fake_cublaslt->attributes[index]
                                          : FakeCublasLt::Attributes{};
  const auto give = [&](auto field) {
    if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(value, &field, bytes);
    *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (which) {
    case CUBLASLT_ALGO_CONFIG_ID:
      return give(of.id);
    case CUBLASLT_ALGO_CONFIG_TILE_ID:
      return give(of.tile);
    case CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID:
      return give(of.cluster);
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM:
      return give(of.split_k);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

Dtype dtype_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return Dtype::kE4m3;
    case CUDA_R_8F_E5M2:
      return Dtype::kE5m2;
    case CUDA_R_16F:
      return Dtype::kF16;
    case CUDA_R_32F:
      return Dtype::kF32;
    default:
      return Dtype::kBf16;
  }
}

// The columns of a matrix, one behind the other; `rows` takes its rows. Tests count what float8 allocates by new,
// and this is cuBLASLt's.
using Values = std::unique_ptr<double[], decltype([](double* p) { std::free(p); })>;
Values columns_of(const void* base, const Layout& layout, bool rows) {
  const Dtype type = dtype_of(layout.type);
  const uint64_t row_stride = rows ? layout.cols : 1, col_stride = rows ? 1 : layout.rows;
  Values values(static_cast<double*>(std::malloc(layout.rows * layout.cols * sizeof(double))));
  for (uint64_t col = 0; col < layout.cols; ++col) {
    for (uint64_t row = 0; row < layout.rows; ++row) {
      const auto at = static_cast<int64_t>(row + col * static_cast<uint64_t>(layout.ld));
      values[row * row_stride + col * col_stride] = load_element(base, at, type);
    }
  }
  return values;
}

cublasStatus_t matmul(cublasLtHandle_t, cublasLtMatmulDesc_t opaque, const void* alpha,
                      const void* a, cublasLtMatrixLayout_t opaque_a, const void* b,
                      cublasLtMatrixLayout_t opaque_b, const void* beta, const void* c,
                      cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t opaque_d,
                      const cublasLtMatmulAlgo_t* algo, void*, size_t workspace_bytes,
                      cudaStream_t) {
  if (g_fake_cublaslt->matmul_result != CUBLAS_STATUS_SUCCESS)
    return g_fake_cublaslt->matmul_result;
  if (!g_fake_cublaslt->computes) {
    ++g_fake_cublaslt->matmuls;
    return CUBLAS_STATUS_SUCCESS;
  }
  const Desc desc = read<Desc>(opaque);
  const Layout la = read<Layout>(opaque_a);
  const Layout lb = read<Layout>(opaque_b);
  const Layout ld = read<Layout>(opaque_d);
  const bool ta = desc.op_a == CUBLAS_OP_T;
  const bool tb = desc.op_b == CUBLAS_OP_T;
  const uint64_t m = ta ? la.cols : la.rows;
  const uint64_t k = ta ? la.rows : la.cols;
  const uint64_t n = tb ? lb.rows : lb.cols;
  const float keep = *static_cast<const float*>(beta);
  if (*static_cast<const float*>(alpha) != 1 || (keep != 0 && (keep != 1 || c != d)) ||
      m != ld.rows || n != ld.cols || k != (tb ? lb.cols : lb.rows) ||
      !supported(desc, la, lb, ld)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  ++g_fake_cublaslt->matmuls;
  g_fake_cublaslt->last_algo = read<Algo>(algo).index;
  g_fake_cublaslt->last_fast = desc.fast != 0;
  g_fake_cublaslt->last_workspace_bytes = workspace_bytes;
  const auto scale = [](const float* values, int32_t mode, uint64_t i) {
    if (values == nullptr) return 1.0F;
    return values[mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F ? i : 0];
  };
  const Values rows = columns_of(a, la, !ta), columns = columns_of(b, lb, tb);
  for (uint64_t j = 0; j < n; ++j) {
    const double* column = columns.get() + j * k;
    for (uint64_t i = 0; i < m; ++i) {
      const double* row = rows.get() + i * k;
      double sum = 0;
      for (uint64_t l = 0; l < k; ++l) sum += row[l] * column[l];
      float result = static_cast<float>(sum) * scale(desc.scale_a, desc.mode_a, i) *
                     scale(desc.scale_b, desc.mode_b, j);
      const int64_t at = static_cast<int64_t>(i) + static_cast<int64_t>(j) * ld.ld;
      const Dtype type = dtype_of(ld.type);
      if (desc.epilogue == CUBLASLT_EPILOGUE_BIAS) {
        result += load_element(desc.bias, static_cast<int64_t>(i), dtype_of(desc.bias_type));
      }
      if (keep != 0) result += load_element(d, at, type);
      store_element(d, at, result, type);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

FakeCublasLt::FakeCublasLt() {
  EXPECT_EQ(g_fake_cublaslt, nullptr) << "one fake at a time";
  g_fake_cublaslt = this;
  table_.create = create;
  table_.destroy = destroy;
  table_.get_version = get_version;
  table_.status_name = status_name;
  table_.matmul = matmul;
  table_.algo_heuristic = heuristic;
  table_.algo_get = algo_get;
  table_.desc_init = desc_init;
  table_.desc_set = desc_set;
  table_.layout_init = layout_init;
  table_.preference_init = preference_init;
  table_.preference_set = preference_set;
  set_cublaslt_for_testing(&table_);
}

FakeCublasLt::~FakeCublasLt() {
  set_cublaslt_for_testing(nullptr);
  g_fake_cublaslt = nullptr;
}

}  // namespace f8::runtime::testing
