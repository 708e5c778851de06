// The kernels of attention, backward.

#include "attention_grad.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

// As in attention.cu.
#undef PYG_SCALE_BLOCKS
#define PYG_SCALE_BLOCKS 3
#define PYG_SCALE_GAT(T) PYG_SCALE_OF_LOADS(gat_grad, T, AttentionBackward, gat_grad_kernel, T)
PYG_SCALE_FOR_TYPES(PYG_SCALE_GAT)
#undef PYG_SCALE_BLOCKS
#define PYG_SCALE_BLOCKS 1

#define PYG_SCALE_LIST(T)                                                                         \
  PYG_SCALE_KERNEL(attention_mean_##T, AttentionBackward, attention_mean_kernel<T>)               \
  PYG_SCALE_OF_LOADS(gatv2_grad, T, AttentionBackward, destination_grad_kernel, T,                \
                     Attention::kGatv2)                                                           \
  PYG_SCALE_OF_LOADS(dot_grad, T, AttentionBackward, destination_grad_kernel, T, Attention::kDot) \
  PYG_SCALE_OF_LOADS(source_grad, T, AttentionBackward, source_grad_kernel, T)                    \
  PYG_SCALE_KERNEL(sum_segments_##T, SumSegments, sum_segments_kernel<T>)

PYG_SCALE_FOR_TYPES(PYG_SCALE_LIST)

}  // namespace pyg_scale::cuda
