#include "ranks/grad_sum.hpp"

#include "error.hpp"

namespace train {

void GradSum::add(float* grad, float* scratch, int64_t count, bool sharded, int64_t batch) {
  float* from = scratch;
  if (!rank_.is_alone()) {
    from = batch == 0 ? grad : sharded ? reduced_ : scratch;
    const auto elements = static_cast<size_t>(count);
    check(sharded ? rank_.communicator->reduce_scatter(scratch, from, elements, FLOAT8_F32,
                                                       backend_.stream())
                  : rank_.communicator->all_reduce(scratch, from, elements, FLOAT8_F32,
                                                   backend_.stream()));
  }
  if (batch > 0) backend_.launch(AddArgs{.from = from, .to = grad, .count = count});
}

}  // namespace train
