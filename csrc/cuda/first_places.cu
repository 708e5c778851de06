// The kernels of first_places.

#include "first_places.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(first_places_clear, FirstPlaces, first_places_clear_kernel)
PYG_SCALE_KERNEL(first_places_find, FirstPlaces, first_places_find_kernel)
PYG_SCALE_KERNEL(first_places_read, FirstPlaces, first_places_read_kernel)

}  // namespace pyg_scale::cuda
