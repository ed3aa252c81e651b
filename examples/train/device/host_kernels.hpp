// Plain loops compute what each kernel computes: they are the specification that the GPU test holds
// the kernels to, and they train where there is no GPU. Sums are taken in another order than the
// kernels', so the two agree to rounding and not to the bit.
#pragma once

#include "device/kernels/args.cuh"

namespace train::host {

void run(const SampleArgs& args);
void run(const EmbedArgs& args);
void run(const EmbedGradArgs& args);
void run(const NormArgs& args);
void run(const NormGradArgs& args);
void run(const SumRowsArgs& args);
void run(const GeluArgs& args);
void run(const GeluGradArgs& args);
void run(const LossArgs& args);
void run(const SquareSumArgs& args);
void run(const AdamArgs& args);
void run(const FinishArgs& args);
void run(const AddArgs& args);

}  // namespace train::host
