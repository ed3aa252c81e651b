// cuBLASLt's table, answered by plain loops over column-major matrices in host memory: what a plan
// describes is what is computed, so layouts, transpositions and scales are tested without a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device/cublaslt_api.hpp"

namespace f8::runtime::testing {

class FakeCublasLt {
 public:
  FakeCublasLt();   // takes the library's place
  ~FakeCublasLt();  // and gives it back
  FakeCublasLt(const FakeCublasLt&) = delete;
  FakeCublasLt& operator=(const FakeCublasLt&) = delete;

  // A suggestion has these, by its place; one without is of an algorithm that nobody knows.
  struct Attributes {
    int32_t id = 0;
    uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
    uint16_t cluster = CUBLASLT_CLUSTER_SHAPE_AUTO;
    int32_t split_k = 1;
  };
  std::vector<Attributes> attributes;
  cublasStatus_t attribute_result = CUBLAS_STATUS_SUCCESS;
  int offers = 8;  // heuristics
  size_t workspace_bytes = 1 << 20;
  cublasStatus_t heuristic_result = CUBLAS_STATUS_SUCCESS;
  cublasStatus_t create_result = CUBLAS_STATUS_SUCCESS;
  cublasStatus_t matmul_result = CUBLAS_STATUS_SUCCESS;
  bool computes = true;  // false: GEMMs are counted alone

  int handles = 0;
  int matmuls = 0;
  int last_algo = -1;
  bool last_fast = false;
  size_t last_workspace_bytes = 0;
  uint64_t asked_workspace = 0;
  int asked_heuristics = 0;

 private:
  CublasLt table_;
};

}  // namespace f8::runtime::testing
