// The kernels of attention, forward.

#include "attention.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

// Waits for memory: more threads gain more than fewer registers cost.
#undef PYG_SCALE_BLOCKS
#define PYG_SCALE_BLOCKS 3
#define PYG_SCALE_GAT(T) \
  PYG_SCALE_OF_LOADS(attention_gat, T, AttentionForward, attention_kernel, T, Attention::kGat)
PYG_SCALE_FOR_TYPES(PYG_SCALE_GAT)
#undef PYG_SCALE_BLOCKS
#define PYG_SCALE_BLOCKS 1

#define PYG_SCALE_LIST(T)                                                                          \
  PYG_SCALE_OF_LOADS(attention_gatv2, T, AttentionForward, attention_kernel, T, Attention::kGatv2) \
  PYG_SCALE_OF_LOADS(attention_dot, T, AttentionForward, attention_kernel, T, Attention::kDot)     \
  PYG_SCALE_KERNEL(attention_fold_##T, AttentionForward, attention_fold_kernel<T>)                 \
  PYG_SCALE_KERNEL(attention_weights_##T, AttentionForward, attention_weights_kernel<T>)

PYG_SCALE_FOR_TYPES(PYG_SCALE_LIST)

}  // namespace pyg_scale::cuda
